"""What monitor and advisor, and other tools, add to a training step: all at their defaults, in turn, in one run.

    python benchmarks/step_overhead.py [--rounds 60] [--fake-gpus 8] [--tool NAME] [--output results.json]

Each tool has a training of its own measured next to one without callbacks and one with two callbacks that do nothing,
which log as often. With --tool the file keeps what it has of other tools.
Each of the three trains in three processes, because where code and data happen to lie in one makes some 10 us a step,
but only one process trains at a time: in each round each has one turn, in random order, of 499 whole steps. A turn
begins with caches full of what other processes did, which would count for too much in a short one. No step is left out,
and 499 is a prime, so turns hold every part of what is done at each 10th or 50th step. What the turns of a round took
on average is compared. The median of these differences comes with its 95 % interval. What a tool's threads and
processes do beside the training is in the result as far as the training thread feels it.

nvitop's collector runs where nvitop is installed and there are GPUs, TraceML where traceml-ai is installed, as its own
docs recommend: under ``traceml run``. With --fake-gpus the GPUs are those of the tests' fake driver, which is Python
and not C and so takes far longer.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.advice.findings import median_interval
from lightning_gpu_tools.types import Report

STEPS = 499  # of a turn
PROCESSES = 3  # of a variant
WARM_UP_TURNS = 2


class Samples(Dataset):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(64)


class InTurns(LightningModule):
    """A step of about a millisecond, which waits for its turn after each 499th, and says how long the turn took."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.turns = (folder / "turns").open("rb", buffering=0)
        self.times = (folder / "times").open("wb", buffering=0)
        self.steps = 0
        self.began = (0.0, 0.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.steps % STEPS == 0:
            if self.steps:
                us = [1e6 * (now - began) / STEPS for now, began in zip(self.now(), self.began, strict=True)]
                self.times.write(f"{us[0]:.2f} {us[1]:.2f}\n".encode())
            self.trainer.should_stop = not self.turns.read(1)  # nothing to read: the other end is closed
            self.began = self.now()
        self.steps += 1
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    @staticmethod
    def now() -> tuple[float, float]:
        """Return the wall time and the CPU time of the training thread, in seconds."""
        return time.perf_counter(), time.thread_time()

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

        logging.getLogger("nvitop").setLevel(logging.CRITICAL)  # it tells at length which functions the fake one lacks
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


NONE, EMPTY, OURS = "no callbacks", "two empty callbacks", "monitor + advisor"
NVITOP, TRACEML = "nvitop's collector", "TraceML"
OFTEN = ", log_every_n_steps=1"
VARIANTS: dict[str, Callable[[], list[Callback]]] = {
    NONE: list,
    EMPTY: lambda: [EmptyCallback(), EmptyCallback()],
    OURS: lambda: [GPUUtilizationMonitor(devices="all"), GPUUtilizationAdvisor()],
    "DeviceStatsMonitor": lambda: [DeviceStatsMonitor(cpu_stats=True)],
    NVITOP: lambda: [NvitopCollector()],
    TRACEML: list,
}
DEVICE_STATS = "DeviceStatsMonitor"
# Each at the default of 50, and what logs by itself also at 1. What it is compared with logs as often.
TOOLS = [OURS, OURS + OFTEN, f"{DEVICE_STATS}, log_every_n_steps=50", DEVICE_STATS + OFTEN, NVITOP, TRACEML]


def train(name: str, folder: Path) -> None:
    """Train one variant, whenever it is its turn."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    callbacks = VARIANTS[name.partition(", ")[0]]
    log_every_n_steps = 1 if name.endswith(OFTEN) else 50
    trainer = Trainer(
        max_epochs=-1,
        devices=1,
        callbacks=callbacks(),
        logger=CSVLogger(folder),
        log_every_n_steps=log_every_n_steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(InTurns(folder), DataLoader(Samples(), batch_size=1))


class Runner:
    """The process that trains a variant.

    Args:
        name: What its times are listed as.
        variant: What trains.
        folder: For its files.
    """

    def __init__(self, name: str, variant: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir()
        for pipe in ("turns", "times"):
            os.mkfifo(folder / pipe)
        command = [sys.executable, __file__, "--train", variant, "--folder", str(folder)]
        if name == TRACEML:
            # Its processes on one machine would otherwise all take the same ports.
            ports = ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
            command = [str(traceml()), "run", *ports, __file__, "--args", *command[2:]]
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)

    def connect(self) -> None:
        """Wait until the training reads from its pipe; it never does if it failed to start."""
        turns = None
        while turns is None:
            if self.process.poll() is not None:
                sys.exit(f"{self.name} did not start:\n{(self.folder / 'output').read_text()}")
            try:
                turns = os.open(self.folder / "turns", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # ENXIO: nobody reads yet
                time.sleep(0.05)
        os.set_blocking(turns, True)
        self.turns = os.fdopen(turns, "wb", buffering=0)
        self.times = (self.folder / "times").open()

    def turn(self) -> tuple[float, float]:
        """Let it train and return the mean wall and CPU time of a step, in us."""
        self.turns.write(b".")
        wall_us, cpu_us = map(float, self.times.readline().split())
        return wall_us, cpu_us


# The mean wall and CPU time of a step in us, of the turns of each round.
Turns = list[tuple[float, float]]


def measure(tool: str, rounds: int) -> tuple[dict[str, Turns], Report | None]:
    """Train with a tool and without in turn; return what the turns took by variant, and a report of the tool's."""
    with tempfile.TemporaryDirectory() as folder:
        often = OFTEN if tool.endswith(OFTEN) else ""
        variants = {NONE: NONE + often, EMPTY: EMPTY + often, tool: tool}
        runners = [
            Runner(name, variant, Path(folder) / f"{i} {k}")
            for i, (name, variant) in enumerate(variants.items())
            for k in range(PROCESSES)
        ]
        began_s = time.perf_counter()
        for runner in runners:
            runner.connect()
        print(f"{tool}: {len(runners)} trainings began in {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
        measured: dict[str, Turns] = {name: [] for name in variants}
        for number in range(WARM_UP_TURNS + rounds):
            print(f"\rround {number + 1} of {WARM_UP_TURNS + rounds}", end="", file=sys.stderr, flush=True)
            times = {runner: runner.turn() for runner in random.sample(runners, len(runners))}
            for name in variants if number >= WARM_UP_TURNS else ():
                wall_us, cpu_us = zip(*(times[runner] for runner in runners if runner.name == name), strict=True)
                measured[name].append((mean(wall_us), mean(cpu_us)))
        print(file=sys.stderr)
        for runner in runners:
            runner.turns.close()  # all end at once
        for runner in runners:
            runner.process.wait(120)
        file = next(iter(sorted(Path(folder).rglob("gpu_report.json"))), None)
        return measured, None if file is None else load_report(file)


def differences(measured: Turns, other: Turns, kind: int) -> list[float]:
    return [a[kind] - b[kind] for a, b in zip(measured, other, strict=True)]


def in_words(values: Sequence[float]) -> str:
    """Return the median and its 95 % interval."""
    low, high = median_interval(values) or (min(values), max(values))
    return f"{median(values):+.0f} ({low:+.0f} to {high:+.0f})"


@contextlib.contextmanager
def fake_gpus(count: int) -> Iterator[None]:
    """Let the processes started meanwhile see so many GPUs of the fake driver."""
    if not count:
        yield
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import fake_driver

    with tempfile.TemporaryDirectory() as folder:
        machine = fake_driver.Driver(Path(folder))
        machine.gpus = [fake_driver.gpu(utilization=50) for _ in range(count)]
        os.environ.update(machine.variables())
        yield


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def traceml() -> str | None:
    return shutil.which("traceml", path=str(Path(sys.executable).parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--fake-gpus", type=int, default=0, metavar="N", help="sample N GPUs of the fake driver")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="measure only this one; may be repeated")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.folder)
        return
    tools = args.tool or [*TOOLS]
    has_gpus = args.fake_gpus or torch.cuda.is_available()
    missing = {
        NVITOP: not has_gpus or importlib.util.find_spec("nvitop") is None,
        TRACEML: traceml() is None,
    }
    tools = [tool for tool in tools if not missing.get(tool)]
    load = os.getloadavg()[0]
    with fake_gpus(args.fake_gpus):
        measured = {tool: measure(tool, args.rounds) for tool in tools}
    report = next((found for tool, (_, found) in measured.items() if tool == OURS), None)

    console = Console(width=120)
    for kind, title in enumerate(("wall time", "CPU time of the training thread")):
        columns = ("us per step (median)", "beyond no callbacks", "beyond two empty callbacks")
        table = Table("variant", *columns, title=f"{title}: median (95 % interval)")
        for tool in tools:
            turns = measured[tool][0]
            for name in (NONE, EMPTY, tool):
                beyond = [differences(turns[name], turns[other], kind) for other in (NONE, EMPTY)]
                table.add_row(name, f"{median(one[kind] for one in turns[name]):.0f}", *map(in_words, beyond))
            table.add_section()
        console.print(table)
    own = {}
    if report is not None:
        own = {"own_count_us": report.monitor_us_per_step, "sampling_thread_us": report.monitor_thread_us_per_step}
        console.print("By their own count, monitor and advisor add us per step, there and in their threads:", own)
    if args.output:
        known = json.loads(args.output.read_text()) if args.tool and args.output.exists() else {}
        result = {
            "benchmark": "step_overhead",
            "machine": describe_machine(),
            "load_average_before": round(load, 2),
            "rounds": args.rounds,
            "steps_per_turn": STEPS,
            "processes": PROCESSES,
            "fake_gpus": args.fake_gpus,
            **{name: known[name] for name in ("own_count_us", "sampling_thread_us") if name in known},
            **own,
            "measured_us": {
                **known.get("measured_us", {}),
                **{
                    tool: {
                        name: {kind: [round(one[i], 1) for one in times] for i, kind in enumerate(("wall", "cpu"))}
                        for name, times in turns.items()
                    }
                    for tool, (turns, _) in measured.items()
                },
            },
        }
        args.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
