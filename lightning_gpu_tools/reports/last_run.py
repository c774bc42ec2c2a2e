"""The GPU memory that a job needs, taken from the report of its last run."""

import math
import os
from collections.abc import Sequence
from itertools import islice

from lightning_gpu_tools.advice.memory_account import CACHE, TENSORS
from lightning_gpu_tools.advice.out_of_memory import CONTEXT_BYTES, CUDA_CONTEXT_BYTES, MARGIN
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.reports.report import COMPLETED, FILE_NAME, RUNNING, Report, find_reports, load_report
from lightning_gpu_tools.units import format_bytes, printable, printable_path

_MAX_REPORTS = 50  # our default
_FAR_TOO_MUCH = 1.5  # our default: times what `--min-free last` asks for
_FREE_WHEN_IDLE = 0.95  # our default: the free share of an idle GPU; its driver and a desktop take the rest


def last_need(folder: str, command: Sequence[str] = ()) -> tuple[int, str]:
    """Return the bytes that the last run below a folder needed on one GPU, plus 20%, and a sentence on their origin.

    The last run is the newest one on a GPU of the script in ``command``, else the newest one of any script. Runs in
    progress and reports that cannot be read do not count. At most 50 reports are read.

    Raises:
        ReportError: There is no such run.
    """
    of_another = None
    scripts = {os.path.basename(word) for word in command}
    for file in islice(find_reports(folder), _MAX_REPORTS):
        try:
            report = load_report(file)
        except ReportError:
            continue
        need = need_of(report)
        if need is None or report.outcome.startswith(RUNNING):
            continue
        found = need[1], _origin(report, *need, file)
        if not scripts or report.settings.get("script") in scripts:
            return found
        of_another = of_another or found
    if of_another is not None:
        return of_another
    raise ReportError(
        f"min_free=last: no {FILE_NAME} in {printable_path(os.path.abspath(folder))} or up to three folders below it "
        f"includes the memory of a run on a GPU. Run your script once from this folder with "
        "GPUUtilizationMonitor, or under `lightning-gpu-tools run --advise`, or pass a size such as 8GiB."
    )


def need_of(report: Report) -> tuple[float, int] | None:
    """Return the most bytes that a run needed on one GPU, without and with a margin; ``None`` if it trained on none.

    The margin never exceeds the free memory of an idle GPU of the same size. If memory ran out, both are lower bounds.
    """
    sizes: list[tuple[float, float]] = []
    for account in report.memory if report.steps else ():
        parts, idle_bytes = account.parts_bytes, _idle_bytes(account.total_bytes)
        held_bytes = sum(parts.get(name, 0) for name in (*TENSORS, *CACHE))  # by torch's allocator
        # In the first seconds, the driver's last sample may be older than torch's memory.
        context_bytes = max(parts.get("context", CONTEXT_BYTES), CUDA_CONTEXT_BYTES)
        used_bytes = max(held_bytes, account.peak_reserved_bytes or 0) + context_bytes
        sizes.append((min(used_bytes, idle_bytes), idle_bytes))
    for finding in report.diagnosis.findings:
        missed_bytes = finding.evidence.get("needed_bytes")
        if isinstance(missed_bytes, (int, float)) and missed_bytes > 0:
            sizes.append((missed_bytes, _idle_bytes(finding.evidence.get("total_bytes"))))
    if not sizes:
        return None
    peak_bytes, idle_bytes = max(sizes)
    return peak_bytes, _with_margin(peak_bytes, idle_bytes)


def _origin(report: Report, peak_bytes: float, min_free_bytes: int, file: str) -> str:
    kind, outcome = ("peak", "") if report.outcome == COMPLETED else ("at least", f"{printable(report.outcome, 200)}, ")
    script = report.settings.get("script")
    model = printable(report.settings.get("model", "a run")) + (f" in {printable(script)}" if script else "")
    date = printable(report.started_at.partition("T")[0])
    percent = 100 * (min_free_bytes / peak_bytes - 1)
    return (
        f"min_free=last: {format_bytes(min_free_bytes)} ({kind} {format_bytes(peak_bytes)} of {model} on {date}, "
        f"{outcome}{printable_path(file.removeprefix('./'))}, plus {percent:.0f}%)"
    )


def claim_sentence(report: Report) -> str:
    """Return a sentence on the claimed and the used memory; empty if the job claimed none, or its use is unknown."""
    need = need_of(report)
    if need is None or not report.claimed_bytes:
        return ""
    peak_bytes, min_free_bytes = need
    is_whole = report.outcome == COMPLETED
    used = f"{'its peak was' if is_whole else 'it used at least'} {format_bytes(peak_bytes)}"
    text = f"The job asked for {format_bytes(report.claimed_bytes)} on each GPU; {used}"
    enough = f"--min-free {math.ceil(min_free_bytes / 2**30 * 10) / 10:g}GiB"
    if peak_bytes > report.claimed_bytes:
        return f"{text}. Other jobs may count on the difference: ask for {enough}."
    if is_whole and report.claimed_bytes > _FAR_TOO_MUCH * min_free_bytes:
        return f"{text}: {enough} would do."
    return f"{text}."


def min_free_for(need_bytes: int, total_bytes: int) -> int:
    """Return the ``min_free`` of a job that needs ``need_bytes`` on a GPU with ``total_bytes`` of memory."""
    return _with_margin(need_bytes, _idle_bytes(total_bytes))


def _with_margin(peak_bytes: float, idle_bytes: float) -> int:
    return math.ceil(min(peak_bytes * (1 + MARGIN), max(peak_bytes, idle_bytes)))


def _idle_bytes(total_bytes: object) -> float:
    return _FREE_WHEN_IDLE * total_bytes if isinstance(total_bytes, (int, float)) and total_bytes else math.inf
