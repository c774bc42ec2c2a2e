"""The program's own lines: the innermost on a stack, those that wait for the GPU, and functions compiled again."""

import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch

from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import MONITORING, base_phase
from lightning_gpu_tools.training.run_measurements import Recompiled, SourceLine, WatchedSteps
from lightning_gpu_tools.training.stacks import PACKAGES, TRAINER_FUNCTIONS, owner_of
from lightning_gpu_tools.training.stopwatch import Stopwatch

_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
# Our defaults.
_MAX_FILES = 10_000  # in the cache
_MAX_LINES = 1000  # to return, most frequent first


class Seen(NamedTuple):
    """The source line at which a thread was sampled."""

    file: str
    line: int
    function: str
    is_loading: bool  # torch's loader was getting samples from the program


Place = tuple[str, str, int, str]  # phase, file, line, and function


def lines_of(samples: Counter[Place]) -> list[SourceLine]:
    """Return the lines with these numbers of samples, most frequent first. Safe in any thread."""
    return [SourceLine(*place, count) for place, count in samples.copy().most_common(_MAX_LINES)]


def stack_of(frames: Iterable[tuple[FrameType, int]]) -> list[dict[str, Any]]:
    """Return frames with their lines, as from ``traceback.walk_stack``, in the form in which torch records a stack."""
    return [
        {"filename": frame.f_code.co_filename, "line": line or 0, "name": frame.f_code.co_name}
        for frame, line in frames
    ]


def line_of(frame: FrameType) -> Seen | None:
    """Return the user's innermost line on a stack, ignoring callers of the Trainer or the loader.

    Without a line of the user, return the innermost line of a library, else the outermost line of torch.
    """
    return line_in(stack_of(traceback.walk_stack(frame)), or_torchs=True)


def line_in(stack: Iterable[Mapping[str, Any]], *, or_torchs: bool = False) -> Seen | None:
    """Return the innermost line of the user, else of a library, on a stack in torch's form.

    ``None`` if all are of torch or Python, as in torch's backward, unless ``or_torchs``.
    """
    users: Mapping[str, Any] | None = None
    library: Mapping[str, Any] | None = None
    outermost: Mapping[str, Any] | None = None
    owner = ""
    for frame in stack:
        owner = owner_of(frame["filename"])
        if owner == "trainer" and frame["name"] in TRAINER_FUNCTIONS:
            break
        if owner == "user":
            if users is not None and users["name"] in _COMPREHENSIONS and frame["filename"] == users["filename"]:
                users = {**users, "name": frame["name"]}  # which contains the comprehension
            users = users or frame
        elif owner in ("library", "trainer"):
            library = library or frame
        if owner == "fetch":
            outermost = outermost or frame
            break
        if owner != "own":
            outermost = frame
    is_loading = owner == "fetch"
    found = users or library or (outermost if or_torchs or is_loading else None)
    return None if found is None else Seen(shown_path(found["filename"]), found["line"], found["name"], is_loading)


@lru_cache(_MAX_FILES)
def shown_path(path: str) -> str:
    """Return a path relative to the folder of installed packages, or to the current folder, if it is inside."""
    for part in PACKAGES:
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
        self._waits: Counter[Place] = Counter()
        self._patches = Patches()
        self._is_recording = False
        self._thread = 0
        self._operations_before = 0

    def facts(self) -> WatchedSteps | None:
        """Return the waits so far; ``None`` before the first step."""
        if not self._steps:
            return None
        syncs = tuple(lines_of(self._waits))
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

    def _note(self, frame: FrameType) -> None:
        phase = self._clock.current.phase
        if threading.get_ident() == self._thread and base_phase(phase) != MONITORING:
            self._synced()  # first, because the GPU is idle now
            if (seen := line_of(frame)) is not None:
                self._waits[phase, seen.file, seen.line, seen.function] += 1

    def _count(self) -> int:
        """Return the number of GPU memory allocations by torch: about one per operation."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._gpu)["allocation"]["all"]["allocated"])


_POLL_COMPILATIONS_S = 1.0  # our default: torch keeps only its last 64 compilations
_MAX_RECOMPILED = 10  # our default: functions to report
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")  # the rest of a function after a graph break
_NUMBER = re.compile(r"^[\d/!]+: ")  # of the earlier code, before a reason


class Compilations:
    """The functions that torch.compile compiles again, from torch's own record. For any thread."""

    def __init__(self) -> None:
        self._began_s = time.time()
        self._last: Any = None  # entry of the record that was read
        self._functions: dict[str, Recompiled] = {}  # by torch's number
        self._total_s = 0.0
        self._lock = threading.Lock()

    def poll(self) -> float:
        """Read new entries, and return the seconds until the next poll."""
        self._read()
        return _POLL_COMPILATIONS_S

    def total_s(self) -> float:
        """Return the duration of all compilations that began during training."""
        self._read()
        return self._total_s

    def facts(self) -> tuple[Recompiled, ...] | None:
        """Return the functions compiled again so far, most time first; ``None`` if nothing was compiled."""
        self._read()
        again = [one for one in [*self._functions.values()] if one.count]
        again.sort(key=lambda one: -one.seconds)
        return tuple(again[:_MAX_RECOMPILED]) if self._functions else None

    def _read(self) -> None:
        with self._lock:
            entries = compat.compilations() or []
            known = next((place for place, one in enumerate(entries, 1) if one is self._last), 0)
            for one in entries[known:]:
                self._add(one)
                self._last = one

    def _add(self, one: Any) -> None:
        seconds, is_new = (one.end_time_us - one.start_time_us) / 1e6, one.start_time_us / 1e6 >= self._began_s
        self._total_s += seconds * is_new
        number, _, compiled_before = str(one.compile_id).rpartition("/")
        function = self._functions.get(number, Recompiled())
        if one.co_name:
            resumed = _RESUMED.fullmatch(one.co_name)
            function = replace(
                function,
                file=shown_path(one.co_filename or ""),
                line=int(resumed[2]) if resumed else one.co_firstlineno or 0,
                function=resumed[1] if resumed else one.co_name,
            )
        if is_new and compiled_before.isdigit() and int(compiled_before):
            function = replace(function, seconds=function.seconds + seconds)
            if one.is_forward is not False:  # else the second part of one, when backward runs for the first time
                reason = _NUMBER.sub("", getattr(one, "recompile_reason", None) or function.reason)
                function = replace(function, reason=reason, count=function.count + (not one.fail_reason))
        self._functions[number] = function
