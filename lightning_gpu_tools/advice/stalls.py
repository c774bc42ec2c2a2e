"""A stall: a time without progress in training, when it counts, the words for it, and the collective that blocks it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_gpu_tools.training.phases import (
    CALLBACK,
    GARBAGE_COLLECTION,
    LOGGING,
    OUTSIDE_LOOP,
    PAUSES,
    PHASES,
    RANK_WAIT,
    TRAINING_STEP,
    base_phase,
)
from lightning_gpu_tools.training.stall_facts import SETUP, TEARDOWN, Frame, GroupCalls, ProcessFacts, RankFacts
from lightning_gpu_tools.units import format_duration, number_ranges, printable

# Horovod's HOROVOD_STALL_CHECK_TIME_SECONDS: https://horovod.readthedocs.io/en/stable/stall_inspector_include.html
MIN_S = 60.0
# nvidia-resiliency-ext's factor for learned timeouts.
FACTOR = 5.0
# Our default for what takes long for good reasons. torch ends a process that waits for others after 600 s, with NCCL.
RARE_S = 450.0
_RARE = (SETUP, TEARDOWN, CALLBACK, LOGGING, *PAUSES)
_FIRST_STEPS = 3  # our default: until then, a part of a step may happen for the first time
_MIN_GAP_S = 5.0  # our default: a poll this late was suspended with the training, by Ctrl-Z or a scheduler

# torch.compile at work; its other files are on the stack while compiled code runs.
_COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/runtime/triton_heuristics.py",
    "triton/compiler/",
)
_ASKS = ("/pdb.py", "/bdb.py", "pydevd", "debugpy", "/ipdb/", "/prompt_toolkit/", "/ipykernel/")
_COMPUTES = 0.2  # our default, in cores: a process that uses less is waiting
SAME_BATCHES = (
    "Give every rank the same number of batches: DistributedSampler(dataset, drop_last=True), or "
    "Trainer(limit_train_batches=...). Shard an IterableDataset by rank."
)
# The files of torch's collectives.
_FILES = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A time in which training made no progress for longer than the limit."""

    began_at: str  # start time, ISO 8601, UTC
    lasted_s: float  # duration, so far if it is not over; a lower bound if the run was killed during the stall
    is_over: bool  # whether training continued
    step: int  # number of training steps begun
    phase: str  # phase of the training thread, as in `phase_s`, or `"setup"` or `"teardown"`
    cause: str  # cause in one word, such as `blocked_worker`
    why: str  # reason, in sentences: the process or rank that waits, and what for
    next_step: str  # what to do
    rank: int | None = None  # rank that the others waited for; `None` if there is none
    # Python stack of that rank's training thread, or of the reporting rank's, innermost call last.
    stack: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()  # state of each rank as text, for at most 64 ranks; empty with one rank


def headline(phase: str, stuck_s: float, step: int) -> str:
    """Return the first sentence about a stall."""
    return f"Training has made no progress for {format_duration(stuck_s)}, {phase_phrase(phase)} at step {step}."


def describe_rank(rank: RankFacts) -> str:
    """Return the state of a rank: its step, epoch, and what it does or waits for."""
    if rank.ended is not None:
        state = f"ended ({printable(rank.ended)})"
    elif rank.silent_s:
        state = f"silent for {format_duration(rank.silent_s)}"
    else:
        state = phase_phrase(rank.phase) if rank.waits_in is None else f"waiting in {printable(rank.waits_in)}"
    return f"rank {rank.rank}: step {rank.step} of epoch {rank.epoch}, {state}"


def is_idle(process: ProcessFacts) -> bool:
    """Return whether a process waits instead of computing."""
    return process.cpu_share < _COMPUTES


def activity_phrase(process: ProcessFacts) -> str:
    """Return a process's activity and its source line: ``"waits for a lock in __getitem__ (data.py:41)"``."""
    if process.waits_for == "storage":
        activity = "waits for storage" + (f" ({printable(process.file)})" if process.file else "")
    elif not is_idle(process):
        activity = f"computes ({100 * process.cpu_share:.0f}% of a core)"
    else:
        activity = "waits for a lock" if process.waits_for == "lock" else "waits"
    return activity + in_function(process.stack)


def in_function(stack: Sequence[Frame]) -> str:
    """Return the innermost call in the user's program: ``" in __getitem__ (data.py:41)"``; empty without a stack."""
    frame = next((frame for frame in reversed(stack) if not frame.is_library), stack[-1] if stack else None)
    return "" if frame is None else f" in {printable(frame.function)} ({printable(frame.file)}:{frame.line})"


def phase_phrase(phase: str) -> str:
    """Return a phase as a phrase: ``"while waiting for data"``."""
    base, _, name = phase.partition("/")
    if name and base in (CALLBACK, LOGGING, TRAINING_STEP):
        return f"in {printable(name)}"
    words = {SETUP: "during setup", TEARDOWN: "after its last step", TRAINING_STEP: "in the training step"}
    label = PHASES[base].label if base in PHASES else printable(base)
    return words.get(base) or (f"while {label}" if label.split()[0].endswith("ing") else f"in {label}")


def is_excused(stack: Sequence[Frame]) -> bool:
    """Return whether a thread that seems to hang is compiling, or waiting for a person (debugger, notebook)."""
    files = [f"/{frame.file}" for frame in stack]
    # A notebook's kernel, or a debugger that is not at a breakpoint, is only at the outer end of the stack.
    begin = max((i for i, frame in enumerate(stack) if not frame.is_library), default=0)
    is_asking = any(part in file for file in files[begin:] for part in _ASKS)
    return is_asking or any(part in file for file in files for part in _COMPILES)


