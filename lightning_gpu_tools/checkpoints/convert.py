"""Rewrite a checkpoint with clean keys, another root, another precision or as safetensors."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gpu_tools.checkpoints.atomic_file import behind_links, writing
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
from lightning_gpu_tools.checkpoints.state_dicts import (
    check_repetition,
    choose_weights,
    is_state_dict,
    rename_optimizers,
    same_tensors,
    shapes_of,
)
from lightning_gpu_tools.checkpoints.torch_files import read_checkpoint, write_checkpoint
from lightning_gpu_tools.errors import CheckpointError, CheckpointMismatchError, KeyCollisionError
from lightning_gpu_tools.units import printable, printable_path

_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BATCH_BYTES = 1 << 20  # our default: a copy of as much costs nothing
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
    """Write ``target`` from ``source`` and say what was done. ``target`` is safetensors if it is called so.

    If ``target`` is a symbolic link, the link stays and the file that it names is replaced or made.

    Raises:
        CheckpointError: ``source`` cannot be read, or cannot be changed in that way; ``target`` is as it was.
        OSError: ``target`` cannot be written.
    """
    content = read_checkpoint(source)
    entry, weights = choose_weights(source, content, changes.entry)
    shown = printable_path(source)
    as_safetensors, file = target.endswith(".safetensors"), behind_links(target)
    plan = _plan(shown, weights, content, changes)
    _check_written_size(source, weights, plan, changes, as_safetensors)
    converted = _apply(plan, shown, weights, changes, as_safetensors)
    said = [f"{len(converted)} weights"]
    said += [
        part for part in (plan.describe(), f"not taken along: {list_groups(plan.unused)}" * bool(plan.unused)) if part
    ]
    if as_safetensors:
        _write_safetensors(file, converted, content, progress)
    elif changes.weights_only or not isinstance(content, Mapping) or not entry:
        write_checkpoint(converted, file, progress)
    else:
        rest = dict(content)
        if is_lightning_checkpoint(content) and entry in MODEL_STATES:
            for name in {*MODEL_STATES} - {entry}:
                if is_state_dict(content.get(name)):
                    other = _plan(shown, content[name], content, changes)
                    _check_written_size(source, content[name], other, changes, as_safetensors)
                    rest[name] = _apply(other, shown, content[name], changes, as_safetensors)
            if "optimizer_states" in content:
                rest["optimizer_states"] = rename_optimizers(content["optimizer_states"], plan)
        write_checkpoint(_put(rest, entry, converted), file, progress)
    where = printable_path(target) if file == target else f"{printable_path(target)}, a link to {printable_path(file)}"
    return f"{where}: {', '.join(said)}"


def _plan(source: str, weights: Mapping[str, Any], content: Any, changes: Changes) -> RenamePlan:
    if changes.like is not None:
        _, wanted = choose_weights(changes.like, read_checkpoint(changes.like), None)
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
    taken = ((key, weights[key]) for key in (*plan.renames, *plan.tied.values()))
    written_out = {
        key: value
        for key, value in taken
        if shape_of(value) is not None and value.layout is torch.strided and (all_numbers or _has_rest(value))
    }
    check_repetition(source, written_out, changes.dtype)


def _apply(
    plan: RenamePlan, source: str, weights: Mapping[str, Any], changes: Changes, as_safetensors: bool
) -> OrderedDict[str, Any]:
    """Return the weights with their new names and precision; those that are tied stay tied."""
    converted = plan.apply(weights)
    identity = same_tensors(converted)
    made: dict[Hashable, Any] = {}
    beyond_range = []
    for key, value in converted.items():
        same = identity.get(key, key)
        if same not in made:
            made[same] = _to_dtype(value, changes.dtype)
            if not as_safetensors:
                made[same] = _alone(made[same])
            if changes.dtype is not None and _has_overflowed(value, made[same]):
                beyond_range.append(key)
        converted[key] = made[same]
    if beyond_range:
        raise CheckpointError(
            f"{source}: values of {list_groups(beyond_range)} are beyond the range of {changes.dtype} and would become "
            "infinite. Choose a dtype with a larger range, bfloat16 or float64, or leave --dtype out."
        )
    return converted


def _to_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype)


def _has_overflowed(before: Any, after: Any) -> bool:
    if shape_of(before) is None or before.layout is not torch.strided or before.dtype == after.dtype or before.is_meta:
        return False
    if torch.finfo(before.dtype).max <= torch.finfo(after.dtype).max:
        return False
    return bool((before.isfinite() & ~after.isfinite()).any())


def _alone(value: Any) -> Any:
    """Return a tensor without the rest of the storage that it is a part of, which torch.save would write too."""
    return value.detach().clone() if _has_rest(value) else value


def _has_rest(value: Any) -> bool:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or shape_of(value) is None:
        return False
    if value.layout is not torch.strided or value.is_quantized:
        return False
    return bool(value.untyped_storage().nbytes() > value.numel() * value.element_size())


def _put(content: Mapping[str, Any], entry: str, weights: Any) -> dict[str, Any]:
    first, _, rest = entry.partition(".")
    return {**content, first: _put(content[first], rest, weights) if rest else weights}


def _write_safetensors(target: str, weights: Mapping[str, Any], content: Any, progress: Progress) -> None:
    """Write the format itself, because its library writes in place: https://huggingface.co/docs/safetensors#format."""
    unfit = [key for key, value in weights.items() if not _fits_safetensors(key, value)]
    if unfit:
        raise CheckpointError(
            f"{printable_path(target)}: safetensors holds plain tensors only, not {list_groups(unfit)}, "
            "under names in UTF-8 other than __metadata__. Choose another suffix than .safetensors to keep them."
        )
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for key, value in weights.items():
        leader = first.setdefault(id(value), key)
        if leader != key:
            tied[key] = leader
    # The largest elements first, so that each tensor begins at a multiple of its element size.
    order = sorted((item for item in weights.items() if item[0] not in tied), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": _texts(weights, tied, content)}
    end = 0
    for key, value in order:
        start, end = end, end + value.numel() * value.element_size()
        dtype = _SAFETENSORS_DTYPES[value.dtype]
        header[key] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(target) as file, torch.no_grad():
        file.write(struct.pack("<Q", len(text)) + text)
        for batch in _batches(value for _, value in order):
            flat = [value if value.ndim == 1 else value.reshape(-1) for value in batch]
            numbers = flat[0] if len(flat) == 1 else torch.cat(flat)
            progress(file.write(_in_a_row(numbers).view(torch.uint8).numpy().data))


def _batches(values: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one type together while they are small: one write each takes ten times as long."""
    batch: list[torch.Tensor] = []
    size_bytes = 0
    for value in values:
        if batch and (size_bytes + value.nbytes > _BATCH_BYTES or value.dtype is not batch[0].dtype):
            yield batch
            batch, size_bytes = [], 0
        batch.append(value)
        size_bytes += value.nbytes
    if batch:
        yield batch


def _in_a_row(value: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor one after the other, as they are in memory if they are."""
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _fits_safetensors(key: str, value: Any) -> bool:
    # Half of a surrogate pair is no Unicode; the second is the name of the format's own entry.
    if key == "__metadata__" or not (key.isascii() or key.encode(errors="ignore").decode() == key):
        return False
    if shape_of(value) is None or value.layout is not torch.strided or value.is_meta:
        return False
    return value.dtype in _SAFETENSORS_DTYPES


def _texts(weights: Mapping[str, Any], tied: Mapping[str, str], content: Any) -> dict[str, str]:
    manifest: dict[str, Any] = {"version": 1, "torch": str(torch.__version__)}
    if is_lightning_checkpoint(content) and isinstance(content[LIGHTNING_VERSION], str):
        manifest["lightning"] = content[LIGHTNING_VERSION]
    texts = {"format": "pt", MANIFEST: json.dumps(manifest)}
    versions = getattr(weights, "_metadata", None)
    if versions:
        texts["module_versions"] = json.dumps(versions)
    if tied:
        texts["tied"] = json.dumps(tied)
    return texts
