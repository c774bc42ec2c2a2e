"""A callback that makes a killed and resumed run identical to an uninterrupted one."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.loaders.random_states import packed_states, put_back_packed
from lightning_gpu_tools.loaders.resumable import Positions, inexact, is_resumable
from lightning_gpu_tools.patches import Patches, after, before
from lightning_gpu_tools.trainer import compat, epoch_metrics
from lightning_gpu_tools.trainer.families import LightningModule, Trainer, base_of, lookup, overrides
from lightning_gpu_tools.trainer.guarded_callback import GuardedCallback
from lightning_gpu_tools.trainer.preemption import Preemption
from lightning_gpu_tools.training.compat import default_store, own_store
from lightning_gpu_tools.units import plural, printable_path


class ExactResume(GuardedCallback):
    """A callback that makes a killed and resumed run end with the same bits as an uninterrupted one.

    This covers weights, optimizers, schedulers, counters, random numbers and the metrics of the epoch, wherever the run
    was killed, with any number of workers before and after, and with DDP. Loaders must be plain DataLoaders over
    map-style datasets. Warnings before the first step name everything that cannot be exact. The checkpoints stay
    readable without this callback, and are some kB larger for each rank.

    The order of a loader and the contents of each batch get their random numbers from the run's seed and the number of
    the batch. Its random numbers therefore differ from those of a run without this callback.

    At SIGTERM and SIGUSR1, also during validation, all ranks save one step as ``last.ckpt`` in the folder of
    ``ModelCheckpoint``, else in ``default_root_dir``, and end with exit code 143. ``max_time`` saves in the same way.
    Where SLURM requeues jobs, its signal calls Lightning's handler at that step.

    Raises:
        CheckpointMismatchError: In ``fit``: the checkpoint was saved by a different number of ranks.

    Example::

        saving = ModelCheckpoint(every_n_train_steps=500, save_top_k=0, save_last=True)
        trainer = Trainer(callbacks=[ExactResume(), saving])
        trainer.fit(model, loader, ckpt_path="last")
    """

    def __init__(self) -> None:
        self._run: _Run | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._run = None
        if stage == "fit" and not is_disabled() and not self.is_superfluous(trainer.callbacks):  # type: ignore[attr-defined]
            self._run = _Run(trainer)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.preemption.listen()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.training_started()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.epoch_started()

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._run is not None:
            self._run.validation_batch_ended()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.validation_started()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.validation_ended()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.epoch_ended()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._run is None else self._run.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._run is not None and state_dict:
            self._run.load_state_dict(state_dict)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.mend_progress(checkpoint)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._run is not None:
            self._run.close()  # keeps its state, which ModelCheckpoint may save after this

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._run is not None:
            self._run.finish_saving()
        self._give_up()

    @override
    def _give_up(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()


class _Run:
    """One fit."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.positions = Positions(self.trainer.global_rank, self._put_back, lambda: self.trainer.global_step)
        self._resumed: list[Any] | None = None  # the random states to go on with, until the first step
        self._outside: list[Any] | None = None  # those of training, during validation
        self._ended = False  # whether the position that was restored is at the end of an epoch
        self._epoch_is_open = False  # whether the restored epoch goes on
        self._trains: torch.Tensor | None = None  # which parameters do, in the restored state
        self._metrics: dict[str, Any] | None = None  # of the epoch to go on with, see `epoch_metrics`
        ranks = self.trainer.world_size
        store = (own_store() or default_store()) if ranks > 1 else None
        name = self.trainer.strategy.broadcast(uuid.uuid4().hex) if ranks > 1 else ""
        self.preemption = Preemption(self.trainer, store, name)
        self._point = (0, 0)  # training batches, and validation batches since
        self._step_before = self.trainer.global_step
        self._is_between_steps = True  # whether no gradients wait for the optimizer
        self._holds_other_weights = False  # whether a callback may have exchanged them for validation
        self._is_requeued = False
        self._saved: tuple[str, str] | None = None  # a file to be renamed at the end, and the name
        self._has_hook = overrides(self.trainer.lightning_module, "LightningModule", "on_train_batch_end")
        self._patches = Patches()
        self._patches.put(self.trainer.strategy, "process_dataloader", self._wrapped)
        self._patches.put(self.trainer, "save_checkpoint", self._timed)
        # Not hooks of the callback, which run before the module's own: what that changes belongs into the file.
        module = self.trainer.lightning_module
        self._patches.put(module, "on_train_batch_start", functools.partial(before, self._batch_started))
        self._patches.put(module, "on_train_batch_end", functools.partial(after, self._batch_ended))

    def _wrapped(self, process: Any) -> Any:
        def process_dataloader(loader: Any) -> Any:
            loader = process(loader)
            if not is_resumable(loader):
                return loader
            return self.positions.keep(loader, is_training=self.trainer.training)

        return process_dataloader

    def _timed(self, save: Any) -> Any:
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            began_s = time.monotonic()
            save(*args, **kwargs)
            self.preemption.last_save_s = time.monotonic() - began_s

        return save_checkpoint

    # The random numbers of everything but loaders

    def _put_back(self) -> None:
        """Go on with the restored states. Called again until the first step, because more may draw before it."""
        if self._resumed is not None:
            put_back_packed(self._resumed, self._device)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.trainer.strategy.root_device
        return device

    # Hooks

    def training_started(self) -> None:
        self.preemption.listen()
        self._repeat_epoch_start()
        for sentence in self._inexact():
            rank_zero_warn(f"ExactResume: {sentence}")
        if self._metrics is not None:
            epoch_metrics.restore_modules(self.trainer, self._metrics)
            if self.positions.has_ended:
                epoch_metrics.restore_ended(self.trainer, self._metrics)
                self._metrics = None

    def _repeat_epoch_start(self) -> None:
        """Do what happened at the start of this or an earlier epoch, which Lightning leaves out when it resumes."""
        trainer = self.trainer
        parameters = list(trainer.lightning_module.parameters())
        if self._trains is not None and len(self._trains) == len(parameters):  # it may have been unfrozen at an epoch
            for parameter, trains in zip(parameters, self._trains.tolist(), strict=True):
                parameter.requires_grad_(trains)
        for callback in trainer.callbacks if self._epoch_is_open else []:
            if any(base_of(callback, name) for name in ("GradientAccumulationScheduler", "StochasticWeightAveraging")):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)

    def epoch_started(self) -> None:
        self._put_back()
        self._resumed = None
        self.positions.has_ended = False

    def _batch_started(self) -> None:
        self._resumed = None
        compat.end_restart(self.trainer)
        self.positions.batch_started()
        self._step_before = self.trainer.global_step
        if self._is_between_steps:
            self.preemption.running("a training step")

    def _add_metrics(self) -> None:
        if self._metrics is not None:
            epoch_metrics.add_logged(self.trainer, self._metrics)

    def _batch_ended(self) -> None:
        self._add_metrics()
        self._point = (self._point[0] + 1, 0)
        self._is_between_steps = self.trainer.global_step != self._step_before
        if self.trainer.should_stop and self._is_out_of_time():
            if self._is_between_steps:
                self._save("max_time")
            else:
                self.trainer.should_stop = False  # the Timer asks again after the next batch
        self._stop_if_asked()
        if self._is_between_steps:
            self.preemption.running("the wait for the next batch")

    def validation_started(self) -> None:
        self._put_back()
        self._outside = packed_states(self._device)
        swapping = self._exchanges_weights()
        self._holds_other_weights = swapping is not None
        what = f"validation, in which {swapping} may hold other weights," if swapping else "a validation batch"
        self.preemption.running(what)

    def validation_batch_ended(self) -> None:
        self._point = (self._point[0], self._point[1] + 1)
        if not self._holds_other_weights:
            self._stop_if_asked()
            self.preemption.running("a validation batch")

    def validation_ended(self) -> None:
        if self._outside is not None:
            put_back_packed(self._outside, self._device)
            self._outside = None
        self.preemption.running("the wait for the next batch")

    def epoch_ended(self) -> None:
        self._add_metrics()
        self._metrics = None
        compat.end_restart(self.trainer)
        self.epoch_started()

    def _inexact(self) -> Iterator[str]:
        """Yield what will not be exact in this run, before its first step."""
        trainer = self.trainer
        for loader in compat.loaders_of(trainer.fit_loop):
            yield from inexact(loader)
        saves_in_epoch = any(getattr(saving, "_every_n_train_steps", 0) for saving in trainer.checkpoint_callbacks)
        if saves_in_epoch and self._has_hook:
            yield (
                f"{type(trainer.lightning_module).__name__}.on_train_batch_end runs after ModelCheckpoint has saved, "
                "so what it changes is not in the file. Do that in on_train_batch_end of a callback."
            )
        if self._epoch_is_open and overrides(trainer.lightning_module, "LightningModule", "on_train_epoch_start"):
            yield (
                f"{type(trainer.lightning_module).__name__}.on_train_epoch_start does not run again in the resumed "
                "epoch. Whatever it sets must also be set in on_train_start."
            )
        for callback in trainer.callbacks:
            if base_of(callback, "LearningRateFinder") or base_of(callback, "BatchSizeFinder"):
                name = type(callback).__name__
                yield f"{name} searches again when the run is resumed. Set the values it found, and remove {name}."
            if base_of(callback, "OnExceptionCheckpoint") or getattr(callback, "save_on_exception", False):
                yield "A checkpoint saved on an exception is from mid-step, and its batch is not seen again."
        is_on_gpu = self._device.type == "cuda"
        if is_on_gpu and not torch.are_deterministic_algorithms_enabled():
            yield "Kernels on the GPU may round differently in each run. Trainer(deterministic=True) prevents that."
        seen = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trainer.ckpt_path and self._resumed is None:
            again = f" The epoch begins again, and {seen} of its batches are seen twice."
            is_within = 0 < seen < trainer.num_training_batches
            yield (
                f"{printable_path(trainer.ckpt_path)} was saved without it, so the random numbers differ."
                f"{again if is_within else ''}"
            )

    # The kill

    def _stop_if_asked(self) -> None:
        preemption = self.preemption
        if self._is_requeued or not preemption.is_due(self._point) or not self._is_between_steps:
            return
        preemption.running(None)
        name = signal.Signals(preemption.signal or signal.SIGTERM).name
        if preemption.requeue is not None and name != "SIGTERM":
            self._is_requeued = True  # SLURM ends the job
            preemption.requeue()
            return
        if self._point[0]:
            self._save(name)
            outcome = f"preempted at step {self.trainer.global_step}, saved"
        else:
            rank_zero_info(f"{name}: ends before the first step, so there is nothing to save.")
            outcome = "preempted before the first step"
        self.finish_saving()
        stop = lookup(self.trainer, "utilities.exceptions:SIGTERMException")
        # A launcher kills rank 0 if another rank ends with an error. Without a number, Lightning's ends with 0.
        error = stop(128 + signal.SIGTERM if self.trainer.is_global_zero else 0)
        error.outcome = outcome
        raise error

    def _exchanges_weights(self) -> str | None:
        """Return the name of a callback that may put other weights in place during validation, as averaging does."""
        for callback in self.trainer.callbacks:
            kind = type(callback)
            starts, ends = (
                any(overrides(callback, "Callback", f"on_validation_{part}{when}") for part in ("", "epoch_"))
                for when in ("start", "end")
            )
            is_lightnings = kind.__module__.startswith(("lightning.", "pytorch_lightning."))
            is_known = isinstance(callback, GuardedCallback) or (is_lightnings and "Averaging" not in kind.__name__)
            if starts and ends and not is_known:
                return kind.__name__
        return None

    def _is_out_of_time(self) -> bool:
        timers = [callback for callback in self.trainer.callbacks if base_of(callback, "Timer")]
        left = [timer.time_remaining() for timer in timers]
        is_over = any(seconds is not None and seconds <= 0 for seconds in left)
        return bool(self.trainer.strategy.broadcast(is_over) if timers else False)

    def _save(self, why: str) -> None:
        trainer = self.trainer
        saving = trainer.checkpoint_callback
        folder = getattr(saving, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(folder, "last.ckpt")
        if saving is not None:
            saving.last_model_path = path  # a resumed run would save as last-v1.ckpt, and leave this file as it is
        unfinished = path if "://" in folder else f"{path}.unfinished"
        trainer.save_checkpoint(unfinished)
        self._saved = unfinished, path
        rank_zero_info(
            f"{why}: saved step {trainer.global_step} to {printable_path(path)} in "
            f"{self.preemption.last_save_s:.1f} s. To continue, run the same command with fit(..., ckpt_path={path!r})."
        )

    def finish_saving(self) -> None:
        """Give the file its name. After ``max_time``, only once ModelCheckpoint has saved the state of the end."""
        saved, self._saved = self._saved, None
        if saved is None or saved[0] == saved[1]:
            return
        self.trainer.strategy.checkpoint_io.teardown()  # waits for a save in the background
        self.trainer.strategy.barrier()
        if self.trainer.is_global_zero:
            unfinished, path = saved
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.isdir(unfinished) and os.path.lexists(path):
                os.unlink(path)
            os.replace(unfinished, path)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        self._add_metrics()
        ended = self._ended if self._resumed is not None else self.trainer.is_last_batch
        progress = self.trainer.fit_loop.epoch_progress.total
        mine = {
            **self.positions.state_dict(has_ended=ended),
            "random": self._resumed or self._outside or packed_states(self._device),
            "at_end": ended,
            "epoch_is_open": progress.processed < progress.started,
            "trains": torch.tensor([one.requires_grad for one in self.trainer.lightning_module.parameters()]),
            "metrics": self._metrics or epoch_metrics.collected(self.trainer),
        }
        ranks: list[Any] = [mine]
        if self.trainer.world_size > 1:
            ranks = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(ranks, mine)
        return {"ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, ranks = len(state["ranks"]), self.trainer.world_size
        if saved != ranks:
            raise CheckpointMismatchError(
                f"The checkpoint was saved by {plural(saved, 'rank')}, but this run has {ranks}, which would see other "
                f"samples. Resume with {plural(saved, 'rank')}, or without ExactResume."
            )
        mine = state["ranks"][self.trainer.global_rank]
        self.positions.load_state_dict(mine)
        self._resumed, self._ended, self._trains = mine["random"], mine["at_end"], mine["trains"]
        self._epoch_is_open = mine["epoch_is_open"]
        self.positions.has_ended = self._ended and self._epoch_is_open
        self._metrics = mine["metrics"] if self._epoch_is_open else None

    def mend_progress(self, checkpoint: dict[str, Any]) -> None:
        """Let a resumed run finish a step that was saved before or in its validation, or before its epoch's end.

        Lightning leaves these out when it resumes from a checkpoint of ``on_train_batch_end``, and goes on with half of
        an interrupted validation.
        """
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        loaders = loops.get("state_dict", {}).get("combined_loader", [])
        if not any(loaders):  # Lightning refuses states of loaders that have none in another run
            loaders.clear()
        batches, validation = (loops.get(f"epoch_loop{part}.batch_progress") for part in ("", ".val_loop"))
        if not batches or not validation:
            return
        if batches["total"]["completed"] == batches["total"]["processed"] - 1:
            is_due = compat.validation_is_due(self.trainer)
            if not is_due and not self.trainer.is_last_batch:
                return
            for counts in batches["total"], batches["current"]:
                counts["completed"] = counts["processed"]
        else:
            is_due = self._outside is not None
        if is_due:  # as in a validation that was interrupted in its first batch
            validation["total"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            validation["current"] = dict.fromkeys(validation["current"], 0)
            validation["is_last_batch"] = False

    def close(self) -> None:
        self.preemption.close()
        self._patches.undo()
        self.positions.close()
