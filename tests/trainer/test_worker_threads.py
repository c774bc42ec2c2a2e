"""Thread pools of libraries inside a loader's workers: how they are found, and that the advice ends them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MAX_OTHERS_CORES = 0.3  # from there on, other programs decide how many threads can run
TRAIN = """
import importlib, json, os, re, sys, time
sys.path.append("../benchmarks")  # the folder of the script is tests/
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import cv2, numpy, torch
from trainings import Model, Samples, loader, quiet_trainer
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report

class Photos(Samples):
    def __getitem__(self, index):
        cv2.GaussianBlur(numpy.zeros((300, 300, 3), numpy.uint8), (31, 31), 0)
        numpy.ones((200, 200)) @ numpy.ones((200, 200))
        return super().__getitem__(index)

def train(calls):
    def one_thread(worker):
        for call in calls:
            exec(f"import {call.partition('.')[0]}; {call}")

    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0, min_steps=20)]
    workers = loader(Photos(100_000), num_workers=2, worker_init_fn=one_thread)
    quiet_trainer(sys.argv[1], callbacks=callbacks, max_steps=60).fit(Model(time.sleep, 0.001), workers)
    report = load_report(sys.argv[1])
    found = {one.cause: [one.advice, one.evidence] for one in report.diagnosis.findings}
    print("FOUND", json.dumps({**found, "others_cores": report.others_cores}), flush=True)
    return found

torch.set_num_threads(1)
advice, _ = train([])["data_loading"]
train(re.findall(r"[\\w.]+\\(\\d\\)", advice))
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waits")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no thread pools")
@pytest.mark.follows("{} keeps {} threads runnable, on {}. Limit libraries to one thread")
def test_thread_pools_in_workers_are_named_and_end_as_advised(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for needed in ("cv2", "threadpoolctl"):
        pytest.importorskip(needed)
    environ: dict[str, str | None] = {"OMP_NUM_THREADS": None}
    answer = run_python("-c", TRAIN, str(tmp_path), env=environ, cwd=Path(__file__).parents[1])
    found = [json.loads(line[6:]) for line in answer.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, answer.stderr
    try:
        check(*(one["data_loading"] for one in found))
    except (AssertionError, KeyError):
        if any((one["others_cores"] or 0) > MAX_OTHERS_CORES for one in found):
            pytest.skip(f"other programs have the cores: {found}")
        raise


def check(before: tuple[str, dict[str, Any]], after: tuple[str, dict[str, Any]]) -> None:
    advice, evidence = before
    assert evidence["kind"] == "cpu_bound"
    runnable = evidence["workers_runnable_threads"]
    assert "threads runnable, on 2 cores. Limit libraries to one thread in worker_init_fn: " in advice
    assert "cv2.setNumThreads(0)" in advice
    advice, evidence = after
    assert evidence["workers_runnable_threads"] < runnable
    assert "worker_init_fn" not in advice
