"""Readings of torch's GPU memory counters in some training steps, and records of the allocations in a few of them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from time import perf_counter  # by name: a program's tests may replace those of `time`
from typing import Any

import torch

from lightning_gpu_tools.memory.blocks import (
    MemoryRecorder,
    blocks_at_peak,
    by_line,
    events_with_growth,
    live_blocks,
    peak_bytes,
    recorded_events,
    segments,
)
from lightning_gpu_tools.memory.holdings import (
    Training,
    count_gradients,
    count_holdings,
    fixed_sizes_of,
    weights_of,
)
from lightning_gpu_tools.memory.readings import (
    Block,
    MemoryHoldings,
    MemoryLine,
    MemoryReading,
    RankMemory,
    Segment,
    StepMemory,
)
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.step_clock import StepClock

# Our defaults.
_BUDGET_S = 2e-6  # per step on average; reading a step takes about 100 µs
_MAX_INTERVAL = 200  # steps, even if reading is slow
_MAX_EARLY_STEPS = 64  # read until the optimizer steps; gradients are rarely accumulated over more steps
_MAX_SKIPPED_STEPS = 4  # by a gradient scaler; an optimizer that has no state after more steps never has one
_Function = Callable[..., Any]


def read_memory(gpu: torch.device) -> MemoryReading | None:
    """Return the current counters of torch's allocator for a GPU; ``None`` before CUDA has started."""
    # Not torch.cuda.memory_stats, which takes 100 to 500 µs to sort 122 keys.
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
        inactive_splits=stats["inactive_split"]["all"]["current"],
        retries=stats["num_alloc_retries"],
        allocations=stats["allocation"]["all"]["allocated"],
    )


