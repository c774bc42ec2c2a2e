"""When a training that makes no progress has stalled, why, and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_gpu_tools.training.phases import (
    CALLBACK,
    DATA_LOADING,
    EPOCH_START,
    GARBAGE_COLLECTION,
    LOGGING,
    OUTSIDE_LOOP,
    PAUSES,
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

SETUP = "setup"  # before the clock of a session runs
TEARDOWN = "teardown"  # after it has stopped
# Horovod's HOROVOD_STALL_CHECK_TIME_SECONDS: https://horovod.readthedocs.io/en/stable/stall_inspector_include.html
MIN_S = 60.0
# nvidia-resiliency-ext: its example's timeout for checkpoints, and its factor for timeouts that it learns.
UNKNOWN_S = 600.0
FACTOR = 5.0
# Our defaults from here on.
AGAIN = 4.0  # said again at 4 times, 16 times, ... as long
_FIRST_STEPS = 3  # until then a part of every step may not have been seen twice
_MIN_GAP_S = 5.0  # so late a poll was held up with the training, by a debugger, Ctrl-Z, a scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A time in which a training made no progress for longer than it should have.

    Attributes:
        began_at: Since when, ISO 8601, UTC.
        lasted_s: How long, up to now while it lasts; at least so long if the run was killed in it.
        is_over: Whether the training went on.
        step: Training steps begun.
        phase: What the training thread was doing, as in ``phase_s``, or ``"setup"`` or ``"teardown"``.
        cause: One word, as ``blocked_worker``.
        why: The reason, with who waits for what.
        next_step: What to do.
        rank: The rank that the others waited for; ``None`` if there is none.
        stack: Python stack of the training thread of that rank, or of the one that reports, innermost call last.
        ranks: Where each of at most 64 ranks stood, in words; empty with one rank.
    """

    began_at: str
    lasted_s: float
    is_over: bool
    step: int
    phase: str
    cause: str
    why: str
    next_step: str
    rank: int | None = None
    stack: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()


def limit_s(stall_after_s: float | Literal["auto"], longest_s: float | None) -> float:
    """Return after how long without progress a training has stalled.

    ``longest_s`` is the most that the phase has taken; ``None`` until it has been seen to its end.
    """
    if stall_after_s != "auto":
        return stall_after_s
    return UNKNOWN_S if longest_s is None else max(MIN_S, FACTOR * longest_s)


class Patience:
    """Decides when a training has stood still for too long, by what is polled of it every ``interval_s``."""

    def __init__(self, stall_after_s: float | Literal["auto"], interval_s: float) -> None:
        self.stuck_s = 0.0  # for how long it has made no progress
        self.limit_s = limit_s(stall_after_s, None)  # how long it may
        self._stall_after_s = stall_after_s
        self._interval_s = interval_s
        self._mark: object = None
        self._key, self._phase = SETUP, SETUP
        self._since_s = self._polled_s = 0.0
        self._seen: set[str] = set()
        self._longest_s: dict[str, float] = {}
        self._reports = 0

    def poll(self, now_s: float, mark: object, phase: str, since_s: float, steps: int, taken: Collection[str]) -> bool:
        """Return whether the training has made progress since the last poll.

        ``mark`` differs as soon as there is progress. The training thread has been in ``phase`` since ``since_s``, has
        begun ``steps``, and has spent time in the phases ``taken`` so far.
        """
        late_s = now_s - self._polled_s - self._interval_s
        if self._mark is not None and late_s > _MIN_GAP_S + self._interval_s:
            self._since_s += late_s
        self._polled_s = now_s
        if phase == GARBAGE_COLLECTION:  # also a loop without end makes garbage
            phase = self._phase
        key, mark = _key(phase), (mark, phase)
        self._seen.update({_key(one) for one in taken} - {key})
        if steps > _FIRST_STEPS and key in PHASES and key not in (CALLBACK, LOGGING, *PAUSES):
            self._seen.add(key)
        progress = mark != self._mark
        if progress:
            self._longest_s[self._key] = max(self._longest_s.get(self._key, 0.0), self.stuck_s)
            self._mark, self._key, self._phase, self._reports = mark, key, phase, 0
            self._since_s = min(now_s, since_s)
        self.stuck_s = max(0.0, now_s - self._since_s)
        longest_s = self._longest_s.get(key, 0.0) if key in self._seen else None
        self.limit_s = limit_s(self._stall_after_s, longest_s)
        return progress

    @property
    def due_s(self) -> float:
        """Seconds until there is something to say if nothing changes; negative if it is overdue."""
        return self.limit_s * AGAIN**self._reports - self.stuck_s

    @property
    def is_over(self) -> bool:
        """Whether the training has stalled."""
        return self.stuck_s >= self.limit_s and base_phase(self._phase) != OUTSIDE_LOOP

    def reported(self) -> None:
        """Say nothing more until it has lasted four times as long."""
        self._reports += 1

    def excuse(self) -> None:
        """Begin to count anew."""
        self._since_s, self.stuck_s = self._polled_s, 0.0


