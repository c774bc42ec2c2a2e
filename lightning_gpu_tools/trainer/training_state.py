"""Whether a Trainer can resume from the loops, callbacks, optimizers and schedulers of a checkpoint.

Lightning and torch index these unchecked, some only at the first step. So progress is compared with what the Trainer's
loops would save, and the rest is loaded into a stand-in by the code that is about to load it. The user's own classes,
and their errors, are left alone.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_gpu_tools.checkpoints.key_tree import counted
from lightning_gpu_tools.checkpoints.structure import check_entries, fault_in_progress, is_like
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointMismatchError
from lightning_gpu_tools.trainer.families import Callback, Trainer, base_of, is_lightnings
from lightning_gpu_tools.units import printable, printable_path

_START_ANEW = "To start anew from its weights, call lightning_gpu_tools.load_weights and fit without ckpt_path."


def check_loop(checkpoint: Mapping[str, Any], trainer: Trainer, path: object) -> None:
    """Raise ``BrokenCheckpointError`` if the loop that is about to run does not save such progress."""
    check_entries(checkpoint, path, ["loops"])
    loops = checkpoint.get("loops")
    if loops is None or trainer.state.fn is None:
        return
    name = f"{trainer.state.fn.value}_loop"
    saved = loops.get(name)
    if isinstance(saved, Mapping):
        own = getattr(trainer, name).state_dict()
        # Lightning skips the parts that an older version has not saved.
        faults = (fault_in_progress(saved[part], own[part], f"{name}.{part}") for part in own if part in saved)
        fault = next(filter(None, faults), "")
    else:
        fault = f'has no dictionary "{name}"'
    if fault:
        raise BrokenCheckpointError(
            f'"loops" of {printable_path(path)} {fault}. Take "loops" out and save the checkpoint again, to start at '
            "epoch 0."
        )


def check_callbacks(checkpoint: Mapping[str, Any], trainer: Trainer, path: object) -> None:
    """Raise ``CheckpointMismatchError`` if a callback's state that Lightning's own code loads cannot be loaded."""
    check_entries(checkpoint, path, ["callbacks"])
    states = checkpoint.get("callbacks") or {}
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    averages = ("current_model_state", "averaging_state")
    if trainer.state.fn == "fit" and "callbacks" in checkpoint and all(name in checkpoint for name in averages):
        # Entries of others may have these names.
        reads_them = any(base_of(one, "WeightAveraging") and is_lightnings(one.on_load_checkpoint) for one in callbacks)
        check_entries(checkpoint, path, averages if reads_them else ())
    for callback in callbacks:
        if callback.state_key not in states or not is_lightnings(callback.load_state_dict, callback.state_dict):
            continue
        name = f'the state of {type(callback).__name__} in "callbacks"'
        stand_in = copy.copy(callback)
        with _explaining(name, path):
            if states[callback.state_key]:  # as Lightning asks
                stand_in.load_state_dict(copy.deepcopy(states[callback.state_key]))
        _compare(stand_in.state_dict(), callback.state_dict(), name, path)


def may_be_completed(checkpoint: Mapping[str, Any], trainer: Trainer) -> bool:
    """Whether a hook of a callback will see the checkpoint after the weights are loaded, and may change it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return checkpoint.get("callbacks") is not None and not all(
        is_lightnings(callback.on_load_checkpoint) for callback in callbacks
    )


def check_progress(checkpoint: Mapping[str, Any], trainer: Trainer, path: object) -> None:
    """Raise an error for what ``fit`` cannot restore, as far as it is known without the optimizers.

    ``BrokenCheckpointError`` if Lightning does not write such an entry, else ``CheckpointMismatchError``.
    """
    missing = [name for name in ("optimizer_states", "lr_schedulers") if name not in checkpoint]
    if missing and (trainer.strategy.lightning_restore_optimizer or "lr_schedulers" in missing):
        raise CheckpointMismatchError(
            f'{printable_path(path)} holds weights, but no "{missing[0]}" to resume from: it was saved with '
            f"save_weights_only=True, or not by a Trainer. {_START_ANEW}"
        )
    check_loop(checkpoint, trainer, path)
    precision = trainer.precision_plugin
    name = type(precision).__qualname__
    if name in checkpoint and is_lightnings(precision.load_state_dict):
        with _explaining(f'"{name}"', path):
            copy.deepcopy(precision).load_state_dict(copy.deepcopy(checkpoint[name]))


