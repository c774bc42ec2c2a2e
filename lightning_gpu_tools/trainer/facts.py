"""Facts about a training run: from its Trainer, from a Fabric, or from the user's own loop."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.held import Inside, loaders_in
from lightning_gpu_tools.loaders.settings import settings_of
from lightning_gpu_tools.reports.report import FOLDER_NAME
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import Trainer, base_of, version_of
from lightning_gpu_tools.training.rank_exchange import RankPlace
from lightning_gpu_tools.training.run_measurements import Stage


def trains_on_gpu(trainer: Any) -> bool:
    """Return whether a Trainer or a Fabric trains on NVIDIA GPUs."""
    return base_of(trainer.accelerator, "CUDAAccelerator") is not None


def place_of(trainer: Any) -> RankPlace:
    """Return the place of this process among the ranks."""
    nodes = max(1, getattr(trainer.strategy, "num_nodes", 1))
    return RankPlace(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        local_rank=trainer.local_rank,
        node=trainer.node_rank,
        local_ranks=max(1, trainer.world_size // nodes),
    )


def gpus_of(trainer: Any) -> Sequence[torch.device]:
    """Return the GPUs in use on this node."""
    strategy = trainer.strategy
    return (getattr(strategy, "parallel_devices", None) or [strategy.root_device]) if trains_on_gpu(trainer) else ()


def trainer_settings(trainer: Any) -> Mapping[str, Any]:
    """Return the accelerator and the version of the package."""
    package, version = version_of(trainer)
    return {"accelerator": type(trainer.accelerator).__name__, package: version}


def _trainers(path: str) -> Any:
    """Return a property with the current value of an attribute of the Trainer."""
    return property(attrgetter(f"_trainer.{path}"))


class TrainerRun(Run):
    """The ``Run`` of a Trainer's fit."""

    has_trainer = True
    device = _trainers("strategy.root_device")
    module = _trainers("lightning_module")
    optimizers = _trainers("optimizers")
    optimizer_steps = _trainers("global_step")
    accumulate_grad_batches = _trainers("accumulate_grad_batches")
    loggers = _trainers("loggers")
    log_every_n_steps = _trainers("log_every_n_steps")
    precision = _trainers("precision")

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop
        self.place, self.gpus = place_of(trainer), gpus_of(trainer)
        self.gpu = self.gpus[self.place.local_rank % len(self.gpus)] if self.gpus else None
        self._loaders: tuple[object, Sequence[Inside]] = None, ()

    @property
    def _given(self) -> object:
        return self._trainer.train_dataloader

    @property
    @override
    def loaders(self) -> Sequence[Inside]:
        given = self._given
        if given is not self._loaders[0]:  # created, or created again
            self._loaders = given, loaders_in(given)
        return self._loaders[1]

    @property
    @override
    def iterator(self) -> object | None:
        iterators = compat.iterators_of(self._loop)
        place = self.slowest if len(iterators) == len(self.loaders) else 0
        return iterators[place] if iterators else None

    def note_validation(self) -> None:
        """Record the loaders of a validation within a fit."""
        _note_validation(self, compat.loaders_of(self._trainer.fit_loop.epoch_loop.val_loop))

    @cached_property  # at the end, Lightning unwraps the model
    @override
    def is_plain_ddp(self) -> bool:
        return isinstance(self._trainer.strategy.model, DistributedDataParallel)

    @property
    @override
    def logged_step(self) -> int:
        return compat.logged_step(self._trainer)

    @property
    @override
    def epoch_steps(self) -> int | None:
        steps = self._trainer.num_training_batches
        return None if math.isinf(steps) else int(steps)

    @property
    @override
    def checkpoint_folder(self) -> str | None:
        # The first checkpoint callback knows it when training starts.
        folder = getattr(self._trainer.checkpoint_callback, "dirpath", None)
        return None if folder is None else str(folder)

    @property
    @override
    def settings(self) -> Mapping[str, Any]:
        stage = {} if self.stage == "fit" else {"stage": self.stage}
        return {"model": type(self._trainer.lightning_module).__qualname__, **trainer_settings(self._trainer), **stage}


