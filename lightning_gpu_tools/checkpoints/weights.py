"""Load any checkpoint into any module, whatever either of them was wrapped in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpu_tools.checkpoints.content import describe_content, likely, name_file
from lightning_gpu_tools.checkpoints.envelope import check_contents
from lightning_gpu_tools.checkpoints.key_groups import list_groups
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.checkpoints.key_tree import is_copied_into, without_private_segments
from lightning_gpu_tools.checkpoints.model_keys import read_model, shape_of
from lightning_gpu_tools.checkpoints.rename_plan import RenamePlan
from lightning_gpu_tools.checkpoints.state_dicts import (
    all_state_dicts,
    own_what_modules_keep,
    refuse_what_torch_cannot_copy,
    same_tensors,
    shapes_of,
)
from lightning_gpu_tools.checkpoints.structure import collector_paused
from lightning_gpu_tools.checkpoints.torch_files import read_checkpoint
from lightning_gpu_tools.errors import (
    AmbiguousCheckpointError,
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    KeyCollisionError,
)
from lightning_gpu_tools.units import printable


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


@collector_paused()
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
        CheckpointMismatchError: The checkpoint does not fit; the model is as it was unless the message says that it may
            be partly loaded, as where hooks of the model translate keys and leave some without a weight.
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
    check_contents(content, path, torch.Tensor)
    with naming_file(path, type(model)):
        choice = choose_entry(model, content, root, strict)
        plan, loaded = copy_weights(model, choice, strict)
    return _report(str(path), choice.entry, plan, loaded)


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str], model_class: type) -> Iterator[None]:
    """Name the file and the model in what is refused meanwhile."""
    try:
        yield
    except CheckpointError as error:
        name_file(error, path, model_class)
        raise


class Choice(NamedTuple):
    """An entry of a checkpoint, its weights, how its keys become the model's, and what is known of the model."""

    entry: str
    weights: Mapping[str, Any]
    plan: RenamePlan
    keys: ModelKeys
    state: Mapping[str, Any]


def choose_entry(model: nn.Module, content: Any, root: str | None, strict: bool) -> Choice:
    """Return the entry of a checkpoint that fits the model."""
    entries = all_state_dicts(content)
    if not entries:
        raise BrokenCheckpointError(f"it holds no weights but {describe_content(content)}.")
    named = [entry for entry in entries if root and f"{root.rstrip('.')}.".startswith(f"{entry}.")]
    if named:
        entry = max(named, key=len)
        rest = root.rstrip(".").removeprefix(entry).lstrip(".") if root else ""
        return _choice(model, entry, entries[entry], rest or None, strict)
    choices = []
    refusals = []
    for entry, weights in likely(entries).items():
        try:
            choices.append(_choice(model, entry, weights, root, strict))
        except (CheckpointMismatchError, KeyCollisionError) as error:  # noqa: PERF203 - a handful of entries
            refusals.append(error)
    if not choices:
        raise refusals[0]
    if not strict:
        most = max(len(choice.plan.renames) for choice in choices)
        choices = [choice for choice in choices if len(choice.plan.renames) == most]
    if len(choices) > 1:
        names = [f'"{printable(choice.entry)}"' for choice in choices]
        raise AmbiguousCheckpointError(
            f"Several entries of the file fit: {' and '.join(names)}. "
            f"Say which one: {' or '.join(f'root={name}' for name in names)}."
        )
    return choices[0]


def _choice(model: nn.Module, entry: str, weights: Mapping[str, Any], root: str | None, strict: bool) -> Choice:
    keys, state = read_model(model, weights)
    same_tensor = functools.partial(same_tensors, weights)
    plan = plan_renaming(shapes_of(weights), keys, root=root, strict=strict, same_tensor=same_tensor)
    return Choice(entry, weights, plan, keys, state)


def copy_weights(model: nn.Module, choice: Choice, strict: bool) -> tuple[RenamePlan, tuple[str, ...]]:
    """Load the weights; return the plan as it came out, and the model keys that got theirs."""
    _, weights, plan, keys, state = choice
    refuse_what_torch_cannot_copy(weights, plan, keys, state)
    offered = plan.left_over(strict=strict)
    renamed = plan.apply(weights, keep=offered)
    for key in plan.kept:
        renamed[key] = state[key]
    own_what_modules_keep(renamed, keys)
    with _fitting_each_weight(model, strict) as left_out:
        try:
            found = model.load_state_dict(renamed, strict=strict)
        except RuntimeError as error:
            # Torch names keys of the file, each on a line that a tab begins.
            error.args = ("\n  ".join(printable(line, 300) for line in str(error).split("\n\t")),)
            raise CheckpointMismatchError(
                f"{error}\n  Torch found this while it was loading, so the model may be partly loaded. "
                "Load a checkpoint that fits, or build the model anew."
            ) from error
    if not hasattr(found, "missing_keys"):  # the model's own load_state_dict does not say
        return plan, (*plan.renames.values(), *plan.tied)
    return _came_out(model, keys, plan, offered, found, left_out)


