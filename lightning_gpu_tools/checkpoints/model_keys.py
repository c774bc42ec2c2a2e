"""What a live model tells about its own keys: shapes, wrappers, tied weights.

To teach the package another wrapper, add its class to ``_WRAPPERS`` (or, if importing it is too much to ask, its
package and name to ``_WRAPPERS_BY_NAME``). That is enough where the wrapped module is its child ``module``. Where the
child has a name that nobody gives by hand, as ``_orig_mod``, it belongs to ``key_tree.PRIVATE_SEGMENTS`` instead.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys
from lightning_gpu_tools.checkpoints.key_tree import WRAPPER_COUNTER, Shape, without_private_segments

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
# Top-level package and class; all keep what they wrap in the attribute ``module``.
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
_BATCH_COUNTER = "num_batches_tracked"
# Hooks that only put back the prefix of their own wrapper.
_PREFIX_HOOK_PACKAGES = (
    "torch.distributed.",
    "torch._dynamo.",
    "lightning.",
    "pytorch_lightning.",
    "lightning_fabric.",
)


def read_model(model: nn.Module, checkpoint_keys: Iterable[str] = ()) -> tuple[ModelKeys, dict[str, Any]]:
    """Return what a plan has to know about ``model``, and its ``state_dict()``.

    Files from before torch 0.4.1, by their keys, have no batch counters, and their absence is no fault there.
    """
    state = _live_state(model)
    old_batch_norm = not any(key.endswith(_BATCH_COUNTER) for key in checkpoint_keys)
    counters: set[str] = set()
    wrappers, self_loading = set(), set()
    for path, module in model.named_modules(remove_duplicate=False):
        if _is_wrapper(module):
            wrappers.add(path)
            counters.add(_inside(path, WRAPPER_COUNTER))
        elif isinstance(module, _NORMS):
            if old_batch_norm:
                counters.add(_inside(path, _BATCH_COUNTER))
        elif loads_itself(module):
            self_loading.add(path)
    keys = ModelKeys(
        shapes={key: shape_of(value) for key, value in state.items()},
        wrappers=frozenset(wrappers),
        tied=_tied(state),
        optional=frozenset(key for key in state if without_private_segments(key) in counters),
        self_loading=frozenset(self_loading),
    )
    return keys, state


def wrapper_paths(model: nn.Module) -> dict[str, str]:
    """Return path -> class name of every wrapper in ``model`` that keeps its content in a child called ``module``."""
    return {
        path: type(module).__name__
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_wrapper(module)
    }


def module_versions(model: nn.Module) -> OrderedDict[str, dict[str, int]]:
    """Return what ``state_dict()._metadata`` would hold, without running any state-dict hook."""
    return OrderedDict(
        (path, {"version": module._version}) for path, module in model.named_modules(remove_duplicate=False)
    )


def shape_of(value: object) -> Shape | None:
    """Return the shape of a tensor; ``None`` for anything else and for a tensor that has no shape (yet).

    A parameter that DeepSpeed ZeRO-3 has taken apart says its whole shape in ``ds_shape``.
    """
    if type(value) is torch.Tensor and not value.is_nested:  # nearly always, and 300,000 times
        return tuple(value.shape)
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value) or value.is_nested:
        return None
    return tuple(getattr(value, "ds_shape", value.shape))


def name_of(kind: torch.dtype | torch.layout) -> str:
    """Return what torch calls a type or a layout, without ``torch.``."""
    return str(kind).removeprefix("torch.")


def is_dense(value: Any) -> bool:
    """Whether this is a tensor whose numbers are at one place in memory, or will be when it is put together."""
    return shape_of(value) is not None and value.layout is torch.strided and not (value.is_meta or is_packed(value))


def is_sharded(value: Any) -> bool:
    """Whether this is a tensor whose numbers may be divided among processes."""
    return type(value) is not torch.Tensor and hasattr(value, "device_mesh")


def is_packed(value: Any) -> bool:
    """Whether this is a tensor that keeps its numbers in other tensors, as torchao's quantized ones do."""
    if type(value) in (torch.Tensor, nn.Parameter) or not isinstance(value, torch.Tensor):
        return False
    return is_traceable_wrapper_subclass(value) and not (is_sharded(value) or value.is_nested)


def part_of(value: Any) -> str:
    """Say which part of a sharded tensor this is, ``"rank 0 of 2, Shard(dim=0)"``; ``""`` for all that is whole."""
    if not is_sharded(value):
        return ""
    mesh, placements = value.device_mesh, value.placements
    if all(mesh.size(dim) == 1 or placement.is_replicate() for dim, placement in enumerate(placements)):
        return ""
    place = mesh.get_coordinate()
    rank = "a rank" if place is None else f"rank {int(mesh.mesh[tuple(place)])}"
    return f"{rank} of {mesh.size()}, {', '.join(map(repr, placements))}"


def _live_state(model: nn.Module) -> dict[str, Any]:
    """Return ``state_dict()`` with the parameters themselves, also where its override takes no ``keep_vars``."""
    options = inspect.signature(model.state_dict).parameters.values()
    if any(option.name == "keep_vars" or option.kind is option.VAR_KEYWORD for option in options):
        return model.state_dict(keep_vars=True)
    live = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return {key: live.get(key, value) for key, value in model.state_dict().items()}


def _is_wrapper(module: nn.Module) -> bool:
    classes = ((base.__module__.partition(".")[0], base.__name__) for base in type(module).__mro__)
    return isinstance(module, _WRAPPERS) or not _WRAPPERS_BY_NAME.isdisjoint(classes)


def _inside(path: str, name: str) -> str:
    # Some wrappers show in the paths of modules but, thanks to their hooks, not in the keys.
    return without_private_segments(f"{path}.{name}" if path else name)


def loads_itself(module: nn.Module) -> bool:
    """Whether code of this module's own translates or takes the weights that it is given."""
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict or has_own_hooks(
        module._load_state_dict_pre_hooks
    )


def has_own_hooks(hooks: Mapping[int, Any]) -> bool:
    """Whether any of these hooks does more than put back the prefix of a wrapper."""
    functions = (getattr(hook, "hook", hook) for hook in hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith(_PREFIX_HOOK_PACKAGES) for hook in functions)


def _tied(state: Mapping[str, Any]) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            leader = first.setdefault(id(value), key)
            if leader != key:
                tied[key] = leader
                tied[leader] = leader
    return tied
