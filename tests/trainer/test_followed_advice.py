"""What the causes of lost time advise, taken from their messages and done in real trainings."""

import gc
import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in
from cause_examples import STALL_EXAMPLES, TIME_EXAMPLES
from fake_driver import Driver, gpu
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from rank_processes import run_ranks
from synthetic import STEP, gpu_run, on_hopper, ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, get_worker_info
from toys import CollectingModel
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.advice.causes import STALL_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.findings import Finding
from lightning_gpu_tools.advice.lost_time import FIND_FUNCTION
from lightning_gpu_tools.trainer.strategies import why_no_cuda
from lightning_gpu_tools.training.run_measurements import LoaderSettings, LoadingFacts, RunMeasurements


def findings(cause: str, run: RunMeasurements) -> list[Finding]:
    """Return what a cause says of a run."""
    return [*TIME_CAUSES[cause].find(run)]


# --- communication ------------------------------------------------------------------------------------------------


def sent_in_each(folder: Path, rank: int, *, changes: list[tuple[int, bool]]) -> None:
    """Train with each of these changes on two ranks, and leave the bytes of each time that gradients were sent."""
    (folder / f"sent{rank}").write_text(json.dumps([sent_bytes(folder, *one) for one in changes]))


def sent_bytes(folder: Path, accumulate: int, halved: bool) -> list[int]:
    """Train 8 batches, and return the bytes of each time that gradients were sent."""
    sent: list[int] = []

    def counted(state, bucket):  # type: ignore[no-untyped-def] # torch refuses annotations as text
        hook = default_hooks.bf16_compress_wrapper if halved else (lambda allreduce: allreduce)

        def allreduce(state, bucket):  # type: ignore[no-untyped-def]
            sent.append(bucket.buffer().nbytes)
            return default_hooks.allreduce_hook(None, bucket)

        return hook(allreduce)(None, bucket)

    class Register(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.strategy.model.register_comm_hook(None, counted)

    place = {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo"), "use_distributed_sampler": False}
    trainer = quiet_trainer(folder, **place, accumulate_grad_batches=accumulate, callbacks=[Register()])
    trainer.fit(Model(), loader(Samples(8)))
    return sent


@pytest.mark.follows("Average gradients less often ({}){}.", ", or send half the bytes ({})")
def test_gradients_are_sent_as_seldom_and_small_as_advised(tmp_path: Path) -> None:
    run = gpu_run(STEP, 100.0, **ranks({"backward": 0.01}, {"backward": 0.01}, wait_s=0.02))
    (finding,) = findings("communication", run)
    accumulate = int(code_in(finding.advice, r"Trainer\(accumulate_grad_batches=(\d+)\)"))
    assert "bf16_compress_hook" in finding.advice
    ended = run_ranks(tmp_path, sent_in_each, options={"changes": [(1, False), (accumulate, False), (1, True)]})
    assert not any(rank.returncode for rank in ended), ended[0].stderr
    before, seldom, small = json.loads((tmp_path / "sent0").read_text())
    assert len(before) == accumulate * len(seldom) == len(small)
    assert small[0] == before[0] / 2


# --- data_loading -------------------------------------------------------------------------------------------------


class OneWaits(Dataset[int]):
    """Samples that are the number of their worker; worker 1 returns none until it may, the others count theirs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.may_go_on, self.loaded = context.Event(), context.Semaphore(0)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        if worker.id == 1:
            self.may_go_on.wait(60)
        else:
            self.loaded.release()
        return worker.id


@pytest.mark.follows("Some batches delay the others: when a late one arrives")
def test_others_go_on_beside_a_slow_worker_as_advised() -> None:
    waits = LoadingFacts(long_waits=20, ready_out_of_order_share=0.9)
    loader_now = LoaderSettings(num_workers=2, prefetch_factor=2, persistent_workers=False, pin_memory=False)
    sick = TIME_EXAMPLES["data_loading"].sick
    (finding,) = findings("data_loading", replace(sick, loader=loader_now, loading=waits))
    assert finding.evidence["kind"] == "slow_worker"

    prefetch, data = int(code_in(finding.advice, r"prefetch_factor=(\d+) \(now 2\)")), OneWaits()
    batches = iter(DataLoader(data, num_workers=2, prefetch_factor=prefetch))
    assert all(data.loaded.acquire(timeout=60) for _ in range(prefetch))
    data.may_go_on.set()
    assert next(batches) == 0

    assert "in_order=False" in finding.advice
    data = OneWaits()
    batches = iter(DataLoader(data, num_workers=2, in_order=False))
    assert {int(next(batches)) for _ in range(5)} == {0}
    data.may_go_on.set()


# --- garbage_collection -------------------------------------------------------------------------------------------


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning")
@pytest.mark.follows("Call gc.collect() and gc.freeze() once before")
def test_collections_skip_what_is_frozen_as_advised(tmp_path: Path, unfrozen: None) -> None:
    def collecting_s(folder: Path) -> float:
        callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_steps=1, min_seconds=0.001)]
        quiet_trainer(folder, callbacks=callbacks).fit(CollectingModel(), loader(Samples(80)))
        return load_report(folder).phase_s["garbage_collection"]

    (finding,) = findings("garbage_collection", TIME_EXAMPLES["garbage_collection"].sick)
    before_s = collecting_s(tmp_path / "before")
    for call in re.findall(r"gc\.\w+\(\)", finding.advice)[:2]:
        eval(call, {"gc": gc})
    assert gc.get_freeze_count() > 100_000
    assert collecting_s(tmp_path / "after") < before_s / 2  # by CPU work: as many objects as tens of torch's modules


# --- low_precision, power_cap, thermal_throttling -----------------------------------------------------------------


@pytest.mark.follows("Set {}(precision='bf16-mixed')", "torch.set_float32_matmul_precision('high') (TF32)")
def test_the_precision_that_is_advised_ends_the_advice(tmp_path: Path) -> None:
    slow = on_hopper(tensor_active_percent=0.0)
    (finding,) = findings("low_precision", gpu_run(STEP, 97.0, **slow, matmul_precision="highest"))
    precision = code_in(finding.advice, r"Trainer\(precision='([\w-]+)'\)")
    trainer = quiet_trainer(tmp_path, precision=precision, max_steps=1)
    trainer.fit(Model(), loader(Samples(2)))
    assert not findings("low_precision", gpu_run(STEP, 97.0, **slow, precision=trainer.precision))

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(code_in(finding.advice, r"set_float32_matmul_precision\('(\w+)'\)"))
    now = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    (again,) = findings("low_precision", gpu_run(STEP, 97.0, **slow, matmul_precision=now))
    assert "matmul_precision" not in again.advice


@pytest.mark.follows("administrator to raise it: sudo nvidia-smi -pl")
def test_the_power_limit_that_is_advised_ends_the_advice() -> None:
    sick = TIME_EXAMPLES["power_cap"].sick
    (finding,) = findings("power_cap", sick)
    watts = float(code_in(finding.advice, r"nvidia-smi -pl (\d+)"))
    assert watts == sick.gpu.power_limit_watts_max
    assert not findings("power_cap", replace(sick, gpu=replace(sick.gpu, power_limit_watts=watts)))


# --- launch_bound -------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """A count of the operations that torch is asked for, each of which launches a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.follows("a fused optimizer (AdamW(..., fused=True))")
def test_a_fused_optimizer_has_fewer_operations_as_advised() -> None:
    (finding,) = findings("launch_bound", TIME_EXAMPLES["launch_bound"].sick)
    option = code_in(finding.advice, r"AdamW\(\.\.\., (\w+)=True\)")
    counts = []
    for options in ({"foreach": True}, {option: True}):
        layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(50)))
        optimizer = torch.optim.AdamW(layers.parameters(), **options)
        layers(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with Operations() as operations:
            optimizer.step()
        counts.append(operations.count)
    assert counts[1] < counts[0] / 5


# --- unexplained, and every slow function -------------------------------------------------------------------------


@pytest.mark.follows("Find the slow function: py-spy record --pid PID --duration 30")
def test_the_profile_that_is_advised_names_the_slow_function(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def slow():\n    return sum(range(3_000_000))\nslow()\n")
    command = code_in(FIND_FUNCTION, r"(python -m cProfile -s tottime SCRIPT)")
    words = [{"python": sys.executable, "SCRIPT": str(script)}.get(word, word) for word in command.split()]
    profile = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\d+ +[\d.]+ .*(sum|slow)", profile) is not None


@pytest.mark.follows("End other programs (`ps aux --sort=-rss | head`)")
def test_the_command_that_is_advised_lists_large_programs_first() -> None:
    (explained,) = STALL_CAUSES["swap"].find(STALL_EXAMPLES["swap"].sick)
    command = code_in(explained.advice, r"`(ps aux [^`]+)`")
    _, *rows = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout.splitlines()
    sizes = [int(row.split()[5]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.follows("Run `python -c 'import torch; torch.cuda.init()'`")
def test_the_command_that_is_advised_says_why_cuda_cannot_start(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.gpus = [gpu()]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    command = code_in(why_no_cuda(), r"`(python -c '[^`]+')`").replace("python", sys.executable, 1)
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert answer.returncode
    assert "CUDA" in answer.stderr.splitlines()[-1]
