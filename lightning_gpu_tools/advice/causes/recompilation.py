"""recompilation: torch.compile compiles the same function again and again, or no longer compiles it.

Reads torch's own record of compilations once a second: how often each function was compiled again, how long it took,
and which guard failed. A function that torch no longer compiles is always reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_gpu_tools.advice.cause import Cause
from lightning_gpu_tools.advice.examples import STEP, cpu_run
from lightning_gpu_tools.advice.findings import Finding, counted
from lightning_gpu_tools.advice.lines import in_words, is_of_program
from lightning_gpu_tools.training.run_measurements import CompiledCode, Recompiled, RunMeasurements
from lightning_gpu_tools.units import printable

# Our defaults. Compiling a function again to make a size dynamic is normal, and happens for a few sizes.
_MIN_COUNT = 3
_MAX_LINES = 3  # in the report
_MAX_REASON = 200  # characters of torch's reason in the report
_SIZE = re.compile(r"tensor '(?P<tensor>.+?)' (?:size|stride) mismatch at index (?P<dimension>\d+)")


def find(run: RunMeasurements) -> Iterator[Finding]:
    again = () if run.compiled is None else run.compiled.recompiled
    if sum(one.count for one in again) >= _MIN_COUNT:
        yield _finding(run, min(run.idle_share, sum(one.seconds for one in again) / run.wall_s))


def given_up(run: RunMeasurements) -> Iterator[Finding]:
    """Yield a finding if torch no longer compiles a function, whatever compiling has cost."""
    if _stopped(() if run.compiled is None else run.compiled.recompiled) is not None:
        yield _finding(run, 0.0)


def _stopped(again: tuple[Recompiled, ...]) -> Recompiled | None:
    return next((one for one in again if one.stopped_at_step is not None), None)


def _finding(run: RunMeasurements, share: float) -> Finding:
    assert run.compiled is not None
    again = run.compiled.recompiled
    seconds, stopped = sum(one.seconds for one in again), _stopped(again)
    worst = stopped or again[0]
    reason = printable(worst.reason.partition("\n")[0].partition("  #")[0].strip(), _MAX_REASON)
    lines = [
        f"{in_words(one.file, one.line, one.function)} ({100 * one.seconds / max(seconds, 1e-9):.0f} %)"
        for one in again[:_MAX_LINES]
        if is_of_program(one.file)
    ]
    evidence = {
        "ms_per_step": share * run.step_s * 1e3 if share else None,
        "recompilations": sum(one.count for one in again),
        "recompile_s": seconds,
        "reason": reason or None,
        "stopped_at_step": None if stopped is None else stopped.stopped_at_step,
        "source_lines": ", ".join(lines) or None,
    }
    return counted("recompilation", share, evidence, _advice(run.compiled, worst, reason))


def _advice(compiled: CompiledCode, worst: Recompiled, reason: str) -> str:
    name = printable(worst.function)
    where = f"{name} ({printable(worst.file)}:{worst.line})" if is_of_program(worst.file) else name
    advice = f"torch recompiled {where} {worst.count:,} time{'s' * (worst.count > 1)}"
    advice += f"; the last reason was: {reason}." if reason else "."
    if size := _SIZE.search(worst.reason):
        tensor = re.sub(r"^L\['(.+?)'\]", r"\1", size["tensor"])
        advice += (
            f" Pad batches to a few lengths, or call torch._dynamo.mark_dynamic({printable(tensor)}, "
            f"{size['dimension']}) before the compiled code runs."
        )
    else:
        advice += " Keep the value it depends on constant, or pass it as a tensor."
    if worst.stopped_at_step is not None:
        advice += f" Since about step {worst.stopped_at_step:,}, new cases run without compiled code"
        if compiled.limit is not None:
            advice += f"; raise torch._dynamo.config.{compiled.limit[0]} (now {compiled.limit[1]})"
        advice += "."
    return advice


def _compiled_again(count: int, seconds: float, stopped_at_step: int | None = None) -> RunMeasurements:
    """Return 200 steps of 50 ms with a function that was compiled again."""
    reason = "tensor 'x' size mismatch at index 1. expected 128, actual 131"
    again = Recompiled(
        file="train.py", line=41, function="forward", count=count, seconds=seconds, reason=reason,
        stopped_at_step=stopped_at_step,
    )  # fmt: skip
    return cpu_run(STEP, compiled=CompiledCode(recompiled=(again,), limit=("recompile_limit", 8)))


CAUSE = Cause(
    begins="Compiling the same code again takes",
    says="Compiling the same code again takes ...: the function, its line, and why; since step ..., new cases run "
    "without compiled code",
    change="pad to a few lengths, `mark_dynamic`, `torch._dynamo.config.recompile_limit`",
    find=find,
    needs=("compiled",),
    is_in_step=True,
    verified_on="cpu",
    sick=_compiled_again(7, 2.0, 81),
    healthy=_compiled_again(1, 0.3),
)
