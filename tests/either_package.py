"""A program that imports one of Lightning's packages after this one, as sorted imports do, and once it is told to.

``python either_package.py FOLDER`` prints what became of everything, as JSON.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_gpu_tools import FreeMemoryCUDAAccelerator, GPUUtilizationMonitor, PortableCheckpointIO, load_report
from lightning_gpu_tools.strategies import FreeMemoryDDPStrategy


class MyMonitor(GPUUtilizationMonitor):
    """A user's own, and defined before there is a Trainer."""


class MyStrategy(FreeMemoryDDPStrategy):
    def __init__(self, mine: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.mine = mine


def refusal(make: Any) -> str:
    try:
        make()
    except ImportError as error:
        return str(error)
    return ""


refusals = [refusal(FreeMemoryCUDAAccelerator), refusal(GPUUtilizationMonitor)]
(package,) = re.findall(r"Import lightning or (\w+) before", refusals[1])
plugin, strategy = PortableCheckpointIO(), MyStrategy(mine=7, find_unused_parameters=False)
pl: Any = importlib.import_module(package)
monitor, accelerator = MyMonitor(), FreeMemoryCUDAAccelerator()
folder = Path(sys.argv[1])


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)  # type: ignore[arg-type]


def train() -> dict[str, Any]:
    """Train with DDP; the callback is given bare."""
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=monitor,
        plugins=[plugin],
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Model())
    (checkpoint,) = folder.rglob("*.ckpt")
    named = pl.Trainer(strategy="ddp_free_memory", accelerator="cpu", devices=1, logger=False).strategy
    content = torch.load(checkpoint, weights_only=True)
    return {
        "steps": content["global_step"],
        "reported": load_report(folder).steps,
        "of both": isinstance(trainer.strategy, MyStrategy)
        and isinstance(trainer.strategy, pl.strategies.DDPStrategy)
        and isinstance(monitor, pl.Callback),
        "mine": trainer.strategy.mine,
        "unused": trainer.strategy._ddp_kwargs["find_unused_parameters"],
        "by name": isinstance(named, FreeMemoryDDPStrategy),
    }


CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  plugins:
    - class_path: lightning_gpu_tools.PortableCheckpointIO
      init_args: {verify: true, inner: {class_path: PACKAGE.plugins.io.TorchCheckpointIO}}
  callbacks:
    - class_path: lightning_gpu_tools.GPUUtilizationMonitor
      init_args: {interval_s: 0.5}
  strategy:
    class_path: lightning_gpu_tools.strategies.FreeMemoryDDPStrategy
    init_args: {wait: 10}
"""


def command_line() -> dict[str, Any]:
    (folder / "config.yaml").write_text(CONFIG.replace("PACKAGE", package))
    cli = importlib.import_module(f"{package}.cli").LightningCLI
    arguments = ["--config", f"{folder}/config.yaml"]
    trainer = cli(Model, run=False, save_config_callback=None, args=arguments).trainer
    (own,) = [one for one in trainer.callbacks if isinstance(one, GPUUtilizationMonitor)]
    return {
        "interval_s": own.interval_s,
        "inner": type(trainer.strategy.checkpoint_io.inner).__module__,
    }


if __name__ == "__main__":
    found = {"refusals": refusals, "training": train(), "cli": command_line()}
    roots = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps({**found, "imported": sorted(roots & {"lightning", "pytorch_lightning", "lightning_fabric"})}))
