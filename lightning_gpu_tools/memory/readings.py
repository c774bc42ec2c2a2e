"""Memory readings of one rank, memory that has grown, and an out-of-memory error. Plain data, always in bytes."""

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.gpus.metrics import GpuSample
from lightning_gpu_tools.gpus.readings import GpuProcess, GpuReading
from lightning_gpu_tools.training.phases import UNEXPLAINED, VALIDATION, base_phase
from lightning_gpu_tools.units import MAX_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """The counters of torch's allocator for one GPU at one moment, or those in an error. 0 = unknown."""

    allocated_bytes: int  # in tensors
    reserved_bytes: int  # held by the allocator: tensors and its cache
    peak_allocated_bytes: int = 0  # until it is reset
    peak_reserved_bytes: int = 0  # until it is reset
    # Free parts of blocks, which cannot be returned to the driver; 0 with expandable segments and cudaMallocAsync.
    inactive_split_bytes: int = 0
    inactive_splits: int = 0  # number of these parts
    retries: int = 0  # allocations retried after the allocator emptied its cache
    allocations: int = 0  # number of tensors allocated so far


_UNREAD = MemoryReading(allocated_bytes=0, reserved_bytes=0)


Stack = Sequence[Mapping[str, Any]]  # as torch records it, innermost frame first


class Block(NamedTuple):
    """A block of torch's allocator: allocated, released, or listed in a segment."""

    address: int
    size: int  # in bytes, in a segment of the whole block, else as requested; negative for a release
    grows: bool = False  # with the batch
    phase: str = ""
    stack: Stack = ()  # of its allocation; empty if it was not recorded, or no Python ran
    is_free: bool = False
    is_small: bool = False  # in a segment for blocks of up to 1 MiB


Segment = tuple[Block, ...]  # memory that the allocator has taken from the driver: its blocks from end to end


class MemoryLine(NamedTuple):
    """A source line, and the GPU memory that was allocated there."""

    bytes: int
    blocks: int
    phase: str = ""  # forward, backward or optimizer; empty if unknown
    file: str = ""  # empty where no Python ran, as in backward
    line: int = 0
    function: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The memory of one training step."""

    step: int  # by the step clock, starting at 1
    batch_shape: tuple[int, ...] = ()  # of the first tensor of the batch; empty if unknown
    begin: MemoryReading = _UNREAD  # includes the batch and, with a Trainer, the old gradients
    middle: MemoryReading = _UNREAD  # before the first backward, if there is one
    end: MemoryReading = _UNREAD  # after the optimizer
    # By its own allocations, at their peak and at that of forward; else by those of the last step that was recorded.
    added_bytes: int = 0
    forward_bytes: int = 0
    # For a replay, not sent to other ranks:
    segments: tuple[Segment, ...] = ()  # when the step began, if it is the first one recorded
    events: tuple[Block, ...] = ()  # its allocations and releases, without stacks


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryHoldings:
    """The memory that training holds on this rank's GPU across steps: only own shards, and shared storage once."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0  # after the first backward
    gradients_kept_bytes: int = 0  # the part that remains at the end of the step
    gradient_buckets_bytes: int = 0  # DistributedDataParallel's copies; 0 with gradient_as_bucket_view=True
    optimizer_bytes: int = 0  # including master weights
    buffers_bytes: int = 0
    workspaces_bytes: int = 0  # of cuBLAS, allocated by torch for each of its handles and streams

    @property
    def model_bytes(self) -> int:
        """The model with its gradients and optimizer states."""
        return self.parameters_bytes + self.buffers_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def between_steps_bytes(self) -> int:
        """The part that remains between two steps."""
        kept_bytes = self.gradients_kept_bytes + self.gradient_buckets_bytes + self.workspaces_bytes
        return self.model_bytes - self.gradients_bytes + kept_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The GPU memory of one rank over a run."""

    latest: MemoryReading = _UNREAD
    gpu: tuple[int, int, str] = (0, 0, "")  # on which it trains: node, index and UUID
    samples: tuple[GpuSample, ...] = ()  # of the GPUs of its node, if this rank polls the driver
    own_pids: tuple[int, ...] | None = None  # the driver's PIDs of this job on its node, as far as known
    kept_bytes: int = 0  # in tensors when the last step began, if memory ran out in it; else 0
    before_training: MemoryReading | None = None
    earlier_bytes: int = 0  # in tensors that existed before training and are not the model's or the optimizer's
    holdings: MemoryHoldings | None = None  # None before the optimizer's first step
    first_step: StepMemory | None = None  # with the optimizer's first step
    last_step: StepMemory | None = None  # the last step read to its end
    # For a replay: the first step, the optimizer's first, and the first with its states and old gradients. The first
    # two may be the same step, and the third may not exist yet. Empty if unknown.
    recorded: tuple[StepMemory, ...] = ()
    room_bytes: int = 0  # the most that torch could use next to other processes; 0 = unknown
    # The ten lines with the most memory: at the peak of the last recorded step, and left by earlier recorded steps.
    peak_lines: tuple[MemoryLine, ...] = ()
    kept_lines: tuple[MemoryLine, ...] = ()
    peak_phase: str = ""  # of the last recorded step, in which it reached its peak; empty if unknown
    # Peak of memory in tensors, by where it rose: before_training, training or validation.
    peaks_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The peak of memory in tensors, even if torch's own peak was reset since."""
        return max([self.latest.peak_allocated_bytes, *self.peaks_bytes.values()])


