"""Draw a report's picture and page in a separate process, so that the next run does not wait.

A thread would share matplotlib's global settings with the program, and hold locks while the program forks workers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_gpu_tools import files
from lightning_gpu_tools.reports.report import FILE_NAME, PAGE_NAME, PLOT_NAME, Report
from lightning_gpu_tools.reports.report_file import load_report
from lightning_gpu_tools.reports.schema import to_json
from lightning_gpu_tools.units import printable

_DRAWN = (PLOT_NAME, PAGE_NAME)
# The process uses the program's modules, not those of another folder or installation.
_CODE = """
import sys
scratch, parent, sys.path[:] = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
from lightning_gpu_tools.runs.drawing import draw
draw(scratch, parent)
"""
_TIMEOUT_S = 120.0  # our default: at its first import on a machine, matplotlib reads all fonts
_NICENESS = 10  # our default: the next run has priority

_drawings: list[_Drawing] = []  # the oldest first


def start(report: Report, folder: str, say: Callable[[str], object]) -> Sequence[str]:
    """Start to draw a report, and return the names of the files that will appear in its folder.

    They appear when they are complete, and the interpreter waits for them at exit. There are none without the ``plot``
    extra, or if the run is too short to judge. ``say`` later prints a message if they could not be drawn.

    Raises:
        OSError: No process can be started.
    """
    _drawings[:] = [one for one in _drawings if one.thread.is_alive()]
    for drawing in _drawings:
        if drawing.folder == folder:
            drawing.cancel()  # its report has been replaced
    for name in _DRAWN:
        files.remove(os.path.join(folder, name))  # of the former report
    if report.diagnosis.verdict == "too_short" or importlib.util.find_spec("matplotlib") is None:
        return ()
    _drawings.append(_Drawing(report, folder, say))
    return _DRAWN


def wait() -> None:
    """Wait until all drawing has finished."""
    for drawing in _drawings:
        drawing.thread.join()


class _Drawing:
    """A process that draws, and the thread that waits for it."""

    def __init__(self, report: Report, folder: str, say: Callable[[str], object]) -> None:
        self.folder = folder
        self._say = say
        self._is_canceled = False
        self._scratch = Path(tempfile.mkdtemp(prefix=files.scratch_prefix()))
        try:
            (self._scratch / FILE_NAME).write_text(to_json(report))
            self._process = _start(self._scratch)
        except OSError:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        # Not a daemon thread, so that the interpreter waits for it.
        self.thread = threading.Thread(target=self._collect, name="lightning-gpu-tools-drawing", daemon=False)
        self.thread.start()

    def cancel(self) -> None:
        """Stop drawing, and write nothing."""
        self._is_canceled = True
        self._process.kill()
        self.thread.join()

    def _collect(self) -> None:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TIMEOUT_S)
            self._process.kill()  # no-op if it has exited
            self._process.wait()
            reason = None if self._is_canceled else _move(self._scratch, self.folder)
            if reason is not None:
                self._say(f"The picture of the report could not be drawn: {printable(reason, 300)}")
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _start(scratch: Path) -> subprocess.Popen[bytes]:
    if not sys.executable or getattr(sys, "frozen", False):  # a frozen executable would start the program again
        raise OSError("this program has no Python interpreter to draw with")
    # No pipes: workers forked at the same time would hold them open.
    with open(scratch / "errors", "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", _CODE, str(scratch), str(os.getpid()), *sys.path],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # Ctrl-C must not end it
        )


def _move(scratch: Path, folder: str) -> str | None:
    """Move the drawn files to their folder; return the reason if there are none."""
    try:
        if not (scratch / PAGE_NAME).exists():  # the last one
            return (scratch / "errors").read_text("utf-8", "replace").strip().rpartition("\n")[2] or "it was killed"
        for name in _DRAWN:
            if files.exists(os.path.join(folder, FILE_NAME)):  # else the folder was removed, such as a temporary one
                with files.writing(os.path.join(folder, name)) as target:
                    target.write((scratch / name).read_bytes())
    except Exception as error:  # noqa: BLE001 - a disk or network error; the report itself is already written
        return f"{type(error).__name__}: {error}"
    return None


def draw(scratch: str, parent: int) -> None:
    """Draw the report in ``scratch`` into that folder; runs in the separate process."""
    from lightning_gpu_tools.reports.page import save_page
    from lightning_gpu_tools.reports.plot import save_plot

    signal.alarm(round(_TIMEOUT_S))  # ends this process even if its parent was killed
    os.nice(_NICENESS)
    report = load_report(os.path.join(scratch, FILE_NAME))
    save_plot(report, scratch)
    save_page(report, scratch)
    if os.getppid() != parent:  # the parent was killed, and nobody will collect the files
        shutil.rmtree(scratch, ignore_errors=True)
