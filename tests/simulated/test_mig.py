"""MIG from the pick to the report: torch's CUDA build on an instance of a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gpu_tools.simulated import Machine

MakeMachine = Callable[..., Machine]
Answer = Callable[..., Any]

MODEL = """
import json, os, sys
import lightning.pytorch, torch
sys.modules["matplotlib"] = sys.modules["bokeh"] = None  # a report without a picture
from lightning_gpu_tools import FreeMemoryCUDAAccelerator, GPUUtilizationMonitor, list_gpus, load_report
from lightning_gpu_tools.selection import claims, cuda, placement

class LitModel(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)

    def training_step(self, batch, index):
        if index == getattr(self, "grows_at", None):
            torch.empty(2**36, device=self.device)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(model=None, folder=".", **options):
    trainer = lightning.pytorch.Trainer(
        max_epochs=1, enable_progress_bar=False, enable_checkpointing=False, logger=False, default_root_dir=folder,
        callbacks=[GPUUtilizationMonitor(interval_s=0.05)], **options)
    trainer.fit(model or LitModel(), torch.utils.data.DataLoader([torch.zeros(1024)] * 200, batch_size=1))
    return load_report(folder)

def claimed():
    with claims.read_ledger(claims.directory()) as ledger:
        return [list(claim.uuids) for claim in ledger.claims()]
"""

REPORTED = """
(gpu,) = report.gpus
(account,) = report.memory
print(json.dumps({"uuid": gpu.uuid, "name": gpu.name, "total": gpu.memory_total_bytes, "account": account.uuid,
    "mean": gpu.utilization_percent_mean, "unseen": report.unseen, "claimed": claimed(), "note": report.gpu_note,
    "instances": [one.uuid for one in list_gpus()[0].mig_instances],
    "contexts": [one.uuid for gpu in list_gpus() for one in gpu.mig_instances or [gpu] if one.processes]}))
"""


def place(tmp_path: Any) -> dict[str, str]:
    return {"LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(tmp_path / "claims"), "FOLDER": str(tmp_path / "report")}


def check(seen: dict[str, Any], number: int, name: str) -> None:
    uuid = seen["instances"][number]
    assert (seen["uuid"], seen["name"], seen["account"]) == (uuid, f"NVIDIA H100 80GB HBM3 MIG {name}", uuid)
    assert seen["total"] < 48 * 2**30
    assert seen["mean"] is not None
    assert seen["claimed"] == [[uuid]]
    assert seen["contexts"] == [uuid]
    assert seen["note"] is None
    (unseen,) = seen["unseen"]
    assert unseen.startswith(f"Xid events of {uuid}")


def test_an_instance_is_picked_claimed_used_and_reported(
    make_machine: MakeMachine, answer: Answer, tmp_path: Any
) -> None:
    machine = make_machine(["h100-80gb", "h100-80gb"], mig={0: (3, 2, 1)})
    code = """
instances = [one.uuid for one in list_gpus()[0].mig_instances]
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(instances[1:])  # 1g would be first in this order, and 2g has more memory
started = []
place = placement.place
placement.place = lambda *options: (started.append(cuda.is_initialized()), place(*options))[1]
report = fit(accelerator=FreeMemoryCUDAAccelerator(), devices=1, folder=os.environ["FOLDER"])
assert started == [False], started  # although the mask names instances
assert os.environ["CUDA_VISIBLE_DEVICES"] == instances[1]
"""
    check(answer(machine, f"{MODEL}{code}{REPORTED}", **place(tmp_path)), 1, "2g.20gb")


def test_the_instance_on_which_lightning_has_started_cuda_is_used_and_runs_out_of_memory(
    make_machine: MakeMachine, answer: Answer, tmp_path: Any
) -> None:
    machine = make_machine(["h100-80gb"], mig={0: (3, 2, 1)})
    code = """
import lightning_gpu_tools.strategies
os.environ["CUDA_VISIBLE_DEVICES"] = list_gpus()[0].mig_instances[2].uuid[:20]
report = fit(strategy="ddp_free_memory", devices=1, folder=os.environ["FOLDER"])
model = LitModel()
model.grows_at = 20
try:
    fit(model, strategy="ddp_free_memory", devices=1, folder=os.environ["FOLDER"] + "2")
except torch.OutOfMemoryError:
    full = load_report(os.environ["FOLDER"] + "2")
"""
    ending = REPORTED.replace(
        "print(json.dumps({",
        "print(json.dumps({'full': [full.diagnosis.verdict, full.gpus[0].uuid, str(full.diagnosis.findings)], ",
    )
    seen = answer(machine, f"{MODEL}{code}{ending}", **place(tmp_path))
    check(seen, 2, "1g.10gb")
    verdict, uuid, findings = seen["full"]
    assert (verdict, uuid) == ("out_of_memory", seen["uuid"])
    assert "'total_bytes': 101" in findings  # of 10 GB
