"""A callback that makes a killed and resumed run identical to an uninterrupted one."""

import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.loaders.resumable import Positions, inexact, is_resumable, mixed, seed_all
from lightning_gpu_tools.patches import Patches, after, before
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import GuardedCallback, LightningModule, Trainer, base_of, lookup, overrides
from lightning_gpu_tools.trainer.preemption import Preemption
from lightning_gpu_tools.training.compat import default_store, own_store
from lightning_gpu_tools.units import plural, printable_path


class ExactResume(GuardedCallback):
    """A callback that makes a killed and resumed run end with the same bits as an uninterrupted one.

    This covers weights, optimizers, schedulers, counters, random numbers and the metrics of the epoch, wherever the run
    was killed, with any number of workers before and after, and with DDP. Loaders must be plain DataLoaders over
    map-style datasets. Warnings before the first step name everything that cannot be exact. The checkpoints stay
    readable without this callback, and are some kB larger for each rank.

    The order of a loader, the contents of each batch and each step get their random numbers from the run's seed and the
    number of the batch. Its random numbers therefore differ from those of a run without this callback.

    At SIGTERM and SIGUSR1, also during validation, all ranks save one step as ``last.ckpt`` in the folder of
    ``ModelCheckpoint``, else in ``default_root_dir``, and end with exit code 143. ``max_time`` saves in the same way.
    Where SLURM requeues jobs, Lightning's handler then requeues this one.

    Raises:
        CheckpointMismatchError: In ``fit``: the checkpoint was saved by a different number of ranks.

    Example::

        saving = ModelCheckpoint(every_n_train_steps=500, save_top_k=0, save_last=True)
        trainer = Trainer(callbacks=[ExactResume(), saving])
        trainer.fit(model, loader, ckpt_path="last")
    """

    is_on = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(self).clear()
        if stage != "fit" or is_disabled() or self.is_superfluous(trainer.callbacks):  # type: ignore[attr-defined]
            return
        self._trainer: Any = trainer
        self._positions = Positions(trainer.global_rank, lambda: trainer.global_step)
        self._restored: dict[str, Any] = {}
        self._point = (0, 0)  # training batches, and validation batches since
        self._is_between_steps = True  # whether no gradients wait for the optimizer
        self._is_validating = False
        self._holds_other_weights = False  # whether a callback may have exchanged them for validation
        self._is_requeued = False
        self._saved: tuple[str, str] | None = None  # a file to be renamed at the end, and the name
        ranks = trainer.world_size
        store = (own_store() or default_store()) if ranks > 1 else None
        name = trainer.strategy.broadcast(uuid.uuid4().hex) if ranks > 1 else ""
        self._preemption = Preemption(trainer, store, name)
        self._has_hook = overrides(pl_module, "LightningModule", "on_train_batch_end")
        self._patches = Patches()
        self._patches.put(trainer.strategy, "process_dataloader", partial(partial, self._process_loader))
        # Not hooks of the callback, which run before the module's own: what that changes belongs into the file.
        self._patches.put(pl_module, "on_train_batch_start", partial(before, self._batch_started))
        self._patches.put(pl_module, "on_train_batch_end", partial(after, self._batch_ended))
        self.is_on = True

    def _process_loader(self, process: Any, loader: Any) -> Any:
        loader = process(loader)
        return self._positions.keep(loader, self._trainer.training) if is_resumable(loader) else loader

    def _seed(self, *stream: object) -> None:
        """Give what draws next a stream of its own. Ranks that are seeded alike have the same."""
        seed_all(mixed(self._positions.seed, *stream))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._preemption.listen()
        restored, parameters = self._restored, list(pl_module.parameters())
        is_within_epoch = restored.get("epoch_is_open", False)
        # What happened at the start of this or an earlier epoch, and Lightning leaves out when it resumes.
        if restored and len(restored["trains"]) == len(parameters):  # some may have been unfrozen at an epoch
            for parameter, trains in zip(parameters, restored["trains"].tolist(), strict=True):
                parameter.requires_grad_(trains)
        for callback in trainer.callbacks if is_within_epoch else []:  # type: ignore[attr-defined]
            if any(base_of(callback, name) for name in ("GradientAccumulationScheduler", "StochasticWeightAveraging")):
                callback.on_train_epoch_start(trainer, pl_module)
        for sentence in self._inexact(is_within_epoch):
            rank_zero_warn(f"ExactResume: {sentence}")
        if is_within_epoch:
            compat.restore_metrics(trainer, restored["metrics"])

    def _inexact(self, is_within_epoch: bool) -> Iterator[str]:
        """Yield what will not be exact in this run, before its first step."""
        trainer, module = self._trainer, type(self._trainer.lightning_module).__name__
        for loader in compat.loaders_of(trainer.fit_loop):
            yield from inexact(loader)
        saves_in_epoch = any(getattr(saving, "_every_n_train_steps", 0) for saving in trainer.checkpoint_callbacks)
        if saves_in_epoch and self._has_hook:
            yield (
                f"{module}.on_train_batch_end runs after ModelCheckpoint has saved, so what it changes is not in the "
                "file. Do that in on_train_batch_end of a callback."
            )
        if is_within_epoch and overrides(trainer.lightning_module, "LightningModule", "on_train_epoch_start"):
            yield (
                f"{module}.on_train_epoch_start does not run again in the resumed epoch. Whatever it sets must also be "
                "set in on_train_start."
            )
        for callback in trainer.callbacks:
            if base_of(callback, "LearningRateFinder") or base_of(callback, "BatchSizeFinder"):
                name = type(callback).__name__
                yield f"{name} searches again when the run is resumed. Set the values it found, and remove {name}."
            if base_of(callback, "OnExceptionCheckpoint") or getattr(callback, "save_on_exception", False):
                yield "A checkpoint saved on an exception is from mid-step, and its batch is not seen again."
        if trainer.strategy.root_device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            yield "Kernels on the GPU may round differently in each run. Trainer(deterministic=True) prevents that."
        if trainer.ckpt_path and not self._restored:
            seen = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            is_within = 0 < seen < trainer.num_training_batches
            again = f" The epoch begins again, and {seen} of its batches are seen twice." if is_within else ""
            yield f"{printable_path(trainer.ckpt_path)} was saved without it, so the random numbers differ.{again}"

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._positions.has_ended = False
        self._seed("epoch start", trainer.current_epoch)

    def _batch_started(self) -> None:
        compat.end_restart(self._trainer)
        self._positions.batch_started()
        if not self._positions.places:  # whose passes would have done that
            self._seed("step", self._trainer.fit_loop.total_batch_idx)
        self._step_before = self._trainer.global_step

    def _batch_ended(self) -> None:
        trainer = self._trainer
        self._point = (self._point[0] + 1, 0)
        self._is_between_steps = trainer.global_step != self._step_before
        timers = [callback for callback in trainer.callbacks if base_of(callback, "Timer")]
        if trainer.should_stop and timers:
            left = [timer.time_remaining() for timer in timers]
            is_over = any(seconds is not None and seconds <= 0 for seconds in left)
            if trainer.strategy.broadcast(is_over):
                if self._is_between_steps:
                    self._save("max_time")
                else:
                    trainer.should_stop = False  # the Timer asks again after the next batch
        self._stop_if_asked()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._preemption.listen()  # in the sanity check, too
        self._is_validating = True
        self._seed("validation", trainer.global_step)
        self._holds_other_weights = any(map(_exchanges_weights, trainer.callbacks))  # type: ignore[attr-defined]

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._point = (self._point[0], self._point[1] + 1)
        if not self._holds_other_weights:
            self._stop_if_asked()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_validating = False
        self._seed("after validation", trainer.global_step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        compat.end_restart(trainer)
        self._positions.has_ended = False
        self._seed("epoch end", trainer.current_epoch)

    # The kill

    def _stop_if_asked(self) -> None:
        preemption = self._preemption
        if self._is_requeued or not preemption.is_due(self._point) or not self._is_between_steps:
            return
        name = signal.Signals(preemption.signal or signal.SIGTERM).name
        if self._point[0]:
            self._save(name)
        self._finish_saving()
        if preemption.requeue is not None and name != "SIGTERM":
            self._is_requeued = True  # SLURM ends the job
            preemption.requeue()  # saves again, in a file of Lightning's that `ckpt_path="last"` does not find
            return
        stop = lookup(self._trainer, "utilities.exceptions:SIGTERMException")
        # A launcher kills rank 0 if another rank ends with an error. Without a number, Lightning's ends with 0.
        error = stop(128 + signal.SIGTERM if self._trainer.is_global_zero else 0)
        step = self._trainer.global_step
        error.outcome = f"preempted at step {step}, saved" if self._point[0] else "preempted before the first step"
        raise error

    def _save(self, why: str) -> None:
        trainer = self._trainer
        saving = trainer.checkpoint_callback
        folder = getattr(saving, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(folder, "last.ckpt")
        if saving is not None:
            saving.last_model_path = path  # a resumed run would save as last-v1.ckpt, and leave this file as it is
        unfinished = path if "://" in folder else f"{path}.unfinished"
        began_s = time.monotonic()
        trainer.save_checkpoint(unfinished)
        self._saved = unfinished, path
        rank_zero_info(
            f"{why}: saved step {trainer.global_step} to {printable_path(path)} in {time.monotonic() - began_s:.1f} "
            f"s. To continue, run the same command with fit(..., ckpt_path={path!r})."
        )

    def _finish_saving(self) -> None:
        """Give the file its name. After ``max_time``, only once ModelCheckpoint has saved the state of the end."""
        saved, self._saved = self._saved, None
        if saved is None or saved[0] == saved[1]:
            return
        self._trainer.strategy.checkpoint_io.teardown()  # waits for a save in the background
        self._trainer.strategy.barrier()
        if self._trainer.is_global_zero:
            unfinished, path = saved
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.isdir(unfinished) and os.path.lexists(path):
                os.unlink(path)
            os.replace(unfinished, path)

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self.is_on:
            return {}
        trainer = self._trainer
        progress = trainer.fit_loop.epoch_progress.total
        mine = {
            **self._positions.state_dict(is_last_batch=trainer.is_last_batch),
            "is_last_batch": trainer.is_last_batch,
            "epoch_is_open": progress.processed < progress.started,
            "trains": torch.tensor([parameter.requires_grad for parameter in trainer.lightning_module.parameters()]),
            "metrics": compat.metrics_so_far(trainer),
        }
        ranks: list[Any] = [mine]
        if trainer.world_size > 1:
            ranks = [None] * trainer.world_size
            torch.distributed.all_gather_object(ranks, mine)
        return {"ranks": ranks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.is_on or not state_dict:
            return
        saved, ranks = len(state_dict["ranks"]), self._trainer.world_size
        if saved != ranks:
            raise CheckpointMismatchError(
                f"The checkpoint was saved by {plural(saved, 'rank')}, but this run has {ranks}, which would see other "
                f"samples. Resume with {plural(saved, 'rank')}, or without ExactResume."
            )
        self._restored = mine = state_dict["ranks"][self._trainer.global_rank]
        self._positions.load_state_dict(mine)
        self._positions.has_ended = mine["is_last_batch"] and mine["epoch_is_open"]

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
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
            is_due = compat.validation_is_due(trainer)
            if not is_due and not trainer.is_last_batch:
                return
            for counts in batches["total"], batches["current"]:
                counts["completed"] = counts["processed"]
        else:
            is_due = self._is_validating
        if is_due:  # as in a validation that was interrupted in its first batch
            validation["total"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            validation["current"] = dict.fromkeys(validation["current"], 0)
            validation["is_last_batch"] = False

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()  # keeps its state, which ModelCheckpoint may save after this

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish_saving()
        self._give_up()

    @override
    def _give_up(self) -> None:
        self._close()
        vars(self).clear()

    def _close(self) -> None:
        self._preemption.close()
        self._patches.undo()
        self._positions.close()

    def __getstate__(self) -> dict[str, Any]:
        return {}


def _exchanges_weights(callback: Any) -> bool:
    """Return whether a callback may put other weights in place during validation, as averaging does."""
    kind = type(callback)
    is_lightnings = kind.__module__.startswith(("lightning.", "pytorch_lightning."))
    is_known = isinstance(callback, GuardedCallback) or (is_lightnings and "Averaging" not in kind.__name__)
    hooks = ("on_validation_start", "on_validation_epoch_start")
    return not is_known and any(overrides(callback, "Callback", hook) for hook in hooks)
