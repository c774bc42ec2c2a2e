"""recompilation: torch.compile compiles the same function again and again.

Reads torch's own record of compilations once a second: how often each function was compiled again, how long it took,
and which guard failed.
"""

import re

from lightning_gpu_tools.advice.findings import Cause, Findings, in_words, is_of_program
from lightning_gpu_tools.advice.lost_time import idle_share, lost_time
from lightning_gpu_tools.training.run_measurements import TRAINING_STEP, RunMeasurements
from lightning_gpu_tools.units import plural, printable

# Our defaults. Compiling a function again to make a size dynamic is normal, and happens for a few sizes.
_MIN_COUNT = 3
_MAX_REASON = 200  # characters of torch's reason in the report
_SIZE = re.compile(r"tensor '(?P<tensor>.+?)' (?:size|stride) mismatch at index (?P<dimension>\d+)")


def find(run: RunMeasurements) -> Findings:
    again = run.recompiled or ()
    count, seconds = sum(function.count for function in again), sum(function.seconds for function in again)
    if count < _MIN_COUNT:
        return
    share = min(idle_share(run), seconds / run.wall_s)
    reason = printable(again[0].reason.partition("\n")[0].partition("  #")[0].strip(), _MAX_REASON)
    worst, name = again[0], printable(again[0].function)
    is_own, percent = is_of_program(worst.file), 100 * worst.seconds / max(seconds, 1e-9)
    where = f"{name} ({printable(worst.file)}:{worst.line})" if is_own else name
    evidence = {
        "recompilations": count,
        "recompile_s": seconds,
        "reason": reason or None,
        "source_lines": f"{in_words(worst.file, worst.line, worst.function)} ({percent:.0f}%)" if is_own else None,
    }
    advice = f"torch recompiled {where} {plural(worst.count, 'time')}"
    advice += f"; the last reason was: {reason}." if reason else "."
    if size := _SIZE.search(worst.reason):
        tensor = re.sub(r"^L\['(.+?)'\]", r"\1", size["tensor"])
        advice += (
            f" Pad batches to a few lengths, or call torch._dynamo.mark_dynamic({printable(tensor)}, "
            f"{size['dimension']}) before the compiled code runs."
        )
    else:
        advice += " Keep the value it depends on constant, or pass it as a tensor."
    yield lost_time(run, share, "Compiling the same code again takes", advice, phase=TRAINING_STEP, evidence=evidence)


CAUSE = Cause(
    says="Compiling the same code again takes ...: the function, its line, and why",
    change="pad to a few lengths, `mark_dynamic`",
    find=find,
    verified_on="cpu",
)
