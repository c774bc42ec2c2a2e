"""The monitor in real trainings: over a fake driver, without a driver, and when things go wrong in the middle."""

import copy
import dataclasses
import io
import json
import os
import pickle
import re
import tempfile
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import Driver, gpu
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from trainings import Boom, Model, Raise, Samples, loader, logged, quiet_trainer, sampler_threads

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
from lightning_gpu_tools.gpus.metrics import METRICS
from lightning_gpu_tools.gpus.sharing import Sharing
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.trainer.fit_timer import FitTimer
from lightning_gpu_tools.trainer.run_recorder import RunRecorder
from lightning_gpu_tools.trainer.session import Session
from lightning_gpu_tools.training import memory_history


def train(folder: Path, monitor: GPUUtilizationMonitor, *others: Callback, **options: Any) -> Path:
    """Train 40 steps, or as many as the options say, of at least 10 ms and return the log directory."""
    logger = CSVLogger(folder)
    trainer = quiet_trainer(
        folder, **{"logger": logger, "log_every_n_steps": 20, "callbacks": [monitor, *others], **options}
    )
    trainer.fit(
        Model(time.sleep, step_s=0.01), loader(Samples(options.get("limit_train_batches", 40))), loader(Samples(1))
    )
    return Path(logger.log_dir)


def test_every_gpu_of_the_node_is_logged_in_the_units_of_its_name(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=80, memory_total="80GiB", memory_free="30GiB", power_watts=310), gpu(utilization=7)]
    folder = train(tmp_path, GPUUtilizationMonitor(interval_s=0.05, devices="all"))
    metrics = logged(folder)
    assert metrics["gpu/0/utilization_percent/mean"].keys() == {19, 39}  # where Lightning logs "loss", too
    assert metrics["loss"].keys() == {19, 39}
    assert set(metrics["gpu/0/utilization_percent/mean"].values()) == {80.0}
    assert set(metrics["gpu/0/utilization_percent/p95"].values()) == {80.0}
    assert set(metrics["gpu/1/utilization_percent/mean"].values()) == {7.0}
    assert set(metrics["gpu/0/memory_used_bytes"].values()) == {50 * 2**30}
    assert set(metrics["gpu/0/memory_total_bytes"].values()) == {80 * 2**30}
    assert set(metrics["gpu/0/power_watts"].values()) == {310.0}
    assert metrics["gpu/0/temperature_celsius"][19] > 0
    first, second = metrics["gpu/0/energy_joules"].values()
    assert 0 < first < second
    assert sampler_threads() == []


def test_what_the_hardware_does_not_report_is_absent(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=None, power_watts=None)]
    metrics = logged(train(tmp_path, GPUUtilizationMonitor(interval_s=0.05, devices="all")))
    assert "gpu/0/memory_used_bytes" in metrics
    assert not [name for name in metrics if "utilization" in name or "power" in name]


def test_without_a_gpu_the_report_holds_the_hosts_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = train(tmp_path, GPUUtilizationMonitor())
    assert not [name for name in logged(folder) if name.startswith("gpu/")]
    report = load_report(folder)
    assert report.outcome == "completed"
    assert report.steps == 40
    assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)
    assert report.phase_s["training_step"] >= 0.4
    assert report.settings["num_workers"] == 0
    printed = capfd.readouterr().out
    assert printed.count("No GPU: the Trainer trains on 'cpu'") == 1
    assert max(len(line) for line in printed.splitlines() if not line.startswith("Report: ")) <= 100
    assert (folder / "gpu_report.png").read_bytes().startswith(b"\x89PNG")


