"""What differs in this process between two moments, found by comparing everything, and the tables of docs about it."""

import gc
import importlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import get_worker_info
from trainings import Model, Samples, background_threads, loader, quiet_trainer

import lightning_gpu_tools

PAGE = Path(lightning_gpu_tools.__file__).parents[1] / "docs" / "what_the_monitor_changes.md"
OURS = "lightning_gpu_tools"
LIGHTNINGS = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
# Modules that change themselves, or of which a run changes nothing: their many functions would take the most time.
SKIPPED = {OURS, "pytest", "_pytest", "sympy", "scipy", "mpmath", "matplotlib", "pynvml", "pyparsing", "PIL", "yaml"}


def table(*sections: str) -> dict[str, bool]:
    """Return the names in the tables of the page, of these sections or of all, and whether each change stays."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        if not sections or section.partition("\n")[0] in sections:
            for what, _, when, _ in re.findall(r"^\| (.+) \| (.+) \| (.+) \|(.*)\|$", section, re.MULTILINE):
                found.update(dict.fromkeys(re.findall(r"`(.+?)`", what), when.startswith("*stays*")))
    return found


class Snapshot(NamedTuple):
    """The contents of every module and class; settings of the process, and functions of a run's objects."""

    contents: dict[str, dict[str, Any]]
    others: dict[str, Any]


def snapshot(objects: Mapping[str, Sequence[Any]]) -> Snapshot:
    """Return the state of the process and of these objects, to be compared with :func:`changed`."""
    return Snapshot(dict(_contents()), {**dict(_settings()), **dict(_of_objects(objects))})


def changed(before: Snapshot, after: Snapshot) -> set[str]:
    """Return the names of functions and of the rest that differ, but not new modules and classes, nor their caches."""
    found = set()
    for owner in before.contents.keys() & after.contents.keys():
        old, new = before.contents[owner], after.contents[owner]
        for key in {key for key in old.keys() | new.keys() if old.get(key) is not new.get(key)}:
            if _is_function(old.get(key)) or (_is_function(new.get(key)) and not key.startswith("_")):
                found.add(f"{owner}.{key}")
    names = before.others.keys() | after.others.keys()
    return found | {name for name in names if not _same(before.others.get(name), after.others.get(name))}


def of_trainer(trainer: Any) -> dict[str, list[Any]]:
    """Return the objects of a Trainer, by the names that the page has for them."""
    return {
        "strategy": [trainer.strategy],
        "profiler": [trainer.profiler],
        "logger": trainer.loggers,
        "callback": [one for one in trainer.callbacks if not is_ours(one)],
        "own callback": [one for one in trainer.callbacks if is_ours(one)],
        "module": [trainer.lightning_module],
        "train_dataloader": [trainer.train_dataloader],
        "": [trainer],
    }


def is_ours(thing: object) -> bool:
    return any(cls.__module__.startswith(OURS) for cls in type(thing).__mro__)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (list, str, float, bool)) and one == other)


def _is_function(thing: object) -> bool:
    return callable(thing) or hasattr(thing, "__get__")


def _contents() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in SKIPPED:
            short = name.removeprefix("lightning.pytorch.")  # the same module of pytorch_lightning keeps its long name
            inside = dict(getattr(module, "__dict__", {}))
            yield short, inside
            for key, one in inside.items():
                if issubclass(type(one), type) and one.__module__ == name:
                    yield f"{short}.{key}", dict(vars(one))


