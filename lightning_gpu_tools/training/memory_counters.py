"""Readings of torch's GPU memory counters in some training steps, and of the processes' memory over the run."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from time import monotonic, perf_counter  # by name: a program's tests may replace those of `time`
from typing import Any, Literal, Protocol, get_args

import torch

from lightning_gpu_tools.host import private_memory_bytes, read_host_budget, resident_memory_bytes
from lightning_gpu_tools.training.gpu_timeline import enclosed
from lightning_gpu_tools.training.memory_readings import (
    MemoryGrowth,
    MemoryHoldings,
    MemoryPoint,
    MemoryReading,
    RankMemory,
    StepMemory,
    Whose,
    steady_growth,
)
from lightning_gpu_tools.training.memory_trace import Allocated, MemoryTrace
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.training.timeline import Timeline

# Our defaults.
_BUDGET_S = 2e-6  # per step on average; reading a step takes about 100 us
_MAX_INTERVAL = 200  # steps, even if reading is slow
_MAX_EARLY_STEPS = 64  # read until the optimizer steps; gradients are rarely accumulated over more steps
_MAX_SKIPPED_STEPS = 4  # by a gradient scaler; an optimizer that has no state after more steps never has one
_MAX_POINTS = 200
# Attributes of DeepSpeed's optimizers (0.19: ZeRO 3; 1 and 2).
_MASTER_WEIGHTS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
_GRADIENTS = ("grad_partitions_flat_buffer", "averaged_gradients")

_Function = Callable[..., Any]


class _Training(Protocol):
    """The required part of ``runs.run.Run``."""

    @property
    def device(self) -> torch.device: ...
    @property
    def gpu(self) -> torch.device | None: ...
    @property
    def module(self) -> torch.nn.Module | None: ...
    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...
    @property
    def optimizer_steps(self) -> int: ...
    @property
    def is_plain_ddp(self) -> bool: ...
    @property
    def precision(self) -> str | None: ...


def read_memory(gpu: torch.device) -> MemoryReading | None:
    """Return the current counters of torch's allocator for a GPU; ``None`` before CUDA has started."""
    # Not torch.cuda.memory_stats, which takes 100 to 500 us to sort 122 keys.
    stats = torch.cuda.memory.memory_stats_as_nested_dict(gpu.index or 0)
    if not stats:
        return None

    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return MemoryReading(
        allocated_bytes=allocated["current"],
        peak_allocated_bytes=allocated["peak"],
        reserved_bytes=reserved["current"],
        peak_reserved_bytes=reserved["peak"],
        inactive_split_bytes=stats["inactive_split_bytes"]["all"]["current"],
        retries=stats["num_alloc_retries"],
        allocations=stats["allocation"]["all"]["allocated"],
    )


def count_holdings(training: _Training) -> MemoryHoldings:
    """Return the memory that training holds on its GPU now; no buffers without a model. 7 ms for 1,000 parameters."""
    module, optimizers, weights = training.module, training.optimizers, _weights(training)
    gradients_bytes = count_gradients(training)
    sends_copies = training.is_plain_ddp and not any(map(_is_part, _gradients(weights)))
    seen: set[int] = set()

    def size(*objects: object) -> int:
        return _size(objects, training.device, seen)

    return MemoryHoldings(
        parameters_bytes=size(weights, [getattr(weight, "ds_tensor", None) for weight in weights]),
        gradients_bytes=gradients_bytes,
        gradients_kept_bytes=gradients_bytes,
        gradient_buckets_bytes=gradients_bytes if sends_copies else 0,
        optimizer_bytes=size([[*one.state.values()] for one in optimizers], _attributes(optimizers, _MASTER_WEIGHTS)),
        buffers_bytes=0 if module is None else size([*module.buffers()]),
    )


def count_gradients(training: _Training) -> int:
    """Return the size of the current gradients in bytes."""
    gradients = [_gradients(_weights(training)), _attributes(training.optimizers, _GRADIENTS)]
    return _size(gradients, training.device, set())


def _weights(training: _Training) -> list[torch.nn.Parameter]:
    if training.module is not None:
        return list(training.module.parameters())
    return [weight for one in training.optimizers for group in one.param_groups for weight in group["params"]]