class MemoryCounters:
    """A reader of the memory counters at the moments of a step, in some steps.

    Every step is read up to the one after the optimizer's first; after that, as many random steps as the budget allows.
    In other steps each call costs one comparison.
    """

    def __init__(self, training: Training, clock: StepClock) -> None:
        assert training.gpu is not None
        self.when_read: Callable[[], None] = lambda: None  # called after a step
        self.failure: Exception | None = None  # the error that ended the readings
        self.is_reading = False
        self._training = training
        self._gpu = training.gpu
        self._clock = clock
        self._random = random.Random(0)  # a separate generator, so that training's random numbers do not change
        self.next_step = 1.0  # the next one to read, by the clock
        self._spent_s = 0.0
        self._moments: dict[str, MemoryReading] = {}
        self._batch_step = 0  # the step whose batch has not been recorded yet
        self._batch_shape: tuple[int, ...] = ()
        self._latest: MemoryReading | None = None
        self._first: StepMemory | None = None
        self._last: StepMemory | None = None
        self._segments: tuple[Segment, ...] = ()
        self._recorded: list[StepMemory] = []
        self._is_recorded = True  # all steps so far that a replay needs
        self.room_bytes = 0  # the most that torch could use next to other processes; 0 = unknown
        self._steps_read = 0
        self._recorder = MemoryRecorder()
        self._records_step = False
        self._replays = 0  # of CUDA graphs before the step that is read
        self.usual: set[int] = set()  # addresses of recorded blocks that the optimizer's first step has left
        self._peak_lines: tuple[MemoryLine, ...] = ()
        self._earlier_bytes = 0
        self._earlier: set[int] = set()  # addresses of blocks from before training
        self._batch: set[int] = set()  # of blocks allocated between then and the step, until holdings are known
        self._holdings: MemoryHoldings | None = None
        self._gradients_bytes = 0
        self._optimizer_steps = training.optimizer_steps
        self._peak_bytes = self._total_bytes = self._kept_bytes = 0
        self._peaks: dict[str, int] = {}
        self._before: MemoryReading | None = None  # None if CUDA had not started: nothing trains on it
        self._do(self._begin)

    def _begin(self) -> None:
        if read_memory(self._gpu) is None:
            self.next_step = math.inf
        else:
            before = self._before = self._read("before_training")
            held = count_holdings(self._training)
            self._earlier = {one.address for one in live_blocks(self._gpu)}
            self._earlier_bytes = max(0, before.allocated_bytes - held.between_steps_bytes)
            self._total_bytes = torch.cuda.get_device_properties(self._gpu).total_memory

    def after_forward(self, function: _Function) -> _Function:
        """Wrap a function that runs forward to read the counters at its end."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.note("after_forward", "forward")
            return result

        return forward

    def around_backward(self, function: _Function) -> _Function:
        """Wrap a function that runs backward to read the counters at its start and end."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            self.note("before_backward", "forward")
            result = function(*args, **kwargs)
            self.note("after_backward", "backward")
            return result

        return backward

    def begin_step(self) -> None:
        """Begin a step, and read the counters if it is the next one to read."""
        if self._clock.steps >= self.next_step:
            self._spent_s, self._moments, self._replays = 0.0, {}, self._clock.replays
            self._batch_step, self._batch_shape = self._clock.steps, ()
            self.is_reading = True
            self.note("begin", "training")
            self._steps_read += 1
            # The allocations of all steps that may be replayed are recorded, those of later ones less and less often.
            if self._is_replayed() or self._steps_read.bit_count() == 1:
                self._clock.times.left_out.add(self._clock.steps)
                self._do(self._record_step)

    def _is_replayed(self) -> bool:
        """Return whether this step is not after the first one that begins with the optimizer's states."""
        return self._first is None or self._last is self._first

    def note(self, moment: str, phase: str) -> None:
        """Read the counters after a phase, at the step's first such moment, as in ``StepMemory.readings``."""
        if self.is_reading:
            self._do(self._note, moment, phase)

    def end_step(self) -> None:
        """End a step, after the optimizer."""
        if self.is_reading:
            self.note("end", "optimizer")
            self._do(self._keep_step)
            self.is_reading = False

    def close(self) -> None:
        """Restore torch to its original state, even within a step."""
        self._recorder.stop()

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
        self._batch_step, self._batch_shape = 0, shape or ()
        if not self.is_reading and self._last is not None:  # a Trainer passes the batch after the step has ended
            is_first = self._last is self._first
            self._last = dataclasses.replace(self._last, batch_shape=self._batch_shape)
            self._first = self._last if is_first else self._first
            if self._recorded and self._recorded[-1].step == self._last.step:
                self._recorded[-1] = dataclasses.replace(self._recorded[-1], batch_shape=self._batch_shape)

    def note_failure(self, kept_bytes: int | None, when_it_failed: MemoryReading | None) -> None:
        """Record the counters when memory ran out, and the bytes in tensors when the last step before it began."""
        if self._before is not None:
            self._kept_bytes = kept_bytes or 0
            self._do(self._read, "training")
            if when_it_failed is not None:
                self._peaks["training"] = max(self._peaks.get("training", 0), when_it_failed.allocated_bytes)

    def _do(self, action: _Function, *args: Any) -> None:
        if self.failure is None:
            self._clock.as_own_work(self._guard, action, *args)

    def _guard(self, action: _Function, *args: Any) -> None:
        began_s = perf_counter()
        try:
            if torch.cuda.is_current_stream_capturing():  # into a graph, which keeps what it allocates
                self._skip_step()
            else:
                action(*args)
        except Exception as error:  # noqa: BLE001 - renamed counters, an allocator without counters, an unusual tensor
            self.failure = error.with_traceback(None)  # frames in the traceback would keep a batch alive
            self.is_reading, self.next_step = False, math.inf
            self._recorder.stop()
        self._spent_s += perf_counter() - began_s

    def _skip_step(self) -> None:
        self._is_recorded &= not self._is_replayed()
        self.is_reading = self._records_step = False
        self._recorder.stop()

    def _read(self, phase: str) -> MemoryReading:
        reading = self._latest = read_memory(self._gpu)
        assert reading is not None  # CUDA has started
        if reading.peak_allocated_bytes > self._peak_bytes:
            self._peak_bytes = self._peaks[phase] = reading.peak_allocated_bytes
        return reading

    def _note(self, moment: str, phase: str) -> None:
        self._moments.setdefault(moment, self._read(phase))
        if moment == "begin" and self._holdings is None:
            self._batch = {one.address for one in live_blocks(self._gpu)} - self._earlier
        if moment == "after_backward" and not self._gradients_bytes:
            self._gradients_bytes = count_gradients(self._training)
        elif moment == "begin" and self._holdings is not None and self._last is self._first:
            kept_bytes = count_gradients(self._training)
            self._holdings = dataclasses.replace(self._holdings, gradients_kept_bytes=kept_bytes)

    def _record_step(self) -> None:
        if self._last is None:
            self._segments = segments(self._gpu)
        self._recorder.start("all")
        self._records_step = self._recorder.is_recording

    def _take_record(self) -> tuple[int, tuple[Block, ...]]:
        """End the record of this step.

        Returns the bytes that it adds at its peak, and the events to replay; nothing without a complete record.
        """
        is_replayed, is_begun, self._records_step = self._is_replayed(), self._records_step, False
        events = recorded_events(self._gpu) if is_begun else []
        if is_begun:
            self._recorder.stop()
        moments = {name: reading.allocations for name, reading in self._moments.items()}
        begin, end = moments["begin"], moments["end"]
        has_graph = self._clock.replays > self._replays  # its memory was allocated when it was captured
        if has_graph or not is_begun or sum(event.size > 0 for event in events) != end - begin:
            self._is_recorded &= not is_replayed
            return 0, ()
        after_forward = moments.get("after_forward", moments.get("before_backward", end))
        # With manual optimization there may be several backwards, and not all work after the first is the optimizer's.
        after_backward = moments.get("after_backward", end) if "after_forward" in moments else end
        ends = after_forward - begin, after_backward - begin
        self._peak_lines = by_line(blocks_at_peak(events, ends))
        found: tuple[Block, ...] = ()
        if is_replayed:
            is_mixed = "mixed" in (self._training.precision or "")
            fixed = fixed_sizes_of(self._gpu)
            found = events_with_growth(events, ends, weights_of(self._training), is_mixed=is_mixed, fixed=fixed)
        return peak_bytes(events), found

    def _keep_step(self) -> None:
        before = 0 if self._last is None else self._last.added_bytes
        added_bytes, events = self._take_record()
        step = StepMemory(
            step=self._clock.steps,
            batch_shape=self._batch_shape,
            readings=self._moments,
            added_bytes=added_bytes or before,
        )
        if events:
            # Of the steps up to the optimizer's first, the first and the last.
            place = 1 if self._first is None else len(self._recorded)
            segments_before = () if self._recorded else self._segments
            self._recorded[place:] = [dataclasses.replace(step, segments=segments_before, events=events)]
        self._last = step
        optimized = self._training.optimizer_steps - self._optimizer_steps
        has_state = any(one.state for one in self._training.optimizers)
        if self._holdings is None and optimized >= (1 if has_state else _MAX_SKIPPED_STEPS):
            self._first = step
            held = count_holdings(self._training, self._batch)
            gradients_bytes = max(held.gradients_bytes, self._gradients_bytes)
            self._holdings = dataclasses.replace(held, gradients_bytes=gradients_bytes)
            self.usual = {one.address for one in live_blocks(self._gpu) if one.stack}
            free_bytes, _ = torch.cuda.mem_get_info(self._gpu)
            held_bytes = self._moments["end"].reserved_bytes
            self.room_bytes = int(min(held_bytes + free_bytes, compat.allowed_bytes(self._gpu)))
        interval = 1
        has_next = self._first is not None and self._first is not step  # a step that begins with the optimizer's states
        if has_next or step.step >= _MAX_EARLY_STEPS:
            interval = min(_MAX_INTERVAL, max(1, math.ceil(self._spent_s / _BUDGET_S)))
        self.next_step = step.step + self._random.randint(1, 2 * interval - 1)
        self.when_read()

    @property
    def kept_bytes(self) -> int | None:
        """Bytes in tensors at the start of the last step read. Safe in any thread."""
        last = self._last
        return None if last is None else last.readings["begin"].allocated_bytes

    @property
    def left_bytes(self) -> int | None:
        """Additional bytes that would fit without other processes."""
        return max(0, self._total_bytes - self._peak_bytes) if self._total_bytes else None

    @property
    def recorded(self) -> tuple[StepMemory, ...]:
        """The recorded steps, once the optimizer's first is among them. Safe in any thread."""
        # After that, not every step was read, and the optimizer's first may be missing.
        is_whole = self._is_recorded and self._first is not None and self._first.step < _MAX_EARLY_STEPS
        if not (is_whole and self._recorded and all(one.batch_shape for one in self._recorded)):
            return ()
        return tuple(self._recorded)

    def _left_behind(self) -> tuple[MemoryLine, ...]:
        """Return the lines of memory that recorded steps have left, without that of the optimizer's first step."""
        if self._holdings is None or self.is_reading:
            return ()
        return by_line(one for one in live_blocks(self._gpu) if one.stack and one.address not in self.usual)

    def facts(self) -> RankMemory | None:
        """Return the readings so far; ``None`` if a counter could not be read."""
        if self._latest is None or self.failure is not None:
            return None
        return RankMemory(
            latest=self._latest,
            kept_bytes=self._kept_bytes,
            before_training=self._before,
            earlier_bytes=self._earlier_bytes,
            holdings=self._holdings,
            first_step=self._first,
            last_step=self._last,
            recorded=self.recorded,
            room_bytes=self.room_bytes,
            peak_lines=self._peak_lines,
            kept_lines=self._left_behind(),
            peaks_bytes=dict(self._peaks),
        )
