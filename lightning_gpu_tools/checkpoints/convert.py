"""Rewrite a checkpoint with clean keys, another root, another precision or as safetensors."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gpu_tools.checkpoints.atomic_file import behind_links
from lightning_gpu_tools.checkpoints.content import (
    LIGHTNING_VERSION,
    MANIFEST,
    MODEL_STATES,
    is_lightning_checkpoint,
)
from lightning_gpu_tools.checkpoints.envelope import manifest_of
from lightning_gpu_tools.checkpoints.key_groups import list_groups
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.checkpoints.model_keys import shape_of
from lightning_gpu_tools.checkpoints.rename_plan import RenamePlan, clean_names
from lightning_gpu_tools.checkpoints.split_tensors import LazyTensor
from lightning_gpu_tools.checkpoints.state_dicts import (
    check_repetition,
    choose_weights,
    is_state_dict,
    rename_optimizers,
    same_tensors,
    shapes_of,
)
from lightning_gpu_tools.checkpoints.torch_files import read_checkpoint, read_weights
from lightning_gpu_tools.checkpoints.unsafe_globals import describe_unread
from lightning_gpu_tools.checkpoints.weights_files import (
    alone,
    has_rest,
    write_content,
    write_safetensors,
    write_weights,
)
from lightning_gpu_tools.errors import CheckpointError, CheckpointMismatchError, KeyCollisionError
from lightning_gpu_tools.units import printable, printable_path

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to change.

    Attributes:
        entry: The entry of the file that holds the weights; ``None`` if there is only one.
        wrappers: Paths of modules whose child ``module`` is a wrapper's; private names such as ``_orig_mod`` always go.
        like: A checkpoint whose keys are wanted.
        drop_root: Attribute to take off every key, ``"model."``.
        add_root: Attribute to put before every key.
        dtype: What floating-point weights become.
        weights_only: Whether to leave out everything that is not weights.
    """

    entry: str | None = None
    wrappers: tuple[str, ...] = ()
    like: str | None = None
    drop_root: str = ""
    add_root: str = ""
    dtype: torch.dtype | None = None
    weights_only: bool = False


def convert(source: str, target: str, changes: Changes, progress: Progress = lambda _: None) -> str:
    """Write ``target`` from ``source``, as safetensors if it ends in ``.safetensors``, and return what was done.

    If ``target`` is a symbolic link, the link stays and the file that it names is replaced or made.

    Raises:
        CheckpointError: ``source`` cannot be read, or cannot be changed in that way; ``target`` is as it was.
        OSError: ``target`` cannot be written.
    """
    as_safetensors, file = target.endswith(".safetensors"), behind_links(target)
    only_weights = as_safetensors or changes.weights_only
    content, unread = read_weights(source) if only_weights else (read_checkpoint(source), ())
    entry, weights = choose_weights(source, content, changes.entry)
    shown = printable_path(source)
    plan = _plan(shown, weights, content, changes)
    _check_written_size(source, weights, plan, changes, as_safetensors)
    converted = _apply(plan, shown, weights, changes)
    left_out = f"left out: {list_groups(plan.unused)}" if plan.unused else ""
    parts = [f"{len(converted)} weights", plan.describe(), left_out, describe_unread(unread)]
    done = ", ".join(filter(None, parts))
    if as_safetensors:
        write_safetensors(converted, file, _texts(content), progress)
    elif changes.weights_only or not isinstance(content, Mapping) or not entry:
        write_weights(converted, file, progress)
    else:
        rest = dict(content)
        if is_lightning_checkpoint(content) and entry in MODEL_STATES:
            for name in {*MODEL_STATES} - {entry}:
                if is_state_dict(content.get(name)):
                    other = _plan(shown, content[name], content, changes)
                    _check_written_size(source, content[name], other, changes, as_safetensors)
                    rest[name] = alone(_apply(other, shown, content[name], changes))
            if "optimizer_states" in content:
                rest["optimizer_states"] = rename_optimizers(content["optimizer_states"], plan)
        write_content(_put(rest, entry, alone(converted)), file, progress)
    where = printable_path(target) if file == target else f"{printable_path(target)}, a link to {printable_path(file)}"
    return f"{where}: {done}"


