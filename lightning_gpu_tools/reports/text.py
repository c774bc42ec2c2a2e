"""The report of a training run as text for the terminal, and as Markdown for a pull request.

A report may come from a file that anyone has written, so each of its texts is made printable where it is inserted.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_gpu_tools.advice.memory_account import (
    OTHER_PROCESSES,
    PARTS,
    MemoryAccount,
    MemoryPart,
    OtherProcess,
)
from lightning_gpu_tools.advice.ranks import mean_wait_s, slowest_rank
from lightning_gpu_tools.reports.gpu_table import gpu_lines
from lightning_gpu_tools.reports.report import FILE_NAME, RUNNING, LoaderSummary, Report
from lightning_gpu_tools.training.phases import PHASES, RANK_WAIT, TRAINING_STEP, UNEXPLAINED
from lightning_gpu_tools.units import format_bytes, format_duration, printable

_WIDTH = 100
_MAX_PARAGRAPH = 1000  # ten lines; our longest advice has five
# Whatever the job, unless all of it is asked for. After training, where the files are follows within 80 lines.
_MAX_LINES = 76
_MAX_NAMES = 6
_MAX_PROCESSES = 3
_MAX_STALLS = 3
_MIN_PART = 0.02
_CAUSE = "  ◀ cause"
# What Markdown reads as markup inside a line: CommonMark 0.31, section 2.4, and GitHub's $math$, | and links.
_MARKUP = re.compile(r"[\\`*\[\]<&|~$]|(?<!\w)_|_(?!\w)|(?<=:)/(?=/)")


def render_text(report: Report, *, full: bool = False) -> str:
    """Return the report as less than 80 lines of at most 100 columns.

    First the run, the verdict, why, and what to do next; then the GPUs, where the wall time went, and the memory.

    Args:
        report: Of a job of any size.
        full: Whether to list every GPU, stall, part and process, in as many lines as that takes.
    """
    diagnosis = report.diagnosis
    head = [
        _paragraph("Run", run_header(report)),
        _paragraph("Verdict", f"{_VERDICT[diagnosis.verdict]} ({run_line(report)})"),
        _paragraph("Why", diagnosis.why),
        _paragraph("Next", diagnosis.next_step),
        *([_paragraph("Result", report.confirmation)] if report.confirmation else []),
        "",
    ]
    return _joined(head, _details(report, full), [], full)


def render_markdown(report: Report, *, full: bool = False) -> str:
    """Return the report for a pull request: verdict, why and next; the rest in a collapsed block.

    The arguments are those of :func:`render_text`.
    """
    diagnosis, details = report.diagnosis, _details(report, full)
    fence = max(["``", *re.findall("`+", "\n".join(details))]) + "`"  # longer than any inside the block
    head = [
        f"**GPU utilization: {_VERDICT[diagnosis.verdict]}** ({escape_markdown(run_line(report))})",
        "",
        f"- **Run:** {escape_markdown(run_header(report))}",
        f"- **Why:** {escape_markdown(diagnosis.why)}",
        f"- **Next:** {escape_markdown(diagnosis.next_step)}",
        "",
        "<details><summary>Where the time went</summary>",
        "",
        f"{fence}text",
    ]
    return _joined(head, details, [fence, "", "</details>"], full)


def _joined(head: Sequence[str], details: Sequence[str], foot: Sequence[str], full: bool) -> str:
    """Return a report; of what does not fit the end of its details is left out."""
    room = _MAX_LINES - len("\n".join(head).split("\n")) - len(foot)
    lines = "\n".join(details).splitlines()
    if len(lines) > room and not full:
        more = len(lines) - room + 1
        lines[room - 1 :] = [f"({more:,} more lines: lightning-gpu-tools report FILE --full)"]
    return "\n".join([*head, *lines, *foot])


def _details(report: Report, full: bool) -> list[str]:
    sentences = [
        *_unfinished_lines(report),
        *_stall_lines(report, full),
        *gpu_lines(report.gpus, full=full),
        *([report.gpu_note] if report.gpu_note else []),
        *_memory_lines(report),
        *_rank_lines(report),
        *_idle_lines(report),
        *_gpu_step_lines(report),
        *([_loader_line(report.loader)] if report.loader is not None else []),
    ]
    return [
        *map(_wrapped, sentences),
        *(_time_tree(report, full) if report.wall_s > 0 else []),
        *_memory_trees(report, full),
        *map(_wrapped, _measuring_lines(report)),
    ]


_VERDICT = {
    "healthy": "HEALTHY",
    "low": "LOW",
    "too_short": "TOO SHORT TO JUDGE",
    "shared_gpu": "SHARED GPU",
    "unknown": "UNKNOWN",
    "out_of_memory": "OUT OF MEMORY",
}


def escape_markdown(text: str) -> str:
    """Return Markdown that shows the text literally and on one line."""
    return _MARKUP.sub(r"\\\g<0>", printable(text, _MAX_PARAGRAPH))


def _paragraph(title: str, text: str) -> str:
    head = f"{title + ':':<9}"
    text = printable(text, _MAX_PARAGRAPH)
    indent = " " * len(head)
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False) or head


def _wrapped(text: str) -> str:
    text = printable(text, _MAX_PARAGRAPH)
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def run_header(report: Report) -> str:
    """Return what ran, how long, where and with which versions, as far as it is known."""
    settings = {name: printable(value) for name, value in report.settings.items() if value is not None}
    gpus = sorted({printable(gpu.name) for gpu in report.gpus if gpu.name})
    device = ", ".join(gpus) or settings.get("cpu") or settings.get("device")
    ranks = settings.get("world_size", "1")
    place = [f"{ranks} rank{'s' * (ranks != '1')} on {device}"] if device else []
    names = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_gpu_tools")
    versions = ", ".join(f"{name} {settings[name]}" for name in names if name in settings)
    steps = f"{report.steps} steps in {format_duration(report.wall_s)}"
    known = [settings.get("model"), steps, *place, settings.get("precision"), versions]
    return "; ".join(filter(None, known))


def _unfinished_lines(report: Report) -> list[str]:
    if report.is_finished:
        return []
    known = f"This is what was known {format_duration(report.wall_s)} into the run."
    if report.outcome.startswith(RUNNING):
        return [f"The run is still going. {known}"]
    return [f"The process ended before it could report: it was killed, or it crashed. {known}"]


def _stall_lines(report: Report, full: bool) -> list[str]:
    longest = sorted(report.stalls, key=lambda one: -one.lasted_s)[: None if full else _MAX_STALLS]
    more = len(report.stalls) - len(longest)
    return [
        *(
            f"No progress for {format_duration(one.lasted_s)} at step {one.step}"
            f"{', and then the training went on' if one.is_over else ''}: {printable(one.why, 500)}"
            for one in longest
        ),
        *([f"{more} shorter stalls are in {FILE_NAME}."] if more else []),
    ]


def _memory_lines(report: Report) -> list[str]:
    """Return what is growing, and how often memory has run out without ending the run."""
    diagnosis, times = report.diagnosis, report.allocator_failures
    growing = [one for one in diagnosis.findings if one.cause == "memory_growth"]
    if diagnosis.verdict == "out_of_memory":  # which says so already
        growing = []
    failures = f"torch's allocator failed {times} time{'s' * (times > 1)}, and the run went on."
    return [*(one.advice for one in growing), *([failures] if times else [])]


def _rank_lines(report: Report) -> list[str]:
    slowest = slowest_rank(report.ranks)
    if slowest is None:
        return []
    rank, behind_s = slowest
    wait_s = mean_wait_s(report.ranks)
    waits = "" if wait_s is None else f" On average a rank waits {format_duration(wait_s)} per step for others."
    apart = [part for part in ("forward", "backward", "optimizer") if part not in rank.phase_s]
    outside = f" outside {' and '.join(apart)}" if apart else ""  # where ranks wait for each other as well
    return [
        f"Slowest rank: {rank.rank} (node {rank.node}), {format_duration(rank.own_step_s)} of its own work per step"
        f"{outside}, {format_duration(behind_s)} more than the median of {len(report.ranks)} ranks.{waits}"
    ]


def _loader_line(loader: LoaderSummary) -> str:
    if loader.settings is None or not loader.seconds:
        return f"NumWorkersFinder: {loader.reason}"
    found = f"num_workers={printable(loader.settings.get('num_workers'))}"
    duration = format_duration(loader.seconds)
    if loader.settings == loader.users:
        return f"NumWorkersFinder kept {found} after {duration} of trials. {loader.reason}"
    state = "in use" if loader.applied else "not in use"
    return f"NumWorkersFinder found {found} in {duration} ({state}). {loader.reason}"


def _idle_lines(report: Report) -> list[str]:
    """Return when the GPU was idle by its own times, and whether the driver agrees."""
    idle = sorted(report.diagnosis.gpu_idle_percent.items(), key=lambda item: -item[1])
    shown = [(phase, percent) for phase, percent in idle if percent >= 1]
    if not shown:
        return []
    parts = [f"{_idle_label(phase)} {percent:.0f} %" for phase, percent in shown]
    residual = report.diagnosis.gpu_idle_residual_percent
    doubt = f" The driver reports {residual:.0f} % less idle time, so trust these less." if residual >= 1 else ""
    return [f"GPU idle, of the wall time: {', '.join(parts)}.{doubt}"]


def _gpu_step_lines(report: Report) -> list[str]:
    """Return what the parts of a step take by the GPU's clock: the tree has them by the host's, which runs ahead."""
    total_s = sum(report.gpu_step_s.values())
    parts = [
        f"{printable(phase.partition('/')[2])} {format_duration(part_s)}"
        for phase, part_s in sorted(report.gpu_step_s.items(), key=lambda item: -item[1])
        if "/" in phase and part_s >= _MIN_PART * total_s
    ]
    return [f"GPU time of a step: {', '.join(parts)}."] if parts else []


def _idle_label(phase: str) -> str:
    group, _, name = phase.partition("/")
    return printable(name) or ("inside the training step" if phase == TRAINING_STEP else phase_label(group))


def _measuring_lines(report: Report) -> list[str]:
    lines = []
    if report.unseen:
        unseen = ", ".join(map(printable, report.unseen))
        lines.append(f"Not measured, because this version of Lightning or torch lacks it: {unseen}.")
    if report.monitor_us_per_step is not None:
        thread = _known(
            ", and {:.0f} us of CPU time per step in a background thread", report.monitor_thread_us_per_step
        )
        lines.append(f"Measuring added at least {report.monitor_us_per_step:.0f} us per step{''.join(thread)}.")
    return lines


def run_line(report: Report) -> str:
    """Return how the run ended, and how long its steps took."""
    parts = [printable(report.outcome)]
    if report.step_s_median:
        times = {"median": report.step_s_median, "p95": report.step_s_p95, "longest": report.step_s_max}
        known = [f"{name} {format_duration(seconds)}" for name, seconds in times.items() if seconds is not None]
        parts.append(f"steps: {', '.join(known)}")
        parts += _known("{:.4g} samples/s", report.samples_per_s)
    return "; ".join(parts)


def _known(template: str, *values: float | None) -> list[str]:
    """Return the template with these values, or nothing if one of them is unknown."""
    return [] if None in values else [template.format(*values)]


def phase_label(group: str) -> str:
    """Return the label of a group of phases; a file may have unknown ones."""
    return PHASES[group].label if group in PHASES else printable(group)


def phase_groups(phase_s: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the phases grouped by what precedes the slash, each group with its parts, largest first.

    ``unexplained`` is always last.
    """
    groups: dict[str, dict[str, float]] = {}
    for phase, seconds in sorted(phase_s.items(), key=lambda item: -item[1]):
        group, _, name = phase.partition("/")
        groups.setdefault(group, {})[name] = seconds
    return dict(sorted(groups.items(), key=lambda item: (item[0] == UNEXPLAINED, -sum(item[1].values()))))