def _note_validation(run: TrainerRun | LoopRun, loaders: Iterable[object]) -> None:
    """Record the settings of a validation's loaders, and once the facts: later, their datasets may have files open."""
    known = [loader for loader in loaders if isinstance(loader, DataLoader)]
    run.validation_loaders = tuple(map(settings_of, known))
    if not run.validation_facts:
        ranks = run.place.world_size
        with contextlib.suppress(Exception):  # of an odd dataset: nothing is known against workers then
            run.validation_facts = tuple(read_loader_facts(one, ranks=ranks) for one in known if not one.num_workers)


class EvaluationRun(TrainerRun):
    """The ``Run`` of a Trainer's ``validate``, ``test`` or ``predict``, in which a step is one batch.

    Loggers get no metrics of it: they belong to the training.
    """

    optimizers = ()
    accumulate_grad_batches = 1
    loggers = ()
    log_every_n_steps = 0
    checkpoint_folder = None

    def __init__(self, trainer: Trainer, stage: Stage) -> None:
        super().__init__(trainer)
        self.stage = stage
        self._loop = getattr(trainer, f"{stage}_loop")

    @property
    @override
    def _given(self) -> object:
        return compat.loader_of(self._loop)

    @property
    @override
    def logged_step(self) -> int:
        return compat.batches_done(self._loop)

    optimizer_steps = logged_step

    @property
    @override
    def epoch_steps(self) -> int | None:
        steps = sum(self._loop.max_batches)
        return None if math.isinf(steps) else int(steps)


def run_of(trainer: Trainer) -> TrainerRun:
    """Return the ``Run`` of what a Trainer is about to do."""
    stage = trainer.state.fn
    return TrainerRun(trainer) if stage in (None, "fit") else EvaluationRun(trainer, stage.value)


# Private names of Fabric. Lost without them: the loader that it has set up, and the time of moving a batch.
_GIVEN_LOADER = "_dataloader"
_MAX_LOADERS = 8  # our default, for the same steps
MOVE_BATCH = "move_data_to_device"


