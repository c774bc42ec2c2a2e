"""An out-of-memory error: the numbers in its text, and the facts at that time. Pure; all sizes are in bytes."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.memory.readings import MemoryGrowth, MemoryLine, MemoryReading, RankMemory
from lightning_gpu_tools.training.phases import OPTIMIZER, OUTSIDE_LOOP, VALIDATION, base_phase
from lightning_gpu_tools.training.run_measurements import HeldContext, RunMeasurements
from lightning_gpu_tools.units import MAX_BYTES, printable

Source = Literal["allocator", "library", "driver", "host"]

_SIZE = r"(\d+(?:\.\d*)?) (bytes|KiB|MiB|GiB|TiB)"  # numpy writes "182. TiB"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ROUNDING = 0.01  # sizes in texts have two decimals

# torch's c10/cuda/CUDACachingAllocator.cpp up to 2.15, CUDAMallocAsyncAllocator.cpp, c10/core/impl/alloc_cpu.cpp;
# numpy's _ArrayMemoryError. Any field may be missing.
_FIELDS = {
    "requested_bytes": rf"(?:[Tt]ried to allocate|Unable to allocate|[Aa]llocation of|Requested[\w ]*:) {_SIZE}",
    "total_bytes": rf"(?:total capacity of|Device limit\s*:) {_SIZE}",
    "free_bytes": rf"(?:of which|Free \(according to CUDA\):) {_SIZE}",
    "own_bytes": rf"this process has {_SIZE}",
    "allowed_bytes": rf"(?:memory fraction\)\s*: |(?=[\d.]+ \w+ allowed;)){_SIZE}",
    "allocated_bytes": rf"(?:Of the allocated memory|Currently allocated\s*:) {_SIZE}",
    "graph_pool_bytes": rf"with {_SIZE} allocated in private pools",
    "cached_bytes": rf"and {_SIZE} is reserved by PyTorch but unallocated",
}
_OTHER_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_WORKERS = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal: Killed)"
)


class _Kind(NamedTuple):
    pattern: str
    source: Source
    name: str
    is_certain: bool = True


# The first match counts.
_KINDS = (
    _Kind(r"(?:CUDA|HIP) out of memory|would exceed allowed memory", "allocator", "torch"),
    _Kind(r"CUBLAS_STATUS_ALLOC_FAILED", "library", "cuBLAS"),
    _Kind(r"CUDNN_STATUS_ALLOC_FAILED", "library", "cuDNN"),
    _Kind(r"(?i)nccl[\s\S]*out of memory|out of memory[\s\S]*nccl", "library", "NCCL"),
    # These can also mean a wrong index in an earlier kernel, or libraries that do not match.
    _Kind(r"CUBLAS_STATUS_NOT_INITIALIZED", "library", "cuBLAS", is_certain=False),
    _Kind(r"CUDNN_STATUS_NOT_INITIALIZED|valid cuDNN algorithm", "library", "cuDNN", is_certain=False),
    _Kind(r"handles_\.at\(i\)", "library", "CUDA", is_certain=False),
    _Kind(r"(?:CUDA(?: driver)?|Triton|HIP) [Ee]rror(?: \[CUDA\])?: out of memory", "driver", "CUDA"),
    # Other limits have similar texts, such as that on locked memory ("ibv_reg_mr failed: Cannot allocate memory").
    _Kind(
        r"DefaultCPUAllocator|Unable to allocate \S+ \w+ for an array|\[Errno 12\]|Cannot allocate memory \(12\)",
        "host",
        "the program",
    ),
    _Kind(_WORKERS.pattern, "host", "the program", is_certain=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryMessage:
    """The numbers in the text of an out-of-memory error; ``None`` = not in the text."""

    source: Source  # the library that ran out of GPU memory; "host": the host ran out of memory
    name: str  # of the requester, to print
    is_certain: bool = True  # the message has no other meaning
    requested_bytes: int | None = None  # on a GPU, the segment: 2 MiB for up to 1 MiB, 20 MiB for up to 10 MiB
    total_bytes: int | None = None
    free_bytes: int | None = None  # as the driver reports it
    own_bytes: int | None = None  # of this process, including memory that is not torch's
    others_bytes: Mapping[int, int] = field(default_factory=dict)  # by the driver's PID
    allowed_bytes: int | None = None  # by a limit on torch
    allocated_bytes: int | None = None  # in tensors
    graph_pool_bytes: int | None = None  # the part of it in pools of CUDA graphs, including free memory there
    cached_bytes: int | None = None  # kept by torch in addition
    workers: tuple[int, ...] = ()  # PIDs of the loader's workers that were killed


def out_of_memory(error: BaseException) -> OutOfMemoryMessage | None:
    """Return the out-of-memory message of an error, or of an error in its chain; ``None`` if there is none."""
    for one in _chain(error):
        text = str(one)
        classes = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(one).__mro__}
        if ("torch", "OutOfMemoryError") in classes:
            return parse(text) or OutOfMemoryMessage(source="allocator", name="torch")
        if isinstance(one, MemoryError):
            return parse(text) or OutOfMemoryMessage(source="host", name="the program")
        if isinstance(one, (ConnectionResetError, EOFError)):  # a worker exited while it sent a batch
            return OutOfMemoryMessage(source="host", name="the program", is_certain=False)
        # An error of the user's program may quote such a text, and one of a file may have its name.
        of_memory = one.errno in (None, errno.ENOMEM) if isinstance(one, OSError) else isinstance(one, RuntimeError)
        if of_memory and (found := parse(text)) is not None:
            return found
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def parse(text: str) -> OutOfMemoryMessage | None:
    """Return the out-of-memory message in the text of an error; ``None`` if there is none."""
    kind = next((kind for kind in _KINDS if re.search(kind.pattern, text)), None)
    if kind is None:
        return None
    sizes = {name: _size(re.search(pattern, text)) for name, pattern in _FIELDS.items()}
    others = {int(match[1]): size for match in _OTHER_PROCESS.finditer(text) if (size := _size(match)) is not None}
    if sizes["own_bytes"] is None and sizes["allocated_bytes"] is not None:
        # In a container, torch does not know its own PID.
        reserved = sizes["allocated_bytes"] + (sizes["cached_bytes"] or 0)
        large = [(size, pid) for pid, size in others.items() if size >= reserved * (1 - _ROUNDING)]
        if large:
            sizes["own_bytes"], own_pid = min(large)
            del others[own_pid]
    workers = _WORKERS.search(text)
    return OutOfMemoryMessage(
        source=kind.source,
        name=kind.name,
        is_certain=kind.is_certain,
        others_bytes=others,
        workers=() if workers is None else tuple(map(int, workers[1].split(","))),
        **sizes,
    )


def _size(match: re.Match[str] | None) -> int | None:
    """Return the size at the end of a match; ``None`` for 2^64, which is NVML's "not available"."""
    if match is None:
        return None
    number, unit = match.groups()[-2:]
    size = float(number) * _UNITS[unit]
    return int(size) if size < MAX_BYTES / 2 else None  # the text is rounded


