"""The user's own command, in ``LIGHTNING_GPU_TOOLS_NOTIFY``, which is told that a run has ended, failed or stalled."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any, Literal

from lightning_gpu_tools.units import printable

LOG_NAME = "notify.log"  # beside the report
# The shell starts the command and ends. Its output goes to $1, or nowhere if that cannot be written, as at a URL.
_START = '{ true >>"$1" || set -- /dev/null; exec /bin/sh -c "$0" >>"$1" 2>&1; } 2>/dev/null &'
_TIMEOUT_S = 5.0  # our default: on a machine without a free core, for a shell that takes a millisecond
_MAX_TEXT = 1000  # our default, as in the report
_warned: dict[Any, Any] = {}


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
    """Start the command, if there is one, and do not wait for it. If it cannot be started, warn once.

    Args:
        event: ``"error"`` = the run ended in any other way than planned.
        folder: Folder of the report, where the command's output goes to ``notify.log``.
        outcome: Outcome of the run, or since when it has stalled.
        verdict: Verdict of the report.
        why: The reason.
        next_step: The advice.
        report: Path or URL of the report, if it exists.
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
            ["/bin/sh", "-c", _START, command, os.path.join(folder, LOG_NAME)],
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
