"""Logs how busy the GPUs are while training runs, and reports at its end where the time went."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools import sampler
from lightning_gpu_tools.diagnosis import Diagnosis, diagnose
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.measurements import RunRecorder, batch_bytes, train_loader_settings, trainer_gpus
from lightning_gpu_tools.readings import GpuReading, GpuWindow
from lightning_gpu_tools.report import GpuSummary, Report, render_text, save_report
from lightning_gpu_tools.step_clock import StepClock

# Metrics logged as they are, by their field in GpuWindow; utilization has three.
_METRICS = {
    "utilization_percent/mean": "utilization_mean_percent",
    "utilization_percent/p5": "utilization_p5_percent",
    "utilization_percent/p95": "utilization_p95_percent",
    "memory_used_bytes": "memory_used_bytes",
    "memory_total_bytes": "memory_total_bytes",
    "power_watts": "power_watts",
    "energy_joules": "energy_joules",
    "temperature_celsius": "temperature_celsius",
    "throttled_percent": "throttled_percent",
    "pcie_rx_bytes_per_second": "pcie_rx_bytes_per_second",
    "pcie_tx_bytes_per_second": "pcie_tx_bytes_per_second",
    "sm_active_percent": "sm_active_percent",
    "sm_occupancy_percent": "sm_occupancy_percent",
    "tensor_active_percent": "tensor_active_percent",
    "dram_active_percent": "dram_active_percent",
}

# How long the end of a run waits for one more look at the GPUs; a look takes a few milliseconds.
_LAST_LOOK_S = 2.0


class GPUUtilizationMonitor(Callback):
    """Samples the GPUs from a background thread, logs what they did, and reports at the end where the time went.

    One thread of this process reads the driver's own buffer of samples, so that no sample is missed and the training
    thread never waits for the driver. Global rank 0 logs the GPUs of its node, through every logger of the Trainer, at
    the Trainer's ``log_every_n_steps``. What the hardware does not report is absent, never 0.

    Logged metrics, for each GPU ``i`` (torch device index; with ``devices="all"`` the index that ``nvidia-smi`` shows),
    over the time since the last point unless it says otherwise:

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
    ============================================ ===================== ==============================================

    At the end of the fit, also of one that failed, rank 0 prints the verdict, its reason, what to do next, and where
    the wall time went, and writes the same as ``gpu_report.json`` and, with the extra ``plot``, ``gpu_report.png`` into
    the Trainer's log directory. Without a GPU the report holds the host's part.

    Args:
        interval_s: Seconds between two looks at the driver's buffer, which holds several seconds.
        devices: ``"trainer"`` = the GPUs that the Trainer uses; ``"all"`` = every GPU of the node, also when training
            on the CPU.
        report: Whether to print and write the report.

    Raises:
        ValueError: An argument is out of its range, or, when the fit starts, the log directory cannot be written.

    Example::

        trainer = Trainer(callbacks=[GPUUtilizationMonitor()])
    """

    def __init__(
        self, *, interval_s: float = 1.0, devices: Literal["trainer", "all"] = "trainer", report: bool = True
    ) -> None:
        if not 0 < interval_s < float("inf"):
            raise ValueError(f"interval_s must be a positive number of seconds, got {interval_s!r}.")
        if devices not in ("trainer", "all"):
            raise ValueError(f'devices must be "trainer" or "all", got {devices!r}.')
        self.interval_s = interval_s
        self.devices = devices
        self.report = report
        self._clock: StepClock | None = None
        self._recorder: RunRecorder | None = None
        self._gpus: tuple[GpuReading, ...] = ()
        self._gpu_note: str | None = None
        self._since_log: sampler.Reader | None = None
        self._whole_run: sampler.Reader | None = None
        self._folder = ""
        self._started_s = 0.0
        self._logged_step = -1
        self._energy_joules: dict[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or is_disabled():
            return
        if self.report:
            # Asking for the folder is a collective call, so every rank does it.
            self._folder = trainer.log_dir or trainer.default_root_dir
            if trainer.is_global_zero:
                _check_writable(self._folder)
        self._clock = StepClock.attach(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is None or not trainer.is_global_zero:
            return
        self._started_s = time.time()
        self._logged_step = -1
        self._recorder = RunRecorder(trainer, self._clock)
        self._gpu_note = None
        try:
            self._gpus = trainer_gpus(trainer) if self.devices == "trainer" else self._every_gpu()
            self._watch([gpu.uuid for gpu in self._gpus if gpu.uuid is not None])
        except NvmlUnavailableError as error:
            self._gpus = ()
            self._gpu_note = f"No GPU was measured. {error}"
        if self._gpu_note:
            rank_zero_info(self._gpu_note)
        elif not self._gpus:
            device = trainer.strategy.root_device.type
            self._gpu_note = f"No GPU: the Trainer trains on {device!r}, so only the host's part was measured."

    def _every_gpu(self) -> tuple[GpuReading, ...]:
        from lightning_gpu_tools import nvml  # imports pynvml, so only where GPUs are asked for

        readings = nvml.read_gpus()
        broken = [f"GPU {gpu.index} is not measured: {gpu.error}." for gpu in readings if gpu.error]
        self._gpu_note = " ".join(broken) or (None if readings else "No GPU: the driver lists none.")
        return tuple(gpu for gpu in readings if not gpu.error)

    def _watch(self, uuids: list[str]) -> None:
        self._energy_joules = dict.fromkeys(uuids, 0.0)
        if uuids:
            self._since_log = sampler.subscribe(uuids, interval_s=self.interval_s)
            self._whole_run = sampler.subscribe(uuids, interval_s=self.interval_s)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None and self._recorder.batch_bytes is None:
            self._recorder.batch_bytes = batch_bytes(batch)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._since_log is None or not every:
            return
        # The step that Lightning gives the metrics of self.log, so that both share an axis.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if (step + 1) % every == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(trainer, self._since_log, step)

    def _log(self, trainer: Trainer, reader: sampler.Reader, step: int) -> None:
        windows = reader.take()
        metrics: dict[str, float] = {}
        for gpu in self._gpus:
            if gpu.uuid in windows:
                metrics |= self._metrics(gpu.index, windows[gpu.uuid])
        if metrics:
            for logger in trainer.loggers:
                separator = logger.group_separator
                logger.log_metrics({name.replace("/", separator): value for name, value in metrics.items()}, step=step)

    def _metrics(self, index: int, window: GpuWindow) -> dict[str, float]:
        metrics = {}
        for name, field in _METRICS.items():
            value = getattr(window, field)
            if value is not None and name == "energy_joules":
                value = self._energy_joules[window.uuid] = self._energy_joules[window.uuid] + value
            if value is not None:
                metrics[f"gpu/{index}/{name}"] = float(value)
        return metrics

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer, f"stopped by {type(exception).__name__} at step {trainer.global_step}")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer, "completed")

    def _finish(self, trainer: Trainer, outcome: str) -> None:
        clock, self._clock = self._clock, None
        if clock is None:
            return
        clock.stop()
        if self._recorder is not None:
            if self.report and clock.ran:
                self._write_report(self._report(trainer, clock, outcome))
            for resource in (self._since_log, self._whole_run, self._recorder):
                if resource is not None:
                    resource.close()
        clock.detach(trainer)
        self._recorder = self._since_log = self._whole_run = None

    def _report(self, trainer: Trainer, clock: StepClock, outcome: str) -> Report:
        assert self._recorder is not None
        steady_s = [(block.wall_s - block.paused_s) / block.steps for block in clock.blocks]
        return Report(
            outcome=outcome,
            started_at=datetime.fromtimestamp(self._started_s, timezone.utc).isoformat(timespec="seconds"),
            steps=clock.steps,
            wall_s=clock.wall_s,
            phase_s=clock.seconds,
            step_s_median=median(steady_s) if steady_s else None,
            diagnosis=_advisors_diagnosis(trainer) or diagnose(self._recorder.measurements()),
            gpus=self._summaries(),
            gpu_note=self._gpu_note,
            settings=_settings(trainer),
        )

    def _summaries(self) -> tuple[GpuSummary, ...]:
        if self._whole_run is None:
            return ()
        windows = self._whole_run.take(wait_s=_LAST_LOOK_S)
        return tuple(
            _summary(gpu, windows[gpu.uuid], self._whole_run.timelines(gpu.uuid), self._started_s)
            for gpu in self._gpus
            if gpu.uuid in windows
        )

    def _write_report(self, report: Report) -> None:
        print(f"\n{render_text(report)}")  # noqa: T201 - the report is for the person at the terminal
        try:
            written = [save_report(report, self._folder)]
            if importlib.util.find_spec("matplotlib") is not None:
                from lightning_gpu_tools.report_plot import save_plot

                written.append(save_plot(report, self._folder))
        except OSError as error:  # the disk is full, the folder has gone: the training itself went well
            rank_zero_warn(f"The report could not be written to {self._folder!r}: {error}")
        else:
            print("Report: " + " ".join(str(path) for path in written))  # noqa: T201


def _check_writable(folder: str) -> None:
    """Find out before training, not after it, that the report cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"The report would go to {folder!r}, which cannot be written: {error}. Give the Trainer another "
            "default_root_dir or logger, or set GPUUtilizationMonitor(report=False)."
        ) from error


