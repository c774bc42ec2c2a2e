"""What a live model tells about its own keys: shapes, wrappers, tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys
from lightning_gpu_tools.checkpoints.key_tree import WRAPPER_COUNTER, Shape, without_private_segments

# Wrappers that keep what they wrap in ``module``, those of other packages by package and class. A wrapper that keeps it
# in an attribute that nobody gives by hand belongs to ``key_tree.PRIVATE_SEGMENTS``.
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
_WRAPPERS_BY_NAME = frozenset(
    {
        ("deepspeed", "DeepSpeedEngine"),
        ("apex", "DistributedDataParallel"),
        ("fairscale", "ShardedDataParallel"),
        ("timm", "ModelEmaV2"),
        ("timm", "ModelEmaV3"),
    }
)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_PLAIN = (torch.Tensor, nn.Parameter)  # nearly always; the questions about other tensors take longer than their copying
# Hooks that only put back the prefix of their own wrapper.
_PREFIX_HOOK_PACKAGES = (
    "torch.distributed.",
    "torch._dynamo.",
    "lightning.",
    "pytorch_lightning.",
    "lightning_fabric.",
)


def read_model(model: nn.Module) -> tuple[ModelKeys, dict[str, Any]]:
    """Return what a plan has to know about ``model``, and its ``state_dict()``."""
    state = _live_state(model)
    wrappers = wrapper_paths(model)
    counters = {_inside(path, WRAPPER_COUNTER) for path in wrappers}
    self_loading = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _NORMS):
            counters.add(_inside(path, "num_batches_tracked"))  # since torch 0.4.1
        elif path not in wrappers and loads_itself(module):
            self_loading.add(without_private_segments(path))
    keys = ModelKeys(
        shapes={key: shape_of(value) for key, value in state.items()},
        wrappers=frozenset(wrappers),
        tied=_tied(state),
        optional=frozenset(key for key in state if without_private_segments(key) in counters),
        self_loading=frozenset(self_loading),
    )
    return keys, state


def wrapper_paths(model: nn.Module) -> dict[str, str]:
    """Return path -> class name of every wrapper with a child called ``module``."""
    return {
        path: type(module).__name__
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_wrapper(module)
    }


def module_versions(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return what ``state_dict()._metadata`` would hold; runs no hooks."""
    return {path: {"version": module._version} for path, module in model.named_modules(remove_duplicate=False)}


def shape_of(value: object) -> Shape | None:
    """Return the shape of a tensor; ``None`` for anything else, and if it has no shape (yet)."""
    if type(value) is torch.Tensor and not value.is_nested:  # nearly always, and 300,000 times
        return tuple(value.shape)
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value) or value.is_nested:
        return None
    return tuple(getattr(value, "ds_shape", value.shape))  # of DeepSpeed ZeRO-3


def name_of(kind: torch.dtype | torch.layout) -> str:
    """Return the name of a type or a layout, without ``torch.``."""
    return str(kind).removeprefix("torch.")


def is_dense(value: Any) -> bool:
    """Whether this is a tensor with its numbers at one place in memory, at the latest when it is used."""
    return shape_of(value) is not None and value.layout is torch.strided and not (value.is_meta or is_packed(value))


def is_sharded(value: Any) -> bool:
    """Whether this is a tensor whose numbers may be divided among processes."""
    return type(value) not in _PLAIN and hasattr(value, "device_mesh")


def is_packed(value: Any) -> bool:
    """Whether this is a tensor made of other tensors, as torchao's quantized ones."""
    is_wrapper = type(value) not in _PLAIN and is_traceable_wrapper_subclass(value)
    return is_wrapper and not (is_sharded(value) or value.is_nested)


def part_of(value: Any) -> str:
    """Say which part of a sharded tensor this is, ``"rank 0 of 2, Shard(dim=0)"``; ``""`` if whole."""
    if not is_sharded(value):
        return ""
    mesh, placements = value.device_mesh, value.placements
    if all(mesh.size(dim) == 1 or placement.is_replicate() for dim, placement in enumerate(placements)):
        return ""
    place = mesh.get_coordinate()
    rank = "a rank" if place is None else f"rank {int(mesh.mesh[tuple(place)])}"
    return f"{rank} of {mesh.size()}, {', '.join(map(repr, placements))}"


def _live_state(model: nn.Module) -> dict[str, Any]:
    """Return ``state_dict()`` with the parameters themselves."""
    try:
        return model.state_dict(keep_vars=True)
    except TypeError:  # an override that takes no options
        live = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
        return {key: live.get(key, value) for key, value in model.state_dict().items()}


def _is_wrapper(module: nn.Module) -> bool:
    classes = ((base.__module__.partition(".")[0], base.__name__) for base in type(module).__mro__)
    return isinstance(module, _WRAPPERS) or not _WRAPPERS_BY_NAME.isdisjoint(classes)


def _inside(path: str, name: str) -> str:
    # Hooks of some wrappers keep their names out of the keys.
    return without_private_segments(f"{path}.{name}" if path else name)


def loads_itself(module: nn.Module) -> bool:
    """Whether this module has loading code of its own."""
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict or has_own_hooks(
        module._load_state_dict_pre_hooks
    )


def has_own_hooks(hooks: Mapping[int, Any]) -> bool:
    """Whether any of these hooks does more than put back a prefix."""
    functions = (getattr(hook, "hook", hook) for hook in hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith(_PREFIX_HOOK_PACKAGES) for hook in functions)


def _tied(state: Mapping[str, Any]) -> dict[str, str]:
    keys_of: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            keys_of.setdefault(id(value), []).append(key)
    return {key: keys[0] for keys in keys_of.values() if len(keys) > 1 for key in keys}
