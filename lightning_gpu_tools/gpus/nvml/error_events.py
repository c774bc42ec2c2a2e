"""The errors that a GPU reports: Xid events."""

from __future__ import annotations

from typing import Any

import pynvml

from lightning_gpu_tools.gpus.nvml.calls import tolerate

# The more frequent ones, in the words of https://docs.nvidia.com/deploy/xid-errors/
_XID_MEANS = {
    13: "graphics engine exception, usually a bug in the program",
    31: "memory page fault, usually a bug in the program",
    43: "the GPU has stopped processing",
    45: "preemptive cleanup, due to earlier errors",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "ECC page retirement or row remapping recorded",
    64: "ECC page retirement or row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor (GSP) does not answer",
    120: "error of the GPU's system processor (GSP)",
}

_OTHER_XID = "see NVIDIA's Xid catalog"

_MAX_PER_READ = 16  # the others wait for the next read


class ErrorEvents:
    """The Xid events of one GPU since the last read."""

    def __init__(self) -> None:
        self._event_set: Any = None

    def start(self, handle: Any) -> None:
        """Collect from now on; ``NVMLError`` if the GPU reports none, or not to this user."""
        self.close()
        self._event_set = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._event_set)
        except pynvml.NVMLError:
            self.close()
            raise

    def read(self) -> list[str]:
        """Return what has happened, in words, also of a GPU that has just been lost."""
        found: list[str] = []
        for _ in range(_MAX_PER_READ):
            event = tolerate(pynvml.nvmlEventSetWait_v2, self._event_set, 0)
            if event is None:  # a timeout: there is none
                break
            found.append(f"Xid {event.eventData} ({_XID_MEANS.get(event.eventData, _OTHER_XID)})")
        return found

    def close(self) -> None:
        """Give everything back to the driver."""
        tolerate(pynvml.nvmlEventSetFree, self._event_set)
        self._event_set = None
