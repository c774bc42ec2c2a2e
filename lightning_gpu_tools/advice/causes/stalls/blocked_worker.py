"""blocked_worker: a worker of the DataLoader has died, or does not finish its batch.

Reads the state, the CPU time and the system call of each worker (/proc), and the Python stack of the worker that has to
deliver the next batch, if it was forked.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.stalls import activity_phrase, in_function, is_idle
from lightning_gpu_tools.training.stall_facts import StallFacts


def find(facts: StallFacts) -> Findings:
    workers, number = facts.workers, facts.awaited_worker
    if not workers:
        return
    for dead, worker in enumerate(workers):
        if worker.has_ended:
            yield new_finding(
                f"Worker {dead} (PID {worker.pid}) of {len(workers)} has exited, and training waits for its batch.",
                "Check its last output on the terminal. `dmesg` shows whether the kernel killed it.",
            )
    worker = workers[number]
    if len(workers) > 1 and all(is_idle(process) and process.waits_for == "lock" for process in workers):
        yield new_finding(
            f"All {len(workers)} workers wait for a lock{in_function(worker.stack)}. "
            "A process that was forked while a thread held a lock waits for it forever.",
            'Set multiprocessing_context="spawn" or "forkserver", or call cv2.setNumThreads(0) first.',
            "Start no threads before the DataLoader starts its workers.",
        )
    yield new_finding(
        f"Worker {number} (PID {worker.pid}) of {len(workers)} {activity_phrase(worker)}. "
        "It has to deliver the next batch.",
        "Check __getitem__ of the dataset, and the sample that it loads.",
        "DataLoader(timeout=60) raises an error instead.",
    )


CAUSE = Cause(
    says="a worker of the DataLoader waits, computes or has exited, or all wait for a lock held when they were forked",
    change="check the line of the dataset; `DataLoader(timeout=60)`; for a lock "
    '`multiprocessing_context="spawn"`, `cv2.setNumThreads(0)`; if it has exited, see [below](#a-worker-died)',
    find=find,
    verified_on="cpu",
)
