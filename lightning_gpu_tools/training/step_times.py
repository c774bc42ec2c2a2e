"""Times of training steps in bounded memory: percentiles, and the steps that took far longer than others."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, repeat
from statistics import median

from lightning_gpu_tools.training.run_measurements import SlowSteps, StepTimes
from lightning_gpu_tools.training.stopwatch import Account

_SLOW_TIMES_MEDIAN = 2.0  # gpuprof's rule: steps are uneven if their 99th percentile exceeds this
# Our defaults.
_BINS_PER_OCTAVE = 64  # each 1 to 2% wide
_FIRST_MEDIAN = 8  # steps before the first median
_MAX_KEPT = 64  # slow steps per phase
_SEE_BATCH_EVERY = 8  # steps, to sample the usual size
_WORK_OUT_EVERY = 32  # steps


class StepTimeRecord:
    """A record of step times: all steps in bins, and by phase those that took more than twice the median.

    Its memory is bounded. A step only records the time. Durations are computed for many steps at once, while the code
    is in the processor's caches. ``accounts`` may grow; the ``pauses`` among them do not count as step time.
    """

    def __init__(self, accounts: Collection[Account], pauses: Collection[Account]) -> None:
        self.batch_items: int | None = None  # elements in the first tensor of the current batch
        self.left_out: set[int] = set()  # numbers of steps that the measurement made longer
        self._accounts = accounts
        self._pauses = [place for place, account in enumerate(accounts) if account in pauses]
        self._begun: list[tuple[int, float, int | None, list[float]]] = []
        self._bins: dict[int, tuple[int, float]] = {}  # number of the bin -> steps, seconds
        self._count = 0
        self._longest_s = 0.0
        self._began_s = 0.0
        self._step = 0
        self._first: list[float] = []
        self._before: list[float] = []
        self._paused_s = 0.0
        self._slow_from_s = math.inf  # longer steps count as slow
        self._next_median = _FIRST_MEDIAN
        self._slow: defaultdict[str, _SlowSteps] = defaultdict(_SlowSteps)
        self._in_slow_s: defaultdict[str, float] = defaultdict(float)
        self._items: deque[int] = deque(maxlen=_MAX_KEPT)

    def begin_step(self, step: int, now_s: float) -> None:
        """Begin a step, which ends the previous one. Its number repeats if the previous one had no batch."""
        self._begun.append((step, now_s, self.batch_items, [account.seconds for account in self._accounts]))
        if len(self._begun) == _WORK_OUT_EVERY:
            self._work_out()

    def _work_out(self) -> None:
        begun, self._begun = self._begun, []
        for step in begun:
            self._add(*step)

    def _add(self, step: int, now_s: float, items: int | None, spent_s: list[float]) -> None:
        before, self._before = self._before, spent_s
        began_s, self._began_s = self._began_s, now_s
        paused_before_s, self._paused_s = self._paused_s, 0.0
        for place in self._pauses:
            self._paused_s += spent_s[place]
        had_no_batch, self._step = step == self._step, step
        if not self._first:
            self._first = self._before
            return
        if had_no_batch or step - 1 in self.left_out:
            return
        whole_s = now_s - began_s
        step_s = whole_s - (self._paused_s - paused_before_s)
        if step_s > self._longest_s:  # faster than max()
            self._longest_s = step_s
        fraction, octave = math.frexp(step_s)
        number = int((octave + 2 * fraction) * _BINS_PER_OCTAVE)
        steps, seconds = self._bins.get(number, (0, 0.0))
        self._bins[number] = steps + 1, seconds + step_s
        self._count += 1
        if whole_s > self._slow_from_s:
            self._add_slow(step - 1, whole_s, before, items)
        elif step % _SEE_BATCH_EVERY == 0 and items is not None:
            self._items.append(items)
        if self._count == self._next_median:
            self._next_median += 1 + self._count // 4
            self._slow_from_s = _SLOW_TIMES_MEDIAN * _percentile(self._bins, 0.5)

    def _add_slow(self, step: int, whole_s: float, before: list[float], items: int | None) -> None:
        phase, most_s, in_phase_s = "", -math.inf, 0.0
        times = zip(self._accounts, self._before, _padded(before), _padded(self._first), strict=False)
        for account, now_s, before_s, first_s in times:
            seconds = now_s - before_s
            if seconds > 0:
                self._in_slow_s[account.phase] += seconds
                beyond_s = seconds - (now_s - first_s) / self._count
                if beyond_s > most_s:
                    phase, most_s, in_phase_s = account.phase, beyond_s, seconds
        slow = self._slow[phase]
        slow.count += 1
        slow.seconds += whole_s
        slow.in_phase_s += in_phase_s
        slow.steps.append(step)
        if items is not None:
            slow.items.append(items)

    def facts(self) -> StepTimes | None:
        """Return the step times so far; ``None`` before the second step. Only for the training thread."""
        self._work_out()
        bins, slow_steps, in_slow_s = self._bins, self._slow, self._in_slow_s
        if not bins:
            return None
        count = sum(steps for steps, _ in bins.values())
        times = zip(list(self._accounts), self._before, _padded(self._first), strict=False)
        booked_s = {account.phase: now_s - first_s for account, now_s, first_s in times}
        others = max(1, count - sum(slow.count for slow in slow_steps.values()))

        def summary(phase: str, slow: _SlowSteps) -> SlowSteps:
            usual_s = max(0.0, booked_s.get(phase, 0.0) - in_slow_s.get(phase, 0.0)) / others
            return SlowSteps(
                phase=phase,
                count=slow.count,
                seconds=slow.seconds,
                excess_s=max(0.0, slow.in_phase_s - slow.count * usual_s),
                steps=tuple(slow.steps),
                batch_items=median(slow.items) if slow.items else None,
            )

        return StepTimes(
            count=count,
            seconds=sum(seconds for _, seconds in bins.values()),
            p50_s=_percentile(bins, 0.50),
            p95_s=_percentile(bins, 0.95),
            max_s=self._longest_s,
            batch_items=median(self._items) if self._items else None,
            slow=tuple(summary(phase, slow) for phase, slow in slow_steps.items()),
        )


def _padded(seconds: list[float]) -> Iterable[float]:
    return chain(seconds, repeat(0.0))  # for accounts that did not exist yet


def _percentile(bins: Mapping[int, tuple[int, float]], share: float) -> float:
    """Return the nearest-rank percentile, as the mean of its bin."""
    rank, of_bin = share * sum(steps for steps, _ in bins.values()), 0.0
    for number in sorted(bins):
        steps, seconds = bins[number]
        of_bin, rank = seconds / steps, rank - steps
        if rank <= 0:
            break
    return of_bin


class _SlowSteps:
    def __init__(self) -> None:
        self.count = 0
        self.seconds = self.in_phase_s = 0.0
        self.steps: deque[int] = deque(maxlen=_MAX_KEPT)
        self.items: deque[int] = deque(maxlen=_MAX_KEPT)
