"""Jobs of a real SLURM on this machine: one choice a node and job, one claim, and nothing left."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_driver import Driver, gpu
from launched_jobs import PLACE, live_claims
from slurm_cluster import WHY_NOT, wait_for

pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(120)]
ONE_NODE = ("-N1", "--ntasks-per-node=2")
TWO_NODES = ("-N2", "--ntasks-per-node=1")
RUN = (sys.executable, "-m", "lightning_gpu_tools", "run", "--exclusive")
# A claim that nobody holds any more cannot be found, so tasks stay until the test tells them to end.
TASK = f"""{PLACE}
import pathlib, time
say("MASK", os.environ.get("CUDA_VISIBLE_DEVICES"))
place_and_say(int(sys.argv[1]), exclusive=True)
while not pathlib.Path("end").exists():
    time.sleep(0.02)
"""


class Job:
    """A job whose tasks stay where they have been placed."""

    def __init__(self, driver: Driver, claims_dir: Path, output: Path, command: Sequence[str]) -> None:
        self._driver, self._claims_dir, self._output = driver, claims_dir, output
        with output.open("a") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def output(self) -> str:
        return self._output.read_text()

    def gpus(self, tasks: int = 2) -> list[list[int]]:
        """Wait until so many tasks have been placed, and return the GPUs of the latest two, by rank."""
        wait_for(lambda: self.output().count("SAID placed") == tasks, self._output)
        lines = [line.split()[2:] for line in self.output().splitlines() if line.startswith("SAID placed")]
        uuids = [one.uuid for one in self._driver.gpus]
        return [[int(gpu) if gpu.isdecimal() else uuids.index(gpu) for gpu in gpus] for _, *gpus in sorted(lines[-2:])]

    def end(self) -> None:
        """Let the tasks end; then none of their claims is left."""
        Path("end").touch()
        self._process.wait(timeout=30)
        wait_for(lambda: live_claims(self._claims_dir) == [], self._output)


@pytest.fixture
def start(
    slurm: dict[str, str], driver: Driver, claims_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """Starts jobs on four idle GPUs; the higher the number, the more free memory."""
    driver.gpus = [gpu(memory_free=f"{gib}GiB") for gib in (10, 20, 30, 40)]
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(TASK)
    jobs: list[Job] = []

    def start_job(*command: str, devices: int = 2) -> Job:
        output, task = Path(f"output{len(jobs)}"), [sys.executable, "task.py", str(devices)]
        if command[0] == "sbatch":
            task = ["-o", str(output), "--open-mode=append", "--wrap", f"srun {' '.join(task)}"]

        jobs.append(Job(driver, claims_dir, output, [*command, *task]))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


def answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


SHARED = [[3, 2], [3, 2]]
# The command, the devices, the GPUs of both tasks, the claims, and what is written to stderr how often.
CASES: list[tuple[tuple[str, ...], int, list[list[int]], int, dict[str, int]]] = [
    (("srun", *ONE_NODE), 2, SHARED, 1, {}),
    (("srun", *TWO_NODES), 2, [[1, 0], [3, 2]], 2, {}),
    (("srun", *ONE_NODE, "--gres=gpu:2"), 2, [[0, 1], [0, 1]], 1, {}),
    (("srun", *ONE_NODE, "--gpus-per-task=1"), 1, [[0], [1]], 2, {}),
    (("srun", *ONE_NODE, *RUN, "-n2", "--"), 2, SHARED, 1, {"Picked GPU": 1, "2 processes that srun started on": 2}),
]


@pytest.mark.parametrize(
    ("command", "devices", "gpus", "claims", "lines"),
    CASES,
    ids=[" ".join(case[0]).replace(sys.executable, "python") for case in CASES],
)
def test_a_node_has_one_choice_and_one_claim_of_a_job(
    start: Callable[..., Job],
    claims_dir: Path,
    command: tuple[str, ...],
    devices: int,
    gpus: list[list[int]],
    claims: int,
    lines: dict[str, int],
) -> None:
    job = start(*command, devices=devices)
    assert sorted(job.gpus()) == gpus
    assert len(live_claims(claims_dir)) == claims
    assert {line: job.output().count(line) for line in lines} == lines


@pytest.mark.follows("put SLURM_JOB_NAME=train before srun")
def test_the_advised_job_name_makes_tasks_share_their_gpus(start: Callable[..., Job]) -> None:
    separate = start("salloc", *ONE_NODE, "srun", devices=1)
    assert separate.gpus() != SHARED
    advised = re.search(r"put (\S+) before srun", separate.output())[1]
    separate.end()
    Path("end").unlink()
    assert start("salloc", *ONE_NODE, "env", advised, "srun").gpus() == SHARED


@pytest.mark.follows(
    "Run this instead: srun ... lightning-gpu-tools run ... -- CMD",
    "With SLURM, use `srun ... lightning-gpu-tools run ... -- CMD`",
)
def test_srun_before_run_gives_all_tasks_the_claimed_gpus(start: Callable[..., Job]) -> None:
    unrestricted = start(*RUN, "-n2", "--", "srun", *ONE_NODE)
    unrestricted.gpus()
    assert unrestricted.output().count("SAID MASK None") == 2
    advised = re.search(
        r"Run this instead: (srun \.\.\.) lightning-gpu-tools (run \.\.\. --) CMD", unrestricted.output()
    )
    unrestricted.end()
    Path("end").unlink()
    text = " ".join(answer(*RUN[:-1], "--help").split()).replace("gpu- tools", "gpu-tools")  # at the end of a line
    assert f"With SLURM, use `{advised[0].partition(': ')[2]}`" in text
    outer, inner = ([word for word in part.split() if word != "..."] for part in advised.groups())
    job = start(*outer, *ONE_NODE, *RUN[:-2], inner[0], "-n2", inner[1])
    assert job.gpus() == SHARED
    assert "SAID MASK None" not in job.output()


def test_two_jobs_at_once_are_apart_and_scancel_frees_both(start: Callable[..., Job], claims_dir: Path) -> None:
    jobs = [start("srun", *ONE_NODE) for _ in range(2)]
    assert sorted(job.gpus() for job in jobs) == [[[1, 0], [1, 0]], [[3, 2], [3, 2]]]
    answer("scancel", "--user=root")
    wait_for(lambda: live_claims(claims_dir) == [])
