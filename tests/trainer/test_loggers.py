"""Metrics, summary and report of one training, in each of Lightning's loggers that is installed."""

import json
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_driver import Driver, gpu
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from trainings import Model, Samples, loader, logged, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.reports.page import render_page
from lightning_gpu_tools.reports.text import render_text

# The last value of each metric, and each text.
Kept = tuple[dict[str, Any], dict[str, Any]]


def tensorboard(folder: Path) -> tuple[Logger, Callable[[], Kept]]:
    logger = TensorBoardLogger(folder)

    def read() -> Kept:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(logger.log_dir).Reload()
        texts = {
            tag.removesuffix("/text_summary"): textwrap.dedent(
                events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
            )
            for tag in events.Tags()["tensors"]
        }
        return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}, texts

    return logger, read


def wandb(folder: Path) -> tuple[Logger, Callable[[], Kept]]:
    logger = WandbLogger(save_dir=folder, offline=True)

    def read() -> Kept:
        kept = dict(logger.experiment.summary)
        page = Path(logger.experiment.dir, kept["gpu_tools/report"]["path"])
        kept["gpu_tools/report"] = page.read_text()
        logger.experiment.finish()
        return kept, kept

    return logger, read


def mlflow(folder: Path) -> tuple[Logger, Callable[[], Kept]]:
    folder.mkdir()
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{folder}/mlflow.db", artifact_location=str(folder / "artifacts"))

    def read() -> Kept:
        client, run = logger.experiment, logger.run_id
        kept = client.get_run(run).data
        report = Path(client.download_artifacts(run, "gpu_tools/report.html")).read_text()
        return kept.metrics, {**kept.tags, "gpu_tools/report": report}

    return logger, read


def comet(folder: Path) -> tuple[Logger, Callable[[], Kept]]:
    logger = CometLogger(offline_directory=str(folder))

    def read() -> Kept:
        logger.experiment.end()
        (archive,) = folder.glob("*.zip")
        with zipfile.ZipFile(archive) as file:
            messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
            uploads = [one["payload"] for one in messages if one["type"] == "file_upload"]
            (report,) = [one for one in uploads if "gpu_tools/report.html" in str(one["additional_params"])]
            report_text = file.read(report["file_path"]).decode()
        metrics = [one["payload"]["metric"] for one in messages if one["type"] == "metric_msg"]
        texts = {one["payload"]["key"]: one["payload"]["value"] for one in messages if one["type"] == "log_other"}
        texts["gpu_tools/report"] = report_text
        return {one["metricName"]: one["metricValue"] for one in metrics}, texts

    return logger, read


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "comet_ml": comet}


class Bare(Logger):
    """All that Lightning asks of a logger, called as Lightning calls it; it has no experiment and keeps no files."""

    name = version = None

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, float] = {}

    @property
    def log_dir(self) -> str:  # which a Trainer does not ask for
        raise NotImplementedError("no files")

    root_dir = log_dir

    def log_metrics(self, *, metrics: dict[str, float], step: int) -> None:  # type: ignore[override]
        self.kept.update(metrics)

    def log_hyperparams(self, params: Any) -> None:  # type: ignore[override]
        pass


def test_a_custom_logger_needs_no_experiment_or_folder(
    driver: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.chdir(tmp_path)
    driver.gpus = [gpu(utilization=80)]
    logger = Bare()
    callbacks = [GPUUtilizationMonitor(interval_s=0.05, devices="all"), GPUUtilizationAdvisor()]
    trainer = quiet_trainer(tmp_path / "root", logger=logger, log_every_n_steps=20, callbacks=callbacks)
    trainer.fit(Model(time.sleep, step_s=0.01), loader(Samples(80)))
    assert {"gpu/0/utilization_percent/mean", "gpu_tools/step_p50_s"} <= logger.kept.keys()
    assert [*(tmp_path / "root").rglob("gpu_report.json")]

    said = capsys.readouterr().out + "".join(str(one.message) for one in recwarn)
    assert not any(words in said for words in ("could not be sent", "no files", "is off"))


@pytest.mark.parametrize("library", LOGGERS)
def test_a_logger_keeps_metrics_summary_and_report(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.setenv("COMET_START_ONLINE", "0")  # with Lightning's own online=False Comet keeps nothing
    for name in ("COMET_ERROR_TRACKING_ENABLE", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "false")
    driver.gpus = [gpu(utilization=80, memory_total="80GiB", memory_free="30GiB")]
    csv = CSVLogger(tmp_path / "csv")
    logger, read = LOGGERS[library](tmp_path / library)
    callbacks = [GPUUtilizationMonitor(interval_s=0.05, devices="all"), GPUUtilizationAdvisor()]
    trainer = quiet_trainer(tmp_path, logger=[csv, logger], log_every_n_steps=20, callbacks=callbacks)
    trainer.fit(Model(time.sleep, step_s=0.01), loader(Samples(80)))
    report = load_report(csv.log_dir)
    ours = {name: values for name, values in logged(Path(csv.log_dir)).items() if name.startswith("gpu")}
    last = {name: values[max(values)] for name, values in ours.items()}
    assert {"gpu/0/utilization_percent/mean", "gpu/0/memory_used_bytes", "gpu_tools/step_p50_s"} <= last.keys()
    metrics, texts = read()
    assert {name: metrics[name] for name in last} == pytest.approx(last, rel=1e-6)  # TensorBoard keeps 32 bits
    assert texts["gpu_tools/verdict"] == report.diagnosis.verdict
    assert texts["gpu_tools/report"] == (render_text if library == "tensorboard" else render_page)(report)
