"""Ray Train with this package's callbacks and checkpoint plugin, and a Ray cluster on GPUs that ``run`` has claimed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainings import Model

from lightning_gpu_tools import load_weights

TESTS = Path(__file__).parents[1]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install 'ray[train]')"
)

TRAIN = """
import json, sys
from pathlib import Path
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

folder = Path(sys.argv[1])

def train(_):
    import time
    from lightning.pytorch import Trainer
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
    from trainings import Model, Samples, loader
    from lightning_gpu_tools import (
        GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder, PortableCheckpointIO
    )
    finder = NumWorkersFinder(budget_s=2.0)
    trainer = prepare_trainer(Trainer(
        accelerator="cpu", devices="auto", strategy=RayDDPStrategy(), max_epochs=2, limit_val_batches=0,
        plugins=[RayLightningEnvironment(), PortableCheckpointIO()],
        callbacks=[
            GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.1, min_steps=10), finder,
            RayTrainReportCallback(),
        ],
        default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    ))
    trainer.fit(Model(), loader(Samples(120, time.sleep, 0.01)))
    if trainer.is_global_zero:
        print("FINDER", finder.result)

ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[2])
run = RunConfig(storage_path=str(folder / "storage"), name="run")
result = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()
print("CHECKPOINT", result.checkpoint.path)
"""


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Ray's sockets are in it, and a socket's path has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.timeout(300)  # every worker imports Ray, torch and Lightning
def test_callbacks_checkpoints_and_ranks_work_under_ray_train(
    run_python: RunPython, tmp_path: Path, short_folder: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    answer = run_python(str(tmp_path / "train.py"), str(tmp_path), short_folder, env={"PYTHONPATH": path}, timeout=280)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    report = json.loads((tmp_path / "gpu_report" / "gpu_report.json").read_text())
    assert (report["outcome"], report["steps"], len(report["ranks"])) == ("completed", 120, 2)
    assert report["diagnosis"]["findings"]
    assert any("RayTrainReportCallback" in phase for phase in report["phase_s"])
    assert "FINDER LoaderResult" in answer.stdout
    folder = re.search(r"CHECKPOINT (.*)", answer.stdout)
    assert folder is not None
    assert load_weights(Model(), Path(folder[1], "checkpoint.ckpt"))
