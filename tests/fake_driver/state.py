"""The fake machine as data, and the file in which the driver finds it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import uuid as uuids
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fake_driver.library import CALLS_VARIABLE, VARIABLE
from lightning_gpu_tools.units import parse_bytes

GIB = 2**30

# A quantity over time: a number, or segments (start, value), each of which holds until the next one. Starts are seconds
# after `Driver.start_s`; before the first segment the value is 0. `None` = this GPU does not report it.
Series = float | list[tuple[float, float]] | None


def size_bytes(size: int | str | None) -> int | None:
    """``"21GiB"`` -> bytes; numbers and None stay."""
    return None if size is None else parse_bytes(size)


@dataclass
class Process:
    pid: int
    memory: int | None = None  # None: the driver does not report it, as under Windows' WDDM
    graphics: bool = False
    sm: int | None = None  # its own utilization in percent, for nvmlDeviceGetProcessUtilization
    gpu_instance: int | None = None  # the MIG instance in which it runs


def process(pid: int | None = None, memory: int | str | None = "1GiB", **fields: Any) -> Process:
    """A process on a GPU; without a pid it is this very process."""
    return Process(pid=os.getpid() if pid is None else pid, memory=size_bytes(memory), **fields)


@dataclass
class MigInstance:
    uuid: str | None = None
    gpu_instance: int = 0
    profile: str = "1g.10gb"
    memory_total: int | None = 10 * GIB
    memory_free: int | None = 10 * GIB
    gpm: dict[str, Series] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def mig(
    uuid: str | None = None, memory_total: int | str = "10GiB", memory_free: int | str | None = None, **fields: Any
) -> MigInstance:
    """A MIG instance, empty by default."""
    free = memory_total if memory_free is None else memory_free
    return MigInstance(uuid=uuid, memory_total=size_bytes(memory_total), memory_free=size_bytes(free), **fields)


@dataclass
class Gpu:
    """One GPU. Fields that are None are what this GPU answers NOT_SUPPORTED to. Assigning to one writes the file."""

    uuid: str | None = None  # filled in by the Driver: always the same for the same position
    pci: tuple[int, int, int] | None = None  # domain, bus, device; filled in likewise, rising
    name: str = "NVIDIA H200"
    memory_total: int | None = 80 * GIB
    memory_free: int | None = 80 * GIB
    # Percent over time. The driver keeps one sample for each period, with the mean over that period.
    utilization: Series = 0.0
    sample_period_s: float = 1 / 6
    sample_depth: int = 120
    samples: list[tuple[float, float]] | None = None  # (seconds since the epoch, value): instead of `utilization`
    utilization_rate: int | None = None  # the instantaneous reading, where it shall differ from the last sample
    processes: list[Process] | None = field(default_factory=list)
    compute_mode: str | None = "default"  # prohibited, exclusive_process
    compute_capability: tuple[int, int] | None = None  # filled in from the name
    mig_capable: bool = True
    mig: list[MigInstance | None] | None = None  # a list, also an empty one: MIG mode is on; None: an empty slot
    numa_node: int | None = 0
    power_watts: Series = 100.0
    throttled_power: Series = 0.0  # fraction of the time, 0 to 1
    throttled_thermal: Series = 0.0
    pcie_tx_bytes_per_second: Series = 0.0
    pcie_rx_bytes_per_second: Series = 0.0
    answers: dict[str, float | None] = field(default_factory=dict)  # C function -> instead of that in NUMBERS
    field_values: dict[str, Any] = field(default_factory=dict)  # field id -> number, error name, or {"type": number}
    # GPM: metric id -> percent (or MiB/s) over time; None: the GPU has no GPM (Ampere and older)
    gpm: dict[str, Series] | None = None
    xid_events: list[tuple[float, int]] = field(default_factory=list)  # (seconds after start_s, Xid)
    # C function, with or without its version suffix, -> error name; "*" for every function that takes a handle
    errors: dict[str, str] = field(default_factory=dict)
    lost: bool = False  # fell off the bus: like errors={"*": "GPU_IS_LOST"}
    hangs: str | None = None  # this C function does not return until the state says otherwise
    closed: bool = False  # only its MIG instances are given to this container: its own state may not be read

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "_driver" in vars(self):
            vars(self)["_driver"]._write()


def gpu(memory_free: int | str | None = None, memory_total: int | str | None = "80GiB", **fields: Any) -> Gpu:
    """A GPU of 80 GiB, empty and idle by default. ``memory_total=None``: the driver does not report memory."""
    free = memory_total if memory_free is None else memory_free
    gpm = fields.get("gpm")
    if gpm is not None:
        fields["gpm"] = {str(metric): series for metric, series in gpm.items()}
    return Gpu(memory_total=size_bytes(memory_total), memory_free=size_bytes(free), **fields)


class Call(NamedTuple):
    pid: int
    function: str  # the name in the C library
    uuid: str | None
    thread: str  # the name of the thread that called


class Driver:
    """The machine. Assigning to a field of it or of one of its GPUs writes the file at once."""

    def __init__(self, folder: Path) -> None:
        self._path = Path(folder) / "nvidia_driver.json"
        self._calls = Path(folder) / "nvidia_driver_calls.log"
        self._calls.touch()
        self._is_changing = True
        self.gpus: list[Gpu] = []
        self.nvlinks: list[tuple[int, int]] = []  # positions in `gpus`
        self.library_missing = False
        self.init_error: str | None = None  # for example DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, NO_PERMISSION
        self.missing_functions: list[str] = []  # what an older driver does not have
        self.errors: dict[str, str] = {}  # C function -> error name, for every GPU
        self.hangs: str | None = None  # a C function without a device that does not return
        self.start_s = 0.0  # where the segments of a Series begin, and the counters
        self.now_s: float | None = None  # None: the clock of the system; a number: time stands still at it
        self._is_changing = False
        self._write()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not name.startswith("_"):
            self._write()

    @contextlib.contextmanager
    def change(self) -> Iterator[Driver]:
        """Change anything inside; all of it becomes visible at once at the end."""
        self._is_changing = True
        yield self
        self._is_changing = False
        self._write()

    def freeze(self) -> None:
        """Stop the driver's clock at the present; its quantities began 100 s ago."""
        self.now_s = time.time()
        self.start_s = self.now_s - 100.0

    def advance(self, seconds: float) -> None:
        """Let time pass for a driver whose clock stands still."""
        assert self.now_s is not None, "freeze it first"
        self.now_s += seconds

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a child process sees this driver."""
        site = str(Path(__file__).parent / "site")
        # This tree's package comes first, whatever is installed.
        path = [site, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
        return {
            VARIABLE: str(self._path),
            CALLS_VARIABLE: str(self._calls),
            "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
        }

    def calls(self) -> list[Call]:
        """Every call of a C function since the last ``forget_calls()``, from all processes."""
        lines = self._calls.read_text().splitlines()
        return [
            Call(int(pid), function, uuid or None, thread)
            for pid, function, uuid, thread in (line.split(" ", 3) for line in lines)
        ]

    def stays_open(self) -> bool:
        """Return whether the driver was opened and stayed open until it was closed for good."""
        opened, closings = 0, 0
        for call in self.calls():
            opened += call.function.startswith("nvmlInit")
            opened -= call.function == "nvmlShutdown"
            closings += call.function == "nvmlShutdown" and opened == 0
        return closings == 1 and opened == 0

    def forget_calls(self) -> None:
        os.truncate(self._calls, 0)

    def _write(self) -> None:
        if self._is_changing:
            return
        for position, card in enumerate(self.gpus):
            card.__dict__.update(
                _driver=self,
                uuid=card.uuid or f"GPU-{uuids.uuid5(uuids.NAMESPACE_OID, str(position))}",
                pci=card.pci or (position // 15, 16 * (position % 15 + 1), 0),
                compute_capability=card.compute_capability or _capability(card.name),
                # May have been assigned as text.
                memory_total=size_bytes(card.memory_total),
                memory_free=size_bytes(card.memory_free),
            )
            for slot, instance in enumerate(card.mig or []):
                if instance is not None:
                    instance.uuid = instance.uuid or f"MIG-{uuids.uuid5(uuids.NAMESPACE_OID, f'{card.uuid}/{slot}')}"
                    instance.gpu_instance = instance.gpu_instance or slot + 1
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**state, "gpus": [dataclasses.asdict(card) for card in self.gpus]}))
        os.replace(temporary, self._path)


def _capability(name: str) -> tuple[int, int]:
    # Of cards that torch no longer supports: https://developer.nvidia.com/cuda-legacy-gpus
    return next((version for part, version in {"GT 710": (3, 5), "K80": (3, 7)}.items() if part in name), (9, 0))
