"""Finds the DataLoader settings that feed the training step, by trying them in the training itself."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gpu_tools.advice.loader_trials import LoaderResult
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.loaders.index_source import length_of
from lightning_gpu_tools.loaders.ranks import BoardOfRanks
from lightning_gpu_tools.loaders.settings import settings_of, why_fixed
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.loaders.tuning import Terms, Tuning
from lightning_gpu_tools.loaders.validation import ValidationLoader
from lightning_gpu_tools.trainer.facts import local_ranks, rank_exchange, trains_on_gpu
from lightning_gpu_tools.trainer.finder_messages import log_settings, show_result, show_trial
from lightning_gpu_tools.trainer.session import Session
from lightning_gpu_tools.trainer.wrappers import Wrappers
from lightning_gpu_tools.training.phases import DATA_LOADING
from lightning_gpu_tools.training.rank_exchange import RankExchange


class NumWorkersFinder(Callback):
    """Finds ``num_workers``, ``prefetch_factor``, ``persistent_workers`` and ``pin_memory`` while training goes on.

    It measures what a batch costs to load, in the worker processes, and how long a step takes when its batch is there.
    That predicts the settings, within what this machine grants: cores by affinity and cgroup quota, memory,
    ``/dev/shm``, shared with the other ranks of the machine. The prediction and its neighbours are then tried in the
    running epoch, in turns, on real steps: no batch is loaded for a trial alone, and batches and their order are those
    of a training without this callback. So are the random numbers of the training process, and with them the weights,
    unless the dataset itself draws random numbers: then they come from the seeds of other workers. The choice is the
    smallest number of workers within 3 % of the best speed of loader and step together. It is watched for a hundred
    steps more, and taken back if it is slower than the settings before.

    What was found holds for the rest of the fit, also for loaders that are made again
    (``reload_dataloaders_every_n_epochs``), and in proportion for the validation loaders, as long as these gain by it.
    The objects that you gave stay as they are. If anything fails under settings that are not yours (a dataset that
    cannot be pickled, a worker killed for lack of memory, a full ``/dev/shm``, ...) the same batches are loaded with
    yours. Of several training loaders the first one that can be changed is tuned. A loader with an iterable dataset,
    one that keeps its position, and one that is not a torch ``DataLoader`` is measured and left alone. So is one whose
    dataset holds what worker processes would share, as a file that is open before the first sample is loaded, and one
    whose dataset or sampler training changes from batch to batch while settings are tried. What training changes
    between epochs, workers learn. With several ranks all decide the same at the same step.

    Nothing happens with ``fast_dev_run``, ``overfit_batches``, ``barebones``, or in trial runs of a tuner. On a GPU a
    step is timed by the host, which may run ahead of the GPU, so only means over many steps count. Not yet verified on
    GPU hardware.

    Args:
        budget_s: How long the trials may take, in seconds. That is training time, too, only with settings that may not
            be the best ones; the trial of your own settings and a short one of others are made in any case. Workers
            that hang end their trial after 30 s.
        apply: Whether to use what was found. Else it is measured, and your own settings come back.

    Raises:
        ValueError: ``budget_s`` is not a positive number.

    Example::

        finder = NumWorkersFinder()
        Trainer(callbacks=[finder]).fit(model, DataLoader(dataset, batch_size=32))
        print(finder.result.settings)
    """

    def __init__(self, *, budget_s: float = 60.0, apply: bool = True) -> None:
        if not 0 < budget_s < math.inf:
            raise ValueError(f"budget_s must be a positive number of seconds, got {budget_s!r}.")
        self.budget_s = budget_s
        self.apply = apply
        self._result: LoaderResult | None = None
        self._fits = 0
        self._fit: _Fit | None = None

    @property
    def result(self) -> LoaderResult | None:
        """What was found: ``.settings``, ``.reason``, ``.scores``, ``.trials``; ``None`` until it is known."""
        return self._result if self._fit is None else self._fit.result

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unreal = trainer.fast_dev_run or trainer.overfit_batches or trainer.barebones  # type: ignore[attr-defined]
        if stage == "fit" and not is_disabled() and not unreal:
            self._fits += 1
            self._result = None
            self._fit = _Fit(trainer, self)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not before: only now it is seen whose batches the Trainer gets.
        if self._fit is not None and not self._fit.started:
            place = trainer.callbacks.index(self)  # type: ignore[attr-defined]
            self._fit.start(rank_exchange(trainer, f"loader/{self._fits}/{place}"))

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.next_round()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.end_epoch("training")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.end_epoch("validation")
            self._fit.pause()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._fit is not None:
            self._fit.pause()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    def _finish(self) -> None:
        fit = self._fit
        if fit is not None:
            fit.close()
            # Not before: if Ctrl-C comes meanwhile, this is called once more.
            self._result, self._fit = fit.result, None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fit": None}


class _Fit:
    """One fit: its loaders, and the tuning of one of them."""

    def __init__(self, trainer: Trainer, finder: NumWorkersFinder) -> None:
        self._trainer = trainer
        self._finder = finder
        self._switches: dict[tuple[str, int], Switch] = {}
        self._validation: dict[int, ValidationLoader] = {}
        self._tuning: Tuning | None = None
        self._tuned: Switch | None = None
        self._places = {"training": 0, "validation": 0}
        self._fixed: LoaderResult | None = None
        self.started = False
        # Says how long a loader is waited for that is left alone; the tuning of another one measures by itself.
        self._session: Session | None = Session.of(trainer)
        self._clock = self._session.clock
        self._as_own_work = functools.partial(self._clock.as_own_work, part=type(finder).__name__)
        self._shown: LoaderResult | None = None
        # Every loader of every stage goes through here, each time it is made.
        self._wrappers = Wrappers()
        self._wrappers.put(trainer.strategy, "process_dataloader", self._adopting)

    @property
    def result(self) -> LoaderResult | None:
        """What was found, or why nothing was looked for."""
        if self._fixed is not None and self._clock.ran:
            wait_s = self._clock.seconds.get(DATA_LOADING, 0.0)
            return dataclasses.replace(self._fixed, wait_share=wait_s / max(self._clock.wall_s, 1e-9))
        return self._fixed if self._tuning is None else self._tuning.result

    def _adopting(self, process: Callable[[object], object]) -> Callable[[object], object]:
        return lambda loader: self._adopt(process(loader))

    def _adopt(self, loader: object) -> object:
        stage = "training" if self._trainer.training else "validation"
        place = self._places[stage]
        self._places[stage] += 1
        if stage == "training" and place == 1 and ("training", 0) in self._switches:
            self._switches["training", 0].length = None
        # In a CombinedLoader of the user's own there is the copy that it got from us the last time.
        loader = self._originals.get(id(loader), loader)
        before = self._switches.pop((stage, place), None)
        switch = self._switch_for(loader, stage)
        if switch is None:
            if before is not None:
                before.close()
            return loader
        self._switches[stage, place] = switch
        if stage == "training":
            self._adopt_training(switch, before)
        elif place in self._validation:
            self._validation[place].move_to(switch)
        else:
            self._validation[place] = ValidationLoader(switch)
            self._scale_validation()
        if before is not None:
            before.close()
        return switch.loader

    def _switch_for(self, loader: object, stage: str) -> Switch | None:
        if not isinstance(loader, DataLoader) or why_fixed(loader) is not None:
            return None
        try:
            switch = Switch(loader, watched=stage == "training" and self._tuning is None)
        except Exception as error:  # noqa: BLE001 - anybody's subclass, which may not let itself be copied
            rank_zero_warn(f"NumWorkersFinder leaves the {stage} loader alone, which cannot be copied: {error!r}")
            return None
        switch.as_own_work = self._as_own_work
        return switch

    def _adopt_training(self, switch: Switch, before: Switch | None) -> None:
        # One of several loaders may be iterated to its end, and once more, within the limit of the epoch.
        if self._places["training"] == 1:
            switch.length = _limited(switch.loader, self._trainer.limit_train_batches)
        if self._tuning is not None and before is not None and before is self._tuned:
            self._tuning.move_to(switch)
            self._tuned = switch

    @property
    def _originals(self) -> dict[int, DataLoader[Any]]:
        return {id(switch.loader): switch.original for switch in self._switches.values()}

    def _of(self, stage: str) -> list[Switch]:
        return [switch for (known, _), switch in self._switches.items() if known == stage]

    def next_round(self) -> None:
        """Say that the loaders of this epoch have been made."""
        self._places = dict.fromkeys(self._places, 0)

    def start(self, exchange: RankExchange) -> None:
        """Begin with the first training loader whose settings can be changed."""
        self.started = True
        for validation in self._validation.values():
            validation.forget()
        loaders = self._trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
        switches = {id(switch.loader): switch for switch in self._of("training") if switch.iterated}
        ours = [switches[id(loader)] for loader in loaders if id(loader) in switches]
        if not ours:
            self._leave_alone(loaders[0])
        elif self._trainer.world_size > exchange.ranks:
            self._leave_alone(loaders[0], "the ranks cannot agree without torch.distributed")
        else:
            self._tuned = ours[0]
            self._tune(self._tuned, exchange)
            self._release_session()
        for switch in self._switches.values():
            switch.watched = switch is self._tuned

    def _tune(self, switch: Switch, exchange: RankExchange) -> None:
        trainer = self._trainer
        steps = trainer.num_training_batches
        # Where loaders are made again for an epoch their workers cannot live on.
        reloaded = trainer.reload_dataloaders_every_n_epochs > 0  # type: ignore[attr-defined]
        on_gpu = trains_on_gpu(trainer)
        terms = Terms(
            host=read_host_budget(local_ranks=local_ranks(trainer)),
            cuda=on_gpu,
            budget_s=self._finder.budget_s,
            epoch_steps=None if reloaded or math.isinf(steps) else int(steps),
            # While a GPU computes one thread launches its kernels; without one all threads of torch compute.
            step_cores=1.0 if on_gpu else float(torch.get_num_threads()),
            apply=self._finder.apply,
        )
        self._tuning = switch.listener = Tuning(
            switch, terms, ranks=BoardOfRanks(exchange), report=show_trial, conclude=self._conclude
        )

    def _leave_alone(self, loader: object, why: str | None = None) -> None:
        kind = type(loader).__qualname__
        own_way = (
            f"a {kind} is iterated in a way of its own; call super().__iter__() in its __iter__ and it can be tuned"
        )
        why = why or why_fixed(loader) or own_way
        users = settings_of(loader) if isinstance(loader, DataLoader) else None
        self._fixed = LoaderResult(users=users, settings=users, reason=f"The training loader is left as it is: {why}.")
        rank_zero_info(f"NumWorkersFinder: {self._fixed.reason}")

    def _conclude(self, result: LoaderResult) -> None:
        self._scale_validation()
        if self._shown is not None and self._trainer.world_size > 1:
            # While settings are tried all ranks hear of a failure; later each one has workers of its own to lose.
            warnings.warn(f"NumWorkersFinder, rank {self._trainer.global_rank}: {result.reason}", stacklevel=2)
        elif self._shown is not None:
            rank_zero_warn(f"NumWorkersFinder: {result.reason}")
        elif not result.applied or result.confirmed is not None:
            self._show(result)

    def _show(self, result: LoaderResult) -> None:
        self._shown = result
        if self._trainer.is_global_zero:
            show_result(result)
            log_settings(self._trainer, result)

    def _scale_validation(self) -> None:
        result = self.result
        if result is not None and result.applied and result.settings is not None:
            for loader in self._validation.values():
                loader.scale(result.settings)

    def end_epoch(self, stage: str) -> None:
        """Say that the loaders of a stage have been iterated as far as they will be, even where that is not the end."""
        for switch in self._of(stage):
            switch.end_epoch()

    def pause(self) -> None:
        """Say that something else than training steps took time."""
        if self._tuned is not None:
            self._tuned.pause()

    def _release_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.release()

    def close(self) -> None:
        """End all workers and take everything off again; after Ctrl-C, what the first time has not come to."""
        for switch in self._switches.values():
            switch.end_epoch()
        if self._tuning is not None:
            self._tuning.abandon()
            if self._shown is None and self._tuning.result is not None:
                self._show(self._tuning.result)
        for switch in self._switches.values():
            switch.close()
        self._wrappers.undo()
        self._release_session()
        for combined in self._combined_loaders:
            combined.flattened = [self._originals.get(id(loader), loader) for loader in combined.flattened]

    @property
    def _combined_loaders(self) -> list[CombinedLoader]:
        fit_loop: Any = self._trainer.fit_loop
        loops = (fit_loop, fit_loop.epoch_loop.val_loop)
        return [loop._combined_loader for loop in loops if loop._combined_loader is not None]


def _limited(loader: DataLoader[Any], limit: float) -> int | None:
    """Return how many batches the Trainer takes of a loader in an epoch; ``None`` if that is unknown."""
    length = length_of(loader)
    if length is None:
        return limit if isinstance(limit, int) else None
    return min(length, limit) if isinstance(limit, int) else int(length * limit)
