"""The use of a GPU's memory, as parts that add up to what the driver reports. Pure."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gpu_tools.gpus.metrics import GpuSample
from lightning_gpu_tools.memory.readings import MemoryHoldings, MemoryLine, MemoryReading, RankMemory

OTHER_PROCESSES = "other_processes"
# The parts by name, with their labels in the report, in the order in which they are counted.
TENSORS = {  # at their peak
    "parameters": "parameters",
    "buffers": "buffers",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "gradient_buckets": "DDP gradient buckets",
    "workspaces": "cuBLAS workspaces",
    "earlier_tensors": "tensors from before training",
    "other_tensors": "batch, and other tensors kept",
    "activations": "activations and temporaries",
}
CACHE = {"cache_reusable": "reusable", "cache_fragmented": "fragmented"}  # of torch's allocator
PARTS = {
    **TENSORS,
    **CACHE,
    "context": "CUDA context, libraries, NCCL",
    OTHER_PROCESSES: "other processes",
    "driver": "reserved by the driver",
    "unexplained": "unexplained",
}

# Our default: if the processes that the driver lists hold this share of the used memory, no process is hidden.
_ALL_LISTED = 0.98


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProcess:
    """A process of another job on the GPU."""

    pid: int  # PID reported by the driver
    used_bytes: int | None = None  # its memory; `None` if the driver does not report it
    user: str | None = None  # its owner; `None` if not visible from here
    name: str | None = None  # its name; `None` if not visible from here


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAccount:
    """The use of one GPU's memory. Unknown values are ``None`` or absent."""

    index: int  # index of the GPU, as in `gpus`
    uuid: str  # UUID of the GPU
    node: int = 0  # number of its node
    total_bytes: int | None = None  # size of its memory
    used_bytes: int | None = None  # total memory in use, as reported by the driver
    free_bytes: int | None = None  # rest of the memory
    # Parts by name; their sum is `used_bytes`, or without it the memory that torch has reserved.
    parts_bytes: Mapping[str, int] = field(default_factory=dict)
    explained_share: float | None = None  # share of `used_bytes` that belongs to a known part
    # Peak memory of torch, tensors and cache, in this run; without the peaks of an earlier run.
    peak_reserved_bytes: int | None = None
    others: tuple[OtherProcess, ...] = ()  # processes of other jobs, largest first
    # The ten lines that allocated most of the memory added by a step at its peak, of the rank with the highest peak,
    # largest first. Only some steps are recorded.
    peak_lines: tuple[MemoryLine, ...] = ()
    # Lines that allocated the memory of recorded steps that is still in use, largest first.
    kept_lines: tuple[MemoryLine, ...] = ()


def accounts(ranks: Sequence[RankMemory]) -> tuple[MemoryAccount, ...]:
    """Return the use of the memory of each GPU on which these ranks train."""
    drivers = {(rank.gpu[0], sample.uuid): (sample, rank.own_pids) for rank in ranks for sample in rank.samples}
    of_gpus: defaultdict[tuple[int, int, str], list[RankMemory]] = defaultdict(list)
    for rank in ranks:
        of_gpus[rank.gpu].append(rank)
    return tuple(
        _account(of_gpus[gpu], *drivers.get((gpu[0], gpu[2]), (GpuSample(uuid=gpu[2], time_s=0.0), None)))
        for gpu in sorted(of_gpus)
    )


