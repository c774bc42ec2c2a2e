"""The program's own lines: the innermost one that the user wrote on a stack, and those that wait for the GPU."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch

from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import MONITORING, base_phase
from lightning_gpu_tools.training.run_measurements import SourceLine, WatchedSteps
from lightning_gpu_tools.training.stacks import TRAINER_FILE, TRAINER_FUNCTIONS
from lightning_gpu_tools.training.stopwatch import Stopwatch

# Owner of a file's code. In `fetch`, torch's loader calls the program; in `trainer`, the Trainer does.
_Owner = Literal["user", "library", "torch", "python", "own", "fetch", "trainer"]
_TRAINERS = ("lightning", "pytorch_lightning")
_LIBRARIES = (*_TRAINERS, "lightning_fabric", "lightning_utilities")
_OWN = __name__.partition(".")[0]
_OWN_FOLDER = __file__.partition(__name__.replace(".", os.sep))[0] + _OWN + os.sep
_PYTHON = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_FETCH_FILE = os.path.join("torch", "utils", "data", "_utils", "fetch.py")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
# Our defaults.
_MAX_FILES = 10_000  # in the caches
_MAX_LINES = 1000  # to return, most frequent first


class Seen(NamedTuple):
    """The source line at which a thread was sampled."""

    file: str
    line: int
    function: str
    is_loading: bool  # torch's loader was getting samples from the program


class _Frame(NamedTuple):
    """A frame of a Python stack."""

    path: str
    line: int
    function: str
    package: str  # the top-level package of its module; empty if unknown


class LineCounts:
    """Number of samples of each line in each phase."""

    def __init__(self) -> None:
        self._samples: Counter[tuple[str, str, int, str]] = Counter()

    def add(self, phase: str, file: str, line: int, function: str, samples: int = 1) -> None:
        """Add samples of one line."""
        self._samples[phase, file, line, function] += samples

    def lines(self) -> list[SourceLine]:
        """Return the lines, most frequent first. Safe in any thread."""
        return [
            SourceLine(phase=phase, file=file, line=line, function=function, samples=samples)
            for (phase, file, line, function), samples in self._samples.copy().most_common(_MAX_LINES)
        ]


def line_of(frame: FrameType | None) -> Seen | None:
    """Return the user's innermost line on a stack, ignoring callers of the Trainer or the loader; ``None`` if empty.

    Without a line of the user, return the innermost line of a library, else the outermost line of torch.
    """
    return _line_on(_frames(frame))


def line_in(recorded: Iterable[Mapping[str, Any]]) -> Seen | None:
    """Return the innermost line of the user, else of a library, on a stack that torch has recorded.

    Its frames have ``filename``, ``line``, ``name``. ``None`` if all are of torch or Python, as in torch's backward.
    """
    frames = (_Frame(one["filename"], one["line"], one["name"], _package(one["filename"])) for one in recorded)
    return _line_on(frames, or_torchs=False)


def _frames(frame: FrameType | None) -> Iterator[_Frame]:
    while frame is not None:
        code = frame.f_code
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        yield _Frame(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_name, package)
        frame = frame.f_back


def _line_on(stack: Iterable[_Frame], *, or_torchs: bool = True) -> Seen | None:
    users: _Frame | None = None
    library: _Frame | None = None
    outermost: _Frame | None = None
    owner: _Owner = "python"
    for frame in stack:
        owner = _owner(frame.path, frame.package)
        if owner == "trainer" and frame.function in TRAINER_FUNCTIONS:
            break
        if owner == "user":
            if users is not None and users.function in _COMPREHENSIONS and frame.path == users.path:
                users = users._replace(function=frame.function)  # which contains the comprehension
            users = users or frame
        elif owner in ("library", "trainer"):
            library = library or frame
        if owner == "fetch":
            outermost = outermost or frame
            break
        if owner != "own":
            outermost = frame
    found = users or library or (outermost if or_torchs or owner == "fetch" else None)
    return None if found is None else Seen(shown_path(found.path), found.line, found.function, owner == "fetch")


def _package(path: str) -> str:
    for part in _PACKAGES:
        if part in path:
            return path.rpartition(part)[2].replace(os.sep, "/").partition("/")[0]
    return _OWN if path.startswith(_OWN_FOLDER) else ""


@lru_cache(_MAX_FILES)
def _owner(path: str, package: str) -> _Owner:
    if path.endswith(_FETCH_FILE):
        return "fetch"
    if package == _OWN:
        return "own"
    if package == "torch":
        return "torch"
    if package in _TRAINERS and path.endswith(TRAINER_FILE):
        return "trainer"
    if package in _LIBRARIES or any(part in path for part in _PACKAGES):
        return "library"
    return "python" if path.startswith((*_PYTHON, "<")) else "user"


@lru_cache(_MAX_FILES)
def shown_path(path: str) -> str:
    """Return a path relative to the folder of installed packages, or to the current folder, if it is inside."""
    for part in _PACKAGES:
        if part in path:
            return path.rpartition(part)[2]
    with suppress(OSError):  # the current folder was removed
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    return path


_OFF = 0  # value of torch.cuda.get_sync_debug_mode()
_SYNC = "called a synchronizing CUDA operation"
# Inserted and removed by hand: warnings.filterwarnings() would make warnings that were shown once appear again.
_FILTER: Any = ("always", re.compile(f"{_SYNC}|Synchronization debug mode is a prototype"), UserWarning, None, 0)


class SyncLines:
    """A recorder of the training thread's waits for the GPU, and of queued operations, between ``start`` and ``stop``.

    ``synced`` is called after each wait. torch's sync debug mode does not report ``torch.cuda.synchronize()``, so calls
    to it are recorded separately. They are recorded below that function, because replacing the function itself would
    make ``torch.compile`` recompile the code that calls it.
    """

    def __init__(self, gpu: torch.device, clock: Stopwatch, synced: Callable[[], None]) -> None:
        self._gpu = gpu
        self._clock = clock
        self._synced = synced
        self._steps = 0
        self._operations = 0
        self._lines = LineCounts()
        self._patches = Patches()
        self._is_recording = False
        self._thread = 0
        self._operations_before = 0

    def facts(self) -> WatchedSteps | None:
        """Return the waits so far; ``None`` before the first step."""
        if not self._steps:
            return None
        syncs = tuple(self._lines.lines())
        return WatchedSteps(steps=self._steps, operations=self._operations / self._steps, syncs=syncs)

    def start(self) -> None:
        """Start recording, unless the program already uses the mode."""
        if torch.cuda.get_sync_debug_mode() != _OFF:
            return
        self._thread, self._is_recording = threading.get_ident(), True
        self._patches.add_to(warnings.filters, _FILTER)  # type: ignore[arg-type] # typed as a sequence
        self._patches.put(warnings, "showwarning", self._noting_syncs)
        self._patches.put(torch._C, compat.SYNCHRONIZE, self._noting_calls)
        self._patches.set_value(torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode, "warn")
        self._operations_before = self._count()

    def stop(self, *, is_whole: bool = True) -> None:
        """Restore everything, and count the step if it ``is_whole``. Idempotent."""
        if not self._is_recording:
            return
        self._is_recording = False
        self._patches.undo()
        if is_whole:
            self._operations += self._count() - self._operations_before
            self._steps += 1

    def _noting_syncs(self, show: Callable[..., None]) -> Callable[..., None]:
        def shown(message: Any, category: Any, *where: Any, **more: Any) -> None:
            text = str(message)
            if category is UserWarning and _SYNC in text:
                self._note(sys._getframe(1))
            elif not (category is UserWarning and _FILTER[1].match(text)):
                show(message, category, *where, **more)

        return shown

    def _noting_calls(self, synchronize: Callable[..., Any]) -> Callable[..., Any]:
        def synchronized(*args: Any, **kwargs: Any) -> Any:
            try:
                return synchronize(*args, **kwargs)
            finally:
                self._note(sys._getframe(1))

        return synchronized

    def _note(self, frame: FrameType | None) -> None:
        phase = self._clock.current.phase
        if threading.get_ident() == self._thread and base_phase(phase) != MONITORING:
            self._synced()  # first, because the GPU is idle now
            if (seen := line_of(frame)) is not None:
                self._lines.add(phase, seen.file, seen.line, seen.function)

    def _count(self) -> int:
        """Return the number of GPU memory allocations by torch: about one per operation."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._gpu)["allocation"]["all"]["allocated"])
