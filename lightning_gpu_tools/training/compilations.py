"""The functions that torch.compile recompiles during training, from torch's own record of compilations."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.run_measurements import Recompiled
from lightning_gpu_tools.training.source_lines import shown_path

_POLL_S = 1.0  # our default: torch keeps only its last 64 compilations
_MAX_RECOMPILED = 10  # our default: functions to report
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")  # the rest of a function after a graph break
_NUMBER = re.compile(r"^[\d/!]+: ")  # of the earlier code, before a reason


class Compilations:
    """A reader of that record, for any thread."""

    def __init__(self) -> None:
        self._began_s = time.time()
        self._last: Any = None  # entry of the record that was read
        self._functions: dict[str, Recompiled] = {}  # by torch's number
        self._total_s = 0.0
        self._lock = threading.Lock()

    def poll(self) -> float:
        """Read new entries, and return the seconds until the next poll."""
        with self._lock:
            self._read()
        return _POLL_S

    def total_s(self) -> float:
        """Return the duration of all compilations that began during training."""
        with self._lock:
            self._read()
            return self._total_s

    def facts(self) -> tuple[Recompiled, ...] | None:
        """Return the functions compiled again so far, most time first; ``None`` if nothing was compiled."""
        with self._lock:
            self._read()
            if not self._functions:
                return None
            again = [one for one in self._functions.values() if one.count]
            again.sort(key=lambda one: -one.seconds)
        return tuple(again[:_MAX_RECOMPILED])

    def _read(self) -> None:
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
