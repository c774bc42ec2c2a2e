"""Draw a report's picture and page in a separate process, so that the next run does not wait.

A thread would share matplotlib's global settings with the program, and hold locks while the program forks workers.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO

from lightning_gpu_tools import files
from lightning_gpu_tools.reports.report import FILE_NAME, PAGE_NAME, PLOT_NAME, Report
from lightning_gpu_tools.reports.report_file import load_report
from lightning_gpu_tools.units import printable

_DRAWN = (PLOT_NAME, PAGE_NAME)
# The process uses the program's modules, not those of another folder or installation.
_CODE = """
import sys
folder, sys.path[:] = sys.argv[1], sys.argv[2:]
from lightning_gpu_tools.runs.drawing import draw
draw(folder)
"""
_TIMEOUT_S = 120  # our default: at its first import on a machine, matplotlib reads all fonts
_NICENESS = 10  # our default: the next run has priority

_drawings: dict[str, tuple[subprocess.Popen[bytes], threading.Thread]] = {}  # by folder, each with who waits for it


def start(report: Report, folder: str, say: Callable[[str], object]) -> Sequence[str]:
    """Start to draw the report in a folder, and return the names of the files that will appear there.

    They appear when they are complete, and the interpreter waits for them at exit. There are none without the ``plot``
    extra, or if the run is too short to judge. ``say`` later prints a message if they could not be drawn.

    Raises:
        OSError: No process can be started.
    """
    if folder in _drawings:  # its report has been replaced
        process, thread = _drawings.pop(folder)
        process.kill()
        thread.join()
    for name in _DRAWN:
        files.remove(os.path.join(folder, name))  # of the former report
    if report.diagnosis.verdict == "too_short" or importlib.util.find_spec("matplotlib") is None:
        return ()
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen executable would start the program again
        raise OSError("this program has no Python interpreter to draw with")
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - no pipe: workers forked meanwhile would hold it open
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, folder, *sys.path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # Ctrl-C must not end it
    )
    # Not a daemon thread, so that the interpreter waits for it.
    thread = threading.Thread(target=_wait, args=(process, errors, say), name="lightning-gpu-tools-drawing")
    thread.start()
    _drawings[folder] = process, thread
    return _DRAWN


def _wait(process: subprocess.Popen[bytes], errors: IO[bytes], say: Callable[[str], object]) -> None:
    with errors:
        if process.wait() not in (0, -signal.SIGKILL):
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "it took too long"
            say(f"The picture of the report could not be drawn: {printable(reason, 300)}")


def wait() -> None:
    """Wait until all drawing has finished."""
    for _, thread in _drawings.values():
        thread.join()


def draw(folder: str) -> None:
    """Draw the report in a folder into that folder; runs in the separate process."""
    signal.alarm(_TIMEOUT_S)  # ends this process
    os.nice(_NICENESS)
    source = os.path.join(folder, FILE_NAME)
    if not files.exists(source):  # the folder was removed, such as a temporary one
        return
    report = load_report(source)
    from lightning_gpu_tools.reports.page import render_page
    from lightning_gpu_tools.reports.plot import png_of, svg_of

    for name, content in ((PLOT_NAME, png_of(report)), (PAGE_NAME, render_page(report, svg_of(report)).encode())):
        if files.exists(source):
            with files.writing(os.path.join(folder, name)) as target:
                target.write(content)
