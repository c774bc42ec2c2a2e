"""The report of jobs from one GPU to a thousand: a table that a person can read, with a row for the rest."""

import re
from dataclasses import replace

import pytest
from sample_report import GIB, REPORT
from simulated_report import DAY_S, simulated_report

from lightning_gpu_tools.advice.memory_account import PARTS, OtherProcess
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.reports.report import Report, from_json, to_json
from lightning_gpu_tools.reports.text import COLUMNS, render_text
from lightning_gpu_tools.training.phases import PHASES

SLOW = {"utilization_percent_mean": 5.0, "power_watts_mean": 120.0}
BROKEN = {"errors": ("Xid 31 (memory page fault)",)}


def with_odd(report: Report, odd: dict[int, dict[str, object]]) -> Report:
    """The report with other values for some of its GPUs, by their place."""
    gpus = [replace(gpu, **odd.get(place, {})) for place, gpu in enumerate(report.gpus)]  # type: ignore[arg-type]
    return replace(report, gpus=tuple(gpus))


@pytest.mark.parametrize("nodes", [1, 128])
def test_a_report_of_any_size_fits_a_screen(nodes: int) -> None:
    count = 8 * nodes
    full_gpu = {column.field: 100.0 for column in COLUMNS if column.unit != "GiB"}
    sizes = {column.field: 140 * GIB for column in COLUMNS if column.unit == "GiB"}
    odd = {place: {**full_gpu, **sizes, **BROKEN} for place in range(0, count, 7)}
    lines = render_text(with_odd(simulated_report(nodes=nodes), odd)).splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 100
    assert [line.partition(":")[0] for line in lines if line[:1].isupper()][:4] == ["Verdict", "Why", "Next", "Run"]
    assert any(line.startswith("├─ waiting for data") for line in lines)


def test_everything_at_once_still_fits_and_names_the_rest() -> None:
    names = [f"{group}/Name{i}" for group in ("callback", "logging", "training_step") for i in range(50)]
    stall = Stall(
        began_at="", lasted_s=9.0, is_over=True, step=1, phase="x", cause="code", why="a " * 240, next_step=""
    )
    account = replace(REPORT.memory[0], parts_bytes=dict.fromkeys(PARTS, GIB))
    report = replace(
        with_odd(
            simulated_report(nodes=128), {place: SLOW | {"errors": (f"Xid {place}",)} for place in range(0, 24, 5)}
        ),
        phase_s={**dict.fromkeys(PHASES, 1.0), **dict.fromkeys(names, 1.0)},
        wall_s=50.0,
        memory=(replace(account, others=tuple(OtherProcess(pid=pid, used_bytes=GIB) for pid in range(9))),) * 1024,
        stalls=(stall,) * 9,
    )
    lines = render_text(report).splitlines()
    assert len(lines) == 76  # four more say where the files are
    assert "gpu_report.json has 6 shorter stalls." in lines
    assert sum(line.startswith("ERROR on ") for line in lines) == 5
    assert lines[-1].endswith(" more lines: lightning-gpu-tools report FILE --full)")
    assert len(render_text(report, full=True).splitlines()) > 2 * 1024


def test_failing_and_least_busy_of_many_gpus_have_rows() -> None:
    odd = {800: BROKEN, 33: SLOW, 34: {"utilization_percent_mean": 20.0}}
    report = with_odd(simulated_report(nodes=128), odd)
    lines = render_text(report).splitlines()
    start = "1,024 GPUs: half of them are at most 73% busy; errors and the least busy ("
    head = next(place for place, line in enumerate(lines) if line.startswith(start))
    assert lines[head + 1].split()[:3] == ["node", "GPU", "busy"]
    rows = [line.split() for line in lines[head + 3 : head + 19]]
    assert (rows[0][:2], rows[0][-1]) == (["100", "0"], "error")
    assert [row[:3] for row in rows[1:4]] == [["4", "1", "5"], ["4", "2", "20"], ["127", "1", "33"]]
    assert len(rows[15]) == len(lines[head + 1].split())
    places = re.findall(r"^ *(\d+) +(\d) +\d+ ", render_text(report, full=True), re.MULTILINE)
    assert places == [(str(node), str(index)) for node in range(128) for index in range(8)]


def test_the_json_of_a_large_job_is_small() -> None:
    report = simulated_report(nodes=16, gpus=8, seconds=30 * DAY_S)
    text = to_json(report)
    assert len(text) < 1.5e6
    assert from_json(text) == report
