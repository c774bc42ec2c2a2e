"""Publish a report: its file, picture and page, the terminal, loggers, and the user's own command."""

import contextlib
import dataclasses
import importlib.util
import io
import logging
import math
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_gpu_tools import files
from lightning_gpu_tools.reports.comparison import confirm, earlier_report
from lightning_gpu_tools.reports.page import png_of, render_page, svg_of
from lightning_gpu_tools.reports.report import COMPLETED, DRAWN, Report, ReportFile
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.units import printable, printable_path

# The shell starts the command and ends. Its output goes to $1, or nowhere if that cannot be written, as at a URL.
_START = '{ true >>"$1" || set -- /dev/null; exec /bin/sh -c "$0" >>"$1" 2>&1; } 2>/dev/null &'
_TIMEOUT_S = 5.0  # our default: on a machine without a free core, for a shell that takes a millisecond
_MAX_TEXT = 1000  # our default, as in the report
_warned: dict[Any, Any] = {}


def publish(report: Report, file: ReportFile, loggers: Sequence[Any] = (), step: int = 0) -> None:
    """Write the report, print it, log its summary at this step, and draw its picture and page.

    A failure affects only its own part, and is printed.
    """
    lines: list[str] = []
    text = path = ""
    with _failure_added_to(lines, "The report could not be compared with the previous one"):
        earlier = earlier_report(file.folder)
        if earlier is not None:
            report = dataclasses.replace(report, confirmation=confirm(report, earlier))
    with _failure_added_to(lines, f"The report could not be written to {printable_path(file.folder)}"):
        path = file.save(report)
        lines.append(f"Report: {_shown(path)}")
    with _failure_added_to(lines, "The report could not be shown"):
        text = render_text(report)
    for logger in loggers:
        with _failure_added_to(lines, f"The summary could not be sent to {type(logger).__name__}"):
            _log_summary(report, text, logger, step)
    with _failure_added_to(lines, "The notification failed"):
        diagnosis = report.diagnosis
        texts = {"verdict": diagnosis.verdict, "why": diagnosis.why, "next_step": diagnosis.next_step}
        is_end = report.outcome == COMPLETED
        notify("end" if is_end else "error", file.folder, outcome=report.outcome, report=path, **texts)
    say("\n".join(["", text, *lines]))
    if path:
        _draw(report, file.folder)


def _draw(report: Report, folder: str) -> None:
    """Draw the report with the ``plot`` extra, if the run was long enough to judge, and print where."""
    places = [os.path.join(folder, name) for name in DRAWN]
    lines: list[str] = []
    with _failure_added_to(lines, "The report could not be drawn"):
        for place in places:
            files.remove(place)  # of the former report
        if report.diagnosis.verdict == "too_short":
            lines.append("The run is too short for a picture.")
        elif importlib.util.find_spec("matplotlib") is not None:
            drawn = png_of(report), render_page(report, svg_of(report)).encode()
            for place, content in zip(places, drawn, strict=True):
                with files.writing(place) as target:
                    target.write(content)
            lines.append(f"Picture and page: {' and '.join(map(_shown, places))}")
    if lines:
        say("\n".join(lines))


def _log_summary(report: Report, text: str, logger: Any, step: int) -> None:
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
    # Lightning's loggers share no method for texts, and CSV files have no place for them.
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


@contextlib.contextmanager
def _failure_added_to(lines: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the disk, a font, a forged file
        lines.append(f"{what}: {type(error).__name__}: {printable(error, 300)}")


def _shown(path: str | Path) -> str:
    """Return a path for printing, relative to the current folder if it is inside."""
    text = os.fspath(path)
    with contextlib.suppress(OSError):  # the current folder has been removed
        text = text.removeprefix(os.path.join(os.getcwd(), ""))
    return printable_path(text)


def say(text: str) -> None:
    """Print text in the terminal's encoding, in one write: Rich's bar in a notebook repeats unfinished lines."""
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()
    except Exception:  # a closed terminal, a notebook's own stream
        logging.getLogger(__name__).warning("The report could not be printed.", exc_info=True)


def notify(
    event: Literal["end", "error", "stall"],
    folder: str,
    *,
    outcome: str,
    verdict: str = "",
    why: str = "",
    next_step: str = "",
    report: str = "",
) -> None:
    """Start the user's own command, if there is one, and do not wait for it. If it cannot be started, warn once.

    The event ``"error"`` is any other end than the planned one. The command's output goes to ``notify.log`` in
    ``folder``. ``report`` is the path or URL of the report, if it exists.
    """
    command = os.environ.get("LIGHTNING_GPU_TOOLS_NOTIFY", "")
    if not command.strip():
        return
    texts = {
        "LIGHTNING_GPU_TOOLS_EVENT": event,
        "LIGHTNING_GPU_TOOLS_OUTCOME": outcome,
        "LIGHTNING_GPU_TOOLS_VERDICT": verdict,
        "LIGHTNING_GPU_TOOLS_WHY": why,
        "LIGHTNING_GPU_TOOLS_NEXT": next_step,
        "LIGHTNING_GPU_TOOLS_HOST": os.uname().nodename,
        "LIGHTNING_GPU_TOOLS_SCRIPT": os.path.basename(sys.argv[0]) if sys.argv else "",
    }
    environment = {name: printable(text, _MAX_TEXT) for name, text in texts.items()}
    environment["LIGHTNING_GPU_TOOLS_REPORT"] = report if "://" in report or not report else os.path.abspath(report)
    # Without the command itself, which may be a training.
    inherited = {name: value for name, value in os.environ.items() if name != "LIGHTNING_GPU_TOOLS_NOTIFY"}
    try:
        subprocess.run(
            ["/bin/sh", "-c", _START, command, os.path.join(folder, "notify.log")],
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # neither Ctrl-C nor a closed terminal ends it
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: not in the locale's encoding
        reason = printable(error, 200)
        text = f"The command in LIGHTNING_GPU_TOOLS_NOTIFY was not started: {reason}."
        warnings.warn_explicit(text, UserWarning, "lightning_gpu_tools", 1, registry=_warned)
