"""Load any checkpoint into any module, whatever either of them was wrapped in; all of it or nothing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_gpu_tools.checkpoints.content import likely
from lightning_gpu_tools.checkpoints.key_renaming import (
    ModelKeys,
    RenamePlan,
    Root,
    is_average,
    plan_renaming,
    preferred,
    quoted,
)
from lightning_gpu_tools.checkpoints.key_tree import (
    is_copied_into,
    is_inside,
    list_groups,
    shortened,
    without_private_segments,
)
from lightning_gpu_tools.checkpoints.state_dicts import (
    FROM_META,
    errors_about,
    fault_of_parts,
    has_own_hooks,
    is_packed,
    is_sharded,
    loads_itself,
    name_of,
    others_of_this_model,
    part_of,
    read_model,
    same_tensors,
    shape_of,
    shapes_of,
    weights_in,
)
from lightning_gpu_tools.checkpoints.structure import collector_paused
from lightning_gpu_tools.checkpoints.torch_files import read_weights
from lightning_gpu_tools.checkpoints.unsafe_globals import describe_unread
from lightning_gpu_tools.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    KeyCollisionError,
)
from lightning_gpu_tools.units import printable, printable_path


class Fit(NamedTuple):
    """How one entry of a checkpoint fits a model."""

    entry: str  # "" if the weights are all that the file holds
    weights: Mapping[str, Any]
    plan: RenamePlan
    keys: ModelKeys
    state: Mapping[str, Any]  # of the model
    strict: bool
    others: tuple[str, ...] = ()  # entries and roots with other weights of the same model, if nobody chose among them

    def renamed(self, weights: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return ``weights`` as ``load_state_dict`` takes them, with what they may lack."""
        renamed = self.plan.apply(weights, self.plan.left_over(strict=self.strict))
        renamed.update((key, self.state[key]) for key in self.plan.kept)
        return renamed

    def choice(self) -> str:
        """Say which of several sets of weights is taken, and how to get the others."""
        taken = ".".join(filter(None, (self.entry, self.plan.dropped_root.rstrip("."))))
        roots = " or ".join(f"root={quoted(name)}" for name in self.others)
        what = "the average" if all(map(is_average, self.others)) else "other weights of this model"
        return f"took {quoted(taken)}; load_weights with {roots} takes {what}"


def check_before_copying(model: nn.Module, fit: Fit, *, leave_out_misfits: bool) -> None:
    """Refuse what ``load_state_dict`` would fail on in the midst of copying, or copy as other numbers."""
    fault = fault_of_parts(fit.weights)
    if fault and not _all_have_their_own(fit.weights):
        raise CheckpointMismatchError(f"{fault} Nothing was changed.")
    refused = _different_for_tied(fit)
    if fit.plan.left_over(strict=fit.strict) or _has_loading_code(model, fit.keys):
        refused |= _rehearse(model, fit, leave_out_misfits)
    else:
        for old, new in fit.plan.renames.items():
            target = fit.state[new]
            if shape_of(target) is not None and (why := _why_not_copied(fit.weights[old], target)):
                refused[old] = why
    if refused:
        reasons = [f"{printable(key)} ({why})" for key, why in refused.items()]
        raise CheckpointMismatchError(
            f"Torch cannot copy {shortened(reasons)}. Nothing was changed. Store these weights as the model has them, "
            "or take them out of the file and load it with strict=False."
        )


def _has_loading_code(model: nn.Module, keys: ModelKeys) -> bool:
    return (
        bool(keys.self_loading)
        or type(model).load_state_dict is not nn.Module.load_state_dict
        or any(has_own_hooks(module._load_state_dict_post_hooks) for module in model.modules())
    )


def _rehearse(model: nn.Module, fit: Fit, leave_out_misfits: bool) -> dict[str, str]:
    """Load, but copy nothing; return key -> reason for what torch could not copy."""
    refused: dict[str, str] = {}

    def check(module: nn.Module, name: str, key: str, target: torch.Tensor, state_dict: dict[str, Any]) -> None:
        value = state_dict[key]
        if is_copied_into(shape_of(value), shape_of(target)):
            if value is not target and (why := _why_not_copied(value, target)):
                refused[key] = why
            state_dict[key] = target
        elif leave_out_misfits:
            del state_dict[key]

    with _undoing(model), before_each_copy(model, check):
        load_state(model, fit.renamed(fit.weights), fit.strict, "Nothing was changed.")
    return refused


