"""What every Trainer of the environment gets, and that nobody pays for it who does not use the package."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trainings
from lightning.pytorch import Callback, Trainer

from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO, TrainerIntroduction
from lightning_gpu_tools.trainer.entry_points import callbacks_factory
from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor

HEAVY = (
    "torch",
    "lightning",
    "pynvml",
    "rich",
    "lightning_gpu_tools.trainer.checkpoint_plugin",
    "lightning_gpu_tools.trainer.gpu_utilization_monitor",
)


def ours(trainer: Trainer) -> list[str]:
    return [type(c).__name__ for c in trainer.callbacks if type(c).__module__.startswith("lightning_gpu_tools")]


def quiet_trainer(*callbacks: Callback, plugin: PortableCheckpointIO | None = None) -> Trainer:
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        plugins=[plugin] if plugin else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
    )


def test_nothing_is_returned_and_nothing_imported_for_a_program_that_does_not_use_the_package(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    program = (
        "import sys; from lightning_gpu_tools.trainer.entry_points import callbacks_factory; "
        f"print(callbacks_factory(), [name for name in {HEAVY} if name in sys.modules])"
    )
    for env in ({"LIGHTNING_GPU_TOOLS": None}, {"LIGHTNING_GPU_TOOLS": "advise", "LIGHTNING_GPU_TOOLS_DISABLE": "1"}):
        assert run_python("-c", program, env=env).stdout.strip() == "[] []"


def test_a_plugin_is_introduced_to_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_GPU_TOOLS", raising=False)
    plugin = PortableCheckpointIO()
    assert [type(callback) for callback in callbacks_factory()] == [TrainerIntroduction]
    assert ours(quiet_trainer(plugin=plugin)) == ["TrainerIntroduction"]
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    assert callbacks_factory() == []
    assert ours(quiet_trainer(plugin=plugin)) == []


def test_zero_code_mode_adds_the_monitor_and_the_advisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS", "advise")
    names = ours(quiet_trainer())
    assert names.count("GPUUtilizationMonitor") == names.count("GPUUtilizationAdvisor") == 1


def test_zero_code_mode_yields_to_what_the_user_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS", "advise")
    mine = GPUUtilizationMonitor(report=False)
    trainings.quiet_trainer(tmp_path, callbacks=[mine]).fit(trainings.Model(), trainings.loader(trainings.Samples(3)))
    assert not list(tmp_path.rglob("gpu_report.json"))
    assert "Verdict" not in capfd.readouterr().out


def test_zero_code_mode_never_costs_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS", "advise")
    # What a broken installation does: importing the module fails.
    monkeypatch.setitem(sys.modules, "lightning_gpu_tools.trainer.gpu_utilization_advisor", None)
    with pytest.warns(RuntimeWarning, match="LIGHTNING_GPU_TOOLS=advise has no effect: .*gpu_utilization_advisor"):
        trainer = quiet_trainer()
    assert "GPUUtilizationMonitor" not in ours(trainer)