def _plan(source: str, weights: Mapping[str, Any], content: Any, changes: Changes) -> RenamePlan:
    if changes.like is not None:
        _, wanted = choose_weights(changes.like, read_weights(changes.like)[0], None)
        try:
            return plan_renaming(shapes_of(weights), ModelKeys(shapes=shapes_of(wanted)))
        except CheckpointError as error:
            error.args = (f"{source} does not fit {printable_path(changes.like)}. {error.args[0]}", *error.args[1:])
            raise
    try:
        names = clean_names(weights, {*changes.wrappers, *manifest_of(content).get("wrappers", ())})
    except KeyCollisionError as error:
        error.args = (f"{source}: {error.args[0]}",)
        raise
    kept = {key: name for key, name in names.items() if name.startswith(changes.drop_root)}
    if changes.drop_root and not kept:
        root = printable(repr(changes.drop_root))
        raise CheckpointMismatchError(f"{source}: no key begins with {root}, so it cannot be dropped.")
    return RenamePlan(
        renames={key: changes.add_root + name.removeprefix(changes.drop_root) for key, name in kept.items()},
        unused=tuple(key for key in names if key not in kept),
    )


def _check_written_size(
    source: str, weights: Mapping[str, Any], plan: RenamePlan, changes: Changes, as_safetensors: bool
) -> None:
    """Check those weights that are written out number by number, before any memory is taken for them."""
    all_numbers = as_safetensors or changes.dtype is not None
    is_written_out = _has_numbers if all_numbers else has_rest
    taken = ((key, weights[key]) for key in (*plan.renames, *plan.tied.values()))
    check_repetition(source, {key: value for key, value in taken if is_written_out(value)}, changes.dtype)


def _has_numbers(value: Any) -> bool:
    return shape_of(value) is not None and value.layout is torch.strided


def _apply(plan: RenamePlan, source: str, weights: Mapping[str, Any], changes: Changes) -> OrderedDict[str, Any]:
    """Return the weights with their new names and precision; those that are tied stay tied."""
    converted = plan.apply(weights)
    if changes.dtype is None:
        return converted
    identity = same_tensors(converted)
    made: dict[Hashable, Any] = {}
    beyond_range = []
    for key, value in converted.items():
        same = identity.get(key, key)
        if same not in made:
            made[same] = _with_dtype(value, changes.dtype)
            if _has_overflowed(value, made[same]):
                beyond_range.append(key)
        converted[key] = made[same]
    if beyond_range:
        raise CheckpointError(
            f"{source}: values of {list_groups(beyond_range)} are beyond the range of {changes.dtype} and would become "
            "infinite. Choose a dtype with a larger range, bfloat16 or float64, or leave --dtype out."
        )
    return converted


def _with_dtype(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype is dtype:
        return value
    if shape_of(value) is None or value.layout is not torch.strided or value.is_meta:
        return value.detach().to(dtype)
    return LazyTensor(tuple(value.shape), dtype, lambda: value.detach().to(dtype).contiguous())


def _has_overflowed(before: Any, after: Any) -> bool:
    if shape_of(before) is None or before.layout is not torch.strided or before.dtype == after.dtype or before.is_meta:
        return False
    if torch.finfo(before.dtype).max <= torch.finfo(after.dtype).max:
        return False
    return bool((before.isfinite() & ~after.isfinite()).any())


def _put(content: Mapping[str, Any], entry: str, weights: Any) -> dict[str, Any]:
    first, _, rest = entry.partition(".")
    return {**content, first: _put(content[first], rest, weights) if rest else weights}


def _texts(content: Any) -> dict[str, str]:
    manifest: dict[str, Any] = {"version": 1, "torch": str(torch.__version__)}
    if is_lightning_checkpoint(content) and isinstance(content[LIGHTNING_VERSION], str):
        manifest["lightning"] = content[LIGHTNING_VERSION]
    return {MANIFEST: json.dumps(manifest)}
