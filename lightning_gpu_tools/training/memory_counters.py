"""Reads torch's own counters of GPU memory in some steps of a training, and counts what the training holds.

Only the thread that trains reads them: they are behind the allocator's lock, which is held while the driver is asked
for memory. No reading waits for the GPU, and none makes CUDA begin.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from lightning_gpu_tools.training.memory_readings import (
    MemoryHoldings,
    MemoryPoint,
    MemoryReading,
    RankMemory,
    StepMemory,
)
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.training.timeline import Timeline

# Our default: what reading may cost a step on average. A step that is read costs some 100 us.
_BUDGET_S = 5e-6
# Our default: memory that grows is seen this often at least, even where a reading takes long.
_MAX_INTERVAL = 200
# Our default: gradients are hardly ever accumulated over more steps than these, which are all read if the optimizer
# makes no step.
_MAX_EARLY_STEPS = 64
# Our default: an optimizer without a state after so many steps never has one. The scaler of 16-bit gradients skips the
# first few, until its scale fits.
_MAX_SKIPPED_STEPS = 4
_MAX_POINTS = 200
# Where DeepSpeed's optimizers keep their part of the master weights and of the gradients (0.19: ZeRO 3; 1 and 2).
_MASTER_WEIGHTS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
_GRADIENTS = ("grad_partitions_flat_buffer", "averaged_gradients")

_Function = Callable[..., Any]


class Training(Protocol):
    """What is asked of a training: the part of ``runs.run.Run`` that is needed."""

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""

    @property
    def gpu(self) -> torch.device | None:
        """The same if it is an NVIDIA GPU."""

    @property
    def module(self) -> torch.nn.Module | None:
        """The model; ``None`` if it cannot be known."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers."""

    @property
    def optimizer_steps(self) -> int:
        """How many steps they have made."""

    @property
    def is_plain_ddp(self) -> bool:
        """Whether DistributedDataParallel sends the gradients."""


def read_memory(gpu: torch.device) -> MemoryReading | None:
    """Return what torch's allocator counts for a GPU now; ``None`` before CUDA has begun.

    Not by ``torch.cuda.memory_stats``, which makes 122 sorted keys of it, for 100 to 500 us.
    """
    stats = torch.cuda.memory.memory_stats_as_nested_dict(gpu.index or 0)
    if not stats:
        return None

    def of(name: str, value: str = "current") -> int:
        return stats[name]["all"][value]  # type: ignore[no-any-return]

    return MemoryReading(
        allocated_bytes=of("allocated_bytes"),
        peak_allocated_bytes=of("allocated_bytes", "peak"),
        reserved_bytes=of("reserved_bytes"),
        peak_reserved_bytes=of("reserved_bytes", "peak"),
        active_bytes=of("active_bytes"),
        requested_bytes=of("requested_bytes"),
        inactive_split_bytes=of("inactive_split_bytes"),
        retries=stats["num_alloc_retries"],
        ooms=stats["num_ooms"],
    )


def count_holdings(training: Training) -> MemoryHoldings:
    """Return what a training holds on its GPU at this moment, by what it is. Of 1,000 parameters it takes some 7 ms.

    Without a model, as in a loop, parameters are those that are optimized, and buffers are not known.
    """
    module, optimizers, weights = training.module, training.optimizers, _weights(training)
    gradients_bytes = count_gradients(training)
    sends_copies = training.is_plain_ddp and not any(map(_is_part, _gradients(weights)))
    seen: set[int] = set()

    def size(*objects: object) -> int:
        return sum(_storage_sizes(objects, training.device, seen))

    return MemoryHoldings(
        parameters_bytes=size(weights, [getattr(weight, "ds_tensor", None) for weight in weights]),
        gradients_bytes=gradients_bytes,
        gradients_kept_bytes=gradients_bytes,
        gradient_buckets_bytes=gradients_bytes if sends_copies else 0,
        optimizer_bytes=size([[*one.state.values()] for one in optimizers], _attributes(optimizers, _MASTER_WEIGHTS)),
        buffers_bytes=0 if module is None else size([*module.buffers()]),
    )


def count_gradients(training: Training) -> int:
    """Return the size of the gradients that are there at this moment."""
    gradients = [_gradients(_weights(training)), _attributes(training.optimizers, _GRADIENTS)]
    return sum(_storage_sizes(gradients, training.device, set()))


def _weights(training: Training) -> list[torch.nn.Parameter]:
    if training.module is not None:
        return list(training.module.parameters())
    return [weight for one in training.optimizers for group in one.param_groups for weight in group["params"]]


