"""torch's allocator on a GPU, simulated below torch's own counters: what tensors hold on the CPU counts as on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# As torch's caching allocator: sizes are rounded up to blocks, and the driver is asked for whole segments.
_BLOCK_BYTES, _SEGMENT_BYTES = 512, 2 * 2**20


class SimulatedMemory(TorchDispatchMode):
    """Counts the memory of the tensors that come into being while it is entered.

    Attributes:
        allocated_bytes: In tensors.
        peak_bytes: The most so far.
        reserved_bytes: What was taken from the driver.
        inactive_split_bytes: What it says of free parts of segments.
        reads: How often it was asked for the counters.
        fault: What it raises then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated_bytes = self.peak_bytes = self.reserved_bytes = self.inactive_split_bytes = self.reads = 0
        self.fault: Exception | None = None
        self._held: set[int] = set()

    def install(self, set_attribute: Callable[..., None]) -> None:
        """Be what torch asks for the counters of its allocator."""
        set_attribute(torch._C, "_cuda_memoryStats", self._stats, raising=False)  # not there without CUDA
        set_attribute(torch._C, "_cuda_emptyCache", self._empty_cache, raising=False)
        set_attribute(torch.cuda.memory, "is_initialized", lambda: True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._hold(value.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._held:
            return
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._held.add(storage._cdata)
        weakref.finalize(storage, self._free, storage._cdata, size).atexit = False
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, self._segments())

    def _segments(self) -> int:
        return -(-self.allocated_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES

    def _empty_cache(self) -> None:
        self.reserved_bytes = self._segments()

    def _free(self, storage: int, size: int) -> None:
        self._held.discard(storage)
        self.allocated_bytes -= size

    def _stats(self, device: int) -> dict[str, Any]:
        self.reads += 1
        if self.fault is not None:
            raise self.fault

        def of(current: int, peak: int) -> dict[str, dict[str, int]]:
            return {"all": {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}}

        return {
            "allocated_bytes": of(self.allocated_bytes, self.peak_bytes),
            "reserved_bytes": of(self.reserved_bytes, self.reserved_bytes),
            "inactive_split_bytes": of(self.inactive_split_bytes, self.inactive_split_bytes),
            "num_alloc_retries": 0,
        }
