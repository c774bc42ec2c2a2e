"""The timing of one run of one Trainer, through its profiler, its loops and its loggers.

Lightning calls ``profiler.profile(name)`` for some thirty actions per step, and its ``PassThroughProfiler`` makes a
generator for each. Here each call is a table lookup, so timing does not slow training down.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from typing_extensions import override

from lightning_gpu_tools.gpus.watch import Phase
from lightning_gpu_tools.loaders.settings import batch_shape, first_tensor
from lightning_gpu_tools.memory.counters import MemoryCounters
from lightning_gpu_tools.patches import after, before
from lightning_gpu_tools.runs.ending import Ending
from lightning_gpu_tools.runs.run import Timer
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import Callback, Trainer, base_of, overrides
from lightning_gpu_tools.training import phases
from lightning_gpu_tools.training.compat import WORKER_LOOP, keep_from_compiler
from lightning_gpu_tools.training.gpu_timeline import GpuTimeline
from lightning_gpu_tools.training.step_clock import StepClock

_TRANSFER_HOOKS = frozenset({"on_before_batch_transfer", "on_after_batch_transfer"})
# Hooks of the strategy, and of a model that does not override them.
_STEP_PARTS = {
    "training_step": phases.FORWARD,
    "backward": phases.BACKWARD,
    "optimizer_step": phases.OPTIMIZER,
    "optimizer_zero_grad": phases.ZERO_GRAD,
    "configure_gradient_clipping": phases.GRADIENT_CLIPPING,
}
_MAX_CONTEXTS = 1000  # our default: a user's own actions may have numbers in their names

_Context = AbstractContextManager[Any]


class FitTimer(Timer):
    """A timer that drives the step clock of a fit, from ``Callback.setup`` to its end.

    Methods that Lightning has under another name stay part of the surrounding phase; ``patches.missing`` lists them.
    ``ending`` gets the batches of some steps, and of one that fails. ``enter`` is called with the phase when validation
    begins and when training resumes.
    """

    step_ended: Callable[[Any], None] | None = None  # to be called with the batch of each step; set before the run
    # Names of hooks to time begin with these: of callbacks, and of the model and the data module. The others of a
    # validation are part of its phase.
    hooks: tuple[str, ...] = ("on_train_", "on_before_", "on_after_", "on_validation_end")
    users_hooks: tuple[str, ...] = ("on_train_", "on_before_", "on_after_", "lr_scheduler_step", *_STEP_PARTS)
    parts: Mapping[str, str] = _STEP_PARTS  # phases of a step, by the strategy's hook
    # Like on_after_batch_transfer, it gets a batch before its step, and may have kernels of its own.
    batch_start = "on_train_batch_start"

    def __init__(
        self,
        trainer: Trainer,
        clock: StepClock,
        ending: Ending,
        enter: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        super().__init__(clock, lambda: trainer.lightning_module.parameters() if self._run.is_plain_ddp else ())
        self._ending = ending
        self._trainer = trainer
        self._run = ending.run
        self._enter = enter
        self._callbacks = tuple(trainer.callbacks)  # type: ignore[attr-defined]
        self._wrap = partial(self.patches.put, trainer)
        self.patches.put(torch.utils.data, WORKER_LOOP, self.worker_lines.sampled)
        self._time_run()

    def _time_run(self) -> None:
        self._time_from("fit_loop.on_run_start", to="fit_loop.on_run_end")

    def _time_from(self, first: str, *, to: str) -> None:
        """Time the run from one of the Trainer's functions to another one."""
        self._wrap(first, partial(before, partial(self._safely, self._start)))
        self._wrap(to, partial(after, partial(self._safely, self._end)))

    def _safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - it is never the Trainer's error
            self.fault = error
            self.stop()

    @property
    @override
    def is_trial(self) -> bool:
        # BatchSizeFinder and LearningRateFinder remove the callbacks.
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return bool(self._callbacks) and not any(callback in callbacks for callback in self._callbacks)

    def _end(self) -> None:
        if self.clock.running and not self.is_trial:
            self.stop()

    def _start(self) -> None:
        if self.clock.running or self.is_trial:
            return
        keep_from_compiler()
        if self._trainer.world_size > 1:
            self.patches.put(torch.distributed, "Work.wait", self.rank_waits.timed)
        self._time_loop()
        for method in compat.METRICS:
            self._time(method, f"{phases.LOGGING}/{phases.SELF_LOG}", except_in=phases.VALIDATION)
        self.time_loggers(self._trainer.loggers)
        profiler, context = self._trainer.profiler, _contexts(self._context)  # type: ignore[attr-defined]
        if type(profiler) is base_of(profiler, "PassThroughProfiler"):  # does nothing, but takes time
            self.patches.put(profiler, "profile", lambda profile: context)
        else:
            self.patches.put(profiler, "profile", lambda profile: _around(profile, context))
        self.clock.start()
        self.clock.switch(self.clock.account(phases.TRAINER))

    def _time_loop(self) -> None:
        """Time what happens in an epoch."""
        trainer, clock = self._trainer, self.clock
        self._time("fit_loop.on_advance_start", phases.EPOCH_START)
        self._time("fit_loop.epoch_loop.on_run_start", phases.EPOCH_START)
        self._wrap("fit_loop.epoch_loop.on_run_start", partial(before, clock.begin_epoch))
        if trainer.world_size > 1:
            if hasattr(trainer.fit_loop.epoch_loop, compat.SIGNAL_CHECK):
                self._time(f"fit_loop.epoch_loop.{compat.SIGNAL_CHECK}", f"{phases.RANK_WAIT}/signal check")
            self._wrap("strategy.backward", self.rank_waits.around_backward)
            if self._run.is_plain_ddp:
                self._wrap("strategy.model._sync_buffers", self.rank_waits.around_buffers)
        self._time_step()
        self._time("fit_loop.epoch_loop.val_loop.run", phases.VALIDATION)
        self._wrap("fit_loop.epoch_loop.val_loop.run", partial(before, partial(self._enter, "validation")))
        self._wrap("fit_loop.epoch_loop.val_loop.run", partial(after, partial(self._enter, "training")))
        waits = clock.validation_waits
        self._wrap(compat.VALIDATION_RESET, partial(before, waits.begin))
        self._wrap(compat.VALIDATION_RESET, partial(after, waits.created))
        epoch_loop = trainer.fit_loop.epoch_loop
        fetch = compat.fetch_of(epoch_loop, "train_dataloader")
        validation_fetch = compat.fetch_of(getattr(epoch_loop, "val_loop", None), "val")
        self._notice("start", {fetch: clock.begin_fetch, validation_fetch: waits.begin})
        self._notice("stop", {fetch: clock.end_fetch, validation_fetch: waits.fetched})

    def _time_step(self) -> None:
        model = self._trainer.lightning_module
        is_automatic = model.automatic_optimization
        run = f"fit_loop.epoch_loop.{'automatic' if is_automatic else 'manual'}_optimization.run"
        self._measure_step(run, phases.TRAINING_STEP)
        gpu, memory = self.rank_waits.gpu, self.memory
        if gpu is not None and memory is not None:
            for part in ("training_step", "optimizer_step"):
                self._wrap(f"strategy.{part}", partial(gpu.part, _STEP_PARTS[part]))
            self._wrap("strategy.backward", partial(_read_before, memory, gpu, _STEP_PARTS["backward"]))
        if not is_automatic:
            self._time("strategy.backward", phases.BACKWARD)
        if not is_automatic or overrides(model, "LightningModule", "optimizer_step"):
            self._time("strategy.optimizer_step", phases.OPTIMIZER)
        if not is_automatic or overrides(model, "LightningModule", "configure_gradient_clipping"):
            self._time("strategy.precision_plugin.clip_gradients", phases.GRADIENT_CLIPPING)
        if overrides(model, "LightningModule", "backward"):
            self._time("strategy.precision_plugin.backward", f"{phases.TRAINING_STEP}/{type(model).__name__}.backward")
        if getattr(self._trainer.precision_plugin, "scaler", None) is not None:
            for method in ("scale", "unscale_", "update"):
                self._time(f"strategy.precision_plugin.scaler.{method}", phases.GRADIENT_SCALER)

    def _measure_step(self, run: str, first_part: str) -> None:
        """Measure the function that runs a step, from this part of it on, and call ``step_ended`` after it."""
        device, clock = self._run.gpu, self.clock
        if device is not None:
            gpu = self.rank_waits.gpu = clock.measure_gpu(device)
            memory = self.memory = MemoryCounters(self._run, clock)
            self.patches.put(torch.cuda, "CUDAGraph.replay", partial(before, clock.note_replay))
            self._wrap(run, partial(_measured_step, clock, gpu, memory, self._ending, first_part))
        # A callback's hook would do, but Lightning takes 10 us to call one: see the empty callbacks of
        # benchmarks/step_overhead.py.
        if self.step_ended is not None:
            self._wrap(run, partial(_followed_by, self.step_ended))

    def _time(self, method: str, phase: str, except_in: str = "") -> None:
        self._wrap(method, partial(self.clock.timed, phase, except_in=except_in))

    def _notice(self, method: str, actions: Mapping[str, Callable[[], None]]) -> None:
        """Act when the profiler's method is called with the name of an action."""

        def noticing(function: Callable[..., Any]) -> Callable[..., Any]:
            def noticed(action_name: str) -> None:
                if action_name in actions:
                    actions[action_name]()
                function(action_name)

            return noticed

        self._wrap(f"profiler.{method}", noticing)

    def _context(self, action: str) -> _Context:
        """Return the context that books an action such as ``"[Callback]EarlyStopping.on_train_batch_end"``."""
        clock, gpu = self.clock, self.rank_waits.gpu
        if action == compat.RUN_STEP:
            return clock.booked(phases.TRAINING_STEP, action)
        if action == compat.SAVE_CHECKPOINT:
            return _Marked(clock.note_checkpoint, clock.booked(phases.CHECKPOINT, action))
        owner, _, name = action.removeprefix("[").partition("]")
        hook = name.rpartition(".")[2]
        if owner == "Strategy" and hook == "batch_to_device":
            return clock.booked(phases.HOST_TO_DEVICE_COPY, action, except_in=phases.VALIDATION)
        phase = self._phase_of(action, owner, hook)
        if phase is None:
            return _Untimed(action)
        context = clock.booked(phase, action, except_in=phases.VALIDATION if hook in _TRANSFER_HOOKS else "")
        gets_batch = hook in ("on_after_batch_transfer", self.batch_start)
        return context if gpu is None or not gets_batch else _Marked(gpu.enter_hook, context)

    def _phase_of(self, action: str, owner: str, hook: str) -> str | None:
        trainer = self._trainer
        if owner == "Callback":
            callbacks = trainer.callbacks if hook.startswith(self.hooks) else ()  # type: ignore[attr-defined]
            return _callback_phase(action, hook, callbacks)
        users: dict[str, Any] = {"LightningModule": trainer.lightning_module}
        users["LightningDataModule"] = trainer.datamodule  # type: ignore[attr-defined]
        if owner in users and hook.startswith(self.users_hooks):
            if overrides(users[owner], owner, hook):
                return f"{phases.CALLBACK}/{type(users[owner]).__name__}.{hook}"
            if hook == "lr_scheduler_step":
                schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
                return f"{phases.CALLBACK}/{' and '.join(schedulers)}.step"
            if hook != "configure_gradient_clipping" or trainer.gradient_clip_val:
                return self.parts.get(hook)
        return self.parts.get(hook) if owner == "Strategy" else None


