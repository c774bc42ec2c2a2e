"""How long each training step took, in bounded memory: percentiles, and the steps that took far longer than others."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from itertools import zip_longest
from statistics import median

from lightning_gpu_tools.training.run_measurements import SlowSteps, StepTimes
from lightning_gpu_tools.training.stopwatch import Account

# gpuprof's rule: the times of steps are uneven where the 99th percentile exceeds twice the median.
_SLOW_TIMES_MEDIAN = 2.0
# Our default: a bin is 1 to 2 % wide, and stands for the mean of its steps.
_BINS_PER_OCTAVE = 64
# Our defaults: the first median is taken after so many steps, and so many slow steps of a phase are kept.
_FIRST_MEDIAN = 8
_MAX_KEPT = 64
# The batches of one step in eight show how long they usually are.
_SEE_BATCH_EVERY = 8


class StepTimeRecord:
    """Keeps how long steps took: all of them in bins, and by phase those that took more than twice the median.

    A month of training takes as much memory as an hour, and a step costs one to two microseconds.

    Args:
        accounts: The time by phase, as a stopwatch books it; may grow.
        pauses: Those of them that are no part of a step's time.

    Attributes:
        batch_items: Numbers in the first tensor of the current batch, set by whoever sees it; ``None`` if unknown.
    """

    def __init__(self, accounts: Collection[Account], pauses: Collection[Account]) -> None:
        self.batch_items: int | None = None
        self._accounts, self._pauses = accounts, pauses
        self._bins: dict[int, tuple[int, float]] = {}  # number of the bin -> steps, seconds
        self._count = 0
        self._longest_s, self._longest = 0.0, 0
        self._began_s = 0.0
        self._step = 0
        self._first: list[float] | None = None
        self._before: list[float] = []
        self._paused_s = 0.0
        self._slow_from_s = math.inf
        self._next_median = _FIRST_MEDIAN
        self._slow: dict[str, _SlowSteps] = {}
        self._in_slow_s: defaultdict[str, float] = defaultdict(float)
        self._items: deque[int] = deque(maxlen=_MAX_KEPT)

    def begin_step(self, step: int, now_s: float) -> None:
        """Begin a step, which ends the one before; its number is the same again if that had no batch.

        The accounts are booked up to ``now_s``.
        """
        before, self._before = self._before, [account.seconds for account in self._accounts]
        began_s, self._began_s = self._began_s, now_s
        paused_before_s, self._paused_s = self._paused_s, 0.0
        for account in self._pauses:
            self._paused_s += account.seconds
        had_no_batch, self._step = step == self._step, step
        if self._first is None:
            self._first = self._before
            return
        if had_no_batch:
            return
        whole_s = now_s - began_s
        step_s = whole_s - (self._paused_s - paused_before_s)
        if step_s > self._longest_s:
            self._longest_s, self._longest = step_s, step - 1
        fraction, octave = math.frexp(step_s)
        number = int((octave + 2 * fraction) * _BINS_PER_OCTAVE)
        steps, seconds = self._bins.get(number, (0, 0.0))
        self._bins[number] = steps + 1, seconds + step_s
        self._count += 1
        if whole_s > self._slow_from_s:
            self._add_slow(step - 1, whole_s, before)
        elif step % _SEE_BATCH_EVERY == 0 and self.batch_items is not None:
            self._items.append(self.batch_items)
        if self._count == self._next_median:
            self._next_median += 1 + self._count // 4
            self._slow_from_s = _SLOW_TIMES_MEDIAN * _percentile(self._bins, 0.5)

    def _add_slow(self, step: int, whole_s: float, before: list[float]) -> None:
        assert self._first is not None
        phase, most_s, in_phase_s = "", -math.inf, 0.0
        for i, account in enumerate(self._accounts):
            seconds = self._before[i] - (before[i] if i < len(before) else 0.0)
            if seconds <= 0:
                continue
            self._in_slow_s[account.phase] += seconds
            mean_s = (self._before[i] - (self._first[i] if i < len(self._first) else 0.0)) / self._count
            if seconds - mean_s > most_s:
                phase, most_s, in_phase_s = account.phase, seconds - mean_s, seconds
        slow = self._slow.get(phase) or _SlowSteps()
        slow.count += 1
        slow.seconds += whole_s
        slow.in_phase_s += in_phase_s
        slow.steps.append(step)
        if self.batch_items is not None:
            slow.items.append(self.batch_items)
        self._slow[phase] = slow

    def facts(self) -> StepTimes | None:
        """Return what is known so far; ``None`` before the second step. May be asked in any thread."""
        bins, slow_steps, in_slow_s = dict(self._bins), dict(self._slow), dict(self._in_slow_s)
        if not bins or self._first is None:
            return None
        count = sum(steps for steps, _ in bins.values())
        booked_s = {
            account.phase: now_s - before_s
            for account, now_s, before_s in zip_longest(list(self._accounts), self._before, self._first, fillvalue=0.0)
            if isinstance(account, Account)
        }
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
            longest=self._longest,
            batch_items=median(self._items) if self._items else None,
            slow=tuple(summary(phase, slow) for phase, slow in slow_steps.items()),
        )


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
    """Slow steps that lost most of their time in the same phase."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = self.in_phase_s = 0.0
        self.steps: deque[int] = deque(maxlen=_MAX_KEPT)
        self.items: deque[int] = deque(maxlen=_MAX_KEPT)
