"""The accelerator and the strategies, by name, by object and by YAML, on the fake driver's GPUs.

Which GPUs they get, that all processes of a job get the same, and what they refuse.
"""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cpu_as_cuda
import pytest
import torch
from advised import code_in
from cause_examples import MEMORY_EXAMPLES, TIME_EXAMPLES
from cpu_as_cuda import positions
from fake_driver import Driver, gpu, mig, process
from jsonargparse import ArgumentParser
from launched_jobs import claims_in, live_claims
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sample_report import TRAINED

from lightning_gpu_tools import FreeMemoryCUDAAccelerator, NumWorkersFinder, select_gpus
from lightning_gpu_tools.advice.causes.memory import other_processes
from lightning_gpu_tools.advice.causes.time import shared_gpu
from lightning_gpu_tools.errors import CudaAlreadyInitializedError, NotEnoughGpusError
from lightning_gpu_tools.reports.report import ReportFile
from lightning_gpu_tools.runs.surroundings import claimed_bytes, shortcomings
from lightning_gpu_tools.selection import ranking
from lightning_gpu_tools.selection.claims import held_claims, warn_once
from lightning_gpu_tools.selection.ranking import Request
from lightning_gpu_tools.strategies import (
    FreeMemoryDDPStrategy,
    FreeMemoryDeepSpeedStrategy,
    FreeMemoryFSDPStrategy,
    FreeMemoryStrategy,
)
from lightning_gpu_tools.trainer.facts import TrainerRun

STRATEGIES = FreeMemoryStrategy, FreeMemoryDDPStrategy, FreeMemoryFSDPStrategy, FreeMemoryDeepSpeedStrategy
BY_NAME = {strategy.strategy_name: strategy for strategy in STRATEGIES}
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


@pytest.mark.parametrize("taker", [*STRATEGIES, FreeMemoryCUDAAccelerator])
def test_every_signature_shows_the_options_of_a_selection(taker: Any) -> None:
    assert [one.name for one in OPTIONS] == [*ranking.OPTIONS] == [*Request._fields[1:-2]]
    parameters = inspect.signature(taker, eval_str=True).parameters
    assert [parameters[one.name] for one in OPTIONS] == OPTIONS
    parser = ArgumentParser()
    parser.add_class_arguments(taker, "it")
    shown = " ".join(parser.format_help().split())
    assert all(text in shown for text in ranking.OPTIONS.values())


# The accelerator


def accelerated(devices: object = 1, strategy: str = "auto", **options: Any) -> Trainer:
    return trainer(strategy, devices, accelerator=FreeMemoryCUDAAccelerator(**options))


