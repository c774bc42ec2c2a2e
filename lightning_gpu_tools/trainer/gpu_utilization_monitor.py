"""A callback that logs GPU utilization during training, and reports at the end where the time went."""

from __future__ import annotations

import os
from typing import Literal

from typing_extensions import override

from lightning_gpu_tools.arguments import check_seconds, checked
from lightning_gpu_tools.reports.report import COMPLETED, FOLDER_NAME
from lightning_gpu_tools.reports.report_file import ReportFile, warn_if_not_writable
from lightning_gpu_tools.runs import run_report
from lightning_gpu_tools.runs.notify import notify
from lightning_gpu_tools.runs.stall_watch import check_stall_after
from lightning_gpu_tools.trainer.families import Trainer
from lightning_gpu_tools.trainer.measuring_callback import FitSession, MeasuringCallback


class GPUUtilizationMonitor(MeasuringCallback):
    """A callback that samples the GPUs in the background, logs metrics, and reports at the end where the time went.

    Every logger gets the GPUs of rank 0's node at the Trainer's ``log_every_n_steps``, and those of other nodes about
    once a minute in jobs of at most 64 ranks. Values that the hardware does not report are absent, never 0. Validation
    is only in the report.

    Metrics of GPU ``i`` (torch device index; with ``devices="all"``, that of ``nvidia-smi``) are ``gpu/<i>/...``, on
    node ``n`` > 0 ``node<n>/gpu/<i>/...``, over the time since the last point:

    - ``utilization_percent/{mean,p5,p95}``: share of time in which at least one kernel was running
    - ``memory_used_bytes``, ``memory_total_bytes``: used by all processes; total of the GPU
    - ``power_watts``, ``temperature_celsius``: at the last poll
    - ``energy_joules``: since training started, from a counter
    - ``throttled_percent``: share of time in which power or heat lowered the clocks
    - ``pcie_{rx,tx}_bytes_per_second``: received and sent over PCIe
    - ``{sm_active,sm_occupancy,tensor_active,dram_active}_percent``: Hopper and later
    - ``{own,others}_memory_bytes``, ``{own,others}_utilization_percent``: of this job's processes and of all other
      listed ones, where the driver reports them

    At the end of a fit, even of a failed one, rank 0 prints the report, and writes it as ``gpu_report.json`` to the log
    directory of the Trainer's logger, or without a logger to the folder ``gpu_report`` of ``default_root_dir``, which
    may be a URL. It is also written at least once a minute. Loggers get a summary as ``gpu_tools/...``. With the
    ``plot`` extra, a child process then draws ``gpu_report.png`` and ``gpu_report.html``. ``validate``, ``test`` and
    ``predict`` have such reports in folders of these names below that one. A failure of the monitor never stops
    training.

    Args:
        interval_s: Seconds between two polls of the driver's buffer, which holds several seconds.
        devices: ``"trainer"`` = the GPUs that the Trainer uses; ``"all"`` = every GPU of the node, even when training
            on the CPU.
        report: Whether to print and write the report.
        gpm: Whether to use the GPU performance monitors of Hopper and later, which are shared with Nsight and DCGM.
        stall_after_s: Seconds without progress (a step, a batch, a hook, bytes of a checkpoint) after which to warn
            (:class:`~lightning_gpu_tools.errors.StalledTrainingWarning`) with the phase, the stack, and the rank that
            all others wait for; ``None`` = never. ``"auto"`` is the larger of 60 s and 5 times the longest time without
            progress so far; in the first steps, callbacks, loggers and outside of steps, it is at least 450 s.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.

    Example::

        trainer = Trainer(callbacks=[GPUUtilizationMonitor()])
    """

    @checked
    def __init__(
        self,
        *,
        interval_s: float = 1.0,
        devices: Literal["trainer", "all"] = "trainer",
        report: bool = True,
        gpm: bool = True,
        stall_after_s: float | Literal["auto"] | None = "auto",
    ) -> None:
        check_seconds(interval_s, "interval_s")
        check_stall_after(stall_after_s)
        if devices not in ("trainer", "all"):
            raise ValueError(f'devices must be "trainer" or "all", got {devices!r}.')
        super().__init__()
        self.interval_s = interval_s
        self.devices = devices
        self.report = report
        self.gpm = gpm
        self.stall_after_s = stall_after_s
        self._folder = ""

    @override
    def _opened(self, trainer: Trainer, session: FitSession) -> None:
        if self.report:
            log_dir = trainer.log_dir  # a collective call: every rank makes it
            # Without a logger, log_dir is the folder of everything else.
            own = os.path.join(trainer.default_root_dir, FOLDER_NAME)
            folder, stage = os.fspath(log_dir) if trainer.loggers and log_dir else own, session.run.stage
            self._folder = folder if stage == "fit" else os.path.join(folder, stage)
            if trainer.is_global_zero:
                warn_if_not_writable(self._folder)
        session.monitor(
            devices=self.devices,
            interval_s=self.interval_s,
            gpm=self.gpm,
            stall_after_s=self.stall_after_s,
            folder=self._folder if self.report else None,
        )

    @override
    def _began(self, trainer: Trainer, session: FitSession) -> None:
        if self.report and trainer.is_global_zero and session.clock.ran:
            session.running = run_report.RunningReport(session, ReportFile(self._folder))

    @override
    def _stepped(self, trainer: Trainer, session: FitSession) -> float:
        next_step = session.log_if_due()
        if session.report_wanted and session.running is not None:
            session.running.measure()
        return next_step

    @override
    def _ended(self, trainer: Trainer, session: FitSession, outcome: str) -> None:
        if not self.report:
            return
        if session.recorder is None:  # training has not begun
            if trainer.is_global_zero and outcome != COMPLETED:
                notify("error", self._folder, outcome=outcome)
            return
        if not trainer.is_global_zero:
            if session.ending.out_of_memory is not None and (diagnosis := run_report.conclude(session)) is not None:
                run_report.say_verdict(diagnosis)  # rank 0 may wait for this rank forever
            return
        if not session.clock.ran and session.ending.out_of_memory is None and session.ending.failure is None:
            missing = ", ".join(session.unseen)  # printed, because filters may hide a warning
            run_report.say(f"This run has no report, because this version of Lightning lacks {missing}.")
            return
        report = run_report.describe(session, outcome)
        running, session.running = session.running, None
        # None if another callback failed when training started.
        file = ReportFile(self._folder) if running is None else running.file
        run_report.publish(report, file, session.run)
