"""cpu_contention: the training thread was ready to run but had no CPU core.

Linux counts how long a thread was runnable without a core (schedstat). The CPU times of all processes, and the runnable
threads of this job, show who used the cores: other programs, processes that the program started, or threads of its own.
Other findings count the same time again if they include it.
"""

import math

from lightning_gpu_tools.advice.findings import Cause, Evidence, Findings, Variant
from lightning_gpu_tools.advice.lost_time import idle_share, longest_group, lost_time
from lightning_gpu_tools.training.phases import PAUSES, RANK_WAIT
from lightning_gpu_tools.training.run_measurements import MANY_THREADS, CoreFacts, RunMeasurements
from lightning_gpu_tools.units import format_duration, printable

# Our defaults.
_MIN_WAITING = 0.10  # of the wall time: from here on, no run is healthy
_MIN_OTHERS = 0.20  # of the cores: if other programs use less, this job's own threads compete with each other
_FEW_OTHERS = 0.05  # of the cores: the same limit for a job with fewer threads than cores
_FULL = 1.1  # runnable threads per core: more than measuring adds


def find(run: RunMeasurements) -> Findings:
    cores = run.cores
    if cores is None or cores.wait_share is None:
        return
    share = min(cores.wait_share, idle_share(run), 1.0)
    if share < _MIN_WAITING:
        return
    kind, taken_by, advice = _taken(run, cores)
    evidence: Evidence = {
        "kind": kind,
        "taken_by": taken_by,
        "cores": run.host.cores,
        "runnable_threads": cores.runnable_threads,
    }
    detail = f"{format_duration(share * run.step_s)} per step; {taken_by}"
    longest, _ = longest_group(run, (RANK_WAIT, *PAUSES))  # the wait is measured only in total
    yield lost_time(run, share, "Waiting for a CPU core takes", advice, phase=longest, evidence=evidence, detail=detail)


def _taken(run: RunMeasurements, cores: CoreFacts) -> tuple[str, str, str]:
    """Return the kind, a phrase about who uses the cores, and the advice."""
    allowed, threads, children = run.host.cores, cores.runnable_threads or 0.0, cores.children
    # With a quota below the number of cores, others take nothing from this job while that many remain.
    free_cores = min(allowed, cores.affinity_cores - cores.others_cores)
    by_others = max(0.0, allowed - free_cores) / allowed
    if children is not None and children.cores / allowed >= min(_MIN_OTHERS, max(by_others, _FEW_OTHERS)):
        taken_by = f"child processes of this job ({printable(children.name)}) use {children.cores:.1f}"
        advice = f"Start fewer of them, or start them with nice -n 19, so that {run.activity} goes first."
        return "own_children", f"{taken_by} of {in_cores(allowed)}", advice
    if by_others >= _MIN_OTHERS or (by_others >= _FEW_OTHERS and threads <= _FULL * allowed):
        others = f"other programs keep {cores.others_cores:.1f} of {in_cores(cores.affinity_cores)} busy"
        if cores.other is not None:
            others += f", {printable(cores.other.user)}'s {printable(cores.other.name)} {cores.other.cores:.1f} of them"
        # Threads of one operator wait for the slowest of them: of two on one free core, each waits for the other.
        fewer = _fewer_threads(run, cores, free_cores) if threads > _FULL * max(1, round(free_cores)) else ""
        return "other_programs", others, f"{fewer} Stop the other programs, or use a machine with free cores.".strip()
    advice = _fewer_threads(run, cores, allowed)
    advice = advice or "Find which threads compute: top -H -p PID, or py-spy dump --pid PID."
    if cores.machine_cores > allowed:
        advice += (
            f" Or give it more of the {cores.machine_cores} cores: sbatch --cpus-per-task, docker run --cpus, taskset."
        )
    return "own_threads", f"this job has {threads:.1f} runnable threads on {in_cores(allowed)}", advice


def one_thread_per_worker(run: RunMeasurements) -> str:
    """Return how to limit the thread pools of libraries in the workers; empty unless they take more than all cores."""
    workers = 0 if run.loader is None else run.loader.num_workers
    threads = run.loading.runnable_threads or 0.0
    if threads < MANY_THREADS or workers * run.host.local_ranks * threads <= _FULL * run.host.cores:
        return ""
    return (
        f"Each worker keeps {threads:.1f} threads runnable, on {in_cores(run.host.cores)}. Limit libraries to one "
        "thread in worker_init_fn: torch.set_num_threads(1), with cv2 also cv2.setNumThreads(0), and for NumPy "
        "threadpoolctl.threadpool_limits(1)."
    )


def _fewer_threads(run: RunMeasurements, cores: CoreFacts, free_cores: float) -> str:
    """Return how to run at most one thread per free core; empty if there is no way."""
    if pools := one_thread_per_worker(run):
        return pools
    ranks, workers = run.host.local_ranks, 0 if run.loader is None else run.loader.num_workers
    most_workers = max(1, math.floor(run.host.cores / ranks) - 1)
    most_threads = max(1, round(min(run.host.cores, free_cores)) // ranks - (workers > 0))  # leaves the workers a core
    change = []
    if cores.torch_threads > most_threads:
        change.append(f"torch.set_num_threads({most_threads}) (now {cores.torch_threads})")
    if workers > most_workers:
        change.append(f"num_workers={most_workers} (now {workers})")
    return f"Use fewer threads: {', '.join(change)}." if change else ""


def in_cores(count: float) -> str:
    return f"{count:g} core{'s' * (count != 1)}"


CAUSE = Cause(
    rows=[
        Variant(
            "Waiting for a CPU core takes ...; other programs keep ... of ... cores busy, the largest by user and name",
            "fewer threads if the job has more than free cores; stop the others, or use a machine with free cores",
            "other_programs",
        ),
        Variant(
            "child processes of this job (...) use ... of ... cores", "fewer, or with `nice -n 19`", "own_children"
        ),
        Variant(
            "this job has ... runnable threads on ... cores",
            "`torch.set_num_threads(...)`, fewer workers; or more cores: `--cpus-per-task`, `docker run --cpus`",
            "own_threads",
        ),
    ],
    find=find,
    kind="busy",
    settings=("num_workers",),
    verified_on="cpu",
)
