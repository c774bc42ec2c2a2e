"""Monitor and advisor in real trainings: over a fake driver, without one, and when things go wrong in the middle."""

import copy
import mmap
import os
import pickle
import re
import time
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import Driver, gpu, process
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from plugin_trainings import Lit
from trainings import Boom, Model, Raise, Samples, background_threads, loader, logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder
from lightning_gpu_tools.errors import LowGPUUtilizationWarning
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.memory import history
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.training.run_measurements import ACTIVITIES


def train(
    folder: Path, monitor: GPUUtilizationMonitor, *others: Callback, model: Model | None = None, **options: Any
) -> Path:
    """Train 40 steps, or as many as the options say, by default of at least 10 ms, and return the log directory."""
    logger = CSVLogger(folder)
    trainer = quiet_trainer(
        folder, **{"logger": logger, "log_every_n_steps": 20, "callbacks": [monitor, *others], **options}
    )
    data = loader(Samples(options.get("limit_train_batches", 40)))
    trainer.fit(model or Model(time.sleep, step_s=0.01), data, loader(Samples(1)))
    return Path(logger.log_dir)


def test_every_gpu_is_logged_and_reported_and_the_broken_one_named(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether this test runs in a container of its own is not ours to choose.
    monkeypatch.setattr(nvml, "pids_are_ours", lambda: True)
    users = [process(os.getpid(), "3GiB", sm=60), process(1, "5GiB", sm=20)]
    driver.gpus = [
        gpu(utilization=80, memory_total="80GiB", memory_free="30GiB", power_watts=310, processes=users),
        gpu(utilization=7),
        gpu(utilization=None, power_watts=None),
        gpu(lost=True),
    ]
    with pytest.warns(UserWarning, match="GPU 3 is not measured"):
        folder = train(tmp_path, GPUUtilizationMonitor(interval_s=0.05, devices="all"))
    metrics = logged(folder)
    assert metrics["gpu/0/utilization_percent/mean"].keys() == {19, 39}  # where Lightning logs "loss", too
    assert metrics["loss"].keys() == {19, 39}
    assert set(metrics["gpu/0/utilization_percent/mean"].values()) == {80.0}
    assert set(metrics["gpu/0/utilization_percent/p95"].values()) == {80.0}
    assert set(metrics["gpu/1/utilization_percent/mean"].values()) == {7.0}
    assert set(metrics["gpu/0/memory_used_bytes"].values()) == {50 * 2**30}
    assert set(metrics["gpu/0/memory_total_bytes"].values()) == {80 * 2**30}
    assert metrics["gpu/0/others_memory_bytes"][19] == 5 * 2**30
    assert set(metrics["gpu/0/power_watts"].values()) == {310.0}
    assert metrics["gpu/0/temperature_celsius"][19] > 0
    first, second = metrics["gpu/0/energy_joules"].values()
    assert 0 < first < second
    assert "gpu/2/memory_used_bytes" in metrics
    assert not [name for name in metrics if name.startswith(("gpu/2/utilization", "gpu/2/power"))]  # not reported
    assert background_threads() == []
    report = load_report(folder)
    assert [one.index for one in report.gpus] == [0, 1, 2]
    assert report.gpus[0].uuid == driver.gpus[0].uuid
    assert report.gpus[0].utilization_percent_mean == 80.0
    assert report.gpus[0].memory_used_bytes_max == 50 * 2**30
    assert report.gpus[0].others_memory_bytes_max == 5 * 2**30
    assert report.gpus[0].timelines["utilization_percent"]
    assert report.gpu_note.startswith("GPU 3 is not measured")


def test_without_a_gpu_the_report_holds_the_hosts_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path, GPUUtilizationMonitor())
    assert not [name for name in logged(folder) if name.startswith("gpu/")]
    report = load_report(folder)
    assert report.outcome == "completed"
    assert report.steps == 40
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert report.phase_s["training_step/forward"] >= 0.4
    assert report.settings["num_workers"] == 0
    printed = capfd.readouterr().out
    assert printed.count("No GPU: training runs on 'cpu'") == 1
    assert max(len(line) for line in printed.splitlines() if not line.startswith("Report: ")) <= 100


