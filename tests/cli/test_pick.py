"""``pick`` as a shell script sees it: one line or nothing, and an exit code."""

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_driver import Driver, gpu
from sample_report import TRAINED

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.reports.report import ReportFile

pytestmark = pytest.mark.usefixtures("claims_dir")
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def pick(call: RunCli) -> RunCli:
    return functools.partial(call, "pick")


def test_the_answer_is_one_line_of_uuids_and_nothing_else(driver: Driver, run_cli: RunCli) -> None:
    driver.gpus = [gpu(memory_free="10GiB"), gpu(memory_free="30GiB"), gpu(memory_free="20GiB")]
    answer = run_cli("pick", "-n", "2")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == f"{driver.gpus[1].uuid},{driver.gpus[2].uuid}\n"
    with select_gpus(exclusive=True):  # whose claim it respects, and it takes none
        assert run_cli("pick").stdout == run_cli("pick").stdout == f"{driver.gpus[2].uuid}\n"


def test_json_has_the_readings(driver: Driver, pick: RunCli) -> None:
    driver.gpus = [gpu(memory_free="10GiB", utilization=None), gpu(memory_free="9GiB")]
    answer = json.loads(pick("-n", "2", "--format", "json").stdout)
    assert answer["uuids"] == [driver.gpus[1].uuid, driver.gpus[0].uuid]
    assert answer["cuda_visible_devices"] == ",".join(answer["uuids"])
    assert [entry["memory_free_bytes"] for entry in answer["gpus"]] == [9 * 2**30, 10 * 2**30]
    assert answer["gpus"][1]["utilization_percent"] is None
    assert answer["min_free_bytes"] is None
    assert json.loads(pick("--min-free", "8GiB", "--format", "json").stdout)["min_free_bytes"] == 8 * 2**30


def test_last_asks_for_what_the_last_run_needed(
    driver: Driver, pick: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.gpus = [gpu(memory_free="47GiB"), gpu(memory_free="49GiB", utilization=90)]
    ReportFile(tmp_path / "lightning_logs" / "version_3").save(TRAINED)
    monkeypatch.chdir(tmp_path)
    origin = (
        "lightning-gpu-tools: min_free=last: 48.0 GiB (peak 40.0 GiB of LitModel on 2026-01-02, "
        "lightning_logs/version_3/gpu_report.json, plus 20%)\n"
    )
    answer = pick("--min-free", "last")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"{driver.gpus[1].uuid}\n", origin)
    assert json.loads(pick("--min-free", "last", "--format", "json").stdout)["min_free_bytes"] == 48 * 2**30
    answer = pick("-n", "2", "--min-free", "last")
    assert (answer.returncode, answer.stdout) == (3, "")
    assert answer.stderr.startswith(origin)
    assert "47.0 GiB free, asked for 48.0 GiB" in answer.stderr


def test_too_few_gpus_give_reasons_and_exit_code_3(driver: Driver, pick: RunCli) -> None:
    driver.gpus = [gpu(utilization=97, pci=(0, 64, 0)), gpu(lost=True), gpu(memory_free="4GiB", pci=(0, 16, 0))]
    answer = pick("-n", "2", "--min-free", "8GiB", "--max-utilization", "50%", "--format", "json")
    assert (answer.returncode, answer.stdout) == (3, "")
    lines = answer.stderr.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("lightning-gpu-tools: Asked for 2 GPUs, but 0 of 3 visible GPUs can be used.")
    assert "GPU 0" in lines[1]
    assert "4.00 GiB free, asked for 8.00 GiB" in lines[1]
    assert "fallen off the bus" in lines[2]
    assert "97% busy, asked for at most 50%" in lines[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], "count must be an integer of at least 1, got 0"),
        (["--min-free", "8 bananas"], '"8GiB" or "500MB", got \'8 bananas\''),
        (["--wait", "soon"], "got 'soon'"),
    ],
)
def test_wrong_usage_quotes_the_value_and_has_exit_code_2(
    driver: Driver, pick: RunCli, arguments: list[str], words: str
) -> None:
    answer = pick(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert words in answer.stderr
    assert driver.calls() == []


@pytest.mark.parametrize("arguments", [["pick", "-n", "2"], ["run", "-n", "2", "--", "true"]])
def test_a_selection_opens_and_reads_the_driver_once(driver: Driver, run_cli: RunCli, arguments: list[str]) -> None:
    driver.gpus = [gpu() for _ in range(3)]
    assert run_cli(*arguments, env={"LIGHTNING_GPU_TOOLS_JOB": ""}).returncode == 0
    assert driver.stays_open()
    assert [call.function for call in driver.calls()].count("nvmlDeviceGetMemoryInfo") == 3
