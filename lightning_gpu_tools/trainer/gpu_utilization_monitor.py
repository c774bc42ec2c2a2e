"""Logs how busy the GPUs are while training runs, and reports at its end where the time went."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.loaders.settings import batch_bytes
from lightning_gpu_tools.reports.confirmation import confirm, earlier_report
from lightning_gpu_tools.reports.report import Report, save_report
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.trainer.facts import rank_exchange, trainer_gpus
from lightning_gpu_tools.trainer.fit_watch import FitWatch
from lightning_gpu_tools.trainer.never_stop_training import never_stops_training
from lightning_gpu_tools.trainer.step_clock import StepClock
from lightning_gpu_tools.training.rank_exchange import PATIENCE_S
from lightning_gpu_tools.units import printable_path


class GPUUtilizationMonitor(Callback):
    """Samples the GPUs from a background thread, logs what they did, and reports at the end where the time went.

    One thread of this process reads the driver's own buffer of samples, so that no sample is missed and the training
    thread never asks the driver. Global rank 0 logs the GPUs of its node, through every logger of the Trainer, at the
    Trainer's ``log_every_n_steps``, and those of other nodes, which they tell it once an epoch without a collective.
    What the hardware does not report is absent, never 0. Validation is kept apart: it is in the report only.

    Logged metrics, for each GPU ``i`` (torch device index; with ``devices="all"`` the index that ``nvidia-smi`` shows;
    on node ``n`` > 0 ``node<n>/gpu/<i>/...``), over the time since the last point unless it says otherwise:

    ============================================ ===================== ==============================================
    ``gpu/<i>/...``                              unit                  meaning
    ============================================ ===================== ==============================================
    ``utilization_percent/{mean,p5,p95}``        % of the time         at least one kernel was running
    ``memory_used_bytes``, ``memory_total_bytes`` bytes                in use by everyone; all there is
    ``power_watts``                              W                     at the last look
    ``energy_joules``                            J                     used since training started, by a counter
    ``temperature_celsius``                      degrees C             at the last look
    ``throttled_percent``                        % of the time         power or heat held the clocks down
    ``pcie_{rx,tx}_bytes_per_second``            bytes/s               received and sent over PCIe
    ``{sm_active,sm_occupancy}_percent``         %                     Hopper and later
    ``{tensor_active,dram_active}_percent``      %                     Hopper and later
    ``{own,others}_memory_bytes``                bytes                 of this job's, of all other listed processes
    ``{own,others}_utilization_percent``         % of the time         likewise, where the driver tells
    ============================================ ===================== ==============================================

    At the end of the fit, also of one that failed, rank 0 prints the verdict, its reason, what to do next, and where
    the wall time went, and writes the same as ``gpu_report.json`` and, with the extra ``plot``, ``gpu_report.png`` into
    the Trainer's log directory. Without a GPU the report holds the host's part. Where the directory cannot be written,
    that is said when the fit begins, and the report is printed only. No fault of the monitor stops the training.

    Args:
        interval_s: Seconds between two looks at the driver's buffer, which holds several seconds.
        devices: ``"trainer"`` = the GPUs that the Trainer uses; ``"all"`` = every GPU of the node, also when training
            on the CPU.
        report: Whether to print and write the report.
        gpm: Whether to use the GPU performance monitors of Hopper and later (``sm_active_percent``, ...). They are
            shared with Nsight and DCGM; ``False`` leaves them alone.
        prog_bar: Whether to show the running utilization on the progress bar, as ``gpu_busy``.

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
    ) -> None:
        if not 0 < interval_s < float("inf"):
            raise ValueError(f"interval_s must be a positive number of seconds, got {interval_s!r}.")
        if devices not in ("trainer", "all"):
            raise ValueError(f'devices must be "trainer" or "all", got {devices!r}.')
        self.interval_s = interval_s
        self.devices = devices
        self.report = report
        self.gpm = gpm
        self.prog_bar = prog_bar
        self._fits = 0
        self._clock: StepClock | None = None
        self._run: FitWatch | None = None
        self._folder: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_clock": None, "_run": None}

    @override
    @never_stops_training
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or is_disabled():
            return
        self._give_up(trainer)  # a fit whose end it was not told of
        self._fits += 1
        if self.report:
            # Asking for the folder is a collective call, so every rank does it.
            folder = trainer.log_dir or trainer.default_root_dir
            self._folder = folder if not trainer.is_global_zero or _is_writable(folder) else None
        self._clock = StepClock.attach(trainer)

    @override
    @never_stops_training
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is None:
            return
        place = trainer.callbacks.index(self)  # type: ignore[attr-defined]
        run = self._run = FitWatch(trainer, self._clock, rank_exchange(trainer, f"{self._fits}/{place}"))
        if trainer.local_rank != 0:  # the first process of each node looks at all of the node's GPUs
            return
        try:
            gpus = trainer_gpus(trainer) if self.devices == "trainer" else run.every_gpu()
            if gpus:
                run.watch = GpuWatch(gpus, interval_s=self.interval_s, gpm=self.gpm, node=trainer.node_rank)
        except NvmlUnavailableError as error:
            run.gpu_note = f"No GPU was measured. {error}"
        if run.gpu_note:
            rank_zero_info(run.gpu_note)
        elif run.watch is None:
            device = trainer.strategy.root_device.type
            run.gpu_note = f"No GPU: the Trainer trains on {device!r}, so only the host's part was measured."
        elif self.prog_bar:
            run.show_on_progress_bar()

    @override
    @never_stops_training
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run = self._run
        if run is None or self._clock is None:
            return
        if run.recorder.batch_bytes is None:
            run.recorder.batch_bytes = batch_bytes(batch)
        run.recorder.after_step()
        # The step that Lightning gives the metrics of self.log, so that both share an axis.
        step = run.epoch_loop._batches_that_stepped
        if run.every and (step + 1) % run.every == 0 and step != run.logged_step:
            run.logged_step = step
            self._clock.as_own_work(run.log, step)

    @override
    @never_stops_training
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.enter("validation")

    @override
    @never_stops_training
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.enter("training")

    @override
    @never_stops_training
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.exchange_epoch()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer, f"stopped by {type(exception).__name__} at step {trainer.global_step}", patience_s=0.0)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer, "completed", patience_s=PATIENCE_S)

    def _finish(self, trainer: Trainer, outcome: str, patience_s: float) -> None:
        clock, self._clock = self._clock, None
        run, self._run = self._run, None
        if clock is None:
            return
        clock.stop()
        try:
            if run is not None and clock.ran:
                run.tell(at_end=True)
                if self.report and trainer.is_global_zero:
                    _publish(run.report(outcome, patience_s), self._folder)
        except Exception as error:  # noqa: BLE001 - the training itself has gone well; a fault of ours must not undo it
            rank_zero_warn(f"There is no report of this training, because of a fault in it: {error!r}")
        finally:
            if run is not None:
                run.close()
            clock.detach(trainer)

    def _give_up(self, trainer: Trainer) -> None:
        clock, self._clock = self._clock, None
        run, self._run = self._run, None
        if run is not None:
            run.close()
        if clock is not None:
            clock.detach(trainer)


