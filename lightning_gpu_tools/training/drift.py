"""Readings of quantities that may grow with the step time: objects, memory, files, batches, and the loss's graph."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from time import monotonic  # by name: a program's tests may replace those of `time`
from typing import Any, NamedTuple, cast, get_args

import torch

from lightning_gpu_tools.host import resident_memory_bytes
from lightning_gpu_tools.training.run_measurements import LogFile, Quantity
from lightning_gpu_tools.training.stacks import io_counters
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock

# Our defaults.
_INTERVAL_S = 0.25  # at first
_MAX_READINGS = 200  # beyond that, every second one is dropped, and the interval doubles
_PARTS = 12  # of a run, to detect whether more is written and read per step
_COST = 100  # the time between two readings, as a multiple of the duration of one
_MAX_FILES = 1000  # in a logger's folder
_MAX_COUNTED_BYTES = 64 * 2**20  # of a file whose rows are counted
_CHUNK_BYTES = 2**20
_WITH_ROWS = (".csv", ".tsv", ".jsonl", ".txt", ".log")
_FIRST_EVERY = 11  # steps, for the graph; later, the next reading comes when the run is 25 % longer
_MANY_NODES = 1000  # of a graph, which take so long to walk through that the step does not count for the step times
_MAX_NODES = 10_000  # which take some milliseconds to walk through

Points = Sequence[tuple[float, float]]


class GraphSizes:
    """A record of the number of operations in backward, for fewer and fewer steps.

    In other steps it costs one comparison.
    """

    def __init__(self, clock: StepClock) -> None:
        self.points: list[tuple[float, float]] = []  # step, number of operations
        self.next_step: float = WARM_UP_STEPS + 3
        self._clock = clock

    def around(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that runs backward, whose first argument is the loss."""
        clock = self._clock

        def called(*args: Any, **kwargs: Any) -> Any:
            if clock.steps >= self.next_step:
                self.record(args[0] if args else None)
            return backward(*args, **kwargs)

        return called

    def record(self, loss: object) -> None:
        """Record the size of a loss's graph. ``loss`` may also be a sequence of tensors."""
        step = self._clock.steps
        self.next_step = step + max(_FIRST_EVERY, step // 4)
        try:
            self._clock.as_own_work(self._count, step, loss)
        except Exception:  # noqa: BLE001 - the graph of a new torch, or a loss of the program's own class
            self.next_step = math.inf

    def _count(self, step: int, loss: object) -> None:
        first = loss[0] if isinstance(loss, (list, tuple)) and loss else loss
        if isinstance(first, torch.Tensor) and first.grad_fn is not None:
            nodes = _nodes_behind(first.grad_fn)
            self.points.append((step, nodes))
            if nodes > _MANY_NODES:
                self._clock.times.left_out.add(step)


def _nodes_behind(node: Any) -> int:
    seen, new = {node}, [node]
    while new and len(seen) < _MAX_NODES:
        for before, _ in new.pop().next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                new.append(before)
    return len(seen)


class _Reading(NamedTuple):
    step: int
    python_objects: int
    resident_bytes: int
    written_bytes: int | None  # a counter
    batch_items: int | None
    lost_clock_percent: float | None


class Drift:
    """A reader of these quantities, in bounded memory, for a background thread.

    ``logs`` has the folder of each logger by the logger's class, without files whose names begin with ``own``.
    ``lost_clock_percent`` returns the part of the GPU's highest clock that heat and power take; ``None`` if unknown.
    """

    def __init__(
        self,
        clock: StepClock,
        graph: GraphSizes,
        logs: Mapping[str, str],
        own: str,
        lost_clock_percent: Callable[[], float | None],
    ) -> None:
        self.log_files: dict[str, LogFile] = {}  # by the logger's class
        self._clock, self._graph, self._logs, self._own = clock, graph, logs, own
        self._lost_clock_percent = lost_clock_percent
        # Of the training thread, which creates this object, because other threads write this package's reports.
        self._thread = f"self/task/{threading.get_native_id()}"
        self._readings: list[_Reading] = []
        self._interval_s = _INTERVAL_S
        self._first_sizes: dict[str, dict[str, int]] = {}

    def poll(self) -> float:
        """Read everything once, and return the seconds until the next reading."""
        began_s, clock = monotonic(), self._clock
        if clock.steps <= clock.warm_up_steps:
            return self._interval_s
        reading = _Reading(
            clock.steps,
            sys.getallocatedblocks(),  # len(gc.get_objects()) takes a hundred times as long
            resident_memory_bytes(),
            io_counters(self._thread).get("wchar"),
            clock.times.batch_items,
            self._lost_clock_percent(),
        )
        self._readings.append(reading)
        if len(self._readings) > _MAX_READINGS:
            self._readings = self._readings[::2]
            self._interval_s *= 2
        for logger, folder in self._logs.items():
            self._read_folder(logger, folder)
        return max(self._interval_s, _COST * (monotonic() - began_s))

    def _read_folder(self, logger: str, folder: str) -> None:
        try:
            sizes = dict(self._files_in(folder))
        except OSError:  # not there yet, or removed
            return
        first, known = self._first_sizes.setdefault(logger, sizes), self.log_files.get(logger)
        name = max(sizes, key=lambda name: sizes[name] - first.get(name, 0), default=None)
        is_being_rewritten = known is not None and sizes.get(known.name, 0) < known.size_bytes
        if name is not None and not is_being_rewritten:
            self.log_files[logger] = LogFile(
                name=name, size_bytes=sizes[name], rows=_rows(os.path.join(folder, name), sizes[name])
            )

    def _files_in(self, folder: str) -> Iterator[tuple[str, int]]:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _MAX_FILES):
                if entry.is_file() and not entry.name.startswith((".", self._own)):
                    yield entry.name, entry.stat().st_size

    def facts(self, storage: Points = ()) -> dict[Quantity, Points]:
        """Return the quantities that are known, in any thread; ``storage`` has bytes read from storage by step."""
        readings = list(self._readings)

        def points_of(name: str) -> Points:
            return [(one.step, value) for one in readings if (value := getattr(one, name)) is not None]

        levels = {name: points_of(name) for name in get_args(Quantity) if name in _Reading._fields}
        found = {
            **levels,
            "written_bytes_per_step": _rates(points_of("written_bytes")),
            "storage_bytes_per_step": _rates([point for point in storage if point[0] > self._clock.warm_up_steps]),
            "graph_nodes": tuple(self._graph.points),
        }
        return cast(dict[Quantity, Points], {name: points for name, points in found.items() if points})


def _rates(counter: Points) -> Points:
    """Return the growth of a counter per step, in parts of the run that are long enough to include rare events."""
    ends = list(counter[:1])
    for step, count in counter[1:]:
        if step > ends[-1][0] and step - ends[-1][0] >= (counter[-1][0] - counter[0][0]) / _PARTS:
            ends.append((step, count))
    return [
        ((step + before) / 2, (count - count_before) / (step - before))
        for (before, count_before), (step, count) in pairwise(ends)
    ]


def _rows(path: str, size_bytes: int) -> int | None:
    if not path.endswith(_WITH_ROWS) or size_bytes > _MAX_COUNTED_BYTES:
        return None
    try:
        with open(path, "rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))
    except OSError:  # removed since it was listed
        return None
