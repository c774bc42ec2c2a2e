"""The monitor and the advisor in a real two-process DDP training on the CPU, and without a line of code."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

Run = Callable[..., "CompletedProcess[str]"]

SCRIPT = """
import sys, time
from pathlib import Path
from lightning.pytorch.loggers import CSVLogger
from trainings import Model, Samples, loader, quiet_trainer
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.1)] if sys.argv[2] == "added" else []
    trainer = quiet_trainer(
        folder, callbacks=callbacks, logger=CSVLogger(folder), devices=int(sys.argv[3]), strategy=sys.argv[4]
    )
    trainer.fit(Model(), loader(Samples(160, time.sleep, 0.004)))
    print(f"rank {trainer.global_rank} done")
"""


ONE_RANK_LOOKS_AND_THE_OTHER_DOES_NOT = """
import os, sys, time
from pathlib import Path
from trainings import Model, Samples, loader, quiet_trainer
from lightning_gpu_tools import GPUUtilizationAdvisor
from lightning_gpu_tools.training.rank_exchange import RankExchange

class Waiting(RankExchange):
    def read(self, turn, patience_s=0.0):
        facts = super().read(turn, patience_s)
        if patience_s:
            print("waited in vain for", self.missed)
        return facts

if __name__ == "__main__":
    import lightning_gpu_tools.trainer.facts as module
    module.RankExchange = Waiting
    advisor = GPUUtilizationAdvisor(min_seconds=1e9 if os.environ.get("LOCAL_RANK") == "1" else 0.1, min_steps=20)
    trainer = quiet_trainer(Path(sys.argv[1]), callbacks=[advisor], devices=2, strategy="ddp")
    trainer.fit(Model(time.sleep, step_s=0.005), loader(Samples(200)))
    print(f"rank {trainer.global_rank} says {advisor.diagnosis.verdict}")
"""


def run_script(
    run_python: Run, tmp_path: Path, *arguments: str, source: str = SCRIPT, **env: str
) -> "CompletedProcess[str]":
    script = tmp_path / "train.py"
    script.write_text(source)
    result = run_python(
        str(script), str(tmp_path), *arguments, env={"PYTHONPATH": str(Path(__file__).parents[1]), **env}
    )
    assert result.returncode == 0, result.stderr
    return result


def test_rank_zero_reports_and_warns_once_for_all(run_python: Run, tmp_path: Path) -> None:
    result = run_script(run_python, tmp_path, "added", "2", "ddp")
    assert sorted(re.findall(r"rank \d done", result.stdout)) == ["rank 0 done", "rank 1 done"]
    assert result.stdout.count("Verdict:") == 1
    assert result.stderr.count("Waiting for data takes") == 1
    (report,) = tmp_path.rglob("gpu_report.json")
    assert json.loads(report.read_text())["settings"]["world_size"] == 2


def test_rank_zero_waits_in_vain_for_nobody_though_each_looks_when_it_likes(run_python: Run, tmp_path: Path) -> None:
    result = run_script(run_python, tmp_path, source=ONE_RANK_LOOKS_AND_THE_OTHER_DOES_NOT)
    assert "rank 0 says healthy" in result.stdout
    assert "rank 1 says too_short" in result.stdout
    assert "waited in vain for []" in result.stdout


def test_it_works_in_spawned_processes(run_python: Run, tmp_path: Path) -> None:
    result = run_script(run_python, tmp_path, "added", "2", "ddp_spawn")
    assert result.stdout.count("Verdict:") == 1
    assert len(list(tmp_path.rglob("gpu_report.json"))) == 1


def test_a_script_that_nobody_edits_gets_both_by_a_variable_also_two_at_once(run_python: Run, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()

    def train(folder: Path) -> "CompletedProcess[str]":
        return run_script(run_python, folder, "not added", "1", "auto", LIGHTNING_GPU_TOOLS="advise")

    with ThreadPoolExecutor() as jobs:
        results = list(jobs.map(train, folders))
    for folder, result in zip(folders, results, strict=True):
        assert result.stdout.count("Verdict:") == 1
        assert result.stderr.count("Waiting for data takes") == 0  # 20 s are needed for a judgement by default
        assert len(list(folder.rglob("gpu_report.json"))) == 1


def test_who_has_a_monitor_of_his_own_gets_no_second_one(run_python: Run, tmp_path: Path) -> None:
    result = run_script(run_python, tmp_path, "added", "1", "auto", LIGHTNING_GPU_TOOLS="advise")
    assert result.stdout.count("Verdict:") == 1
    assert result.stderr.count("Waiting for data takes") == 1  # by the threshold of the user's own advisor
    assert len(list(tmp_path.rglob("gpu_report.json"))) == 1
