"""The weights in a loaded checkpoint and in a model: which there are, of what kind, and whether they are whole."""

import contextlib
import copy
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpu_tools.checkpoints.content import (
    MODEL_STATES,
    Entries,
    check_contents,
    describe_content,
    is_state_dict,
    likely,
    unopened_objects,
)
from lightning_gpu_tools.checkpoints.formats.other_programs import SAVE_ARRAYS
from lightning_gpu_tools.checkpoints.inert_pickle import explain_blocked
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, is_average
from lightning_gpu_tools.checkpoints.key_tree import (
    WRAPPER_COUNTER,
    Shape,
    list_groups,
    quoted,
    without_private_segments,
    without_wrappers,
)
from lightning_gpu_tools.checkpoints.structure import faults_of
from lightning_gpu_tools.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    UnsafeCheckpointError,
)
from lightning_gpu_tools.units import printable, printable_path

# What a pickle builds NumPy arrays by.
_ARRAY = re.compile(r"numpy\.(_core|core)\.(multiarray\._reconstruct|numeric\._frombuffer)")
_PLAIN = (torch.Tensor, nn.Parameter)  # the usual case; checks for other types take longer than copying


def shape_of(value: object) -> Shape | None:
    """Return the shape of a tensor; ``None`` for anything else, and for tensors without a shape yet."""
    if isinstance(value, torch.Tensor) and not nn.parameter.is_lazy(value):
        return tuple(value.shape)
    return None


def is_dense(value: Any) -> bool:
    """Return whether this is a tensor with its numbers in one place in memory, at least while it is used."""
    return shape_of(value) is not None and value.layout is torch.strided and not (value.is_meta or is_packed(value))


def is_sharded(value: Any) -> bool:
    """Return whether this is a tensor whose numbers may be divided among processes."""
    return type(value) not in _PLAIN and hasattr(value, "device_mesh")


def is_packed(value: Any) -> bool:
    """Return whether this is a tensor made of other tensors, such as torchao's quantized ones."""
    is_wrapper = type(value) not in _PLAIN and is_traceable_wrapper_subclass(value)
    return is_wrapper and not is_sharded(value)


@contextlib.contextmanager
def errors_about(path: object, model_class: type | None = None) -> Iterator[None]:
    """Prefix checkpoint errors with the file, and mismatches with the model's class."""
    try:
        yield
    except CheckpointError as error:
        message = f"{printable_path(path)}: {error.args[0]}"
        if model_class is not None and isinstance(error, CheckpointMismatchError):
            message = f"{printable_path(path)} does not fit {printable(model_class.__name__)}. {error.args[0]}"
        error.args = (message, *error.args[1:])
        raise


def weights_in(content: Any, path: object) -> dict[str, Mapping[str, Any]]:
    """Check a loaded checkpoint, and return its sets of weights by entry; raise if there are none."""
    entries = check_contents(content, path)
    if entries:
        return entries
    kinds = unopened_objects(content)
    if any(map(_ARRAY.fullmatch, kinds)):
        raise BrokenCheckpointError(f"{printable_path(path)} holds NumPy arrays instead of tensors. {SAVE_ARRAYS}")
    if not kinds:
        raise BrokenCheckpointError(
            f"{printable_path(path)} holds no weights within two dictionaries, only {describe_content(content)}. Save "
            "tensors by name: torch.save(model.state_dict(), 'weights.pt')"
        )
    raise UnsafeCheckpointError(
        f"{explain_blocked(str(path), kinds)}\n  It holds no weights that can be loaded without opening it. Ask its "
        "author for the model's state_dict(). If you trust the author, open it with "
        f"lightning_gpu_tools.load_weights(model, {printable_path(path)!r}, weights_only=False), which runs its code."
    )


def others_of_this_model(entry: str, entries: Entries) -> list[str]:
    """Return the other entries of the same model: averages, and entries with most of its keys."""
    keys = {*map(without_wrappers, entries[entry])}
    return [
        name
        for name, others in entries.items()
        if name != entry
        and (is_average(name) or 2 * len(keys & {*map(without_wrappers, others)}) > len(entries[entry]))
    ]


def fault_of_parts(weights: Mapping[str, Any]) -> str:
    """Return a message with advice if these are the parts of one rank; ``""`` if they are whole."""
    for key, value in weights.items():
        if not is_sharded(value):
            continue
        mesh, placements = value.device_mesh, value.placements
        if all(mesh.size(dim) == 1 or placement.is_replicate() for dim, placement in enumerate(placements)):
            continue
        return (
            f"It holds one part of a sharded checkpoint: {quoted(key)} is the part of one of {mesh.size()} ranks. "
            "During training, save the full weights from torch.distributed.checkpoint.state_dict.get_model_state_dict "
            "with StateDictOptions(full_state_dict=True)."
        )
    return ""


