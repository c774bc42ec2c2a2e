"""Facts about a loader that decide whether it may get workers, read from its objects and their code."""

import functools
import multiprocessing
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from lightning_gpu_tools.loaders.held import Held, attributes, contents_of, held_by, is_of_library, is_open, name_of
from lightning_gpu_tools.loaders.settings import GET_ITERATOR
from lightning_gpu_tools.training.run_measurements import LoaderFacts

# A worker finds its part of the data by both. A seed for each worker needs only the first.
_GET_WORKER, _COUNT_WORKERS = "get_worker_info", "num_workers"
# Names in code that opens a file again in another process, or reads at a position of its own.
_OPENS_ANEW = {"getpid", "register_at_fork", "pread"}
# Each worker draws other random numbers, so a stream of them need not be split.
_DRAWS = {"rand", "randn", "randint", "random", "choice", "choices", "normal", "uniform", "standard_normal", "integers"}
_SPLITTERS, _ENDLESS = {"split_by_worker", "ResampledShards"}, "ResampledShards"  # stages of webdataset
_SHARDS = ("num_shards", "n_shards", "shards", "urls")
# Our defaults.
_MAX_CALLS = 3  # functions that call one another, from a method of the dataset on
_MAX_CODES = 1000


def read_loader_facts(loader: object, *, name: str = "", within: str = "", ranks: int = 1) -> LoaderFacts:
    """Return the facts about a training loader. Takes some milliseconds."""
    kind = type(loader)
    shown = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(loader, DataLoader):
        return LoaderFacts(kind=shown, name=name, is_torch=False, is_iterator=hasattr(kind, "__next__"))
    dataset: Any = loader.dataset
    held = held_by(dataset)
    of_collate = [] if loader.collate_fn is default_collate else held_by(loader.collate_fn)
    context: Any = loader.multiprocessing_context or multiprocessing
    # Without this option, it would choose a method for the whole program.
    method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    shared = [*held, *of_collate] if method == "fork" else []  # other workers get copies, or do not start
    is_iterable, things = isinstance(dataset, IterableDataset), [item.thing for item in held]
    return LoaderFacts(
        kind=shown,
        name=name,
        within=within,
        dataset=name_of(dataset),
        ranks=ranks,
        is_daemonic=bool(multiprocessing.current_process().daemon),
        open_files=tuple(_open_files(shared, loader.worker_init_fn)),
        keeps_position=hasattr(kind, "state_dict"),  # that of ExactResume is an attribute of the loader
        in_order=loader.in_order,
        own_iterator=getattr(kind, GET_ITERATOR, None) is not getattr(DataLoader, GET_ITERATOR, None),
        contents=contents_of(held),
        is_table=_is_table(dataset),
        is_iterable=is_iterable,
        splits=_splits(dataset, things, loader.worker_init_fn) if is_iterable else None,
        is_webdataset=is_iterable and any(map(_is_of_webdataset, things)),
        shards=_shards(things) if is_iterable else None,
    )


def _open_files(shared: Sequence[Held], worker_init: Any) -> Iterator[str]:
    """Yield the names of what is open, unless the program opens it again in the workers."""
    anew = _names([worker_init]) if worker_init is not None else set()
    known = set()
    for name, thing, owner in shared:
        if name not in known and is_open(thing):
            known.add(name)
            own = set() if owner is None or is_of_library(owner) else _names([owner])
            if name.rpartition(".")[2] not in anew and _OPENS_ANEW.isdisjoint(own):
                yield name


# Streams


def _splits(dataset: Any, things: Sequence[Any], worker_init: Any) -> bool | None:
    """Return whether each worker reads only its own part, as far as the code shows."""
    # Of the code of a thing, that of the program and of library streams shows how a stream is split.
    telling = []
    for thing in [getattr(worker_init, "func", worker_init), *things]:
        named = thing if isinstance(thing, types.FunctionType) else type(thing)
        is_known = (named.__module__ or "").startswith(("torch.", "webdataset."))
        if not is_known and (isinstance(thing, IterableDataset) or not is_of_library(named)):
            telling.append(thing)
    names = _names(telling)
    if any(name_of(thing) in _SPLITTERS for thing in things) or {_GET_WORKER, _COUNT_WORKERS} <= names:
        return True
    is_unknown_library = is_of_library(type(dataset)) and not any(map(_is_of_webdataset, things))
    return None if is_unknown_library or not names.isdisjoint({_GET_WORKER, *_DRAWS}) else False


def _is_of_webdataset(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] == "webdataset"


def _shards(things: Iterable[Any]) -> int | None:
    for thing in things:
        if name_of(thing) == _ENDLESS:
            return None
        known = attributes(thing)
        for name in _SHARDS:
            found = known.get(name)
            is_library = isinstance(thing, IterableDataset) and is_of_library(type(thing))
            if is_library and isinstance(getattr(type(thing), name, None), property):
                with suppress(Exception):  # a library's property may raise anything
                    found = getattr(thing, name)
            count = len(found) if isinstance(found, (list, tuple)) else found
            if type(count) is int and count > 0:
                return count
    return None


def _names(things: Iterable[Any]) -> set[str]:
    """Return the names in the code of functions and of the methods of classes, and in functions that they call."""
    queue = [(function, 0) for thing in things for function in _functions(thing)]
    names, seen = set[str](), set[types.CodeType]()
    for function, depth in queue:  # which grows
        if function.__code__ in seen or len(seen) >= _MAX_CODES:
            continue
        seen.add(function.__code__)
        codes = [function.__code__]
        for code in codes:  # which grows
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            names.update(code.co_names)
            if depth < _MAX_CALLS:
                queue += [(called, depth + 1) for called in _called(code.co_names, function.__globals__)]
    return names


def _functions(thing: Any) -> Iterator[types.FunctionType]:
    """Yield a function, or the methods of an object's class, without those of torch."""
    thing = getattr(thing, "func", thing) if isinstance(thing, functools.partial) else thing
    if isinstance(thing, types.FunctionType):
        yield thing
        return
    kind = thing if isinstance(thing, type) else type(getattr(thing, "__self__", thing))
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("builtins", "torch", "typing"):
            for member in vars(base).values():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(function, types.FunctionType):
                    yield function


def _called(names: Collection[str], scope: dict[str, Any]) -> Iterator[types.FunctionType]:
    """Yield the functions with these names in a module, in modules that it has imported, and in its classes."""
    found = [scope[name] for name in names if name in scope]
    modules = [thing for thing in found if isinstance(thing, types.ModuleType) and not is_of_library(thing)]
    found += [vars(module)[name] for module in modules for name in names if name in vars(module)]
    for thing in found:
        if isinstance(thing, (type, types.FunctionType)) and not is_of_library(thing):
            yield from _functions(thing)


# Tables


def _is_table(dataset: Any) -> bool:
    """Return whether a list of indices fetches the rows of a batch from tensors or arrays, as an index does one row."""
    if type(dataset) is Subset:
        return _is_table(dataset.dataset)
    return type(dataset) is TensorDataset or isinstance(dataset, (torch.Tensor, np.ndarray))
