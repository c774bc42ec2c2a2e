"""A process without what only Linux has, as on a laptop on which a script is tried out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
for module, name in ((os, "memfd_create"), (os, "sched_getaffinity"), (signal, "SIGRTMAX"), (signal, "SIGRTMIN")):
    delattr(module, name)
is_there = os.path.isdir
os.path.isdir = lambda path: not str(path).startswith("/proc") and is_there(path)

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_weights

trainer = Trainer(max_epochs=1, callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()])
model = BoringModel()
trainer.fit(model)
trainer.save_checkpoint("last.ckpt")
print(load_weights(model, "last.ckpt"))
"""


def test_a_training_is_measured_and_its_checkpoint_loads(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "internal error" not in ended.stderr
    assert "Verdict:" in ended.stdout + ended.stderr
    assert "loaded 2 weights" in ended.stdout
