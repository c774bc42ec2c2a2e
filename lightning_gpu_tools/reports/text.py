"""The report of a training run as text, for the terminal, for Markdown and for the page.

A report may come from a file written by anyone, so each of its texts is made printable where it is inserted.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.findings import in_words, label_of, seen_in
from lightning_gpu_tools.advice.lost_time import slowest_rank
from lightning_gpu_tools.advice.memory_account import CACHE, OTHER_PROCESSES, PARTS, TENSORS, MemoryAccount
from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.memory.readings import MemoryLine
from lightning_gpu_tools.reports.last_run import claim_sentence
from lightning_gpu_tools.reports.report import FILE_NAME, Report
from lightning_gpu_tools.training.phases import IN_WORKER, RANK_WAIT, STARTUP_PARTS, TRAINING_STEP, UNEXPLAINED
from lightning_gpu_tools.units import format_bytes, format_duration, line_width, plural, printable, wrapped

_EARLY_WARNINGS = {name for name, cause in MEMORY_CAUSES.items() if cause.find_early is not None}
_MAX_PARAGRAPH = 1000  # ten lines; our longest advice has five
# For a report that is not full. After training, the paths of the files follow within 80 lines.
_MAX_LINES = 76
_MAX_STALLS = 3
_MIN_PART = 0.02
_MIN_TIME = 0.01  # of the wall time
# Our defaults: the time until the first step is done is shown if it is long, or a large part of the wall time.
_LONG_STARTUP_S, _MIN_STARTUP, _MIN_STARTUP_S = 10.0, 0.2, 2.0
_MIN_MEMORY = 0.5  # of a GPU's, from which on what uses it is worth a tree
_TIME_COLUMNS = 42  # of a row of the time tree, after the label
_MAX_MEMORY_LINES = 3
_MIN_OTHERS_CORES = 0.2  # our default: with less, the other programs are the system's own
MAX_ROWS = 16  # our default: two machines of eight GPUs fit on a screen next to the rest of the report
_MAX_NAMED = 8


class _Column(NamedTuple):
    title: str
    unit: str
    field: str
    hides_zero: bool = False


# All of them fit in 100 columns.
COLUMNS = (
    _Column("busy", "%", "utilization_percent_mean"),
    _Column("SMs", "%", "sm_active_percent"),
    _Column("tensor", "%", "tensor_active_percent"),
    _Column("peak", "GiB", "memory_used_bytes_max"),
    _Column("of", "GiB", "memory_total_bytes"),
    _Column("others", "GiB", "others_memory_bytes_max", hides_zero=True),
    _Column("others", "%", "others_utilization_percent", hides_zero=True),
    _Column("waits", "%", "rank_wait_percent", hides_zero=True),
    _Column("power", "W", "power_watts_mean"),
    _Column("temp", "C", "temperature_celsius_max"),
    _Column("throttled", "%", "throttled_percent", hides_zero=True),
)


def render_text(report: Report, *, full: bool = False) -> str:
    """Return the report in fewer than 80 lines, as wide as the terminal; ``full``: without a limit on the lines."""
    head = {"Verdict": f"{verdict_line(report)} ({printable(report.outcome)})", **paragraphs(report)}
    blocks = [*(_wrapped(text, f"{f'{title}:':<9}") for title, text in head.items()), "", *details(report, full=full)]
    lines = "\n".join(blocks).split("\n")
    if len(lines) > _MAX_LINES and not full:
        more = len(lines) - _MAX_LINES + 1
        lines[_MAX_LINES - 1 :] = [f"({more:,} more lines: lightning-gpu-tools report FILE --full)"]
    return "\n".join(lines)


def paragraphs(report: Report) -> dict[str, str]:
    """Return the reason, the advice, the result of earlier advice if there is one, and the run, by title."""
    result = {"Result": report.confirmation} if report.confirmation else {}
    return {"Why": report.diagnosis.why, "Next": report.diagnosis.next_step, **result, "Run": _run_line(report)}


def details(report: Report, *, full: bool) -> list[str]:
    """Return the tables and trees, and what they do not show, as lines."""
    return [
        *map(_wrapped, _gpu_table(report.gpus, full=full)),
        *map(_wrapped, _sentences(report, full)),
        *(_time_tree(report, full) if report.wall_s > 0 else []),
        *_memory_trees(report, full),
        *(map(_wrapped, [*_findings(report), *_source_lines(report)]) if full else ()),
        *map(_wrapped, _measuring(report)),
    ]


def fenced(text: str) -> str:
    """Return Markdown that shows a text as it is."""
    fence = max(["``", *re.findall("`+", text)]) + "`"  # longer than any inside the text
    return f"{fence}text\n{text}\n{fence}"


def _gpu_table(gpus: Sequence[GpuSummary], *, full: bool = False) -> list[str]:
    """Return a table of the GPUs, without columns that have no data.

    Of more than 16 GPUs, those with errors and the least busy ones have a row, or all if ``full``.
    """
    if not gpus:
        return []
    shown = gpus
    if len(gpus) > MAX_ROWS and not full:
        shown = sorted(gpus, key=lambda gpu: (not gpu.errors, gpu.utilization_percent_mean or 0.0))[:MAX_ROWS]
    heads = ("node", "GPU") if any(gpu.node for gpu in shown) else ("GPU",)
    columns = []
    for column in COLUMNS:
        values = [getattr(gpu, column.field) for gpu in shown]
        if any(values) if column.hides_zero else any(value is not None for value in values):
            columns.append(column)
    rows = [
        [*heads, *(column.title for column in columns), ""],
        [*("" for _ in heads), *(column.unit for column in columns), ""],
    ]
    for gpu in shown:
        place = [str(gpu.node), str(gpu.index)][-len(heads) :]
        cells = [_cell(getattr(gpu, column.field), column.unit) for column in columns]
        rows.append([*place, *cells, "error" if gpu.errors else ""])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [f"{'  '.join(map(str.rjust, row[:-1], widths))}  {row[-1]}".rstrip() for row in rows]
    if len(gpus) > len(shown):
        busy = median(gpu.utilization_percent_mean or 0.0 for gpu in gpus)
        note = f"half of them are at most {busy:.0f}% busy; errors and the least busy (report FILE --full: all)"
        lines.insert(0, f"{len(gpus):,} GPUs: {note}")
    return lines


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    if unit == "GiB":
        value /= 2**30
    return f"{value:.1f}" if unit == "GiB" and value < 99.95 else f"{value:.0f}"


def gpu_label(gpu: GpuSummary | MemoryAccount) -> str:
    """Return the short name of a GPU."""
    return f"{f'node {gpu.node} ' if gpu.node else ''}GPU {gpu.index}"


def _gpu_errors(gpus: Sequence[GpuSummary]) -> Iterator[str]:
    """Yield each error, and the GPUs that have reported it."""
    by_error: defaultdict[str, list[GpuSummary]] = defaultdict(list)
    for gpu in gpus:
        for error in gpu.errors:
            by_error[printable(error)].append(gpu)
    for error, some in by_error.items():
        names = ", ".join(map(gpu_label, some)) if len(some) <= _MAX_NAMED else f"{len(some):,} GPUs"
        yield f"ERROR on {names}: {error}"


def _sentences(report: Report, full: bool) -> Iterator[str]:
    """Yield what the tables do not show."""
    stalls = sorted(report.stalls, key=lambda stall: -stall.lasted_s)
    for stall in stalls if full else stalls[:_MAX_STALLS]:
        lasted, continued = format_duration(stall.lasted_s), ", then training continued" * stall.is_over
        yield f"No progress for {lasted} at step {stall.step}{continued}: {printable(stall.why, 800)}"
    if len(stalls) > _MAX_STALLS and not full:
        yield f"{FILE_NAME} has {plural(len(stalls) - _MAX_STALLS, 'shorter stall')}."
    yield from _startup_line(report)
    yield from _gpu_errors(report.gpus)
    if report.gpu_note:
        yield report.gpu_note
    for finding in report.diagnosis.findings:
        if finding.cause in _EARLY_WARNINGS and finding.advice not in report.diagnosis.next_step:
            yield finding.advice
    if claimed := claim_sentence(report):
        yield claimed
    if failures := report.allocator_failures:
        yield f"torch's allocator ran out of memory {plural(failures, 'time')}, and the run continued."
    if (slowest := slowest_rank(report.ranks)) is not None:
        rank, behind_s = slowest
        yield (
            f"Slowest rank: {rank.rank} (node {rank.node}), {format_duration(rank.own_step_s)} of its own work per "
            f"step, {format_duration(behind_s)} more than the median of {len(report.ranks)} ranks."
        )
    idle = []
    for phase, percent in _largest_first(report.diagnosis.gpu_idle_percent):
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
        did = "kept" if loader.settings == loader.original else "applied" if loader.applied else "proposes"
        workers, duration = f"num_workers={loader.settings.num_workers}", format_duration(loader.seconds)
        yield f"NumWorkersFinder {did} {workers} after {duration} of trials. {loader.reason}"
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


def _wrapped(text: str, title: str = "") -> str:
    indent = " " * len(title) or "  "
    return wrapped(printable(text, _MAX_PARAGRAPH), title, indent) or title


def verdict_line(report: Report) -> str:
    """Return the verdict in capitals, with its meaning if it is low."""
    verdict = report.diagnosis.verdict
    if verdict == "low":
        return f"LOW: {'the GPU is often idle' if report.gpus else f'{report.activity} often waits'}"
    return "TOO SHORT TO JUDGE" if verdict == "too_short" else verdict.replace("_", " ").upper()


def _run_line(report: Report) -> str:
    """Return the model, speed, device and versions of a run, as far as known."""
    settings = {name: printable(value) for name, value in report.settings.items() if value is not None}
    gpus = sorted({printable(gpu.name) for gpu in report.gpus if gpu.name})
    device = ", ".join(gpus) or settings.get("cpu") or settings.get("device")
    ranks = settings.get("world_size", "1")
    others = f"other programs used {report.others_cores or 0.0:.1f} cores"
    names = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_gpu_tools")
    diagnosis = report.diagnosis
    times_s = {"median": diagnosis.step_p50_s, "p95": diagnosis.step_p95_s, "longest": report.step_s_max}
    speed = [f"{name} {format_duration(seconds)}" for name, seconds in times_s.items() if seconds]
    if speed and report.samples_per_s is not None:
        speed.append(f"{report.samples_per_s:.4g} samples/s")
    pace = f"{plural(report.steps, 'step')} in {format_duration(report.wall_s)}"
    parts = [
        settings.get("model"),
        settings.get("stage"),
        f"{pace} ({', '.join(speed)})" if speed else pace,
        f"{ranks} rank{'s' * (ranks != '1')} on {device}" if device else None,
        others if (report.others_cores or 0.0) >= _MIN_OTHERS_CORES else None,
        settings.get("precision"),
        ", ".join(f"{name} {settings[name]}" for name in names if name in settings),
    ]
    return "; ".join(filter(None, parts))


def _measuring(report: Report) -> Iterator[str]:
    """Yield what could not be measured, and the overhead of measuring."""
    if report.unseen:
        unseen = ", ".join(printable(fact, 300) for fact in report.unseen)
        yield f"Not measured, because this kernel, driver, Lightning or torch does not support it: {unseen}."
    if report.monitor_us_per_step is not None:
        own, thread_us = format_duration(report.monitor_us_per_step / 1e6), report.monitor_thread_us_per_step
        thread = "" if thread_us is None else f", plus {format_duration(thread_us / 1e6)} of CPU time in the background"
        yield f"Overhead of measuring: at least {own} per step{thread}."


def _findings(report: Report) -> Iterator[str]:
    for number, finding in enumerate(report.diagnosis.findings, 1):
        share = f", {100 * finding.share:.0f}% of the time" if finding.share else ""
        yield f"Finding {number}: {printable(finding.cause).replace('_', ' ')}{share}. {finding.advice}"


def _source_lines(report: Report) -> Iterator[str]:
    """Yield the sampled source lines of each phase, most sampled first."""
    samples: Counter[str] = Counter()
    for one in report.lines:
        samples[one.phase] += one.samples
    if samples:
        yield "Source lines, by phase"
    for phase, whole in samples.most_common():
        group, _, name = phase.partition("/")
        shown = f"{label_of(group)}: {printable(name)}" if name else label_of(group)
        if phase == IN_WORKER:
            shown = "loading in a worker"
        for line in seen_in([line for line in report.lines if line.phase == phase], phase):
            share = f"{100 * line.samples / whole:.0f}%"
            place = in_words(line.file, line.line, line.function)
            yield f"{shown}: {share} at {place} ({plural(line.samples, 'sample')})"


def phase_groups(phase_s: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the parts of each group of phases (what precedes the slash), largest first, ``unexplained`` last."""
    groups: dict[str, dict[str, float]] = {}
    for phase, seconds in _largest_first(phase_s):
        group, _, name = phase.partition("/")
        groups.setdefault(group, {})[name] = seconds
    return dict(sorted(groups.items(), key=lambda item: (item[0] == UNEXPLAINED, -sum(item[1].values()))))


def _cause_phase(report: Report) -> str | None:
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
    cause = _cause_phase(report)

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
        leaves = [line(name, parts[name], phase) for name, phase in phases.items() if is_shown(parts[name], phase)]
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


def _memory_trees(report: Report, full: bool) -> list[str]:
    """Return the memory use of the fullest GPU if it is high, or of all GPUs if ``full``."""
    ordered, lines = sorted(report.memory, key=_share_used, reverse=True), []
    for account in ordered if full else ordered[:1]:
        which = f" (the fullest of {len(ordered):,})" if account is ordered[0] and ordered[1:] else ""
        if full or _share_used(account) >= _MIN_MEMORY or report.diagnosis.verdict == "out_of_memory":
            lines += _memory_tree(account, gpu_label(account) + which, full)
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
        shown_lines = found if full else found[:_MAX_MEMORY_LINES]
        rows += [head] if shown_lines else []
        rows += [f"  {format_bytes(line.bytes):>8}  {line_label(line)}" for line in shown_lines]
    return rows


def line_label(line: MemoryLine) -> str:
    """Return a line that allocated memory, and the phase of the step."""
    place = in_words(*line[3:]) if line.file else "no Python line"
    return f"{place} ({line.phase})" if line.phase else place
