"""Accounting of time by phase: totals, a timeline, and the times of training steps in bounded memory."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from statistics import median
from threading import get_ident
from typing import Any

from lightning_gpu_tools.training.run_measurements import PhaseSpan, SlowSteps, StepTimes

_SLOW_TIMES_MEDIAN = 2.0  # gpuprof's rule: steps are uneven if their 99th percentile exceeds this
# Our defaults.
_MAX_TIMES = 8192  # of steps, whose percentiles are known: the latest
_FIRST_MEDIAN = 8  # steps before the first median
_MAX_KEPT = 64  # slow steps per phase
_SEE_BATCH_EVERY = 8  # steps, to sample the usual size
_WORK_OUT_EVERY = 32  # steps


@dataclass(slots=True, eq=False)
class Account:
    """The time charged to one phase, up to the last change of phase."""

    phase: str
    seconds: float = 0.0


class Stopwatch:
    """A stopwatch that charges every instant to the innermost phase alone, so that the phases add up to the total."""

    __slots__ = ("_accounts", "_around", "_clock", "current", "entered", "since_s")

    def __init__(self, base: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._accounts: dict[str, Account] = {}
        self._clock = clock
        self._around: list[Account] = []
        self.current = self.account(base)
        self.since_s = clock()  # time is charged up to this moment
        self.entered = 0  # number of entries into contexts of `booked`

    @property
    def now_s(self) -> float:
        """Current time of its clock."""
        return self._clock()

    @property
    def seconds(self) -> dict[str, float]:
        """Time by phase up to the last change of phase, without phases that took none. Safe in any thread."""
        accounts = list(self._accounts.values())  # a copy, because another thread may add to it
        return {account.phase: account.seconds for account in accounts if account.seconds}

    def account(self, phase: str) -> Account:
        """Return the account of a phase."""
        return self._accounts.setdefault(phase, Account(phase))

    def switch(self, account: Account) -> Account:
        """Switch to another phase, and return the previous one."""
        now_s, before = self._clock(), self.current
        before.seconds += now_s - self.since_s
        self.since_s, self.current = now_s, account
        return before

    def booked(self, phase: str, action: str = "", except_in: str = "") -> AbstractContextManager[str]:
        """Return a reusable context that charges a phase, except within ``except_in``, and yields ``action``."""
        watch, account, excepted = self, self.account(phase), self.account(except_in) if except_in else None
        clock, push, pop = self._clock, self._around.append, self._around.pop

        # Both methods inline `switch` with closures, because every call and attribute access costs time.
        class Booked:
            __slots__ = ()

            def __enter__(self) -> str:
                now_s, around = clock(), watch.current
                push(around)
                watch.entered += 1
                if around is not excepted:
                    around.seconds += now_s - watch.since_s
                    watch.since_s, watch.current = now_s, account
                return action

            def __exit__(self, *error: object) -> None:
                now_s = clock()
                watch.current.seconds += now_s - watch.since_s
                watch.since_s, watch.current = now_s, pop()

        return Booked()

    def timed(self, phase: str, function: Callable[..., Any], except_in: str = "") -> Callable[..., Any]:
        """Wrap the function so that its time on this thread is charged to a phase, except within ``except_in``."""
        watch, clock, account, thread = self, self._clock, self.account(phase), get_ident()
        excepted = self.account(except_in) if except_in else None

        def timed(*args: Any, **kwargs: Any) -> Any:  # not with `booked`, whose two calls take longer than this
            around = watch.current
            if around is excepted or get_ident() != thread:
                return function(*args, **kwargs)
            now_s = clock()
            around.seconds += now_s - watch.since_s
            watch.since_s, watch.current = now_s, account
            watch.entered += 1
            try:
                return function(*args, **kwargs)
            finally:
                now_s = clock()
                watch.current.seconds += now_s - watch.since_s
                watch.since_s, watch.current = now_s, around

        return timed


class LoaderWaits:
    """The time that validations wait for their loaders."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.created_s = 0.0  # until the iterator is created, for which forked workers have started
        self.fetched_s = 0.0  # for batches
        self.batches = 0
        self._clock = clock
        self._since_s = 0.0

    def begin(self) -> None:
        """Begin a validation, or a wait in it."""
        self._since_s = self._clock()

    def created(self) -> None:
        """End the creation of the iterator."""
        self.created_s += self._clock() - self._since_s

    def fetched(self) -> None:
        """End the wait for a batch."""
        self.fetched_s += self._clock() - self._since_s
        self.batches += 1


