"""Load any checkpoint into any module, whatever either of them was wrapped in."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from lightning_gpu_tools.checkpoints.content import describe_content, name_file
from lightning_gpu_tools.checkpoints.key_groups import list_groups
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.checkpoints.model_keys import read_model
from lightning_gpu_tools.checkpoints.rename_plan import RenamePlan
from lightning_gpu_tools.checkpoints.state_dicts import (
    find_state_dicts,
    own_all_but_weights,
    own_what_modules_keep,
    same_tensors,
    shapes_of,
)
from lightning_gpu_tools.checkpoints.torch_files import read_checkpoint
from lightning_gpu_tools.errors import (
    AmbiguousCheckpointError,
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    KeyCollisionError,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Module = TypeVar("Module", bound="LightningModule")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What ``load_weights`` did.

    Attributes:
        path: The file.
        entry: Where in the file the weights were, ``"state_dict"``; ``""`` if they are all it holds.
        loaded: Model keys that got their weight from the file.
        renamed: Checkpoint key -> model key, where the two differ.
        root: The attribute that was dropped (``"model."``) or added; ``""`` if none.
        kept: Counters of wrappers and of batch normalisation that the file does not have; the model's own stay.
        missing: Model keys that kept their own values because the file has none; empty if ``strict``.
        unexpected: Checkpoint keys without a place in the model; empty if ``strict``.
        mismatched: (checkpoint key, its shape, shape in the model); empty if ``strict``.
        unused: Checkpoint keys that lie beside the dropped root.
        summary: The same in words.
    """

    path: str
    entry: str
    loaded: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...] | None, tuple[int, ...] | None], ...] = ()
    unused: tuple[str, ...] = ()
    summary: str = ""

    def __str__(self) -> str:
        return self.summary


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    strict: bool = True,
    weights_only: bool = True,
) -> LoadReport:
    """Load a checkpoint into a model, whatever ``DataParallel``, DDP, FSDP or ``torch.compile`` did to its keys.

    The file may be a Lightning checkpoint, a raw ``state_dict``, a dictionary that holds one, or a safetensors file. It
    is read on the CPU, from whatever device it was saved, and each weight is copied to where the model has it.

    Args:
        model: Any module, wrapped or not.
        path: A local path, or any URL that fsspec knows.
        root: Attribute that one side has and the other has not, as ``"model."``, or the entry of the file that holds
            the weights. ``None`` finds out; ``""`` keeps to the names as they are.
        strict: Whether every key of the model must get a weight of its shape, and every key of the checkpoint find its
            place. If false, what fits is loaded and the rest is in the report.
        weights_only: Whether to refuse files that hold more than plain data. If false, opening the file may run code.

    Raises:
        CheckpointMismatchError: The checkpoint does not fit; the model is as it was.
        AmbiguousCheckpointError: Several sets of weights in it fit; say which with ``root``.
        KeyCollisionError: Two of its keys would become the same key of the model.
        BrokenCheckpointError: The file is no checkpoint, or damaged.
        UnsafeCheckpointError: It holds more than plain data.

    Example:
        >>> report = load_weights(net, "last.ckpt")  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        last.ckpt: loaded 161 weights; removed "module." from 161 keys
    """
    content = read_checkpoint(path, weights_only=weights_only)
    with _naming(path, type(model)):
        entry, weights, plan = _choose(model, content, root, strict)
        _load(model, weights, plan, strict)
    return _report(str(path), entry, plan)


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str], model_class: type) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        name_file(error, path, model_class)
        raise


def _choose(
    model: nn.Module, content: Any, root: str | None, strict: bool
) -> tuple[str, Mapping[str, Any], RenamePlan]:
    entries = find_state_dicts(content)
    if not entries:
        raise BrokenCheckpointError(f"it holds no weights but {describe_content(content)}.")
    named = [entry for entry in entries if root and f"{root.rstrip('.')}.".startswith(f"{entry}.")]
    if named:
        entry = max(named, key=len)
        rest = root.rstrip(".").removeprefix(entry).lstrip(".") if root else ""
        return entry, entries[entry], _plan(model, entries[entry], rest or None, strict)
    plans: dict[str, RenamePlan] = {}
    refusals = []
    for entry, weights in entries.items():
        try:
            plans[entry] = _plan(model, weights, root, strict)
        except (CheckpointMismatchError, KeyCollisionError) as error:  # noqa: PERF203 - a handful of entries
            refusals.append(error)
    if not plans:
        raise refusals[0]
    if not strict:
        most = max(len(plan.renames) for plan in plans.values())
        plans = {entry: plan for entry, plan in plans.items() if len(plan.renames) == most}
    if len(plans) > 1:
        names = [f'"{entry}"' for entry in plans]
        raise AmbiguousCheckpointError(
            f"Several entries of the file fit: {' and '.join(names)}. "
            f"Say which one: {' or '.join(f'root={name}' for name in names)}."
        )
    entry, plan = next(iter(plans.items()))
    return entry, entries[entry], plan


