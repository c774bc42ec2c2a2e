"""What loggers get: metrics during a run, and its summary and page at the end."""

from __future__ import annotations

import io
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from lightning_gpu_tools.reports.page import render_page
from lightning_gpu_tools.reports.report import Report


def log_metrics(loggers: Iterable[Any], metrics: Mapping[str, float], step: int) -> None:
    """Log metrics whose names have slashes, in each logger with its own separator."""
    for logger in loggers if metrics else ():
        separator = getattr(logger, "group_separator", "/")
        named = {name.replace("/", separator): value for name, value in metrics.items()}
        logger.log_metrics(metrics=named, step=step)  # by keyword, as Lightning does


def log_summary(report: Report, text: str, logger: Any, step: int) -> None:
    """Log the diagnosis, the use of memory, and the report: as a page, or as text where a logger shows no page."""
    parts = report.memory[0].parts_bytes if report.memory else {}
    sizes = {f"memory_{name}_bytes": float(size) for name, size in parts.items()}
    summary = {**report.diagnosis.summary(), **sizes}
    separator = getattr(logger, "group_separator", "/")
    named = {f"gpu_tools{separator}{name}": value for name, value in summary.items()}
    numbers = {name: value for name, value in named.items() if isinstance(value, float) and math.isfinite(value)}
    if numbers:
        logger.log_metrics(metrics=numbers, step=step)
    for name, value in named.items():
        if isinstance(value, str):
            _log_text(logger, name, value, step)
    _log_page(logger, f"gpu_tools{separator}report", report, text, step)


def _log_text(logger: Any, name: str, text: str, step: int) -> None:
    # Lightning's loggers share no method for texts, and CSV files have no place for them.
    experiment: Any = getattr(logger, "experiment", None)  # Lightning's base class does not have it
    if hasattr(experiment, "add_text"):  # TensorBoard
        experiment.add_text(name, text, step)
    elif hasattr(experiment, "set_tag"):  # MLflow
        experiment.set_tag(logger.run_id, name, text)
    elif hasattr(experiment, "log_other"):  # Comet
        experiment.log_other(name, text)
    elif hasattr(experiment, "summary"):  # Weights & Biases
        experiment.summary[name] = text


def _log_page(logger: Any, name: str, report: Report, text: str, step: int) -> None:
    """Send the report as a page, without its picture, which is not drawn yet; or as text to TensorBoard."""
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_text"):  # TensorBoard, which shows it as Markdown
        experiment.add_text(name, textwrap.indent(text, "    "), step)
    elif hasattr(experiment, "set_tag"):  # MLflow
        experiment.log_text(logger.run_id, render_page(report), f"{name}.html")
    elif hasattr(experiment, "log_other"):  # Comet
        experiment.log_asset_data(render_page(report), name=f"{name}.html")
    elif hasattr(experiment, "summary") and "wandb" in sys.modules:  # Weights & Biases
        page = sys.modules["wandb"].Html(io.StringIO(render_page(report)), inject=False)  # without W&B's style sheet
        logger.log_metrics({name: page}, step)
