"""The contents of the picture and the page, for jobs of every size."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from sample_report import GIB, REPORT
from simulated_report import DAY_S, simulated_report

from lightning_gpu_tools.gpus.metrics import GpuSummary
from lightning_gpu_tools.reports.charts import label_every, phase_bands, rows, rows_title, time_unit
from lightning_gpu_tools.training.timeline import Series


def gpu(place: int, percent: float, *, node: int = 0) -> GpuSummary:
    busy = Series(0.0, 4.14, [percent, None, *[percent] * 8])
    memory = Series(0.0, 41.4, [(20 + place) * GIB])
    return GpuSummary(
        index=place,
        node=node,
        uuid=f"GPU-{node}-{place}",
        memory_total_bytes=80 * GIB,
        timelines={"utilization_percent": busy, "memory_used_bytes": memory},
    )


def test_up_to_32_gpus_have_a_row_each() -> None:
    report = replace(REPORT, gpus=tuple(gpu(i % 8, 90.0 - i, node=i // 8) for i in range(32)))
    shown = rows(report, "utilization_percent")
    assert [row.label for row in shown[:9:4]] == ["GPU 0", "GPU 4", "node 1 GPU 0"]
    assert [row.strips[0].percent[0] for row in shown] == [90.0 - i for i in range(32)]
    assert shown[0].strips[0].percent[60] is None  # not reported is not 0
    assert rows_title(shown, "utilization_percent").endswith("least busy of all: node 3 GPU 7, mean 59 %")


def test_more_gpus_have_a_row_a_node_with_its_extreme() -> None:
    report = replace(REPORT, gpus=tuple(gpu(i % 8, 50.0 if i == 19 else 90.0, node=i // 8) for i in range(40)))
    busy, memory = rows(report, "utilization_percent"), rows(report, "memory_used_bytes")
    assert [row.label for row in busy] == [f"node {node}" for node in range(5)]
    assert [row.strips[0].percent[0] for row in busy] == [90, 90, 85, 90, 90]
    assert (busy[2].gpu.index, busy[2].strips[1].percent[0]) == (3, 50)
    assert {row.gpu.index for row in memory} == {7}
    assert memory[0].strips[0].percent[0] == pytest.approx(100 * 23.5 / 80)
    assert "fullest of all: GPU 7, mean 34 %" in rows_title(memory, "memory_used_bytes")


def test_many_gpus_of_one_node_keep_their_rows() -> None:
    slices = tuple(gpu(i, 50.0) for i in range(112))  # 16 GPUs in 7 slices each
    assert len(rows(replace(REPORT, gpus=slices), "utilization_percent")) == 112


def test_a_gpu_of_which_nothing_is_known_has_no_row() -> None:
    silent = {"utilization_percent": Series(0.0, 1.0, [None, None])}
    report = replace(
        REPORT,
        gpus=(replace(gpu(0, 50.0), timelines=silent), replace(gpu(2, 50.0), memory_total_bytes=None), gpu(1, 50.0)),
    )
    assert [row.label for row in rows(report, "memory_used_bytes")] == ["GPU 1"]
    assert [row.label for row in rows(report, "utilization_percent")] == ["GPU 2", "GPU 1"]


@pytest.mark.parametrize(
    ("seconds", "name"),
    [(10, "seconds"), (180, "minutes"), (10_799, "minutes"), (DAY_S, "hours"), (30 * DAY_S, "days")],
)
def test_a_time_axis_has_short_numbers(seconds: float, name: str) -> None:
    unit = time_unit(seconds)
    assert unit.name == name
    assert 3 <= seconds / unit.seconds < 200


def test_labels_of_rows_never_overlap() -> None:
    assert [label_every(count, 25) for count in (1, 25, 41, 42, 128, 1000)] == [1, 1, 1, 2, 4, 24]


def test_bands_stack_to_the_whole_time() -> None:
    bands = phase_bands(simulated_report(gpus=1))
    assert set(bands[0].bottom) == {0.0}
    assert bands[-1].top == pytest.approx([100.0] * len(bands[0].top))
    assert all(below.top == above.bottom for below, above in itertools.pairwise(bands))
    assert next(band for band in bands if band.label == "training step").amount == "68 %"


@pytest.mark.parametrize(
    ("nodes", "gpus", "seconds", "epochs"),
    [(1, 0, 10, 1), (1, 4, DAY_S, 10), (1, 8, 30 * DAY_S, 500), (128, 2, DAY_S, 500)],
)
def test_a_picture_has_a_bounded_size(tmp_path: Path, nodes: int, gpus: int, seconds: float, epochs: int) -> None:
    pytest.importorskip("matplotlib")
    from lightning_gpu_tools.reports.plot import save_plot

    picture = save_plot(simulated_report(nodes=nodes, gpus=gpus, seconds=seconds, epochs=epochs), tmp_path).read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert width == 1440
    assert 250 < height < 3000
    assert len(picture) < 1e6
