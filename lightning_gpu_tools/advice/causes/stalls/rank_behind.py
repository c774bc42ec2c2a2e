"""rank_behind: one rank is behind, has left, or is silent, and the others wait for it.

Reads the job's key-value store, to which each rank regularly writes its step, its phase, how its training has ended,
and once it has stalled, the collective in which it waits for other ranks, if any.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.stalls import SAME_BATCHES, hanging_call, name_ranks, phase_phrase
from lightning_gpu_tools.training.stall_facts import StallFacts
from lightning_gpu_tools.units import format_duration, plural, printable

_ERRORS = "Let the error end the process: do not catch it, or call sys.exit(), on one rank only."
_SILENCE = "It was killed or stopped, or C code in it holds the GIL. Check its output, and `dmesg` on its node."


def find(facts: StallFacts) -> Findings:
    if len(facts.ranks) < 2:
        return
    call = hanging_call(facts.ranks)
    missing = () if call is None else call.missing
    gone = [rank for rank in facts.ranks if rank.ended is not None] or [rank for rank in facts.ranks if rank.silent_s]
    # A rank may have called other collectives on the GPU before it hangs on the host.
    behind = [rank for rank in facts.ranks if rank.waits_in is None]
    behind.sort(key=lambda rank: rank.rank not in missing)
    if not gone + behind:
        return
    rank = (gone + behind)[0]
    others = [other.rank for other in facts.ranks if other.ended is None and not other.silent_s]
    wait = f"{name_ranks(others)} wait{'s' * (len(others) == 1)} for it."
    if rank.ended == "completed":
        why, next_step = f"Rank {rank.rank} finished training after {plural(rank.step, 'step')}; {wait}", SAME_BATCHES
    elif rank.ended is not None:
        why = f"Rank {rank.rank} stopped training at step {rank.step} ({printable(rank.ended)}); {wait}"
        next_step = _ERRORS
    elif rank.silent_s:
        silent = f"Rank {rank.rank} (PID {rank.pid} on node {rank.node}) has been silent for"
        since = f"{format_duration(rank.silent_s)}, since step {rank.step}, {phase_phrase(rank.phase)}"
        why, next_step = f"{silent} {since}; {wait}", _SILENCE
    else:
        why = f"All ranks wait for rank {rank.rank}, at step {rank.step}, {phase_phrase(rank.phase)}. {rank.why}"
        next_step = rank.next_step
    yield new_finding(why if call is None else f"{why} {call}", next_step, rank=rank.rank)


CAUSE = Cause(
    says="all ranks wait for one that loads data, computes, has stopped with an error that was caught, or was killed",
    change="check the line of that rank in the report, or its output; let errors end the process",
    find=find,
    verified_on="simulated GPU",
)
