"""Tables about the cost of measuring."""

from statistics import median

from lightning_gpu_tools.units import format_bytes, format_duration

from .markdown import Results, block, results, source, table, with_interval

NONE, EMPTY, OURS = "no callbacks", "two empty callbacks", "monitor + advisor"


def added_us(found: Results, name: str, other: str = NONE, kind: str = "wall") -> list[float]:
    """Return the time that a variant adds to another one in a step, for each round. Each tool has its own baselines."""
    of_tool = found["measured_us"].get(OURS if name == EMPTY else name)
    if of_tool is None or name == other:
        return []
    return [a - b for a, b in zip(of_tool[name][kind], of_tool[other][kind], strict=True)]


def step_overhead() -> str:
    plain, fake = results("step_overhead"), results("step_overhead_fake_gpus")
    simulated, h100 = results("simulated_gpu/gpu_step_overhead"), results("h100/step_overhead")

    def added(found: Results, name: str, other: str = NONE, kind: str = "wall") -> str:
        values = added_us(found, name, other, kind)
        return with_interval(values, "+.0f") if values else ""

    rows = [
        (name, added(plain, name), added(plain, name, EMPTY), added(plain, name, kind="cpu"), added(fake, name))
        for name in (EMPTY, *dict.fromkeys([*plain["measured_us"], *fake["measured_us"]]))
    ]
    head = (
        "added µs per step",
        "to no callbacks",
        "to two empty callbacks",
        "CPU time, to no callbacks",
        f"{fake['fake_gpus']} fake GPUs, to no callbacks",
    )
    step_us = median(plain["measured_us"][OURS][NONE]["wall"])
    h100_step_us = median(h100["measured_us"][OURS][NONE]["wall"])
    return block(
        table(head, *rows),
        f"A step takes {step_us / 1e3:.1f} ms. All tools have their default settings, with `log_every_n_steps=50` "
        f"unless stated. Each tool is measured alone. The table shows medians of {plain['rounds']} paired differences "
        f"({fake['rounds']} with fake GPUs) and their 95% intervals. A difference is between turns of "
        f"{plain['steps_per_turn']} steps, averaged over {plain['processes']} processes. "
        + source("step_overhead.py", "step_overhead", "step_overhead_fake_gpus"),
        f"On a simulated GPU, in {simulated['rounds']} turns of {simulated['steps_per_turn']:,} steps, monitor and "
        f"advisor add {added(simulated, OURS)} µs, and two empty callbacks "
        f"{added(simulated, EMPTY)} µs; in CPU time, {added(simulated, OURS, kind='cpu')} and "
        f"{added(simulated, EMPTY, kind='cpu')} µs. " + source("step_overhead.py", "simulated_gpu/gpu_step_overhead"),
        f"On one {h100['machine']['gpus'][0]}, they add {added(h100, OURS)} µs, and two empty callbacks "
        f"{added(h100, EMPTY)} µs. {h100['rounds']} rounds are too few to distinguish them. The report's own figure is "
        f"{h100['own_count_us']:.0f} µs in a step of {h100_step_us / 1e3:.1f} ms. "
        + source("step_overhead.py", "h100/step_overhead"),
    )


def source_lines() -> str:
    found = results("source_lines")
    runs = found["runs"]
    rows = [
        (
            name.replace("_", " ").replace("python", "Python").replace("c that", "C that"),
            *(f"{one['true_percent'][name]:.0f}%, {one['seen_percent'][name]:.0f}%" for one in runs.values()),
        )
        for name in next(iter(runs.values()))["true_percent"]
    ]
    counts, costs = ([one[key] for one in runs.values()] for key in ("samples", "us_per_sample"))
    return block(
        table(("line: true and sampled share", *runs), *rows),
        f"{min(counts)} to {max(counts)} samples in {found['seconds']:.0f} s each. A sample takes {min(costs):.0f} to "
        f"{max(costs):.0f} µs of CPU time. {source('source_lines.py', 'source_lines')}",
    )


def scale() -> str:
    found = results("scale")
    sizes = found["sizes"]
    durations = {
        "publish own entry, in the training thread": "publish_s",
        "read all entries, in a thread": "gather_s",
        "CPU time of reading them": "gather_cpu_s",
        "read entries one by one, for comparison": "one_by_one_s",
        "parse all entries, in the same thread": "list_s",
        "compare the ranks": "judge_s",
        "running report, in the training thread": "running_report_s",
        "running report, CPU time in a thread": "running_report_thread_cpu_s",
        "longest pause of training during it": "running_report_pause_s",
        "running report, all of it in the training thread, for comparison": "running_report_all_here_s",
        "finish, with all ranks alive": "end_s",
    }
    rows = [(name, *(format_duration(one[key]) for one in sizes)) for name, key in durations.items()]
    rows += [
        ("finish, with all others dead", *(format_duration(one["end_dead_s"]["all others"]) for one in sizes)),
        ("report as text", *(f"{one['text_lines']} lines, {format_duration(one['text_s'])}" for one in sizes)),
    ]
    for name, key in (("`gpu_report.json`", "json"), ("picture", "picture")):
        rows.append(
            (name, *(f"{format_bytes(one[f'{key}_bytes'])}, {format_duration(one[f'{key}_s'])}" for one in sizes))
        )
    named = [one["named"] or "no rank" for one in found["real"]]
    ranks = len(found["real"][0]["ranks"])
    return block(
        table(("cost for rank 0", *(f"{one['ranks']:,} ranks" for one in sizes)), *rows),
        "There are eight ranks per node. The other ranks are entries in a real TCPStore, behind a relay with a round "
        f"trip of {format_duration(found['round_trip_s'])}. Also, {ranks} real ranks trained with gloo, on four "
        "torchrun nodes on one machine. Each time, they wrote one report with all ranks. "
        f"It named {named[1]} when only that rank was slow, {named[2]} when all of its ranks were slow, and {named[0]} "
        "when none was. " + source("scale.py", "scale"),
    )
