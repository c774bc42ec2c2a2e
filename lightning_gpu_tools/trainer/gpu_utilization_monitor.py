"""Logs how busy the GPUs are while training runs, and reports at its end where the time went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs.run_report import RunningReport, describe, publish, say, say_verdict, warn_if_not_writable
from lightning_gpu_tools.runs.session import check_interval
from lightning_gpu_tools.runs.stall_watch import check_stall_after
from lightning_gpu_tools.trainer.families import Trainer
from lightning_gpu_tools.trainer.measuring_callback import MeasuringCallback
from lightning_gpu_tools.trainer.session import FitSession
from lightning_gpu_tools.trainer.wrappers import Wrappers


class GPUUtilizationMonitor(MeasuringCallback):
    """Samples the GPUs from a background thread, logs what they did, and reports at the end where the time went.

    One thread of this process reads the driver's own buffer of samples, so that no sample is missed and the training
    thread never asks the driver. Global rank 0 logs the GPUs of its node, through every logger of the Trainer, at the
    Trainer's ``log_every_n_steps``, and about once a minute, without a collective, those of other nodes; in a job of
    more than 64 GPUs, ``gpu/all/<metric>/{min,mean,max}`` instead of these. What the hardware does not report is
    absent, never 0. Validation is kept apart: it is in the report only.

    Logged metrics, for each GPU ``i`` (torch device index; with ``devices="all"`` the index that ``nvidia-smi`` shows;
    on node ``n`` > 0 ``node<n>/gpu/<i>/...``), over the time since the last point unless it says otherwise:

    ============================================ ===================== ==============================================
    ``gpu/<i>/...``                              unit                  meaning
    ============================================ ===================== ==============================================
    ``utilization_percent/{mean,p5,p95}``        % of the time         at least one kernel was running
    ``memory_used_bytes``, ``memory_total_bytes`` bytes                in use by everyone; all there is
    ``power_watts``                              W                     at the last poll
    ``energy_joules``                            J                     used since training started, by a counter
    ``temperature_celsius``                      degrees C             at the last poll
    ``throttled_percent``                        % of the time         power or heat held the clocks down
    ``pcie_{rx,tx}_bytes_per_second``            bytes/s               received and sent over PCIe
    ``{sm_active,sm_occupancy}_percent``         %                     Hopper and later
    ``{tensor_active,dram_active}_percent``      %                     Hopper and later
    ``{own,others}_memory_bytes``                bytes                 of this job's, of all other listed processes
    ``{own,others}_utilization_percent``         % of the time         as above, where the driver reports it
    ============================================ ===================== ==============================================

    At the end of the fit, also of one that failed, rank 0 prints the verdict, its reason, what to do next, where the
    wall time went, and what the memory of the GPU was used for, and writes the same as ``gpu_report.json`` and, with
    the extra ``plot``, as a picture and a page, ``gpu_report.png`` and ``gpu_report.html``, into the Trainer's log
    directory. Without a GPU the report holds the host's part. Where the directory cannot be written, that is said when
    the fit begins, and the report is printed only. No fault of the monitor stops the training.
    A training that makes no progress is named while it stands: since when, in which phase, who waits for what, and the
    stack of the training thread. With several ranks, the one that all wait for is named.

    While the fit runs, a background thread writes ``gpu_report.json`` at least once a minute, so that a process that is
    killed leaves one. Every logger gets the summary of the diagnosis at the end, as ``gpu_tools/...``.

    Args:
        interval_s: Seconds between two polls of the driver's buffer, which holds several seconds.
        devices: ``"trainer"`` = the GPUs that the Trainer uses; ``"all"`` = every GPU of the node, also when training
            on the CPU.
        report: Whether to print and write the report.
        gpm: Whether to use the GPU performance monitors of Hopper and later (``sm_active_percent``, ...). They are
            shared with Nsight and DCGM; ``False`` leaves them alone.
        prog_bar: Whether to show the running utilization on the progress bar, as ``gpu_busy``.
        memory_history: Whether to have torch record its last 100,000 allocations on the GPU, each with its call stack,
            and write its snapshot beside the report when memory runs out: ``cuda_memory_snapshot.pickle``, with
            ``_rank<n>`` behind ``snapshot`` on other ranks, for pytorch.org/memory_viz. Off by default: it takes some
            2 us for each allocation.
        stall_after_s: After how many seconds without progress (a step, a batch, a hook, bytes of a checkpoint) to warn,
            with the reason and the stack, and again at four times that; ``None`` = never. By default (``"auto"``) it is
            the larger of 60 s and 5 times the longest that this phase has taken, and 600 s before it has been seen to
            its end. The warning is a :class:`~lightning_gpu_tools.StalledTrainingWarning`; no training is ended.

    Raises:
        ValueError: An argument is out of its range.

    Example::

        trainer = Trainer(callbacks=[GPUUtilizationMonitor()])
    """

    def __init__(
        self,
        *,
        interval_s: float = 1.0,
        devices: Literal["trainer", "all"] = "trainer",
        report: bool = True,
        gpm: bool = True,
        prog_bar: bool = False,
        memory_history: bool = False,
        stall_after_s: float | Literal["auto"] | None = "auto",
    ) -> None:
        check_interval(interval_s)
        check_stall_after(stall_after_s)
        if devices not in ("trainer", "all"):
            raise ValueError(f'devices must be "trainer" or "all", got {devices!r}.')
        super().__init__()
        self.interval_s = interval_s
        self.devices = devices
        self.report = report
        self.gpm = gpm
        self.prog_bar = prog_bar
        self.memory_history = memory_history
        self.stall_after_s = stall_after_s
        self._folder = ""
        self._running: RunningReport | None = None
        self._wrappers = Wrappers()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_running": None, "_wrappers": Wrappers()}

    @override
    def _opened(self, trainer: Trainer, session: FitSession) -> None:
        if self.report:
            # Asking for the folder is a collective call, so every rank does it.
            self._folder = trainer.log_dir or trainer.default_root_dir
            if trainer.is_global_zero:
                warn_if_not_writable(self._folder)
        session.monitor(
            devices=self.devices, interval_s=self.interval_s, gpm=self.gpm, stall_after_s=self.stall_after_s
        )

    @override
    def _began(self, trainer: Trainer, session: FitSession) -> None:
        if session.gpu_note:
            rank_zero_info(session.gpu_note)
        if self.report and trainer.is_global_zero and session.clock.ran:
            self._running = RunningReport(session, ReportFile(self._folder))
        if self.memory_history and self.report and session.ending.allocator is not None:
            rank = f"_rank{trainer.global_rank}" if trainer.global_rank else ""
            session.ending.allocator.record_history(Path(self._folder) / f"cuda_memory_snapshot{rank}.pickle")
        if self.prog_bar and session.gpus is not None and trainer.progress_bar_callback is not None:
            self._wrappers.put(trainer, "progress_bar_callback.get_metrics", _with_utilization(session.gpus))

    @override
    def _stepped(self, trainer: Trainer, session: FitSession) -> float:
        next_step = session.log_if_due()
        if session.report_wanted and self._running is not None:
            self._running.measure()
        return next_step

    @override
    def _ended(self, trainer: Trainer, session: FitSession, outcome: str) -> None:
        if session.recorder is None or not self.report:  # without a recorder, no training
            return
        if not trainer.is_global_zero:
            if session.ending.out_of_memory is not None and (diagnosis := session.diagnosis()) is not None:
                say_verdict(diagnosis)  # rank 0 may wait for this rank for good
            return
        if not session.clock.ran and session.ending.out_of_memory is None and session.ending.failure is None:
            missing = ", ".join(session.unseen)  # printed, because filters may hide a warning
            say(f"This fit could not be timed and has no report: this Lightning has no {missing}.")
            return
        report = describe(session, outcome)
        running, self._running = self._running, None
        # There is none if another callback failed when training started, before it was this one's turn.
        file = ReportFile(self._folder) if running is None else running.file
        publish(report, file, session.run, session.ending.snapshot)

    @override
    def _give_up(self) -> None:
        running, self._running = self._running, None
        self._wrappers.undo()
        super()._give_up()
        if running is not None:
            running.give_up()


def _with_utilization(gpus: GpuWatch) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that adds the running utilization to what the progress bar shows when it is drawn."""

    def wrapper(get_metrics: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def with_utilization(*args: Any, **kwargs: Any) -> dict[str, Any]:
            percent = gpus.latest_percent
            shown: dict[str, Any] = {} if percent is None else {"gpu_busy": f"{percent:.0f}%"}
            return {**get_metrics(*args, **kwargs), **shown}

        return with_utilization

    return wrapper
