"""Table of the main figures."""

from statistics import median

from lightning_gpu_tools.units import format_duration

from .costs import EMPTY, NONE, OURS, added_us
from .markdown import RESULTS, block, hardware, milliseconds, results, table, with_interval


def figures() -> str:
    """Return the main figures. Later tables have the details."""
    peers, overhead, picks = results("diagnosis_peers"), results("step_overhead"), results("pick_speed")
    loads, saves, searches = results("checkpoint_keys"), results("checkpoint_io"), results("loader_settings")
    crashes = results("crash_consistency")
    theirs, ours = crashes["kills"]
    stalls = [one for one in results("stall_suite")["answers"] if one["known"]]
    large = next(one for one in results("scale")["sizes"] if one["ranks"] == 1024)

    def added(name: str) -> str:
        return with_interval(added_us(overhead, name), ".0f", " µs")

    def saved_s(who: str) -> str:
        return f"{saves['results']['memory'][f'save, {who}']['seconds_median']:.1f} s"

    def loaded(*tools: str) -> str:
        return ", ".join(f"{tool} {[*loads['files'][tool].values()].count('loads')}" for tool in tools)

    def passed(name: str) -> str:
        verdicts = [kill["verdict"] for kill in crashes["kills"][name]]
        return f"{verdicts.count('PASS')} of {len(verdicts)}"

    def took_s(key: str) -> str:
        seconds = [one[key] for one in searches["loaders"].values()]
        return f"{min(seconds):.1f} to {max(seconds):.1f} s"

    ms = {name: milliseconds(times_s) for name, times_s in picks["all_s"].items()}
    peers_of_pick = ("nvisel", "gpu-gate")
    device_stats = "DeviceStatsMonitor, log_every_n_steps=50"
    step_ms = median(overhead["measured_us"][OURS][NONE]["wall"]) / 1e3
    rows = [
        (
            f"correct diagnoses of {peers['both']} CPU test runs that we wrote",
            str(peers["ours"]["names"]),
            f"TraceML {peers['traceml']['names']}",
            "diagnosis_peers",
        ),
        (
            f"correct causes of {len(stalls)} hanging runs",
            str(sum(one["right"] for one in stalls)),
            "",
            "stall_suite",
        ),
        (
            f"time added to a step of {step_ms:.1f} ms, with default settings",
            added(OURS),
            f"two empty callbacks {added(EMPTY)}, DeviceStatsMonitor {added(device_stats)}, TraceML {added('TraceML')}",
            "step_overhead",
        ),
        (
            f"collecting the measurements of {large['ranks']:,} ranks on rank 0 (in a thread, once a minute)",
            format_duration(large["gather_s"]),
            f"one by one {format_duration(large['one_by_one_s'])}",
            "scale",
        ),
        (
            f"`pick` in a new process, on {picks['gpus']} GPUs",
            ms["lightning-gpu-tools pick"],
            ", ".join(f"{name} {ms[name]}" for name in ("bare nvidia-ml-py", *peers_of_pick) if name in ms),
            "pick_speed",
        ),
        ("search for DataLoader settings", took_s("finder_s"), f"grid search {took_s('grid_s')}", "loader_settings"),
        (
            f"kinds of checkpoint files loaded into a plain network, of {len(loads['files']['ours'])}",
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
        (
            f"kills while saving after which ckpt-chaos {crashes['machine']['ckpt-chaos']} passes the resumed run",
            passed(ours),
            f"Lightning {passed(theirs)}",
            "crash_consistency",
        ),
    ]
    python = f"Python alone {ms['python -c pass']}"
    rows.insert(5, ("`import lightning_gpu_tools`", ms["import lightning_gpu_tools"], python, "pick_speed"))
    measured = [(*row[:3], f"`{row[3]}.py`, {results(row[3])['machine']['date']}") for row in rows]
    machines = sorted({hardware(results(row[3])["machine"]) for row in rows})
    return block(
        table(("", "this package", "others", "measured by"), *measured),
        f"Measured by `python benchmarks/NAME.py` on {' and '.join(machines)}. See [the raw results]({RESULTS}).",
    )
