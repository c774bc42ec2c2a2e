"""Readings of torch's GPU memory counters around some training steps, and records of the allocations in a few."""

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from time import perf_counter  # by name: a program's tests may replace those of `time`
from typing import Any

import torch

from lightning_gpu_tools.memory import blocks, holdings
from lightning_gpu_tools.memory.readings import Block, MemoryReading, RankMemory, Segment, StepMemory
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
    """A reader of the memory counters at three moments of some steps, of which it records a few.

    Every step is read up to the one after the optimizer's first; after that, as many random steps as the budget allows.
    In other steps each call costs one comparison.
    """

    def __init__(self, training: holdings.Training, clock: StepClock) -> None:
        assert training.gpu is not None
        self.when_read: Callable[[], None] = lambda: None  # called after a step
        self.failure: Exception | None = None  # the error that ended the readings
        self.is_reading = False
        self.next_step = 1.0  # the next one to read, by the clock; inf if nothing is read
        self.known = RankMemory()  # the readings so far
        self.usual: set[int] = set()  # addresses of recorded blocks that the optimizer's first step has left
        self._training = training
        self._gpu = training.gpu
        self._clock = clock
        self._random = random.Random(0)  # a separate generator, so that training's random numbers do not change
        self._spent_s = 0.0
        self._total_bytes = 0
        self._optimizer_steps = training.optimizer_steps
        self._step = StepMemory(step=0)  # that is read; its middle is its beginning until it is known
        self._replays = 0  # of CUDA graphs before it
        # For replays:
        self._recorder = blocks.MemoryRecorder()
        self._segments: tuple[Segment, ...] = ()
        self._recorded: list[StepMemory] = []
        self._is_recorded = True  # all steps so far that a replay needs
        self._steps_read = 0
        self._do(self._begin_training)

    def _begin_training(self) -> None:
        before = read_memory(self._gpu)
        if before is None:  # CUDA has not started: nothing trains on the GPU
            self.next_step = math.inf
            return
        held = holdings.count_holdings(self._training)
        self._total_bytes = torch.cuda.get_device_properties(self._gpu).total_memory
        self.known = RankMemory(
            latest=before,
            before_training=before,
            earlier_bytes=max(0, before.allocated_bytes - held.between_steps_bytes),
            peaks_bytes={"before_training": before.peak_allocated_bytes},
        )

    def begin_step(self, shape: Callable[[], tuple[int, ...] | None]) -> None:
        """Begin a step, and read the counters and the ``shape`` of its batch if it is the next one to read."""
        if self._clock.steps >= self.next_step:
            self._spent_s, self.is_reading, batch_shape = 0.0, True, None
            with suppress(Exception):  # of an odd batch
                batch_shape = shape()
            self._do(self._begin_step, batch_shape or ())

    def before_backward(self) -> None:
        """Read the counters before the first backward of a step that is read."""
        if self.is_reading and self._step.middle is self._step.begin:
            self._do(self._read_middle)

    def end_step(self) -> None:
        """End a step, after the optimizer."""
        if self.is_reading:
            self._do(self._end_step)
            self.is_reading = False

    def close(self) -> None:
        """Restore torch to its original state, even within a step."""
        self._recorder.stop()

    def enter(self, phase: str) -> None:
        """Read the counters when validation begins or training continues."""
        self._do(self._read, "training" if phase == "validation" else "validation")

    def note_failure(self, kept_bytes: int | None, when_it_failed: MemoryReading | None) -> None:
        """Record the counters when memory ran out, and the bytes in tensors when the last step before it began."""
        self._do(self._read, "training")
        peaks = dict(self.known.peaks_bytes)
        if when_it_failed is not None:
            peaks["training"] = max(peaks.get("training", 0), when_it_failed.allocated_bytes)
        self.known = replace(self.known, kept_bytes=kept_bytes or 0, peaks_bytes=peaks)

    def _do(self, action: _Function, *args: Any) -> None:
        if self.next_step < math.inf:
            self._clock.as_own_work(self._guard, action, *args)

    def _guard(self, action: _Function, *args: Any) -> None:
        began_s = perf_counter()
        try:
            if torch.cuda.is_current_stream_capturing():  # into a graph, which keeps what it allocates
                self._is_recorded &= not self._is_replayed
                self.is_reading = False
                self._recorder.stop()
            else:
                action(*args)
        except Exception as error:  # noqa: BLE001 - renamed counters, an allocator without counters, an unusual tensor
            self.failure = error.with_traceback(None)  # frames in the traceback would keep a batch alive
            self.is_reading, self.next_step = False, math.inf
            self._recorder.stop()
        self._spent_s += perf_counter() - began_s

    def _read(self, phase: str) -> MemoryReading:
        """Read the counters after a phase."""
        reading, peaks = read_memory(self._gpu), self.known.peaks_bytes
        assert reading is not None  # CUDA has started
        if reading.peak_allocated_bytes > max(peaks.values()):
            peaks = {**peaks, phase: reading.peak_allocated_bytes}
        self.known = replace(self.known, latest=reading, peaks_bytes=peaks)
        return reading

    @property
    def _is_replayed(self) -> bool:
        """Whether this step is not after the first one that begins with the optimizer's states."""
        first = self.known.first_step
        return first is None or self.known.last_step is first

    def _read_middle(self) -> None:
        self._step = replace(self._step, middle=self._read("training"))

    def _begin_step(self, batch_shape: tuple[int, ...]) -> None:
        begin, facts = self._read("training"), self.known
        step = facts.last_step or self._step
        self._step = replace(step, step=self._clock.steps, batch_shape=batch_shape, begin=begin, middle=begin)
        self._replays = self._clock.replays
        if facts.holdings is not None and facts.last_step is facts.first_step:
            kept_bytes = holdings.count_holdings(self._training).gradients_bytes
            self.known = replace(facts, holdings=replace(facts.holdings, gradients_kept_bytes=kept_bytes))
        self._steps_read += 1
        # The allocations of all steps that may be replayed are recorded, those of later ones less and less often.
        if self._is_replayed or self._steps_read.bit_count() == 1:
            self._clock.times.left_out.add(self._clock.steps)
            if facts.last_step is None:
                self._segments = blocks.segments(self._gpu)
            self._recorder.start("all")

    def _end_step(self) -> None:
        end = self._read("training")
        events, facts, step = self._take_record(end), self.known, replace(self._step, end=end)
        if events:
            peak, in_forward = blocks.find_peak({}, events), (one.size for one in events if one.phase == "forward")
            step = replace(step, added_bytes=peak.size, forward_bytes=max(accumulate(in_forward), default=0))
            phase = "" if peak.reached_by is None else peak.reached_by.phase
            facts = replace(facts, peak_lines=blocks.by_line(peak.blocks.values()), peak_phase=phase)
        if self._is_replayed:
            self._is_recorded &= bool(events)
            if events:
                self._keep_events(step, events)
        optimized = self._training.optimizer_steps - self._optimizer_steps
        has_state = any(one.state for one in self._training.optimizers)
        has_next = facts.first_step is not None  # this step began with the optimizer's states
        if not has_next and optimized >= (1 if has_state else _MAX_SKIPPED_STEPS):
            held = holdings.count_holdings(self._training)
            trained_bytes = max(held.gradients_bytes, holdings.trained_bytes(self._training))
            self.usual = {one.address for one in blocks.live_blocks(self._gpu) if one.stack}
            free_bytes, _ = torch.cuda.mem_get_info(self._gpu)
            facts = replace(
                facts,
                first_step=step,
                holdings=replace(held, gradients_bytes=trained_bytes),
                room_bytes=int(min(end.reserved_bytes + free_bytes, compat.allowed_bytes(self._gpu))),
            )
        self.known = replace(facts, last_step=step)
        interval = 1
        if has_next or step.step >= _MAX_EARLY_STEPS:
            interval = min(_MAX_INTERVAL, max(1, math.ceil(self._spent_s / _BUDGET_S)))
        self.next_step = step.step + self._random.randint(1, 2 * interval - 1)
        self.when_read()

    def _take_record(self, end: MemoryReading) -> list[Block]:
        """End the record of this step. Return its events with their phases; none without a complete record."""
        if not self._recorder.is_recording:
            return []
        events = blocks.recorded_events(self._gpu)
        self._recorder.stop()
        has_graph = self._clock.replays > self._replays  # its memory was allocated when it was captured
        allocations = end.allocations - self._step.begin.allocations
        is_complete = not has_graph and sum(event.size > 0 for event in events) == allocations
        return blocks.with_phases(events) if is_complete else []

    def _keep_events(self, step: StepMemory, events: list[Block]) -> None:
        """Keep the events of a step for a replay: of those up to the optimizer's first, the first and the last."""
        found = blocks.events_with_growth(
            events,
            holdings.weights_of(self._training),
            is_mixed="mixed" in (self._training.precision or ""),
            fixed=holdings.fixed_sizes(self._gpu),
        )
        place = 1 if self.known.first_step is None else len(self._recorded)
        segments_before = () if self._recorded else self._segments
        self._recorded[place:] = [replace(step, segments=segments_before, events=found)]

    @property
    def left_bytes(self) -> int:
        """Additional bytes that would fit without other processes."""
        return max(0, self._total_bytes - self.known.peak_bytes)

    @property
    def recorded(self) -> tuple[StepMemory, ...]:
        """The recorded steps, once the optimizer's first is among them. Safe in any thread."""
        # After that, not every step was read, and the optimizer's first may be missing.
        first = self.known.first_step
        is_whole = self._is_recorded and first is not None and first.step < _MAX_EARLY_STEPS
        return tuple(self._recorded) if is_whole and all(one.batch_shape for one in self._recorded) else ()

    def facts(self) -> RankMemory | None:
        """Return the readings so far; ``None`` without them, or if a counter could not be read."""
        facts = self.known
        if self.next_step == math.inf:
            return None
        if facts.holdings is not None and not self.is_reading:
            left = (one for one in blocks.live_blocks(self._gpu) if one.stack and one.address not in self.usual)
            facts = replace(facts, kept_lines=blocks.by_line(left))
        return replace(facts, recorded=self.recorded)
