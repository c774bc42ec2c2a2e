"""Time that the monitor and the advisor, and other tools, add to a training step, each at its defaults.

    python benchmarks/step_overhead.py [--rounds 10] [--steps 4999] [--tool NAME] [--output results.json]

Each tool is compared with a run without callbacks and with one with two empty callbacks, which log as often. With
--tool, other tools in the output file are kept. Each of the three variants trains in three processes, because the
memory layout of a process changes a step by about 10 us.

Only one process trains at a time. In each round, each process has one turn, by default of 4,999 steps, in random
order. A turn starts with cold caches, which a training without turns does not have, so it is long enough that they
hardly matter. All steps count, and 4,999 is a prime, so the turns include the work of every 10th and 50th step in
proportion. The average times of a round are compared. The result is the median of the differences with its 95%
interval. It includes the work of a tool's threads and processes as far as that slows down the training thread.

nvitop's collector is included if nvitop is installed and there are GPUs. TraceML is included if traceml-ai is
installed, under ``traceml run``, as its docs recommend. With --fake-gpus, the GPUs are those of the tests' fake driver,
which is written in Python and far slower than a real driver.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median

import torch
from harness import fake_gpus, free_port, load_average, make_parser, quiet_trainer, traceml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from machine import describe_machine
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.advice.findings import median_interval
from lightning_gpu_tools.types import Report

STEPS = 4_999  # in a turn, by default
PROCESSES = 3  # for each variant
WARM_UP_TURNS = 2


class Samples(Dataset):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(64)


class InTurns(LightningModule):
    """A model with steps of about 1 ms that waits for its next turn after some steps, and reports the turn's time."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__()
        self.steps_per_turn = steps
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.turns = (folder / "turns").open("rb", buffering=0)
        self.times = (folder / "times").open("wb", buffering=0)
        self.steps = 0
        self.began = (0.0, 0.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.steps % self.steps_per_turn == 0:
            if self.steps:
                s = (now - began for now, began in zip(self.now(), self.began, strict=True))
                us = [1e6 * one / self.steps_per_turn for one in s]
                self.times.write(f"{us[0]:.2f} {us[1]:.2f}\n".encode())
            self.trainer.should_stop = not self.turns.read(1)  # no data: the other end is closed
            self.began = self.now()
        self.steps += 1
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    @staticmethod
    def now() -> tuple[float, float]:
        """Return the wall time and the training thread's CPU time, in seconds."""
        return time.perf_counter(), time.thread_time()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class EmptyCallback(Callback):
    """A callback that costs only Lightning's dispatch."""

    def on_train_batch_end(self, *args: object) -> None:
        pass


class NvitopCollector(Callback):
    """nvitop's background collector at its default interval of one second, logged every 50th step."""

    def on_train_start(self, *args: object) -> None:
        from nvitop import Device, ResourceMetricCollector

        logging.getLogger("nvitop").setLevel(logging.CRITICAL)  # long messages about the fake driver
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
# Each with log_every_n_steps=50, the default; tools that log by themselves also with 1.
TOOLS = [OURS, OURS + OFTEN, f"{DEVICE_STATS}, log_every_n_steps=50", DEVICE_STATS + OFTEN, NVITOP, TRACEML]


def train(name: str, folder: Path, steps: int) -> None:
    """Train one variant in turns."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    options = {"accelerator": "auto", "max_epochs": -1, "log_every_n_steps": 1 if name.endswith(OFTEN) else 50}
    callbacks = VARIANTS[name.partition(", ")[0]]()
    trainer = quiet_trainer(folder, callbacks=callbacks, logger=CSVLogger(folder), **options)
    trainer.fit(InTurns(folder, steps), DataLoader(Samples(), batch_size=1))


class Runner:
    """A process that trains a variant.

    Args:
        name: Name of the variant in the result.
        variant: Name of the variant for ``train``.
        folder: Folder for its files.
        steps: Number of steps in a turn.
    """

    def __init__(self, name: str, variant: str, folder: Path, steps: int) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir()
        for pipe in ("turns", "times"):
            os.mkfifo(folder / pipe)
        command = [sys.executable, __file__, "--train", variant, "--folder", str(folder), "--steps", str(steps)]
        if name == TRACEML:
            # TraceML's default ports would conflict between processes.
            ports = ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
            command = [str(traceml()), "run", *ports, __file__, "--args", *command[2:]]
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)

    def connect(self) -> None:
        """Wait until the process reads from its pipe, or exit if it failed to start."""
        turns = None
        while turns is None:
            if self.process.poll() is not None:
                sys.exit(f"{self.name} did not start:\n{(self.folder / 'output').read_text()}")
            try:
                turns = os.open(self.folder / "turns", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # ENXIO: no reader yet
                time.sleep(0.05)
        os.set_blocking(turns, True)
        self.turns = os.fdopen(turns, "wb", buffering=0)
        self.times = (self.folder / "times").open()

    def turn(self) -> tuple[float, float]:
        """Let the process train for a turn, and return the mean wall and CPU time of a step in us."""
        self.turns.write(b".")
        wall_us, cpu_us = map(float, self.times.readline().split())
        return wall_us, cpu_us


# By variant, and by "wall" or "cpu", the mean time of a step in us for each round.
Turns = dict[str, dict[str, list[float]]]


def measure(tool: str, rounds: int, steps: int) -> tuple[Turns, Report | None]:
    """Train with and without a tool in turn, and return the times, and the tool's report if it has one."""
    with tempfile.TemporaryDirectory() as folder:
        often = OFTEN if tool.endswith(OFTEN) else ""
        variants = {NONE: NONE + often, EMPTY: EMPTY + often, tool: tool}
        runners = [
            Runner(name, variant, Path(folder) / f"{i} {k}", steps)
            for i, (name, variant) in enumerate(variants.items())
            for k in range(PROCESSES)
        ]
        began_s = time.perf_counter()
        for runner in runners:
            runner.connect()
        print(f"{tool}: {len(runners)} processes started in {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
        measured: Turns = {name: {"wall": [], "cpu": []} for name in variants}
        for number in range(WARM_UP_TURNS + rounds):
            print(f"\rround {number + 1} of {WARM_UP_TURNS + rounds}", end="", file=sys.stderr, flush=True)
            times = {runner: runner.turn() for runner in random.sample(runners, len(runners))}
            for name in variants if number >= WARM_UP_TURNS else ():
                of_processes = zip(*(times[runner] for runner in runners if runner.name == name), strict=True)
                for of_rounds, times_us in zip(measured[name].values(), of_processes, strict=True):
                    of_rounds.append(round(mean(times_us), 1))
        print(file=sys.stderr)
        for runner in runners:
            runner.turns.close()  # ends the process
        for runner in runners:
            runner.process.wait(120)
        file = next(iter(sorted(Path(folder).rglob("gpu_report.json"))), None)
        return measured, None if file is None else load_report(file)


def difference(times_us: Sequence[float], others_us: Sequence[float]) -> str:
    """Return the median difference with its 95% interval."""
    values = [a - b for a, b in zip(times_us, others_us, strict=True)]
    low, high = median_interval(values) or (min(values), max(values))
    return f"{median(values):+.0f} ({low:+.0f} to {high:+.0f})"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each process (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="in a turn (default: %(default)s)")
    parser.add_argument("--fake-gpus", type=int, default=0, metavar="N", help="use N GPUs of the fake driver")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="measure only this tool; may be repeated")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.folder, args.steps)
        return
    has_gpus = args.fake_gpus or torch.cuda.is_available()
    missing = {
        NVITOP: not has_gpus or importlib.util.find_spec("nvitop") is None,
        TRACEML: traceml() is None,
    }
    tools = [tool for tool in args.tool or TOOLS if not missing.get(tool)]
    load = load_average()
    with fake_gpus([{"utilization": 50}] * args.fake_gpus) if args.fake_gpus else contextlib.nullcontext({}) as driver:
        os.environ.update(driver)
        measured = {tool: measure(tool, args.rounds, args.steps) for tool in tools}
    report = next((found for tool, (_, found) in measured.items() if tool == OURS), None)

    for tool, (turns, _) in measured.items():
        for kind in ("wall", "cpu"):
            print(f"{tool}: {median(turns[NONE][kind]):.0f} us of {kind} time per step without callbacks")
            for name, other in ((tool, NONE), (tool, EMPTY), (EMPTY, NONE)):
                print(f"    {name} adds to {other}: {difference(turns[name][kind], turns[other][kind])} us")
    own = {}
    if report is not None:
        own = {"own_count_us": report.monitor_us_per_step, "sampling_thread_us": report.monitor_thread_us_per_step}
        print("The report's own figures, in us per step:", own)
    if args.output:
        known = json.loads(args.output.read_text()) if args.tool and args.output.exists() else {}
        result = {
            "benchmark": "step_overhead",
            "machine": describe_machine(),
            "load_average_before": load,
            "rounds": args.rounds,
            "steps_per_turn": args.steps,
            "processes": PROCESSES,
            "fake_gpus": args.fake_gpus,
            **{name: known[name] for name in ("own_count_us", "sampling_thread_us") if name in known},
            **own,
            "measured_us": {**known.get("measured_us", {}), **{tool: turns for tool, (turns, _) in measured.items()}},
        }
        args.output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