def test_memory_that_grows_is_told_while_there_is_time_to_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the run is a millisecond here."""
    monkeypatch.setattr(memory_history, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(memory_history, "_ALARM_EVERY_S", 0.3)
    kept = []

    class Leak(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            kept.append(bytearray(b"x") * 2**21)

    with pytest.warns(
        UserWarning, match=r"The memory of the process \(RSS\) grows steadily, by .* GiB a minute"
    ) as told:
        train(tmp_path, GPUUtilizationMonitor(report=False), Leak(), log_every_n_steps=1, limit_train_batches=100)
    assert sum("grows steadily" in str(warning.message) for warning in told) == 1


def test_without_a_driver_all_gpus_are_none_and_it_is_said_why(driver: Driver, tmp_path: Path) -> None:
    with driver.change():
        driver.library_missing = True
    report = load_report(train(tmp_path, GPUUtilizationMonitor(devices="all")))
    assert report.gpus == ()
    assert report.gpu_note is not None
    assert "driver" in report.gpu_note


def test_the_report_sums_up_each_gpu_and_names_the_broken_one(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=60, memory_total="80GiB", memory_free="20GiB"), gpu(lost=True)]
    report = load_report(train(tmp_path, GPUUtilizationMonitor(interval_s=0.05, devices="all")))
    (first,) = report.gpus
    assert first.index == 0
    assert first.uuid == driver.gpus[0].uuid
    assert first.utilization_percent_mean == 60.0
    assert first.memory_used_bytes_max == 60 * 2**30
    assert first.timelines["utilization_percent"]
    assert report.gpu_note is not None
    assert report.gpu_note.startswith("GPU 1 is not measured")


def test_a_gpu_that_is_lost_in_mid_run_does_not_stop_the_training(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=50)]

    class Lose(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 20:
                with driver.change():
                    driver.gpus[0].lost = True

    folder = train(tmp_path, GPUUtilizationMonitor(interval_s=0.05, devices="all"), Lose())
    assert load_report(folder).steps == 40
    assert logged(folder)["gpu/0/memory_used_bytes"].keys() == {19}
    assert sampler_threads() == []


def test_a_run_that_fails_has_its_report_and_leaves_no_thread(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(utilization=50)]
    monitor = GPUUtilizationMonitor(interval_s=0.05, devices="all")
    trainer = quiet_trainer(tmp_path, callbacks=[monitor, Raise(at_step=12)])
    with pytest.raises(Boom):
        trainer.fit(Model(time.sleep, step_s=0.05), loader(Samples(40)))
    report = load_report(tmp_path)
    assert report.outcome == "stopped by Boom at step 12"
    assert report.gpus[0].utilization_percent_mean == 50.0
    assert sampler_threads() == []


@pytest.mark.parametrize("advisor_first", [True, False])
def test_the_advisors_findings_are_in_the_report_wherever_it_stands(tmp_path: Path, advisor_first: bool) -> None:
    callbacks: list[Callback] = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=7, min_seconds=0)]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks[:: -1 if advisor_first else 1])
    trainer.fit(Model(time.sleep, step_s=0.005), loader(Samples(40)))
    assert load_report(tmp_path).diagnosis.verdict != "too_short"  # as it is by the monitor's own threshold


def test_two_fits_of_one_trainer_have_a_report_each(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    trainer.fit(Model(), loader(Samples(3)))
    assert load_report(tmp_path).steps == 3
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Model(), loader(Samples(5)))
    assert load_report(tmp_path).steps == 5


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"barebones": True}, {"logger": False}])
def test_it_works_in_every_kind_of_trainer(driver: Driver, tmp_path: Path, options: dict[str, bool]) -> None:
    driver.gpus = [gpu()]
    if "barebones" in options:
        options = {**options, "logger": None, "enable_checkpointing": None, "enable_progress_bar": None}
        options["enable_model_summary"] = None
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor(devices="all")], **options)
    trainer.fit(Model(), loader(Samples(3)))
    assert load_report(tmp_path).outcome == "completed"


def test_only_fit_is_watched(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()])
    trainer.validate(Model(), loader(Samples(3)), verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_the_switch_turns_it_off(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    driver.gpus = [gpu()]
    folder = train(tmp_path, GPUUtilizationMonitor(devices="all"))
    assert not [name for name in logged(folder) if name.startswith("gpu/")]
    assert not (folder / "gpu_report.json").exists()
    assert driver.calls() == []


def test_a_log_dir_that_cannot_be_made_is_told_before_training_and_the_report_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    told: list[bool] = []

    class Steps(Callback):
        def on_train_start(self, *args: Any) -> None:
            told.append(any("not written to" in str(warning.message) for warning in warned))

    trainer = quiet_trainer(tmp_path / "file" / "runs", callbacks=[GPUUtilizationMonitor(), Steps()])
    with pytest.warns(UserWarning, match="will be printed, but not written to") as warned:
        trainer.fit(Model(), loader(Samples(3)))
    assert told == [True]
    assert str(tmp_path / "file" / "runs") in str([str(warning.message) for warning in warned])
    assert "Verdict: TOO SHORT" in capfd.readouterr().out


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="dropping root's rights needs root")
def test_a_log_dir_that_is_somebody_elses_costs_the_file_and_not_the_training() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        os.chmod(folder, 0o755)
        os.seteuid(65534)
        try:
            with pytest.warns(UserWarning, match=r"not written to .*Permission denied"):
                quiet_trainer(Path(folder), callbacks=[GPUUtilizationMonitor()]).fit(Model(), loader(Samples(3)))
        finally:
            os.seteuid(0)
        assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Session, "__init__"),
        (Session, "begin"),
        (Session, "log_if_due"),
        (Session, "end_epoch"),
        (Session, "finish"),
        (Session, "of"),
        (Session, "diagnosis"),
        (Session, "release"),
        (RunRecorder, "__init__"),
        (RunRecorder, "after_step"),
        (RunRecorder, "measurements"),
        (FitTimer, "__init__"),
        (FitTimer, "_start"),
    ],
)
def test_a_fault_of_ours_ends_the_measurement_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """As on a system that hides what is read: here any of it may fail, at any place."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(owner, name, fail)
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.01, min_steps=1)]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, log_every_n_steps=5, max_epochs=3)
    with pytest.warns(UserWarning, match="because of an error in it: PermissionError"):
        trainer.fit(Model(), loader(Samples(40)))
    assert trainer.global_step == 120
    assert sampler_threads() == []
    assert "profile" not in vars(trainer.profiler)  # type: ignore[attr-defined]


