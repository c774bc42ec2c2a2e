"""Detection of processes that belong together, from the variables of their launchers."""

import sys
from collections.abc import Callable

import pytest
from launched_jobs import by_hand, mpirun, slurm, torchrun

from lightning_gpu_tools.selection.placement import Launch, find_launch

Environment = Callable[..., dict[str, str]]
ALL = [torchrun, slurm, mpirun, by_hand]


def launched(environ: dict[str, str], *, of_lightning: bool = False) -> Launch:
    launch = find_launch(environ, of_lightning=of_lightning)
    assert launch is not None
    return launch


@pytest.mark.parametrize("environment", ALL)
def test_processes_of_one_job_share_a_name_and_others_do_not(environment: Environment) -> None:
    first, second = (launched(environment(rank)) for rank in (0, 1))
    assert first.group(2) == second.group(2) != first.group(1)
    assert first.processes == (None if environment is by_hand else 2)


@pytest.mark.parametrize(
    ("environment", "changed"),
    [
        (torchrun, {"TORCHELASTIC_RUN_ID": "other"}),
        (torchrun, {"TORCHELASTIC_ERROR_FILE": "/tmp/none_1/attempt_0/0/error.json"}),
        (torchrun, {"MASTER_PORT": "1"}),
        (slurm, {"SLURM_JOB_ID": "78"}),
        (slurm, {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}),
        (slurm, {"SLURM_RESTART_COUNT": "1"}),
        (mpirun, {"PMIX_NAMESPACE": "790888450"}),
        (by_hand, {"MASTER_PORT": "1"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else min(value),
)
def test_another_job_node_or_start_has_another_name(environment: Environment, changed: dict[str, str]) -> None:
    assert launched(environment(0)).group(2) != launched(environment(0, **changed)).group(2)


@pytest.mark.parametrize(("node", "tasks"), [("1", 3), ("2", 1)])
def test_slurm_may_start_another_number_on_each_node(node: str, tasks: int) -> None:
    environ = slurm(0, SLURM_STEP_TASKS_PER_NODE="3(x2),1,2", SLURM_NODEID=node)
    assert launched(environ).processes == tasks


def test_torchrun_decides_inside_of_slurm() -> None:
    environ = {**slurm(0), **torchrun(1, LOCAL_WORLD_SIZE="4")}
    assert launched(environ)[:2] == ("torchrun", 4)


@pytest.mark.parametrize("environ", [slurm(0, SLURM_JOB_NAME="bash"), mpirun(0)], ids=["shell", "without-mpi4py"])
def test_what_lightning_does_not_recognize_is_no_launch(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert find_launch(environ) is None
    assert launched({**environ, **by_hand(1)}, of_lightning=True).program == ""  # as a wrapper script exports the ranks


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "1"},
        {"SLURM_JOB_ID": "1"},
    ],
    ids=["alone", "kubeflow", "sbatch-without-srun"],
)
def test_a_process_without_others_on_its_machine_has_no_launch(environ: dict[str, str]) -> None:
    assert find_launch(environ, of_lightning=False) is None
