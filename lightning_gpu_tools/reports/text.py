"""The report of a training run as text for the terminal, and as Markdown for a pull request.

A report may come from a file written by anyone, so each of its texts is made printable where it is inserted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.findings import Diagnosis, in_words, label_of, seen_in
from lightning_gpu_tools.advice.lost_time import mean_wait_s, slowest_rank
from lightning_gpu_tools.advice.memory_account import CACHE, OTHER_PROCESSES, PARTS, TENSORS, MemoryAccount
from lightning_gpu_tools.memory.readings import MemoryLine
from lightning_gpu_tools.reports.gpu_table import gpu_label, gpu_lines, gpu_sentences
from lightning_gpu_tools.reports.last_run import claim_sentence
from lightning_gpu_tools.reports.report import FILE_NAME, RUNNING, Report
from lightning_gpu_tools.training.phases import IN_WORKER, RANK_WAIT, STARTUP_PARTS, TRAINING_STEP, UNEXPLAINED
from lightning_gpu_tools.units import format_bytes, format_duration, line_width, plural, printable, wrapped

_EARLY_WARNINGS = {name for name, cause in MEMORY_CAUSES.items() if cause.find_early is not None}
_MAX_PARAGRAPH = 1000  # ten lines; our longest advice has five
# For a report that is not full. After training, the paths of the files follow within 80 lines.
_MAX_LINES = 76
_MAX_NAMES = 6
_MAX_PROCESSES = 4
_MAX_STALLS = 3
_MIN_PART = 0.02
_MIN_TIME = 0.01  # of the wall time
# Our defaults: the time until the first step is done is shown if it is long, or a large part of the wall time.
_LONG_STARTUP_S, _MIN_STARTUP, _MIN_STARTUP_S = 10.0, 0.2, 2.0
_MIN_MEMORY = 0.5  # of a GPU's, from which on what uses it is worth a tree
_TIME_COLUMNS = 42  # of a row of the time tree, after the label
_MAX_SOURCE_LINES = 10  # of a phase
_MAX_MEMORY_LINES = 3
LINE_COLUMNS = ("phase", "of its time", "line", "samples")  # of line_rows
_MIN_OTHERS_CORES = 0.2  # our default: with less, the other programs are the system's own
# Text that Markdown reads as markup inside a line: CommonMark 0.31, section 2.4, and GitHub's $math$, | and links.
_MARKUP = re.compile(r"[\\`*\[\]<&|~$]|(?<!\w)_|_(?!\w)|(?<=:)/(?=/)")


def render_text(report: Report, *, full: bool = False) -> str:
    """Return the report in fewer than 80 lines, as wide as the terminal; ``full``: without a limit on the lines."""
    head = {"Verdict": f"{verdict_line(report)} ({printable(report.outcome)})", **paragraphs(report)}
    lines = [_wrapped(text, f"{f'{title}:':<9}") for title, text in head.items()]
    return _joined([*lines, ""], _details(report, full), [], full)


def render_markdown(report: Report, *, full: bool = False) -> str:
    """Return the report for a pull request: verdict, reason and advice, with the rest in a collapsed block."""
    details = _details(report, full)
    fence = max(["``", *re.findall("`+", "\n".join(details))]) + "`"  # longer than any inside the block
    head = [
        f"**{verdict_line(report)}** ({escape_markdown(report.outcome)})",
        "",
        *(f"- **{title}:** {escape_markdown(text)}" for title, text in paragraphs(report).items()),
        "",
        "<details><summary>Where the time went</summary>",
        "",
        f"{fence}text",
    ]
    return _joined(head, details, [fence, "", "</details>"], full)


def paragraphs(report: Report) -> dict[str, str]:
    """Return the reason, the advice, the result of earlier advice if there is one, and the run, by title."""
    result = {"Result": report.confirmation} if report.confirmation else {}
    return {"Why": report.diagnosis.why, "Next": report.diagnosis.next_step, **result, "Run": run_line(report)}


def _joined(head: Sequence[str], details: Sequence[str], foot: Sequence[str], full: bool) -> str:
    """Return all lines; without ``full``, cut the details to the maximum length."""
    room = _MAX_LINES - len("\n".join(head).split("\n")) - len(foot)
    lines = "\n".join(details).splitlines()
    if len(lines) > room and not full:
        more = len(lines) - room + 1
        lines[room - 1 :] = [f"({more:,} more lines: lightning-gpu-tools report FILE --full)"]
    return "\n".join([*head, *lines, *foot])


def _details(report: Report, full: bool) -> list[str]:
    sampled = [
        f"{phase}: {share} at {line} ({samples} sample{'s' * (samples != '1')})"
        for phase, share, line, samples in (line_rows(report, full=True) if full else ())
    ]
    return [
        *map(_wrapped, gpu_lines(report.gpus, full=full)),
        *map(_wrapped, sentences(report, full=full)),
        *(_time_tree(report, full) if report.wall_s > 0 else []),
        *_memory_trees(report, full),
        *(["Source lines, by phase", *map(_wrapped, sampled)] if sampled else []),
        *map(_wrapped, measuring_lines(report)),
    ]


def sentences(report: Report, *, full: bool = False) -> Iterator[str]:
    """Yield what the tables of a report do not show; ``full``: without a limit on the number of stalls and errors."""
    diagnosis = report.diagnosis
    if not report.is_finished:
        state = "The process ended without a final report: it was killed, or it crashed."
        if report.outcome.startswith(RUNNING):
            state = "The run is still in progress."
        yield f"{state} This report shows its state after {format_duration(report.wall_s)}."
    stalls = sorted(report.stalls, key=lambda stall: -stall.lasted_s)
    shown = stalls if full else stalls[:_MAX_STALLS]
    for stall in shown:
        lasted, continued = format_duration(stall.lasted_s), ", then training continued" * stall.is_over
        yield f"No progress for {lasted} at step {stall.step}{continued}: {printable(stall.why, 800)}"
    if len(shown) < len(stalls):
        yield f"{FILE_NAME} has {plural(len(stalls) - len(shown), 'shorter stall')}."
    yield from _startup_line(report)
    yield from gpu_sentences(report.gpus, full=full)
    if report.gpu_note:
        yield report.gpu_note
    for finding in diagnosis.findings:
        if finding.cause in _EARLY_WARNINGS and finding.advice not in diagnosis.next_step:
            yield finding.advice
    if claimed := claim_sentence(report):
        yield claimed
    if failures := report.allocator_failures:
        yield (
            f"torch's allocator ran out of memory {plural(failures, 'time')}, and the run continued. It "
            "usually empties its cache first, which waits for the GPU."
        )
    if (slowest := slowest_rank(report.ranks)) is not None:
        rank, behind_s = slowest
        wait_s = mean_wait_s(report.ranks)
        waits = "" if wait_s is None else f" On average a rank waits {format_duration(wait_s)} per step for others."
        yield (
            f"Slowest rank: {rank.rank} (node {rank.node}), {format_duration(rank.own_step_s)} of its own work per "
            f"step, {format_duration(behind_s)} more than the median of {len(report.ranks)} ranks.{waits}"
        )
    idle = []
    for phase, percent in _largest_first(diagnosis.gpu_idle_percent):
        group, _, name = phase.partition("/")
        label = "inside the training step" if phase == TRAINING_STEP else printable(name) or label_of(group)
        if percent >= 1:
            idle.append(f"{label} {percent:.0f}%")
    if idle:
        yield f"GPU idle, of the wall time: {', '.join(idle)}."
    # By the GPU's clock; the tree uses the host's clock, and the host runs ahead.
    total_s = sum(report.gpu_step_s.values())
    parts = [
        f"{printable(phase.partition('/')[2])} {format_duration(part_s)}"
        for phase, part_s in _largest_first(report.gpu_step_s)
        if "/" in phase and part_s >= _MIN_PART * total_s
    ]
    if parts:
        yield f"GPU time of a step: {', '.join(parts)}."
    loader = report.loader
    if loader is not None and loader.settings is not None and loader.seconds:
        found, duration = f"num_workers={loader.settings.num_workers}", format_duration(loader.seconds)
        if loader.settings == loader.original:
            yield f"NumWorkersFinder kept {found} after {duration} of trials. {loader.reason}"
        else:
            state = "applied" if loader.applied else "not applied"
            yield f"NumWorkersFinder found {found} in {duration} ({state}). {loader.reason}"
    elif loader is not None:
        yield f"NumWorkersFinder: {loader.reason}"


def _startup_line(report: Report) -> Iterator[str]:
    total_s = sum(report.startup_s.values())
    if total_s < max(_MIN_STARTUP_S, min(_LONG_STARTUP_S, _MIN_STARTUP * report.wall_s)):
        return
    parts_s = {name: seconds for name, seconds in report.startup_s.items() if seconds >= _MIN_TIME * total_s}
    parts_s["other"] = parts_s.get("other", 0.0) + total_s - sum(parts_s.values())
    parts = [
        f"{STARTUP_PARTS.get(name) or printable(name)} {format_duration(seconds)}"
        for name, seconds in parts_s.items()
        if seconds >= _MIN_TIME * total_s
    ]
    yield f"{format_duration(total_s)} until the first step was done: {', '.join(parts)}."


def _largest_first(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


def escape_markdown(text: str) -> str:
    """Return Markdown that shows the text literally and on one line."""
    return _MARKUP.sub(r"\\\g<0>", printable(text, _MAX_PARAGRAPH))


def _wrapped(text: str, title: str = "") -> str:
    indent = " " * len(title) or "  "
    return wrapped(printable(text, _MAX_PARAGRAPH), title, indent) or title


def verdict_label(diagnosis: Diagnosis) -> str:
    """Return the verdict in capitals."""
    return "TOO SHORT TO JUDGE" if diagnosis.verdict == "too_short" else diagnosis.verdict.replace("_", " ").upper()


def verdict_line(report: Report) -> str:
    """Return the verdict, with its meaning if it is low."""
    label = verdict_label(report.diagnosis)
    if report.diagnosis.verdict != "low":
        return label
    return f"{label}: the GPU is often idle" if report.gpus else f"{label}: {report.activity} often waits"


def run_line(report: Report) -> str:
    """Return the model, speed, device and versions of a run, as far as known."""
    settings = {name: printable(value) for name, value in report.settings.items() if value is not None}
    gpus = sorted({printable(gpu.name) for gpu in report.gpus if gpu.name})
    device = ", ".join(gpus) or settings.get("cpu") or settings.get("device")
    ranks = settings.get("world_size", "1")
    place = f"{ranks} rank{'s' * (ranks != '1')} on {device}" if device else None
    others = ""
    if report.others_cores is not None and report.others_cores >= _MIN_OTHERS_CORES:
        others = f"other programs used {report.others_cores:.1f} cores"
    names = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_gpu_tools")
    versions = ", ".join(f"{name} {settings[name]}" for name in names if name in settings)
    times_s = {"median": report.step_s_median, "p95": report.step_s_p95, "longest": report.step_s_max}
    times = [f"{name} {format_duration(seconds)}" for name, seconds in times_s.items() if seconds]
    if times and report.samples_per_s is not None:
        times.append(f"{report.samples_per_s:.4g} samples/s")
    pace = f"{plural(report.steps, 'step')} in {format_duration(report.wall_s)}"
    parts = [
        settings.get("model"),
        settings.get("stage"),
        f"{pace} ({', '.join(times)})" if times else pace,
        place,
        others,
        settings.get("precision"),
        versions,
    ]
    return "; ".join(filter(None, parts))


def measuring_lines(report: Report) -> list[str]:
    """Return sentences on what could not be measured, and on the overhead of measuring."""
    lines = []
    if report.unseen:
        unseen = ", ".join(printable(fact, 300) for fact in report.unseen)
        lines.append(f"Not measured, because this kernel, driver, Lightning or torch does not support it: {unseen}.")
    if report.monitor_us_per_step is not None:
        own, thread_us = format_duration(report.monitor_us_per_step / 1e6), report.monitor_thread_us_per_step
        thread = "" if thread_us is None else f", plus {format_duration(thread_us / 1e6)} of CPU time in the background"
        lines.append(f"Overhead of measuring: at least {own} per step{thread}.")
    return lines


def line_rows(report: Report, *, full: bool = False) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table of source lines: phase, share of its samples, line, samples; most sampled first."""
    samples: Counter[str] = Counter()
    for one in report.lines:
        samples[one.phase] += one.samples
    rows: list[tuple[str, str, str, str]] = []
    for phase, whole in samples.most_common():
        group, _, name = phase.partition("/")
        shown = f"{label_of(group)}: {printable(name)}" if name else label_of(group)
        if phase == IN_WORKER:
            shown = "loading in a worker"
        seen = seen_in([line for line in report.lines if line.phase == phase], phase)
        rows += (
            (
                shown,
                f"{100 * line.samples / whole:.0f}%",
                in_words(line.file, line.line, line.function),
                f"{line.samples:,}",
            )
            for line in (seen if full else seen[:_MAX_SOURCE_LINES])
            if full or line.samples >= _MIN_PART * whole
        )
    return rows