LOADING_CHECKPOINT = "loading_checkpoint"
SETUP = "setup"
CUDA_CONTEXT_BYTES = 3 * 2**30 // 10  # 0.3 GiB: pytorch issue 107667
CONTEXT_BYTES = 2**30  # if not reported: a CUDA context, and NCCL's 0.7 GB (nccl issue 964)
MIN_SHARE = 0.10  # our default: the smallest share of the memory that can be a cause
_MIN_UNLISTED = 0.10  # our default: from this share of the GPU, memory without an owner belongs to other processes
_NEARLY_FULL = 0.05  # our default: below this share of free memory, an ambiguous message counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The memory that a model needs on one GPU, without its batch."""

    parameters_bytes: int = 0  # with buffers
    gradients_bytes: int = 0
    optimizer_bytes: int = 0  # states, which come with the optimizer's first step
    fusible: tuple[str, ...] = ()  # names of optimizers that need less with fused=True

    @property
    def total_bytes(self) -> int:
        """The sum of all three."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """An out-of-memory error that ended a run, and the facts at that time; ``None`` = unknown."""

    message: OutOfMemoryMessage
    phase: str  # of the training thread, as in phase_s, or SETUP or LOADING_CHECKPOINT
    step: int  # of the Trainer, or the batch of a loop
    rank: int = 0
    reading: MemoryReading | None = None  # when torch's allocator failed
    grad_enabled: bool | None = None
    batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch
    batch_bytes: int = 0  # of a batch on the GPU when its step, or its part of validation, began
    usual_items: float | None = None  # the median count of elements in it
    memory: RankMemory | None = None
    begins: Sequence[tuple[float, float]] = ()  # (step, bytes in tensors) when steps began, oldest first
    validation_begins: Sequence[tuple[float, float]] = ()  # (batch, bytes) in this validation
    asked: MemoryLine | None = None  # the line that asked for more
    lines: tuple[MemoryLine, ...] = ()  # of the recorded blocks in use at that time
    model: ModelSize = ModelSize()  # with 0 for unknown sizes
    allocator: str = ""  # torch's settings, as the environment sets them: "PYTORCH_ALLOC_CONF=..."; empty if unknown
    uuid: str | None = None  # of the GPU
    gpus: tuple[GpuReading, ...] = ()  # of the machine, read after the error
    pid: int | None = None  # this process, with the driver's PID
    orphans: tuple[int, ...] = ()  # processes on this GPU whose parent has ended
    is_sharded: bool = False  # over the ranks
    growth: tuple[MemoryGrowth, ...] = ()
    contexts: tuple[HeldContext, ...] = ()  # of all ranks
    oom_kills: int = 0  # by the kernel, on this machine, during the run

    @property
    def place(self) -> str:
        """The phase as text."""
        names = {SETUP: "the setup", LOADING_CHECKPOINT: "loading a checkpoint", OPTIMIZER: "the optimizer"}
        names[OUTSIDE_LOOP] = "code outside the loop"
        group, _, part = self.phase.partition("/")
        return names.get(self.phase) or printable(part or group.replace("_", " "))

    @property
    def gpu(self) -> GpuReading | None:
        """This GPU, read after the error."""
        return next((gpu for gpu in self.gpus if gpu.uuid is not None and gpu.uuid == self.uuid), None)

    @property
    def total_bytes(self) -> int | None:
        """Size of the GPU's memory."""
        return self.message.total_bytes or (None if self.gpu is None else self.gpu.memory_total_bytes)

    @property
    def free_bytes(self) -> int | None:
        """The free part of the GPU's memory."""
        on_gpu = None if self.gpu is None else self.gpu.memory_free_bytes
        return on_gpu if self.message.free_bytes is None else self.message.free_bytes

    @property
    def allocated_bytes(self) -> int | None:
        """The memory in tensors."""
        return self.message.allocated_bytes if self.reading is None else self.reading.allocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """The memory that torch had reserved."""
        if self.reading is not None:
            return self.reading.reserved_bytes
        allocated = self.message.allocated_bytes
        return None if allocated is None else allocated + (self.message.cached_bytes or 0)

    @property
    def requested_bytes(self) -> int:
        """The size that could not be allocated; 0 if the message does not include it."""
        return self.message.requested_bytes or 0

    @property
    def wanted_bytes(self) -> int:
        """The memory that tensors would have taken with this allocation."""
        return (self.allocated_bytes or 0) + self.requested_bytes

    @property
    def room_bytes(self) -> int | None:
        """The most GPU memory that torch could have."""
        if self.reserved_bytes is None or self.free_bytes is None:
            return self.message.allowed_bytes
        left = self.reserved_bytes + self.free_bytes
        return min(left, self.message.allowed_bytes or left)

    @property
    def _listed(self) -> tuple[GpuProcess, ...]:
        return (None if self.gpu is None else self.gpu.processes) or ()

    @property
    def others(self) -> tuple[GpuProcess, ...]:
        """Other processes on the GPU, the largest first."""
        foreign = {one.pid for one in self._listed if one.is_foreign}
        sizes = self.message.others_bytes.items()
        found = [GpuProcess(pid=pid, memory_used_bytes=size, is_foreign=pid in foreign) for pid, size in sizes]
        if self._listed and self.pid is not None:
            found = [one for one in self._listed if one.pid != self.pid]
        return tuple(sorted(found, key=lambda one: -(one.memory_used_bytes or 0)))

    @property
    def unlisted_bytes(self) -> int:
        """Memory of processes that the driver does not list here, such as other containers'; 0 if negligible."""
        total, free, reserved = self.total_bytes, self.free_bytes, self.reserved_bytes
        if total is None or free is None or reserved is None:
            return 0
        now = sum(one.memory_used_bytes or 0 for one in self._listed if one.pid == self.pid)
        own = self.message.own_bytes or max(reserved + CONTEXT_BYTES, now)
        left = total - free - own - sum(one.memory_used_bytes or 0 for one in self.others)
        return left if left >= _MIN_UNLISTED * total else 0

    @property
    def others_bytes(self) -> int:
        """All known memory of other processes."""
        return sum(one.memory_used_bytes or 0 for one in self.others) + self.unlisted_bytes

    @property
    def is_pool_of_driver(self) -> bool:
        """Whether torch allocates with cudaMallocAsync, from a pool of the driver."""
        return "backend:cudaMallocAsync" in self.allocator

    @property
    def has_completed_steps(self) -> bool:
        """Whether the optimizer has completed a step before."""
        return self.memory is not None and self.memory.first_step is not None

    @property
    def has_completed_full_steps(self) -> bool:
        """Whether a step has completed that began with the optimizer's states and old gradients."""
        memory = self.memory
        return (
            memory is not None
            and memory.first_step is not None
            and memory.last_step is not None
            and memory.last_step.step > memory.first_step.step
        )

    @property
    def begin_bytes(self) -> int | None:
        """The size of all tensors when this step or validation batch began, with its batch.

        If the batches of validation are unknown, when the last step began.
        """
        is_validation = base_phase(self.phase) == VALIDATION
        begins = (is_validation and self.validation_begins) or self.begins
        return int(begins[-1][1]) if begins else None

    @property
    def usual_step_bytes(self) -> int:
        """The most memory that a step has added to the memory at its start; 0 if unknown."""
        memory, last = self.memory, None if self.memory is None else self.memory.last_step
        if memory is None or last is None or not self.has_completed_full_steps:
            return 0
        begin = last.readings["begin"].allocated_bytes
        peaks = [size for phase, size in memory.peaks_bytes.items() if phase not in ("before_training", VALIDATION)]
        return max(
            max(reading.allocated_bytes for reading in last.readings.values()) - begin,
            max(peaks, default=begin) - begin,
            last.added_bytes,
        )

    @property
    def kept_bytes(self) -> int:
        """The part of ``begin_bytes`` that does not belong to the model; 0 if unknown."""
        return max(0, (self.begin_bytes or 0) - self.model.total_bytes) if self.model.total_bytes else 0


class MemoryFacts(NamedTuple):
    """An out-of-memory error and the run that it ended."""

    run: RunMeasurements
    oom: OutOfMemory


def is_out_of_memory(oom: OutOfMemory) -> bool:
    """Return whether memory was short, even if the message is ambiguous."""
    if oom.message.is_certain:
        return True
    if oom.message.source == "host":
        return oom.oom_kills > 0
    return oom.total_bytes is not None and (oom.free_bytes or 0) < _NEARLY_FULL * oom.total_bytes
