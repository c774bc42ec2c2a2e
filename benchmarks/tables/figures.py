"""The table of figures."""

from __future__ import annotations

from statistics import median

from lightning_gpu_tools.advice.findings import median_interval
from lightning_gpu_tools.units import format_duration

from .markdown import RESULTS, block, hardware, median_and_range, results, table


def figures() -> str:
    """Return the main figures; the tables below them have all."""
    peers, overhead, picks = results("diagnosis_peers"), results("step_overhead")["measured_us"], results("pick_speed")
    loads, saves, searches = results("checkpoint_keys"), results("checkpoint_io"), results("loader_settings")
    stalls = [one for one in results("stall_suite")["answers"] if one["known"]]
    large = next(one for one in results("scale")["sizes"] if one["ranks"] == 1024)

    def beyond_us(name: str) -> str:
        of_tool = overhead["monitor + advisor" if name == "two empty callbacks" else name]
        beyond = [a - b for a, b in zip(of_tool[name]["wall"], of_tool["no callbacks"]["wall"], strict=True)]
        low, high = median_interval(beyond) or (min(beyond), max(beyond))
        return f"{median(beyond):.0f} µs ({low:.0f} to {high:.0f})"

    def saved_s(who: str) -> str:
        return f"{saves['results']['memory'][f'save, {who}']['seconds_median']:.1f} s"

    def loaded(*tools: str) -> str:
        return ", ".join(f"{tool} {[*loads['files'][tool].values()].count('loads')}" for tool in tools)

    def took_s(key: str) -> str:
        seconds = [one[key] for one in searches["loaders"].values()]
        return f"{min(seconds):.1f} to {max(seconds):.1f} s"

    ms = {name: median_and_range(times_s) for name, times_s in picks["all_s"].items()}
    peers_of_pick = ("nvisel", "gpu-gate")
    device_stats = "DeviceStatsMonitor, log_every_n_steps=50"
    step_ms = median(overhead["monitor + advisor"]["no callbacks"]["wall"]) / 1e3
    rows = [
        (
            f"correct diagnoses of {peers['both']} CPU test runs that we wrote",
            str(peers["ours"]["names"]),
            f"TraceML {peers['traceml']['names']}",
            "diagnosis_peers",
        ),
        (
            f"correct causes of {len(stalls)} kinds of hanging runs",
            str(sum(one["right"] for one in stalls)),
            "",
            "stall_suite",
        ),
        (
            f"overhead per step of {step_ms:.1f} ms, at all defaults",
            beyond_us("monitor + advisor"),
            f"two empty callbacks {beyond_us('two empty callbacks')}, DeviceStatsMonitor {beyond_us(device_stats)}"
            + (f", TraceML {beyond_us('TraceML')}" if "TraceML" in overhead else ""),
            "step_overhead",
        ),
        (
            f"collecting the measurements of {large['ranks']:,} ranks on rank 0 (in a thread, once a minute)",
            format_duration(large["gather_s"]),
            f"rank by rank {format_duration(large['one_by_one_s'])}",
            "scale",
        ),
        (
            f"a cold `pick` on {picks['gpus']} GPUs",
            ms["lightning-gpu-tools pick"],
            ", ".join(f"{name} {ms[name]}" for name in ("bare nvidia-ml-py", *peers_of_pick) if name in ms),
            "pick_speed",
        ),
        ("search for DataLoader settings", took_s("finder_s"), f"the whole grid {took_s('grid_s')}", "loader_settings"),
        (
            f"kinds of checkpoints that load into a plain network, of {len(loads['files']['ours'])}",
            str([*loads["files"]["ours"].values()].count("loads")),
            loaded("timm", "mmengine", "accelerate", "torch"),
            "checkpoint_keys",
        ),
        (
            f"saving {saves['gib']:g} GiB to memory",
            saved_s("PortableCheckpointIO"),
            f"Lightning {saved_s('TorchCheckpointIO')}",
            "checkpoint_io",
        ),
    ]
    if "import lightning_gpu_tools" in ms:
        python = f"Python alone {ms['python -c pass']}"
        rows.insert(5, ("`import lightning_gpu_tools`", ms["import lightning_gpu_tools"], python, "pick_speed"))
    measured = [(*row[:3], f"`{row[3]}.py`, {results(row[3])['machine']['date']}") for row in rows]
    machines = sorted({hardware(results(row[3])["machine"]) for row in rows})
    return block(
        table(("", "this package", "others", "measured by"), *measured),
        f"Each by `python benchmarks/NAME.py` on {', '.join(machines)}, which writes [the raw results]({RESULTS}).",
    )