def cause_phase(report: Report) -> str | None:
    """Return the phase of the time tree that the first finding is about; ``None`` if there is no such phase."""
    for first in report.diagnosis.findings[:1]:
        cause = first.cause
        if cause == "communication" or (cause == "straggler" and first.evidence.get("rank") != 0):
            return RANK_WAIT  # the tree is that of rank 0
        name = first.evidence.get("phase" if cause in ("unexplained", "slow_steps", "straggler") else "name")
        phases = (str(name), f"{cause}/{name}", f"{TRAINING_STEP}/{name}", f"{TRAINING_STEP}/{cause}", cause)
        return next((phase for phase in phases if phase in report.phase_s), None)
    return None


def _time_tree(report: Report, full: bool) -> list[str]:
    cause = cause_phase(report)
    unexplained = report.phase_s.get(UNEXPLAINED, 0.0)
    explained = max(0.0, 1 - unexplained / report.wall_s)
    branches = []
    for group, parts in phase_groups(report.phase_s).items():
        named = [(name, seconds) for name, seconds in parts.items() if name]
        if group == TRAINING_STEP and not full:  # named one by one where it is worth a line
            named = [(name, seconds) for name, seconds in named if seconds >= _MIN_PART * report.wall_s]
        if len(named) > _MAX_NAMES and not full:
            rest = named[_MAX_NAMES - 1 :]
            named[_MAX_NAMES - 1 :] = [(f"{len(rest)} others", sum(seconds for _, seconds in rest))]
        branches.append(
            (
                _time_line(phase_label(group), sum(parts.values()), report, group == cause),
                [_time_line(name, seconds, report, f"{group}/{name}" == cause) for name, seconds in named],
            )
        )
    return [
        f"Where the {format_duration(report.wall_s)} went ({100 * explained:.0f} % explained), and the mean per step",
        *_tree(branches),
    ]