@pytest.mark.parametrize(("devices", "expected"), [(1, [3]), ("3", [3, 2, 1]), ("auto", [3, 2, 1, 0])])
def test_the_freest_gpus_become_the_first_devices(cuda: Driver, devices: object, expected: list[int]) -> None:
    made = accelerated(devices)
    assert positions(made, cuda) == expected
    assert cpu_as_cuda.device_numbers(made) == list(range(len(expected)))
    assert made.device_ids == list(range(len(expected)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(cuda.gpus[index].uuid for index in expected)


@pytest.mark.parametrize(("devices", "expected"), [("1,2", [1, 2]), ([3, 0], [3, 0])])
def test_named_devices_are_respected(cuda: Driver, devices: object, expected: list[int], claims_dir: Path) -> None:
    made = accelerated(devices)
    assert positions(made, cuda) == expected
    assert cpu_as_cuda.device_numbers(made) == expected
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert live_claims(claims_dir) == [("whole", len(expected))]
    assert cpu_as_cuda.device_numbers(accelerated(devices)) == expected
    assert live_claims(claims_dir) == [("whole", len(expected))]


def test_named_devices_are_checked(cuda: Driver) -> None:
    with pytest.raises(NotEnoughGpusError, match=r"GPU 0 .*10\.0 GiB free, asked for 15\.0 GiB"):
        accelerated([0, 3], min_free="15GiB")
    with pytest.raises(MisconfigurationException, match="You requested gpu"):
        accelerated([7])


@pytest.mark.parametrize(("mask", "devices"), [("1", 1), ("0,1", "auto")])
def test_exactly_what_a_scheduler_gave_is_left_alone(
    cuda: Driver, monkeypatch: pytest.MonkeyPatch, claims_dir: Path, mask: str, devices: object
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    made = accelerated(devices, min_free="70GiB")
    assert positions(made, cuda) == [int(entry) for entry in mask.split(",")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    assert live_claims(claims_dir) == [("memory", len(mask.split(",")))]
    accelerated(devices)  # a second one leaves it alone, too
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    assert len(live_claims(claims_dir)) == 1


@pytest.mark.parametrize("theirs", [True, False])
def test_two_jobs_on_granted_gpus_are_warned(
    cuda: Driver, monkeypatch: pytest.MonkeyPatch, claims_dir: Path, caplog: pytest.LogCaptureFixture, theirs: bool
) -> None:
    warn_once.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    select_gpus(exclusive=theirs)
    accelerated(1, exclusive=True)
    assert live_claims(claims_dir) == [("exclusive" if theirs else "whole", 1), ("whole", 1)]
    assert f"(pid {os.getpid()}) has claimed. Both jobs now use it" in caplog.text


def test_a_second_trainer_gets_the_same_gpus(cuda: Driver, claims_dir: Path) -> None:
    first = cpu_as_cuda.gpus_of(accelerated(2))
    with cuda.change():  # the first training fills its GPUs
        cuda.gpus[2].memory_free = cuda.gpus[3].memory_free = 0
    assert cpu_as_cuda.gpus_of(accelerated(2)) == first
    assert cpu_as_cuda.gpus_of(accelerated(-1)) == first
    cpu_as_cuda.start()
    assert cpu_as_cuda.gpus_of(accelerated(2, min_free="9GiB")) == first
    assert live_claims(claims_dir) == [("whole", 2)]
    assert cpu_as_cuda.gpus_of(accelerated(1)) == first[:1]


def test_after_cuda_has_started_gpus_are_picked_by_number(cuda: Driver) -> None:
    cpu_as_cuda.start()
    made = accelerated(2)
    # Ascending, because trainer.device_ids is wrong otherwise; the mask cannot be changed any more.
    assert cpu_as_cuda.device_numbers(made) == [2, 3]
    assert made.device_ids == [2, 3]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert cpu_as_cuda.device_numbers(accelerated(2)) == [2, 3]


def test_all_of_a_divided_gpu_is_one_instance(cuda: Driver) -> None:
    cuda.gpus = [gpu(mig=[mig(memory_free="4GiB"), mig(memory_free="9GiB")])]
    assert cpu_as_cuda.gpus_of(accelerated("auto", min_free="5GiB")) == [cuda.gpus[0].mig[1].uuid]


@pytest.mark.follows("Use a free GPU (lightning-gpu-tools pick --exclusive, or", "{}(min_free='{}') claims it.")
def test_advised_accelerators_find_a_free_gpu_and_claim_what_is_needed(cuda: Driver, claims_dir: Path) -> None:
    cuda.gpus[3].processes = [process(1)]
    (finding,) = shared_gpu.find(TIME_EXAMPLES["shared_gpu"].sick)
    (other,) = other_processes.find(MEMORY_EXAMPLES["other_processes"].sick)
    texts = code_in(finding.advice, r", or (\S+)\), then"), code_in(other.advice, r"(\S+) claims it")
    free, claiming = (eval(text, {"FreeMemoryCUDAAccelerator": FreeMemoryCUDAAccelerator}) for text in texts)
    assert positions(Trainer(accelerator=free, devices=1, logger=False), cuda) == [2]
    for claim in held_claims():
        claim.release()
    Trainer(accelerator=claiming, devices=1, logger=False)
    assert live_claims(claims_dir) == [("memory", 1)]


@pytest.mark.follows("min_free='last' is only for the command line, the accelerator and strategies. Give a size")
def test_last_is_not_for_a_selection_in_python(cuda: Driver) -> None:
    with pytest.raises(ValueError, match=r"min_free='last' is only for .*\. Give a size\."):
        select_gpus(min_free="last")
    assert select_gpus(min_free="8GiB").uuids == (cuda.gpus[3].uuid,)


def test_without_a_gpu_the_trainer_says_so(cuda: Driver) -> None:
    with cuda.change():
        cuda.gpus = []
    why = r"FreeMemoryCUDAAccelerator finds no GPU\. (This PyTorch .* was built without CUDA|.*driver)"
    with pytest.warns(UserWarning, match=why):
        assert not FreeMemoryCUDAAccelerator.is_available()
    with (
        pytest.warns(UserWarning, match=why),
        pytest.raises(MisconfigurationException, match="`FreeMemoryCUDAAccelerator` can not run on your system"),
    ):
        accelerated(1)


@pytest.mark.parametrize("strategy", ["auto", "ddp_free_memory"])
def test_a_trainer_opens_and_reads_the_driver_once(cuda: Driver, strategy: str) -> None:
    cuda.forget_calls()
    accelerated(2, strategy)
    calls = cuda.calls()
    assert cuda.stays_open()
    assert [call.function for call in calls].count("nvmlDeviceGetMemoryInfo") == len(cuda.gpus)
    accelerated(2, strategy)  # the job has its GPUs, and CUDA_VISIBLE_DEVICES names them
    assert cuda.calls() == calls


def holding(size: str, program: str = "run") -> subprocess.Popen[bytes]:
    """Start a program that claims memory of a GPU, prints a line, and waits."""
    command = [sys.executable, "-m", "lightning_gpu_tools", program, "--min-free", size, "--", "sh", "-c", "echo; cat"]
    return subprocess.Popen(command, stdin=-1, stdout=-1)


@pytest.mark.follows("Claim GPUs as well: choose them with this package, or with `lightning-gpu-tools run`.")
def test_a_job_without_a_claim_hears_of_rivals(cuda: Driver, claims_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cuda.gpus[3].uuid)
    made = Trainer(accelerator="cuda", devices=1, strategy="ddp", logger=False)
    with holding("8GiB") as other:
        other.stdout.readline()
        (message,) = shortcomings(TrainerRun(made))
        rival = rf"8\.00 GiB by \w+ \(pid {other.pid}\)\."
        assert re.search(rf"memory of GPU 0, and may use it at any time: {rival}", message)
        assert claimed_bytes(TrainerRun(made)) is None
        with holding("1GiB", code_in(message, r"or with `lightning-gpu-tools (\w+)`")) as own:
            own.stdout.readline()
            claims = {claim.pid: claim.memory_bytes for claim in claims_in(claims_dir)}
            own.kill()
        other.kill()
    assert claims == {other.pid: 8 * 2**30, own.pid: 2**30}
    with select_gpus(min_free="2GiB") as selection:
        selection.apply()
        assert claimed_bytes(TrainerRun(made)) == 2 * 2**30