def phase_groups(phase_s: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the parts of each group of phases (what precedes the slash), largest first, ``unexplained`` last."""
    groups: dict[str, dict[str, float]] = {}
    for phase, seconds in _largest_first(phase_s):
        group, _, name = phase.partition("/")
        groups.setdefault(group, {})[name] = seconds
    return dict(sorted(groups.items(), key=lambda item: (item[0] == UNEXPLAINED, -sum(item[1].values()))))


def cause_phase(report: Report) -> str | None:
    """Return the phase of the first finding in the time tree, if any."""
    if not report.diagnosis.findings:
        return None
    evidence = report.diagnosis.findings[0].evidence
    if evidence.get("rank", 0) != 0:
        return RANK_WAIT  # the tree is that of rank 0
    phase = evidence.get("phase")
    return next((name for name in (str(phase), f"{TRAINING_STEP}/{phase}") if name in report.phase_s), None)


_Line = tuple[str, str]  # a label, and the text after it


def _tree(branches: Sequence[tuple[_Line, Sequence[_Line]]]) -> list[str]:
    """Return the lines of a tree of two levels."""
    lines = []
    for i, (branch, leaves) in enumerate(branches):
        is_last = i == len(branches) - 1
        stems = [("   " if is_last else "│  ") + "├─ "] * len(leaves)
        stems[-1:] = [stem.replace("├", "└") for stem in stems[-1:]]
        for stem, (label, rest) in zip(["└─ " if is_last else "├─ ", *stems], [branch, *leaves], strict=True):
            width = min(44, line_width() - _TIME_COLUMNS) - len(stem)
            lines.append(f"{stem}{printable(label, width):<{width}}{rest}")
    return lines


def _time_tree(report: Report, full: bool) -> list[str]:
    cause = cause_phase(report)

    def line(label: str, seconds: float, phase: str) -> _Line:
        amount, per_step = format_duration(seconds), format_duration(seconds / max(1, report.steps))
        marked = "  ◀ cause" * (phase == cause)
        return label, f"{amount:>10}{100 * seconds / report.wall_s:>6.1f}%{per_step:>10}/step{marked}"

    def is_shown(seconds: float, phase: str) -> bool:
        return full or seconds >= _MIN_TIME * report.wall_s or phase == cause

    branches: list[tuple[_Line, Sequence[_Line]]] = []
    folded: list[float] = []
    for group, parts in phase_groups(report.phase_s).items():
        phases = {name: f"{group}/{name}" for name in parts if name}
        named = [(name, parts[name]) for name, phase in phases.items() if is_shown(parts[name], phase)]
        leaves = [line(name, seconds, phases.get(name, "")) for name, seconds in _limited(named, _MAX_NAMES, full)]
        if leaves or is_shown(sum(parts.values()), group):
            branches.append((line(label_of(group, report.activity), sum(parts.values()), group), leaves))
        else:
            folded.append(sum(parts.values()))
    if folded:
        count = "1 other," if len(folded) == 1 else f"{len(folded)} others, each"
        label = f"{count} below {100 * _MIN_TIME:.0f}%"
        branches.append((line(label, sum(folded), ""), []))
    explained = max(0.0, 1 - report.phase_s.get(UNEXPLAINED, 0.0) / report.wall_s)
    head = f"Where the {format_duration(report.wall_s)} went ({100 * explained:.0f}% explained), and the mean per step"
    return [head, *_tree(branches)]


def _share_used(account: MemoryAccount) -> float:
    return sum(account.parts_bytes.values()) / (account.total_bytes or math.inf)


def fullest_first(accounts: Sequence[MemoryAccount]) -> list[MemoryAccount]:
    """Return the GPUs by the share of their memory in use, largest first."""
    return sorted(accounts, key=_share_used, reverse=True)


def _memory_trees(report: Report, full: bool) -> list[str]:
    """Return the memory use of the fullest GPU, or of all GPUs if ``full``."""
    ordered, lines = fullest_first(report.memory), []
    for account in ordered if full else ordered[:1]:
        which = f" (the fullest of {len(ordered):,})" if account is ordered[0] and ordered[1:] else ""
        gpu = gpu_label(account) + which
        if full or _share_used(account) >= _MIN_MEMORY or report.diagnosis.verdict == "out_of_memory":
            lines += _memory_tree(account, gpu, full)
        else:
            used, total = format_bytes(sum(account.parts_bytes.values())), format_bytes(account.total_bytes or 0)
            lines.append(_wrapped(f"Memory in use on {gpu} at the peak: {used} of {total}."))
    return lines


def _memory_tree(account: MemoryAccount, gpu: str, full: bool) -> list[str]:
    whole_bytes = max(1, sum(account.parts_bytes.values()))

    def line(label: str, size: float) -> _Line:
        return label, f"{format_bytes(size):>10}{100 * size / whole_bytes:>6.1f}%"

    groups: dict[str, dict[str, int]] = {}
    for name, size in account.parts_bytes.items():
        label = PARTS.get(name, name)  # a file may have unknown ones
        group = "tensors at their peak" if name in TENSORS else "allocator cache" if name in CACHE else ""
        groups.setdefault(group or label, {})[label if group else ""] = size
    branches = []
    for group, parts in groups.items():
        leaves = [(name, size) for name, size in _largest_first(parts) if name]
        if group == PARTS[OTHER_PROCESSES]:
            leaves = []
            for process in account.others:
                words = process.user and f"{process.user}:", process.name, f"(PID {process.pid})"
                leaves.append((" ".join(filter(None, words)), process.used_bytes or 0))
            leaves = _limited(leaves, _MAX_PROCESSES, full)
        shown = [line(*leaf) for leaf in leaves if full or leaf[1] >= _MIN_PART * whole_bytes]
        branches.append((line(group, sum(parts.values())), shown))
    whole = format_bytes(whole_bytes)
    if account.used_bytes is None:
        head = f"Memory of {gpu}: {whole} reserved by torch"
    else:
        free = "" if account.free_bytes is None else f", {format_bytes(account.free_bytes)} free"
        explained = 100 * (account.explained_share or 0.0)
        head = f"Memory of {gpu}: {whole} used{free} ({explained:.0f}% explained)"
    rows = [_wrapped(head), *_tree(branches)]
    for head, found in (
        ("Memory added by a step at its peak, by line", account.peak_lines),
        ("Memory kept after steps, by line", account.kept_lines),
    ):
        least = _MIN_PART * sum(line.bytes for line in found)
        shown_lines = found if full else [line for line in found if line.bytes >= least][:_MAX_MEMORY_LINES]
        rows += [head] if shown_lines else []
        rows += [f"  {format_bytes(line.bytes):>8}  {line_label(line)}" for line in shown_lines]
    return rows


def line_label(line: MemoryLine) -> str:
    """Return a line that allocated memory, and the phase of the step."""
    place = in_words(*line[3:]) if line.file else "no Python line"
    return f"{place} ({line.phase})" if line.phase else place


def _limited(parts: list[tuple[str, float]], count: int, full: bool) -> list[tuple[str, float]]:
    """Return at most ``count`` parts, or all if ``full``; the last one stands for the rest."""
    if full or len(parts) <= count:
        return parts
    rest = parts[count - 1 :]
    return [*parts[: count - 1], (f"{len(rest)} others", sum(size for _, size in rest))]