def check_before_resuming(checkpoint: Mapping[str, Any], trainer: Trainer, path: object) -> None:
    """Raise the same, and an error for states of optimizers and schedulers that do not fit them.

    For ``fit``, once the optimizers are there and all hooks have run.
    """
    check_progress(checkpoint, trainer, path)
    configs = trainer.lr_scheduler_configs
    for config, state in zip(configs, _paired(checkpoint, "lr_schedulers", len(configs), path), strict=False):
        if _is_torchs(config.scheduler):
            _check_scheduler(config.scheduler, state, path)
    if not trainer.strategy.lightning_restore_optimizer:
        return
    number = len(trainer.optimizers)
    states = _paired(checkpoint, "optimizer_states", number, path)
    saved = len(checkpoint["optimizer_states"])
    if saved != number:
        rank_zero_warn(
            f"{printable_path(path)} holds the states of {counted(saved, 'optimizer')}, and the model has {number}. "
            "Lightning pairs them in order; the rest start without a state."
        )
    for index, (optimizer, state) in enumerate(zip(trainer.optimizers, states, strict=False)):
        name = f'"optimizer_states"[{index}]'
        if not isinstance(state, Mapping) and _is_torchs(optimizer):
            raise _mismatch(name, path, f"is {printable(repr(state))}, not the state_dict of an optimizer")
        _check_when_it_loads(optimizer, name, path)


def _paired(checkpoint: Mapping[str, Any], name: str, number: int, path: object) -> list[Any]:
    """Return the first ``number`` states, which Lightning reads in order; it takes them from anything iterable."""
    check_entries(checkpoint, path, [name])
    return [*itertools.islice(checkpoint[name], number)]


def _check_when_it_loads(optimizer: Optimizer, name: str, path: object) -> None:
    # Until then hooks may add groups of parameters, as finetuning does. Only once.
    pending = [name]

    def check(optimizer: Optimizer, state: dict[str, Any]) -> None:
        if pending:
            _check_optimizer(optimizer, state, pending.pop(), path)

    optimizer.register_load_state_dict_pre_hook(check)


def _check_optimizer(optimizer: Optimizer, state: Mapping[str, Any], name: str, path: object) -> None:
    """Check that one of torch's optimizers can load a state and step with it; of other classes the groups."""
    with _explaining(name, path):
        saved = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        kind = type(optimizer).__name__
        raise _mismatch(name, path, f"has groups of {saved} parameters, and {kind} has groups of {own}")
    if not _is_torchs(optimizer):
        return
    with _explaining(name, path):
        small = _in_small(optimizer)
        small.load_state_dict(_state_in_small(state, optimizer))
        if _can_step(_in_small(optimizer)):
            _step(small)
    for group, own_group in zip(small.param_groups, optimizer.param_groups, strict=True):
        _compare(group, {**own_group, "params": None}, name, path)  # also what schedulers have put there


def _can_step(optimizer: Optimizer) -> bool:
    try:
        _step(optimizer)
    except Exception:  # noqa: BLE001 - LBFGS wants the loss, SparseAdam sparse gradients
        return False
    return True


def _step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _in_small(optimizer: Optimizer) -> Optimizer:
    """Return a like optimizer without a state, with a few numbers for each parameter."""
    groups = [
        {**group, "params": [_few(value, value.shape).to(value.device) for value in group["params"]]}
        for group in optimizer.param_groups
    ]
    small = type(optimizer).__new__(type(optimizer))
    small.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    return small


def _state_in_small(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    keys = (key for group in state["param_groups"] for key in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    shapes = {key: parameter.shape for key, parameter in zip(keys, parameters, strict=True)}
    return {**state, "state": {key: _few_of(value, shapes.get(key, ())) for key, value in state["state"].items()}}


def _few_of(value: Any, shape: Sequence[int]) -> Any:
    if isinstance(value, dict):
        return {key: _few_of(item, shape) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return _few(value, shape) if value.ndim else value.clone()  # the count of steps, which a step changes


def _few(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return zeros: two along each dimension in common with ``shape``, one or three along others."""
    wanted = [*[None] * value.ndim, *shape][len(shape) :]
    size = [min(have, 2 if have == want else 3) for have, want in zip(value.shape, wanted, strict=True)]
    return torch.zeros(size, dtype=value.dtype)


def _check_scheduler(scheduler: Any, state: Mapping[str, Any], path: object) -> None:
    name = f'the state of {type(scheduler).__name__} in "lr_schedulers"'
    own = scheduler.state_dict()
    stand_in = copy.copy(scheduler)
    with _explaining(name, path):
        stand_in.load_state_dict(copy.deepcopy(state))
    _compare(stand_in.state_dict(), own, name, path)


def _compare(values: Mapping[str, Any], own: Mapping[str, Any], name: str, path: object) -> None:
    for entry, value in values.items():
        if not is_like(value, own.get(entry)):
            raise _mismatch(name, path, f'has {printable(repr(value))} for "{printable(entry)}"')


def _is_torchs(thing: object) -> bool:
    return f"{type(thing).__module__}.".startswith("torch.optim.")


def _mismatch(name: str, path: object, fault: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{printable_path(path)} does not fit: {name} {fault}. Configure the training as it was when the checkpoint "
        f"was saved. {_START_ANEW}"
    )


@contextlib.contextmanager
def _explaining(name: str, path: object) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what loads it later warns, too
            yield
    except Exception as error:  # noqa: BLE001 - Lightning's and torch's code checks little it reads
        raise _mismatch(name, path, f"cannot be used ({type(error).__name__}: {printable(error, 300)})") from None