@contextlib.contextmanager
def _undoing(model: nn.Module) -> Iterator[None]:
    """Let modules that load themselves do it to copies of their tensors, and put everything back."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in _modules(model):
            parts: tuple[dict[str, Any], ...] = (vars(module), module._modules, module._parameters, module._buffers)
            before += [(part, dict(part)) for part in parts]
            if type(module).set_extra_state is not nn.Module.set_extra_state:  # which may change anything
                vars(module)["set_extra_state"] = lambda state: None
            if loads_itself(module):
                for tensors in parts[2:]:
                    tensors.update({name: _copied(tensor) for name, tensor in tensors.items() if tensor is not None})
        yield
    finally:
        for part, saved in before:
            part.clear()
            part.update(saved)


def _modules(model: nn.Module) -> list[nn.Module]:
    # A ScriptModule takes no hooks, and is never on the meta device nor sharded.
    return [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]


def _copied(tensor: Any) -> torch.Tensor:
    if torch.nn.parameter.is_lazy(tensor):  # has no numbers yet, and is given its shape while it is loaded
        kind: Any = type(tensor)
        empty: torch.Tensor = kind(tensor.requires_grad, device=tensor.device, dtype=tensor.dtype)
        return empty
    twin = tensor.detach().clone()
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def load_state(model: nn.Module, renamed: Mapping[str, Any], strict: bool, outcome: str) -> Any:
    """Call ``load_state_dict``; its refusal ends with the outcome for the model."""
    try:
        return model.load_state_dict(renamed, strict=strict)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Torch names keys of the file, a line each. The traceback shows this error, too.
        error.args = ("\n  ".join(printable(line, 300) for line in str(error).split("\n\t")),)
        raise CheckpointMismatchError(f"{error}\n  {outcome}") from error
    except KeyError as error:  # of quantized modules, which load themselves
        key = error.args[0] if error.args else None
        if key in renamed or key not in model.state_dict():
            raise
        raise CheckpointMismatchError(
            f"There is no {printable(key)} in it, without which the model cannot load itself. {outcome}", [key]
        ) from None


@contextlib.contextmanager
def before_each_copy(
    model: nn.Module, prepare: Callable[[nn.Module, str, str, torch.Tensor, dict[str, Any]], None]
) -> Iterator[None]:
    """While a state is loaded, call ``prepare`` for each weight between the module's own hooks and the copying.

    Hooks may change names and shapes, and one module at a time needs no second copy of the model. ``prepare`` gets the
    module, the name and the full key of a parameter or buffer, itself, and the state to be loaded.
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


@contextlib.contextmanager
def renewing_deepspeeds_copies(model: nn.Module) -> Iterator[None]:
    """While a state is loaded, put together what DeepSpeed's ZeRO-3 has taken apart; then renew its own copies.

    DeepSpeed's optimizers keep every weight in float32, too, and the next step would put those back. All processes must
    take part.
    """
    if "deepspeed" not in sys.modules:
        yield
        return
    import deepspeed

    gathered = contextlib.ExitStack()

    def gather(module: nn.Module, *_: Any) -> None:
        gathered.close()  # takes the module before this one apart again
        parameters = [*module.parameters(recurse=False)]
        gathered.enter_context(deepspeed.zero.GatheredParameters(parameters, modifier_rank=0))

    with contextlib.ExitStack() as hooks, gathered:
        for module in model.modules():
            if any(hasattr(one, "ds_id") for one in module.parameters(recurse=False)):
                hooks.enter_context(module.register_load_state_dict_pre_hook(gather))  # type: ignore[no-untyped-call]
        yield
    loaded = {*map(id, model.parameters())}
    # A model does not know its engine.
    engines: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), deepspeed.DeepSpeedEngine)]
    for engine in engines:
        is_concerned = not loaded.isdisjoint(map(id, engine.parameters()))
        if is_concerned and hasattr(engine.optimizer, "refresh_fp32_params"):  # torch's own keep no copies
            engine.optimizer.refresh_fp32_params()


