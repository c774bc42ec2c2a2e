"""Trainers on the fake driver's GPUs: which ones they get, and that all processes of a job get the same."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cpu_as_cuda
import pytest
from fake_driver import Driver, gpu, mig
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gpu_tools import FreeMemoryCUDAAccelerator, NotEnoughGpusError, select_gpus
from lightning_gpu_tools.selection.claims import read_ledger, warn_once

TESTS = Path(__file__).parents[1]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def cuda(driver: Driver, claims_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four idle GPUs; the higher the number, the more free memory."""
    driver.gpus = [gpu(memory_free=f"{gib}GiB") for gib in (10, 20, 30, 40)]
    cpu_as_cuda.install(monkeypatch.setattr)


def trainer(devices: object = 1, strategy: str = "auto", **options: object) -> Trainer:
    return Trainer(
        accelerator=FreeMemoryCUDAAccelerator(**options),  # type: ignore[arg-type]
        devices=devices,  # type: ignore[arg-type]
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        barebones=False,
    )


def positions(driver: Driver, uuids: list[str]) -> list[int]:
    return [[one.uuid for one in driver.gpus].index(uuid) for uuid in uuids]


def live_claims(claims_dir: Path) -> list[tuple[str, int]]:
    with read_ledger(str(claims_dir)) as ledger:
        return [(claim.kind, len(claim.uuids)) for claim in ledger.claims()]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(1, [3]), (2, [3, 2]), ("3", [3, 2, 1]), (4, [3, 2, 1, 0]), (-1, [3, 2, 1, 0]), ("auto", [3, 2, 1, 0])],
)
def test_the_freest_gpus_become_the_first_devices(driver: Driver, devices: object, expected: list[int]) -> None:
    made = trainer(devices)
    assert positions(driver, cpu_as_cuda.gpus_of(made)) == expected
    assert cpu_as_cuda.device_numbers(made) == list(range(len(expected)))
    assert made.device_ids == list(range(len(expected)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(driver.gpus[index].uuid for index in expected)


@pytest.mark.parametrize("devices", [-1, "auto"])
def test_all_means_all_that_qualify(driver: Driver, devices: object) -> None:
    assert positions(driver, cpu_as_cuda.gpus_of(trainer(devices, min_free="15GiB"))) == [3, 2, 1]


@pytest.mark.parametrize(("devices", "expected"), [([1], [1]), ([0, 2], [0, 2]), ("1,2", [1, 2]), ([3, 0], [3, 0])])
def test_named_devices_are_respected(driver: Driver, devices: object, expected: list[int], claims_dir: Path) -> None:
    made = trainer(devices)
    assert positions(driver, cpu_as_cuda.gpus_of(made)) == expected
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


def test_more_than_there_are_is_refused_with_reasons() -> None:
    with pytest.raises(NotEnoughGpusError, match="Asked for 5 GPUs, but 4 of 4 visible qualify"):
        trainer(5)
    with pytest.raises(NotEnoughGpusError, match="asked for 35") as caught:
        trainer(2, min_free="35GiB")
    assert len(caught.value.rejected) == 3
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(("mask", "devices"), [("1", 1), ("0,1", 2), ("0,1", -1), ("0,1", "auto")])
def test_exactly_what_a_scheduler_gave_is_left_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, claims_dir: Path, mask: str, devices: object
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    made = trainer(devices, min_free="70GiB")
    assert positions(driver, cpu_as_cuda.gpus_of(made)) == [int(entry) for entry in mask.split(",")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    assert live_claims(claims_dir) == [("memory", len(mask.split(",")))]
    trainer(devices)  # a second one leaves it alone, too
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
    assert len(live_claims(claims_dir)) == 1


def test_what_a_scheduler_gave_is_claimed_for_others_to_see(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, run_cli: RunPython
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    trainer(2, exclusive=True)
    others = {"CUDA_VISIBLE_DEVICES": None, "LIGHTNING_GPU_TOOLS_JOB": None}
    answer = run_cli("pick", "-n", "2", env=others)
    assert answer.stdout.split() == [f"{driver.gpus[1].uuid},{driver.gpus[0].uuid}"]
    assert "claimed exclusively" in run_cli("pick", "-n", "3", env=others).stderr


@pytest.mark.parametrize(("theirs", "ours"), [(True, False), (False, True), (True, True)])
def test_two_jobs_on_what_a_scheduler_gave_are_told_and_share_no_exclusive_claim(
    monkeypatch: pytest.MonkeyPatch,
    claims_dir: Path,
    caplog: pytest.LogCaptureFixture,
    theirs: bool,
    ours: bool,
) -> None:
    warn_once.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    select_gpus(exclusive=theirs)
    trainer(1, exclusive=ours)
    assert live_claims(claims_dir) == [("exclusive" if theirs else "whole", 1), ("whole", 1)]
    assert f"(pid {os.getpid()}) has claimed{' exclusively' * theirs}. Both jobs use it now" in caplog.text


def test_the_choice_stays_inside_what_a_scheduler_gave(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1")
    assert positions(driver, cpu_as_cuda.gpus_of(trainer(2))) == [2, 1]


def test_a_second_trainer_gets_the_same_gpus(driver: Driver, claims_dir: Path) -> None:
    first = cpu_as_cuda.gpus_of(trainer(2))
    with driver.change():  # the first training fills its GPUs
        driver.gpus[2].memory_free = driver.gpus[3].memory_free = 0
    assert cpu_as_cuda.gpus_of(trainer(2)) == first
    assert cpu_as_cuda.gpus_of(trainer(-1)) == first
    cpu_as_cuda.start()
    assert cpu_as_cuda.gpus_of(trainer(2, min_free="9GiB")) == first
    assert live_claims(claims_dir) == [("whole", 2)]


def test_a_second_trainer_with_fewer_devices_stays_inside(driver: Driver) -> None:
    trainer(2)
    cpu_as_cuda.start()
    assert positions(driver, cpu_as_cuda.gpus_of(trainer(1))) == [3]


def test_gpus_that_were_selected_before_are_used(driver: Driver, claims_dir: Path) -> None:
    select_gpus(2, exclusive=True).apply()
    assert positions(driver, cpu_as_cuda.gpus_of(trainer(2, exclusive=True))) == [3, 2]
    assert live_claims(claims_dir) == [("exclusive", 2)]


def test_other_jobs_see_the_claim_and_go_elsewhere(driver: Driver, run_cli: RunPython) -> None:
    trainer(2)
    answer = run_cli("pick", "-n", "2", env={"CUDA_VISIBLE_DEVICES": None, "LIGHTNING_GPU_TOOLS_JOB": None})
    assert answer.stdout.split() == [f"{driver.gpus[1].uuid},{driver.gpus[0].uuid}"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "whole"), ({"min_free": "8GiB"}, "memory"), ({"exclusive": True}, "exclusive"), ({"claim": False}, None)],
)
def test_what_is_claimed(options: dict[str, object], kind: str | None, claims_dir: Path) -> None:
    trainer(1, **options)
    assert live_claims(claims_dir) == ([(kind, 1)] if kind else [])


def test_after_cuda_has_started_gpus_are_picked_by_number(driver: Driver) -> None:
    cpu_as_cuda.start()
    made = trainer(2)
    # Ascending, because trainer.device_ids is wrong otherwise; the mask cannot be changed any more.
    assert cpu_as_cuda.device_numbers(made) == [2, 3]
    assert made.device_ids == [2, 3]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert cpu_as_cuda.device_numbers(trainer(2)) == [2, 3]


def test_all_stays_what_the_job_has_though_it_uses_it(driver: Driver) -> None:
    cpu_as_cuda.start()
    assert cpu_as_cuda.device_numbers(trainer("auto", min_free="15GiB")) == [1, 2, 3]
    with driver.change():
        driver.gpus[1].memory_free = driver.gpus[3].memory_free = 0
    assert cpu_as_cuda.device_numbers(trainer("auto", min_free="15GiB")) == [1, 2, 3]


def test_after_cuda_has_started_numbers_count_what_cuda_shows(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    cpu_as_cuda.start()
    made = trainer(2)
    assert cpu_as_cuda.device_numbers(made) == [0, 1]
    assert positions(driver, cpu_as_cuda.gpus_of(made)) == [3, 1]


def test_mig_one_instance_and_not_two(driver: Driver) -> None:
    driver.gpus = [gpu(mig=[mig(memory_free="4GiB"), mig(memory_free="9GiB")])]
    with pytest.raises(NotEnoughGpusError, match="only one MIG instance"):
        trainer(2)
    made = trainer("auto", min_free="5GiB")
    assert cpu_as_cuda.gpus_of(made) == [driver.gpus[0].mig[1].uuid]


@pytest.mark.parametrize("by", ["number", "uuid"])
def test_two_mig_instances_are_no_grant_of_two(driver: Driver, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    driver.gpus = [gpu(mig=[mig(), mig()])]
    mask = "0" if by == "number" else ",".join(str(instance.uuid) for instance in driver.gpus[0].mig or ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with pytest.raises(NotEnoughGpusError, match="only one MIG instance"):
        trainer(2)


def test_options_belong_to_one_accelerator(driver: Driver) -> None:
    big, small = FreeMemoryCUDAAccelerator(min_free="35GiB"), FreeMemoryCUDAAccelerator(min_free="5GiB")
    with pytest.raises(NotEnoughGpusError, match=r"asked for 35\.0 GiB"):
        type(big).parse_devices(4)
    assert type(small).parse_devices(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda accelerator: pickle.loads(pickle.dumps(accelerator))])
def test_an_accelerator_can_be_copied_and_sent_to_other_processes(clone: Callable[..., object]) -> None:
    copied = clone(FreeMemoryCUDAAccelerator(min_free="35GiB"))
    assert isinstance(copied, FreeMemoryCUDAAccelerator)
    assert type(copied).__qualname__ == "FreeMemoryCUDAAccelerator"
    with pytest.raises(NotEnoughGpusError, match=r"asked for 35\.0 GiB"):
        type(copied).parse_devices(2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"min_free": "8 bananas"}, "8 bananas"), ({"max_utilization": 101}, "101"), ({"wait": "soon"}, "soon")],
)
def test_wrong_options_are_refused_at_once(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FreeMemoryCUDAAccelerator(**options)  # type: ignore[arg-type]


def test_one_line_of_the_log_names_the_gpus_and_why(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer(1)
        trainer(1)
    (line,) = [record.message for record in caplog.records if record.name.endswith("lightning_gpu_tools")]
    assert f"GPU 3 ({driver.gpus[3].uuid[:12]}…) with 40.0 GiB free, 0 % busy" in line


@pytest.mark.parametrize("missing", [True, False], ids=["no-driver", "no-gpu"])
def test_without_a_gpu_the_trainer_says_so(driver: Driver, missing: bool) -> None:
    with driver.change():
        driver.gpus = []
        driver.library_missing = missing
    assert not FreeMemoryCUDAAccelerator.is_available()
    with pytest.raises(MisconfigurationException, match="`FreeMemoryCUDAAccelerator` can not run on your system"):
        trainer(1)


# ---- several processes ----

SCRIPT = """
import os, sys
import cpu_as_cuda
cpu_as_cuda.install()
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_gpu_tools import FreeMemoryCUDAAccelerator, FreeMemoryDDPStrategy

QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

def say(*words):  # in one write, because the ranks share the pipe
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def tell(case, trainer):
    say("CORES", trainer.global_rank, *os.sched_getaffinity(0))
    say("TOLD", case, trainer.global_rank, *cpu_as_cuda.gpus_of(trainer))
"""
FIT = (
    SCRIPT
    + """
if __name__ == "__main__":
    if sys.argv[1] == "late" and "LOCAL_RANK" not in os.environ:  # in the process that starts the other
        cpu_as_cuda.start()
    for case in sys.argv[3]:
        trainer = Trainer(
            accelerator=FreeMemoryCUDAAccelerator(min_free="8GiB"), devices=2, max_steps=1,
            strategy=FreeMemoryDDPStrategy(bind_numa=True) if sys.argv[2] == "ddp" else sys.argv[2],
            limit_val_batches=0, **QUIET)
        trainer.fit(BoringModel())
        tell(case, trainer)
    import torch.distributed
    if torch.distributed.is_initialized():  # gloo's threads, left alone, now and then abort the interpreter's end
        torch.distributed.destroy_process_group()
"""
)
BUILD = (
    SCRIPT
    + """
trainer = Trainer(accelerator=FreeMemoryCUDAAccelerator(exclusive=True), devices=2, strategy="ddp", **QUIET)
tell("built", trainer)
"""
)
# What the accelerator does underneath, without the seconds that it takes to import Lightning.
PLACE = """
import os, sys
from lightning_gpu_tools.selection.placement import place
from lightning_gpu_tools.selection.request import Request
assert place(2, Request.parse(exclusive=True), list) == [0, 1]
uuids = os.environ["CUDA_VISIBLE_DEVICES"].replace(",", " ")
os.write(1, f"TOLD built {os.environ['RANK']} {uuids}\\n".encode())
"""
# A claim that nobody holds any more cannot be found, so that ranks have to live at the same time, as in a training.
MEET = """
import pathlib, time
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(__file__ + f".{start}.{os.environ['RANK']}").touch()
while len(list(pathlib.Path(__file__).parent.glob(f"train.py.{start}.*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
"""


def told(output: str, driver: Driver) -> dict[str, dict[int, list[int]]]:
    """What the processes said: case -> rank -> positions of the GPUs in the order of the ranks."""
    found: dict[str, dict[int, list[int]]] = {}
    for line in output.splitlines():
        if line.startswith("TOLD"):
            case, rank, *uuids = line.split()[1:]
            found.setdefault(case, {})[int(rank)] = positions(driver, uuids)
    return found


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a script that can import what tests import, and returns its path."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))

    def write(code: str) -> str:
        (tmp_path / "train.py").write_text(code)
        return str(tmp_path / "train.py")

    return write


@pytest.mark.parametrize(
    ("when", "strategy", "fits", "expected"),
    [
        ("early", "ddp", "ab", [3, 2]),
        ("late", "ddp", "a", [2, 3]),
        ("early", "ddp_spawn", "a", [3, 2]),
        ("early", "ddp_fork", "a", [3, 2]),
        ("early", "ddp_notebook", "a", [3, 2]),
    ],
)
def test_children_of_ddp_and_a_second_fit_use_the_same_gpus(
    driver: Driver,
    script: Callable[[str], str],
    run_python: RunPython,
    claims_dir: Path,
    when: str,
    strategy: str,
    fits: str,
    expected: list[int],
) -> None:
    with driver.change():
        for index, core in enumerate([*sorted(os.sched_getaffinity(0))[:2]] * 2):
            driver.gpus[index].cpus = [core]
    answer = run_python(script(FIT), when, strategy, fits)
    assert answer.returncode == 0, answer.stderr
    ranks = {0: expected, 1: expected} if strategy == "ddp" else {0: expected}  # spawned ones run no script
    assert told(answer.stdout, driver) == dict.fromkeys(fits, ranks)
    assert answer.stderr.count("Picked GPU") == 1
    assert live_claims(claims_dir) == []
    if strategy == "ddp":
        cores = {line.split()[1]: line.split()[2:] for line in answer.stdout.splitlines() if "CORES" in line}
        assert cores == {str(rank): [str(core) for core in driver.gpus[expected[rank]].cpus or ()] for rank in (0, 1)}


def test_a_child_that_outlives_the_one_that_picked_keeps_the_claim(
    driver: Driver, script: Callable[[str], str], claims_dir: Path
) -> None:
    path = script("""
import subprocess, sys
from lightning_gpu_tools.selection.placement import place
from lightning_gpu_tools.selection.request import Request
assert place(1, Request.parse(exclusive=True), list) == [0]
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, sys.argv[0]])
else:
    print("child is there", flush=True)
sys.stdin.read()
""")
    with subprocess.Popen([sys.executable, path, "parent"], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == "child is there\n"
        parent.kill()
        parent.wait()
        assert live_claims(claims_dir) == [("exclusive", 1)]
        parent.stdin.close()  # which ends the child
        assert parent.stdout.read() == ""
        assert live_claims(claims_dir) == []


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]


def test_ranks_of_torchrun_agree(driver: Driver, script: Callable[[str], str], run_python: RunPython) -> None:
    answer = run_python(*TORCHRUN[1:], "--standalone", script(BUILD + MEET))
    assert answer.returncode == 0, answer.stderr
    assert told(answer.stdout, driver) == {"built": {0: [3, 2], 1: [3, 2]}}
    assert answer.stderr.count("Picked GPU") == 1


def test_ranks_that_torchrun_restarts_choose_again_and_agree(
    driver: Driver, script: Callable[[str], str], run_python: RunPython, claims_dir: Path
) -> None:
    restart = "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1')"
    options = ["--standalone", "--max-restarts=1", "--monitor-interval=0.1"]
    answer = run_python(*TORCHRUN[1:], *options, script(PLACE + MEET + restart))
    assert answer.returncode == 0, answer.stderr
    assert len([line for line in answer.stdout.splitlines() if line.startswith("TOLD")]) == 4
    assert told(answer.stdout, driver) == {"built": {0: [3, 2], 1: [3, 2]}}
    assert live_claims(claims_dir) == []


def free_port() -> int:
    with socket.socket() as probe:  # a fixed one may be another test run's on the same machine
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_new_torchrun_leaves_alone_what_the_ranks_of_a_killed_one_still_have(
    driver: Driver, script: Callable[[str], str]
) -> None:
    command = [*TORCHRUN, f"--master-port={free_port()}", script(PLACE + "sys.stdin.read()")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as killed:
        assert killed.stdout is not None
        old = told(killed.stdout.readline() + killed.stdout.readline(), driver)
        killed.kill()
        killed.wait()
        with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as started:
            new = told(started.communicate()[0], driver)
        assert killed.communicate()[0] == ""  # the end of their input ends the ranks that were left
    assert (old, new) == ({"built": {0: [3, 2], 1: [3, 2]}}, {"built": {0: [1, 0], 1: [1, 0]}})


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_launchers_of_two_users_share_no_choice_whatever_they_call_their_jobs(
    driver: Driver, script: Callable[[str], str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if not folder.stat().st_mode & 0o005:
            folder.chmod(0o755)
    (tmp_path / "nvidia_driver_calls.log").chmod(0o666)
    # What it would import only then may lie where this user must not look.
    become = "import os, sys, psutil, lightning_gpu_tools.gpus.nvml, lightning_gpu_tools.selection.placement\n"
    path = script(become + "os.setuid(int(sys.argv[1]))" + PLACE + "sys.stdin.read()")
    launcher = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "RANK": "0"}
    names = {"USER", "LOGNAME", "LNAME", "USERNAME"}  # as in a container that was given just a number
    environment = {name: value for name, value in os.environ.items() if name not in names} | launcher
    jobs = []
    for user in ("4711", "0"):
        job = subprocess.Popen([sys.executable, path, user], env=environment, stdin=-1, stdout=-1, text=True)
        assert job.stdout is not None
        jobs.append((job, job.stdout.readline()))
    for job, _ in jobs:
        job.communicate()
    assert [told(line, driver) for _, line in jobs] == [{"built": {0: [3, 2]}}, {"built": {0: [1, 0]}}]


def test_every_node_chooses_for_itself(driver: Driver, script: Callable[[str], str]) -> None:
    path = script(PLACE + MEET)
    port = free_port()
    nodes = [
        subprocess.Popen(
            [*TORCHRUN, "--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}", path],
            stdout=-1,
            stderr=-1,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    # Both nodes are this machine, and what one has claimed exclusively the other one cannot have.
    chosen = [told(output, driver)["built"] for output in outputs]
    assert [sorted(ranks) for ranks in chosen] == [[0, 1], [2, 3]]
    assert sorted([*chosen[0][0], *chosen[1][2]]) == [0, 1, 2, 3]
    assert chosen[0][0] == chosen[0][1]
    assert chosen[1][2] == chosen[1][3]


def slurm(task: int, **extra: str) -> dict[str, str]:
    return {
        **os.environ,
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "MASTER_PORT": "29732",
        "MASTER_ADDR": "127.0.0.1",
        **extra,
    }


def test_a_task_that_slurm_gave_a_gpu_of_its_own_keeps_it(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm(1, CUDA_VISIBLE_DEVICES="1").items():
        monkeypatch.setenv(name, value)
    made = trainer(1)
    assert positions(driver, cpu_as_cuda.gpus_of(made)) == [1]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    # srun --gpus-per-task=1 and devices=2 do not go together, as Lightning says.
    with pytest.raises(MisconfigurationException, match="You requested gpu"):
        trainer(2, strategy="ddp")


def test_tasks_of_slurm_agree_and_the_claim_lives_until_the_last_has_ended(
    driver: Driver, script: Callable[[str], str], claims_dir: Path
) -> None:
    path = script(BUILD + "sys.stdin.read()")
    tasks = [subprocess.Popen([sys.executable, path], env=slurm(i), stdin=-1, stdout=-1, text=True) for i in (0, 1)]
    lines = [task.stdout.readline() for task in tasks for _ in ("CORES", "TOLD") if task.stdout]
    assert told("".join(lines), driver) == {"built": {0: [3, 2], 1: [3, 2]}}
    with read_ledger(str(claims_dir)) as ledger:
        (claim,) = ledger.claims()
    for task in sorted(tasks, key=lambda task: task.pid != claim.pid):
        assert live_claims(claims_dir) == [("exclusive", 2)]
        task.kill()
        task.communicate()
    assert live_claims(claims_dir) == []


@pytest.mark.parametrize(
    ("job", "devices", "expected"), [("train", "auto", [[3, 2], [3, 2]]), ("bash", "1", [[3], [2]])]
)
def test_tasks_of_slurm_count_alike_and_jobs_in_one_shell_of_slurm_are_several(
    driver: Driver, script: Callable[[str], str], job: str, devices: str, expected: list[list[int]]
) -> None:
    path = script("""
import os, sys
from lightning_gpu_tools.selection.placement import how_many, place
from lightning_gpu_tools.selection.request import Request
request = Request.parse(min_free="5GiB", exclusive=True)
place(how_many(request) if sys.argv[1] == "auto" else int(sys.argv[1]), request, list)
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
sys.stdin.read()
""")
    lines, tasks = [], []
    for task in range(2):
        environment = slurm(task, SLURM_JOB_NAME=job)
        tasks.append(subprocess.Popen([sys.executable, path, devices], env=environment, stdin=-1, stdout=-1, text=True))
        lines.append(tasks[task].stdout.readline())  # type: ignore[union-attr]
    for one in tasks:
        one.communicate()
    assert [positions(driver, line.strip().split(",")) for line in lines] == expected