def _settings() -> Iterator[tuple[str, Any]]:
    optimizer = importlib.import_module("torch.optim.optimizer")
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    yield "hooks of all optimizers", [dict(one) for one in hooks]
    yield "gc.callbacks", list(gc.callbacks)
    yield "gc.isenabled()", gc.isenabled()
    yield "sys.getswitchinterval()", sys.getswitchinterval()
    yield "sys.meta_path", list(sys.meta_path)
    yield "sys.gettrace()", sys.gettrace()
    yield "sys.getprofile()", sys.getprofile()
    yield "warnings.filters", list(warnings.filters)
    yield "logging", [(one.handlers, one.filters, one.level) for one in map(logging.getLogger, ["", *LIGHTNINGS])]
    yield "os.getcwd()", os.getcwd()
    yield "multiprocessing.get_start_method()", str(multiprocessing.get_start_method(allow_none=True))
    yield "torch.get_num_threads()", str(torch.get_num_threads())
    yield "torch.cuda.get_sync_debug_mode()", str(torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode())
    yield "threads", sorted(thread.name for thread in background_threads())
    yield from ((f"os.environ[{name!r}]", value) for name, value in os.environ.items())
    names = {one.value: one.name for one in signal.Signals}
    yield from ((names.get(one, f"signal {one}"), signal.getsignal(one)) for one in signal.valid_signals())
    # Of handlers that are not Python's, but without the two of the C library, for its threads.
    caught = int(Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    numbers = signal.valid_signals() - {32, 33}
    yield (
        "signals with a handler",
        [one for one in numbers if caught >> (one - 1) & 1 and not callable(signal.getsignal(one))],
    )


def _of_objects(objects: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    queue = [(name, one) for name, several in objects.items() for one in several if one is not None]
    seen: set[int] = set()
    while queue:
        path, thing = queue.pop(0)
        if id(thing) in seen or type(thing) in weakref.ProxyTypes:
            continue
        seen.add(id(thing))
        if path == "train_dataloader":
            yield from [(path, True)] if is_ours(thing) else []
            continue
        for key, value in list(getattr(thing, "__dict__", {}).items()):
            name = f"{path}.{key}".removeprefix(".")
            several = value if isinstance(value, (list, tuple)) else [value]
            followed = [one for one in several if _is_followed(one)]
            queue += [(name, one) for one in followed]
            if value is None and callable(getattr(type(thing), key, None)):
                yield f"hidden hooks of {path}", True
            elif callable(value) and not followed and not (path == "own callback" and key.startswith("_")):
                yield name, value
        if path == "module":
            kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
            hooks = [getattr(weight, kind, None) for kind in kinds for weight in thing.parameters()]
            yield "hooks of parameters", [dict(one or {}) for one in hooks]


def _is_followed(thing: object) -> bool:
    is_lightnings = type(thing).__module__.startswith(LIGHTNINGS) and not isinstance(thing, type)
    return is_lightnings or isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))


# A fit in which snapshots are taken

STEPS, SEEN_AT = 50, 40
_looks: list[Callable[[], None]] = []  # take a snapshot; not in the dataset, into which the finder looks


class Seen(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == SEEN_AT + 1 and get_worker_info() is None:
            _looks[-1]()
        time.sleep(0.0025)
        return super().__getitem__(index)


class Looking(Model):
    """Takes snapshots in steps and in validation."""

    def __init__(self, looks_at: Collection[int]) -> None:
        super().__init__()
        self.looks_at = looks_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01)
        if batch_idx in self.looks_at:
            _looks[-1]()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        _looks[-1]()
        super().validation_step(batch, batch_idx)


class Changes(NamedTuple):
    """Names of what differs from the state before a fit."""

    during: set[str]
    after: set[str]


def fit_changes(
    folder: Path,
    callbacks: Sequence[Any] = (),
    plugins: Sequence[Any] = (),
    *,
    looks_at: Collection[int] = (SEEN_AT,),
    **options: Any,
) -> Changes:
    """Return what differs in snapshots during and after a fit and a validation, from the state before."""
    trainer = quiet_trainer(
        folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=SEEN_AT), *callbacks],
        plugins=[*plugins],
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        val_check_interval=STEPS - 5,
        limit_train_batches=STEPS,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        **options,
    )
    seen: list[Snapshot] = []
    before = snapshot(of_trainer(trainer))
    _looks.append(lambda: seen.append(snapshot(of_trainer(trainer))))
    model, training, validation = Looking(looks_at), loader(Seen(2 * STEPS)), loader(Samples(2))
    trainer.fit(model, training, validation)
    trainer.validate(model, validation)
    after = snapshot(of_trainer(trainer))
    _looks.pop()
    return Changes({name for one in seen for name in changed(before, one)}, changed(before, after))


def lightnings(alone: Changes) -> set[str]:
    """Return what Lightning changes itself, as seen in a fit without this package's callbacks, and does to each."""
    return alone.during | {name.replace("callback", "own callback") for name in alone.during}