def _plan(model: nn.Module, weights: Mapping[str, Any], root: str | None, strict: bool) -> RenamePlan:
    keys, _ = read_model(model, weights)
    return plan_renaming(shapes_of(weights), keys, root=root, strict=strict, same_tensor=same_tensors(weights))


def _load(model: nn.Module, weights: Mapping[str, Any], plan: RenamePlan, strict: bool) -> None:
    state = model.state_dict(keep_vars=True)
    renamed = plan.apply(weights, keep=plan.unexpected if strict else ())
    for key in plan.kept:
        renamed[key] = state[key]
    keys, _ = read_model(model)
    own_what_modules_keep(renamed, keys)
    # On the meta device there is nothing to copy into: the model takes over tensors of its own.
    assign = any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values())
    if assign:
        metadata = getattr(renamed, "_metadata", None)
        renamed = copy.deepcopy(renamed)
        renamed._metadata = metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(renamed, strict=strict, assign=assign)
    except RuntimeError as error:
        raise CheckpointMismatchError(str(error)) from error
    if assign:
        _tie(model, keys)


def _tie(model: nn.Module, keys: ModelKeys) -> None:
    """Make one parameter again of those that assigning has separated."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, leader in keys.tied.items():
        if key in parameters and leader in parameters:
            path, _, name = key.rpartition(".")
            model.get_submodule(path).register_parameter(name, parameters[leader])


def _report(path: str, entry: str, plan: RenamePlan) -> LoadReport:
    words = [f"{Path(path).name}: loaded {len(plan.renames)} weights"]
    if plan.describe():
        words.append(plan.describe())
    if plan.tied:
        words.append(f"{len(plan.tied)} more are tied to these")
    lists = {"kept": plan.kept, "missing": plan.missing, "unexpected": plan.unexpected, "not used": plan.unused}
    words += [f"{label}: {list_groups(keys)}" for label, keys in lists.items() if keys]
    if plan.mismatched:
        words.append(f"other shape: {list_groups(key for key, _, _ in plan.mismatched)}")
    return LoadReport(
        path=path,
        entry=entry,
        loaded=(*plan.renames.values(), *plan.tied),
        renamed={old: new for old, new in plan.renames.items() if old != new},
        root=plan.dropped_root or plan.added_root,
        kept=plan.kept,
        missing=plan.missing,
        unexpected=plan.unexpected,
        mismatched=plan.mismatched,
        unused=plan.unused,
        summary="; ".join(words),
    )


def load_from_checkpoint(
    model_class: type[Module],
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    map_location: Any = None,
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    weights_only: bool = True,
    **kwargs: Any,
) -> Module:
    """Build a LightningModule with the hyperparameters in a checkpoint and load its weights, whatever wrapped them.

    The same as ``model_class.load_from_checkpoint``, which no plugin and no callback can reach, with three differences:
    keys are fitted to the model as in :func:`load_weights`, the model is on the CPU unless ``map_location`` says
    otherwise, and files that hold more than plain data are refused, also those from a URL.

    Args:
        model_class: The LightningModule's class.
        path: A Lightning checkpoint, or a raw ``state_dict`` if ``kwargs`` suffice to build the model.
        root: As for :func:`load_weights`.
        map_location: Device for the weights and the model, or anything else that ``torch.load`` takes.
        hparams_file: A ``.yaml`` or ``.csv`` file with hyperparameters, in place of those in the checkpoint.
        strict: As for :func:`load_weights`; ``None`` leaves it to the model's ``strict_loading``.
        weights_only: If false, opening the file may run code that is in it.
        **kwargs: Arguments of ``model_class``; they come before those in the checkpoint.

    Raises:
        CheckpointMismatchError: The checkpoint does not fit.
        ValueError: ``hparams_file`` is neither ``.yaml`` nor ``.csv``.
    """
    from lightning_gpu_tools.checkpoints.hyperparameters import as_lightning_checkpoint, build_module

    device = "cpu" if map_location is None else map_location
    content = own_all_but_weights(read_checkpoint(path, map_location=device, weights_only=weights_only))
    checkpoint = as_lightning_checkpoint(content, path)
    model = build_module(model_class, checkpoint, hparams_file, kwargs)
    strict = model.strict_loading if strict is None else strict
    model.configure_model()
    # The hook sees the model's own names, as it does in a Trainer. It may also be what makes the weights fit.
    may_wait = (CheckpointError,) if "state_dict" in checkpoint else ()
    with _naming(path, model_class), contextlib.suppress(*may_wait):
        _, weights, plan = _choose(model, checkpoint, root, strict)
        checkpoint["state_dict"] = plan.apply(weights, keep=plan.unexpected)
        root = None
    model.on_load_checkpoint(checkpoint)
    with _naming(path, model_class):
        _, weights, plan = _choose(model, checkpoint, root, strict)
        _load(model, weights, plan, strict)
    if map_location is None:
        return model
    first = next((value for value in weights.values() if isinstance(value, torch.Tensor)), torch.empty(0))
    return model.to(first.device)
