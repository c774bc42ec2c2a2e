"""The report of a training run as data. docs/report_schema.md describes its JSON form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.advice.memory_account import MemoryAccount
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.processes import ProcessId
from lightning_gpu_tools.training.run_measurements import ACTIVITIES, LoaderResult, PhaseSpan, RankStep, SourceLine

FILE_NAME = "gpu_report.json"
PREVIOUS_NAME = "gpu_report.previous.json"
DRAWN = PLOT_NAME, PAGE_NAME = "gpu_report.png", "gpu_report.html"
# The folder of the report if the run has no folder of its own, as with logger=False.
FOLDER_NAME = "gpu_report"
COMPLETED = "completed"
# The first words of an outcome: of a run in progress, and of a run that ended without a final report.
RUNNING, CUT_OFF = "running", "cut off"
# Limits for a report that is read from a file.
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
StepSeconds = Annotated[float, Meta(ge=1e-9)]  # the resolution of time.perf_counter_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report of one run: of a fit, validate, test or predict. ``None`` = unknown or absent.

    Attributes:
        outcome: ``"completed"``, or for example ``"stopped by KeyError at step 812"``. A file written during the run
            has ``"running"``, which ``load_report`` turns into ``"running: step 812 so far"`` or, if the process has
            ended, ``"cut off after step 812"``.
        started_at: Start time, ISO 8601, UTC.
        steps: Number of training steps; for validate, test and predict, of batches.
        wall_s: Wall time of the run; ``phase_s`` adds up to it.
        phase_s: Wall time by phase; see docs/report_schema.md.
        step_s_median: Median step time after the warm-up, without validation, checkpoints and epoch starts.
        diagnosis: Verdict and findings.
        gpus: Monitored GPUs.
        gpu_note: Reason why there are none, or values that could not be read.
        startup_s: Wall time from the start of the process to the end of the first step, by part: ``own_code`` (also
            imports), ``setup``, ``sanity_check``, ``first_batch``, ``compilation``, ``first_step`` and ``other``. For a
            later run of the process, and in a notebook, from the start of the run. Empty before the end of that step.
            ``wall_s`` starts after the sanity check.
        step_s_p95: 95th percentile of the same step times.
        step_s_max: Longest of the same step times.
        samples_per_s: Samples of all ranks per second, over the same steps.
        step_s_blocks: Mean time per step in each of at most 128 consecutive blocks of steady steps, without validation
            and checkpoints. Their spread is the run's own noise.
        warm_up_steps: Number of first steps that are not steady: 20, or more if the workers keep many batches ready, or
            if the loader's settings changed.
        monitor_us_per_step: Lower bound on the time that this package added to each step, in microseconds: its own work
            in the training thread, without its wrappers.
        monitor_thread_us_per_step: CPU time of its background threads per step, in microseconds.
        confirmation: Measured result of following the previous run's advice.
        core_wait_share: Fraction of the steady steps in which the training thread was runnable but had no core.
        others_cores: Mean number of this job's cores that other programs kept busy.
        unseen: Facts that could not be measured with this kernel, driver, Lightning or torch, or without permission;
            their time counts toward the surrounding phase.
        spans: Phases over time, in at most 401 parts.
        lines: Source lines at which the training thread of rank 0 and the workers of its loader were sampled, at most
            1,000, most frequent first.
        gpu_step_s: GPU time of a training step, by part; parts whose time is unknown are absent.
        ranks: Steps of each rank that reported; empty with one rank.
        memory: Memory use of each GPU of the job.
        claimed_bytes: Memory of each GPU of rank 0's node that the job claimed with ``min_free``.
        allocator_failures: Number of times that torch's allocator ran out of memory on rank 0 and the run continued:
            the program or cuDNN caught the error, or a search for the largest batch size provoked it.
        stalls: Times in which training made no progress, with the reason.
        failure: Why the run ended and what to do, if known beyond its error.
        loader: Result of NumWorkersFinder, if it finished.
        settings: Settings that two runs must share to be compared: CPU, accelerator, precision, batch size, loader,
            ...; model, dataset and stage (if it is not a fit) show whether they are runs of the same program.
        process: Process that wrote the report.
    """

    outcome: str
    started_at: str
    steps: Count
    wall_s: Seconds
    phase_s: Mapping[str, Seconds]
    step_s_median: Seconds | None
    diagnosis: Diagnosis
    gpus: tuple[GpuSummary, ...] = ()
    gpu_note: str | None = None
    startup_s: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    step_s_p95: Seconds | None = None
    step_s_max: Seconds | None = None
    samples_per_s: float | None = None
    step_s_blocks: tuple[StepSeconds, ...] = ()
    warm_up_steps: Count = 20
    monitor_us_per_step: float | None = None
    monitor_thread_us_per_step: float | None = None
    confirmation: str | None = None
    core_wait_share: float | None = None
    others_cores: float | None = None
    unseen: tuple[str, ...] = ()
    spans: tuple[PhaseSpan, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    gpu_step_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ranks: tuple[RankStep, ...] = ()
    memory: tuple[MemoryAccount, ...] = ()
    claimed_bytes: Count | None = None
    allocator_failures: int = 0
    stalls: tuple[Stall, ...] = ()
    failure: str | None = None
    loader: LoaderResult | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    process: ProcessId | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the run wrote a final report, even after an error."""
        return not self.outcome.startswith((RUNNING, CUT_OFF))

    @property
    def activity(self) -> str:
        """What the run did, in a word."""
        return ACTIVITIES.get(str(self.settings.get("stage")), "training")