class PhaseTimeline:
    """A run's time by phase in a bounded number of spans. At the limit, neighboring spans are merged in pairs."""

    def __init__(self, max_spans: int = 400, width_s: float = 0.25) -> None:
        self.due_s = width_s  # when the next span ends
        self._max_spans = max_spans
        self._width_s = width_s
        self._edges: list[tuple[float, Mapping[str, float], int]] = []  # time, and the totals until then

    def cut(self, now_s: float, seconds: Mapping[str, float], steps: int) -> None:
        """End a span; the first call begins one. ``seconds`` by phase and ``steps`` are totals since the start."""
        self._edges.append((now_s, dict(seconds), steps))
        if len(self._edges) > self._max_spans:
            self._edges[1:-1] = self._edges[2:-1:2]
            # Not shorter than these spans, or with long steps the first ones would be merged again and again.
            self._width_s = max(2 * self._width_s, (now_s - self._edges[0][0]) / len(self._edges))
        self.due_s = now_s + self._width_s

    def spans(self) -> list[PhaseSpan]:
        """Return the spans, oldest first."""
        found = []
        for (begin_s, before, steps_before), (end_s, seconds, steps) in pairwise(self._edges):
            spent: dict[str, float] = {}
            for phase, total_s in seconds.items():
                since_s, group = total_s - before.get(phase, 0.0), phase.partition("/")[0]
                if since_s > 0:
                    spent[group] = spent.get(group, 0.0) + since_s
            start_s = self._edges[0][0]
            found.append(PhaseSpan(begin_s - start_s, end_s - start_s, spent, steps - steps_before))
        return found


class StepTimeRecord:
    """A record of step times, and by phase of those that took more than twice the median, in bounded memory.

    A step only records the time. Durations are computed for many steps at once, while the code
    is in the processor's caches. ``accounts`` may grow; the ``pauses`` among them do not count as step time.
    """

    def __init__(self, accounts: Collection[Account], pauses: Collection[Account]) -> None:
        self.batch_items: int | None = None  # elements in the first tensor of the current batch
        self.left_out: set[int] = set()  # numbers of steps that the measurement made longer
        self._accounts = accounts
        self._pauses = [place for place, account in enumerate(accounts) if account in pauses]
        # Steps that have begun: number, time, elements in the batch of the step before, and seconds by account.
        self._begun: list[tuple[int, float, int | None, list[float]]] = []
        self._first_s: list[float] = []  # seconds by account when the first step began
        self._times_s: deque[float] = deque(maxlen=_MAX_TIMES)
        self._count = 0
        self._seconds = 0.0
        self._longest_s = 0.0
        self._slow_from_s = math.inf  # longer steps count as slow
        self._next_median = _FIRST_MEDIAN
        self._slow: dict[str, SlowSteps] = {}  # by phase
        # Elements in the batches of the last slow steps of each phase, and of other steps ("").
        self._items: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_MAX_KEPT))

    def begin_step(self, step: int, now_s: float) -> None:
        """Begin a step, which ends the previous one. Its number repeats if the previous one had no batch."""
        self._begun.append((step, now_s, self.batch_items, [account.seconds for account in self._accounts]))
        if len(self._begun) > _WORK_OUT_EVERY:
            self._work_out()

    def _work_out(self) -> None:
        begun, self._begun = self._begun, self._begun[-1:]
        for (step, began_s, _, before_s), (next_step, now_s, items, spent_s) in pairwise(begun):
            self._first_s = self._first_s or before_s
            if step == next_step or step in self.left_out:
                continue
            whole_s = step_s = now_s - began_s
            for place in self._pauses:
                step_s -= spent_s[place] - before_s[place]
            if step_s > self._longest_s:  # faster than max()
                self._longest_s = step_s
            self._times_s.append(step_s)
            self._seconds += step_s
            self._count += 1
            if whole_s > self._slow_from_s:
                self._add_slow(step, whole_s, before_s, spent_s, items)
            elif next_step % _SEE_BATCH_EVERY == 0 and items is not None:
                self._items[""].append(items)
            if self._count == self._next_median:
                self._next_median += 1 + self._count // 4
                self._slow_from_s = _SLOW_TIMES_MEDIAN * median(self._times_s)

    def _add_slow(
        self, step: int, whole_s: float, before_s: list[float], spent_s: list[float], items: int | None
    ) -> None:
        """Record a slow step, under the phase that took most time beyond its mean."""
        phase, most_s = "", -math.inf
        later = repeat(0.0)  # for accounts that did not exist yet
        times = zip(self._accounts, spent_s, chain(before_s, later), chain(self._first_s, later), strict=False)
        for account, now_s, then_s, first_s in times:
            beyond_s = now_s - then_s - (now_s - first_s) / self._count
            if now_s > then_s and beyond_s > most_s:
                phase, most_s = account.phase, beyond_s
        slow = self._slow.get(phase) or SlowSteps(phase=phase, count=0, seconds=0.0, steps=())
        steps = (*slow.steps, step)[-_MAX_KEPT:]
        self._slow[phase] = replace(slow, count=slow.count + 1, seconds=slow.seconds + whole_s, steps=steps)
        if items is not None:
            self._items[phase].append(items)

    def facts(self) -> StepTimes | None:
        """Return the step times so far; ``None`` before the second step. Only for the training thread."""
        self._work_out()
        if not self._times_s:
            return None
        ordered = sorted(self._times_s)
        return StepTimes(
            count=self._count,
            seconds=self._seconds,
            p50_s=ordered[(len(ordered) - 1) // 2],  # nearest ranks
            p95_s=ordered[math.ceil(0.95 * len(ordered)) - 1],
            max_s=self._longest_s,
            batch_items=self._usual_items(""),
            slow=tuple(replace(slow, batch_items=self._usual_items(phase)) for phase, slow in self._slow.items()),
        )

    def _usual_items(self, phase: str) -> float | None:
        return median(self._items[phase]) if self._items[phase] else None
