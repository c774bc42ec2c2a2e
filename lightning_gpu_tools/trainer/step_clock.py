"""Where the wall time of a fit goes, phase by phase, for a few microseconds a step and without synchronising CUDA.

Every instant of training belongs to exactly one phase, the innermost one that the training thread is in, so the phases
add up to the wall time by construction. ``trainer`` is the Trainer's own work around a step; what happens outside of
everything that is timed is ``unexplained``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer

from lightning_gpu_tools.trainer.facts import trains_on_gpu
from lightning_gpu_tools.trainer.timed_actions import (
    RUN_STEP,
    action_context,
    is_ours,
    time_actions,
    time_loggers,
)
from lightning_gpu_tools.trainer.wrappers import Wrappers, after, before
from lightning_gpu_tools.training.gpu_timeline import GpuTimeline
from lightning_gpu_tools.training.phases import (
    CHECKPOINT,
    DATA_LOADING,
    EPOCH_START,
    HOST_TO_DEVICE_COPY,
    MONITORING,
    TRAINER,
    TRAINING_STEP,
    UNEXPLAINED,
    VALIDATION,
)
from lightning_gpu_tools.training.run_measurements import GpuIdle, StepBlock
from lightning_gpu_tools.training.stopwatch import PhaseTimeline, Stopwatch, seconds_per_call

# Kernels are chosen, caches are filled and workers come up during the first steps.
WARM_UP_STEPS = 20
_STEPS_PER_BLOCK = 10
_MAX_BLOCKS = 128
# Every tenth step the steps before it are added up, and its own fetch is looked at closely: asking the kernel for the
# thread's CPU time costs as much as all the rest of a step.
_LOOK_EVERY = 10

_Function = Callable[..., Any]


class StepClock:
    """Times the phases of one fit of one Trainer; get it with :meth:`attach`, in ``Callback.setup``.

    It listens to what the Trainer tells its profiler, puts wrappers on the loops and the loggers, and takes them off
    when the fit ends. What a future Lightning has under another name cannot be timed: it stays part of the phase around
    it and is named in ``unseen``. If that is the fetch of a batch, the wait for data is taken from what is around it.

    Attributes:
        steps: Training steps begun.
        epochs: Epochs begun.
        warm_up_steps: How many steps at the beginning are not steady: at least 20, and twice as many as a loader has
            batches ready when training begins. Set it before the steps have gone by.
        timeline: What the run was spent on, span by span.
        last_fetch_s: How long the last batch was waited for.
        blocks: The steady steps (without warm-up and the first of each epoch), added up in at most 128 blocks.
    """

    def __init__(self, trainer: Trainer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps = self.epochs = 0
        self.last_fetch_s = 0.0
        self.warm_up_steps = WARM_UP_STEPS
        self.timeline = PhaseTimeline()
        self.blocks: list[StepBlock] = []
        self._clock = clock
        self._watch = Stopwatch(UNEXPLAINED, clock)
        self._data_loading, self._epoch_start, self._monitoring = map(
            self._watch.account, (DATA_LOADING, EPOCH_START, MONITORING)
        )
        self._around_fetch = self._watch.current
        self._before_fetch_s = 0.0
        self._fetch = ""
        self._callbacks = tuple(trainer.callbacks)  # type: ignore[attr-defined]
        self._gpu: GpuTimeline | None = None
        self._users = 0
        self._running = False
        self._started = self._stopped = 0.0
        self._first_of_epoch = True
        self._forward_s = 0.0
        self._next_look = 0
        self._looked_from: StepBlock | None = None
        self._fetch_cpu_since_s: float | None = None
        self._fetch_cpu_share = 0.0
        self._open = StepBlock()
        self._steps_per_block = _STEPS_PER_BLOCK
        self._wrappers = Wrappers()
        self._wrap = self._wrappers.put
        self._wrap(trainer.fit_loop, "on_run_start", before(lambda: self._start(trainer)))
        self._wrap(trainer.fit_loop, "on_run_end", after(lambda: self._end_run(trainer)))

    @classmethod
    def attach(cls, trainer: Trainer) -> StepClock:
        """Return the clock of ``trainer``'s fit that is about to begin, the same one for everybody who asks."""
        clock = _clocks.get(trainer)
        if clock is not None and clock.ran:  # of an earlier fit, which somebody did not live to see the end of
            clock.stop()
            clock = None
        if clock is None:
            clock = _clocks[trainer] = cls(trainer)
        clock._users += 1
        return clock

    def detach(self, trainer: Trainer) -> None:
        """Give the clock back; the last one to do so stops it. What it measured stays readable."""
        self._users -= 1
        if self._users <= 0:
            self.stop()
            if _clocks.get(trainer) is self:
                del _clocks[trainer]

    def stop(self) -> None:
        """End the measurement and take every wrapper off; nothing happens the second time."""
        if self._running:
            self._watch.switch(self._watch.account(UNEXPLAINED))
            self._stopped = self._watch.since_s
            self._running = False
            self.timeline.cut(self._stopped, self.seconds)
        self._wrappers.undo()

    @property
    def unseen(self) -> list[str]:
        """What could not be timed."""
        never_came = [RUN_STEP] if self.steps and not self._watch.knows(TRAINING_STEP) else []
        return [*self._wrappers.missing, *never_came]

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by phase up to the last change of phase, without the phases that have taken none.

        The keys are the constants of this module, for callbacks and loggers with the class name:
        ``"callback/EarlyStopping"``.
        """
        return self._watch.seconds

    def _spent(self) -> dict[str, float]:
        """Return the time by phase up to this moment."""
        self._watch.switch(self._watch.current)
        return self.seconds

    def gpu_idle(self) -> GpuIdle | None:
        """Return when the GPU stood idle between the steps looked at; ``None`` without a GPU or a look at it."""
        facts = None if self._gpu is None else self._gpu.facts()
        return facts if facts is not None and facts.looks else None

    @property
    def wall_s(self) -> float:
        """Seconds of training so far: what the phases in ``seconds`` add up to when the clock has stopped."""
        return (self._clock() if self._running else self._stopped) - self._started

    @property
    def ran(self) -> bool:
        """Whether training has begun at all."""
        return self._started > 0

    def as_own_work(self, function: Callable[..., object], *args: object, part: str = "") -> None:
        """Call the function, with its time booked on this package, or on a part of it that is named."""
        if not self._running:
            function(*args)
            return
        around = self._watch.switch(self._watch.account(f"{MONITORING}/{part}") if part else self._monitoring)
        try:
            function(*args)
        finally:
            self._watch.switch(around)

    def begin_anew(self) -> None:
        """Forget the steady steps so far: what they depend on has changed. The next ones are warm-up again."""
        self.blocks, self._open, self._looked_from = [], StepBlock(), None
        self._steps_per_block = _STEPS_PER_BLOCK
        self.warm_up_steps = self.steps + WARM_UP_STEPS
        self._next_look = 0

    def cost_s(self) -> float:
        """Return what this clock has cost the training thread so far: how often it acted, times what that costs.

        That is measured in a loop of nothing else, with warm caches; between the kernels of a training it costs more.
        """
        watch = Stopwatch(UNEXPLAINED)
        pair_s = seconds_per_call(watch.timed(TRAINER, int)) - seconds_per_call(int)
        scratch = copy.copy(self)
        scratch._watch, scratch._clock, scratch.timeline, scratch.blocks = watch, time.perf_counter, PhaseTimeline(), []
        scratch._data_loading, scratch._epoch_start = watch.account(DATA_LOADING), watch.account(EPOCH_START)

        def one_step() -> None:
            scratch._begin_fetch(self._fetch)
            scratch._end_fetch(self._fetch)

        return max(0.0, pair_s * self._watch.entered + seconds_per_call(one_step) * self.steps)

    def _end_run(self, trainer: Trainer) -> None:
        if not self._running or self._is_trial(trainer):
            return
        self.stop()
        for callback in self._callbacks:  # Lightning tells nothing more to one of ours that was taken out meanwhile
            if is_ours(callback) and callback not in trainer.callbacks:  # type: ignore[attr-defined]
                callback.teardown(trainer, trainer.lightning_module, "fit")

    def _is_trial(self, trainer: Trainer) -> bool:
        """Return whether a tuner (BatchSizeFinder, LearningRateFinder) tries something: it takes the callbacks out."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return bool(self._callbacks) and not any(callback in callbacks for callback in self._callbacks)

    def _start(self, trainer: Trainer) -> None:
        if self._running or self._is_trial(trainer):
            return
        self._running = True
        self._watch.start()
        self._started = self._watch.since_s
        self.timeline.start(self._started)
        epoch_loop = trainer.fit_loop.epoch_loop
        self._wrap(trainer.fit_loop, "on_advance_start", self._timed(EPOCH_START))
        self._wrap(epoch_loop, "on_run_start", self._timed(EPOCH_START))
        self._wrap(epoch_loop, "on_run_start", before(self._begin_epoch))
        self._wrap(epoch_loop, "run", self._timed(TRAINER))
        self._wrap(trainer.fit_loop, "on_advance_end", self._timed(TRAINER))
        if trains_on_gpu(trainer):
            self._gpu = GpuTimeline(self._clock, self._spent, self.as_own_work)
            self._wrap(epoch_loop.automatic_optimization, "run", self._gpu.around)
            self._wrap(epoch_loop.manual_optimization, "run", self._gpu.around)
        if trainer.world_size > 1:  # to tell a rank that is slow itself from those that wait for it
            self._wrap(trainer.strategy, "training_step", self._measure_forward)
        self._wrap(epoch_loop.val_loop, "run", self._timed(VALIDATION))
        self._wrap(trainer, "save_checkpoint", self._timed(CHECKPOINT))
        self._fetch = f"[{type(epoch_loop).__name__}].train_dataloader_next"
        time_actions(
            trainer,
            self._wrappers,
            context=lambda action: self._context(action, trainer),
            begin=self._begin_fetch,
            end=self._end_fetch,
        )
        time_loggers(trainer, self._wrappers, self._watch)

    def _context(self, action: str, trainer: Trainer) -> AbstractContextManager[str]:
        """Return what times one of the Trainer's actions; asked once for each."""
        if action.endswith(".on_train_batch_end") and not self.steps:  # no fetch came before the first step's end
            self._time_the_fetch_otherwise(trainer)
        return action_context(action, trainer, self._watch)

    def _time_the_fetch_otherwise(self, trainer: Trainer) -> None:
        # From where a step begins to where its batch is prepared for the device: the Trainer's own work counts in, and
        # a loader whose batches the model fetches by itself (dataloader_iter) is not seen. The first step has gone by.
        self._wrappers.missing.append(self._fetch)
        self.steps, self._first_of_epoch = 1, False
        loop = trainer.fit_loop.epoch_loop
        self._wrap(loop, "advance", before(lambda: self._begin_fetch(self._fetch)))
        self._wrap(trainer.precision_plugin, "convert_input", before(self._end_open_fetch))

    def _end_open_fetch(self) -> None:
        if self._watch.current in (self._data_loading, self._epoch_start):  # not in validation
            self._end_fetch(self._fetch)

    def _timed(self, phase: str) -> Callable[[_Function], _Function]:
        def wrapper(function: _Function) -> _Function:
            timed = self._watch.timed(phase, function)
            return self._with_edges(timed) if phase in (VALIDATION, CHECKPOINT) else timed

        return wrapper

    def _with_edges(self, function: _Function) -> _Function:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.timeline.cut_at_edge(self._watch.since_s, self.seconds)
            try:
                return function(*args, **kwargs)
            finally:
                self.timeline.cut_at_edge(self._watch.since_s, self.seconds)

        return wrapped

    def _measure_forward(self, function: _Function) -> _Function:
        clock = self._clock

        def measured(*args: Any, **kwargs: Any) -> Any:
            began_s = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._forward_s += clock() - began_s

        return measured

    def _begin_epoch(self) -> None:
        self.epochs += 1
        self._first_of_epoch = True
        self._next_look = 0

    # The next two run in every step, so they do themselves what `Stopwatch.switch` does.

    def _begin_fetch(self, action: str) -> None:
        if action != self._fetch:
            return
        watch, now_s = self._watch, self._clock()
        around = self._around_fetch = watch.current
        around.seconds += now_s - watch.since_s
        watch.since_s = now_s
        self._before_fetch_s = (around if around is self._epoch_start else self._data_loading).seconds
        if around is self._epoch_start:
            return  # a loader of unknown length: Lightning fetches one batch ahead while it makes the epoch's iterator
        self.steps += 1
        watch.current = self._data_loading
        if self.steps >= self._next_look:
            self._look(now_s)
            self._before_fetch_s = watch.current.seconds
        if now_s >= self.timeline.due_s:
            self.timeline.cut(now_s, self.seconds)

    def _end_fetch(self, action: str) -> None:
        if action != self._fetch:
            return
        watch, now_s = self._watch, self._clock()
        watch.current.seconds += now_s - watch.since_s
        # Not simply since the fetch began: within it something else may have been booked, see `as_own_work`.
        fetch_s = self.last_fetch_s = watch.current.seconds - self._before_fetch_s
        watch.since_s, watch.current = now_s, self._around_fetch
        if self._fetch_cpu_since_s is not None:
            fetch_cpu_s = time.thread_time() - self._fetch_cpu_since_s
            self._fetch_cpu_share = min(1.0, fetch_cpu_s / fetch_s) if fetch_s > 0 else 0.0
            self._fetch_cpu_since_s = None

    def _look(self, now_s: float) -> None:
        """Add up the steady steps since the last look; this step begins now."""
        totals = self._totals(now_s)
        if self._looked_from is not None:
            passed = totals - self._looked_from
            self._open += replace(passed, data_loading_cpu_s=self._fetch_cpu_share * passed.data_loading_s)
            self._looked_from = None
            if self._open.steps >= self._steps_per_block:
                self._close_block()
        if self._first_of_epoch:
            self._first_of_epoch = False
            self._watch.current = self._epoch_start
            self._next_look = self.steps + 1
        elif self.steps <= self.warm_up_steps:
            self._next_look = self.warm_up_steps + 1
        else:
            self._looked_from = totals
            self._next_look = self.steps + _LOOK_EVERY - self._open.steps % _LOOK_EVERY
            self._fetch_cpu_since_s = time.thread_time()

    def _totals(self, now_s: float) -> StepBlock:
        seconds = self.seconds
        return StepBlock(
            steps=self.steps,
            wall_s=now_s,
            data_loading_s=seconds.get(DATA_LOADING, 0.0),
            host_to_device_copy_s=seconds.get(HOST_TO_DEVICE_COPY, 0.0),
            training_step_s=seconds.get(TRAINING_STEP, 0.0),
            paused_s=sum(seconds.get(phase, 0.0) for phase in (VALIDATION, CHECKPOINT, EPOCH_START)),
            forward_s=self._forward_s,
        )

    def _close_block(self) -> None:
        self.blocks.append(self._open)
        self._open = StepBlock()
        if len(self.blocks) == _MAX_BLOCKS:
            self.blocks = [a + b for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
            self._steps_per_block *= 2


_clocks: WeakKeyDictionary[Trainer, StepClock] = WeakKeyDictionary()
