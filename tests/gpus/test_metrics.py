"""A metric is where its readers look for it: in the loggers and their documentation, and in the report."""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import NoneType
from typing import get_args, get_type_hints

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.gpus.metrics import LOGGED, GpuSummary, GpuWindow, gpu_metrics, with_shares
from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.reports.gpu_table import COLUMNS

# Numbers of GpuSummary that only gpu_report.json has, and why.
NOT_IN_TABLES = {
    "index": "it names the GPU",
    "node": "it names the GPU",
    "own_memory_bytes": "the account of memory has the parts of it",
    "own_utilization_percent": "on a shared GPU it is what others leave of busy",
    "validation_utilization_percent_mean": "a detail of utilization_percent_mean",
    "energy_joules": "a sentence has the sum of all GPUs",
}


def test_docs_and_docstring_list_the_logged_metrics() -> None:
    window = GpuWindow(**{field.name: 1 for field in dataclasses.fields(GpuWindow)})  # type: ignore[arg-type]
    logged = gpu_metrics(0, window, energy_joules=1.0)
    assert {f"gpu/0/{name}" for name in LOGGED} == {*logged}, "describe it in LOGGED of gpus/metrics.py"

    listed = set()
    lines = re.findall(r"^- ((?:``[^`]+``(?:, )?)+):", str(inspect.getdoc(GPUUtilizationMonitor)), re.MULTILINE)
    for name in re.findall(r"``(.*?)``", "".join(lines)):
        before, choices, after = re.fullmatch(r"([^{]*)(?:\{(.*?)\})?(.*)", name).groups()  # type: ignore[union-attr]
        listed |= {f"{before}{choice}{after}" for choice in (choices or "").split(",")}
    assert listed == {*LOGGED}, "list it in the docstring of trainer/gpu_utilization.py"


def test_every_gpu_number_is_in_a_table_of_the_report() -> None:
    numbers = {name for name, hint in get_type_hints(GpuSummary).items() if is_number(hint)}
    shown = {column.field for column in COLUMNS}
    assert len(numbers) > 15
    assert shown <= numbers
    assert numbers - shown == {*NOT_IN_TABLES}, (
        "add a line to COLUMNS of reports/gpu_table.py, or the reason why not to NOT_IN_TABLES of this test"
    )


def is_number(hint: type) -> bool:
    return {*(get_args(hint) or [hint])} <= {int, float, NoneType}


# Division of a GPU's use between this job and others

OURS = GpuProcess(pid=1, memory_used_bytes=5, utilization_percent=60.0)
MATE = GpuProcess(pid=2, memory_used_bytes=3, utilization_percent=10.0)
THEIRS = GpuProcess(pid=9, memory_used_bytes=7, utilization_percent=20.0)


def shares(processes: list[GpuProcess] | None, own_pids: set[int] | None) -> tuple[float | None, ...]:
    found = with_shares(GpuWindow(processes=None if processes is None else tuple(processes)), own_pids)
    memory = found.own_memory_bytes, found.others_memory_bytes
    return *memory, found.own_utilization_percent, found.others_utilization_percent


def test_each_side_is_added_up() -> None:
    assert shares([OURS, MATE, THEIRS], {1, 2}) == (8, 7, 70.0, 20.0)


def test_an_unreported_process_makes_only_its_own_side_unknown() -> None:
    assert shares([OURS, THEIRS, GpuProcess(pid=8)], {1}) == (5, None, 60.0, None)


def test_without_numbers_that_are_ours_nothing_is_known() -> None:
    assert shares([OURS, THEIRS], None) == shares(None, {1}) == shares([], {1}) == (None,) * 4
