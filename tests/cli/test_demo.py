"""The demo, in a process of its own."""

import os
import re
import sys
from pathlib import Path

from rank_processes import run_ranks

from lightning_gpu_tools.cli import main
from lightning_gpu_tools.reports.report import load_report
from lightning_gpu_tools.trainer import demo as demo_training


def demo(folder: Path, rank: int) -> None:
    os.environ["LIGHTNING_GPU_TOOLS_DISABLE"] = "1"
    demo_training.STEPS = 120
    sys.exit(main(["demo", "--folder", str(folder)]))


def test_it_finds_the_slow_loader_and_confirms_the_fix(tmp_path: Path) -> None:
    (result,) = run_ranks(tmp_path, demo, ranks=1)
    assert result.returncode == 0, result.stderr
    verdicts = re.findall(r"^Verdict: (\w+)", result.stdout, re.MULTILINE)
    assert verdicts[0] == "LOW"
    assert len(verdicts) == 2
    assert "Waiting for data takes" in result.stdout
    (workers,) = re.findall(r"The same run with the advised num_workers=(\d+)", result.stdout)
    assert f"DataLoader(..., num_workers={workers}, " in re.sub(r"\s+", " ", result.stdout)
    report = load_report(tmp_path)
    assert report.settings["num_workers"] == int(workers)
    assert report.confirmation is not None
    assert f" after num_workers 0 -> {workers}" in report.confirmation
    assert result.stdout.count("Result:  ") == 1