def _key(phase: str) -> str:
    # Callbacks and loggers have times of their own.
    base = base_phase(phase)
    return phase if base in (CALLBACK, LOGGING) else base


# torch.compile at work; other files of it are on the stack while compiled code runs.
_COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/select_algorithm.py",
    "torch/_inductor/runtime/triton_heuristics.py",
    "triton/compiler/",
)
_ASKS = ("/pdb.py", "/bdb.py", "pydevd", "debugpy", "/pudb/", "/ipdb/", "/prompt_toolkit/", "/ipykernel/")
_INNERMOST = 12


def is_excused(stack: Sequence[Frame]) -> bool:
    """Return whether a thread that seems to hang compiles, or waits for a person at a debugger or in a notebook."""
    files = [frame.file.replace("\\", "/") for frame in stack]
    if any(part in file for file in files for part in _COMPILES):
        return True
    # A notebook's kernel is at the outer end of each stack, and so is a debugger that does not stop.
    users = [i for i, frame in enumerate(stack) if not frame.is_library]
    inner = [f"/{file}" for file in files[max([*users, len(files) - _INNERMOST, 0]) :]]
    return any(part in file for file in inner for part in _ASKS)


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
    "held_lock",
    "code",
]

# Our defaults.
_SWAP_STALL_PERCENT = 20.0  # of ten seconds, in which every task waited for memory
_SWAP_PAGES_PER_S = 10_000  # 40 MiB
_COMPUTES = 0.2  # of a core: what uses less waits
_BUSY_GPU_PERCENT = 90.0

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
_CALL_ON_EVERY_RANK = {
    "saving a checkpoint": "Call trainer.save_checkpoint() on every rank: Lightning writes on rank 0 alone.",
    "self.log(..., sync_dist=True)": (
        "Call self.log(..., sync_dist=True) on every rank in every step. What one rank alone logs takes "
        "rank_zero_only=True."
    ),
    "computing a metric": "Call compute() on every rank; log its value on rank 0.",
}
_SAME_BATCHES = (
    "Give every rank as many batches: drop_last=True, a DistributedSampler, or limit_train_batches. Cut an "
    "IterableDataset by rank."
)
_CHECK_STORAGE = (
    "Check the mount with `ls`, `df` and `dmesg`. Copy the data to a local disk, or write checkpoints to one."
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


class Explanation(NamedTuple):
    """Why a training has stalled."""

    cause: str  # a StallCause
    why: str  # in sentences
    next_step: str
    rank: int | None = None  # that is behind


def collective_of(stack: Sequence[Frame], phase: str, ranks: int) -> str | None:
    """Return for what a rank waits for the others, in words; ``None`` if it does not wait for them."""
    if ranks < 2:
        return None
    names = [frame.function for frame in stack]
    calls = [frame.function for frame in stack if frame.file.replace("\\", "/").endswith(_COLLECTIVE_FILES)]
    if not (base_phase(phase) == RANK_WAIT or calls or "_engine_run_backward" in names[-2:]):
        return None
    for functions, words in _COLLECTIVES.items():
        if any(name in functions for name in names):
            return words
    frame = users_frame(tuple(stack))
    innermost = next((name for name in reversed(calls) if name != "wrapper"), "a collective")
    return innermost + ("" if frame is None else f" in {frame.function}")


def explain(facts: StallFacts) -> Explanation:
    """Return why a process makes no progress, by itself."""
    if facts.memory_stall_percent >= _SWAP_STALL_PERCENT or facts.swapped_pages_per_s >= _SWAP_PAGES_PER_S:
        return Explanation(
            "swap",
            f"The machine swaps: {facts.swapped_pages_per_s:.0f} pages a second, and every task waited for memory in "
            f"{facts.memory_stall_percent:.0f} % of the last ten seconds.",
            "End other programs (`ps aux --sort=-rss | head`), or use fewer workers (num_workers) or smaller batches.",
        )
    if facts.workers:
        return _of_workers(facts.workers)
    where = _where(facts.stack)
    does = _does(facts.activity, facts.cpu_share)
    if _waits_for(facts.activity, "storage"):
        return Explanation("storage", f"The training process {does}{where}.", _CHECK_STORAGE)
    base, _, name = facts.phase.partition("/")
    if base == RANK_WAIT:
        return Explanation("communication", f"This rank waits for others{where}.", "See what the other ranks print.")
    if base in (DATA_LOADING, EPOCH_START):
        return Explanation(
            "dataset",
            f"The training process {does} while it loads data{where}.",
            "Look at that line of the dataset. With num_workers=1 or more, training goes on while samples load.",
        )
    if base in (CALLBACK, LOGGING) and name:
        name = printable(name)
        return Explanation("callback", f"{name} {does}{where}.", f"Look at that line, or train without {name}.")
    busy_percent = facts.gpu_busy_percent
    if busy_percent is not None and busy_percent >= _BUSY_GPU_PERCENT:
        return Explanation(
            "gpu",
            f"The GPU is {busy_percent:.0f} % busy, and the training process {does}{where}. "
            "A kernel does not end, or a collective waits for another rank.",
            "With CUDA_LAUNCH_BLOCKING=1 the stack names the operation. See `dmesg` for Xid errors.",
        )
    gpu = "" if busy_percent is None else f", and the GPU is {busy_percent:.0f} % busy"
    return Explanation("code", f"The training process {does}{where}{gpu}.", "Look at that line; the stack is below.")


def explain_held_lock(stack: tuple[Frame, ...]) -> Explanation:
    """Return why no thread of Python could run."""
    where = f" The training thread was{_where(stack)}." if stack else ""
    return Explanation(
        "held_lock",
        f"C code held Python's lock (the GIL), so no thread of Python ran.{where}",
        "Look at that line. C code that takes long has to release the lock: ctypes.CDLL instead of PyDLL, nogil in "
        "Cython, gil_scoped_release in pybind11.",
    )


def _waits_for(activity: Activity | None, what: Wait) -> bool:
    return activity is not None and activity.waits_for == what


def _does(activity: Activity | None, cpu_share: float) -> str:
    if cpu_share >= _COMPUTES and not _waits_for(activity, "storage"):
        return f"computes ({100 * cpu_share:.0f} % of a core)"
    if activity is None or activity.waits_for is None:
        return "makes no progress"
    return _STATES[activity.waits_for] + (f" ({printable(activity.target)})" if activity.target else "")


def _where(stack: tuple[Frame, ...]) -> str:
    frame = users_frame(stack) or (stack[-1] if stack else None)
    return "" if frame is None else f" in {printable(frame.function)} ({printable(frame.file)}:{frame.line})"


def _of_workers(workers: Sequence[WorkerFacts]) -> Explanation:
    awaited = next((one for one in workers if one.is_awaited), workers[0])
    ended = [one for one in workers if one.activity.has_ended]
    if ended:
        return Explanation(
            "dead_worker",
            f"{_name(ended[0])} of {len(workers)} has ended, and training waits for a batch from it.",
            "See its last words on the terminal. `dmesg` says whether the kernel has killed it.",
        )
    storage = [one for one in workers if _waits_for(one.activity, "storage")]
    if storage:
        one = awaited if awaited in storage else storage[0]
        why = f"{len(storage)} of {len(workers)} workers wait for storage. {_name(one)} {_worker_does(one)}."
        return Explanation("storage", why, _CHECK_STORAGE)
    idle = [one for one in workers if one.cpu_share < _COMPUTES]
    if len(workers) > 1 and all(one in idle and _waits_for(one.activity, "lock") for one in workers):
        return Explanation(
            "deadlocked_workers",
            f"All {len(workers)} workers wait for a lock{_where(awaited.stack)}. "
            "A process that is forked while a thread holds a lock waits for it for good.",
            'Set multiprocessing_context="spawn" or "forkserver", or call cv2.setNumThreads(0) first. Start no threads '
            "before the DataLoader does its workers.",
        )
    others = sum(one is not awaited for one in idle)
    rest = f" {others} of the {len(workers) - 1} others have nothing to do." if others else ""
    return Explanation(
        "blocked_worker",
        f"{_name(awaited)} of {len(workers)} {_worker_does(awaited)}. The next batch has to come from it.{rest}",
        "Look at that line of the dataset, and at the sample that it loads. DataLoader(timeout=60) turns this into an "
        "error.",
    )


def _name(worker: WorkerFacts) -> str:
    return f"Worker {worker.number} (PID {worker.activity.pid})"


def _worker_does(worker: WorkerFacts) -> str:
    return f"{_does(worker.activity, worker.cpu_share)}{_where(worker.stack)}"


def explain_ranks(ranks: Sequence[RankFacts]) -> Explanation | None:
    """Return which rank of several the others wait for, and why; ``None`` with one rank."""
    if len(ranks) < 2:
        return None
    here = [one for one in ranks if one.ended is None and not one.silent_s]
    others = f"{_names(here)} wait{'s' * (len(here) == 1)} for it"
    for one in ranks:
        if one.ended == "completed":
            furthest = max((other.step for other in here), default=one.step)
            why = f"Rank {one.rank} has ended its training after {one.step} steps; {others} at step {furthest}."
            return Explanation("uneven_batches", why, _SAME_BATCHES, one.rank)
        if one.ended is not None:
            return Explanation(
                "rank_left",
                f"Rank {one.rank} has left the training at step {one.step} ({printable(one.ended)}); {others}.",
                "Let the error end the process: do not catch it, or call sys.exit(), on one rank alone.",
                one.rank,
            )
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


def _of_waiting(ranks: Sequence[RankFacts]) -> Explanation:
    counts = Counter(one.collective for one in ranks)
    # Of two ranks that differ, the one where not every rank has to come is odd.
    odd = min(ranks, key=lambda one: (one.collective in _OF_EVERY_RANK, counts[one.collective], one.rank))
    rest = [one for one in ranks if one.collective != odd.collective]
    where = f"{printable(odd.collective)} at step {odd.step}"
    why = f"Ranks wait in different places: rank {odd.rank} in {where}"
    if rest:
        why += f", {_names(rest)} in {printable(rest[0].collective)} at step {rest[0].step}"
    if len({one.epoch for one in ranks}) > 1 or (odd.collective == "the end of the epoch" and rest):
        return Explanation("uneven_batches", f"{why}.", _SAME_BATCHES, odd.rank)
    if rest:
        call = _CALL_ON_EVERY_RANK.get(str(odd.collective), "Call it on every rank, outside of any `if` on the rank.")
        why += ". A collective has to be called by every rank."
        return Explanation("collective_on_one_rank", why, call, odd.rank)
    return Explanation(
        "communication",
        f"All {len(ranks):,} ranks wait in {where}.",
        "The network between them does not answer, or shapes differ. Run once with TORCH_DISTRIBUTED_DEBUG=DETAIL and "
        "NCCL_DEBUG=INFO.",
    )


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