@contextlib.contextmanager
def _fitting_each_weight(model: nn.Module, strict: bool) -> Iterator[list[str]]:
    """While a state is loaded, make each weight what its parameter is, between the module's own hooks and the copying.

    Here and not before, because hooks may change names and shapes, and because one module's weights at a time need no
    second copy of the model. Yields the model keys whose weights are left out for their shape, if not ``strict``.
    """
    left_out: list[str] = []
    made: dict[int, torch.Tensor] = {}

    def fit(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        persistent = module._buffers.keys() - module._non_persistent_buffers_set
        buffers = ((name, module._buffers[name]) for name in persistent)
        for name, target in (*module._parameters.items(), *buffers):
            key = prefix + name
            value = state_dict.get(key)
            if target is None or not isinstance(value, torch.Tensor):
                continue
            if not strict and not is_copied_into(shape_of(value), shape_of(target)):
                left_out.append(key)
                del state_dict[key]
                continue
            value = state_dict[key] = _sharded_like(value, target)
            if target.is_meta and not value.is_meta:  # there is nothing to copy into
                if id(target) not in made:
                    made[id(target)] = _materialized(target, value.device)
                setattr(module, name, made[id(target)])

    # A ScriptModule takes no hooks, and is never on the meta device nor sharded.
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_load_state_dict_pre_hook(fit) for module in modules]  # type: ignore[no-untyped-call]
    try:
        yield left_out
    finally:
        for handle in handles:
            handle.remove()


def _sharded_like(value: Any, target: Any) -> torch.Tensor:
    if type(value) is torch.Tensor and type(target) in (torch.Tensor, nn.Parameter):
        return value  # nearly always; the questions below take longer than the copying
    is_sharded, wants_sharded = hasattr(value, "device_mesh"), hasattr(target, "device_mesh")
    if wants_sharded and not is_sharded:
        from torch.distributed.tensor import distribute_tensor

        # Every process has read the file, so each takes its part without asking the others.
        return distribute_tensor(value.detach(), target.device_mesh, target.placements, src_data_rank=None)
    return value.full_tensor() if is_sharded and not wants_sharded else value  # type: ignore[no-any-return]


def _materialized(target: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(target, device=device, requires_grad=False)
    return nn.Parameter(empty, target.requires_grad) if isinstance(target, nn.Parameter) else empty


def _came_out(
    model: nn.Module,
    keys: ModelKeys,
    plan: RenamePlan,
    offered: Mapping[str, str],
    found: Any,
    left_out: Sequence[str],
) -> tuple[RenamePlan, tuple[str, ...]]:
    """Return the plan with what torch says is missing and unexpected, and the model keys that got their weight."""
    # Torch names modules that the model's hooks leave out of its keys.
    bare = without_private_segments
    shown = {bare(key): key for key in keys.shapes}
    misfits, homeless = {bare(name) for name in left_out}, {bare(name) for name in found.unexpected_keys}
    clashes = misfits & {bare(offered[key]) for key in plan.clashes if key in offered}
    missing = [bare(name) for name in found.missing_keys if bare(name) not in clashes]
    invented = homeless - {bare(name) for name in offered.values()}  # by hooks
    outcome = dataclasses.replace(
        plan,
        missing=tuple(shown.get(name, name) for name in missing),
        unexpected=(
            *(key for key in plan.unexpected if key not in offered or bare(offered[key]) in homeless),
            *(name for name in found.unexpected_keys if bare(name) in invented),
        ),
        mismatched=tuple(
            clash for clash in plan.mismatched if clash[0] not in offered or bare(offered[clash[0]]) in clashes
        ),
    )
    without = {*missing, *misfits, *homeless, *map(bare, plan.kept)}
    # A state_dict of the model's own may leave out what torch loads all the same.
    live = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} if offered else set()
    names = dict.fromkeys((*keys.shapes, *(name for name in offered.values() if name in live)))
    return outcome, tuple(name for name in names if bare(name) not in without)


def _report(path: str, entry: str, plan: RenamePlan, loaded: tuple[str, ...]) -> LoadReport:
    words = [f"{printable(Path(path).name)}: loaded {len(loaded) - len(plan.tied)} weights"]
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
        loaded=loaded,
        renamed={old: new for old, new in plan.renames.items() if old != new},
        root=plan.dropped_root or plan.added_root,
        kept=plan.kept,
        missing=plan.missing,
        unexpected=plan.unexpected,
        mismatched=plan.mismatched,
        unused=plan.unused,
        summary="; ".join(words),
    )
