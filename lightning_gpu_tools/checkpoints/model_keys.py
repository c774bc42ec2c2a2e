"""The keys of a model: shapes, wrappers, tied weights, and modules with their own loading code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys
from lightning_gpu_tools.checkpoints.key_tree import WRAPPER_COUNTER, without_private_segments
from lightning_gpu_tools.checkpoints.state_dicts import shape_of

# Wrappers that keep the wrapped module in ``module``; those of other packages by package and class. Wrappers with an
# attribute name that no user would choose belong in ``key_tree.PRIVATE_SEGMENTS``.
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
_WRAPPERS_BY_NAME = {"deepspeed.DeepSpeedEngine", "apex.DistributedDataParallel", "timm.ModelEmaV2", "timm.ModelEmaV3"}
_BATCH_COUNTER = "num_batches_tracked"
_STATISTICS = ("running_mean", "running_var", _BATCH_COUNTER)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
# Hooks of these packages only restore the prefix of a wrapper.
_HOOK_PACKAGES = ("torch.distributed.", "torch._dynamo.", "lightning.", "pytorch_lightning.", "lightning_fabric.")


def read_model(model: nn.Module, checkpoint_keys: Collection[str] = ()) -> tuple[ModelKeys, dict[str, Any]]:
    """Return the facts about ``model`` that a plan needs, and its ``state_dict()``.

    A checkpoint without batch counters is older than torch 0.4.1, so it may lack the model's counters.
    """
    try:
        state = model.state_dict(keep_vars=True)
    except TypeError:  # an override that takes no options
        live = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
        state = {key: live.get(key, value) for key, value in model.state_dict().items()}
    keys_of: dict[int, list[str]] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            keys_of.setdefault(id(value), []).append(key)
    is_old = not any(key.endswith(_BATCH_COUNTER) for key in checkpoint_keys)
    wrappers = wrapper_paths(model)
    counters = {_inside(path, WRAPPER_COUNTER) for path in wrappers}
    self_loading = set()
    untracked: dict[str, str] = {}
    unsaved = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _NORMS):
            if is_old:
                counters.add(_inside(path, _BATCH_COUNTER))
            if not module.track_running_stats:
                untracked.update((_inside(path, name), type(module).__name__) for name in _STATISTICS)
        elif path not in wrappers and loads_itself(module):
            self_loading.add(without_private_segments(path))
        for name in getattr(module, "_non_persistent_buffers_set", ()):  # a ScriptModule may lack it
            unsaved[f"{path}.{name}" if path else name] = shape_of(module._buffers[name])
    if unsaved:  # an older version of the model may have saved them
        names = {key.rpartition(".")[2] for key in checkpoint_keys}
        unsaved = {key: shape for key, shape in unsaved.items() if key.rpartition(".")[2] in names and key not in state}
    keys = ModelKeys(
        shapes={**{key: shape_of(value) for key, value in state.items()}, **unsaved},
        wrappers=wrappers,
        tied={key: keys[0] for keys in keys_of.values() if len(keys) > 1 for key in keys},
        optional=frozenset((*unsaved, *(key for key in state if without_private_segments(key) in counters))),
        self_loading=frozenset(self_loading),
        untracked=untracked,
        unsaved=frozenset(unsaved),
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


def module_versions(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the content of ``state_dict()._metadata`` without running hooks."""
    return {path: {"version": module._version} for path, module in model.named_modules(remove_duplicate=False)}


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