def whole_weights(path: str, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights with plain tensors instead of unsplit sharded tensors; refuse split ones, and names alone."""
    if fault := fault_of_parts(weights):
        raise CheckpointError(f"{printable_path(path)}: {fault}")
    without = [key for key, value in weights.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if without:
        raise CheckpointError(f"{printable_path(path)} has no numbers for {list_groups(without)}: {FROM_META}.")
    plain = cast(dict[str, Any], copy.copy(weights))  # with its _metadata
    plain.update((key, value.to_local()) for key, value in weights.items() if is_sharded(value))
    return plain


FROM_META = "it was saved from the meta device. Load the weights before saving the model"


def own_all_but_weights(content: Any, path: object) -> Any:
    """Check a loaded checkpoint; return it with everything except the model's weights copied out of the mapped file.

    Weights are copied into the model, but optimizers and callbacks keep their objects. Overwriting the file would
    change these objects.
    """
    entries = check_contents(content, path)
    if not isinstance(content, dict) or is_state_dict(content):
        return content
    mapped = {*likely(entries), *MODEL_STATES}
    with faults_of(path):
        return {
            name: value if name in mapped and is_state_dict(value) else copy.deepcopy(value)
            for name, value in content.items()
        }


# -- models --------------------------------------------------------------------------------------------------------

# Wrappers that keep the wrapped module in ``module``; those of other packages by package and class. Wrappers with an
# attribute name that no user would choose belong in ``key_tree.PRIVATE_SEGMENTS``.
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
_WRAPPERS_BY_NAME = {"deepspeed.DeepSpeedEngine", "apex.DistributedDataParallel", "timm.ModelEmaV2", "timm.ModelEmaV3"}
_BATCH_COUNTER = "num_batches_tracked"
# Hooks of these packages only restore the prefix of a wrapper.
_HOOK_PACKAGES = ("torch.distributed.", "torch._dynamo.", "lightning.", "pytorch_lightning.", "lightning_fabric.")


def read_model(model: nn.Module, checkpoint_keys: Collection[str] = ()) -> tuple[ModelKeys, dict[str, Any]]:
    """Return the facts about ``model`` that a plan needs, and its ``state_dict()``.

    A checkpoint without batch counters is older than torch 0.4.1, so it may lack the model's counters.
    """
    state = model.state_dict(keep_vars=True)
    keys_of: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            keys_of.setdefault(id(value), []).append(key)
    stored_names = {key.rpartition(".")[2] for key in checkpoint_keys}
    is_old = _BATCH_COUNTER not in stored_names
    wrappers = wrapper_paths(model)
    counters = {_inside(path, WRAPPER_COUNTER) for path in wrappers}
    self_loading = set()
    untracked = set()
    unsaved = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.modules.batchnorm._NormBase):
            if is_old:
                counters.add(_inside(path, _BATCH_COUNTER))
            if not module.track_running_stats:
                untracked |= {_inside(path, name) for name in ("running_mean", "running_var", _BATCH_COUNTER)}
        elif path not in wrappers and loads_itself(module):
            self_loading.add(without_private_segments(path))
        # A ScriptModule may lack the set. An older version of the model may have saved these buffers.
        for name in stored_names.intersection(getattr(module, "_non_persistent_buffers_set", ())):
            key = f"{path}.{name}" if path else name
            if key not in state:
                unsaved[key] = shape_of(module._buffers[name])
    keys = ModelKeys(
        shapes={**{key: shape_of(value) for key, value in state.items()}, **unsaved},
        wrappers=wrappers,
        tied={key: keys[0] for keys in keys_of.values() if len(keys) > 1 for key in keys},
        optional=frozenset((*unsaved, *(key for key in state if without_private_segments(key) in counters))),
        untracked=frozenset(untracked),
        self_loading=frozenset(self_loading),
    )
    return keys, state


def wrapper_paths(model: nn.Module) -> frozenset[str]:
    """Return the path of every wrapper with a child called ``module``."""
    paths = set()
    for path, module in model.named_modules(remove_duplicate=False):
        classes = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(module).__mro__)
        if isinstance(module, _WRAPPERS) or not _WRAPPERS_BY_NAME.isdisjoint(classes):
            paths.add(path)
    return frozenset(paths)


def _inside(path: str, name: str) -> str:
    # Hooks of some wrappers remove the wrapper's name from the keys.
    return without_private_segments(f"{path}.{name}" if path else name)


def loads_itself(module: nn.Module) -> bool:
    """Return whether this module has its own loading code."""
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict or has_own_hooks(
        module._load_state_dict_pre_hooks
    )


def has_own_hooks(hooks: Mapping[int, Any]) -> bool:
    """Return whether any of these hooks does more than restore a prefix."""
    functions = (getattr(hook, "hook", hook) for hook in hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith(_HOOK_PACKAGES) for hook in functions)