def _account(ranks: Sequence[RankMemory], sample: GpuSample, own_pids: Collection[int] | None) -> MemoryAccount:
    """Return the use of the memory of a GPU on which these ranks train, by the driver's sample.

    ``own_pids`` are the driver's PIDs of this job; ``None`` if unknown, as in a container.
    """
    node, index, uuid = ranks[0].gpu
    parts = sum((Counter(_torch_parts(rank)) for rank in ranks), Counter())
    reserved_bytes = parts.total()
    used_bytes, total_bytes = sample.size("memory_used_bytes"), sample.size("memory_total_bytes")
    others: list[OtherProcess] = []
    processes, own_bytes = sample.processes or (), 0
    own_pids = _the_only_large_one(sample, len(ranks), reserved_bytes) if own_pids is None else own_pids
    if own_pids is not None:
        own_bytes = sum(process.memory_used_bytes or 0 for process in processes if process.pid in own_pids)
        others = [
            OtherProcess(pid=process.pid, used_bytes=process.memory_used_bytes, user=process.user, name=process.name)
            for process in processes
            if process.pid not in own_pids
        ]
    # The driver's reading may be older than torch's.
    if used_bytes is not None and 0 < own_bytes < reserved_bytes:
        used_bytes += reserved_bytes - own_bytes
    # Or its age is unknown.
    if used_bytes is not None and used_bytes < reserved_bytes:
        used_bytes, others = None, []
    if used_bytes is not None:
        beyond_torch = {
            "context": max(0, own_bytes - reserved_bytes),
            OTHER_PROCESSES: sum(process.used_bytes or 0 for process in others),
            "driver": sample.size("driver_memory_bytes") or 0,
            "unexplained": used_bytes,
        }
        parts.update(_cut(beyond_torch, used_bytes - reserved_bytes))
    peak_reserved_bytes = 0
    for rank in ranks:
        peak, before = rank.latest.peak_reserved_bytes, rank.before_training
        held = [reading.reserved_bytes for reading in _readings(rank)]
        # A peak that did not rise in this run is from an earlier fit, or from a search for the largest batch.
        is_old = before is not None and peak <= before.peak_reserved_bytes
        peak_reserved_bytes += max(held if is_old else [*held, peak])
    fullest = max(ranks, key=lambda rank: rank.peak_bytes)
    return MemoryAccount(
        index=index,
        uuid=uuid,
        node=node,
        total_bytes=total_bytes,
        used_bytes=used_bytes,
        free_bytes=None if used_bytes is None or total_bytes is None else max(0, total_bytes - used_bytes),
        parts_bytes={name: parts[name] for name in PARTS if parts[name]},
        explained_share=1 - parts["unexplained"] / used_bytes if used_bytes else None,
        peak_reserved_bytes=peak_reserved_bytes,
        others=tuple(sorted(others, key=lambda process: (-(process.used_bytes or 0), process.pid))),
        peak_lines=fullest.peak_lines,
        kept_lines=fullest.kept_lines,
    )


def _cut(sizes: Mapping[str, int], room_bytes: int) -> dict[str, int]:
    """Return the sizes in their order, each cut to the remaining room."""
    fitting = {}
    for name, size in sizes.items():
        fitting[name] = min(size, room_bytes)
        room_bytes -= fitting[name]
    return fitting


def _readings(rank: RankMemory) -> list[MemoryReading]:
    steps = (step for step in (rank.first_step, rank.last_step) if step is not None)
    return [rank.latest, *(reading for step in steps for reading in (step.begin, step.middle, step.end))]


def _torch_parts(rank: RankMemory) -> dict[str, int]:
    latest = rank.latest
    reserved_bytes = max(latest.reserved_bytes, latest.allocated_bytes)
    # The peak before training may be from an earlier fit.
    peaks = {phase: size for phase, size in rank.peaks_bytes.items() if phase != "before_training"}
    peak_in = max(peaks, key=lambda phase: peaks[phase], default="")
    # The peak may date from before the allocator emptied its cache.
    nearest = max(_readings(rank), key=lambda reading: reading.allocated_bytes)
    peak_bytes = min(max(peaks.get(peak_in, 0), nearest.allocated_bytes), reserved_bytes)
    held, step = rank.holdings or MemoryHoldings(), rank.last_step or rank.first_step
    begin = latest if step is None else step.begin
    others_bytes = max(0, (rank.kept_bytes or begin.allocated_bytes) - held.between_steps_bytes)
    at_peak = {
        "parameters": held.parameters_bytes,
        "buffers": held.buffers_bytes,
        "optimizer_states": held.optimizer_bytes,
        # Forward has the gradients of the previous step, if they were not zeroed at its end.
        "gradients": held.gradients_kept_bytes
        if peak_in == "validation" or rank.peak_phase == "forward"
        else held.gradients_bytes,
        "gradient_buckets": held.gradient_buckets_bytes,
        "workspaces": held.workspaces_bytes,
        "earlier_tensors": min(others_bytes, rank.earlier_bytes),
        "other_tensors": max(0, others_bytes - rank.earlier_bytes),
        "activations": peak_bytes,
    }
    cache = {"cache_fragmented": nearest.inactive_split_bytes, "cache_reusable": reserved_bytes}
    return {**_cut(at_peak, peak_bytes), **_cut(cache, reserved_bytes - peak_bytes)}


def _the_only_large_one(sample: GpuSample, ranks: int, reserved_bytes: int) -> frozenset[int] | None:
    """Return the PID of the only process that is large enough to be ours, if the driver lists all.

    In a container the driver lists the host's PIDs.
    """
    sizes = {process.pid: process.memory_used_bytes or 0 for process in sample.processes or ()}
    large = [pid for pid, size in sizes.items() if size >= reserved_bytes > 0]
    listed_bytes = sum(sizes.values()) + (sample.size("driver_memory_bytes") or 0)
    is_unique = ranks == len(large) == 1 and listed_bytes >= _ALL_LISTED * (sample.size("memory_used_bytes") or 0)
    return frozenset(large) if is_unique else None
