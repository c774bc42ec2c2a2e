"""leftover_process: an orphaned process of a program that has ended holds GPU memory.

Searches the driver's list of processes on the GPU for one that has lost its parent and does not use the GPU.
"""

from lightning_gpu_tools.advice.causes.memory.other_processes import left_over, named, others_are_the_cause
from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts


def find(facts: ErrorFacts) -> Findings:
    orphans = left_over(facts)
    if orphans and others_are_the_cause(facts):
        pids = " ".join(str(process.pid) for process in orphans)
        why = f"On this GPU, {named(orphans)}: left over by a program that has ended."
        yield new_finding(why, f"If it is not needed, end it: kill {pids}.")


CAUSE = Cause(
    says="On this GPU, process ... holds ...: left over by a program that has ended. It does not use the GPU",
    change="if it is not needed, `kill` it",
    find=find,
    verified_on="hardware",
)
