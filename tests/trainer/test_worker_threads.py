"""Thread pools of libraries inside a loader's workers: how they are found, and that the advice ends them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
import importlib, json, os, sys, time
sys.path.append("../benchmarks")  # the folder of the script is tests/
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import numpy, torch
from trainings import Model, Samples, loader, quiet_trainer
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report

class Photos(Samples):
    def __getitem__(self, index):
        numpy.ones((500, 500)) @ numpy.ones((500, 500))
        return super().__getitem__(index)

def one_thread(worker):
    for call in {calls!r}:
        exec(f"import {{call.partition('.')[0]}}; {{call}}")

torch.set_num_threads(1)
callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0, min_steps=20)]
workers = loader(Photos(100_000), num_workers=2, worker_init_fn=one_thread)
trainer = quiet_trainer({folder!r}, callbacks=callbacks, max_steps=70)
trainer.fit(Model(time.sleep, 0.001), workers)
findings = load_report({folder!r}).diagnosis.findings
found = {{one.cause: [one.advice, one.evidence] for one in findings}}
print("FOUND", json.dumps(found))
"""
CALL = re.compile(r"[\w.]+\(\d\)")


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waits")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no thread pools")
@pytest.mark.follows("{} keeps {} threads runnable, on {}. Limit libraries to one thread")
def test_thread_pools_in_workers_are_named_and_end_as_advised(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    pytest.importorskip("threadpoolctl")

    def train(*calls: str) -> Any:
        script = TRAIN.format(folder=str(tmp_path), calls=calls)
        answer = run_python("-c", script, env={"OMP_NUM_THREADS": None}, cwd=Path(__file__).parents[1])
        lines = [line for line in answer.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, answer.stderr
        found = json.loads(lines[0].removeprefix("FOUND "))
        if "data_loading" not in found and "cpu_contention" in found:
            pytest.skip(f"other programs have the cores: {found}")
        return found["data_loading"]

    advice, evidence = train()
    assert evidence["kind"] == "cpu_bound"
    assert evidence["workers_runnable_threads"] > 1.5
    assert "threads runnable, on 2 cores. Limit libraries to one thread in worker_init_fn: " in advice
    calls = CALL.findall(advice)
    advice, evidence = train(*calls)
    assert evidence["workers_runnable_threads"] < 1.5
    assert "worker_init_fn" not in advice
