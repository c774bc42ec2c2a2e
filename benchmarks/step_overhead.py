"""What the monitor and the advisor add to a training step, beside Lightning's own DeviceStatsMonitor, in one run.

    python benchmarks/step_overhead.py [--steps 4000] [--fake-gpus 8] [--output results.json]

All variants train at once, each in a thread of its own, but only one of them at a time: after every 10 steps the next
one has its turn, so that what the machine does besides hits all alike. Of each turn the first steps, which find the
caches cold, are left out; five turns, with one point of logging among them, are one measurement. With GPUs, and nvitop
installed, its collector is a variant, too. The threads that sample the GPUs run beside all variants; what they take is
told by itself. On a machine with GPUs the model trains on the first one. With --fake-gpus the GPUs are those of the
tests' fake driver, which is Python and not C and so takes far longer.
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
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
TURN, COLD, TURNS = 10, 2, 5  # steps of a turn, how many of them are left out, and turns of a measurement


class Relay:
    """Lets one training at a time run, for so many steps each, in turn."""

    def __init__(self, runners: int) -> None:
        self.batons = [threading.Semaphore(0) for _ in range(runners)]
        self.running = set(range(runners))

    def start(self) -> None:
        self.batons[0].release()

    def pass_on(self, runner: int) -> None:
        following = [other for other in range(len(self.batons)) if other in self.running]
        later = [other for other in following if other > runner]
        if following:
            self.batons[(later or following)[0]].release()


class Model(LightningModule):
    """A step of about a millisecond, and how long those of each measurement took, by the wall and of CPU time."""

    def __init__(self, relay: Relay, place: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.relay, self.place = relay, place
        self.steps = 0
        self.began = self.spent = (0.0, 0.0)
        self.measured_us: list[tuple[float, float]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.steps % TURN == 0:
            self.end_turn()
            if self.steps:
                self.relay.pass_on(self.place)
            self.relay.batons[self.place].acquire()
        if self.steps % TURN == COLD:
            self.began = (time.perf_counter(), time.thread_time())
        self.steps += 1
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def end_turn(self) -> None:
        (wall_s, cpu_s), (began_s, cpu_began_s) = self.spent, self.began
        self.spent = wall_s + time.perf_counter() - began_s, cpu_s + time.thread_time() - cpu_began_s
        if self.steps % (TURN * TURNS) == 0:
            if self.steps > WARM_UP:
                us = 1e6 / (TURNS * (TURN - COLD))
                self.measured_us.append((self.spent[0] * us, self.spent[1] * us))
            self.spent = (0.0, 0.0)

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


# The interval of logging, and what makes the callbacks.
Variant = tuple[int, Callable[[], list[Callback]]]
VARIANTS: dict[str, Variant] = {
    "no callback": (50, list),
    "two empty callbacks": (50, lambda: [EmptyCallback(), EmptyCallback()]),
    "monitor + advisor": (
        50,
        lambda: [GPUUtilizationMonitor(report=False, devices="all"), GPUUtilizationAdvisor(min_seconds=1e9)],
    ),
    "DeviceStatsMonitor, log_every_n_steps=50": (50, lambda: [DeviceStatsMonitor(cpu_stats=True)]),
    "DeviceStatsMonitor, log_every_n_steps=1": (1, lambda: [DeviceStatsMonitor(cpu_stats=True)]),
}


def train(relay: Relay, place: int, variant: Variant, steps: int, folder: str) -> Model:
    log_every_n_steps, callbacks = variant
    model = Model(relay, place)
    trainer = Trainer(
        max_steps=WARM_UP + steps + 1,
        max_epochs=-1,
        devices=1,
        callbacks=callbacks(),
        logger=CSVLogger(folder, name=str(place)),
        log_every_n_steps=log_every_n_steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(WARM_UP + steps + 1, 64)), batch_size=1))
    finally:
        relay.running.discard(place)
        relay.pass_on(place)
    return model


def measure(variants: Sequence[Variant], steps: int) -> list[list[tuple[float, float]]]:
    """Train all variants in turn; return the mean wall and CPU time of a step in us for each measurement of each."""
    relay = Relay(len(variants))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(variants)) as pool:
        jobs = [pool.submit(train, relay, place, variant, steps, folder) for place, variant in enumerate(variants)]
        relay.start()
        return [job.result().measured_us for job in jobs]


def own_count_us(steps: int) -> tuple[float, float | None]:
    """Return what the report says that monitor and advisor add to a step, and that their thread takes beside it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        alone = (50, lambda: [GPUUtilizationMonitor(devices="all"), GPUUtilizationAdvisor(min_seconds=1e9)])
        relay = Relay(1)
        relay.start()
        train(relay, 0, alone, steps, folder)
        (file,) = Path(folder).rglob("gpu_report.json")
        report = load_report(file)
        return report.monitor_us_per_step or 0.0, report.monitor_thread_us_per_step


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a distribution-free 95 % interval of the median: the order statistics at n/2 -+ 0.98 sqrt(n)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    return ordered[max(0, int(len(values) / 2 - half))], ordered[min(len(values) - 1, int(len(values) / 2 + half))]


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
    parser.add_argument("--steps", type=int, default=4000, help="steady steps of each variant (default: %(default)s)")
    parser.add_argument("--fake-gpus", type=int, default=0, metavar="N", help="sample N GPUs of the fake driver")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.fake_gpus:
        install_fake_driver(args.fake_gpus)
    if importlib.util.find_spec("nvitop") is not None and (args.fake_gpus or torch.cuda.is_available()):
        VARIANTS["nvitop's collector"] = (50, lambda: [NvitopCollector()])

    seen = dict(zip(VARIANTS, measure(list(VARIANTS.values()), args.steps), strict=True))
    own_us, thread_us = own_count_us(args.steps)
    console = Console(width=110)
    for kind, title in enumerate(("wall time", "CPU time of the training thread")):
        table = Table("variant", "us a step (median)", "beyond two empty callbacks (median, 95 %)", title=title)
        for name, measured in seen.items():
            beyond = [a[kind] - b[kind] for a, b in zip(measured, seen["two empty callbacks"], strict=False)]
            low, high = interval(beyond)
            own = median(one[kind] for one in measured)
            table.add_row(name, f"{own:.0f}", f"{median(beyond):+.0f} ({low:+.0f} to {high:+.0f})")
        console.print(table)
    console.print(f"By their own count, monitor and advisor add {own_us:.1f} us to a step.")
    if thread_us is not None:
        console.print(f"The thread that samples takes {thread_us:.1f} us of CPU time a step beside it.")
    if args.output:
        result = {
            "benchmark": "step_overhead",
            "machine": describe_machine(),
            "steps": args.steps,
            "fake_gpus": args.fake_gpus,
            "own_count_us": own_us,
            "sampling_thread_us": thread_us,
            "measured_us": {
                name: {kind: [round(one[i], 1) for one in measured] for i, kind in enumerate(("wall", "cpu"))}
                for name, measured in seen.items()
            },
        }
        args.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