def test_a_fault_of_ours_hides_no_error_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Session, "finish", fail)
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(), Raise(at_step=5)]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks)
    with pytest.raises(Boom), pytest.warns(UserWarning, match="because of an error in it: PermissionError"):
        trainer.fit(Model(), loader(Samples(40)))
    assert "profile" not in vars(trainer.profiler)  # type: ignore[attr-defined]


def test_a_monitor_that_is_taken_out_reports_at_the_end_and_leaves_no_thread(
    driver: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class TakeOut(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 10:
                trainer.callbacks.remove(monitor)  # type: ignore[attr-defined]

    driver.gpus = [gpu()]
    monitor = GPUUtilizationMonitor(devices="all")
    train(tmp_path, monitor, TakeOut())
    assert "completed; 40 steps" in capfd.readouterr().out
    assert sampler_threads() == []


class Collating(LightningDataModule):
    """Its loader refers to it, and so to the Trainer."""

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)

    def train_dataloader(self) -> Any:
        return loader(Samples(8), collate_fn=self.collate)


class Send(Callback):
    """Does what the start of a spawned worker does with its loader."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        collate = pickle.loads(ForkingPickler.dumps(trainer.train_dataloader.collate_fn))
        self.sent = collate([torch.ones(1)] * 2)


def test_a_loader_that_refers_to_the_trainer_can_be_sent_to_spawned_workers(tmp_path: Path) -> None:
    sending = Send()
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(), sending]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, logger=CSVLogger(tmp_path))
    trainer.fit(Model(), datamodule=Collating())
    assert sending.sent.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_a_trainer_can_be_copied_in_mid_fit(tmp_path: Path, profiler: str | None) -> None:
    class Copy(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.copy = copy.deepcopy(trainer)

    copying = Copy()
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(), copying]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, profiler=profiler, logger=CSVLogger(tmp_path))
    trainer.fit(Model(), loader(Samples(8)))
    copied = copying.copy.profiler  # type: ignore[attr-defined]
    with copied.profile("mine") as name:
        assert name == "mine"
    assert copied.profile.__self__ is copied
    assert copying.copy.save_checkpoint.__self__ is copying.copy


def test_the_docstring_lists_the_metrics_that_are_logged() -> None:
    listed: set[str] = set()
    for cell in re.findall(r"^    ((?:``[^`]+``(?:, )?)+) ", str(GPUUtilizationMonitor.__doc__), re.MULTILINE):
        for name in re.findall(r"``(.*?)``", cell):
            before, choices, after = re.fullmatch(r"([^{]*)(?:\{(.*?)\})?(.*)", name).groups()  # type: ignore[union-attr]
            listed |= {f"{before}{choice}{after}" for choice in (choices or "").split(",")}
    logged = {metric.logged for metric in METRICS if metric.logged}
    assert listed - {"gpu/<i>/..."} == logged | {field.name for field in dataclasses.fields(Sharing)} | {
        "energy_joules"
    }


def test_it_pickles(tmp_path: Path) -> None:
    monitor = pickle.loads(pickle.dumps(GPUUtilizationMonitor(interval_s=0.5, devices="all", report=False)))
    assert (monitor.interval_s, monitor.devices, monitor.report) == (0.5, "all", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval_s": 0}, "positive number of seconds, got 0"),
        ({"interval_s": float("nan")}, "positive number of seconds, got nan"),
        ({"devices": "cuda:0"}, '"trainer" or "all", got \'cuda:0\''),
    ],
)
def test_bad_arguments_are_refused_with_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPUUtilizationMonitor(**options)


def test_the_json_is_standard_json_with_a_schema_version(tmp_path: Path) -> None:
    folder = train(tmp_path, GPUUtilizationMonitor())
    text = (folder / "gpu_report.json").read_text()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["schema_version"] == 1


def test_a_terminal_without_box_drawing_gets_the_rest_and_the_file_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    folder = train(tmp_path, GPUUtilizationMonitor(), limit_train_batches=3)
    assert load_report(folder).steps == 3
    terminal.flush()
    assert b"?? training step" in terminal.buffer.getvalue()  # type: ignore[attr-defined]
