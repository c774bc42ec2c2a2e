"""MIG from the pick to the report: torch's CUDA build on an instance of a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_gpu_tools.simulated import Machine

MakeMachine = Callable[..., Machine]
Answer = Callable[..., Any]

PROGRAM = """
import contextlib, json, os, sys, tempfile
import lightning.pytorch, torch
sys.modules["matplotlib"] = None  # a report without a picture
from lightning_gpu_tools import FreeMemoryCUDAAccelerator, GPUUtilizationMonitor, list_gpus, load_report
from lightning_gpu_tools.selection import claims, cuda, placement

class LitModel(lightning.pytorch.LightningModule):
    def __init__(self, grows_at):
        super().__init__()
        self.layer, self.grows_at = torch.nn.Linear(1024, 1024), grows_at

    def training_step(self, batch, index):
        if index == self.grows_at:
            torch.empty(2**36, device=self.device)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(grows_at=None, **options):
    folder = tempfile.mkdtemp(dir=os.environ["FOLDER"])
    trainer = lightning.pytorch.Trainer(
        devices=1, max_epochs=1, enable_progress_bar=False, enable_checkpointing=False, logger=False,
        default_root_dir=folder, callbacks=[GPUUtilizationMonitor(interval_s=0.05)], **options)
    with contextlib.suppress(torch.OutOfMemoryError):
        trainer.fit(LitModel(grows_at), torch.utils.data.DataLoader([torch.zeros(1024)] * 200, batch_size=1))
    return load_report(folder)

def show(report, **more):
    (gpu,), (account,) = report.gpus, report.memory
    with claims.read_ledger(claims.directory()) as ledger:
        claimed = [list(claim.uuids) for claim in ledger.claims()]
    print(json.dumps({
        "uuid": gpu.uuid, "name": gpu.name, "total": gpu.memory_total_bytes, "account": account.uuid,
        "mean": gpu.utilization_percent_mean, "unseen": report.unseen, "claimed": claimed, "note": report.gpu_note,
        "instances": [one.uuid for one in list_gpus()[0].mig_instances],
        "contexts": [one.uuid for gpu in list_gpus() for one in gpu.mig_instances or [gpu] if one.processes],
        **more}))
"""


def run(answer: Answer, machine: Machine, code: str, folder: Path) -> dict[str, Any]:
    place = {"LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(folder / "claims"), "FOLDER": str(folder)}
    return answer(machine, f"{PROGRAM}{code}", **place)


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
    make_machine: MakeMachine, answer: Answer, tmp_path: Path
) -> None:
    code = """
instances = [one.uuid for one in list_gpus()[0].mig_instances]
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(instances[1:])  # 1g would be first in this order, and 2g has more memory
started = []
place = placement.place
placement.place = lambda *options: (started.append(cuda.is_initialized()), place(*options))[1]
report = fit(accelerator=FreeMemoryCUDAAccelerator())
assert started == [False], started  # although the mask names instances
assert os.environ["CUDA_VISIBLE_DEVICES"] == instances[1]
show(report)
"""
    machine = make_machine(["h100-80gb", "h100-80gb"], mig={0: (3, 2, 1)})
    check(run(answer, machine, code, tmp_path), 1, "2g.20gb")
