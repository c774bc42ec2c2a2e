"""The same names and entry points serve ``lightning`` and ``pytorch_lightning``, in any order and in one process."""

import copy
import importlib
import importlib.util
import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in
from cpu_as_cuda import positions
from fake_driver import Driver
from harness import quiet_options
from trainings import Model, Samples, loader, quiet_trainer

import lightning_gpu_tools
from lightning_gpu_tools import (
    FreeMemoryCUDAAccelerator,
    GPUUtilizationAdvisor,
    GPUUtilizationMonitor,
    NumWorkersFinder,
    PortableCheckpointIO,
    load_from_checkpoint,
    load_report,
)
from lightning_gpu_tools.errors import NotEnoughGpusError
from lightning_gpu_tools.strategies import (
    FreeMemoryDDPStrategy,
    FreeMemoryDeepSpeedStrategy,
    FreeMemoryFSDPStrategy,
    FreeMemoryStrategy,
)
from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointHooks
from lightning_gpu_tools.trainer.entry_points import callbacks_factory

TRAINERS = ["lightning.pytorch", "pytorch_lightning"]
FABRICS = ["lightning.fabric", "lightning_fabric"]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
STRATEGIES = [
    (FreeMemoryStrategy, "SingleDeviceStrategy", [3]),
    (FreeMemoryDDPStrategy, "DDPStrategy", [3, 2]),
    (FreeMemoryFSDPStrategy, "FSDPStrategy", [3, 2]),
    pytest.param(FreeMemoryDeepSpeedStrategy, "DeepSpeedStrategy", [3, 2], marks=needs_deepspeed),
]


