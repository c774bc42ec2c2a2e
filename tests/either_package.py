"""A program that uses one of Lightning's packages, and imports this one before it, as sorted imports do.

``python either_package.py PACKAGE FOLDER`` prints what became of everything, as JSON.
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_gpu_tools import GPUUtilizationMonitor, PortableCheckpointIO, load_report
from lightning_gpu_tools.strategies import FreeMemoryDDPStrategy


class MyMonitor(GPUUtilizationMonitor):
    """A user's own, and defined before there is a Trainer."""


class MyStrategy(FreeMemoryDDPStrategy):
    def __init__(self, mine: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.mine = mine


plugin, strategy = PortableCheckpointIO(), MyStrategy(mine=7, find_unused_parameters=False)
pl: Any = importlib.import_module(sys.argv[1])
monitor = MyMonitor()
folder = Path(sys.argv[2])


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
    init_args: {wait: 10, find_unused_parameters: true}
"""


def command_line() -> dict[str, Any]:
    (folder / "config.yaml").write_text(CONFIG.replace("PACKAGE", sys.argv[1]))
    cli = importlib.import_module(f"{sys.argv[1]}.cli").LightningCLI

    def run(*arguments: str) -> Any:
        return cli(Model, run=False, save_config_callback=None, args=["--config", f"{folder}/config.yaml", *arguments])

    def shown(*arguments: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            run(*arguments)
        return text.getvalue()

    trainer = run().trainer
    options = ("min_free", "wait", "find_unused_parameters", "timeout")
    help_text = shown("--trainer.strategy.help=lightning_gpu_tools.strategies.FreeMemoryDDPStrategy")
    (own,) = [one for one in trainer.callbacks if isinstance(one, GPUUtilizationMonitor)]
    return {
        "interval_s": own.interval_s,
        "inner": type(trainer.strategy.checkpoint_io.inner).__module__,
        "unused": trainer.strategy._ddp_kwargs["find_unused_parameters"],
        "printed": "find_unused_parameters: true" in shown("--print_config"),
        "help": [name for name in options if f"--trainer.strategy.{name}" in help_text],
    }


if __name__ == "__main__":
    found = {"training": train(), "cli": command_line()}
    roots = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps({**found, "imported": sorted(roots & {"lightning", "pytorch_lightning", "lightning_fabric"})}))