def test_growing_memory_is_reported_while_there_is_time_to_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the run is a millisecond here."""
    for name, seconds in {"_INTERVAL_S": 0.00025, "_FIRST_ALARM_S": 0.012, "_ALARM_EVERY_S": 0.3}.items():
        monkeypatch.setattr(history, name, seconds)
    kept = []
    # New pages of the kernel's: a list or a tensor may fit into what earlier tests freed and the process still holds.
    new_pages = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE

    class Leak(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            kept.append(mmap.mmap(-1, 2**21, flags=new_pages))
            trainer.should_stop = any("grows steadily" in str(warning.message) for warning in warned)

    with pytest.warns(
        UserWarning, match=r"Memory of the training process grows steadily, by .* GiB per minute"
    ) as warned:
        train(tmp_path, GPUUtilizationMonitor(report=False), Leak(), log_every_n_steps=1, limit_train_batches=2000)
    assert len(kept) < 2000
    assert sum("grows steadily" in str(warning.message) for warning in warned) == 1


def test_without_a_driver_the_report_says_why(driver: Driver, tmp_path: Path) -> None:
    with driver.change():
        driver.library_missing = True
    with pytest.warns(
        UserWarning, match=r"No GPU was measured\. libnvidia-ml\.so\.1, a part of the NVIDIA driver"
    ) as said:
        report = load_report(train(tmp_path, GPUUtilizationMonitor(devices="all")))
    assert sum("No GPU was measured" in str(warning.message) for warning in said) == 1
    assert report.gpus == ()
    assert "driver" in report.gpu_note


def test_neither_a_lost_gpu_nor_an_exception_costs_the_report(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=50)]

    class Lose(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 20:
                with driver.change():
                    driver.gpus[0].lost = True

    logger = CSVLogger(tmp_path)
    callbacks = [GPUUtilizationMonitor(interval_s=0.05, devices="all"), Lose(), Raise(at_step=52)]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, logger=logger, log_every_n_steps=20)
    with pytest.raises(Boom):
        trainer.fit(Model(time.sleep, step_s=0.02), loader(Samples(60)))
    report = load_report(logger.log_dir)
    assert report.outcome == "stopped by Boom at step 52"
    assert report.gpus[0].utilization_percent_mean == 50.0
    assert logged(Path(logger.log_dir))["gpu/0/memory_used_bytes"].keys() == {19}
    assert background_threads() == []


def test_the_switch_turns_it_off(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    driver.gpus = [gpu()]
    advisor, finder = GPUUtilizationAdvisor(min_steps=1, min_seconds=0), NumWorkersFinder()
    folder = train(tmp_path, GPUUtilizationMonitor(devices="all"), advisor, finder)
    assert finder.result is None
    assert not [name for name in logged(folder) if name.startswith("gpu/")]
    assert not (folder / "gpu_report.json").exists()
    assert advisor.diagnosis is None
    assert driver.calls() == []


class Collating(LightningDataModule):
    """Its loader refers to it, and so to the Trainer."""

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)

    def train_dataloader(self) -> Any:
        return loader(Samples(8), collate_fn=self.collate)


class CopyAndSend(Callback):
    """Copies the Trainer, and does what the start of a spawned worker does with its loader."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        collate = pickle.loads(ForkingPickler.dumps(trainer.train_dataloader.collate_fn))
        self.sent = collate([torch.ones(1)] * 2)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.copy = copy.deepcopy(trainer)


def test_a_trainer_can_be_copied_and_pickled_in_mid_fit(tmp_path: Path) -> None:
    copying = CopyAndSend()
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(), copying]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, logger=CSVLogger(tmp_path))
    trainer.fit(Model(), datamodule=Collating())
    assert copying.sent.tolist() == [[1.0], [1.0]]
    copied = copying.copy.profiler
    with copied.profile("mine") as name:
        assert name == "mine"
    assert copied.profile.__self__ is copied
    assert copying.copy.save_checkpoint.__self__ is copying.copy


# --- beside what else happens in a Trainer ---------------------------------------------------------------------------


def test_trial_runs_of_tuners_are_not_reported(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=50)]

    tuners: list[Callback] = [
        BatchSizeFinder(steps_per_trial=3, init_val=2, max_trials=2),
        LearningRateFinder(num_training_steps=7),
    ]
    logger = CSVLogger(tmp_path)
    monitor = GPUUtilizationMonitor(interval_s=0.05, devices="all")
    # Several epochs: in Lightning 2.5.1 the first one lacks the batches of the learning rate finder's trial.
    options: dict[str, Any] = {"log_every_n_steps": 1, "max_steps": 5, "max_epochs": 9}
    model = Lit(batch_size=2)
    quiet_trainer(tmp_path, logger=logger, callbacks=[monitor, *tuners], **options).fit(model)
    report = load_report(logger.log_dir)
    assert report.steps == 5
    assert report.settings["batch_size"] == model.batch_size > 2
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert report.phase_s["training_step/forward"] > 0
    assert set(logged(Path(logger.log_dir))["gpu/0/memory_used_bytes"]) <= set(range(5))
    assert background_threads() == []


