"""Trainings with one known cause each: what does the advisor say of them?

    python benchmarks/diagnosis_suite.py [--seconds 6] [--output results.json]

Each training is real and slowed down in one real place by time.sleep (waiting) or by a loop (computing). "healthy"
means that nothing on the host is to be blamed and nothing may be advised. Runs on the CPU.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from lightning_gpu_tools import GPUUtilizationAdvisor


class Slow(Dataset):
    def __init__(self, seconds: float = 0.0, *, computing: bool = False) -> None:
        self.seconds, self.computing = seconds, computing

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.computing:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        elif self.seconds:
            time.sleep(self.seconds)
        return torch.full((4,), float(index))


class Model(LightningModule):
    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.step_s = step_s

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.step_s:
            time.sleep(self.step_s)
        loss = self.layer(batch).square().mean() / 1e9
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(0.005)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class SlowCallback(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.02)


class SlowLogger(CSVLogger):
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)


class SlowSave(Model):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.02)


@dataclass
class Scenario:
    """A training and what must be said of it: a verdict, or a cause and its name or kind."""

    name: str
    expected: str
    model: Callable[[], LightningModule] = Model
    loader: Callable[[], DataLoader] = lambda: DataLoader(Slow())
    callbacks: list[Callable[[], Callback]] = field(default_factory=list)
    last: bool = False  # the advisor stands last among the callbacks
    options: dict[str, Any] = field(default_factory=dict)
    validate: bool = False


def workers(count: int, seconds: float, **options: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(Slow(seconds, **options), num_workers=count, batch_size=2)


SCENARIOS = [
    Scenario("slow data, no workers", "data_loading too_few_workers", loader=workers(0, 0.01)),
    Scenario("slow data, two workers", "data_loading too_few_workers", loader=workers(2, 0.02)),
    Scenario(
        "computing data on every core", "data_loading cpu_bound", loader=workers(4, 0.01, computing=True),
    ),
    Scenario("slow callback before the advisor", "callback SlowCallback", callbacks=[SlowCallback], last=True),
    Scenario("slow callback after the advisor", "callback SlowCallback", callbacks=[SlowCallback]),
    Scenario("slow logger", "logging SlowLogger", options={"log_every_n_steps": 1, "logger": SlowLogger}),
    Scenario(
        "a checkpoint every step", "checkpoint", model=SlowSave,
        callbacks=[lambda: ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
        options={"enable_checkpointing": True},
    ),
    Scenario("slow step", "healthy", model=lambda: Model(0.02)),
    Scenario("slow step, data hidden behind it", "healthy", model=lambda: Model(0.03), loader=workers(2, 0.01)),
    Scenario("step of a millisecond", "healthy"),
    Scenario("validation every 5 steps", "healthy", options={"val_check_interval": 5}, validate=True),
    Scenario("10 steps", "too_short", options={"max_steps": 10}),
    Scenario("10 steps of slow data", "too_short", loader=workers(0, 0.05), options={"max_steps": 10}),
]  # fmt: skip


class Stop(Callback):
    """Ends a training after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = time.perf_counter() > self.end


def answer(scenario: Scenario, seconds: float, folder: str) -> str:
    """Train and return what the advisor says first."""
    advisor = GPUUtilizationAdvisor(min_seconds=seconds / 4)
    others = [*(make() for make in scenario.callbacks), Stop(seconds)]
    options = dict(scenario.options)
    if "logger" in options:
        options["logger"] = options["logger"](folder)
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            **options,
        },
        callbacks=[*others, advisor] if scenario.last else [advisor, *others],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    validation = DataLoader(Slow(), sampler=range(4)) if scenario.validate else None
    trainer.fit(scenario.model(), scenario.loader(), validation)
    diagnosis = advisor.diagnosis
    assert diagnosis is not None
    if not diagnosis.findings:
        return diagnosis.verdict
    first = diagnosis.findings[0]
    detail = first.evidence.get("name", first.evidence.get("kind", ""))
    return f"{first.cause} {detail}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each training (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    table = Table("training", "known cause", "the advisor says", "")
    rows = []
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory() as folder:
            said = answer(scenario, args.seconds, folder)
        rows.append({"training": scenario.name, "cause": scenario.expected, "said": said})
        table.add_row(scenario.name, scenario.expected, said, "" if said == scenario.expected else "WRONG")
    right = sum(row["said"] == row["cause"] for row in rows)
    Console(width=110).print(table, f"{right} of {len(rows)} right")
    if args.output:
        result = {"benchmark": "diagnosis_suite", "machine": describe_machine(), "right": right, "answers": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
