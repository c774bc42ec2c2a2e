"""Checks that torch can copy weights into a model unchanged, before anything is copied.

The checks compare names, shapes and types. Only a model with its own loading code is loaded twice. The first time, the
model's own parameters replace each weight that fits, and everything is restored afterwards.
"""

import contextlib
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, RenamePlan, is_average
from lightning_gpu_tools.checkpoints.key_tree import (
    is_copied_into,
    is_inside,
    quoted,
    shortened,
    without_private_segments,
)
from lightning_gpu_tools.checkpoints.state_dicts import (
    FROM_META,
    fault_of_parts,
    has_own_hooks,
    is_dense,
    is_packed,
    is_sharded,
    loads_itself,
    shape_of,
)
from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.units import printable


class Fit(NamedTuple):
    """The match between one entry of a checkpoint and a model."""

    entry: str  # "" if the file holds only weights
    weights: Mapping[str, Any]
    plan: RenamePlan
    keys: ModelKeys
    state: Mapping[str, Any]  # state_dict of the model
    strict: bool
    buffers: tuple[str, ...] = ()  # checkpoint keys of buffers that the model does not save, with its numbers
    others: tuple[str, ...] = ()  # entries and roots with other weights of the same model, unless the user chose one

    def renamed(self, weights: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return ``weights`` as ``load_state_dict`` takes them, plus the model's own for keys they may lack."""
        renamed = self.plan.apply(weights, self.offered())
        renamed.update((key, self.state[key]) for key in self.plan.kept)
        return renamed

    def offered(self) -> dict[str, str]:
        """Return key -> name for keys without a match that the model's own loading code may take."""
        plan = self.plan
        names = {key: plan.rename(key) for key in (*plan.unexpected, *plan.clashes)}
        if not self.strict:  # otherwise, `apply` refuses names that are already taken
            first = {name: key for key, name in reversed(names.items())}
            untracked = self.keys.untracked  # which InstanceNorm refuses
            taken = {*plan.renames.values(), *plan.tied}
            names = {
                key: name
                for key, name in names.items()
                if name not in taken and first[name] == key and without_private_segments(name) not in untracked
            }
        return names

    def choice(self) -> str:
        """Return a message on the loaded set of weights, and how to load the others."""
        taken = ".".join(filter(None, (self.entry, self.plan.dropped_root.rstrip("."))))
        roots = " or ".join(f"root={quoted(name)}" for name in self.others)
        others = "the average" if all(map(is_average, self.others)) else "other weights of this model"
        return f"loaded {quoted(taken)}; to load {others}, call load_weights with {roots}"


def copy_weights(model: nn.Module, fit: Fit) -> tuple[RenamePlan, tuple[str, ...]]:
    """Load all or nothing; return the actual plan, and the model keys that got a weight."""
    check_before_copying(model, fit, leave_out_misfits=not fit.strict)
    renamed = fit.renamed(fit.weights)
    own_what_modules_keep(renamed, fit.keys)

    def prepare(module: nn.Module, name: str, key: str, target: Any, state_dict: dict[str, Any]) -> None:
        value = state_dict[key]
        if not fit.strict and not is_copied_into(shape_of(value), shape_of(target)):
            del state_dict[key]
            return
        if is_sharded(value):  # each process has all of it
            value = value.to_local()
        if is_sharded(target):
            from torch.distributed.tensor import DTensor, Replicate

            # Every process has read the file, so each takes its part without communication.
            mesh = target.device_mesh
            whole = DTensor.from_local(value.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            value = whole.redistribute(placements=target.placements)
        state_dict[key] = value
        if target.is_meta and not value.is_meta:  # the target has no memory to copy into
            if id(target) not in made:
                empty = torch.empty_like(target, device=value.device, requires_grad=False)
                made[id(target)] = nn.Parameter(empty, target.requires_grad) if name in module._parameters else empty
            setattr(module, name, made[id(target)])

    made: dict[int, torch.Tensor] = {}
    with _before_each_copy(model, prepare):
        found = _load_state(model, renamed, fit.strict, "The model may be partly loaded. Create it again.")
    if fit.strict:  # then the model's own code has handled keys without a match
        plan = dataclasses.replace(fit.plan, missing=(), unexpected=(), clashes={})
        return plan, tuple(key for key in fit.state if key not in plan.kept)
    if not hasattr(found, "missing_keys"):  # the model's own load_state_dict does not report them
        return fit.plan, (*fit.plan.renames.values(), *fit.plan.tied)
    return _outcome_of(fit, found)


def own_what_modules_keep(weights: dict[str, Any], model: ModelKeys) -> None:
    """Copy weights out of the mapped file if loading does not copy them into the model.

    An ``_extra_state`` may hold tensors, and a module with its own loading code may keep them, like torchmetrics.
    """
    for key, value in weights.items():
        if not isinstance(value, torch.Tensor):
            weights[key] = copy.deepcopy(value)
        elif is_inside(key, model.self_loading):  # a deep copy of a plain tensor copies its whole storage
            weights[key] = value.detach().clone() if type(value) is torch.Tensor else copy.deepcopy(value)


def _outcome_of(fit: Fit, found: Any) -> tuple[RenamePlan, tuple[str, ...]]:
    """Return the plan with what torch has found, in which hooks of the model may have translated keys."""
    plan, offered = fit.plan, fit.offered()
    bare = without_private_segments  # torch's names include modules that the model's hooks leave out of its keys
    source = {bare(name): key for key, name in offered.items()}
    absent = {*map(bare, found.missing_keys)}
    clashes = {key: name for key, name in plan.clashes.items() if bare(name) in absent}
    misfits = {*clashes.values()}
    outcome = dataclasses.replace(
        plan,
        missing=tuple(key for key in fit.state if bare(key) in absent and key not in misfits),
        unexpected=(
            *(key for key in plan.unexpected if key not in offered),
            *(source.get(bare(name), name) for name in found.unexpected_keys),
        ),
        clashes=clashes,
    )
    return outcome, tuple(key for key in fit.state if bare(key) not in absent and key not in plan.kept)


def check_before_copying(model: nn.Module, fit: Fit, *, leave_out_misfits: bool) -> None:
    """Refuse weights that would make ``load_state_dict`` fail midway, or that it would copy as different numbers."""
    if fault := fault_of_parts(fit.weights):
        raise CheckpointMismatchError(f"{fault} Nothing was changed.")
    refused = _different_for_tied(fit)
    has_loading_code = (
        bool(fit.keys.self_loading)
        or type(model).load_state_dict is not nn.Module.load_state_dict
        or any(has_own_hooks(module._load_state_dict_post_hooks) for module in model.modules())
    )
    if fit.offered() or has_loading_code:
        refused |= _rehearse(model, fit, leave_out_misfits)
    else:
        for old, new in fit.plan.renames.items():
            target = fit.state[new]
            if shape_of(target) is not None and (why := _why_not_copied(fit.weights[old], target)):
                refused[old] = why
    if refused:
        reasons = [f"{printable(key)} ({why})" for key, why in refused.items()]
        raise CheckpointMismatchError(
            f"Torch cannot copy {shortened(reasons)}. Nothing was changed. To load the rest, remove these weights from "
            "the file and use strict=False."
        )


def _rehearse(model: nn.Module, fit: Fit, leave_out_misfits: bool) -> dict[str, str]:
    """Run the model's loading code without copying; return key -> reason for each weight that torch cannot copy."""
    refused: dict[str, str] = {}

    def check(module: nn.Module, name: str, key: str, target: torch.Tensor, state_dict: dict[str, Any]) -> None:
        value = state_dict[key]
        if is_copied_into(shape_of(value), shape_of(target)):
            if value is not target and (why := _why_not_copied(value, target)):
                refused[key] = why
            state_dict[key] = target
        elif leave_out_misfits:
            del state_dict[key]

    outcome = "\n  ".join(("Nothing was changed.", *fit.plan.hints()))
    with _undoing(model), _before_each_copy(model, check):
        _load_state(model, fit.renamed(fit.weights), fit.strict, outcome)
    return refused


@contextlib.contextmanager
def _undoing(model: nn.Module) -> Iterator[None]:
    """Let modules with their own loading code load into copies of their tensors; restore everything at the end."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in _modules(model):
            parts: tuple[dict[str, Any], ...] = (vars(module), module._modules, module._parameters, module._buffers)
            before += [(part, dict(part)) for part in parts]
            if type(module).set_extra_state is not nn.Module.set_extra_state:  # it may change anything
                vars(module)["set_extra_state"] = lambda state: None
            if loads_itself(module):
                for tensors in parts[2:]:
                    tensors.update(copy.deepcopy(tensors))
        yield
    finally:
        for part, saved in before:
            part.clear()
            part.update(saved)


def _modules(model: nn.Module) -> list[nn.Module]:
    # A ScriptModule takes no hooks, and is never on the meta device or sharded.
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def _load_state(model: nn.Module, renamed: Mapping[str, Any], strict: bool, outcome: str) -> Any:
    """Call ``load_state_dict``. If it fails, append ``outcome``, the state of the model, to the error."""
    try:
        return model.load_state_dict(renamed, strict=strict)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Torch lists keys of the file, one per line. Only these lists are shortened, not its advice. The traceback also
        # shows this error.
        lists = ("Missing key(s)", "Unexpected key(s)", "size mismatch")
        lines = [printable(line, 300 if line.startswith(lists) else 3000) for line in str(error).split("\n\t")]
        error.args = ("\n  ".join(lines),)
        raise CheckpointMismatchError(f"{error}\n  {outcome}") from error


@contextlib.contextmanager
def _before_each_copy(
    model: nn.Module, prepare: Callable[[nn.Module, str, str, torch.Tensor, dict[str, Any]], None]
) -> Iterator[None]:
    """Call ``prepare`` for each loaded weight, after the module's own hooks and before the copy.

    The hooks may change names and shapes. Working module by module avoids a second copy of the model. ``prepare`` gets
    the module, the name, full key and tensor of a parameter or buffer, and the state dict to load.
    """

    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        persistent = module._buffers.keys() - module._non_persistent_buffers_set
        buffers = ((name, module._buffers[name]) for name in persistent)
        for name, target in (*module._parameters.items(), *buffers):
            if target is not None and isinstance(state_dict.get(prefix + name), torch.Tensor):
                prepare(module, name, prefix + name, target, state_dict)

    with contextlib.ExitStack() as hooks:
        for module in _modules(model):
            hooks.enter_context(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
        yield


def _different_for_tied(fit: Fit) -> dict[str, str]:
    """Return key -> reason for tied weights that differ from the first of their ties in the checkpoint."""
    first: dict[str, tuple[str, torch.Tensor]] = {}
    refused = {}
    for old, new in fit.plan.renames.items():
        value, leader = fit.weights[old], fit.keys.tied.get(new)
        if leader is None or shape_of(value) is None or value.is_meta or value.layout is not torch.strided:
            continue
        other, same = first.setdefault(leader, (old, value))
        if other != old and not _are_equal(value, same, fit.state[new].dtype):
            refused[old] = f"differs from {quoted(other)}, but both are the same tensor in the model"
    return refused


def _are_equal(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> bool:
    if one.is_quantized or two.is_quantized or is_sharded(one):
        return True  # unknown; has never been seen
    if one.data_ptr() == two.data_ptr() and one.stride() == two.stride() and one.dtype is two.dtype:
        return True
    return torch.allclose(one.to(dtype), two.to(dtype), rtol=0, atol=0, equal_nan=True)


def has_same_numbers(value: Any, buffer: torch.Tensor) -> bool:
    """Return whether a buffer of a model has these numbers, perhaps in the precision of the file."""
    if not is_dense(value) or buffer.is_meta:
        return buffer.is_meta
    kinds = {buffer.dtype, *[value.dtype] * (value.is_floating_point() and buffer.is_floating_point())}
    return any(_are_equal(value, buffer.to(value.device), dtype) for dtype in kinds)


def _why_not_copied(value: Any, target: torch.Tensor) -> str:
    """Return why a weight cannot be copied unchanged; ``""`` if it can."""
    if not isinstance(value, torch.Tensor):
        return f"a {printable(type(value).__name__)} instead of {_kind(target)}"
    if value.is_meta > target.is_meta:
        return f"no numbers: {FROM_META}"
    is_of_its_kind = (
        value.layout is target.layout
        and value.is_quantized <= target.is_quantized
        and (type(value) is type(target) or not (is_packed(value) or is_packed(target)))
    )
    if not is_of_its_kind:
        return f"{_kind(value)} instead of {_kind(target)}"
    is_expanded = target.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)
    )
    if is_expanded or (target.is_inference() and not torch.is_inference_mode_enabled()):
        return "the model has an inference or expanded tensor; replace it with its clone()"
    return "" if value.dtype is target.dtype else changed_number(value, target.dtype)


def changed_number(value: torch.Tensor, dtype: torch.dtype) -> str:
    """Return a message about a number that a cast would change beyond rounding; ``""`` if there is none."""
    numbers = value.detach()
    is_plain = type(numbers) is torch.Tensor and numbers.layout is torch.strided
    if not is_plain or numbers.is_meta or numbers.is_quantized:
        return ""
    if numbers.is_complex():
        if not dtype.is_complex:
            return f"a complex number cannot become {_name(dtype)}"
        numbers = torch.view_as_real(numbers.resolve_conj())
    is_float, real = numbers.is_floating_point(), dtype.to_real()
    if is_float and real.is_floating_point and torch.finfo(numbers.dtype).max <= torch.finfo(real).max:
        return ""  # without a look at the numbers
    if is_float and numbers.element_size() < 4:
        numbers = numbers.float()  # float8 can be compared only so
    if real.is_floating_point:
        cast = numbers.to(real)
        cast = cast.float() if real.itemsize == 1 else cast
        changed = numbers.isfinite() & ~cast.isfinite()
    else:
        cast = numbers.to(dtype)
        changed = (cast.to(numbers.dtype) != numbers) | ((cast < 0) != (numbers < 0))
    if not changed.any():
        return ""
    return f"{numbers[changed][0].item():g} would become {cast[changed][0].item():g} as {_name(dtype)}"


def _kind(value: torch.Tensor) -> str:
    if is_packed(value):
        return f"a tensor of the class {printable(type(value).__name__)}"
    return f"a {'quantized ' * value.is_quantized}{_name(value.layout)} tensor"


def _name(kind: torch.dtype | torch.layout) -> str:
    """Return the name of a dtype or a layout, without ``torch.``."""
    return str(kind).removeprefix("torch.")
