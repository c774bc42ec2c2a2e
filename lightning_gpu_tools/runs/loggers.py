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
    texts = {name: value for name, value in named.items() if isinstance(value, str)}
    page = f"gpu_tools{separator}report"
    # Lightning's loggers share no method for texts, and CSV files have no place for them. A page has no picture, which
    # is not drawn yet.
    experiment: Any = getattr(logger, "experiment", None)  # Lightning's base class does not have it
    if hasattr(experiment, "add_text"):  # TensorBoard, which shows text as Markdown
        for name, value in {**texts, page: textwrap.indent(text, "    ")}.items():
            experiment.add_text(name, value, step)
    elif hasattr(experiment, "set_tag"):  # MLflow
        for name, value in texts.items():
            experiment.set_tag(logger.run_id, name, value)
        experiment.log_text(logger.run_id, render_page(report), f"{page}.html")
    elif hasattr(experiment, "log_other"):  # Comet
        for name, value in texts.items():
            experiment.log_other(name, value)
        experiment.log_asset_data(render_page(report), name=f"{page}.html")
    elif hasattr(experiment, "summary"):  # Weights & Biases
        for name, value in texts.items():
            experiment.summary[name] = value
        if "wandb" in sys.modules:
            html = sys.modules["wandb"].Html(io.StringIO(render_page(report)), inject=False)  # without its style sheet
            logger.log_metrics({page: html}, step)