# gpu: in tensors at the start of steps; process: host memory of the training process; workers: memory of all workers of
# the loader together, without the part that they share.
Whose = Literal["gpu", "process", "workers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGrowth:
    """Memory that grew steadily over a run."""

    whose: Whose
    bytes_per_s: float
    grown_bytes: float  # growth after the first fifth of the run
    left_s: float | None = None  # seconds until memory is full at this rate; None if the limit is unknown


# Phases of an error, in addition to those of the clock.
LOADING_CHECKPOINT = "loading_checkpoint"
SETUP = "setup"

Source = Literal["allocator", "library", "driver", "host"]

_SIZE = r"(\d+(?:\.\d*)?) (bytes|KiB|MiB|GiB|TiB)"  # numpy writes "182. TiB"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ROUNDING = 0.01  # sizes in texts have two decimals

# torch's c10/cuda/CUDACachingAllocator.cpp up to 2.15, CUDAMallocAsyncAllocator.cpp, c10/core/impl/alloc_cpu.cpp;
# numpy's _ArrayMemoryError. Any field may be missing. The last two are those of a reading, all others of OutOfMemory.
_FIELDS = {
    "requested_bytes": rf"(?:[Tt]ried to allocate|Unable to allocate|[Aa]llocation of|Requested[\w ]*:) {_SIZE}",
    "total_bytes": rf"(?:total capacity of|Device limit\s*:) {_SIZE}",
    "free_bytes": rf"(?:of which|Free \(according to CUDA\):) {_SIZE}",
    "own_bytes": rf"this process has {_SIZE}",
    "allowed_bytes": rf"(?:memory fraction\)\s*: |(?=[\d.]+ \w+ allowed;)){_SIZE}",
    "graph_pool_bytes": rf"with {_SIZE} allocated in private pools",
    "allocated_bytes": rf"(?:Of the allocated memory|Currently allocated\s*:) {_SIZE}",
    "cached_bytes": rf"and {_SIZE} is reserved by PyTorch but unallocated",
}
_OTHER_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_WORKERS = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal: Killed)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """An out-of-memory error, and the facts at that time; ``None`` = unknown."""

    # In its text. Without them there, the driver's sizes for this GPU, read after the error:
    source: Source = "allocator"  # the library that ran out of GPU memory; "host": the host ran out of memory
    name: str = "torch"  # of the requester, to print
    is_certain: bool = True  # the text has no other meaning
    requested_bytes: int = 0  # on a GPU, the segment: 2 MiB for up to 1 MiB, 20 MiB for up to 10 MiB; 0 = unknown
    total_bytes: int | None = None
    free_bytes: int | None = None  # as the driver reports it
    own_bytes: int | None = None  # of this process, including memory that is not torch's
    others: tuple[GpuProcess, ...] = ()  # other processes on this GPU, the largest first
    allowed_bytes: int | None = None  # by a limit on torch
    graph_pool_bytes: int = 0  # the part of the tensors in pools of CUDA graphs, including free memory there
    workers: tuple[int, ...] = ()  # PIDs of the loader's workers that were killed

    # When torch's allocator failed; the sizes may be those of the text:
    reading: MemoryReading | None = None
    phase: str = UNEXPLAINED  # of the training thread, as in phase_s, or SETUP or LOADING_CHECKPOINT
    grad_enabled: bool | None = None  # in the allocating thread
    asked: MemoryLine | None = None  # the line that asked for more
    lines: tuple[MemoryLine, ...] = ()  # of the recorded blocks in use at that time

    # About the run until then:
    step: int = 0  # of the Trainer, or the batch of a loop
    rank: int = 0
    batch_shape: tuple[int, ...] | None = None  # of the first tensor of the batch
    batch_bytes: int = 0  # of a batch on the GPU when its step, or its part of validation, began
    usual_items: float | None = None  # the median count of elements in it
    begins: Sequence[tuple[float, float]] = ()  # (step, bytes in tensors) when steps began, oldest first
    validation_begins: Sequence[tuple[float, float]] = ()  # the same for the batches of this validation
    memory: RankMemory | None = None
    model: MemoryHoldings = field(default_factory=MemoryHoldings)  # with gradients and states that do not exist yet
    fusible: tuple[str, ...] = ()  # names of optimizers that need less with fused=True
    is_sharded: bool = False  # over the ranks

    # About this machine, read after the error:
    allocator: str = ""  # torch's settings, as the environment sets them: "PYTORCH_ALLOC_CONF=..."; empty if unknown
    uuid: str | None = None  # of the GPU
    gpus: tuple[GpuReading, ...] = ()  # of the machine
    strays: Mapping[int, int] = field(default_factory=dict)  # PID -> rank of those of this job on other GPUs
    orphans: tuple[int, ...] = ()  # processes on this GPU whose parent has ended
    oom_kills: int = 0  # by the kernel, during the run

    @property
    def begin_bytes(self) -> int | None:
        """The size of all tensors when this step or validation batch began, with its batch.

        If the batches of validation are unknown, it is the size when the last step began.
        """
        begins = (base_phase(self.phase) == VALIDATION and self.validation_begins) or self.begins
        return int(begins[-1][1]) if begins else None


