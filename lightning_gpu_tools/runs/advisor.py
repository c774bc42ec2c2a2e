"""An advisor that repeatedly judges a run in progress, and warns once about low utilization."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from lightning_gpu_tools.advice.findings import AT_END, MIN_SECONDS, MIN_STEPS, MIN_UTILIZATION_PERCENT
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.runs.run_report import conclude
from lightning_gpu_tools.runs.session import Session
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS
from lightning_gpu_tools.units import check_percentage


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of a judgment; see ``GPUUtilizationAdvisor``."""

    min_utilization_percent: float = MIN_UTILIZATION_PERCENT
    min_steps: int = MIN_STEPS
    min_seconds: float = MIN_SECONDS

    def __post_init__(self) -> None:
        check_percentage(self.min_utilization_percent, "min_utilization_percent")
        if self.min_steps < 1:
            raise ValueError(f"min_steps must be at least 1, got {self.min_steps!r}.")
        if not self.min_seconds >= 0:
            raise ValueError(f"min_seconds must not be negative, got {self.min_seconds!r}.")


class Advisor:
    """The advisor of one run, whose session has begun."""

    def __init__(self, session: Session, thresholds: Thresholds) -> None:
        session.thresholds = asdict(replace(thresholds, min_seconds=AT_END * thresholds.min_seconds))
        self._session = session
        self._min_seconds = thresholds.min_seconds
        self._next_judgment: float = WARM_UP_STEPS + thresholds.min_steps  # a step of the clock

    def after_step(self) -> float:
        """Judge the run if it is due; return the step of the clock after which to call this again."""
        if self._session.clock.steps >= self._next_judgment:
            self._session.clock.as_own_work(self._judge)
        return self._next_judgment

    def _judge(self) -> None:
        session = self._session
        # 10% later each time: early enough for short steps, and rare for very short ones.
        later = self._next_judgment + max(10, self._next_judgment // 10)
        if sum(block.wall_s for block in session.clock.blocks) < self._min_seconds:
            self._next_judgment = later
            return
        recorder = session.begin()
        exchange, measured = recorder.ranks.exchange, recorder.measurements()
        # Rank 0 may still lack the speed of other ranks.
        is_early = session.run.place.rank == 0 and exchange.ranks > max(1, len(measured.ranks))
        diagnosis = conclude(session, measured)
        if diagnosis is None or diagnosis.verdict == "too_short" or is_early:
            self._next_judgment = later
        elif diagnosis.verdict != "low":
            self._next_judgment *= 2  # judging costs about a millisecond
        else:
            self._next_judgment = math.inf
            # The cost of the first cause and the change, without their details: the report has these.
            sentences = diagnosis.why.split(". ")
            costs = next((sentence for sentence in sentences if "of the wall time" in sentence), sentences[0])
            change, _, _ = diagnosis.next_step.partition(". ")
            message = f"{costs.partition(' (')[0].rstrip('.')}. {change.rstrip('.')}."
            session.warn(message, category=LowGPUUtilizationWarning)