def _all_have_their_own(weights: Mapping[str, Any]) -> bool:
    """Whether every process has the parts that it saved itself; all must ask."""
    if not torch.distributed.is_initialized():
        return False
    mesh = next(value.device_mesh for value in weights.values() if part_of(value))
    place = (mesh.mesh == torch.distributed.get_rank()).nonzero().flatten().tolist()
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, place == list(mesh.get_coordinate() or ()))
    return all(answers)


def _different_for_tied(fit: Fit) -> dict[str, str]:
    """Return the keys of tied weights for which the checkpoint has other numbers than the first."""
    first: dict[str, tuple[str, torch.Tensor]] = {}
    refused = {}
    for old, new in fit.plan.renames.items():
        value, leader = fit.weights[old], fit.keys.tied.get(new)
        if leader is None or shape_of(value) is None or value.is_meta or value.layout is not torch.strided:
            continue
        other, same = first.setdefault(leader, (old, value))
        if other != old and not _are_equal(value, same, fit.state[new].dtype):
            refused[old] = f"other numbers than {quoted(other)}, which is the same tensor in the model"
    return refused


def _are_equal(one: torch.Tensor, two: torch.Tensor, dtype: torch.dtype) -> bool:
    if one.is_quantized or two.is_quantized or is_sharded(one):
        return True  # unknown, and never seen
    if one.data_ptr() == two.data_ptr() and one.stride() == two.stride() and one.dtype is two.dtype:
        return True
    return torch.allclose(one.to(dtype), two.to(dtype), rtol=0, atol=0, equal_nan=True)


def _why_not_copied(value: Any, target: torch.Tensor) -> str:
    """Say why a weight cannot be copied unchanged; ``""`` if it can."""
    if not isinstance(value, torch.Tensor):
        return f"a {printable(type(value).__name__)} instead of {_kind(target)}"
    if value.is_meta > target.is_meta:
        return f"no numbers: {FROM_META}"
    is_of_its_kind = (
        value.layout is target.layout
        and value.is_nested == target.is_nested
        and value.is_quantized <= target.is_quantized
        and (type(value) is type(target) or not (is_packed(value) or is_packed(target)))
    )
    if not is_of_its_kind:
        return f"{_kind(value)} instead of {_kind(target)}"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "the model's is an inference tensor, which can only be changed under torch.inference_mode()"
    if target.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)
    ):
        return "the model's is an expanded tensor, whose numbers share one place in memory"
    return "" if value.dtype is target.dtype else changed_number(value, target.dtype)


def changed_number(value: torch.Tensor, dtype: torch.dtype) -> str:
    """Say which number of a tensor would not survive a cast, apart from rounding; ``""`` if none."""
    numbers = value.detach()
    is_plain = type(numbers) is torch.Tensor and numbers.layout is torch.strided and not numbers.is_nested
    if not is_plain or numbers.is_meta or numbers.is_quantized:
        return ""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
        if not dtype.is_complex:
            if numbers[..., 1].any():
                return f"a complex number cannot become one of {name_of(dtype)}"
            numbers = numbers[..., 0]
    if numbers.is_floating_point() and numbers.element_size() < 4:
        numbers = numbers.float()  # where the limits below are exact, and float8 can be compared
    if dtype.is_floating_point or dtype.is_complex:
        kinds = torch.finfo if numbers.is_floating_point() else torch.iinfo
        limit = torch.finfo(dtype).max * (1 + torch.finfo(dtype).eps / 4)  # as far as it is rounded down
        if numbers.dtype is torch.bool or kinds(numbers.dtype).max <= limit:
            return ""
        changed = ((numbers > limit) | (numbers < -limit)) & ~numbers.isinf()
    else:
        cast = numbers.to(dtype)
        changed = (cast.to(numbers.dtype) != numbers) | ((cast < 0) != (numbers < 0))
    if not changed.any():
        return ""
    number = numbers[changed][0]
    return f"{number.item():g} would become {number.to(dtype).item():g} as {name_of(dtype)}"