@pytest.mark.follows("Import lightning or pytorch_lightning before you create a {}.")
def test_a_program_that_imports_this_package_first(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    script = Path(__file__).parents[1] / "either_package.py"
    answer = run_python(str(script), str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    for name, said in zip(["FreeMemoryCUDAAccelerator", "GPUUtilizationMonitor"], found.pop("refusals"), strict=True):
        assert f"before you create a {name}." in said
    assert found == {
        "training": {"steps": 4, "reported": 4, "of both": True, "mine": 7, "unused": False, "by name": True},
        "cli": {"interval_s": 0.5, "inner": "lightning_fabric.plugins.io.torch_io"},
        "imported": ["lightning_fabric", "pytorch_lightning"],
    }


def model(package: str, wrapped: bool) -> Any:
    class Lit(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self, rate: float = 0.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            net = torch.nn.Linear(4, 1)
            self.net = torch.nn.DataParallel(net) if wrapped else net

        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            """The one hook that this model has."""

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Lit


def trainer(package: str, folder: Path, **options: Any) -> Any:
    return importlib.import_module(package).Trainer(**{**quiet_options(folder), **options})


def test_a_training_of_one_package_resumes_in_the_other(tmp_path: Path) -> None:
    loading, saving = TRAINERS
    importlib.import_module(loading)
    io = importlib.import_module(f"{saving}.plugins.io").AsyncCheckpointIO(PortableCheckpointIO())
    advisor = GPUUtilizationAdvisor(min_steps=1, min_seconds=0)
    callbacks = [GPUUtilizationMonitor(), advisor, NumWorkersFinder()]
    run = trainer(saving, tmp_path, plugins=[io], callbacks=callbacks, enable_checkpointing=True)
    data = torch.utils.data.DataLoader(torch.ones(60, 4))  # type: ignore[arg-type]
    source = model(saving, wrapped=True)(rate=0.5)
    run.fit(source, data)
    (path,) = tmp_path.rglob("*.ckpt")

    assert advisor.diagnosis is not None
    report = load_report(tmp_path)
    assert report.steps == 60
    assert report.settings[saving.partition(".")[0]] == importlib.import_module(saving).__version__
    assert [phase for phase in report.phase_s if "Lit." in phase] == ["callback/Lit.on_train_batch_start"]

    again = trainer(loading, tmp_path, plugins=[PortableCheckpointIO()], callbacks=GPUUtilizationMonitor(report=False))
    resumed = model(loading, wrapped=False)()
    again.fit(resumed, data, ckpt_path=path)
    assert again.global_step == 60
    built = load_from_checkpoint(model(loading, wrapped=False), path)
    assert built.hparams.rate == 0.5
    for target in (resumed, built):
        assert torch.equal(target.net.weight, source.net.module.weight)


def make(family: str, **options: Any) -> Any:
    module = importlib.import_module(family)
    if family in FABRICS:
        return module.Fabric(**options)
    return module.Trainer(logger=False, enable_checkpointing=False, **options)


@pytest.mark.parametrize("family", TRAINERS + FABRICS)
@pytest.mark.parametrize(("strategy", "base", "expected"), STRATEGIES)
def test_a_strategy_is_one_of_the_family_that_takes_it(
    cuda: Driver, family: str, strategy: Any, base: str, expected: list[int]
) -> None:
    class Mine(strategy):  # type: ignore[misc]
        pass

    for given in (strategy.strategy_name, strategy(max_utilization=50), Mine(), copy.deepcopy(Mine(claim=False))):
        made = make(family, strategy=given, devices=len(expected))
        assert isinstance(made.strategy, strategy)
        own = getattr(importlib.import_module(f"{family}.strategies"), base)
        assert own in type(made.strategy).__mro__
        assert not {one.__module__ for one in type(made.strategy).__mro__ if one.__name__ == base} - {own.__module__}
        assert positions(made, cuda) == expected
        assert isinstance(made.strategy, type(given)) or isinstance(given, str)


def test_a_callback_is_one_of_both_packages_also_when_pickled() -> None:
    bases = [importlib.import_module(family).Callback for family in TRAINERS]
    for monitor in (GPUUtilizationMonitor(interval_s=2.0), copy.deepcopy(GPUUtilizationMonitor(interval_s=2.0))):
        sent = pickle.loads(pickle.dumps(monitor))
        assert all(isinstance(sent, base) for base in bases)
        assert isinstance(sent, GPUUtilizationMonitor)
        assert (sent.state_key, sent.interval_s) == ("GPUUtilizationMonitor", 2.0)


@pytest.mark.parametrize("family", TRAINERS + FABRICS)
def test_the_accelerator_serves_every_family(cuda: Driver, family: str) -> None:
    class Mine(FreeMemoryCUDAAccelerator):
        def __init__(self) -> None:
            super().__init__(min_free="25GiB")

    with pytest.raises(NotEnoughGpusError, match=r"asked for 25\.0 GiB"):
        make(family, accelerator=copy.copy(Mine()), devices=3, strategy="ddp")
    for given in (FreeMemoryCUDAAccelerator(), copy.copy(Mine())):
        assert isinstance(given, importlib.import_module(f"{family}.accelerators").CUDAAccelerator)
        assert positions(make(family, accelerator=given, devices=2, strategy="ddp"), cuda) == [3, 2]


# Entry points: callbacks for every Trainer of the environment


def ours(trainer: Any) -> list[str]:
    return [type(c).__name__ for c in trainer.callbacks if type(c).__module__.startswith("lightning_gpu_tools")]


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


@pytest.mark.follows("Set LIGHTNING_GPU_TOOLS=advise for a report on")
@pytest.mark.parametrize("package", TRAINERS)
def test_a_trainer_gets_callbacks_that_serve_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.delenv("LIGHTNING_GPU_TOOLS", raising=False)
    plugin = PortableCheckpointIO()
    (hooks,) = callbacks_factory()
    assert isinstance(hooks, PortableCheckpointHooks)
    assert ours(trainer(package, tmp_path, plugins=[plugin])) == ["PortableCheckpointHooks"]
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS", "advise")
    names = ours(trainer(package, tmp_path, plugins=[plugin]))
    assert names.count("GPUUtilizationMonitor") == names.count("GPUUtilizationAdvisor") == 1
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    assert callbacks_factory() == []
    assert ours(trainer(package, tmp_path, plugins=[plugin])) == []


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
    for family in FABRICS:
        importlib.import_module(family).Fabric(accelerator="cpu", devices=1)
    (warning,) = [str(one.message) for one in recwarn if "LIGHTNING_GPU_TOOLS" in str(one.message)]
    assert "has no effect on Fabric" in warning
    advised = code_in(warning, r"`(with .* as run:)`")
    fabric = importlib.import_module(FABRICS[0]).Fabric(accelerator="cpu", devices=1)
    monkeypatch.chdir(tmp_path)
    loop = f"{advised}\n    for batch in run.batches(data): pass"
    exec(loop, {"lightning_gpu_tools": lightning_gpu_tools, "fabric": fabric, "data": loader(Samples(3))})
    assert list(tmp_path.rglob("gpu_report.json"))