def _gradients(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _attributes(optimizers: Iterable[object], names: Iterable[str]) -> list[object]:
    return [getattr(optimizer, name, None) for optimizer in optimizers for name in names]


def _is_part(gradient: torch.Tensor) -> bool:
    """Return whether a gradient lies in a larger piece of memory, as with DDP's ``gradient_as_bucket_view=True``."""
    return gradient.layout is torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes


def _storage_sizes(objects: Iterable[object], device: torch.device, seen: set[int]) -> Iterator[int]:
    """Return the sizes of the storages on a device that were not seen before; of a sharded tensor, that of its part."""
    for tensor in _tensors(objects):
        if tensor.device == device:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage.nbytes()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Return the plain tensors in a structure; of a DTensor, or any other that wraps some, those inside."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from _tensors([getattr(value, name) for name in names])
        elif value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
        else:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


class MemoryCounters:
    """Reads the counters at the moments of a step, in some steps.

    Every step is read until the optimizer has made its first one, and the one after it; from then on as many as the
    time for it allows, at random, so that nothing periodic is always or never hit. Wrap what runs a step with
    :meth:`around_step`, what runs its forward with :meth:`after_forward` and its backward with :meth:`around_backward`;
    where no function does so, call :meth:`begin_step`, :meth:`note` and :meth:`end_step`. In a step that is not read
    each of them is a comparison.

    Args:
        training: Whose memory; CUDA has begun.
        clock: Its step clock.

    Attributes:
        when_read: Is called when a step has been read.
        failure: Why nothing more is read; ``None`` if all is well.
    """

    def __init__(self, training: Training, clock: StepClock) -> None:
        assert training.gpu is not None
        self.when_read: Callable[[], None] = lambda: None
        self.failure: Exception | None = None
        self._reading = False
        self._training = training
        self._gpu = training.gpu
        self._clock = clock
        self._random = random.Random(0)  # its own: the training's random numbers stay as they are
        self._next_step = 1.0
        self._spent_s = 0.0
        self._moments: dict[str, MemoryReading] = {}
        self._batch_step = 0  # whose batch is still to be noted
        self._batch_shape: tuple[int, ...] | None = None
        self._latest: MemoryReading | None = None
        self._first: StepMemory | None = None
        self._last: StepMemory | None = None
        self._holdings: MemoryHoldings | None = None
        self._gradients_bytes = 0
        self._optimizer_steps = training.optimizer_steps
        self._peak_bytes = self._total_bytes = 0
        self._peaks: dict[str, int] = {}
        self._timelines = [Timeline(_MAX_POINTS, 1.0) for _ in MemoryPoint._fields[1:]]
        self._before: MemoryReading | None = None
        self._do(self._begin)

    def _begin(self) -> None:
        if read_memory(self._gpu) is None:  # CUDA has not begun, so nothing trains on this GPU
            self._next_step = math.inf
        else:
            self._before = self._read("before_training")
            self._total_bytes = torch.cuda.get_device_properties(self._gpu).total_memory

    # What a training calls in every step

    def around_step(self, function: _Function) -> _Function:
        """Return the function that runs a training step, with its ends read."""

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.begin_step()
            result = function(*args, **kwargs)
            self.end_step()
            return result

        return stepped

    def after_forward(self, function: _Function) -> _Function:
        """Return the function that runs forward, with what is there after it read."""

        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.note("after_forward", "forward")
            return result

        return run

    def around_backward(self, function: _Function) -> _Function:
        """Return the function that runs backward, with its ends read."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.note("before_backward", "forward")
            result = function(*args, **kwargs)
            self.note("after_backward", "backward")
            return result

        return run

    def begin_step(self) -> None:
        """Read what is there before forward, if it is this step's turn."""
        if self._clock.steps >= self._next_step:
            self._spent_s, self._moments = 0.0, {}
            self._batch_step, self._batch_shape = self._clock.steps, None
            self._reading = True
            self.note("begin", "training")

    def note(self, moment: str, phase: str) -> None:
        """Read the counters at a moment of the step, if it is read; of each moment the first one counts.

        Args:
            moment: A field of ``StepMemory``.
            phase: What has come before.
        """
        if self._reading:
            self._do(self._note, moment, phase)
            self._do(self._count_gradients, moment, is_once=True)

    def end_step(self) -> None:
        """Read what is there after the optimizer."""
        if self._reading:
            self.note("end", "optimizer")
            self._do(self._keep_step)
            self._do(self._count_holdings, is_once=True)
            self._do(self._plan_next)
            self._reading = False

    def enter(self, phase: str) -> None:
        """Read what is there when validation begins, or when training goes on."""
        if self._before is not None:
            self._do(self._read, "training" if phase == "validation" else "validation")

    @property
    def wants_batch(self) -> bool:
        """Whether the shape of the present step's batch is still to be noted."""
        return self._batch_step == self._clock.steps

    def note_batch(self, shape: tuple[int, ...] | None) -> None:
        """Note the shape of the batch of a step that was read, or is."""
        self._batch_step, self._batch_shape = 0, shape
        if not self._reading and self._last is not None:  # a Trainer gives the batch when the step has ended
            is_first = self._last is self._first
            self._last = dataclasses.replace(self._last, batch_shape=shape)
            self._first = self._last if is_first else self._first

    # What they do in a step that is read

    def _do(self, action: _Function, *args: Any, is_once: bool = False) -> None:
        """Do something, which counts toward what a step that is read costs, unless it is done once in a training."""
        if self.failure is None:
            began_s = time.perf_counter()
            self._clock.as_own_work(self._guard, action, *args)
            if not is_once:
                self._spent_s += time.perf_counter() - began_s

    def _guard(self, action: _Function, *args: Any) -> None:
        try:
            action(*args)
        # Counters with other names, an allocator without any, a tensor unlike any other: training goes on without.
        except Exception as error:  # noqa: BLE001
            self.failure = error.with_traceback(None)  # whose frames would keep a batch
            self._reading, self._next_step = False, math.inf

    def _read(self, phase: str) -> MemoryReading:
        reading = self._latest = read_memory(self._gpu)
        assert reading is not None  # CUDA has begun
        if reading.peak_allocated_bytes > self._peak_bytes:
            self._peak_bytes = self._peaks[phase] = reading.peak_allocated_bytes
        return reading

    def _note(self, moment: str, phase: str) -> None:
        self._moments.setdefault(moment, self._read(phase))

    def _count_gradients(self, moment: str) -> None:
        if moment == "after_backward" and not self._gradients_bytes:
            self._gradients_bytes = count_gradients(self._training)
        elif moment == "begin" and self._holdings is not None and self._last is self._first:
            kept_bytes = count_gradients(self._training)
            self._holdings = dataclasses.replace(self._holdings, gradients_kept_bytes=kept_bytes)

    def _keep_step(self) -> None:
        step = self._last = StepMemory(step=self._clock.steps, batch_shape=self._batch_shape, **self._moments)
        sizes = [reading.allocated_bytes for reading in step.readings]
        points = sizes[0], max(sizes), self._moments["end"].reserved_bytes
        for timeline, size in zip(self._timelines, points, strict=True):
            timeline.add(self._clock.wall_s, size)

    def _count_holdings(self) -> None:
        if self._holdings is None and self._has_optimized():
            self._first = self._last
            held = count_holdings(self._training)
            gradients_bytes = max(held.gradients_bytes, self._gradients_bytes)
            self._holdings = dataclasses.replace(held, gradients_bytes=gradients_bytes)

    def _plan_next(self) -> None:
        interval = 1
        steps = self._clock.steps
        has_next = self._first is not None and steps > self._first.step  # one that begins with the optimizer's states
        if has_next or steps >= _MAX_EARLY_STEPS:
            interval = min(_MAX_INTERVAL, max(1, math.ceil(self._spent_s / _BUDGET_S)))
        self._next_step = self._clock.steps + self._random.randint(1, 2 * interval - 1)
        self.when_read()

    def _has_optimized(self) -> bool:
        steps = self._training.optimizer_steps - self._optimizer_steps
        return steps >= (1 if any(one.state for one in self._training.optimizers) else _MAX_SKIPPED_STEPS)

    # What is known

    @property
    def kept_bytes(self) -> int | None:
        """What was in tensors when the last step began that was read; ``None`` without any. From any thread."""
        last = self._last
        return None if last is None or last.begin is None else last.begin.allocated_bytes

    @property
    def room_bytes(self) -> int | None:
        """How much more would fit beside the peak, if nobody else used the GPU; ``None`` if that is unknown."""
        return max(0, self._total_bytes - self._peak_bytes) if self._total_bytes else None

    def facts(self) -> RankMemory | None:
        """Return what has been counted so far; ``None`` if something could not be."""
        if self._latest is None or self.failure is not None:
            return None
        points = zip(*(timeline.points() for timeline in self._timelines), strict=True)
        return RankMemory(
            latest=self._latest,
            before_training=self._before,
            holdings=self._holdings,
            first_step=self._first,
            last_step=self._last,
            peaks_bytes=dict(self._peaks),
            timeline=tuple(MemoryPoint(kept[0], kept[1], step[1], reserved[1]) for kept, step, reserved in points),
        )
