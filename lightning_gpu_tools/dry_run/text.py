"""The result of a dry run for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpu_tools.advice.memory_account import CACHE, PARTS
from lightning_gpu_tools.dry_run.result import DryRun
from lightning_gpu_tools.reports.text import line_label
from lightning_gpu_tools.units import format_bytes, line_width, printable, wrapped

_MAX_LINES = 4
_MIN_SHARE = 0.005  # of the needed memory; smaller parts and lines are not shown
_TITLES = {"fits": "Fits", "perhaps": "Perhaps", "does_not_fit": "Does not fit", "cannot_be_told": "Unknown"}


def render(run: DryRun) -> str:
    """Return the result in about 25 lines, the verdict first."""
    return "\n".join(_lines(run))


def _lines(run: DryRun) -> Iterator[str]:
    yield _wrapped(f"{_TITLES[run.verdict]}: {run.reason}", 1000)
    needed = run.needed_bytes
    if needed:
        yield f"Memory by use ({format_bytes(needed)})"
        for name, label in PARTS.items():
            size = run.parts_bytes.get(name, 0)
            if size >= _MIN_SHARE * needed:
                shown = f"{label} (allocator cache)" if name in CACHE else label
                yield f"  {format_bytes(size):>8}  {100 * size / needed:3.0f}%  {shown}"
        lines = [line for line in run.lines if line.bytes >= _MIN_SHARE * needed][:_MAX_LINES]
        if lines:
            yield "Lines that allocated the most"
            room = line_width() - 15
            yield from (f"  {format_bytes(line.bytes):>8}  {printable(line_label(line), room)}" for line in lines)
    if run.batch_size and (run.largest_batch is not None or run.trials):
        yield _wrapped(f"Largest batch: {_largest_batch(run)}")
    if run.fits_on:
        yield _wrapped(f"Fits on: {_models(run)}")
    if run.min_free_bytes:
        yield _wrapped(f"Value for --min-free: {run.min_free_bytes / 2**30:.1f}GiB.")
    if run.unknown:
        yield _wrapped(" ".join(run.unknown), 1000)


def _largest_batch(run: DryRun) -> str:
    if not run.trials:
        return f"{run.largest_batch}, predicted from the allocations of this batch of {run.batch_size}."
    tried = [f"{number} {'fits' if fits else 'does not fit'}" for number, fits in sorted(run.trials.items())]
    largest = max((number for number, fits in run.trials.items() if fits), default=None)
    return f"{'none' if largest is None else largest} by dry runs with --vary ({', '.join(tried)})."


def _models(run: DryRun) -> str:
    def those(fits: str) -> str:
        return ", ".join(
            f"~{model}" if model in run.estimated else model for model in run.fits_on if run.fits_on[model] == fits
        )

    texts = [those("yes") or "none"]
    if those("perhaps"):
        texts.append(f"perhaps on {those('perhaps')}")
    if those("no"):
        texts.append(f"not on {those('no')}")
    shown = "; ".join(texts)
    return f"{shown}. ~: estimate; attention may need more memory there." if "~" in shown else f"{shown}."


def _wrapped(text: str, max_length: int = 500) -> str:
    return wrapped(printable(text, max_length))
