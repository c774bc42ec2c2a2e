"""A GPU whose memory runs out: torch's caching allocator, simulated below a real Trainer that computes on the CPU."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import cpu_as_cuda
import fake_driver
import torch
from fake_driver import Driver, gpu, process
from out_of_memory_texts import torch_text
from simulated_gpu import SimulatedGpu
from simulated_memory import SimulatedMemory
from trainings import HandClock

from lightning_gpu_tools.gpus import nvml

# Everything is 1024 times smaller than on a GPU: where it has 4 GiB, this one has 4 MiB.
UNIT = 1024
# c10/cuda/CUDACachingAllocator.cpp: what is small, the segments that are asked for, and when the rest of a block is
# split off.
_SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT, _ROUND_LARGE = UNIT, 2 * UNIT, 10 * UNIT, 20 * UNIT, 2 * UNIT
# A process has one allocator, and what is attached to it stays.
_observers: list[Callable[[int, int, int, int], None]] = []


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to


class _Block:
    """A part of a segment, in a list that the segment's blocks share, in order."""

    def __init__(self, segment: list[_Block], size: int, pool: set[_Block]) -> None:
        self.segment, self.size, self.pool = segment, size, pool
        pool.add(self)

    @property
    def is_free(self) -> bool:
        """Whether it is in the pool of free blocks of its kind."""
        return self in self.pool


