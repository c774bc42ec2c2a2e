"""Readings of torch's GPU memory counters in some training steps, and records of the allocations in a few of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter  # by name: a program's tests may replace those of `time`
from typing import Any

import torch

from lightning_gpu_tools.memory import blocks, holdings
from lightning_gpu_tools.memory.readings import Block, MemoryReading, RankMemory, Segment, StepMemory
from lightning_gpu_tools.patches import after, before
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

    def __init__(self, training: holdings.Training, clock: StepClock) -> None:
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
        self._batch_shape: tuple[int, ...] = ()
        self._facts: RankMemory | None = None  # None if CUDA had not started: nothing trains on the GPU
        self._total_bytes = 0
        self._segments: tuple[Segment, ...] = ()
        self._recorded: list[StepMemory] = []
        self._is_recorded = True  # all steps so far that a replay needs
        self._steps_read = 0
        self._recorder = blocks.MemoryRecorder()
        self._records_step = False
        self._replays = 0  # of CUDA graphs before the step that is read
        self.usual: set[int] = set()  # addresses of recorded blocks that the optimizer's first step has left
        self._earlier: set[int] = set()  # addresses of blocks from before training
        self._batch: set[int] = set()  # of blocks allocated between then and the step, until holdings are known
        self._gradients_bytes = 0
        self._optimizer_steps = training.optimizer_steps
        self._do(self._begin)

    def _begin(self) -> None:
        before = read_memory(self._gpu)
        if before is None:
            self.next_step = math.inf
            return
        held = holdings.count_holdings(self._training)
        self._earlier = {one.address for one in blocks.live_blocks(self._gpu)}
        self._total_bytes = torch.cuda.get_device_properties(self._gpu).total_memory
        self._facts = RankMemory(
            latest=before,
            before_training=before,
            earlier_bytes=max(0, before.allocated_bytes - held.between_steps_bytes),
            peaks_bytes={"before_training": before.peak_allocated_bytes},
        )

    def after_forward(self, function: _Function) -> _Function:
        """Wrap a function that runs forward to read the counters at its end."""
        return after(partial(self.note, "after_forward", "forward"), function)

    def around_backward(self, function: _Function) -> _Function:
        """Wrap a function that runs backward to read the counters at its start and end."""
        noted = after(partial(self.note, "after_backward", "backward"), function)
        return before(partial(self.note, "before_backward", "forward"), noted)

    def begin_step(self, shape: Callable[[], tuple[int, ...] | None] = lambda: None) -> None:
        """Begin a step, and read the counters and the ``shape`` of its batch if it is the next one to read."""
        if self._clock.steps >= self.next_step:
            self._spent_s, self._moments, self._replays = 0.0, {}, self._clock.replays
            self.is_reading, self._batch_shape = True, ()
            with suppress(Exception):  # of an odd batch
                self._batch_shape = shape() or ()
            self.note("begin", "training")
            self._steps_read += 1
            # The allocations of all steps that may be replayed are recorded, those of later ones less and less often.
            if self._is_replayed() or self._steps_read.bit_count() == 1:
                self._clock.times.left_out.add(self._clock.steps)
                self._do(self._record_step)

    def _is_replayed(self) -> bool:
        """Return whether this step is not after the first one that begins with the optimizer's states."""
        facts = self._facts
        return facts is None or facts.first_step is None or facts.last_step is facts.first_step

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
        if self._facts is not None:
            self._do(self._read, "training" if phase == "validation" else "validation")

    def note_failure(self, kept_bytes: int | None, when_it_failed: MemoryReading | None) -> None:
        """Record the counters when memory ran out, and the bytes in tensors when the last step before it began."""
        if self._facts is not None:
            self._do(self._read, "training")
            peaks = dict(self._facts.peaks_bytes)
            if when_it_failed is not None:
                peaks["training"] = max(peaks.get("training", 0), when_it_failed.allocated_bytes)
            self._facts = replace(self._facts, kept_bytes=kept_bytes or 0, peaks_bytes=peaks)

    def _do(self, action: _Function, *args: Any) -> None:
        if self.failure is None:
            self._clock.as_own_work(self._guard, action, *args)

    def _guard(self, action: _Function, *args: Any) -> None:
        began_s = perf_counter()
        try:
            if torch.cuda.is_current_stream_capturing():  # into a graph, which keeps what it allocates
                self._is_recorded &= not self._is_replayed()
                self.is_reading = self._records_step = False
                self._recorder.stop()
            else:
                action(*args)
        except Exception as error:  # noqa: BLE001 - renamed counters, an allocator without counters, an unusual tensor
            self.failure = error.with_traceback(None)  # frames in the traceback would keep a batch alive
            self.is_reading, self.next_step = False, math.inf
            self._recorder.stop()
        self._spent_s += perf_counter() - began_s

    def _read(self, phase: str) -> MemoryReading:
        reading, facts = read_memory(self._gpu), self._known
        assert reading is not None  # CUDA has started
        peaks = facts.peaks_bytes
        if reading.peak_allocated_bytes > max(peaks.values()):
            peaks = {**peaks, phase: reading.peak_allocated_bytes}
        self._facts = replace(facts, latest=reading, peaks_bytes=peaks)
        return reading

    @property
    def _known(self) -> RankMemory:
        assert self._facts is not None  # CUDA has started
        return self._facts

    def _note(self, moment: str, phase: str) -> None:
        self._moments.setdefault(moment, self._read(phase))
        facts = self._known
        if moment == "begin" and facts.holdings is None:
            self._batch = {one.address for one in blocks.live_blocks(self._gpu)} - self._earlier
        if moment == "after_backward" and not self._gradients_bytes:
            self._gradients_bytes = holdings.count_holdings(self._training).gradients_bytes
        elif moment == "begin" and facts.holdings is not None and facts.last_step is facts.first_step:
            kept_bytes = holdings.count_holdings(self._training).gradients_bytes
            self._facts = replace(facts, holdings=replace(facts.holdings, gradients_kept_bytes=kept_bytes))

    def _record_step(self) -> None:
        if self._known.last_step is None:
            self._segments = blocks.segments(self._gpu)
        self._recorder.start("all")
        self._records_step = self._recorder.is_recording

    def _take_record(self) -> tuple[int, tuple[Block, ...]]:
        """End the record of this step.

        Returns the bytes that it adds at its peak, and the events to replay; nothing without a complete record.
        """
        is_replayed, is_begun, self._records_step = self._is_replayed(), self._records_step, False
        events = blocks.recorded_events(self._gpu) if is_begun else []
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
        events = blocks.with_phases(events, (after_forward - begin, after_backward - begin))
        peak = blocks.find_peak({}, events)
        self._facts = replace(self._known, peak_lines=blocks.by_line(peak.blocks.values()))
        found: tuple[Block, ...] = ()
        if is_replayed:
            found = blocks.events_with_growth(
                events,
                holdings.weights_of(self._training),
                is_mixed="mixed" in (self._training.precision or ""),
                fixed=holdings.fixed_sizes_of(self._gpu),
            )
        return peak.size, found

    def _keep_step(self) -> None:
        added_bytes, events = self._take_record()
        facts = self._known
        if not added_bytes and facts.last_step is not None:
            added_bytes = facts.last_step.added_bytes
        step = StepMemory(
            step=self._clock.steps,
            batch_shape=self._batch_shape,
            readings=self._moments,
            added_bytes=added_bytes,
        )
        if events:
            # Of the steps up to the optimizer's first, the first and the last.
            place = 1 if facts.first_step is None else len(self._recorded)
            segments_before = () if self._recorded else self._segments
            self._recorded[place:] = [replace(step, segments=segments_before, events=events)]
        optimized = self._training.optimizer_steps - self._optimizer_steps
        has_state = any(one.state for one in self._training.optimizers)
        if facts.holdings is None and optimized >= (1 if has_state else _MAX_SKIPPED_STEPS):
            held = holdings.count_holdings(self._training, self._batch)
            held = replace(held, gradients_bytes=max(held.gradients_bytes, self._gradients_bytes))
            self.usual = {one.address for one in blocks.live_blocks(self._gpu) if one.stack}
            free_bytes, _ = torch.cuda.mem_get_info(self._gpu)
            room_bytes = min(self._moments["end"].reserved_bytes + free_bytes, compat.allowed_bytes(self._gpu))
            facts = replace(facts, first_step=step, holdings=held, room_bytes=int(room_bytes))
        self._facts = replace(facts, last_step=step)
        interval = 1
        has_next = facts.first_step not in (None, step)  # a step that begins with the optimizer's states
        if has_next or step.step >= _MAX_EARLY_STEPS:
            interval = min(_MAX_INTERVAL, max(1, math.ceil(self._spent_s / _BUDGET_S)))
        self.next_step = step.step + self._random.randint(1, 2 * interval - 1)
        self.when_read()

    @property
    def kept_bytes(self) -> int | None:
        """Bytes in tensors at the start of the last step read. Safe in any thread."""
        last = None if self._facts is None else self._facts.last_step
        return None if last is None else last.readings["begin"].allocated_bytes

    @property
    def left_bytes(self) -> int | None:
        """Additional bytes that would fit without other processes."""
        return None if self._facts is None else max(0, self._total_bytes - max(self._facts.peaks_bytes.values()))

    @property
    def room_bytes(self) -> int:
        """As in ``RankMemory``. Safe in any thread."""
        return 0 if self._facts is None else self._facts.room_bytes

    @property
    def recorded(self) -> tuple[StepMemory, ...]:
        """The recorded steps, once the optimizer's first is among them. Safe in any thread."""
        # After that, not every step was read, and the optimizer's first may be missing.
        first = None if self._facts is None else self._facts.first_step
        is_whole = self._is_recorded and first is not None and first.step < _MAX_EARLY_STEPS
        return tuple(self._recorded) if is_whole and all(one.batch_shape for one in self._recorded) else ()

    def facts(self) -> RankMemory | None:
        """Return the readings so far; ``None`` if a counter could not be read."""
        facts = self._facts
        if facts is None or self.failure is not None:
            return None
        if facts.holdings is not None and not self.is_reading:
            left = (one for one in blocks.live_blocks(self._gpu) if one.stack and one.address not in self.usual)
            facts = replace(facts, kept_lines=blocks.by_line(left))
        return replace(facts, recorded=self.recorded)
