"""From the session of a fit to its report: described, printed, and written beside the logs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import shlex
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gpu_tools.environment import VERSION
from lightning_gpu_tools.host import processor_name, read_host_budget
from lightning_gpu_tools.reports.confirmation import confirm, earlier_report, is_of_one_run
from lightning_gpu_tools.reports.report import PREVIOUS_NAME, Report, save_report, summarize
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.trainer.facts import train_loader, train_loader_settings
from lightning_gpu_tools.trainer.session import Session
from lightning_gpu_tools.training.phases import MONITORING
from lightning_gpu_tools.units import printable, printable_path


def describe(session: Session, trainer: Trainer, outcome: str) -> Report:
    """Return the report of a fit that has ended, with what the other ranks published last."""
    diagnosis = session.diagnosis()
    assert diagnosis is not None
    clock, watch = session.clock, session.gpus
    times = clock.times.facts()
    settings = _settings(trainer)
    recorder = session.begin()
    gpus = session.gpu_summaries()
    device = trainer.strategy.root_device.type
    no_gpu = f"No GPU: the Trainer trains on {device!r}, so only the host's part was measured."
    batch_size = settings.get("batch_size")
    idle = clock.gpu_idle()

    def us_per_step(seconds: float) -> float | None:
        return seconds / clock.steps * 1e6 if clock.steps else None

    return Report(
        outcome=outcome,
        started_at=datetime.fromtimestamp(session.started_s, timezone.utc).isoformat(timespec="seconds"),
        steps=clock.steps,
        wall_s=clock.wall_s,
        phase_s=clock.seconds,
        step_s_median=None if times is None else times.p50_s,
        diagnosis=diagnosis,
        gpus=gpus + session.gpus_of_other_nodes(),
        gpu_note=session.gpu_note or (no_gpu if watch is None else None),
        step_s_p95=None if times is None else times.p95_s,
        step_s_max=None if times is None else times.max_s,
        samples_per_s=batch_size * trainer.world_size * times.count / times.seconds if batch_size and times else None,
        step_s_blocks=tuple(block.step_s for block in clock.blocks),
        monitor_us_per_step=us_per_step(clock.cost_s() + clock.seconds.get(MONITORING, 0.0)),
        monitor_thread_us_per_step=None if watch is None else us_per_step(watch.thread_cpu_s),
        unseen=tuple(session.unseen),
        spans=tuple(clock.timeline.spans()),
        gpu_step_s={} if idle is None else {phase: spent_s / idle.samples for phase, spent_s in idle.step_s.items()},
        ranks=recorder.ranks(),
        memory_growth=session.memory.growth(),
        loader=None if session.loader_result is None else summarize(session.loader_result),
        settings={**settings, "gpu": sorted({gpu.name for gpu in gpus if gpu.name})},
    )


def _settings(trainer: Trainer) -> dict[str, Any]:
    loader, settings = train_loader(trainer), train_loader_settings(trainer)
    return {
        "model": type(trainer.lightning_module).__qualname__,
        "dataset": None if loader is None else type(loader.dataset).__qualname__,
        "cpu": f"{processor_name()}, {read_host_budget().cores:g} cores",
        "accelerator": type(trainer.accelerator).__name__,
        "device": trainer.strategy.root_device.type,
        "world_size": trainer.world_size,
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        **({} if settings is None else dataclasses.asdict(settings)),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_gpu_tools": VERSION,
    }


def publish(report: Report, folder: str) -> None:
    """Write the report into the folder, then print it. Whatever fails costs only itself and is printed, too."""
    paths: list[Path] = []
    lines = [""]
    with _failure_added_to(lines, "The previous report could not be compared with"):
        earlier = earlier_report(folder)
        confirmation = None if earlier is None else confirm(report, earlier)
        if confirmation is not None:
            report = dataclasses.replace(report, confirmation=str(confirmation))
    with _failure_added_to(lines, f"The report could not be written to {printable_path(folder)}"):
        paths.append(save_report(report, folder))
        with _failure_added_to(lines, "The report could not be drawn"):
            if importlib.util.find_spec("matplotlib") is not None:
                from lightning_gpu_tools.reports.plot import save_plot

                paths.append(save_plot(report, folder))
    with _failure_added_to(lines, "The report could not be shown"):
        lines.insert(1, render_text(report))
    if paths:
        lines.append("Report: " + " ".join(map(printable_path, paths)))
        if report.diagnosis.verdict == "low":
            lines.append(_how_to_verify(paths[0]))
    say("\n".join(lines))


@contextlib.contextmanager
def _failure_added_to(lines: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the disk, a font, a forged file: the training itself went well
        lines.append(f"{what}: {type(error).__name__}: {printable(error, 300)}")


def _how_to_verify(file: Path) -> str:
    """Return the command that compares the next run with this one, by the name that its report will have then."""
    command, folder = "lightning-gpu-tools report", file.parent
    if is_of_one_run(folder):
        return f"After the next run: {command} NEW --against {_quoted(file)}"
    previous = _quoted(folder / PREVIOUS_NAME)
    return f"After the next run in this folder: {command} {_quoted(folder)} --against {previous}"


def _quoted(path: Path) -> str:
    return shlex.quote(printable_path(path))


def say(text: str) -> None:
    """Print for the person at the terminal, as far as it can show the characters.

    In one write that ends the line: Rich's progress bar in a notebook prints an unfinished line over and over.
    """
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()
    except Exception:  # a closed terminal, a notebook's own stream: what is said here must not end the training
        logging.getLogger(__name__).warning("The end of the training's report could not be printed.", exc_info=True)


def warn_if_not_writable(folder: str) -> None:
    """Warn before training, not after it, that the report cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        rank_zero_warn(
            f"The report of this training will be printed, but not written to {folder!r}: {error}. To have it as a "
            "file, give the Trainer another default_root_dir or logger."
        )
