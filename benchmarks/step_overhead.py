"""What the monitor and the advisor add to a training step, beside Lightning's own DeviceStatsMonitor, in one run.

    python benchmarks/step_overhead.py [--steps 2000] [--rounds 7] [--fake-gpus 8] [--output results.json]

Every round trains each variant once, in turn, on the same small model; what is compared is the time from step to step
in the steady part of each training: on the wall, and as CPU time of the training thread, which what else the machine
does disturbs much less. Where nvitop is installed its collector is a variant, too. On a machine with GPUs the model
trains on the first one and the GPUs are sampled.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
from lightning_gpu_tools.reports.report import load_report

WARM_UP = 200


class Model(LightningModule):
    """A step of about a millisecond, with the moments at which its steps begin."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.begins: list[tuple[float, float]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.begins.append((time.perf_counter(), time.thread_time()))
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class EmptyCallback(Callback):
    """What any callback with the same hooks costs: Lightning's own dispatch."""

    def on_train_batch_end(self, *args: object) -> None:
        pass


class NvitopCollector(Callback):
    """nvitop's background collector at its default interval of a second, taken at every 50th step."""

    def on_train_start(self, *args: object) -> None:
        from nvitop import Device, ResourceMetricCollector

        self.metrics: dict[str, float] = {}
        self.running = True

        def collect(metrics: dict[str, float]) -> bool:
            self.metrics = metrics
            return self.running

        self.thread = ResourceMetricCollector(Device.all()).daemonize(collect, interval=1.0)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if (trainer.global_step + 1) % 50 == 0:
            trainer.logger.log_metrics(self.metrics, step=trainer.global_step)

    def on_train_end(self, *args: object) -> None:
        self.running = False
        self.thread.join()


VARIANTS: dict[str, tuple[int, Callable[[], list[Callback]]]] = {
    "no callback": (50, list),
    "two empty callbacks": (50, lambda: [EmptyCallback(), EmptyCallback()]),
    "monitor + advisor": (
        50,
        lambda: [GPUUtilizationMonitor(report=False, devices="all"), GPUUtilizationAdvisor(min_seconds=1e9)],
    ),
    "DeviceStatsMonitor, log_every_n_steps=50": (50, lambda: [DeviceStatsMonitor(cpu_stats=True)]),
    "DeviceStatsMonitor, log_every_n_steps=1": (1, lambda: [DeviceStatsMonitor(cpu_stats=True)]),
}


def step_us(callbacks: list[Callback], log_every_n_steps: int, steps: int, folder: str) -> tuple[float, float]:
    """Train once and return the mean time of a step after the warm-up, wall and CPU, in microseconds."""
    model = Model()
    trainer = Trainer(
        max_steps=WARM_UP + steps,
        max_epochs=-1,
        devices=1,
        callbacks=callbacks,
        logger=CSVLogger(folder),
        log_every_n_steps=log_every_n_steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(WARM_UP + steps, 64)), batch_size=1))
    (wall_s, cpu_s), (end_wall_s, end_cpu_s) = model.begins[WARM_UP], model.begins[-1]
    return (end_wall_s - wall_s) / (steps - 1) * 1e6, (end_cpu_s - cpu_s) / (steps - 1) * 1e6


def own_count_us(steps: int) -> float:
    """Return what the report says that monitor and advisor add to a step: no difference of two noisy trainings."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        step_us([GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=1e9)], 50, steps, folder)
        (file,) = Path(folder).rglob("gpu_report.json")
        return load_report(file).monitor_us_per_step or 0.0


def install_fake_driver(gpus: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import fake_driver

    global fake_folder  # for as long as the process lives: nvitop asks the driver to the last
    fake_folder = tempfile.TemporaryDirectory()
    machine = fake_driver.Driver(Path(fake_folder.name))
    machine.gpus = [fake_driver.gpu(utilization=50) for _ in range(gpus)]
    os.environ[fake_driver.VARIABLE] = machine.variables()[fake_driver.VARIABLE]
    fake_driver.install()
    logging.getLogger("nvitop").setLevel(logging.CRITICAL)  # it tells at length which functions the fake one lacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steady steps of a training (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--fake-gpus", type=int, default=0, metavar="N", help="sample N GPUs of the fake driver")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    if args.fake_gpus:
        install_fake_driver(args.fake_gpus)
    if importlib.util.find_spec("nvitop") is not None and (args.fake_gpus or torch.cuda.is_available()):
        VARIANTS["nvitop's collector"] = (50, lambda: [NvitopCollector()])
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name, (log_every_n_steps, callbacks) in VARIANTS.items():
                seen[name].append(step_us(callbacks(), log_every_n_steps, args.steps, folder))

    console = Console(width=110)
    for kind, title in enumerate(("wall time", "CPU time of the training thread")):
        columns = ("us a step (median)", "min to max", "added to no callback", "added to two empty ones")
        table = Table("variant", *columns, title=title)
        bare, empty = seen["no callback"], seen["two empty callbacks"]
        for name, values in seen.items():
            # Differences within a round: what the machine does besides changes from round to round.
            added = median(a[kind] - b[kind] for a, b in zip(values, bare, strict=True))
            beyond = median(a[kind] - b[kind] for a, b in zip(values, empty, strict=True))
            own = [value[kind] for value in values]
            spread = f"{min(own):.0f} to {max(own):.0f}"
            table.add_row(name, f"{median(own):.0f}", spread, f"{added:+.0f}", f"{beyond:+.0f}")
        console.print(table)
    console.print(f"By their own count, monitor and advisor add {own_count_us(args.steps):.1f} us to a step.")
    if args.output:
        result = {
            "benchmark": "step_overhead",
            "machine": describe_machine(),
            "steps": args.steps,
            "fake_gpus": args.fake_gpus,
            "step_us_wall_cpu": seen,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
