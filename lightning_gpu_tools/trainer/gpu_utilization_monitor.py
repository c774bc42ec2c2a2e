"""Logs how busy the GPUs are while training runs, and reports at its end where the time went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.trainer.facts import has_another
from lightning_gpu_tools.trainer.fit_report import describe, is_writable, publish
from lightning_gpu_tools.trainer.never_stop_training import never_stops_training
from lightning_gpu_tools.trainer.session import Session
from lightning_gpu_tools.trainer.wrappers import Wrappers
from lightning_gpu_tools.training.rank_exchange import TIMEOUT_S


class GPUUtilizationMonitor(Callback):
    """Samples the GPUs from a background thread, logs what they did, and reports at the end where the time went.

    One thread of this process reads the driver's own buffer of samples, so that no sample is missed and the training
    thread never asks the driver. Global rank 0 logs the GPUs of its node, through every logger of the Trainer, at the
    Trainer's ``log_every_n_steps``, and once an epoch, without a collective, those of other nodes.
    What the hardware does not report is absent, never 0. Validation is kept apart: it is in the report only.

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
    ``{own,others}_utilization_percent``         % of the time         likewise, where the driver reports it
    ============================================ ===================== ==============================================

    At the end of the fit, also of one that failed, rank 0 prints the verdict, its reason, what to do next, and where
    the wall time went, and writes the same as ``gpu_report.json`` and, with the extra ``plot``, ``gpu_report.png`` into
    the Trainer's log directory. Without a GPU the report holds the host's part. Where the directory cannot be written,
    that is said when the fit begins, and the report is printed only. No fault of the monitor stops the training.

    Args:
        interval_s: Seconds between two polls of the driver's buffer, which holds several seconds.
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
        self.yields = False  # to one of the user's own; of those that an entry point has added
        self._session: Session | None = None
        self._folder: str | None = None
        self._wrappers = Wrappers()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_session": None, "_wrappers": Wrappers()}

    @override
    @never_stops_training
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or is_disabled() or (self.yields and has_another(trainer, self)):
            return
        self._give_up()  # a fit whose end was not announced
        if self.report:
            # Asking for the folder is a collective call, so every rank does it.
            folder = trainer.log_dir or trainer.default_root_dir
            self._folder = folder if not trainer.is_global_zero or is_writable(folder) else None
        self._session = Session.of(trainer)
        self._session.monitor(devices=self.devices, interval_s=self.interval_s, gpm=self.gpm)

    @override
    @never_stops_training
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is None:
            return
        self._session.begin()
        if self._session.gpu_note:
            rank_zero_info(self._session.gpu_note)
        if self.prog_bar and self._session.gpus is not None and trainer.progress_bar_callback is not None:
            self._wrappers.put(trainer, "progress_bar_callback.get_metrics", _with_utilization(self._session.gpus))

    @override
    @never_stops_training
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._session is not None:
            self._session.after_step(batch)
            self._session.log_if_due()

    @override
    @never_stops_training
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._session.end_epoch()

    @override
    @never_stops_training
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer, f"stopped by {type(exception).__name__} at step {trainer.global_step}", timeout_s=0.0)

    @override
    @never_stops_training
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer, "completed", timeout_s=TIMEOUT_S)

    def _finish(self, trainer: Trainer, outcome: str, timeout_s: float) -> None:
        session = self._session
        if session is not None:
            session.finish(timeout_s)
            diagnosis = session.diagnosis()
            if self.report and diagnosis is not None and session.clock.ran and trainer.is_global_zero:
                publish(describe(session, diagnosis, trainer, outcome), self._folder)
        self._give_up()

    def _give_up(self) -> None:
        self._wrappers.undo()
        session, self._session = self._session, None
        if session is not None:
            session.release()


def _with_utilization(gpus: GpuWatch) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that adds the running utilization to what the progress bar shows when it is drawn."""

    def wrapper(get_metrics: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def with_utilization(*args: Any, **kwargs: Any) -> dict[str, Any]:
            percent = gpus.latest_percent
            shown: dict[str, Any] = {} if percent is None else {"gpu_busy": f"{percent:.0f}%"}
            return {**get_metrics(*args, **kwargs), **shown}

        return with_utilization

    return wrapper