def _time_line(name: str, seconds: float, report: Report, is_cause: bool) -> _Line:
    per_step = f"{format_duration(seconds / max(1, report.steps)):>10}/step"
    return _Line(name, format_duration(seconds), seconds / report.wall_s, per_step + _CAUSE * is_cause)


class _Line(NamedTuple):
    """A line of a tree."""

    label: str
    amount: str
    share: float
    rest: str = ""


def _tree(branches: Sequence[tuple[_Line, Sequence[_Line]]]) -> list[str]:
    """Return the lines of a tree of two levels."""
    lines = []
    for i, (branch, leaves) in enumerate(branches):
        is_last = i == len(branches) - 1
        stems = [("   " if is_last else "│  ") + "├─ "] * len(leaves)
        stems[-1:] = [stem.replace("├", "└") for stem in stems[-1:]]
        for stem, line in zip(["└─ " if is_last else "├─ ", *stems], [branch, *leaves], strict=True):
            width = 44 - len(stem)
            label = printable(line.label, width)
            lines.append(f"{stem}{label:<{width}}{line.amount:>10}{100 * line.share:>6.1f} %{line.rest}")
    return lines


def _memory_trees(report: Report, full: bool) -> list[str]:
    """Return what the memory of a GPU was used for; of several GPUs, that of the fullest, or of all of them."""
    fullest = sorted(report.memory, key=_share_used, reverse=True)
    lines = []
    for place, account in enumerate(fullest if full else fullest[:1]):
        lines += _memory_tree(account, len(fullest) if place == 0 else 1, full)
    return lines


