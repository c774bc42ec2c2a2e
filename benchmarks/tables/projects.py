"""Tables about third-party projects."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from .markdown import RESULTS, Results, block, in_rounds, results, spread, table

CASES = ("chemprop", "gluonts")  # described in docs/case_studies.md


def real_projects() -> str:
    """Return the results of each project."""
    projects = results("real_projects")["projects"]
    head = (
        "project",
        "weights and random numbers",
        "added time, zero-code",
        "added time, callbacks",
        "verdicts",
        "settings advised",
    )
    rows = []
    for name, found in projects.items():
        runs = found["runs"]
        ours = [one for one in ("zero-code", "callbacks", "finder") if one in runs]
        states = {(run["weights"], run["random_states"]) for one in ("as it is", *ours) for run in runs[one]}
        reports = [run["report"] for one in ours for run in runs[one] if "report" in run]
        verdicts = Counter(report["verdict"] for report in reports)
        findings = [finding for report in reports for finding in report["findings"]]
        promised = [finding["ceiling"] for finding in findings if finding["cause"] == "data_loading"]
        advised = next((one for one in runs if one.startswith("advised")), None)
        reached = f"predicted up to {max(promised):.2f}x, measured {speedup(runs, advised)}" if advised else "none"
        rows.append(
            (
                name,
                "equal" if len(states) == 1 else "**different**",
                *(more_time(runs, one) if one in runs else "" for one in ("zero-code", "callbacks")),
                ", ".join(f"{count} x {verdict}" for verdict, count in verdicts.items()) or "no report",
                reached,
            )
        )
    return block(table(head, *rows), how_projects_ran(*projects))


def case(project: str) -> str:
    """Return the times of all variants of one project."""
    runs = results("real_projects")["projects"][project]["runs"]
    head = ("", "`Trainer.fit`", "speedup", "CPU time")
    rows = [
        (
            f"{name}{searched(found)}",
            spread([run["fit_s"] for run in found], ".1f", " s"),
            speedup(runs, name),
            spread([run["cpu_s"] for run in found], ".1f", " s"),
        )
        for name, found in runs.items()
    ]
    return block(table(head, *rows), how_projects_ran(project))


def searched(found: Sequence[Results]) -> str:
    searches = [run["report"]["search"] for run in found if run.get("report", {}).get("search")]
    return f", including a search of {median(one['seconds'] for one in searches):.1f} s" if searches else ""


def more_time(runs: Results, name: str) -> str:
    wall, cpu = (
        spread([100 * (other / plain - 1) for plain, other in in_rounds(runs, name, key)], "+.0f", "%")
        for key in ("fit_s", "cpu_s")
    )
    return f"{wall}, CPU {cpu}"


def speedup(runs: Results, name: str) -> str:
    return spread([plain / other for plain, other in in_rounds(runs, name, "fit_s")], ".2f", "x")


def how_projects_ran(*names: str) -> str:
    found = [results("real_projects")["projects"][name] for name in names]
    plain = [run for project in found for run in project["runs"]["as it is"]]
    versions = {f"{name} {version}" for run in plain for name, version in run["versions"].items()}
    loads = [run["load_average_before"] for project in found for runs in project["runs"].values() for run in runs]
    threads = " or ".join(sorted({str(run["threads"]) for run in plain}))
    rounds = " or ".join(sorted({str(len(project["runs"]["as it is"])) for project in found}))
    machines = {
        f"{project['machine']['date']}, {project['machine']['cores']} cores of a shared virtual machine "
        f"({project['machine']['processor']})"
        for project in found
    }
    return (
        f"Medians and ranges of {rounds} rounds. Times are compared within a round. PyTorch used {threads} threads. "
        f"The load average before a run was {min(loads):.1f} to {max(loads):.1f}. "
        f"{', '.join(sorted(versions))}. `python benchmarks/real_projects.py {' '.join(names)}`, "
        f"{'; '.join(sorted(machines))}: [real_projects.json]({RESULTS}/real_projects.json)."
    )