class Patience:
    """Measures how long training has made no progress, with a poll every ``interval_s``."""

    def __init__(self, stall_after_s: float | Literal["auto"], interval_s: float) -> None:
        self.stuck_s = 0.0  # time without progress
        self.has_stalled = False
        self._stall_after_s, self._interval_s = stall_after_s, interval_s
        self._mark: object = None
        self._phase = SETUP
        self._since_s = self._polled_s = 0.0
        self._is_rare = True  # outside of steps, or in the first ones
        self._longest_s = {True: 0.0, False: 0.0}  # without progress so far, by whether it is rare

    @property
    def limit_s(self) -> float:
        """The seconds without progress after which training has stalled."""
        if self._stall_after_s != "auto":
            return self._stall_after_s
        return max(RARE_S if self._is_rare else MIN_S, FACTOR * self._longest_s[self._is_rare])

    def poll(self, now_s: float, mark: object, phase: str, steps: int) -> bool:
        """Return whether training has made progress since the last poll, after which ``mark`` or ``phase`` differ."""
        if phase == GARBAGE_COLLECTION:  # no progress: even an endless loop makes garbage
            phase = self._phase
        late_s = now_s - self._polled_s - self._interval_s
        if self._mark is not None and late_s > _MIN_GAP_S + self._interval_s:
            self._since_s += late_s
        self._polled_s = now_s
        has_progressed = (mark, phase) != (self._mark, self._phase)
        if has_progressed:
            self._longest_s[self._is_rare] = max(self._longest_s[self._is_rare], self.stuck_s)
            self._mark, self._phase, self._since_s = mark, phase, now_s
        self._is_rare = steps <= _FIRST_STEPS or base_phase(phase) in _RARE
        self.stuck_s = now_s - self._since_s
        self.has_stalled = self.stuck_s >= self.limit_s and base_phase(phase) != OUTSIDE_LOOP
        return has_progressed

    def excuse(self) -> None:
        """Begin to measure anew."""
        self._since_s, self.stuck_s, self.has_stalled = self._polled_s, 0.0, False


def collective_of(stack: Sequence[Frame], phase: str, groups: Sequence[GroupCalls]) -> str | None:
    """Return the collective in which a rank waits for others, from torch's record or its stack; ``None`` if in none.

    On a GPU, a stack does not show it: the thread waits where it reads the result. In backward, a stack does not show
    whether a rank waits.
    """
    for group in groups:
        for call in group.calls:
            if not call.is_done:
                return call.text
    functions = [frame.function for frame in stack if frame.file.endswith(_FILES) and frame.function != "wrapper"]
    if functions:
        return functions[-1]
    is_in_backward = any(frame.function == "_engine_run_backward" for frame in stack[-2:])
    return "backward" if (is_in_backward or base_phase(phase) == RANK_WAIT) and not groups else None


class HangingCall(NamedTuple):
    """The first collective of a process group that does not complete, or that differs between ranks."""

    number: int  # in its group
    group: str  # its description; empty for the default group
    calls: Mapping[int, str]  # by rank
    missing: Sequence[int]  # ranks that have not called it

    @property
    def differs(self) -> bool:
        """Whether ranks have called different collectives, or passed different sizes."""
        return len({*self.calls.values()}) > 1

    def __str__(self) -> str:
        group = f" of group {printable(self.group)}" if self.group else ""
        parts = []
        for text in dict.fromkeys(self.calls.values()):
            ranks = [rank for rank, call in self.calls.items() if call == text]
            parts.append(f"{name_ranks(ranks)} called {printable(text)}")
        if self.missing:
            parts.append(f"{name_ranks(self.missing)} did not call it")
        return f"Collective no. {self.number:,}{group}: {'; '.join(parts)}."


def hanging_call(ranks: Sequence[RankFacts]) -> HangingCall | None:
    """Return the collective that blocks the ranks, from torch's record; ``None`` if the record has none.

    A collective that differs between ranks comes first, then one that is missing on a rank that waits in no other.
    """
    waiting = {rank.rank for rank in ranks if rank.waits_in is not None}
    groups = sorted({group.group for rank in ranks for group in rank.groups})
    calls = [call for call in (_hanging_call_of(group, ranks) for group in groups) if call is not None]
    return min(calls, key=lambda call: (not call.differs, waiting.issuperset(call.missing)), default=None)


def _hanging_call_of(name: str, ranks: Sequence[RankFacts]) -> HangingCall | None:
    groups = {rank.rank: group for rank in ranks for group in rank.groups if group.group == name}
    called = {rank: {call.number: call for call in groups[rank].calls} for rank in sorted(groups)}
    description = min(group.description for group in groups.values())
    for number in sorted({number for numbers in called.values() for number in numbers}):
        calls = {rank: numbers[number] for rank, numbers in called.items() if number in numbers}
        texts = {rank: call.text for rank, call in calls.items()}
        if len({*texts.values()}) == 1 and all(call.is_done for call in calls.values()):
            continue
        members = called if description else sorted(rank.rank for rank in ranks if rank.groups)
        # Of calls that are done, a record has only the last ones.
        missing = [rank for rank in members if max(called.get(rank, ()), default=0) < number]
        return HangingCall(number, description, texts, missing)
    return None


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as words: ``"ranks 0, 1 and 3"``."""
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {number_ranges(ranks)}"