def _kind(value: torch.Tensor) -> str:
    if is_packed(value):
        return f"a tensor of the class {printable(type(value).__name__)}"
    layout = "nested" if value.is_nested else name_of(value.layout)
    return f"a {'quantized ' * value.is_quantized}{layout} tensor"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What ``load_weights`` did.

    Attributes:
        path: The file.
        entry: The entry of the file with the weights, ``"state_dict"``; ``""`` if they are all it holds.
        loaded: Model keys that got their weight from the file.
        renamed: Checkpoint key -> model key, where the two differ.
        root: The attribute that was dropped (``"model."``) or added; ``""`` if none, a pair if both.
        others: Entries and attributes of the file with other weights of the same model, such as averages. Each can be
            the ``root`` of another call.
        kept: Counters of wrappers and of batch normalization that the file lacks; the model's own stay.
        missing: Model keys without a weight in the file, which kept their values; empty if ``strict``.
        unexpected: Checkpoint keys without a place in the model; empty if ``strict``.
        mismatched: (checkpoint key, its shape, shape in the model); empty if ``strict``.
        unused: Checkpoint keys beside the dropped root.
        unread: Classes and functions that the rest of the file names; none was imported or called.
        summary: The same in words.
    """

    path: str
    entry: str
    loaded: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    root: str | tuple[str, str] = ""
    others: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...] | None, tuple[int, ...] | None], ...] = ()
    unused: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    summary: str = ""

    def __str__(self) -> str:
        return self.summary


@collector_paused()
def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, root: Root = None, strict: bool = True, weights_only: bool = True
) -> LoadReport:
    """Load a checkpoint into a model, whatever ``DataParallel``, DDP, FSDP or ``torch.compile`` did to its keys.

    The file may be a Lightning checkpoint, a raw ``state_dict``, a dictionary that holds one, a pickled module or
    safetensors. Shards are one checkpoint: an ``index.json`` of safetensors or ``.bin`` files, and the folders of
    ``torch.distributed.checkpoint``, FSDP, ModelParallel and DeepSpeed ZeRO. Weights are read on the CPU and copied to
    where the model has them; other objects (hyperparameters, arguments) are left unread.

    Nothing is loaded by half: every error below is raised before the first number is copied. A model with load hooks or
    its own ``load_state_dict`` is loaded twice, first to check. Only an interrupt, an error in code that runs after the
    copying (``set_extra_state``), too little memory, a disk that cannot be read or a local file that is truncated
    meanwhile can leave a model partly loaded. The last two end the process (SIGBUS).

    Args:
        model: Any module, wrapped or not. Where it is sharded, every process has to call this.
        path: A local file or folder of shards, or the URL of a file that fsspec knows.
        root: Attribute that only one side has, such as ``"model."``, or the entry of the file with the weights. A pair
            such as ``("bert.", "encoder.")`` puts the model's second in the place of the first. ``None`` searches for
            one; ``""`` takes the names as they are.
        strict: Whether every key of the model and of the checkpoint must find one of its shape in the other. If false,
            what fits is loaded and the rest is in the report.
        weights_only: If false, everything in the file is opened, which may run code.

    Raises:
        CheckpointMismatchError: The checkpoint does not fit, or the model's types cannot hold its numbers.
        AmbiguousCheckpointError: Several sets of weights in it fit; say which with ``root``.
        KeyCollisionError: Two of its keys would become the same key of the model.
        BrokenCheckpointError: The file is no checkpoint, or damaged.
        UnsafeCheckpointError: Only running code could build one of its weights.

    Warns:
        UserWarning: The file also holds averages of these weights, or a part of the model is still on the meta device.

    Example:
        >>> report = load_weights(net, "last.ckpt")  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        last.ckpt: loaded 161 weights; removed "module." from 161 keys
    """
    content, unread = read_weights(path, weights_only=weights_only)
    entries = weights_in(content, path)
    with naming_file(path, type(model)):
        fit = fit_weights(model, entries, root, strict)
        plan, loaded = copy_weights(model, fit)
    warn_of_what_is_left(path, model, fit)
    return _report(str(path), fit, plan, loaded, unread)


def naming_file(path: str | os.PathLike[str], model_class: type) -> contextlib.AbstractContextManager[None]:
    """Begin the messages of checkpoint errors with the file and, where it does not fit, with the model."""
    return errors_about(printable_path(path), printable(model_class.__name__))


def warn_of_what_is_left(path: str | os.PathLike[str], model: nn.Module, fit: Fit) -> None:
    """Warn of averages that were not taken and of what has no numbers yet."""
    if any(map(is_average, fit.others)):
        warnings.warn(f"{printable_path(path)}: {fit.choice()}", stacklevel=4)
    tensors = (*model.named_buffers(), *(model.named_parameters() if fit.plan.missing else ()))
    without_numbers = [name for name, tensor in tensors if tensor.is_meta]
    if without_numbers:
        warnings.warn(
            f"{printable_path(path)}: still on the meta device, without numbers: {list_groups(without_numbers)}. The "
            "file does not hold them; fill them before you use the model.",
            stacklevel=4,
        )


def fit_weights(model: nn.Module, entries: Mapping[str, Mapping[str, Any]], root: Root, strict: bool) -> Fit:
    """Return the one entry of a checkpoint that fits the model."""
    dropped = (root if isinstance(root, str) else root[0] if root else "").rstrip(".")
    named = [entry for entry in entries if entry and f"{dropped}.".startswith(f"{entry}.")]
    if named:
        entry = max(named, key=len)
        inside = dropped.removeprefix(entry).lstrip(".")
        rest = (inside, root[1]) if isinstance(root, tuple) else inside or None
        return _fit(model, entry, entries[entry], rest, strict)
    fits: list[Fit] = []
    refusals = []
    for entry, weights in likely(dict(entries)).items():
        try:
            fits.append(_fit(model, entry, weights, root, strict))
        except (CheckpointMismatchError, KeyCollisionError) as error:  # noqa: PERF203 - a handful of entries
            refusals.append(error)
    if not fits:
        raise refusals[0]
    if not strict:
        most = max(len(fit.plan.renames) for fit in fits)
        fits = [fit for fit in fits if len(fit.plan.renames) == most]
    meant = preferred(fits, lambda fit: fit.entry)
    if len(meant) > 1:
        names = [quoted(fit.entry) for fit in fits]
        raise AmbiguousCheckpointError(
            f"Several entries of the file fit: {' and '.join(names)}. Choose one with lightning_gpu_tools.load_weights "
            f"and root={' or root='.join(names)}."
        )
    fit = meant[0]

    def fits_as_well(entry: str) -> bool:
        if entries[entry].keys() == fit.weights.keys():
            return True
        with contextlib.suppress(CheckpointError):
            return len(_fit(model, entry, entries[entry], None, strict).plan.renames) >= len(fit.plan.renames)
        return False

    others = filter(fits_as_well, others_of_this_model(fit.entry, entries)) if root is None else ()
    return fit._replace(others=(*others, *fit.plan.others))


def _fit(model: nn.Module, entry: str, weights: Mapping[str, Any], root: Root, strict: bool) -> Fit:
    keys, state = read_model(model)
    plan = plan_renaming(shapes_of(weights), keys, root=root, strict=strict, same_tensor=lambda: same_tensors(weights))
    return Fit(entry, weights, plan, keys, state, strict)


def copy_weights(model: nn.Module, fit: Fit) -> tuple[RenamePlan, tuple[str, ...]]:
    """Load all or nothing; return the plan as it came out, and the model keys that got a weight."""
    check_before_copying(model, fit, leave_out_misfits=not fit.strict)
    renamed = fit.renamed(fit.weights)
    own_what_modules_keep(renamed, fit.keys)
    left_out: list[str] = []

    def prepare(module: nn.Module, name: str, key: str, target: torch.Tensor, state_dict: dict[str, Any]) -> None:
        value = state_dict[key]
        if not fit.strict and not is_copied_into(shape_of(value), shape_of(target)):
            left_out.append(key)
            del state_dict[key]
            return
        value = state_dict[key] = _sharded_like(value, target)
        if target.is_meta and not value.is_meta:  # there is nothing to copy into
            if id(target) not in made:
                empty = torch.empty_like(target, device=value.device, requires_grad=False)
                made[id(target)] = nn.Parameter(empty, target.requires_grad) if name in module._parameters else empty
            setattr(module, name, made[id(target)])

    made: dict[int, torch.Tensor] = {}
    with renewing_deepspeeds_copies(model), before_each_copy(model, prepare):
        found = load_state(model, renamed, fit.strict, "The model may be partly loaded. Build it anew.")
    if fit.strict:  # then the model's own code has taken what had no place
        plan = dataclasses.replace(fit.plan, missing=(), unexpected=(), clashes={})
        return plan, tuple(key for key in fit.state if key not in plan.kept)
    if not hasattr(found, "missing_keys"):  # the model's own load_state_dict does not say
        return fit.plan, (*fit.plan.renames.values(), *fit.plan.tied)
    return _came_out(model, fit, found, left_out)


def own_what_modules_keep(weights: dict[str, Any], model: ModelKeys) -> None:
    """Copy those weights out of the mapped file that loading does not copy into the model.

    An ``_extra_state`` may hold tensors, and a module that loads itself may keep its own, as torchmetrics does.
    """
    for key, value in weights.items():
        if not isinstance(value, torch.Tensor):
            weights[key] = copy.deepcopy(value)
        elif is_inside(key, model.self_loading):  # a deep copy of a plain tensor is one of its whole storage
            weights[key] = value.detach().clone() if type(value) is torch.Tensor else copy.deepcopy(value)


def _sharded_like(value: Any, target: Any) -> Any:
    if is_sharded(value) and not part_of(value):  # each process has all of it
        value = value.to_local()
    if is_sharded(value) == is_sharded(target):
        return value
    if is_sharded(value):
        return value.full_tensor()
    from torch.distributed.tensor import DTensor, Replicate

    # Every process has read the file, so each takes its part without asking the others.
    mesh = target.device_mesh
    whole = DTensor.from_local(value.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=target.placements)


def _came_out(model: nn.Module, fit: Fit, found: Any, left_out: Sequence[str]) -> tuple[RenamePlan, tuple[str, ...]]:
    plan, offered = fit.plan, fit.plan.left_over(strict=False)
    # Torch names modules that the model's hooks leave out of its keys.
    bare = without_private_segments
    shown = {bare(key): key for key in fit.state}
    places = {key: bare(name) for key, name in offered.items()}
    misfits, homeless = {*map(bare, left_out)}, {*map(bare, found.unexpected_keys)}
    clashes = {key: name for key, name in plan.clashes.items() if key not in places or places[key] in misfits}
    missing = {*map(bare, found.missing_keys)} - {places.get(key) for key in clashes}
    invented = homeless - {*places.values()}  # by hooks
    outcome = dataclasses.replace(
        plan,
        missing=tuple(shown.get(name, name) for name in map(bare, found.missing_keys) if name in missing),
        unexpected=(
            *(key for key in plan.unexpected if key not in places or places[key] in homeless),
            *(name for name in found.unexpected_keys if bare(name) in invented),
        ),
        clashes=clashes,
    )
    without = {*missing, *misfits, *homeless, *map(bare, plan.kept)}
    # A state_dict of the model's own may leave out what torch loads all the same.
    live = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} if offered else set()
    names = dict.fromkeys((*fit.state, *(name for name in offered.values() if name in live)))
    return outcome, tuple(name for name in names if bare(name) not in without)


def _report(path: str, fit: Fit, plan: RenamePlan, loaded: tuple[str, ...], unread: tuple[str, ...]) -> LoadReport:
    dropped, added = plan.dropped_root, plan.added_root
    lists = {
        "kept": plan.kept,
        "missing": plan.missing,
        "unexpected": plan.unexpected,
        "not used": plan.unused,
        "other shape": tuple(plan.clashes),
    }
    words = (
        f"{printable(Path(path).name)}: loaded {len(loaded) - len(plan.tied)} weights",
        plan.describe(),
        f"{len(plan.tied)} more are tied to these" if plan.tied else "",
        *(f"{label}: {list_groups(keys)}" for label, keys in lists.items() if keys),
        describe_unread(unread),
        fit.choice() if fit.others else "",
    )
    return LoadReport(
        path=path,
        entry=fit.entry,
        loaded=loaded,
        renamed={old: new for old, new in plan.renames.items() if old != new},
        root=(dropped, added) if dropped and added else dropped or added,
        others=fit.others,
        kept=plan.kept,
        missing=plan.missing,
        unexpected=plan.unexpected,
        mismatched=tuple((old, shape_of(fit.weights[old]), fit.keys.shapes[new]) for old, new in plan.clashes.items()),
        unused=plan.unused,
        unread=unread,
        summary="; ".join(filter(None, words)),
    )
