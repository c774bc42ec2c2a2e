"""Trainers on the fake driver's GPUs: which ones they get, and that all processes of a job get the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cpu_as_cuda
import pytest
from cause_examples import MEMORY_EXAMPLES, TIME_EXAMPLES
from fake_driver import Driver, gpu, mig, process
from launched_jobs import claims_in, live_claims
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gpu_tools import FreeMemoryCUDAAccelerator, select_gpus
from lightning_gpu_tools.advice.causes.memory import other_processes
from lightning_gpu_tools.advice.causes.time import shared_gpu
from lightning_gpu_tools.errors import NotEnoughGpusError
from lightning_gpu_tools.runs.surroundings import claimed_bytes, shortcomings
from lightning_gpu_tools.selection.claims import held_claims, warn_once
from lightning_gpu_tools.trainer.facts import TrainerRun

pytestmark = pytest.mark.usefixtures("cuda")


def trainer(devices: object = 1, strategy: str = "auto", **options: object) -> Trainer:
    return Trainer(
        accelerator=FreeMemoryCUDAAccelerator(**options),  # type: ignore[arg-type]
        devices=devices,  # type: ignore[arg-type]
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        barebones=False,
    )


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(1, [3]), ("3", [3, 2, 1]), ("auto", [3, 2, 1, 0])],
)
def test_the_freest_gpus_become_the_first_devices(driver: Driver, devices: object, expected: list[int]) -> None:
    made = trainer(devices)
    assert cpu_as_cuda.positions(made, driver) == expected
    assert cpu_as_cuda.device_numbers(made) == list(range(len(expected)))
    assert made.device_ids == list(range(len(expected)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(driver.gpus[index].uuid for index in expected)


@pytest.mark.parametrize(("devices", "expected"), [("1,2", [1, 2]), ([3, 0], [3, 0])])
def test_named_devices_are_respected(driver: Driver, devices: object, expected: list[int], claims_dir: Path) -> None:
    made = trainer(devices)
    assert cpu_as_cuda.positions(made, driver) == expected
    assert cpu_as_cuda.device_numbers(made) == expected
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert live_claims(claims_dir) == [("whole", len(expected))]
    assert cpu_as_cuda.device_numbers(trainer(devices)) == expected
    assert live_claims(claims_dir) == [("whole", len(expected))]


def test_named_devices_are_checked() -> None:
    with pytest.raises(NotEnoughGpusError, match=r"GPU 0 .*10\.0 GiB free, asked for 15\.0 GiB"):
        trainer([0, 3], min_free="15GiB")
    with pytest.raises(MisconfigurationException, match="You requested gpu"):
        trainer([7])


@pytest.mark.parametrize(("mask", "devices"), [("1", 1), ("0,1", "auto")])
def test_exactly_what_a_scheduler_gave_is_left_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, claims_dir: Path, mask: str, devices: object
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    made = trainer(devices, min_free="70GiB")
    assert cpu_as_cuda.positions(made, driver) == [int(entry) for entry in mask.split(",")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    assert live_claims(claims_dir) == [("memory", len(mask.split(",")))]
    trainer(devices)  # a second one leaves it alone, too
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    assert len(live_claims(claims_dir)) == 1


@pytest.mark.parametrize("theirs", [True, False])
def test_two_jobs_on_granted_gpus_are_warned(
    monkeypatch: pytest.MonkeyPatch, claims_dir: Path, caplog: pytest.LogCaptureFixture, theirs: bool
) -> None:
    warn_once.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    select_gpus(exclusive=theirs)
    trainer(1, exclusive=True)
    assert live_claims(claims_dir) == [("exclusive" if theirs else "whole", 1), ("whole", 1)]
    assert f"(pid {os.getpid()}) has claimed. Both jobs now use it" in caplog.text


def test_a_second_trainer_gets_the_same_gpus(driver: Driver, claims_dir: Path) -> None:
    first = cpu_as_cuda.gpus_of(trainer(2))
    with driver.change():  # the first training fills its GPUs
        driver.gpus[2].memory_free = driver.gpus[3].memory_free = 0
    assert cpu_as_cuda.gpus_of(trainer(2)) == first
    assert cpu_as_cuda.gpus_of(trainer(-1)) == first
    cpu_as_cuda.start()
    assert cpu_as_cuda.gpus_of(trainer(2, min_free="9GiB")) == first
    assert live_claims(claims_dir) == [("whole", 2)]
    assert cpu_as_cuda.gpus_of(trainer(1)) == first[:1]


def test_after_cuda_has_started_gpus_are_picked_by_number(driver: Driver) -> None:
    cpu_as_cuda.start()
    made = trainer(2)
    # Ascending, because trainer.device_ids is wrong otherwise; the mask cannot be changed any more.
    assert cpu_as_cuda.device_numbers(made) == [2, 3]
    assert made.device_ids == [2, 3]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert cpu_as_cuda.device_numbers(trainer(2)) == [2, 3]


def test_all_of_a_divided_gpu_is_one_instance(driver: Driver) -> None:
    driver.gpus = [gpu(mig=[mig(memory_free="4GiB"), mig(memory_free="9GiB")])]
    assert cpu_as_cuda.gpus_of(trainer("auto", min_free="5GiB")) == [driver.gpus[0].mig[1].uuid]


@pytest.mark.follows("Use a free GPU (lightning-gpu-tools pick --exclusive, or", "{}(min_free='{}') claims it.")
def test_advised_accelerators_find_a_free_gpu_and_claim_what_is_needed(driver: Driver, claims_dir: Path) -> None:
    driver.gpus[3].processes = [process(1)]
    (finding,) = shared_gpu.find(TIME_EXAMPLES["shared_gpu"].sick)
    (other,) = other_processes.find(MEMORY_EXAMPLES["other_processes"].sick)
    texts = re.search(r", or (\S+)\), then", finding.advice), re.search(r"(\S+) claims it", other.advice)
    free, claiming = (eval(text[1], {"FreeMemoryCUDAAccelerator": FreeMemoryCUDAAccelerator}) for text in texts)
    assert cpu_as_cuda.positions(Trainer(accelerator=free, devices=1, logger=False), driver) == [2]
    for claim in held_claims():
        claim.release()
    Trainer(accelerator=claiming, devices=1, logger=False)
    assert live_claims(claims_dir) == [("memory", 1)]


@pytest.mark.follows("min_free='last' is only for the command line, the accelerator and strategies. Give a size")
def test_last_is_not_for_a_selection_in_python(driver: Driver) -> None:
    with pytest.raises(ValueError, match=r"min_free='last' is only for .*\. Give a size\."):
        select_gpus(min_free="last")
    assert select_gpus(min_free="8GiB").uuids == (driver.gpus[3].uuid,)


def test_without_a_gpu_the_trainer_says_so(driver: Driver) -> None:
    with driver.change():
        driver.gpus = []
    why = r"FreeMemoryCUDAAccelerator finds no GPU\. (This PyTorch .* was built without CUDA|.*driver)"
    with pytest.warns(UserWarning, match=why):
        assert not FreeMemoryCUDAAccelerator.is_available()
    with (
        pytest.warns(UserWarning, match=why),
        pytest.raises(MisconfigurationException, match="`FreeMemoryCUDAAccelerator` can not run on your system"),
    ):
        trainer(1)


@pytest.mark.parametrize("strategy", ["auto", "ddp_free_memory"])
def test_a_trainer_opens_and_reads_the_driver_once(driver: Driver, strategy: str) -> None:
    driver.forget_calls()
    trainer(2, strategy)
    calls = driver.calls()
    assert driver.stays_open()
    assert [call.function for call in calls].count("nvmlDeviceGetMemoryInfo") == len(driver.gpus)
    trainer(2, strategy)  # the job has its GPUs, and CUDA_VISIBLE_DEVICES names them
    assert driver.calls() == calls


HOLD = """
import sys
from lightning_gpu_tools import select_gpus
held = select_gpus(min_free="8GiB")
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.follows("Claim GPUs as well: choose them with this package, or with `lightning-gpu-tools run`.")
def test_a_job_without_a_claim_hears_of_rivals(
    driver: Driver, claims_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", driver.gpus[3].uuid)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        made = Trainer(accelerator="cuda", devices=1, strategy="ddp", logger=False)
        (message,) = shortcomings(TrainerRun(made))
        assert re.search(
            rf"memory of GPU 0, and may use it at any time: 8\.00 GiB by \w+ \(pid {other.pid}\)\.", message
        )
        (program,) = re.findall(r"or with `lightning-gpu-tools (\w+)`", message)
        command = [sys.executable, "-m", "lightning_gpu_tools", program, "--min-free", "1GiB", "--", "sh", "-c"]
        assert claimed_bytes(TrainerRun(made)) is None
        with subprocess.Popen([*command, "echo; cat"], stdin=-1, stdout=-1) as own:
            assert own.stdout is not None
            own.stdout.readline()
            claims = {claim.pid: claim.memory_bytes for claim in claims_in(claims_dir)}
            own.kill()
        other.kill()
    assert claims == {other.pid: 8 * 2**30, own.pid: 2**30}
    with select_gpus(min_free="2GiB") as selection:
        selection.apply()
        assert claimed_bytes(TrainerRun(made)) == 2 * 2**30