def _memory_tree(account: MemoryAccount, gpus: int, full: bool) -> list[str]:
    """Return what the memory of one GPU was used for, the fullest of so many."""
    whole_bytes = max(1, sum(account.parts_bytes.values()))

    def line(label: str, size: int) -> _Line:
        return _Line(label, format_bytes(size), size / whole_bytes)

    groups: dict[str, dict[str, int]] = {}
    for name, size in account.parts_bytes.items():
        part = PARTS.get(name) or MemoryPart(name, name, "", "")  # a file may have unknown ones
        groups.setdefault(part.group or part.label, {})[part.label if part.group else ""] = size
    branches = []
    for group, parts in groups.items():
        leaves = sorted(((name, size) for name, size in parts.items() if name), key=lambda leaf: -leaf[1])
        if group == PARTS[OTHER_PROCESSES].label:
            leaves = _processes(account.others, full)
        shown = [line(*leaf) for leaf in leaves if full or leaf[1] >= _MIN_PART * whole_bytes]
        branches.append((line(group, sum(parts.values())), shown))
    return [_wrapped(_memory_head(account, whole_bytes, gpus)), *_tree(branches), *_in_tensors(account)]


def _share_used(account: MemoryAccount) -> float:
    return sum(account.parts_bytes.values()) / (account.total_bytes or math.inf)


def _memory_head(account: MemoryAccount, whole_bytes: int, gpus: int) -> str:
    gpu = f"{f'node {account.node} ' if account.node else ''}GPU {account.index}"
    gpu += f", the fullest of {gpus:,}," if gpus > 1 else ""
    if account.used_bytes is None:
        return f"What the {format_bytes(whole_bytes)} are that torch has reserved on {gpu} (the driver gives no total)"
    free = "" if account.free_bytes is None else f"; {format_bytes(account.free_bytes)} are free"
    explained = 100 * (account.explained_share or 0.0)
    return f"What the {format_bytes(whole_bytes)} in use on {gpu} are ({explained:.0f} % explained){free}"


def _processes(others: Sequence[OtherProcess], full: bool) -> list[tuple[str, int]]:
    """Return a label and the size of the largest processes of other jobs, and of the rest."""
    named = [
        (" ".join(filter(None, (one.user and f"{one.user}:", one.name, f"(PID {one.pid})"))), one.used_bytes or 0)
        for one in others
    ]
    shown = len(named) if full else _MAX_PROCESSES
    rest = named[shown:]
    return named[:shown] + [(f"{len(rest)} others", sum(size for _, size in rest))] * bool(rest)


def _in_tensors(account: MemoryAccount) -> list[str]:
    """Return what was in tensors at the moments of a step, and in which phase the peak was."""
    moments = {"step_start": "when a step begins", "after_forward": "after forward", "after_backward": "after backward"}
    sizes = account.moments_bytes
    parts = [f"{format_bytes(sizes[name])} {label}" for name, label in moments.items() if name in sizes]
    for phase, size in sorted(account.peaks_bytes.items(), key=lambda peak: -peak[1])[:1]:
        parts.append(f"at the peak {format_bytes(size)} ({printable(phase).replace('_', ' ')})")
    return [_wrapped(f"In tensors: {', '.join(parts)}.")] if parts else []