def _advisors_diagnosis(trainer: Trainer) -> Diagnosis | None:
    """Return what an advisor among the callbacks says, which may have thresholds of its own."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        diagnosis = getattr(callback, "diagnosis", None)
        if isinstance(diagnosis, Diagnosis):
            return diagnosis
    return None


def _summary(
    gpu: GpuReading, window: GpuWindow, timelines: dict[str, list[tuple[float, float]]], started_s: float
) -> GpuSummary:
    power = [watts for _, watts in timelines.get("power_watts", [])]
    temperature = [celsius for _, celsius in timelines.get("temperature_celsius", [])]
    return GpuSummary(
        index=gpu.index,
        uuid=window.uuid,
        name=gpu.name,
        utilization_percent_mean=window.utilization_mean_percent,
        utilization_percent_p5=window.utilization_p5_percent,
        utilization_percent_p95=window.utilization_p95_percent,
        memory_used_bytes_max=window.memory_used_peak_bytes,
        memory_total_bytes=window.memory_total_bytes,
        power_watts_mean=sum(power) / len(power) if power else None,
        energy_joules=window.energy_joules,
        temperature_celsius_max=max(temperature, default=None),
        throttled_percent=window.throttled_percent,
        timelines={
            name: [[round(time_s - started_s, 2), round(value, 2)] for time_s, value in timelines[name]]
            for name in ("utilization_percent", "memory_used_bytes", "power_watts")
            if name in timelines
        },
    )


def _settings(trainer: Trainer) -> dict[str, Any]:
    loader = train_loader_settings(trainer)
    return {
        "accelerator": type(trainer.accelerator).__name__,
        "device": trainer.strategy.root_device.type,
        "world_size": trainer.world_size,
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        **({} if loader is None else dataclasses.asdict(loader)),
        "torch": torch.__version__,
        "lightning": importlib.metadata.version("lightning"),
        "lightning_gpu_tools": importlib.metadata.version("lightning-gpu-tools"),
    }
