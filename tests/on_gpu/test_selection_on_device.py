"""Selection on a real driver and a real CUDA, for facts that the tests on the fake driver take for granted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("claims_dir")


BEGIN = """
import json, os, torch
from lightning_gpu_tools import FreeMemoryCUDAAccelerator, list_gpus, select_gpus
from lightning_gpu_tools.errors import CudaAlreadyInitializedError
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.selection import cuda
def uuid(device): return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
"""


def answer(code: str) -> Any:
    """Return the JSON that a new process prints: CUDA can be started only once in each."""
    # Lightning sets this in the process that imports it; then torch asks NVML for GPUs, and CUDA does not start.
    environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    child = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, env=environ)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def test_after_apply_cuda_shows_exactly_the_gpus_picked_in_their_order() -> None:
    seen = answer("""
selection = select_gpus(len([gpu for gpu in list_gpus() if not gpu.error and not gpu.mig_mode]) or 1)
selection.apply()
shown = [uuid(device) for device in range(torch.cuda.device_count())]
print(json.dumps([list(selection.uuids), shown, torch.zeros(1, device="cuda").item()]))
""")
    assert seen[0] == seen[1]


def test_the_code_in_torchs_files_is_what_torch_reports() -> None:
    build = answer("""
too_old = GpuReading(index=0, compute_capability=(3, 7))
print(json.dumps([torch.__version__, torch.cuda.get_arch_list(), *cuda.installed_torch([too_old])]))
""")
    assert build[:2] == build[2:]


def test_cuda_is_seen_to_have_started_without_torch() -> None:
    before, after, too_late = answer("""
before = cuda.is_initialized()
selection = select_gpus()
torch.cuda.is_available()
try:
    selection.apply()
    too_late = ""
except CudaAlreadyInitializedError as error:
    too_late = str(error)
print(json.dumps([before, cuda.is_initialized(), too_late]))
""")
    assert (before, after) == (False, True)
    assert too_late


TRAIN = """
import lightning.pytorch, torch
from lightning_gpu_tools import GPUUtilizationMonitor

class LitModel(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4096, 4096)  # 64 MiB

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

trainer = lightning.pytorch.Trainer(
    accelerator="gpu", devices=1, max_epochs=1, enable_progress_bar=False, enable_checkpointing=False, logger=False,
    callbacks=[GPUUtilizationMonitor(interval_s=0.05)],
)
trainer.fit(LitModel(), torch.utils.data.DataLoader([torch.zeros(4096)] * 80, batch_size=4))
print(torch.cuda.max_memory_reserved())
"""


def test_the_next_job_gets_what_the_last_one_needed(tmp_path: Path, claims_dir: Path, run_cli: Any) -> None:
    first = run_cli("run", "--", sys.executable, "-c", TRAIN, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    peak = int(first.stdout.splitlines()[-1])
    assert peak > 4 * 2**26  # weights, gradients and two states
    second = run_cli("run", "--min-free", "last", "--", "sh", "-c", f"cat {claims_dir}/*.json", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "of LitModel on 20" in second.stderr
    claimed = json.loads(second.stdout)["memory_bytes"]
    assert 1.2 * (peak + 100 * 2**20) < claimed < 1.2 * (peak + 2**31)  # with a context


@pytest.mark.follows("Other jobs may count on the difference: ask for {}.", "{}: {} would do.")
@pytest.mark.parametrize("asked", ["64MiB", "12GiB"])
def test_what_the_report_says_to_ask_for_is_enough(asked: str, tmp_path: Path, run_cli: Any) -> None:
    def sentence(*options: str) -> str:
        done = run_cli("run", *options, "--", sys.executable, "-c", TRAIN, cwd=tmp_path)
        text = " ".join(done.stdout.split())
        (found,) = re.findall(r"The job asked .*? peak was [\d.]+ .iB(?:\. Other .*?B\.|: .*? would do\.|\.)", text)
        return str(found)

    first = sentence("--min-free", asked)
    shown = {"64MiB": "64.0 MiB", "12GiB": "12.0 GiB"}[asked]
    assert first.startswith(f"The job asked for {shown} on each GPU; its peak was "), first
    (advised,) = re.findall(r"--min-free [\d.]+GiB", first)
    assert "--min-free" not in sentence(*advised.split())


@pytest.mark.parametrize(
    "options",
    [
        "accelerator=FreeMemoryCUDAAccelerator(min_free='1GiB')",
        *(f"strategy={name!r}" for name in ("ddp_free_memory", "fsdp_free_memory")),
    ],
)
def test_a_trainer_trains_on_the_gpu_that_was_picked(options: str, tmp_path: Path) -> None:
    picked, used, again, steps = answer(f"""
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
class Model(BoringModel):
    def configure_optimizers(self):  # FSDP makes new parameters, so that the optimizer has to come after it
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)
def fit():
    global trainer
    trainer = Trainer({options}, devices=1, max_steps=2, limit_val_batches=0, logger=False,
                      enable_checkpointing=False, default_root_dir={str(tmp_path)!r}, enable_progress_bar=False)
    trainer.fit(Model())
    return uuid(trainer.strategy.root_device)
used = fit()
picked = os.environ.get("CUDA_VISIBLE_DEVICES", used)  # one GPU needs no mask
print(json.dumps([picked, used, fit(), trainer.global_step]))
""")
    assert picked == used == again
    assert steps == 2