def test_the_training_thread_never_calls_the_driver(driver: Driver, tmp_path: Path) -> None:
    with driver.change():
        driver.start_s = time.time()
    xids = [(second / 10, 31) for second in range(1, 3000)]
    driver.gpus = [gpu(xid_events=xids)]
    monitor = GPUUtilizationMonitor(interval_s=0.02, devices="all")
    with pytest.warns(UserWarning, match=r"GPU 0 reports an error: Xid 31 \(see NVIDIA's"):
        folder = train(tmp_path, monitor, model=Model(time.sleep, step_s=0.02), log_every_n_steps=10)
    calls = driver.calls()
    assert {call.thread for call in calls} == {"lightning-gpu-tools-driver"}
    functions = [call.function for call in calls]
    assert functions.count("nvmlInitWithFlags") == functions.count("nvmlShutdown") > 0
    report = load_report(folder)
    assert report.gpus[0].errors
    assert 0 < report.monitor_us_per_step < report.wall_s / report.steps * 1e6
    assert sum(span.end_s - span.begin_s for span in report.spans) == pytest.approx(report.wall_s)


def test_a_second_callback_of_a_class_does_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "has several callbacks of type GPUUtilizationMonitor, and only the first is active"
    with pytest.warns(UserWarning, match=said):
        train(tmp_path, GPUUtilizationMonitor(), GPUUtilizationMonitor(), limit_train_batches=3)
    assert capsys.readouterr().out.count("Verdict: ") == 1


# --- the advisor, where the loader, a callback or nothing is slow ---------------------------------------------------


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_a_slow_dataset_is_warned_about_once_with_settings(
    tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    advisor = GPUUtilizationAdvisor(min_seconds=0.1)
    # The finder acts in fit alone.
    trainer = quiet_trainer(tmp_path, callbacks=[advisor] if stage == "fit" else [NumWorkersFinder(), advisor])
    with pytest.warns(LowGPUUtilizationWarning) as warned:
        getattr(trainer, stage)(Model(), loader(Samples(150, time.sleep, 0.005)))
    assert advisor.diagnosis.verdict == "low"
    finding = advisor.diagnosis.findings[0]
    assert (finding.cause, finding.evidence["kind"]) == ("data_loading", "too_few_workers")
    assert 0.2 < finding.share < 1  # with free cores, 0.8
    assert 1.05 < finding.ceiling <= 1 / (1 - finding.share)
    assert finding.evidence["wait_ms_per_step"] >= 5
    (one,) = [one for one in warned if one.category is LowGPUUtilizationWarning]
    shown = warnings.formatwarning(one.message, one.category, one.filename, one.lineno)
    assert re.fullmatch(
        r"lightning_gpu_tools:1: (LowGPUUtilizationWarning: )?Waiting for data takes \d+% of the wall time\. "
        r"Set DataLoader\(\.\.\., num_workers=\d+, prefetch_factor=2, persistent_workers=True\) \(now 0, .*\)\.\n",
        shown,
    )
    if stage == "predict":
        assert "find_loader_settings" in advisor.diagnosis.next_step
        assert "NumWorkersFinder" not in finding.advice
        printed = capsys.readouterr().out
        assert f"Verdict: LOW: {ACTIVITIES[stage]} often waits" in printed
        assert f"Model; {stage}; 150 steps" in printed


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_slow_callback_is_named_wherever_it_comes(tmp_path: Path, slow_first: bool) -> None:
    class SlowCallback(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.004)
            seen.append(advisor.diagnosis)

    advisor, slow, seen = GPUUtilizationAdvisor(min_seconds=0.1), SlowCallback(), []
    assert advisor.diagnosis is None
    callbacks = [slow, advisor] if slow_first else [advisor, slow]
    with pytest.warns(LowGPUUtilizationWarning, match="SlowCallback takes"):
        quiet_trainer(tmp_path, callbacks=callbacks).fit(Model(), loader(Samples(180)))
    finding = advisor.diagnosis.findings[0]
    assert (finding.cause, finding.evidence["name"]) == ("callback", "SlowCallback")
    assert [diagnosis.verdict for diagnosis in seen[:5]] == ["too_short"] * 5


def test_an_advisor_alone_brings_a_monitor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(trainer: Trainer) -> list[str]:
        # A plugin of an earlier test, which jsonargparse may keep, adds its callback to any Trainer.
        found = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
        return [name for name in found if name != "PortableCheckpointHooks"]

    other, advisor = Callback(), GPUUtilizationAdvisor()
    for given, expected in (
        ([advisor, other], ["GPUUtilizationAdvisor", "GPUUtilizationMonitor", "Callback"]),
        ([other, GPUUtilizationMonitor(), advisor], None),
    ):
        folder = tmp_path / str(len(given))
        trainer = quiet_trainer(folder, callbacks=given)
        before = names(trainer)
        for epochs in (1, 2):  # the second fit has what the first has added
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(Model(), loader(Samples(5)))
            assert names(trainer) == (expected or before)
            assert load_report(folder).outcome == "completed"
            assert capsys.readouterr().out.count("Verdict:") == 1
            assert "needs at least 50 steps and 5 s" in advisor.diagnosis.why
