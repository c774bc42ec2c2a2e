"""Commands for shell scripts: they load no heavy package, so they start almost as fast as Python."""

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from fake_driver import Driver, gpu, process
from sample_report import TRAINED

from lightning_gpu_tools.reports.report import ReportFile

Run = Callable[..., "CompletedProcess[str]"]
HEAVY = {"torch", "lightning", "pytorch_lightning", "rich", "numpy"}


@pytest.mark.usefixtures("claims_dir", "last")
@pytest.mark.parametrize(
    ("command", "also_not"),
    [
        ("pick", {"psutil", "traceback"}),
        ("explain data_loading", {"pynvml"}),
        ("checkpoint inspect last.ckpt", {"pynvml"}),
        ("report", {"pynvml"}),
        ("gpus --json", set()),
    ],
)
def test_a_light_command_loads_no_heavy_package(
    driver: Driver, run_python: Run, tmp_path: Path, command: str, also_not: set[str]
) -> None:
    driver.gpus = [gpu(processes=[process()])]
    ReportFile(tmp_path).save(TRAINED)
    answer = run_python("-X", "importtime", "-m", "lightning_gpu_tools", *command.split(), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in answer.stderr.splitlines()}
    assert "lightning_gpu_tools" in loaded
    assert not loaded & (HEAVY | also_not)
    # Importing dataclasses imports inspect, which takes a tenth of a pick's time. Python 3.14's argparse does, too.
    assert command != "pick" or not {"dataclasses", "inspect"} & loaded or sys.version_info >= (3, 14)


@pytest.mark.parametrize(
    ("command", "wrong", "near"),
    [("gpuss", "invalid choice: 'gpuss'", "gpus"), ("report --agianst old", "arguments: --agianst", "--against")],
)
def test_a_misspelled_word_gets_the_nearest_one(call: Run, command: str, wrong: str, near: str) -> None:
    answer = call(*command.split())
    assert (answer.returncode, wrong in answer.stderr) == (2, True)
    assert answer.stderr.endswith(f". Did you mean {near}?\n")
