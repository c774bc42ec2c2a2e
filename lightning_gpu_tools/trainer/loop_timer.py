"""The timing of a loop without a Trainer, based on its calls between batches."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gpu_tools.gpus.watch import Phase
from lightning_gpu_tools.loaders.settings import GET_ITERATOR, batch_shape, first_tensor
from lightning_gpu_tools.memory.counters import MemoryCounters
from lightning_gpu_tools.patches import Patches, before
from lightning_gpu_tools.runs.run import Timer
from lightning_gpu_tools.trainer.facts import MOVE_BATCH, LoopRun
from lightning_gpu_tools.trainer.families import family_of
from lightning_gpu_tools.training import compat, phases
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.training.stopwatch import Account

AFTER_OPTIMIZER = f"{phases.CALLBACK}/code after optimizer.step()"

_Function = Callable[..., Any]


class Loop:
    """One pass over one loader."""

    def __init__(self, loader: object) -> None:
        self.loader = loader
        # The account before its iterator was created, or before it fetched a batch for another loop's step.
        self.around: Account | None = None
        self.is_validation = False
        self.has_trained = False
        self.batches = 0  # of validation


class LoopTimer(Timer):
    """A timer that drives a step clock from the loops of one thread.

    A step lasts from one batch to the next. Up to backward, it counts as forward; after the last optimizer step, it
    counts as code that a Trainer would have in callbacks. A loop that fetches a batch in another loop's step, before an
    optimizer step, loads data for that step, as in ``zip(run.batches(a), run.batches(b))``. Once training has had
    gradients, a loop without gradients is validation, and so is one whose first batches have no backward, from the
    next batch on.

    ``enter`` is called with the phase when validation begins and when training resumes, ``after_step`` after each step,
    before the next one begins.
    """

    def __init__(
        self,
        run: LoopRun,
        fabric: Any,
        clock: StepClock,
        enter: Callable[[Phase], None],
        after_step: Callable[[], None],
    ) -> None:
        super().__init__(clock, lambda: run.weights() if run.is_plain_ddp else ())
        self._run = run
        self._fabric = fabric
        self._enter = enter
        self._after_step = after_step
        self._thread = threading.get_ident()
        self._on_loader = Patches()
        self._forward, self._backward = clock.account(phases.FORWARD), clock.account(phases.BACKWARD)
        self._optimizer, self._rest = clock.account(phases.OPTIMIZER), clock.account(phases.TRAINING_STEP)
        self._after = clock.account(AFTER_OPTIMIZER)
        self._in_step = {self._forward, self._backward, self._optimizer, self._rest, self._after}
        self._outside, self._data_loading = clock.account(phases.OUTSIDE_LOOP), clock.account(phases.DATA_LOADING)
        self._epoch_start, self._validation = clock.account(phases.EPOCH_START), clock.account(phases.VALIDATION)
        self._gpu = self.rank_waits.gpu = None if run.gpu is None else clock.measure_gpu(run.gpu)
        self.memory = MemoryCounters(run, clock) if run.gpus else None
        self._counting: Loop | None = None  # whose batches are steps
        self._fetching: Loop | None = None  # the same one, during a fetch
        self._step_is_open = self._gpu_is_in_step = False
        self._asides = 0
        self._has_trained = self._had_backward = False
        self._optimizer_steps = 0  # in this step
        self._usual_optimizer_steps = 1
        self._untrained, self._most_untrained = 0, 1  # batches up to the next backward: now, and at most
        self._evaluates: dict[int, Callable[[], object]] = {}  # by id, loaders whose batches had no backward

    def start(self) -> None:
        """Start the clock, and hook into the loop."""
        clock, put = self.clock, self.patches.put
        for register, act in (
            (torch_optimizer.register_optimizer_step_pre_hook, self._optimizer_begins),
            (torch_optimizer.register_optimizer_step_post_hook, self._optimizer_ends),
        ):
            self.patches.at_undo(register(partial(self._safely, act)).remove)
        put(torch.utils.data, compat.WORKER_LOOP, self.worker_lines.sampled)
        if self._run.place.world_size > 1:
            put(torch.autograd, "backward", self.rank_waits.around_backward)
            put(torch.distributed, "Work.wait", self.rank_waits.timed)
        put(torch.autograd, "backward", self._timed_backward)
        if self._gpu is not None:
            put(torch.cuda, "CUDAGraph.replay", partial(before, self.clock.note_replay))
        if self._fabric is not None:
            copy = partial(clock.timed, phases.HOST_TO_DEVICE_COPY, except_in=phases.VALIDATION)
            put(sys.modules[f"{family_of(self._fabric)}.wrappers"], MOVE_BATCH, copy)
            put(self._fabric, "to_device", copy)
            put(self._fabric, "backward", self._timed_backward)
            put(self._fabric, "clip_gradients", partial(clock.timed, phases.GRADIENT_CLIPPING))
            put(self._fabric, "save", partial(clock.timed, phases.CHECKPOINT))
        self.time_loggers(self._run.loggers)
        clock.start()
        clock.switch(self._outside)

    @override
    def stop(self) -> None:
        super().stop()
        self._on_loader.undo()

    def open(self, loop: Loop) -> None:
        """Begin a pass, before its iterator is created."""
        loader = loop.loader
        compat.keep_from_compiler()
        if self._is_elsewhere():
            loop.is_validation = self.clock.current is self._validation and threading.get_ident() == self._thread
            return
        has_evaluated = self._evaluates.get(id(loader), object)() is loader
        if self._has_trained and (has_evaluated or not torch.is_grad_enabled()):
            self._begin_validation(loop)
            return
        loop.around = self.clock.switch(self._epoch_start)
        known = 0 if self._counting is None else len(self._run.loaders)
        if not known:
            self._on_loader.undo()
        self._run.follow(loader, also=known > 0)
        for place, one in enumerate(self._run.loaders):
            if place >= known and isinstance(one.loader, DataLoader):
                note = partial(self._run.note_iterator, place)
                note(getattr(one.loader, "_iterator", None))  # of persistent workers
                self._on_loader.put(one.loader, GET_ITERATOR, partial(_noted, note))

    def _begin_validation(self, loop: Loop) -> None:
        loop.is_validation = True
        self._enter("validation")
        self._run.note_validation(loop.loader)
        self.clock.validation_waits.begin()
        loop.around = self.clock.switch(self._validation)

    def opened(self, loop: Loop) -> None:
        """Continue a pass once its iterator has been created."""
        if loop.is_validation:
            self.clock.validation_waits.created()
        elif loop.around is not None:
            self.clock.switch(loop.around)

    def begin_fetch(self, loop: Loop) -> None:
        """Begin the fetch of a batch."""
        if loop.is_validation:
            self.clock.validation_waits.begin()
        if loop.is_validation or self._is_elsewhere():
            return
        clock = self.clock
        if self._counting not in (None, loop) and not self._optimizer_steps:
            loop.around = clock.switch(self._data_loading)
            return
        self.end_step()
        if self._counting is None:
            clock.begin_epoch()
            self._untrained = 0
        elif self._has_trained and not loop.has_trained and self._untrained >= self._most_untrained:
            with suppress(TypeError):  # it has no weak references
                self._evaluates[id(loop.loader)] = weakref.ref(loop.loader)
            clock.switch(self._outside)
            self._counting = None
            self._begin_validation(loop)
            return
        self._counting = self._fetching = loop
        clock.begin_fetch()

    def end_fetch(self, loop: Loop, batch: object) -> bool:
        """End the fetch of a batch; return whether a step begins with it."""
        if loop.is_validation:
            self.clock.validation_waits.fetched()
        if loop.is_validation or self._is_elsewhere():
            return False
        if self._fetching is not loop:
            if loop.around is not None:
                self.clock.switch(loop.around)
            return False
        self.clock.end_fetch()
        self._fetching = None
        self._step_is_open, self._optimizer_steps, self._had_backward = True, 0, False
        if self._gpu is not None:
            self._gpu.begin_step(phases.FORWARD)
            self._gpu_is_in_step = True
        if self.memory is not None:
            self.memory.begin_step(lambda: batch_shape(first_tensor(batch)))
        self.clock.switch(self._forward)
        return True

    def close(self, loop: Loop) -> None:
        """End a pass, for whatever reason."""
        is_own_thread = not self._is_elsewhere(even_aside=True)
        if loop.is_validation:
            if is_own_thread and self.clock.current is self._validation and loop.around is not None:
                self.clock.switch(loop.around)
                self._enter("training")
            return
        # Its iterator could not be created, or another loop continues.
        waits = self.clock.current in (self._epoch_start, self._data_loading) and self._fetching is None
        if is_own_thread and waits and loop.around is not None:
            self.clock.switch(loop.around)
        if self._counting is not loop:
            return
        self._counting = None
        ended = self._fetching is loop
        self._fetching = None
        if is_own_thread:
            if ended:
                self.clock.end_of_data()
            self._end_gpu_step()
            if self.clock.current in self._in_step or ended:
                self.clock.switch(self._outside)

    def end_step(self) -> None:
        """End the open step, if there is one."""
        if self._step_is_open:
            self._step_is_open = False
            self._end_gpu_step()
            self._untrained += 1
            if self._had_backward or self._optimizer_steps:
                self._most_untrained = max(self._most_untrained, self._untrained)
                self._untrained = 0
                if self._counting is not None:
                    self._counting.has_trained = True
            self._usual_optimizer_steps = max(self._usual_optimizer_steps, self._optimizer_steps)
            self._after_step()
            self._run.logged_step += 1

    def _end_gpu_step(self) -> None:
        if self.memory is not None:
            self.memory.end_step()
        if self._gpu is not None and self._gpu_is_in_step:
            self._gpu_is_in_step = False
            self._gpu.end_step()

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Book the time in this context on a phase of the report or the user's own."""
        if self._is_elsewhere(even_aside=True):
            yield
            return
        phase = name if name in phases.PHASES else f"{phases.CALLBACK}/{name}"
        self._asides += 1
        if phase == phases.VALIDATION:
            self._enter("validation")
        around = self.clock.switch(self.clock.account(phase))
        try:
            yield
        finally:
            self.clock.switch(around)
            self._asides -= 1
            if phase == phases.VALIDATION:
                self._enter("training")

    def _is_elsewhere(self, *, even_aside: bool = False) -> bool:
        """Return whether this is another thread, or a phase that has no steps."""
        return threading.get_ident() != self._thread or (self._asides > 0 and not even_aside)

    def _safely(self, action: _Function, *arguments: Any) -> Any:
        """Call ``action``; an error ends the measurement after the step."""
        if self.fault is None:
            try:
                return action(*arguments)
            except Exception as error:  # noqa: BLE001 - it is never the loop's error
                self.fault = error
        return None

    def _is_in_step(self) -> bool:
        return self.clock.current in self._in_step and threading.get_ident() == self._thread

    def _go_on(self, account: Account) -> None:
        self.clock.switch(account)
        if self._gpu is not None:
            self._gpu.enter(account.phase)

    def _note_training(self) -> None:
        if not self._has_trained:
            self._has_trained = True
            if self.clock.steps > 1:  # an evaluation before training: steps of another kind
                self.clock.begin_anew()

    def _timed_backward(self, backward: _Function) -> _Function:
        def timed(*args: Any, **kwargs: Any) -> Any:
            after = self._safely(self._backward_begins)
            try:
                return backward(*args, **kwargs)
            finally:
                if after is not None:
                    self._safely(self._go_on, after)

        return timed

    def _backward_begins(self) -> Account | None:
        """Return the account for the time after backward; ``None`` if this is not part of a step."""
        if not self._is_in_step():
            self._evaluates.clear()  # one of them may train now
            return None
        self._had_backward = True
        self._note_training()
        if self.memory is not None:
            self.memory.before_backward()
        around = self.clock.current
        self._go_on(self._backward)
        return around if around is self._backward else self._rest

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_in_step():
            return
        self._note_training()
        if optimizer not in self._run.optimizers:
            self._run.optimizers = [*self._run.optimizers, optimizer]
        self._go_on(self._optimizer)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_in_step():
            return
        self._optimizer_steps += 1
        self._run.optimizer_steps += 1
        is_last = self._optimizer_steps >= self._usual_optimizer_steps
        self._go_on(self._after if is_last else self._forward)
        if is_last:
            self._end_gpu_step()


def _noted(note: Callable[[object], None], get_iterator: Callable[[], object]) -> Callable[[], object]:
    def noted() -> object:
        iterator = get_iterator()
        note(iterator)
        return iterator

    return noted
