"""Accounting of time by phase, and a timeline of the phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
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
    """A run's time by phase in a bounded number of spans. At the limit, neighboring spans are merged in pairs."""

    def __init__(self, max_spans: int = 400, width_s: float = 0.25) -> None:
        self.due_s = width_s  # when the next span ends
        self._max_spans = max_spans
        self._width_s = width_s
        self._edges: list[tuple[float, Mapping[str, float], int]] = []  # time, and the totals until then

    def start(self, now_s: float) -> None:
        """Begin the first span."""
        self.cut(now_s, {}, 0)

    def cut(self, now_s: float, seconds: Mapping[str, float], steps: int) -> None:
        """End a span. ``seconds`` by phase and ``steps`` are totals since the start."""
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
