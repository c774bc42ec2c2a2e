"""All-or-nothing writing of checkpoints, as they are or converted: other keys or format."""

import json
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from lightning_gpu_tools.checkpoints.content import MODEL_STATES, Entries, is_lightning_checkpoint, likely, put_weights
from lightning_gpu_tools.checkpoints.formats.hugging_face import DTYPE_OF_SAFETENSORS
from lightning_gpu_tools.checkpoints.inert_pickle import describe_unread
from lightning_gpu_tools.checkpoints.key_renaming import RenamePlan, clean_names, preferred
from lightning_gpu_tools.checkpoints.key_tree import WRAPPER_SEGMENT, list_groups, quoted
from lightning_gpu_tools.checkpoints.reading import LazyTensor, read_checkpoint, read_weights
from lightning_gpu_tools.checkpoints.state_dicts import (
    errors_about,
    is_dense,
    others_of_this_model,
    weights_in,
    whole_weights,
)
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointError, CheckpointMismatchError
from lightning_gpu_tools.files import writing
from lightning_gpu_tools.units import plural, printable, printable_path

_SAFETENSORS_DTYPES = {
    getattr(torch, dtype): name
    for name, dtype in DTYPE_OF_SAFETENSORS.items()
    if hasattr(torch, dtype)  # F8_E8M0 since torch 2.7
}

# In addition to the numbers in the file. Our default, a float32 mask of 16,384 x 16,384.
_MAX_REPEATED_BYTES = 1 << 30


def write_checkpoint(content: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with ``torch.save``, replacing the file in one step."""
    with writing(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # the disk's error, after which torch could not end its file
                raise error.__context__ from None
            raise


def write_safetensors(weights: Mapping[str, Any], path: str) -> None:
    """Write weights as safetensors. Does not use the library safetensors, which writes in place.

    For the format, see https://huggingface.co/docs/safetensors#format.
    """
    unfit = [
        key
        for key, value in weights.items()
        if key == "__metadata__"  # the format's own entry
        or not (is_dense(value) and value.dtype in _SAFETENSORS_DTYPES)
        or _repeated_bytes(value) > _MAX_REPEATED_BYTES
    ]
    if unfit:
        raise CheckpointError(
            f"{printable_path(path)}: safetensors cannot store {list_groups(unfit)}. It stores only plain tensors with "
            "names other than __metadata__. To keep them, use a suffix other than .safetensors."
        )
    same = _same_tensors(weights)
    first: dict[Hashable, str] = {}
    for key in weights:
        first.setdefault(same.get(key, key), key)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Largest elements first, so that each tensor begins at a multiple of its element size.
    order = sorted(((key, weights[key]) for key in first.values()), key=lambda item: -item[1].element_size())
    end = 0
    for key, value in order:
        start, end = end, end + value.nbytes
        header[key] = {
            "dtype": _SAFETENSORS_DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path) as file, torch.no_grad():
        file.write(struct.pack("<Q", len(text)) + text)
        for _, value in order:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def _repeated_bytes(value: torch.Tensor) -> int:
    """Return how many bytes more than its numbers a tensor would take: 1 KiB can describe 256 GiB."""
    return 0 if isinstance(value, LazyTensor) else value.nbytes - value.untyped_storage().nbytes()


def convert(source: str, target: str, *, entry: str | None, drop_root: str, add_root: str, weights_only: bool) -> str:
    """Convert ``source`` to ``target``, as safetensors if it ends in ``.safetensors``, and return a summary.

    The other arguments are the command's options.
    """
    as_safetensors = target.endswith(".safetensors")
    leaves_out_rest = as_safetensors or weights_only
    content, unread = read_weights(source) if leaves_out_rest else (read_checkpoint(source), ())
    entries = weights_in(content, source)
    entry = _choose_entry(source, entries, entry)
    others = others_of_this_model(entry, entries)
    only_weights = leaves_out_rest or not entry
    plans: dict[str, RenamePlan] = {}
    converted: dict[str, OrderedDict[str, Any]] = {}
    for name in (entry,) if only_weights else (entry, *others):
        weights = whole_weights(source, entries[name])
        # Lightning removes its own wrappers, so a `module` in its files is an attribute of the model.
        is_lightnings = is_lightning_checkpoint(content) and name in MODEL_STATES
        around_all = not (is_lightnings or drop_root.startswith(f"{WRAPPER_SEGMENT}."))
        with errors_about(source):
            names = clean_names(weights, around_all=around_all)
        kept = {key: clean for key, clean in names.items() if clean.startswith(drop_root)}
        if drop_root and not kept:
            root = printable(repr(drop_root))
            raise CheckpointMismatchError(f"{printable_path(source)}: no key begins with {root}. Check --drop-root.")
        plans[name] = RenamePlan(
            renames={key: add_root + clean.removeprefix(drop_root) for key, clean in kept.items()},
            unused=tuple(key for key in weights if key not in kept),
        )
        converted[name] = _converted(weights, plans[name])
    plan = plans[entry]
    if as_safetensors:
        write_safetensors(converted[entry], target)
    elif only_weights:
        write_checkpoint(converted[entry], target)
    else:
        whole = put_weights(content, converted)
        if is_lightning_checkpoint(content) and entry in MODEL_STATES and "optimizer_states" in content:
            whole["optimizer_states"] = plan.rename_optimizers(content["optimizer_states"])
        write_checkpoint(whole, target)
    done = [plural(len(converted[entry]), "weight") + (f" of {quoted(entry)}" if others else ""), plan.describe()]
    if plan.unused:
        done.append(f"dropped: {list_groups(plan.unused)}")
    if others:
        named = ", ".join(map(quoted, others))
        done.append(f"without {named} (select with --entry)" if only_weights else f"also converted {named}")
    done.append(describe_unread(unread))
    return f"{printable_path(target)}: {', '.join(filter(None, done))}"


def _converted(weights: Mapping[str, Any], plan: RenamePlan) -> OrderedDict[str, Any]:
    """Return the weights with new names, still tied, without the rest of their storages."""
    converted = plan.apply(weights)
    identity = _same_tensors(converted)
    made: dict[Hashable, Any] = {}
    for key, value in converted.items():
        same = identity.get(key, key)
        if same not in made:
            is_plain = type(value) is torch.Tensor and is_dense(value)
            is_part = is_plain and value.untyped_storage().nbytes() > value.nbytes
            made[same] = value.detach().clone() if is_part else value
        converted[key] = made[same]
    return converted


def _same_tensors(weights: Mapping[str, Any]) -> dict[str, Hashable]:
    """Return a value for each key that may be tied; equal values mean the same tensor."""
    places = {key: value.data_ptr() for key, value in weights.items() if is_dense(value) and value.numel()}
    keys_at = Counter(places.values())
    values = {key: weights[key] for key, place in places.items() if keys_at[place] > 1}
    return {
        key: (value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
        for key, value in values.items()
    }


def _choose_entry(path: str, entries: Entries, entry: str | None) -> str:
    """Return the entry, or the default one; raise unless there is one."""
    names = ", ".join(map(printable, entries)) or "only one set"
    if entry is None:
        entry, *others = preferred([*likely(entries)], str)
        if others:
            raise AmbiguousCheckpointError(
                f"{printable_path(path)} holds several sets of weights: {names}. Choose one with --entry NAME."
            )
    if entry not in entries:
        raise CheckpointMismatchError(
            f"{printable_path(path)} has no weights called {printable(repr(entry))}; it has {names}."
        )
    return entry
