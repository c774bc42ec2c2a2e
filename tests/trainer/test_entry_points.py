"""Callbacks for every Trainer of the environment: nobody pays for them who does not use the package."""

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from advised import code_in
from lightning.pytorch import Trainer
from trainings import Model, Samples, loader, quiet_trainer

import lightning_gpu_tools
from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointHooks, PortableCheckpointIO
from lightning_gpu_tools.trainer.entry_points import callbacks_factory
from lightning_gpu_tools.trainer.gpu_utilization import GPUUtilizationMonitor

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


def ours(trainer: Trainer) -> list[str]:
    return [type(c).__name__ for c in trainer.callbacks if type(c).__module__.startswith("lightning_gpu_tools")]


def new_trainer(package: str = PACKAGES[0], *plugins: PortableCheckpointIO) -> Trainer:
    trainer: type[Trainer] = importlib.import_module(package).Trainer
    return trainer(accelerator="cpu", plugins=[*plugins], logger=False, enable_progress_bar=False)


# A torch without torch.distributed is as if it were built with USE_DISTRIBUTED=0.
BROKEN = """
import json, os, sys, warnings
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
before = set(sys.modules)
from lightning_gpu_tools.trainer.entry_points import callbacks_factory
callbacks_factory()
print(json.dumps(sorted(set(sys.modules) - before)), flush=True)
for name, advise in (
    ("torch.distributed", ""), ("lightning_gpu_tools.trainer.strategies", ""), ("psutil", "advise"),
):
    if os.fork() == 0:
        for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            sys.modules[loaded] = None  # importing it raises an error
        sys.modules[name] = None
        os.environ["LIGHTNING_GPU_TOOLS"] = advise
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                              enable_model_summary=False, max_steps=2, limit_val_batches=0)
            trainer.fit(BoringModel())
        ours = [str(one.message) for one in caught if "lightning_gpu_tools" in str(one.message)]
        print(json.dumps([name, trainer.global_step, ours]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_whatever_is_broken_a_trainer_trains(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    answer = run_python("-c", BROKEN, timeout=150)
    imported, *trained = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("[")]
    parts = ["", ".environment", ".trainer", ".trainer.entry_points", ".trainer.import_hooks"]
    assert imported == [f"lightning_gpu_tools{part}" for part in parts]
    assert [steps for _, steps, _ in trained] == [2, 2, 2], answer.stderr
    *quiet, (said,) = [warnings for _, _, warnings in trained]
    assert quiet == [[], []]  # strategies are imported when one is asked for
    assert said.startswith("LIGHTNING_GPU_TOOLS=advise has no effect: ModuleNotFoundError(")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plugin_is_introduced_to_its_trainer(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.delenv("LIGHTNING_GPU_TOOLS", raising=False)
    plugin = PortableCheckpointIO()
    (hooks,) = callbacks_factory()
    assert isinstance(hooks, PortableCheckpointHooks)
    assert ours(new_trainer(package, plugin)) == ["PortableCheckpointHooks"]
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    assert callbacks_factory() == []
    assert ours(new_trainer(package, plugin)) == []


@pytest.mark.follows("Set LIGHTNING_GPU_TOOLS=advise for a report on")
@pytest.mark.parametrize("package", PACKAGES)
def test_zero_code_mode_adds_the_monitor_and_the_advisor(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS", "advise")
    names = ours(new_trainer(package))
    assert names.count("GPUUtilizationMonitor") == names.count("GPUUtilizationAdvisor") == 1


def test_zero_code_mode_yields_to_what_the_user_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS", "advise")
    mine = GPUUtilizationMonitor(report=False)
    quiet_trainer(tmp_path, callbacks=[mine]).fit(Model(), loader(Samples(3)))
    assert not list(tmp_path.rglob("gpu_report.json"))
    assert "Verdict" not in capfd.readouterr().out


@pytest.mark.filterwarnings("error:LIGHTNING_GPU_TOOLS")
@pytest.mark.follows("LIGHTNING_GPU_TOOLS=advise has no effect on Fabric")
def test_zero_code_mode_says_once_that_it_is_not_for_fabric(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS", "advise")
    for family in ("lightning.fabric", "lightning_fabric"):
        importlib.import_module(family).Fabric(accelerator="cpu", devices=1)
    (warning,) = [str(one.message) for one in recwarn if "LIGHTNING_GPU_TOOLS" in str(one.message)]
    assert "has no effect on Fabric" in warning
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    monkeypatch.chdir(tmp_path)
    loop = code_in(warning, r"`(with .* as run:)`") + "\n    for batch in run.batches(data): pass"
    exec(loop, {"lightning_gpu_tools": lightning_gpu_tools, "fabric": fabric, "data": loader(Samples(3))})
    assert list(tmp_path.rglob("gpu_report.json"))
