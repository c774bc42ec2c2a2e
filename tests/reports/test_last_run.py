"""The memory that a job needs, by the reports that runs have left."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_report import GIB, REPORT, TRAINED
from synthetic import an_error, gpu_run

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.processes import process_id
from lightning_gpu_tools.reports.last_run import claim_sentence, last_need, need_of
from lightning_gpu_tools.reports.report import Report, ReportFile
from lightning_gpu_tools.reports.text import render_text

ACCOUNT = TRAINED.memory[0]
A_RUN = gpu_run({"training_step": 50.0}, 95.0)


def with_memory(**changed: Any) -> Report:
    return replace(TRAINED, memory=(replace(ACCOUNT, **changed),))


def test_it_is_the_peak_with_cudas_own_memory_and_a_margin() -> None:
    assert need_of(TRAINED) == (40 * GIB, 48 * GIB)


@pytest.mark.parametrize(
    ("claimed", "said"),
    [
        (8, "its peak was 40.0 GiB. Other jobs may count on the difference: ask for --min-free 48GiB."),
        (70, "its peak was 40.0 GiB."),
        (80, "its peak was 40.0 GiB: --min-free 48GiB would do."),
    ],
)
def test_a_claim_is_compared_with_the_peak(claimed: int, said: str) -> None:
    report = replace(TRAINED, claimed_bytes=claimed * GIB)
    said = f"The job asked for {claimed:#.3g} GiB on each GPU; {said}"
    assert claim_sentence(report) == said
    assert said in " ".join(render_text(report).split())
    failed = replace(report, outcome="stopped by KeyError at step 812")
    assert "; it used at least 40.0 GiB" in claim_sentence(failed)


@pytest.mark.parametrize(
    ("changed", "peak"),
    [
        ({"peak_reserved_bytes": 59 * GIB}, 60),  # the cache was emptied before the end
        ({"parts_bytes": {**ACCOUNT.parts_bytes, "other_processes": 50 * GIB, "driver": GIB, "unexplained": GIB}}, 40),
        ({"parts_bytes": {"parameters": 39 * GIB}}, 40),  # nothing reports the context: a container
        ({"parts_bytes": {"parameters": 39 * GIB, "context": 2**20}}, 39.3),  # a sample from before the allocation
    ],
)
def test_it_counts_all_that_is_this_jobs_and_nothing_else(changed: dict[str, Any], peak: float) -> None:
    assert need_of(with_memory(**changed))[1] == pytest.approx(1.2 * peak * GIB, rel=1e-9, abs=2)


@pytest.mark.parametrize(("total", "asked", "margin"), [(48, 45.6, 14), (40, 38, 0), (None, 48, 20)])
def test_an_idle_gpu_of_the_same_size_is_enough(tmp_path: Path, total: int | None, asked: float, margin: int) -> None:
    ReportFile(tmp_path).save(with_memory(total_bytes=total and total * GIB))
    min_free_bytes, origin = last_need(str(tmp_path))
    assert min_free_bytes == pytest.approx(asked * GIB, abs=2)
    assert origin.endswith(f"plus {margin}%)")


def test_an_out_of_memory_run_gives_a_lower_bound(tmp_path: Path) -> None:
    diagnosis = diagnose(A_RUN, out_of_memory=an_error(others=(GpuProcess(9, 12 * GIB),), allocated=8 * GIB))
    (needs, *_) = [one.evidence["needed_bytes"] for one in diagnosis.findings]
    assert 8.1 * GIB < float(needs) < 24 * GIB
    outcome = "out of memory in forward at step 3"
    ReportFile(tmp_path).save(replace(REPORT, outcome=outcome, diagnosis=diagnosis, memory=()))
    min_free_bytes, origin = last_need(str(tmp_path))
    assert min_free_bytes == pytest.approx(1.2 * float(needs), abs=1)
    assert "(at least " in origin
    assert f"on 2026-01-02, {outcome}, {tmp_path}" in origin
    diagnosis = diagnose(A_RUN, out_of_memory=an_error(allocated=23 * GIB))  # an idle one of 24 does not have that
    _, least_bytes = need_of(replace(REPORT, diagnosis=diagnosis, memory=()))
    assert 23 * GIB < least_bytes == diagnosis.findings[0].evidence["needed_bytes"]


def save(folder: Path, report: Report, age: int) -> None:
    file = ReportFile(folder).save(report)
    os.utime(file, (1e9 - age,) * 2)


def of_gib(size: int, **changed: Any) -> Report:
    return replace(with_memory(parts_bytes={"parameters": (size - 1) * GIB, "context": GIB}), **changed)


def peak_in(folder: Path) -> int:
    return round(last_need(str(folder))[0] / 1.2 / GIB)


ON_CPU = replace(TRAINED, memory=(), settings={**TRAINED.settings, "device": "cpu"})
RUNS = {"outcome": "running", "process": process_id(os.getpid())}
JUST_BEGUN = replace(TRAINED, steps=0)


def test_the_newest_finished_gpu_run_is_the_last(tmp_path: Path) -> None:
    save(tmp_path / "lightning_logs" / "version_0", of_gib(10), 60)
    save(tmp_path / "lightning_logs" / "version_1", of_gib(20, outcome="stopped by KeyError at step 9"), 50)
    save(tmp_path / "lightning_logs" / "version_2", ON_CPU, 40)
    save(tmp_path / "logs" / "name" / "version_3", JUST_BEGUN, 30)
    assert peak_in(tmp_path) == 20
    save(tmp_path / "lightning_logs" / "version_4", of_gib(30, **RUNS), 20)  # the first of several jobs at once
    assert peak_in(tmp_path) == 20
    assert peak_in(tmp_path / "lightning_logs" / "version_0") == 10
    save(tmp_path, of_gib(40), 10)
    assert peak_in(tmp_path) == 40


def test_the_last_run_of_the_same_script_is_preferred(tmp_path: Path) -> None:
    for age, (size, script) in enumerate([(10, "other.py"), (20, "train.py"), (30, "train.py"), (40, None)]):
        save(tmp_path / f"version_{age}", of_gib(size, settings={**TRAINED.settings, "script": script}), age)
    for command, size in (
        (["python", "src/train.py", "--lr", "1"], 20),
        (["other.py"], 10),
        (["python", "new.py"], 10),
        ([], 10),
    ):
        min_free_bytes, origin = last_need(str(tmp_path), command)
        assert round(min_free_bytes / 1.2 / GIB) == size
        script = "train" if size == 20 else "other"
        assert f"GiB (peak {size}.0 GiB of LitModel in {script}.py on 2026-01-02, {tmp_path}" in origin
        assert origin.endswith("gpu_report.json, plus 20%)")


def test_a_replaced_run_is_still_known(tmp_path: Path) -> None:
    save(tmp_path / "gpu_report", of_gib(20), 20)
    save(tmp_path / "gpu_report", of_gib(30, **RUNS), 10)
    assert peak_in(tmp_path) == 20
    assert "gpu_report/gpu_report.previous.json" in last_need(str(tmp_path))[1]
    save(tmp_path / "gpu_report", of_gib(40), 0)
    assert peak_in(tmp_path) == 40


def test_without_any_the_error_says_where_and_what_to_do(tmp_path: Path) -> None:
    says = rf"min_free=last: no gpu_report\.json in {tmp_path} or up to three folders below it includes the "
    with pytest.raises(
        ReportError, match=says + r"memory of a run on a GPU\. Run .* with GPUUtilizationMonitor, .* 8GiB\.$"
    ):
        last_need(str(tmp_path))


def test_one_that_cannot_be_read_does_not_count(tmp_path: Path) -> None:
    save(tmp_path / "version_0", TRAINED, 20)
    (tmp_path / "gpu_report.json").write_text("{")
    assert peak_in(tmp_path) == 40
