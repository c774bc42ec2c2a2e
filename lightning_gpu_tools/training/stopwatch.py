"""Accounting of time by phase, and a timeline of the phases."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple


class PhaseSpan(NamedTuple):
    """A part of a run, and the phases that its time was spent on."""

    begin_s: float  # since the start of the run
    end_s: float
    phase_s: Mapping[str, float]  # by phase, without the part after a slash; adds up to the span
    steps: int = 0  # number of steps that began in it


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
        self.since_s = 0.0  # time is charged up to this moment
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

    def start(self) -> None:
        """Start charging time."""
        self.since_s = self._clock()

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

    def timed(
        self, phase: str, function: Callable[..., Any], except_in: str = "", thread: int | None = None
    ) -> Callable[..., Any]:
        """Wrap the function so that its time is charged to a phase, except within ``except_in``, or off ``thread``."""
        watch, clock, account = self, self._clock, self.account(phase)
        excepted = self.account(except_in) if except_in else None

        def timed(*args: Any, **kwargs: Any) -> Any:  # not with `booked`, whose two calls take longer than this
            around = watch.current
            if around is excepted or (thread is not None and get_ident() != thread):
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
        self.first_s = 0.0  # from then on, until the first batch
        self.others_s = 0.0  # for all other batches
        self.batches = 0
        self._clock = clock
        self._is_first = True
        self._since_s = 0.0

    def begin(self) -> None:
        """Begin a validation, or a wait in it."""
        self._since_s = self._clock()

    def created(self) -> None:
        """End the creation of the iterator."""
        self.created_s += self._clock() - self._since_s
        self._is_first = True

    def fetched(self) -> None:
        """End the wait for a batch."""
        waited_s = self._clock() - self._since_s
        self.batches += 1
        if self._is_first:
            self._is_first = False
            self.first_s += waited_s
        else:
            self.others_s += waited_s


class PhaseTimeline:
    """A run's time by phase, in a bounded number of spans. At the limit, neighboring spans are merged in pairs."""

    def __init__(self, max_spans: int = 400, width_s: float = 0.25) -> None:
        self.due_s = width_s  # when the next regular span ends
        self._max_spans = max_spans
        self._width_s = width_s
        self._start_s = self._begin_s = 0.0
        self._before: dict[str, float] = {}
        self._steps_before = 0
        self._spans: list[PhaseSpan] = []

    def start(self, now_s: float) -> None:
        """Begin the first span."""
        self._start_s = self._begin_s = now_s
        self.due_s = now_s + self._width_s

    def cut(self, now_s: float, seconds: Mapping[str, float], steps: int) -> None:
        """End a span. ``seconds`` by phase and ``steps`` are totals since the start."""
        spent: dict[str, float] = {}
        for phase, total_s in seconds.items():
            since_s = total_s - self._before.get(phase, 0.0)
            if since_s > 0:
                group = phase.partition("/")[0]
                spent[group] = spent.get(group, 0.0) + since_s
        self._spans.append(PhaseSpan(self._begin_s, now_s, spent, steps - self._steps_before))
        self._before, self._begin_s, self._steps_before = dict(seconds), now_s, steps
        if len(self._spans) > self._max_spans:
            self._spans = [_join(self._spans[i : i + 2]) for i in range(0, len(self._spans), 2)]
            # Not shorter than these spans, or with long steps the first ones would be merged again and again.
            self._width_s = max(2 * self._width_s, (now_s - self._start_s) / len(self._spans))
        self.due_s = now_s + self._width_s

    def cut_at_edge(self, now_s: float, seconds: Mapping[str, float], steps: int) -> None:
        """End a span early because something begins or ends here, unless the span has only just begun."""
        if now_s - self._begin_s > self._width_s / 8:
            self.cut(now_s, seconds, steps)

    def spans(self) -> list[PhaseSpan]:
        """Return the spans, oldest first."""
        start_s = self._start_s
        return [one._replace(begin_s=one.begin_s - start_s, end_s=one.end_s - start_s) for one in self._spans]


def _join(spans: list[PhaseSpan]) -> PhaseSpan:
    spent: Counter[str] = Counter()
    for span in spans:
        spent.update(span.phase_s)  # adds the values
    return PhaseSpan(spans[0].begin_s, spans[-1].end_s, dict(spent), sum(span.steps for span in spans))