OF_HOST = OutOfMemory(source="host", name="the program")
# What a pattern in a text means; the first match counts.
_KINDS = {
    r"(?:CUDA|HIP) out of memory|would exceed allowed memory": OutOfMemory(),
    r"CUBLAS_STATUS_ALLOC_FAILED": OutOfMemory(source="library", name="cuBLAS"),
    r"CUDNN_STATUS_ALLOC_FAILED": OutOfMemory(source="library", name="cuDNN"),
    r"(?i)nccl[\s\S]*out of memory|out of memory[\s\S]*nccl": OutOfMemory(source="library", name="NCCL"),
    # These can also mean a wrong index in an earlier kernel, or libraries that do not match.
    r"CUBLAS_STATUS_NOT_INITIALIZED": OutOfMemory(source="library", name="cuBLAS", is_certain=False),
    r"CUDNN_STATUS_NOT_INITIALIZED|valid cuDNN algorithm": OutOfMemory(
        source="library", name="cuDNN", is_certain=False
    ),
    r"handles_\.at\(i\)": OutOfMemory(source="library", name="CUDA", is_certain=False),
    r"(?:CUDA(?: driver)?|Triton|HIP) [Ee]rror(?: \[CUDA\])?: out of memory": OutOfMemory(source="driver", name="CUDA"),
    # Other limits have similar texts, such as that on locked memory ("ibv_reg_mr failed: Cannot allocate memory").
    r"DefaultCPUAllocator|Unable to allocate \S+ \w+ for an array|\[Errno 12\]|Cannot allocate memory \(12\)": OF_HOST,
    _WORKERS.pattern: replace(OF_HOST, is_certain=False),
}


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """Return what the text of an error, or of an error in its chain, says; ``None`` if it is not about memory."""
    for one in _chain(error):
        text = str(one)
        classes = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(one).__mro__}
        if ("torch", "OutOfMemoryError") in classes:
            return parse(text) or OutOfMemory()
        if isinstance(one, MemoryError):
            return parse(text) or OF_HOST
        if isinstance(one, (ConnectionResetError, EOFError)):  # a worker exited while it sent a batch
            return replace(OF_HOST, is_certain=False)
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


def parse(text: str) -> OutOfMemory | None:
    """Return what the text of an error says about memory; ``None`` if it says nothing."""
    kind = next((kind for pattern, kind in _KINDS.items() if re.search(pattern, text)), None)
    if kind is None:
        return None
    found = {name: _size(re.search(pattern, text)) for name, pattern in _FIELDS.items()}
    sizes: dict[str, Any] = {name: size for name, size in found.items() if size is not None}
    allocated, cached = sizes.pop("allocated_bytes", None), sizes.pop("cached_bytes", 0)
    others = {int(match[1]): size for match in _OTHER_PROCESS.finditer(text) if (size := _size(match)) is not None}
    reading = None
    if allocated is not None:
        reserved = allocated + cached
        reading = MemoryReading(allocated_bytes=allocated, reserved_bytes=reserved)
        # In a container, torch does not know its own PID.
        large = [(size, pid) for pid, size in others.items() if size >= reserved * (1 - _ROUNDING)]
        if "own_bytes" not in sizes and large:
            sizes["own_bytes"], own_pid = min(large)
            del others[own_pid]
    workers = _WORKERS.search(text)
    return replace(
        kind,
        **sizes,
        others=largest_first(GpuProcess(pid=pid, memory_used_bytes=size) for pid, size in others.items()),
        workers=() if workers is None else tuple(map(int, workers[1].split(","))),
        reading=reading,
    )


def largest_first(processes: Iterable[GpuProcess]) -> tuple[GpuProcess, ...]:
    """Return processes on a GPU, sorted by their memory."""
    return tuple(sorted(processes, key=lambda process: -(process.memory_used_bytes or 0)))


def _size(match: re.Match[str] | None) -> int | None:
    """Return the size at the end of a match; ``None`` for 2^64, which is NVML's "not available"."""
    if match is None:
        return None
    number, unit = match.groups()[-2:]
    size = float(number) * _UNITS[unit]
    return int(size) if size < MAX_BYTES / 2 else None  # the text is rounded