class LimitedMemory(SimulatedMemory):
    """The memory of one GPU of which others and CUDA take a part.

    Args:
        total: Size of the memory in bytes, as all that follows.
        context: What CUDA takes for this process.
        others: What each other process uses, by its number; may be changed while a training runs.
        allowed: What torch is allowed to use, by ``set_per_process_memory_fraction``.

    Attributes:
        retries: How often the cache was emptied to try again.
    """

    def __init__(
        self,
        total: int = 4096 * UNIT,
        *,
        context: int = 300 * UNIT,
        others: dict[int, int] | None = None,
        allowed: int | None = None,
    ) -> None:
        super().__init__()
        self.total, self.context, self.others, self.allowed = total, context, others or {}, allowed
        self.retries = 0
        self._segments: list[list[_Block]] = []
        self._free_blocks: dict[bool, set[_Block]] = {True: set(), False: set()}  # small, large
        self._driver: Driver | None = None

    # The GPU

    @property
    def free(self) -> int:
        """What the driver has left."""
        return max(0, self.total - self.context - self.reserved_bytes - sum(self.others.values()))

    @contextmanager
    def gpu(self, driver: Driver, set_attribute: Callable[..., None], spare_gpus: int = 0) -> Iterator[None]:
        """Be GPU 0 of a machine; the others are free and twice as large."""
        self._driver = driver
        driver.gpus = [
            gpu(memory_total=self.total, utilization=90.0),
            *(gpu(memory_total=2 * self.total) for _ in range(spare_gpus)),
        ]
        self._tell_driver()
        cpu_as_cuda.install(set_attribute)
        uuid = str(driver.gpus[0].uuid).removeprefix("GPU-")
        properties = SimpleNamespace(uuid=uuid, name="Simulated GPU", total_memory=self.total, major=8, minor=0)
        set_attribute(torch.cuda, "get_device_properties", lambda device: properties)
        SimulatedGpu(HandClock()).install(set_attribute)
        self.install(set_attribute)
        set_attribute(torch._C, "_cuda_attach_out_of_memory_observer", _observers.append, raising=False)
        set_attribute(torch.cuda, "empty_cache", self.flush)
        set_attribute(nvml, "pids_are_ours", lambda: True)
        cpu_as_cuda.start()
        with self:
            yield

    def _tell_driver(self) -> None:
        assert self._driver is not None
        own = self.context + self.reserved_bytes
        listed = [process(memory=own), *(process(pid, size) for pid, size in self.others.items())]
        with self._driver.change():
            self._driver.gpus[0].memory_free, self._driver.gpus[0].processes = self.free, listed

    # The allocator

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._held or not storage.nbytes():
            return
        block = self._allocate(storage.nbytes())
        self._held.add(storage._cdata)
        weakref.finalize(storage, self._release, storage._cdata, block).atexit = False

    def _allocate(self, size: int) -> _Block:
        small = size <= _SMALL
        block = self._best(size, small)
        if block is None:
            segment_size = (
                _SMALL_SEGMENT if small else _MIDDLE_SEGMENT if size < _MIDDLE else _round_up(size, _ROUND_LARGE)
            )
            if not self._grow(segment_size, small):
                self.retries += 1
                self.flush()
                if not self._grow(segment_size, small):
                    self._fail(segment_size)
            block = self._best(size, small)
            assert block is not None
        rest = block.size - size
        if rest > 0 if small else rest > _SMALL:
            block.size = size
            place = block.segment.index(block)
            block.segment.insert(place + 1, _Block(block.segment, rest, block.pool))
        block.pool.remove(block)
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def _best(self, size: int, small: bool) -> _Block | None:
        blocks = (one for one in self._free_blocks[small] if one.size >= size)
        return min(blocks, key=lambda one: one.size, default=None)

    def _grow(self, size: int, small: bool) -> bool:
        if size > self.free or (self.allowed is not None and self.reserved_bytes + size > self.allowed):
            return False
        segment: list[_Block] = []
        segment.append(_Block(segment, size, self._free_blocks[small]))
        self._segments.append(segment)
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    peak_reserved_bytes = 0

    def flush(self) -> None:
        """Give back to the driver what has no tensor in it, as ``torch.cuda.empty_cache`` does."""
        for segment in [one for one in self._segments if len(one) == 1 and one[0].is_free]:
            self._segments.remove(segment)
            segment[0].pool.remove(segment[0])
            self.reserved_bytes -= segment[0].size

    def _release(self, storage: int, block: _Block) -> None:
        self._held.discard(storage)
        self.allocated_bytes -= block.size
        block.pool.add(block)
        segment, place = block.segment, block.segment.index(block)
        for left, right in ((place, place + 1), (place - 1, place)):
            if left >= 0 and right < len(segment) and segment[left].is_free and segment[right].is_free:
                segment[left].size += segment[right].size
                segment[right].pool.remove(segment[right])
                del segment[right]

    def _fail(self, segment_size: int) -> None:
        self._tell_driver()
        for observer in _observers:
            observer(0, segment_size, self.allowed or self.total, self.free)
        raise torch.OutOfMemoryError(
            torch_text(
                segment_size,
                self.total,
                self.free,
                self.allocated_bytes,
                self.reserved_bytes - self.allocated_bytes,
                self.context + self.reserved_bytes,
                self.others,
                self.allowed,
            )
        )

    def ask_driver(self, size: int, error: str) -> None:
        """Be a library that asks the driver for memory, and fails with these words."""
        if size > self.free:
            self._tell_driver()
            raise RuntimeError(error)

    def _stats(self, device: int) -> dict[str, Any]:
        pieces = [segment for segment in self._segments if len(segment) > 1]
        self.inactive_split_bytes = sum(one.size for segment in pieces for one in segment if one.is_free)
        stats = super()._stats(device)
        stats["reserved_bytes"]["all"]["peak"] = self.peak_reserved_bytes
        return {**stats, "num_alloc_retries": self.retries}


@contextmanager
def limited_gpu(
    memory: LimitedMemory, folder: Any, set_attribute: Callable[..., None], spare_gpus: int = 0
) -> Iterator[None]:
    """Be a machine with this GPU in a script; a test has the fixture ``driver``."""
    machine = Driver(folder)
    os.environ.update(machine.variables())
    fake_driver.install()
    try:
        with memory.gpu(machine, set_attribute, spare_gpus):
            yield
    finally:
        fake_driver.uninstall()
