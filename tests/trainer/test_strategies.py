"""The strategies by name, by object and by YAML: which GPUs they get, and what they refuse."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import cpu_as_cuda
import pytest
import torch
from cpu_as_cuda import positions
from fake_driver import Driver, gpu
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from sample_report import TRAINED

from lightning_gpu_tools import FreeMemoryCUDAAccelerator, NumWorkersFinder, select_gpus
from lightning_gpu_tools.errors import CudaAlreadyInitializedError, NotEnoughGpusError
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.selection import ranking
from lightning_gpu_tools.selection.ranking import Request
from lightning_gpu_tools.strategies import (
    FreeMemoryDDPStrategy,
    FreeMemoryDeepSpeedStrategy,
    FreeMemoryFSDPStrategy,
    FreeMemoryStrategy,
)

BY_NAME = {
    "free_memory": FreeMemoryStrategy,
    "ddp_free_memory": FreeMemoryDDPStrategy,
    "fsdp_free_memory": FreeMemoryFSDPStrategy,
    "deepspeed_free_memory": FreeMemoryDeepSpeedStrategy,
}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
NAMES = [pytest.param(name, marks=needs_deepspeed if "deepspeed" in name else ()) for name in BY_NAME]
pytestmark = pytest.mark.usefixtures("claims_dir")


def trainer(strategy: Any, devices: Any = 2, **options: Any) -> Trainer:
    return Trainer(strategy=strategy, devices=devices, logger=False, enable_checkpointing=False, **options)


@pytest.mark.parametrize("name", NAMES)
def test_options_are_those_of_a_selection_and_of_lightning(
    cuda: Driver, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = BY_NAME[name]
    with pytest.raises(NotEnoughGpusError, match=r"asked for 50\.0 GiB"):
        trainer(strategy(min_free="50GiB"))
    with pytest.raises(NotEnoughGpusError, match="is NVIDIA H200, asked for A100"):
        trainer(strategy(name="A100"))
    ReportFile(tmp_path).save(TRAINED)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotEnoughGpusError, match=r"asked for 48\.0 GiB"):
        trainer(strategy(min_free="last"))
    assert positions(trainer(strategy(min_free="8GiB", precision_plugin=None, claim=False), devices=1), cuda) == [3]


def test_options_of_lightnings_strategy_reach_it(cuda: Driver) -> None:
    ddp = FreeMemoryDDPStrategy(find_unused_parameters=True, process_group_backend="gloo", start_method="spawn")
    made: Any = trainer(ddp).strategy
    assert made._ddp_kwargs == {"find_unused_parameters": True}
    assert made.process_group_backend == "gloo"
    sharded: Any = trainer(FreeMemoryFSDPStrategy(state_dict_type="sharded")).strategy
    assert sharded._state_dict_type == "sharded"


@needs_deepspeed
@pytest.mark.follows("Create the Trainer before anything uses CUDA")
def test_options_of_deepspeed_reach_it(cuda: Driver) -> None:
    made: Any = trainer(FreeMemoryDeepSpeedStrategy(stage=3)).strategy
    assert made.config["zero_optimization"]["stage"] == 3


@needs_deepspeed
def test_deepspeed_cannot_be_given_other_numbers(cuda: Driver) -> None:
    cpu_as_cuda.start()
    with pytest.raises(CudaAlreadyInitializedError, match=r"DeepSpeed can only use .* \[2, 3\]"):
        trainer("deepspeed_free_memory")


@pytest.mark.follows("CPU, use Trainer(accelerator='cpu') without {}")
@pytest.mark.parametrize(("name", "accelerator"), [("free_memory", "auto"), ("fsdp_free_memory", "cpu")])
def test_without_cuda_the_message_says_what_to_do(driver: Driver, name: str, accelerator: str) -> None:
    with pytest.raises(NotEnoughGpusError, match=r"would run on the CPUAccelerator.*Trainer\(accelerator='cpu'\)"):
        trainer(name, accelerator=accelerator, devices=1)


def test_ddp_on_the_cpu_is_plain_ddp(cuda: Driver, recwarn: pytest.WarningsRecorder) -> None:
    made = trainer("ddp_free_memory", accelerator="cpu", devices=2)
    assert made.strategy.parallel_devices == [torch.device("cpu")] * 2
    assert cuda.calls() == []
    assert not [one for one in recwarn if "FreeMemory" in str(one.message)]


def test_ddp_warns_once_why_it_trains_on_the_cpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    driver.gpus = [gpu()]
    made = trainer("ddp_free_memory", devices=1)
    assert made.strategy.root_device.type == "cpu"
    (warning,) = [str(one.message) for one in recwarn if "FreeMemory" in str(one.message)]
    why = "In CUDA_VISIBLE_DEVICES='9', '9' names no GPU, or one again. This machine has 1 GPU, numbered"
    assert f"FreeMemoryDDPStrategy picks no GPU, and training runs on the CPUAccelerator. {why}" in warning


CONFIG = """
trainer:
  devices: 1
  logger: false
  enable_checkpointing: false
  callbacks: [{class_path: lightning_gpu_tools.NumWorkersFinder, init_args: {budget_s: 5}}]
  accelerator: {class_path: lightning_gpu_tools.FreeMemoryCUDAAccelerator, init_args: {exclusive: true, wait: 10}}
  strategy: {class_path: lightning_gpu_tools.strategies.STRATEGY, init_args: {exclusive: true, max_utilization: 50}}
"""


@pytest.mark.parametrize("name", NAMES)
def test_lightning_cli_builds_every_strategy_and_the_accelerator(cuda: Driver, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("STRATEGY", BY_NAME[name].__name__))

    def cli(*arguments: str) -> LightningCLI:
        args = ["--config", str(tmp_path / "config.yaml"), *arguments]
        return LightningCLI(BoringModel, BoringDataModule, run=False, args=args, save_config_callback=None)

    made = cli().trainer
    assert isinstance(made.accelerator, FreeMemoryCUDAAccelerator)
    assert isinstance(made.strategy, BY_NAME[name])
    assert isinstance(made.callbacks[0], NumWorkersFinder)
    assert positions(made, cuda) == [3]
    with pytest.raises(SystemExit):
        cli("--trainer.strategy.init_args.min_fre=1GiB")


OPTIONS = list(inspect.signature(select_gpus, eval_str=True).parameters.values())[1:]


@pytest.mark.parametrize("taker", [*BY_NAME.values(), FreeMemoryCUDAAccelerator])
def test_every_signature_shows_the_options_of_a_selection(taker: Any) -> None:
    assert [one.name for one in OPTIONS] == [*ranking.OPTIONS] == [*Request._fields[1:-2]]
    parameters = inspect.signature(taker, eval_str=True).parameters
    assert [parameters[one.name] for one in OPTIONS] == OPTIONS
    parser = ArgumentParser()
    parser.add_class_arguments(taker, "it")
    shown = " ".join(parser.format_help().split())
    assert all(text in shown for text in ranking.OPTIONS.values())
