"""cpu_contention: threads of this job were ready to run but had no CPU core.

Linux counts how long a thread was runnable without a core (schedstat). It is read for the training thread, the
DataLoader's workers and other ranks. The CPU times of all processes, the runnable threads of this job and its cgroup
quota show who used the cores: other programs, processes that the program started, threads of its own, or the thread
pools of libraries in the workers. This time is subtracted from data_loading. Irregular slow steps, unexplained time,
and host work without a line of the program are then not reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from lightning_gpu_tools.advice.cause import Cause, Shape
from lightning_gpu_tools.advice.examples import contended
from lightning_gpu_tools.advice.findings import Evidence, Finding, counted, with_share
from lightning_gpu_tools.advice.lines import sentence
from lightning_gpu_tools.advice.ranks import waits_for_cores_of_others_s
from lightning_gpu_tools.training.phases import DATA_LOADING, PAUSES, RANK_WAIT, base_phase
from lightning_gpu_tools.training.run_measurements import (
    MANY_THREADS,
    TRAINING_STEP,
    CoreFacts,
    LoadingFacts,
    RunMeasurements,
    StepBlock,
)
from lightning_gpu_tools.units import printable

# Our defaults.
MIN_WAITING = 0.10  # of the wall time: from here on, no run is healthy
_MIN_THROTTLED = 0.10  # of the quota's periods: from here on, the job waits for the quota
_MIN_OTHERS = 0.20  # of the cores: with less, this job's own threads compete with each other,
_FEW_OTHERS = 0.05  # unless they are fewer than the cores, and other programs use at least this much
_FULL = 1.1  # runnable threads per core: more than measuring adds
_MIN_NAMED = 0.10  # of what all other programs use, or of the wait, to name a program or a phase in the report

_STOP_OTHERS = "Stop the other programs, or use a machine with free cores."


def cpu_contention(run: RunMeasurements, loading: Finding | None) -> Finding | None:
    """Return the wait for CPU cores, and who used them; ``None`` if the wait is short or unknown.

    It includes waits for workers without a core (a part of ``loading``, the wait for data), and for ranks without one.
    """
    cores = run.cores
    if cores is None or cores.wait_share is None:
        return None
    of_workers = 0.0 if loading is None else loading.share * _delayed_by_others(run)
    of_ranks = next(iter(waits_for_cores_of_others_s(run.ranks)), 0.0) / run.step_s
    share = min(cores.wait_share + of_workers + of_ranks, run.idle_share, 1.0)
    if share < MIN_WAITING:
        return None
    kind, taken_by, advice = _taken(run, cores)
    evidence: Evidence = {
        "kind": kind,
        "ms_per_step": share * run.step_s * 1e3,
        "taken_by": taken_by,
        "thread_percent": 100 * cores.wait_share,
        "workers_percent": 100 * of_workers,
        "ranks_percent": 100 * of_ranks,
        "phases": ", ".join(_phases(run, cores.wait_share, of_workers, of_ranks)),
        "cores": run.host.cores,
        "machine_cores": cores.machine_cores or None,
        "own_cores": cores.own_cores,
        "others_cores": cores.others_cores,
        "children_cores": _of_children(cores) or None,
        "runnable_threads": cores.runnable_threads,
        "throttled_percent": None if run.host.quota_cores is None else 100 * cores.throttled_share,
        "pressure_percent": None if cores.pressure_share is None else 100 * cores.pressure_share,
        "niceness": cores.niceness or None,
    }
    # For waits on ranks, only an upper bound of the part due to missing cores is known.
    return counted("cpu_contention", share, evidence, advice, "heuristic" if of_ranks > 0 else "measured")


def _phases(run: RunMeasurements, of_thread: float, of_workers: float, of_ranks: float) -> list[str]:
    """Return the phases in which the training thread waited, for the tree of the report.

    Its own wait is measured in total and while it loads data. The rest counts as part of the longest other phase.
    """
    others: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in run.phase_s.items():
        if base_phase(phase) not in (DATA_LOADING, RANK_WAIT, *PAUSES):
            others[base_phase(phase)] += seconds
    in_loading = _delayed_in_loading(run)
    waits = {DATA_LOADING: in_loading + of_workers, RANK_WAIT: of_ranks}
    if others:
        waits[max(others, key=lambda phase: others[phase])] = of_thread - in_loading
    return [phase for phase, share in waits.items() if share >= _MIN_NAMED * sum(waits.values())]


def without_contention(run: RunMeasurements, found: Sequence[Finding], contention: Finding) -> list[Finding]:
    """Return the findings without the parts that missing cores explain.

    These are waits for data while workers had no core, and findings without another reason: irregular slow steps,
    long unnamed work, and host work without a line of the program.
    """
    kept = []
    for one in found:
        if one.cause == "data_loading":
            share = one.share * (1 - _delayed_by_others(run)) - _delayed_in_loading(run)
            kept.append(with_share(one, max(0.0, share)))
        elif not _has_no_reason(run, one) or one.share > contention.share:
            kept.append(one)
    return kept


def _has_no_reason(run: RunMeasurements, finding: Finding) -> bool:
    if finding.cause == "slow_steps":
        return finding.evidence["kind"] == "irregular"
    if finding.cause == "host_work":
        return not sentence(run.lines, TRAINING_STEP)
    return finding.cause == "unexplained" and "idle_percent" not in finding.evidence


def _delayed_by_others(run: RunMeasurements) -> float:
    """Return the part of the wait for data in which a worker had no core due to other programs or a quota."""
    cores, delayed = run.cores, None if run.loading is None else run.loading.delayed_share
    if cores is None or not delayed:
        return 0.0
    if cores.throttled_share >= _MIN_THROTTLED:
        return min(1.0, delayed)
    # The program that blocks a thread is unknown, so programs count by their use of cores.
    busy = cores.own_cores + cores.others_cores
    return min(1.0, delayed) * cores.others_cores / busy if busy > 0 else 0.0


def _delayed_in_loading(run: RunMeasurements) -> float:
    """Return the part of the wall time in which the training thread had no core while it waited for data."""
    steady = sum(run.blocks, StepBlock())
    return steady.data_loading_core_wait_s / steady.wall_s if steady.wall_s > 0 else 0.0


def _taken(run: RunMeasurements, cores: CoreFacts) -> tuple[str, str, str]:
    """Return the kind, a phrase about who uses the cores, and the advice."""
    allowed, quota = run.host.cores, run.host.quota_cores
    own = f"this job has {cores.runnable_threads:.1f} runnable threads" if cores.runnable_threads else "this job"
    more = _more_cores(run, cores)
    may_widen = 0 < cores.affinity_cores < cores.machine_cores
    widened = more or "Allow it more cores (taskset, docker run --cpuset-cpus)." * may_widen
    if quota is not None and cores.throttled_share >= _MIN_THROTTLED:
        stopped = f"{100 * cores.throttled_share:.0f} % of its periods"
        taken_by = f"a quota allows {_cores(quota)}, and paused this job in {stopped}"
        raised = more or f"Raise the quota (cpu.max; docker run --cpus, resources.limits.cpu), now {_cores(quota)}."
        return "quota", taken_by, f"{raised}{_fewer_threads(run, cores)}"
    runnable, others = cores.runnable_threads or 0.0, cores.others_cores / max(1, cores.affinity_cores)
    named = [one for one in cores.users if one.cores >= _MIN_NAMED * cores.others_cores]
    users = ", ".join(f"{printable(one.user)}'s {printable(one.name)} {one.cores:.1f}" for one in named)
    of_others = f"other programs keep {cores.others_cores:.1f} of {_cores(cores.affinity_cores)} busy"
    of_others += f": {users}" if users else ""
    own_children = _of_children(cores) / max(1, cores.affinity_cores)
    if own_children >= _MIN_OTHERS or own_children >= max(others, _FEW_OTHERS):  # what the user can change comes first
        taken_by = f"{_children(cores)}; {of_others}" if others >= _MIN_OTHERS else _children(cores)
        advice = f"{widened} {_fewer_children(run, cores)}".strip()
        return "own_children", taken_by, f"{advice} {_STOP_OTHERS}" if others >= _MIN_OTHERS else advice
    if others >= _MIN_OTHERS or (others >= _FEW_OTHERS and runnable <= _FULL * allowed):
        advice = _STOP_OTHERS
        if cores.niceness > 0:
            advice += f" This job runs at nice {cores.niceness}, so other programs go first: start it without nice."
        # Threads of one operator wait for the slowest of them: of two on one free core, each waits for the other.
        fewer = _fewer_threads(run, cores).strip() if runnable > _FULL * _free_cores(run, cores) else ""
        if fewer:
            return "other_programs", f"{own}, and {of_others}", f"{fewer} {advice}"
        return "other_programs", of_others, advice
    if may_widen and runnable > _FULL * allowed:
        taken_by = f"{own} and may use {cores.affinity_cores} of {_cores(cores.machine_cores)}"
        return "affinity", taken_by, f"{widened}{_fewer_threads(run, cores)}"
    advice = (
        _fewer_threads(run, cores).strip() or "Find which threads compute: top -H -p PID, or py-spy dump --pid PID."
    )
    return "own_threads", f"{own} on {_cores(allowed)}", advice


def _free_cores(run: RunMeasurements, cores: CoreFacts) -> int:
    """Return how many cores other programs leave to this job; at least one."""
    free = min(run.host.cores, (cores.affinity_cores or run.host.cores) - cores.others_cores)
    return max(1, round(free))


def _more_cores(run: RunMeasurements, cores: CoreFacts) -> str:
    """Return what to request from SLURM; empty without SLURM, or if the need is unknown."""
    if not cores.in_slurm or cores.runnable_threads is None:
        return ""
    needed = max(math.ceil(cores.runnable_threads), math.floor(run.host.cores) + 1)
    if cores.machine_cores:
        needed = min(needed, cores.machine_cores)
    return f"Add --cpus-per-task={math.ceil(needed / run.host.local_ranks)} to sbatch or srun."


def _of_children(cores: CoreFacts) -> float:
    """Return the number of cores that processes started by the program keep busy, without workers of a loader."""
    return sum(one.cores for one in cores.children)


def _children(cores: CoreFacts) -> str:
    """Return a phrase about these processes."""
    count = sum(one.processes for one in cores.children)
    names = ", ".join(printable(one.name) for one in cores.children)
    many = f"{count} child processes of this job ({names}) use" if count != 1 else f"a child process ({names}) uses"
    return f"{many} {_of_children(cores):.1f} of {_cores(cores.affinity_cores)}"


def _fewer_children(run: RunMeasurements, cores: CoreFacts) -> str:
    """Return how training gets a core in spite of them."""
    count = sum(one.processes for one in cores.children)
    has_workers = run.loader is not None and run.loader.num_workers > 0
    most = math.floor(run.host.cores / run.host.local_ranks) - 1 - has_workers  # leaves a core to each of the others
    fewer = f"Start at most {most} of them (now {count}), or start" if 1 <= most < count else "Start"
    return f"{fewer} them with nice -n 19, so that {run.activity} goes first."


def one_thread_per_worker(run: RunMeasurements) -> str:
    """Return how to end the thread pools of libraries in the workers; empty unless they take more than all cores."""
    workers, seen = 0 if run.loader is None else run.loader.num_workers, run.loading or LoadingFacts()
    threads = seen.runnable_threads or 0.0
    if threads < MANY_THREADS or workers * run.host.local_ranks * threads <= _FULL * run.host.cores:
        return ""
    calls = ("cv2.setNumThreads(0), " if seen.pool_library else "") + "torch.set_num_threads(1)"
    return (
        f"Each of the {workers} workers keeps {threads:.1f} threads runnable, on {_cores(run.host.cores)}. Limit their "
        f"libraries to one thread in worker_init_fn: {calls}, and for NumPy threadpoolctl.threadpool_limits(1)."
    )


def _fewer_threads(run: RunMeasurements, cores: CoreFacts) -> str:
    """Return how to run at most one thread per core that others leave, after a space; empty if there is no way."""
    own_cores = math.floor(run.host.cores / run.host.local_ranks)
    workers = 0 if run.loader is None else run.loader.num_workers
    threads = max(1, _free_cores(run, cores) // run.host.local_ranks - (workers > 0))  # leaves a core to the workers
    pools, change = one_thread_per_worker(run), []
    if cores.torch_threads > threads:
        change.append(f"torch.set_num_threads({threads}) (now {cores.torch_threads})")
    if workers > max(1, own_cores - 1) and not pools:
        change.append(f"num_workers={max(1, own_cores - 1)} (now {workers})")
    if run.host.local_ranks > max(1.0, run.host.cores):
        most = max(1, math.floor(run.host.cores))
        change.append(f"at most {most} rank{'s' * (most > 1)} on this machine (now {run.host.local_ranks})")
    fewer = f" Use fewer threads: {', '.join(change)}." if change else ""
    return f" {pools}{fewer}" if pools else fewer


def _cores(count: float) -> str:
    return f"{count:g} core{'s' * (count != 1)}"


CAUSE = Cause(
    begins="Waiting for a CPU core takes",
    rows=[
        Shape(
            "Waiting for a CPU core takes ...; other programs keep ... of ... cores busy, by user and name",
            "`torch.set_num_threads(...)` if the job has more threads than free cores; stop the others, or use a "
            "machine with free cores; start the job without `nice`",
            "other_programs",
        ),
        Shape(
            "... child processes of this job (...) use ... of ... cores",
            "start fewer of them, or with `nice -n 19`",
            "own_children",
        ),
        Shape(
            "a quota allows ... cores, and paused this job in ... % of its periods",
            "`docker run --cpus`, `resources.limits.cpu`, `--cpus-per-task`; or fewer threads",
            "quota",
        ),
        Shape(
            "this job has ... runnable threads and may use ... of ... cores",
            "`--cpus-per-task=N` under SLURM, `taskset`, `docker run --cpuset-cpus`",
            "affinity",
        ),
        Shape(
            "this job has ... runnable threads on ... cores",
            "`torch.set_num_threads(...)`, fewer workers, fewer ranks; `cv2.setNumThreads(0)` in `worker_init_fn`",
            "own_threads",
        ),
    ],
    needs=("cores.wait_share",),
    counts_while_busy=True,
    is_in_step=True,
    settings=("num_workers",),
    verified_on="cpu",
    sick=contended(throttled_share=0.4, quota_cores=2.0),
    healthy=contended(0.05),
)
