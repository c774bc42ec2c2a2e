"""Tables about what measuring costs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from lightning_gpu_tools.advice.findings import median_interval
from lightning_gpu_tools.units import format_bytes, format_duration

from .markdown import Results, block, results, source, table


def step_overhead() -> str:
    plain, fake = results("step_overhead"), results("step_overhead_fake_gpus")
    simulated, h100 = results("simulated_gpu/gpu_step_overhead"), results("h100/step_overhead")

    none, empty, ours = "no callbacks", "two empty callbacks", "monitor + advisor"

    def beyond(found: Results, name: str, other: str, kind: str) -> str:
        beside = found["measured_us"].get(ours if name == empty else name)  # each tool has its own to compare with
        if beside is None or name == other:
            return ""
        values = [a - b for a, b in zip(beside[name][kind], beside[other][kind], strict=True)]
        low, high = median_interval(values) or (min(values), max(values))
        return f"{median(values):+.0f} ({low:+.0f} to {high:+.0f})"

    rows = [
        (
            name,
            beyond(plain, name, none, "wall"),
            beyond(plain, name, empty, "wall"),
            beyond(plain, name, none, "cpu"),
            beyond(fake, name, none, "wall"),
        )
        for name in (empty, *dict.fromkeys([*plain["measured_us"], *fake["measured_us"]]))
    ]
    head = (
        "µs per step",
        "beyond no callbacks",
        "beyond two empty ones",
        "CPU time, beyond none",
        f"{fake['fake_gpus']} fake GPUs, beyond none",
    )
    step_us = median(plain["measured_us"][ours][none]["wall"])
    return block(
        table(head, *rows),
        f"Steps of {step_us / 1e3:.1f} ms; everything at its defaults; `log_every_n_steps=50` unless stated. Medians "
        f"of {plain['rounds']} paired differences ({fake['rounds']} with fake GPUs) between turns of "
        f"{plain['steps_per_turn']} steps, averaged over {plain['processes']} processes of each, with 95 % "
        "intervals, each tool by itself. " + source("step_overhead.py", "step_overhead", "step_overhead_fake_gpus"),
        f"On a simulated GPU the same adds {beyond(simulated, ours, none, 'wall')} µs, and two empty callbacks "
        f"{beyond(simulated, empty, none, 'wall')}. " + source("step_overhead.py", "simulated_gpu/gpu_step_overhead"),
        f"On one {h100['machine']['gpus'][0]} it adds {beyond(h100, ours, none, 'wall')} µs, and two empty callbacks "
        f"{beyond(h100, empty, none, 'wall')}: the {h100['rounds']} rounds that there was time for do not tell them "
        f"apart. By its own count it is {h100['own_count_us']:.0f} µs of a step of "
        f"{median(h100['measured_us'][ours][none]['wall']) / 1e3:.1f} ms. "
        + source("step_overhead.py", "h100/step_overhead"),
    )


def source_lines() -> str:
    found = results("source_lines")
    runs = found["runs"]
    rows = [
        (
            name.replace("_", " ").replace("python", "Python").replace("c that", "C that"),
            *(f"{one['true_percent'][name]:.0f} %, {one['seen_percent'][name]:.0f} %" for one in runs.values()),
        )
        for name in next(iter(runs.values()))["true_percent"]
    ]
    counts, costs = ([one[key] for one in runs.values()] for key in ("samples", "us_per_sample"))
    return block(
        table(("truth, sampled, of a line", *runs), *rows),
        f"{min(counts)} to {max(counts)} samples in {found['seconds']:.0f} s each. A sample takes {min(costs):.0f} to "
        f"{max(costs):.0f} µs of CPU time. {source('source_lines.py', 'source_lines')}",
    )


def scale() -> str:
    found = results("scale")
    sizes = found["sizes"]

    def row(name: str, value: Callable[[Results], str]) -> tuple[str, ...]:
        return name, *map(value, sizes)

    rows = [
        row("to hand over what it publishes, in the training thread", lambda one: format_duration(one["publish_s"])),
        row("to read all ranks, in a thread", lambda one: format_duration(one["gather_s"])),
        row("of that, CPU time", lambda one: format_duration(one["gather_cpu_s"])),
        row("the same rank by rank, as a comparison", lambda one: format_duration(one["one_by_one_s"])),
        row("to take in what came, in that thread", lambda one: format_duration(one["list_s"])),
        row("to compare the ranks", lambda one: format_duration(one["judge_s"])),
        row("to end, all ranks there", lambda one: format_duration(one["end_s"])),
        row("to end, all others dead", lambda one: format_duration(one["end_dead_s"]["all others"])),
        row("report as text", lambda one: f"{one['text_lines']} lines, {format_duration(one['text_s'])}"),
        row("`gpu_report.json`", lambda one: f"{format_bytes(one['json_bytes'])}, {format_duration(one['json_s'])}"),
        row("picture", lambda one: f"{format_bytes(one['picture_bytes'])}, {format_duration(one['picture_s'])}"),
    ]
    if "running_report_s" in sizes[0]:
        rows[6:6] = [
            row("the running report, in the training thread", lambda one: format_duration(one["running_report_s"])),
            row("the same in a thread, CPU time", lambda one: format_duration(one["running_report_thread_cpu_s"])),
            row("longest pause of the training meanwhile", lambda one: format_duration(one["running_report_pause_s"])),
            row("all of it in the training thread", lambda one: format_duration(one["running_report_all_here_s"])),
        ]
    named = [one["named"] or "nobody" for one in found["real"]]
    ranks = len(found["real"][0]["ranks"])
    return block(
        table(("rank 0 of a job of", *(f"{one['ranks']:,} ranks" for one in sizes)), *rows),
        "Eight ranks a node, as entries in a real TCPStore, over a relay with a round trip of "
        f"{format_duration(found['round_trip_s'])}. {ranks} real ranks with gloo, on four nodes of torchrun that are "
        f"one machine, made one report with all ranks each time. It named {named[1]} where that was slow, {named[2]} "
        f"where all ranks of that were, and {named[0]} where none was. " + source("scale.py", "scale"),
    )