class EvaluationTimer(FitTimer):
    """A timer that drives the step clock of ``validate``, ``test`` or ``predict``; a step is one batch.

    It begins before the first batch, once the loader's iterator exists and a tuner's trials are over.
    """

    @override
    def _time_run(self) -> None:
        stage = self._run.stage
        name = self._name = "validation" if stage == "validate" else stage
        self.hooks, self.users_hooks = (f"on_{name}_",), (f"on_{name}_", *_TRANSFER_HOOKS)
        self.parts, self.batch_start = {f"{name}_step": phases.FORWARD}, f"on_{name}_batch_start"
        self._time_from(f"{stage}_loop.{compat.EVALUATION[stage]}", to=f"{stage}_loop.on_run_end")

    @override
    def _time_loop(self) -> None:
        clock, stage, step = self.clock, self._run.stage, f"strategy.{self._name}_step"
        fetch = compat.fetch_of(getattr(self._trainer, f"{stage}_loop"), "val" if stage == "validate" else stage)
        self._notice("start", {fetch: clock.begin_fetch})
        self._notice("stop", {fetch: clock.end_fetch})
        self._measure_step(step, phases.FORWARD)
        clock.begin_epoch()


def _read_before(
    memory: MemoryCounters, gpu: GpuTimeline, phase: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a function that runs backward to read the memory before it, and to mark it on the GPU's timeline."""
    measured = before(memory.before_backward, gpu.part(phase, function))

    def called(*args: Any, **kwargs: Any) -> Any:
        return (measured if gpu.sample is not None or memory.is_reading else function)(*args, **kwargs)

    return called


def _followed_by(action: Callable[[Any], None], run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that runs a training step to call ``action`` with its batch afterwards."""

    def followed(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        action(compat.batch_of_step(args))
        return result

    return followed


def _measured_step(
    clock: StepClock,
    gpu: GpuTimeline,
    memory: MemoryCounters,
    ending: Ending,
    first_part: str,
    run: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap a function that runs a step, with as few calls as possible in a step that is not sampled."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        if clock.steps >= ending.next_step:
            clock.as_own_work(ending.begin_step, compat.batch_of_step(args))
        if clock.steps >= memory.next_step:
            memory.begin_step(lambda: batch_shape(first_tensor(compat.batch_of_step(args))))
        if gpu.is_next_sampled:
            gpu.begin_step(first_part)
        try:
            result = run(*args, **kwargs)
        except Exception:  # raised again: only its batch is recorded
            ending.note_failed_batch(compat.batch_of_step(args))
            raise
        gpu.end_step()
        if memory.is_reading:
            memory.end_step()
        return result

    return measured


class _Marked(AbstractContextManager[Any]):
    """A context before which a function is called."""

    def __init__(self, begin: Callable[[], None], context: _Context) -> None:
        self._begin, self._context = begin, context

    def __enter__(self) -> Any:
        self._begin()
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class _Untimed(str):
    """The context of an action that is not timed; entering it returns the action's name.

    Both methods are C functions: some twenty are entered in every step, and the Python frames of a ``nullcontext`` were
    a third of its cost. ``__exit__`` returns an empty string, so no error is suppressed.
    """

    __slots__ = ()
    __enter__ = str.__str__
    __exit__: ClassVar[Any] = staticmethod("".format)


def _contexts(make: Callable[[str], _Context]) -> Callable[[str], _Context]:
    """Return a function that returns the context of an action; it is a C function, except on an action's first call."""

    @lru_cache(_MAX_CONTEXTS)
    def context(action_name: str) -> _Context:  # named as in Lightning, to be passed by name
        try:
            return make(action_name)
        except Exception:  # noqa: BLE001 - a callback unlike any other is not timed
            return _Untimed(action_name)

    return context


def _around(profile: Callable[[str], _Context], context: Callable[[str], _Context]) -> Callable[[str], _Context]:
    @contextmanager
    def both(action_name: str) -> Iterator[Any]:
        with context(action_name), profile(action_name) as given:
            yield given

    return both


def _callback_phase(action: str, hook: str, callbacks: Sequence[Callback]) -> str | None:
    for callback in callbacks:
        if overrides(callback, "Callback", hook) and action == f"[Callback]{callback.state_key}.{hook}":
            if base_of(callback, "Checkpoint"):
                return phases.CHECKPOINT  # also for removing files and finding their names
            if not type(callback).__module__.startswith("lightning_gpu_tools."):
                return f"{phases.CALLBACK}/{type(callback).__name__}"
            # Occasional work of our callbacks there is booked by `StepClock.as_own_work`.
            return None if hook in ("on_train_batch_start", "on_train_batch_end") else phases.MONITORING
    return None
