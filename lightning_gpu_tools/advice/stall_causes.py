"""Why a training has stalled, and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_gpu_tools.advice.stalls import SETUP, TEARDOWN
from lightning_gpu_tools.training.phases import (
    CALLBACK,
    DATA_LOADING,
    EPOCH_START,
    LOGGING,
    PHASES,
    RANK_WAIT,
    TRAINING_STEP,
    base_phase,
)
from lightning_gpu_tools.training.stall_facts import (
    Activity,
    Frame,
    RankFacts,
    StallFacts,
    Wait,
    WorkerFacts,
    users_frame,
)
from lightning_gpu_tools.units import format_duration, number_ranges, printable

StallCause = Literal[
    "blocked_worker",
    "deadlocked_workers",
    "dead_worker",
    "dataset",
    "storage",
    "swap",
    "callback",
    "rank_left",
    "rank_silent",
    "uneven_batches",
    "collective_on_one_rank",
    "communication",
    "gpu",
    "code",
]

# Our default: from this share of ten seconds in which every task waited for memory, or this many pages swapped a second
# (40 MiB), the machine swaps.
_SWAP_STALL_PERCENT = 20.0
_SWAP_PAGES_PER_S = 10_000
# Our default: who uses less of a core waits.
_COMPUTES = 0.2
_BUSY_GPU_PERCENT = 90.0


def collective_of(stack: Sequence[Frame], phase: str, ranks: int) -> str | None:
    """Return for what a rank waits for the others, in words; ``None`` if it does not wait for them."""
    if ranks < 2:
        return None
    names = [frame.function for frame in stack]
    calls = [frame.function for frame in stack if frame.file.replace("\\", "/").endswith(_COLLECTIVE_FILES)]
    in_backward = "_engine_run_backward" in names[-2:]
    if not (base_phase(phase) == RANK_WAIT or calls or in_backward):
        return None
    for functions, words in _COLLECTIVES.items():
        if any(name in functions for name in names):
            return words
    frame = users_frame(tuple(stack))
    innermost = next((name for name in reversed(calls) if name != "wrapper"), "a collective")
    return innermost + ("" if frame is None else f" in {frame.function}")


# Where torch's collectives are.
_COLLECTIVE_FILES = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)
# By the functions on the stack; the first that fits counts.
_COLLECTIVES = {
    ("save_checkpoint",): "saving a checkpoint",
    ("_sync_ddp_if_available", "_sync_ddp", "sync_ddp"): "self.log(..., sync_dist=True)",
    ("gather_all_tensors",): "computing a metric",
    ("_broadcast_sigterm_tensor", "_sigterm_notifier_fn"): "the check of signals",
    ("on_train_epoch_end", "on_advance_end"): "the end of the epoch",
    ("_engine_run_backward",): "backward",
    ("_sync_buffers", "_pre_forward"): "DistributedDataParallel's forward",
}
_OF_EVERY_RANK = ("backward", "DistributedDataParallel's forward", "the check of signals")


class Explanation(NamedTuple):
    """Why a training has stalled.

    Attributes:
        cause: In one word.
        why: In sentences.
        next_step: What to do.
        rank: The rank that is behind; ``None`` if there is none.
    """

    cause: str
    why: str
    next_step: str
    rank: int | None = None


def explain(facts: StallFacts) -> Explanation:
    """Return why a process makes no progress, by itself."""
    if facts.memory_stall_percent >= _SWAP_STALL_PERCENT or facts.swapped_pages_per_s >= _SWAP_PAGES_PER_S:
        return Explanation(
            "swap",
            f"The machine swaps: {facts.swapped_pages_per_s:.0f} pages a second, and every task waited for memory in "
            f"{facts.memory_stall_percent:.0f} % of the last ten seconds.",
            "End what else uses memory, use fewer workers (num_workers), or smaller batches. "
            "`ps aux --sort=-rss | head` shows who uses it.",
        )
    if facts.workers:
        return _of_workers(facts)
    where = _where(facts.stack)
    does = _does(facts.activity, facts.cpu_share)
    if facts.activity is not None and facts.activity.waits_for == "storage":
        target = "" if facts.activity.target is None else f" ({printable(facts.activity.target)})"
        return Explanation("storage", f"The training process waits for storage{target}{where}.", _CHECK_STORAGE)
    base, _, name = facts.phase.partition("/")
    if base == RANK_WAIT:
        return Explanation("communication", f"This rank waits for others{where}.", "See what the other ranks print.")
    if base in (DATA_LOADING, EPOCH_START):
        return Explanation(
            "dataset",
            f"The training process {does} while it loads data{where}.",
            "Look at that line of the dataset. With num_workers=1 or more, training goes on while a sample is loaded.",
        )
    if base in (CALLBACK, LOGGING) and name:
        return Explanation(
            "callback", f"{printable(name)} {does}{where}.", f"Look at that line, or train without {printable(name)}."
        )
    if facts.gpu_busy_percent is not None and facts.gpu_busy_percent >= _BUSY_GPU_PERCENT:
        return Explanation(
            "gpu",
            f"The GPU is {facts.gpu_busy_percent:.0f} % busy, and the training process {does}{where}. "
            "A kernel does not end, or a collective waits for another rank.",
            "Run once with CUDA_LAUNCH_BLOCKING=1: the stack then names the operation. See `dmesg` for Xid errors.",
        )
    gpu = "" if facts.gpu_busy_percent is None else f", and the GPU is {facts.gpu_busy_percent:.0f} % busy"
    return Explanation("code", f"The training process {does}{where}{gpu}.", "Look at that line; the stack is below.")


_CHECK_STORAGE = (
    "Check that the storage answers: `ls`, `df` and `dmesg` show a mount that does not. "
    "Copy the data to a local disk, or write checkpoints to one."
)
_STATES: dict[Wait, str] = {
    "storage": "waits for storage",
    "network": "waits for the network",
    "lock": "waits for a lock",
    "pipe": "waits for another process",
    "time": "sleeps",
    "events": "waits for a file, a socket or another process",
    "process": "waits for another process to end",
}


def _does(activity: Activity | None, cpu_share: float) -> str:
    if cpu_share >= _COMPUTES:
        return f"computes ({100 * cpu_share:.0f} % of a core)"
    waits_for = None if activity is None else activity.waits_for
    return "makes no progress" if waits_for is None else _STATES[waits_for]


def _where(stack: tuple[Frame, ...]) -> str:
    frame = users_frame(stack) or (stack[-1] if stack else None)
    return "" if frame is None else f" in {_call(frame)}"


def _call(frame: Frame) -> str:
    return f"{printable(frame.function)} ({printable(frame.file)}:{frame.line})"


def _of_workers(facts: StallFacts) -> Explanation:
    workers = facts.workers
    ended = [one for one in workers if one.activity.has_ended]
    if ended:
        return Explanation(
            "dead_worker",
            f"W{_name(ended[0])[1:]} of {len(workers)} has ended, and training waits for a batch from it.",
            "See its last words on the terminal. `dmesg` says whether the kernel has killed it.",
        )
    awaited = next((one for one in workers if one.is_awaited), workers[0])
    storage = [one for one in workers if one.activity.waits_for == "storage"]
    if storage:
        one = awaited if awaited in storage else storage[0]
        target = "" if one.activity.target is None else f" ({printable(one.activity.target)})"
        return Explanation(
            "storage",
            f"{len(storage)} of {len(workers)} workers wait for storage; {_name(one)}{target}{_where(one.stack)}.",
            _CHECK_STORAGE,
        )
    if len(workers) > 1 and all(one.activity.waits_for == "lock" and one.cpu_share < _COMPUTES for one in workers):
        return Explanation(
            "deadlocked_workers",
            f"All {len(workers)} workers wait for a lock{_where(awaited.stack)}. "
            "A process that is forked while a thread holds a lock waits for it for good.",
            'Start workers with multiprocessing_context="spawn" or "forkserver", or call cv2.setNumThreads(0) first. '
            "Start no threads before the DataLoader does its workers.",
        )
    does = _does(awaited.activity, awaited.cpu_share)
    idle, others = sum(one.cpu_share < _COMPUTES for one in workers if one is not awaited), ""
    if idle:
        number = "the others" if idle == len(workers) - 1 else f"{idle} of the others"
        others = f" The next batch has to come from it; {number} have nothing to do."
    return Explanation(
        "blocked_worker",
        f"W{_name(awaited)[1:]} of {len(workers)} {does}{_where(awaited.stack)}.{others}",
        "Look at that line of the dataset, and at the sample that it loads. DataLoader(timeout=60) turns this into an "
        "error.",
    )


def _name(worker: WorkerFacts) -> str:
    return f"worker {worker.number} (PID {worker.activity.pid})"


def explain_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    """Return which rank of several the others wait for, and why; ``None`` with one rank."""
    if len(ranks) < 2:
        return None
    here = [one for one in ranks if one.ended is None and not one.silent_s]
    others = f"{_names(here)} wait{'s' * (len(here) == 1)} for it"
    for one in ranks:
        if one.ended is not None:
            return _of_ended(one, here, others)
    for one in ranks:
        if one.silent_s:
            return Explanation(
                "rank_silent",
                f"Rank {one.rank} (PID {one.pid} on node {one.node}) has been silent for "
                f"{format_duration(one.silent_s)}, since step {one.step}, {_doing(one.phase)}; {others}.",
                "It was killed or stopped, or C code in it holds Python's lock. See its output, and `dmesg` there.",
                one.rank,
            )
    for one in here:
        if one.collective is None:
            why = one.why or f"It has made no progress for {format_duration(one.stuck_s)}."
            return Explanation(
                one.cause or "code",
                f"All wait for rank {one.rank}, at step {one.step}, {_doing(one.phase)}. {why}",
                one.next_step or "See the stack of that rank.",
                one.rank,
            )
    return _of_waiting(here)


def _of_ended(one: RankFacts, here: Sequence[RankFacts], others: str) -> Explanation:
    if one.ended == "completed":
        furthest = max((other.step for other in here), default=one.step)
        return Explanation(
            "uneven_batches",
            f"Rank {one.rank} has ended its training after {one.step} steps; {others} at step {furthest}.",
            _SAME_BATCHES,
            one.rank,
        )
    return Explanation(
        "rank_left",
        f"Rank {one.rank} has left the training at step {one.step} ({printable(one.ended)}); {others}.",
        "Let the error end the process: do not catch it on one rank alone, and do not call sys.exit() there.",
        one.rank,
    )


_SAME_BATCHES = (
    "Give every rank the same number of batches: drop_last=True, a DistributedSampler, or limit_train_batches. An "
    "IterableDataset has to be cut by rank."
)


def _of_waiting(ranks: Sequence[RankFacts]) -> Explanation:
    """Return why ranks wait that are all in a collective."""
    counts = Counter(one.collective for one in ranks)
    # Of two ranks that differ, the one where not every rank has to come is odd.
    odd = min(ranks, key=lambda one: (one.collective in _OF_EVERY_RANK, counts[one.collective], one.rank))
    rest = [one for one in ranks if one.collective != odd.collective]
    places = f"rank {odd.rank} in {printable(odd.collective)} at step {odd.step}"
    if rest:
        places += f", {_names(rest)} in {printable(rest[0].collective)} at step {rest[0].step}"
    if len({one.epoch for one in ranks}) > 1 or (odd.collective == "the end of the epoch" and rest):
        return Explanation("uneven_batches", f"Ranks wait in different places: {places}.", _SAME_BATCHES, odd.rank)
    if rest:
        return Explanation(
            "collective_on_one_rank",
            f"Ranks wait in different places: {places}. A collective has to be called by every rank.",
            _EVERY_RANK.get(str(odd.collective), "Call it on every rank, outside of any `if` on the rank."),
            odd.rank,
        )
    return Explanation(
        "communication",
        f"All {len(ranks):,} ranks wait in {printable(odd.collective)} at step {odd.step}.",
        "The network between them does not answer, or shapes differ. Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL, and "
        "NCCL_DEBUG=INFO.",
    )


_EVERY_RANK = {
    "saving a checkpoint": "Call trainer.save_checkpoint() on every rank: Lightning writes on rank 0 alone.",
    "self.log(..., sync_dist=True)": (
        "Call self.log(..., sync_dist=True) on every rank in every step. What one rank alone logs takes "
        "rank_zero_only=True."
    ),
    "computing a metric": "Call compute() on every rank; log its value on rank 0.",
}


def _names(ranks: Sequence[RankFacts]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {number_ranges(one.rank for one in ranks)}"


def _doing(phase: str) -> str:
    """Return a phase as a part of a sentence: ``"while waiting for data"``."""
    base, _, name = phase.partition("/")
    if name and base in (CALLBACK, LOGGING, TRAINING_STEP):
        return f"in {printable(name)}"
    words = {SETUP: "before it began", TEARDOWN: "after its last step", TRAINING_STEP: "in the training step"}
    label = PHASES[base].label if base in PHASES else printable(base)
    return words.get(base) or (f"while {label}" if label.split()[0].endswith("ing") else f"in {label}")


def headline(phase: str, stuck_s: float, step: int) -> str:
    """Return the first sentence about a stall."""
    return f"Training has made no progress for {format_duration(stuck_s)}, {_doing(phase)} at step {step}."


def describe_rank(one: RankFacts) -> str:
    """Return where a rank stands, in words."""
    if one.ended is not None:
        state = f"ended ({printable(one.ended)})"
    elif one.silent_s:
        state = f"silent for {format_duration(one.silent_s)}"
    else:
        state = _doing(one.phase) if one.collective is None else f"waiting in {printable(one.collective)}"
    return f"rank {one.rank}: step {one.step} of epoch {one.epoch}, {state}"