def _publish(report: Report, folder: str | None) -> None:
    """Print the report, and write it into the folder if there is one."""
    if folder is not None:
        report = _confirmed(report, folder)
    _print(f"\n{render_text(report)}")
    if folder is not None:
        _write(report, folder)


def _confirmed(report: Report, folder: str) -> Report:
    """Return the report with what following the advice of the run before has brought."""
    try:
        earlier = earlier_report(folder)
        confirmation = None if earlier is None else confirm(report, earlier)
    except Exception as error:  # noqa: BLE001 - anybody may have written the old one; it must not cost the new one
        rank_zero_warn(f"The report of the run before, in {folder!r} or beside it, cannot be compared with: {error!r}")
        return report
    return report if confirmation is None else dataclasses.replace(report, confirmation=str(confirmation))


def _write(report: Report, folder: str) -> None:
    try:
        written = [save_report(report, folder)]
        if importlib.util.find_spec("matplotlib") is not None:
            from lightning_gpu_tools.reports.plot import save_plot

            written.append(save_plot(report, folder))
    except OSError as error:  # the disk is full, the folder has gone: the training itself went well
        rank_zero_warn(f"The report could not be written to {folder!r}: {error}")
    else:
        _print("Report: " + " ".join(map(printable_path, written)))
        if report.diagnosis.verdict == "low":
            _print(f"Verify a change: lightning-gpu-tools report NEW --against {printable_path(written[0])}")


def _print(text: str) -> None:
    """Print for the person at the terminal, which may not be able to show every sign."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))  # noqa: T201


def _is_writable(folder: str) -> bool:
    """Find out before training, not after it, whether the report can be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        rank_zero_warn(
            f"The report of this training will be printed, but not written to {folder!r}: {error}. To have it as a "
            "file, give the Trainer another default_root_dir or logger."
        )
        return False
    return True
