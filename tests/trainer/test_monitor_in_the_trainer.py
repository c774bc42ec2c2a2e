"""The monitor beside what else happens in a Trainer: validation, tuners, progress bars, other users of the GPU."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from fake_driver import Driver, gpu, process
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from trainings import Model, Samples, loader, logged, quiet_trainer, sampler_threads

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.reports.report import load_report


def test_validation_does_not_enter_the_metrics_of_training(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=[(0, 90)], sample_period_s=0.02)]

    class IdleInValidation(Callback):
        def on_validation_start(self, *args: Any) -> None:
            self.be(0)

        def on_validation_end(self, *args: Any) -> None:
            self.be(90)

        def be(self, percent: int) -> None:
            with driver.change():
                driver.gpus[0].utilization.append((time.time(), percent))

    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(
        tmp_path,
        logger=logger,
        log_every_n_steps=40,
        val_check_interval=20,
        num_sanity_val_steps=0,
        callbacks=[GPUUtilizationMonitor(interval_s=0.05, devices="all"), IdleInValidation()],
    )
    model = Model(time.sleep, step_s=0.01, validation_s=0.4)
    trainer.fit(model, loader(Samples(40)), loader(Samples(1)))
    (percent,) = logged(Path(logger.log_dir))["gpu/0/utilization_percent/mean"].values()
    assert percent > 80
    (summary,) = load_report(logger.log_dir).gpus
    assert summary.validation_utilization_percent_mean is not None
    assert summary.validation_utilization_percent_mean < 30


def test_trial_runs_of_tuners_are_in_no_metric_and_in_no_report(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=50)]

    class Tunable(Model):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.lr = 1, 1e-6

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(Samples(40), batch_size=self.batch_size)

        def val_dataloader(self) -> DataLoader[Any]:
            return loader(Samples(1))

    tuners: list[Callback] = [
        BatchSizeFinder(steps_per_trial=3, init_val=2, max_trials=2),
        LearningRateFinder(num_training_steps=7),
    ]
    logger = CSVLogger(tmp_path)
    monitor = GPUUtilizationMonitor(interval_s=0.05, devices="all")
    trainer = quiet_trainer(tmp_path, logger=logger, log_every_n_steps=1, callbacks=[monitor, *tuners], max_steps=5)
    trainer.fit(Tunable())
    report = load_report(logger.log_dir)
    assert report.steps == 5
    assert report.settings["batch_size"] == 4
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert report.phase_s["training_step"] > 0
    assert set(logged(Path(logger.log_dir))["gpu/0/memory_used_bytes"]) <= set(range(5))
    assert sampler_threads() == []


def test_the_progress_bar_shows_it_if_asked_and_is_itself_again_afterwards(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=80), gpu(utilization=40)]
    shown: list[object] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            shown.append(self.get_metrics(trainer, pl_module).get("gpu_busy"))

    bar = Bar()
    monitor = GPUUtilizationMonitor(interval_s=0.02, devices="all", prog_bar=True, report=False)
    trainer = quiet_trainer(tmp_path, callbacks=[bar, monitor], enable_progress_bar=True)
    trainer.fit(Model(time.sleep, step_s=0.02), loader(Samples(40)))
    seen = [percent for percent in shown if percent is not None]
    assert set(seen) <= {"60%", "80%", "40%"}  # one GPU is known a moment before the other
    assert seen[-1] == "60%"
    assert "gpu_busy" not in bar.get_metrics(trainer, trainer.lightning_module)
    assert "get_metrics" not in vars(bar)


@pytest.mark.parametrize("same_namespace", [True, False])
def test_others_on_the_same_gpu_are_told_from_this_job_where_the_driver_uses_our_process_numbers(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_namespace: bool
) -> None:
    # Whether this test runs in a container of its own is not ours to choose.
    monkeypatch.setattr(nvml, "pids_are_ours", lambda: same_namespace)
    expected = {"own_memory_bytes": 3 * 2**30, "others_memory_bytes": 5 * 2**30} if same_namespace else {}
    driver.gpus = [gpu(processes=[process(os.getpid(), "3GiB", sm=60), process(1, "5GiB", sm=20)])]
    logger = CSVLogger(tmp_path)
    monitor = GPUUtilizationMonitor(interval_s=0.02, devices="all")
    trainer = quiet_trainer(tmp_path, logger=logger, log_every_n_steps=20, callbacks=[monitor])
    trainer.fit(Model(time.sleep, step_s=0.01), loader(Samples(20)))
    metrics = logged(Path(logger.log_dir))
    found = {name: metrics.get(f"gpu/0/{name}", {}).get(19) for name in ("own_memory_bytes", "others_memory_bytes")}
    assert found == {"own_memory_bytes": None, "others_memory_bytes": None, **expected}
    assert load_report(logger.log_dir).gpus[0].others_memory_bytes_max == expected.get("others_memory_bytes")


def test_the_training_thread_never_asks_the_driver_and_errors_are_named(driver: Driver, tmp_path: Path) -> None:
    with driver.change():
        driver.start_s = time.time()
    driver.gpus = [gpu(gpm={2: 50}, xid_events=[(second / 10, 31) for second in range(1, 3000)])]
    monitor = GPUUtilizationMonitor(interval_s=0.02, devices="all", gpm=False)
    trainer = quiet_trainer(tmp_path, callbacks=[monitor], log_every_n_steps=10)
    with pytest.warns(UserWarning, match=r"GPU 0 reports: Xid 31 \(memory page fault"):
        trainer.fit(Model(time.sleep, step_s=0.02), loader(Samples(40)))
    calls = driver.calls()
    assert {call.thread for call in calls} == {"lightning-gpu-tools-sampler"}
    assert not [call for call in calls if "Gpm" in call.function]
    functions = [call.function for call in calls]
    assert functions.count("nvmlInitWithFlags") == functions.count("nvmlShutdown") > 0
    report = load_report(tmp_path)
    assert report.gpus[0].errors
    assert report.monitor_us_per_step is not None
    assert 0 < report.monitor_us_per_step < 5000
    assert sum(span.end_s - span.begin_s for span in report.spans) == pytest.approx(report.wall_s)