class LoopRun(Run):
    """The ``Run`` of the user's own loop; create it when the first batch is requested."""

    has_trainer = False
    log_every_n_steps = 50  # Lightning's own default
    checkpoint_folder: str | None = None
    module: torch.nn.Module | None = None  # a loop has no reference to its model
    loggers: Sequence[Any] = ()
    precision: str | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()  # those that have made a step
    optimizer_steps = logged_step = 0
    loaders: Sequence[Inside] = ()

    def __init__(self) -> None:
        self.place = self._find_place()
        self.gpus, self._device = self._find_devices()
        self.gpu = self._device if self.gpus else None
        self._iterators: dict[int, Callable[[], object | None]] = {}  # by place of their loaders
        self._given: object = None

    def _find_place(self) -> RankPlace:
        """Read the process group. Without one, this process is a run of its own, whatever rank a launcher gave it."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return RankPlace()
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        local_ranks = max(1, _number("LOCAL_WORLD_SIZE", world_size))
        return RankPlace(
            rank=rank,
            world_size=world_size,
            local_rank=_number("LOCAL_RANK", rank % local_ranks),
            node=_number("GROUP_RANK", rank // local_ranks),
            local_ranks=local_ranks,
        )

    def _find_devices(self) -> tuple[Sequence[torch.device], torch.device | None]:
        """Return the GPUs of this node on which torch has memory, and this rank's GPU."""
        used: list[torch.device] = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            count = torch.cuda.device_count()
            used = [torch.device("cuda", i) for i in range(count) if torch.cuda.memory_allocated(i)]
        if not used:
            return (), None
        current = torch.device("cuda", torch.cuda.current_device())
        # GPU 0 is also the current one of a process that has set none.
        device = current if current in used and current.index else max(used, key=torch.cuda.memory_allocated)
        local_ranks = self.place.local_ranks
        if local_ranks > 1 and device.index == self.place.local_rank and count >= local_ranks:
            used = [torch.device("cuda", i) for i in range(local_ranks)]  # rank i has GPU i
        return used, device

    def weights(self) -> Iterator[torch.Tensor]:
        """Return the weights of the optimizers that have made a step."""
        return (weight for one in self.optimizers for group in one.param_groups for weight in group["params"])

    @property
    def device(self) -> torch.device:
        """This rank's GPU, or without one the device of the weights."""
        return self._device or next((weight.device for weight in self.weights()), torch.device("cpu"))

    def follow(self, loader: object, *, also: bool = False) -> None:
        """Record the loader that the steps come from, or another one that they ``also`` come from."""
        given = getattr(loader, _GIVEN_LOADER, loader)
        if not also:
            self._given = None if hasattr(type(given), "__next__") else given  # an iterator would keep workers alive
            self.loaders, self._iterators = (), {}
        known = {id(one.loader) for one in self.loaders}
        for one in loaders_in(given):
            if id(one.loader) not in known and len(self.loaders) < _MAX_LOADERS:
                self.loaders = [*self.loaders, one]
        if len(self.loaders) > 1:
            self.loaders = [one._replace(name=one.name or f"number {i}") for i, one in enumerate(self.loaders, 1)]

    def note_validation(self, loader: object) -> None:
        """Record the settings of the loader that a validation reads."""
        given = getattr(loader, _GIVEN_LOADER, loader)
        if isinstance(given, DataLoader):
            _note_validation(self, [given])

    @property
    def iterator(self) -> object | None:
        """The iterator in use."""
        return self._iterators.get(self.slowest, lambda: None)()

    def note_iterator(self, place: int, iterator: object) -> None:
        """Record the iterator of the loader at this place."""
        with contextlib.suppress(TypeError):  # it has no weak references, or is None
            self._iterators[place] = weakref.ref(iterator)

    def forget(self) -> None:
        """Drop all references to the loop."""
        self._given, self.loaders, self.optimizers, self._iterators = None, (), (), {}

    @property
    def is_plain_ddp(self) -> bool:
        """Whether this is plain DDP, judging by the weights: those of sharded models have other classes."""
        return self.place.world_size > 1 and all(type(weight) is torch.nn.Parameter for weight in self.weights())

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of batches per optimizer step, as far as seen."""
        return max(1, round(self.logged_step / self.optimizer_steps)) if self.optimizer_steps else 1

    @property
    def epoch_steps(self) -> int | None:
        """The length of the loader."""
        try:
            return len(self._given)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings, with the program's name in place of the model's."""
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            return {"model": "an interactive session"}
        path = Path(file)
        return {"model": path.parent.name if path.name == "__main__.py" else path.name}

    def folder_in(self, folder: str | None) -> str:
        """Return the folder of the report, given the user's.

        Processes that one launcher started as separate runs may share a folder: all but the first get one below it.
        """
        folder, rank = folder or self._default_folder, _number("RANK", 0)
        return os.path.join(folder, f"rank_{rank}") if rank and self.place.world_size == 1 else folder

    @property
    def _default_folder(self) -> str:
        return os.path.join(os.getcwd(), FOLDER_NAME)


class FabricRun(LoopRun):
    """The ``Run`` of a loop with a Fabric that has been launched."""

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric
        self.loggers = fabric.loggers
        self.precision = getattr(getattr(fabric.strategy, "precision", None), "precision", None)
        super().__init__()

    def _find_place(self) -> RankPlace:
        return place_of(self._fabric)

    def _find_devices(self) -> tuple[Sequence[torch.device], torch.device | None]:
        return gpus_of(self._fabric), self._fabric.device

    @property
    @override
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings, **trainer_settings(self._fabric)}

    @property
    @override
    def _default_folder(self) -> str:
        for name in ("log_dir", "root_dir"):
            with contextlib.suppress(Exception):  # there is no logger, or a user's logger raises
                if folder := getattr(self.loggers[0], name):
                    return str(folder)
        return super()._default_folder


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
