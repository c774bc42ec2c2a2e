"""MIG from the pick to the report: torch's CUDA build on an instance of a simulated GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_gpu_tools.simulated import Machine

TRAIN = """
import json, os, sys
import lightning.pytorch, torch
sys.modules["matplotlib"] = None  # a report without a picture
from lightning_gpu_tools import FreeMemoryCUDAAccelerator, GPUUtilizationMonitor, list_gpus, load_report
from lightning_gpu_tools.selection import claims, cuda, placement

class LitModel(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

instances = [one.uuid for one in list_gpus()[0].mig_instances]
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(instances[1:])  # 1g would be first in this order, and 2g has more memory
started = []
place = placement.place
placement.place = lambda *options: (started.append(cuda.is_initialized()), place(*options))[1]
folder = os.environ["FOLDER"]
trainer = lightning.pytorch.Trainer(
    accelerator=FreeMemoryCUDAAccelerator(), devices=1, max_epochs=1, enable_progress_bar=False, logger=False,
    enable_checkpointing=False, default_root_dir=folder, callbacks=[GPUUtilizationMonitor(interval_s=0.05)])
trainer.fit(LitModel(), torch.utils.data.DataLoader([torch.zeros(1024)] * 200, batch_size=1))
assert started == [False], started  # although the mask names instances
assert os.environ["CUDA_VISIBLE_DEVICES"] == instances[1]
report = load_report(folder)
(gpu,), (account,) = report.gpus, report.memory
with claims.read_ledger(claims.directory()) as ledger:
    claimed = [list(claim.uuids) for claim in ledger.claims()]
print(json.dumps({
    "picked": instances[1], "uuid": gpu.uuid, "name": gpu.name, "account": account.uuid, "claimed": claimed,
    "contexts": [one.uuid for gpu in list_gpus() for one in gpu.mig_instances or [gpu] if one.processes],
    "total": gpu.memory_total_bytes, "mean": gpu.utilization_percent_mean, "unseen": report.unseen,
    "note": report.gpu_note}))
"""


def test_an_instance_is_picked_claimed_used_and_reported(
    make_machine: Callable[..., Machine], answer: Callable[..., Any], tmp_path: Path
) -> None:
    machine = make_machine(["h100-80gb", "h100-80gb"], mig={0: (3, 2, 1)})
    place = {"LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(tmp_path / "claims"), "FOLDER": str(tmp_path)}
    seen = answer(machine, TRAIN, **place)
    picked = seen["picked"]
    assert (seen["uuid"], seen["account"], seen["claimed"], seen["contexts"]) == (picked, picked, [[picked]], [picked])
    assert seen["name"] == "NVIDIA H100 80GB HBM3 MIG 2g.20gb"
    assert seen["total"] < 48 * 2**30
    assert seen["mean"] is not None
    assert seen["note"] is None
    assert not seen["unseen"]