def _gradients(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _attributes(optimizers: Iterable[object], names: Iterable[str]) -> list[object]:
    return [getattr(optimizer, name, None) for optimizer in optimizers for name in names]


def _is_part(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is a view of larger storage, as with DDP's ``gradient_as_bucket_view=True``."""
    return gradient.layout is torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes


def _size(objects: object, device: torch.device, seen: set[int]) -> int:
    """Return the size of the storages on a device that are not in ``seen``, and add them to it."""
    size = 0
    for tensor in plain_tensors(objects):
        if tensor.device == device:
            storage = tensor.untyped_storage()
            size += 0 if storage.data_ptr() in seen else storage.nbytes()
            seen.add(storage.data_ptr())
    return size


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a structure, including those wrapped by a tensor such as DTensor."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors([getattr(value, name) for name in names])
        elif value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
        else:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from plain_tensors(one)


class MemoryCounters:
    """A reader of the memory counters at the moments of a step, in some steps.

    Every step is read up to the one after the optimizer's first; after that, as many random steps as the budget allows.
    In other steps each call costs one comparison.
    """

    def __init__(self, training: _Training, clock: StepClock) -> None:
        assert training.gpu is not None
        self.when_read: Callable[[], None] = lambda: None  # called after a step
        self.failure: Exception | None = None  # the error that ended the readings
        self.is_reading = False
        self._training = training
        self._gpu = training.gpu
        self._clock = clock
        self._random = random.Random(0)  # a separate generator, so that training's random numbers do not change
        self._next_step = 1.0
        self._spent_s = 0.0
        self._moments: dict[str, MemoryReading] = {}
        self._batch_step = 0  # the step whose batch has not been recorded yet
        self._batch_shape: tuple[int, ...] | None = None
        self._latest: MemoryReading | None = None
        self._first: StepMemory | None = None
        self._last: StepMemory | None = None
        self._traced: StepMemory | None = None
        self._trace = MemoryTrace(self._gpu)
        self._holdings: MemoryHoldings | None = None
        self._gradients_bytes = 0
        self._optimizer_steps = training.optimizer_steps
        self._peak_bytes = self._total_bytes = 0
        self._peaks: dict[str, int] = {}
        self._timelines = [Timeline(_MAX_POINTS, 1.0) for _ in MemoryPoint._fields[1:]]
        self._before: MemoryReading | None = None  # None if CUDA had not started: nothing trains on it
        self._do(self._begin)

    def _begin(self) -> None:
        if read_memory(self._gpu) is None:
            self._next_step = math.inf
        else:
            self._before = self._read("before_training")
            self._total_bytes = torch.cuda.get_device_properties(self._gpu).total_memory

    def around_step(self, function: _Function) -> _Function:
        """Wrap a function that runs a training step to read the counters at its start and end."""
        return enclosed(self.begin_step, function, self.end_step)

    def after_forward(self, function: _Function) -> _Function:
        """Wrap a function that runs forward to read the counters at its end."""
        return enclosed(lambda: None, function, lambda: self.note("after_forward", "forward"))

    def around_backward(self, function: _Function) -> _Function:
        """Wrap a function that runs backward to read the counters at its start and end."""
        return enclosed(
            lambda: self.note("before_backward", "forward"), function, lambda: self.note("after_backward", "backward")
        )

    def begin_step(self) -> None:
        """Begin a step, and read the counters if it is the next one to read."""
        if self._clock.steps >= self._next_step:
            self._spent_s, self._moments = 0.0, {}
            self._batch_step, self._batch_shape = self._clock.steps, None
            self.is_reading = True
            self.note("begin", "training")
            # The first step of all, and the first that begins with the optimizer's states.
            if self._last is None or (self._first is not None and self._last is self._first):
                self._clock.times.left_out.add(self._clock.steps)
                self._do(self._trace.start)

    def note(self, moment: str, phase: str) -> None:
        """Read the counters after a phase, at the step's first such moment (a field of ``StepMemory``)."""
        if self.is_reading:
            self._do(self._note, moment, phase)

    def end_step(self) -> None:
        """End a step, after the optimizer."""
        if self.is_reading:
            self.note("end", "optimizer")
            self._do(self._keep_step)
            self.is_reading = False

    def close(self) -> None:
        """Restore torch to its original state, also within a step."""
        self._trace.stop()

    def enter(self, phase: str) -> None:
        """Read the counters when validation begins or training continues."""
        if self._before is not None:
            self._do(self._read, "training" if phase == "validation" else "validation")

    @property
    def wants_batch(self) -> bool:
        """Whether the shape of the current step's batch has not been recorded yet."""
        return self._batch_step == self._clock.steps

    def note_batch(self, shape: tuple[int, ...] | None) -> None:
        """Record the shape of the current step's batch."""
        self._batch_step, self._batch_shape = 0, shape
        if not self.is_reading and self._last is not None:  # a Trainer passes the batch after the step has ended
            is_first = self._last is self._first
            is_traced = self._last is self._traced
            self._last = dataclasses.replace(self._last, batch_shape=shape)
            self._first = self._last if is_first else self._first
            self._traced = self._last if is_traced else self._traced

    def _do(self, action: _Function, *args: Any) -> None:
        if self.failure is None:
            self._clock.as_own_work(self._guard, action, *args)

    def _guard(self, action: _Function, *args: Any) -> None:
        began_s = perf_counter()
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - renamed counters, an allocator without counters, an unusual tensor
            self.failure = error.with_traceback(None)  # frames in the traceback would keep a batch alive
            self.is_reading, self._next_step = False, math.inf
            self._trace.stop()
        self._spent_s += perf_counter() - began_s

    def _read(self, phase: str) -> MemoryReading:
        reading = self._latest = read_memory(self._gpu)
        assert reading is not None  # CUDA has started
        if reading.peak_allocated_bytes > self._peak_bytes:
            self._peak_bytes = self._peaks[phase] = reading.peak_allocated_bytes
        return reading

    def _note(self, moment: str, phase: str) -> None:
        self._moments.setdefault(moment, self._read(phase))
        if moment == "after_backward" and not self._gradients_bytes:
            self._gradients_bytes = count_gradients(self._training)
        elif moment == "begin" and self._holdings is not None and self._last is self._first:
            kept_bytes = count_gradients(self._training)
            self._holdings = dataclasses.replace(self._holdings, gradients_kept_bytes=kept_bytes)

    def _keep_step(self) -> None:
        needs = self._trace.take(*self._traced_moments(), is_first=self._first is None)
        step = self._last = StepMemory(
            step=self._clock.steps, batch_shape=self._batch_shape, needs=needs, **self._moments
        )
        self._traced = step if needs else self._traced
        sizes = [reading.allocated_bytes for reading in step.readings]
        points = sizes[0], max(sizes), self._moments["end"].reserved_bytes
        for timeline, size in zip(self._timelines, points, strict=True):
            timeline.add(self._clock.wall_s, size)
        if self._holdings is None and self._has_optimized():
            self._first = step
            held = count_holdings(self._training)
            gradients_bytes = max(held.gradients_bytes, self._gradients_bytes)
            self._holdings = dataclasses.replace(held, gradients_bytes=gradients_bytes)
        interval = 1
        has_next = self._first is not None and self._first is not step  # a step that begins with the optimizer's states
        if has_next or step.step >= _MAX_EARLY_STEPS:
            interval = min(_MAX_INTERVAL, max(1, math.ceil(self._spent_s / _BUDGET_S)))
        self._next_step = step.step + self._random.randint(1, 2 * interval - 1)
        self.when_read()

    def _traced_moments(self) -> tuple[Allocated, Sequence[torch.Tensor]]:
        moments = {name: reading.allocations for name, reading in self._moments.items()}
        begin, end = moments["begin"], moments["end"]
        before = moments.get("after_forward", moments.get("before_backward", end))
        # With manual optimization there may be several backwards, and not all work after the first is the optimizer's.
        after = moments.get("after_backward", end) if "after_forward" in moments else end
        is_mixed = "mixed" in (self._training.precision or "")
        weights = _weights(self._training) if is_mixed else []
        return Allocated(begin, before, after, end), weights

    def _has_optimized(self) -> bool:
        steps = self._training.optimizer_steps - self._optimizer_steps
        return steps >= (1 if any(one.state for one in self._training.optimizers) else _MAX_SKIPPED_STEPS)

    @property
    def kept_bytes(self) -> int | None:
        """Bytes in tensors at the start of the last step read. Safe in any thread."""
        last = self._last
        return None if last is None or last.begin is None else last.begin.allocated_bytes

    @property
    def room_bytes(self) -> int | None:
        """Additional bytes that would fit if nobody else used the GPU."""
        return max(0, self._total_bytes - self._peak_bytes) if self._total_bytes else None

    def facts(self) -> RankMemory | None:
        """Return the readings so far; ``None`` if a counter could not be read."""
        if self._latest is None or self.failure is not None:
            return None
        points = zip(*(timeline.points() for timeline in self._timelines), strict=True)
        return RankMemory(
            latest=self._latest,
            before_training=self._before,
            holdings=self._holdings,
            first_step=self._first,
            last_step=self._last,
            traced_step=self._traced,
            peaks_bytes=dict(self._peaks),
            timeline=tuple(MemoryPoint(kept[0], kept[1], step[1], reserved[1]) for kept, step, reserved in points),
        )


# Our defaults.
_MAX_HISTORY_POINTS = 500
_INTERVAL_S = 1.0
_EARLY_S, _EARLY_INTERVAL_S = 60.0, 0.25  # twice as often as the first alarm requires, because a thread may be late
_WORKERS_EVERY = 100  # limits this to 1 % of the thread's time: the kernel walks all pages of the workers' memory
# Memory that has grown for five minutes is reported if it will be full within a day. For shorter growth the limit
# shrinks in proportion: after 12 s, memory is reported if it will be full within an hour.
_ALARM_S = 24 * 3600.0
_ALARM_EVERY_S = 300.0
_FIRST_ALARM_S = 12.0


class MemoryHistory:
    """A history of host memory, sampled in a separate thread, with regular checks whether it or GPU memory grows."""

    def __init__(
        self,
        gpu: MemoryCounters | None = None,
        worker_pids: Callable[[], list[int]] = list,
        is_validating: Callable[[], bool] = lambda: False,
    ) -> None:
        self.alarms: list[MemoryGrowth] = []  # memory that will be full within a day, each kind once
        self._gpu = gpu
        self._worker_pids = worker_pids
        self._is_validating = is_validating
        self._began_s: float | None = None
        self._alarm_due_s = _FIRST_ALARM_S
        self._workers_due_s = 0.0
        self._timelines: dict[Whose, Timeline] = {
            whose: Timeline(_MAX_HISTORY_POINTS, _EARLY_INTERVAL_S) for whose in get_args(Whose)
        }
        self._last_bytes: int | None = None
        self._grown_bytes: Counter[Literal["training", "validation"]] = Counter()  # of this process

    def poll(self) -> float:
        """Sample the memory in use, and return the seconds until the next poll."""
        now_s = monotonic()
        if self._began_s is None:
            self._began_s = now_s
        resident_bytes = resident_memory_bytes()
        self._timelines["process"].add(now_s, resident_bytes)
        phase: Literal["training", "validation"] = "validation" if self._is_validating() else "training"
        self._grown_bytes[phase] += resident_bytes - (self._last_bytes or resident_bytes)
        self._last_bytes = resident_bytes
        if now_s >= self._workers_due_s and (sizes := private_memory_bytes(self._worker_pids())):
            self._timelines["workers"].add(now_s, sum(sizes))
            self._workers_due_s = now_s + _WORKERS_EVERY * (monotonic() - now_s)
        if self._gpu is not None and (kept_bytes := self._gpu.kept_bytes) is not None:
            self._timelines["gpu"].add(now_s, kept_bytes)
        seen_s = now_s - self._began_s
        if seen_s >= self._alarm_due_s:
            self._alarm_due_s = seen_s + min(seen_s, _ALARM_EVERY_S)
            self._judge(seen_s)
        return _EARLY_INTERVAL_S if seen_s < _EARLY_S else _INTERVAL_S

    def _judge(self, seen_s: float) -> None:
        horizon_s = _ALARM_S * min(1.0, seen_s / _ALARM_EVERY_S)
        known = {growth.whose for growth in self.alarms}
        for growth in self.growth():
            if growth.whose not in known and growth.left_s is not None and growth.left_s < horizon_s:
                self.alarms.append(growth)

    def growth(self) -> tuple[MemoryGrowth, ...]:
        """Return the memory that has grown steadily up to now."""
        on_host_bytes, found = read_host_budget().memory_available_bytes, []
        on_gpu_bytes = None if self._gpu is None else self._gpu.room_bytes
        for whose, timeline in self._timelines.items():
            growth = steady_growth(whose, timeline.points(), on_gpu_bytes if whose == "gpu" else on_host_bytes)
            if growth is not None and whose == "process" and "validation" in self._grown_bytes:
                growth = replace(growth, phase=self._grown_bytes.most_common(1)[0][0])
            if growth is not None:
                found.append(growth)
        return tuple(found)
