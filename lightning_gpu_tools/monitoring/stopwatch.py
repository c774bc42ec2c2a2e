"""Books time on phases, and keeps when which phase took how much. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple


class PhaseSpan(NamedTuple):
    """A part of a run and what it was spent on.

    Attributes:
        begin_s: Seconds since the start of the run.
        end_s: Likewise.
        phase_s: Seconds by phase, without what stands behind a slash; they add up to the span.
    """

    begin_s: float
    end_s: float
    phase_s: Mapping[str, float]


class Stopwatch:
    """Books every instant on exactly one phase, the innermost one, so that the phases add up to the time.

    Attributes:
        seconds: Time by phase, up to the last change of phase.
        since_s: When that was.
        pairs: How often a phase was entered and left.
        phases: The phases that one is in, the innermost last.
    """

    def __init__(self, base: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self.since_s = 0.0
        self.pairs = 0
        self.phases = [base]
        self._clock = clock

    def start(self) -> None:
        """Begin: what is booked starts here."""
        self.since_s = self._clock()

    def enter(self, phase: str) -> None:
        """Book what has gone by on the present phase, and be in this one from here on."""
        now = self._clock()
        current = self.phases[-1]
        self.seconds[current] = self.seconds.get(current, 0.0) + now - self.since_s
        self.since_s = now
        self.pairs += 1
        self.phases.append(phase)

    def leave(self) -> None:
        """Book what has gone by on the present phase, and go back to the one around it."""
        now = self._clock()
        phase = self.phases.pop()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.since_s
        self.since_s = now

    def timed(self, phase: str, function: Callable[..., Any], except_in: str = "") -> Callable[..., Any]:
        """Return the function with its time booked on ``phase``, except where it is called in phase ``except_in``."""
        phases, enter, leave = self.phases, self.enter, self.leave
        if except_in:

            def unless(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if phases[-1] == except_in else timed(*args, **kwargs)

        def timed(*args: Any, **kwargs: Any) -> Any:
            enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                leave()

        return unless if except_in else timed


def seconds_per_call(function: Callable[[], object], calls: int = 200, rounds: int = 5) -> float:
    """Return what a call of this function costs: the median of some rounds, in seconds of this thread's CPU time."""
    costs = []
    for _ in range(rounds):
        began_s = time.thread_time()
        for _ in range(calls):
            function()
        costs.append((time.thread_time() - began_s) / calls)
    return median(costs)


class PhaseTimeline:
    """What a run was spent on, span by span, in at most so many spans: when they are used up, neighbours become one.

    Args:
        max_spans: The most spans to keep.
        width_s: Length of a span at first. It doubles whenever the spans are used up.

    Attributes:
        due_s: From when on the next regular span can be cut.
    """

    def __init__(self, max_spans: int = 400, width_s: float = 0.25) -> None:
        self.due_s = width_s
        self._max_spans = max_spans
        self._width_s = width_s
        self._start_s = self._begin_s = 0.0
        self._before: dict[str, float] = {}
        self._spans: list[tuple[float, float, dict[str, float]]] = []

    def start(self, now_s: float) -> None:
        """Begin the first span."""
        self._start_s = self._begin_s = now_s
        self.due_s = now_s + self._width_s

    def cut(self, now_s: float, seconds: Mapping[str, float]) -> None:
        """End a span.

        Args:
            now_s: Up to when ``seconds`` counts.
            seconds: What was spent on which phase since the start.
        """
        spent: dict[str, float] = {}
        for phase, total_s in seconds.items():
            since_s = total_s - self._before.get(phase, 0.0)
            if since_s > 0:
                group = phase.partition("/")[0]
                spent[group] = spent.get(group, 0.0) + since_s
        self._spans.append((self._begin_s, now_s, spent))
        self._before, self._begin_s = dict(seconds), now_s
        if len(self._spans) > self._max_spans:
            self._width_s *= 2
            self._spans = [_join(self._spans[i : i + 2]) for i in range(0, len(self._spans), 2)]
        self.due_s = now_s + self._width_s

    def cut_at_edge(self, now_s: float, seconds: Mapping[str, float]) -> None:
        """End a span early, so that what begins or ends here has an edge, unless the span has hardly begun."""
        if now_s - self._begin_s > self._width_s / 8:
            self.cut(now_s, seconds)

    def spans(self) -> list[PhaseSpan]:
        """Return the spans, oldest first."""
        return [PhaseSpan(begin - self._start_s, end - self._start_s, spent) for begin, end, spent in self._spans]


def _join(spans: list[tuple[float, float, dict[str, float]]]) -> tuple[float, float, dict[str, float]]:
    spent: dict[str, float] = {}
    for _, _, part in spans:
        for phase, seconds in part.items():
            spent[phase] = spent.get(phase, 0.0) + seconds
    return spans[0][0], spans[-1][1], spent
