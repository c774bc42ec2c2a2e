"""Build a LightningModule from a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from lightning_gpu_tools.checkpoints.content import (
    LIGHTNING_VERSION,
    describe_content,
    is_lightning_checkpoint,
    is_named,
)
from lightning_gpu_tools.checkpoints.copying import copy_weights
from lightning_gpu_tools.checkpoints.formats import checkpoint_at
from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.state_dicts import errors_about, own_all_but_weights, weights_in
from lightning_gpu_tools.checkpoints.weights import fit_weights, warn_of_averages
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, UnsafeCheckpointError
from lightning_gpu_tools.trainer.families import LightningModule, lookup, version_of
from lightning_gpu_tools.units import checked, printable, printable_path

Module = TypeVar("Module", bound="LightningModule")

# LightningCLI's mark in a checkpoint with nested classes to build. Any other value there could run any function.
_CLI_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def as_lightning_checkpoint(content: Any, path: str | os.PathLike[str], taker: object) -> dict[str, Any]:
    """Return a copy of a checkpoint, or bare weights, as a checkpoint of ``taker``'s version of Lightning.

    Raises:
        BrokenCheckpointError: There are no weights in it, or Lightning cannot migrate it from its version.
    """
    if not is_lightning_checkpoint(content):
        entries = weights_in(content, path)
        return {LIGHTNING_VERSION: version_of(taker)[1], **({"state_dict": entries[""]} if "" in entries else entries)}
    changed_in_place = {name: content[name] for name in ("callbacks", "loops") if name in content}
    try:
        migrate = lookup(taker, "utilities.migration.utils:migrate_checkpoint")
        return cast(dict[str, Any], migrate({**content, **copy.deepcopy(changed_in_place)})[0])
    except Exception as error:  # noqa: BLE001 - Lightning's own functions do not check the file's content
        version = printable(content[LIGHTNING_VERSION])
        raise BrokenCheckpointError(
            f'{printable_path(path)} claims to be from Lightning "{version}", but cannot be migrated from that version '
            f"({type(error).__name__}: {printable(error)}). Use an earlier checkpoint, or load its weights with "
            "lightning_gpu_tools.load_weights."
        ) from None


def _build_module(
    model_class: type[Module],
    checkpoint: Mapping[str, Any],
    path: str | os.PathLike[str],
    hparams_file: str | os.PathLike[str] | None,
    arguments: Mapping[str, Any],
) -> Module:
    """Call ``model_class`` with the hyperparameters of a checkpoint; ``arguments`` take precedence over them."""
    given: Any = checkpoint.get(model_class.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if hparams_file is not None:
        if not os.fspath(hparams_file).endswith((".yaml", ".yml")):
            raise ValueError(f"hparams_file must end in .yaml or .yml, got {os.fspath(hparams_file)!r}.")
        given = lookup(model_class, "core.saving:load_hparams_from_yaml")(os.fspath(hparams_file))
    elif not is_named(given):
        raise BrokenCheckpointError(
            f"{printable_path(path)} has {describe_content(given)} for hyperparameters, not a dictionary with string "
            "keys. Pass them in an hparams_file."
        )
    values = {**given, **arguments}
    parameters = inspect.signature(model_class).parameters
    whole = checkpoint.get(model_class.CHECKPOINT_HYPER_PARAMS_NAME)
    if isinstance(whole, str) and whole in parameters and whole != "kwargs":  # the class takes all as one argument
        kind: Any = checkpoint.get(model_class.CHECKPOINT_HYPER_PARAMS_TYPE)  # OmegaConf's class
        is_mapping = isinstance(kind, type) and issubclass(kind, Mapping)
        values = {whole: kind(values) if is_mapping else values, **arguments}
    instantiator = values.pop("_instantiator", None)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        values = {name: value for name, value in values.items() if name in parameters or name == "_class_path"}
    if instantiator is None:
        values.pop("_class_path", None)
        return model_class(**values)
    return _build_for_cli(model_class, instantiator, values)


def _build_for_cli(model_class: type[Module], instantiator: Any, values: dict[str, Any]) -> Module:
    if instantiator not in _CLI_INSTANTIATORS:
        raise UnsafeCheckpointError(
            f"The checkpoint requests {printable(repr(instantiator))} to build its model, but only LightningCLI's own "
            "function is allowed."
        )
    class_path = values.get("_class_path")
    if class_path is not None:
        module, _, name = str(class_path).rpartition(".")
        named = getattr(sys.modules.get(module), name, None)
        if not (isinstance(named, type) and issubclass(named, model_class)):
            raise UnsafeCheckpointError(
                f"The checkpoint requests the class {printable(repr(class_path))}, which is not a "
                f"{model_class.__name__} that this program has imported. If you trust the checkpoint, import it first."
            )
    return cast(Module, lookup(model_class, "cli:instantiate_module")(model_class, values))


@checked
def load_from_checkpoint(
    model_class: type[Module],
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    map_location: Any = None,
    hparams_file: str | os.PathLike[str] | None = None,
    strict: bool | None = None,
    weights_only: bool = True,
    **kwargs: Any,
) -> Module:
    """Build a LightningModule with the hyperparameters in a checkpoint and load its weights, whatever wrapped them.

    It differs from ``model_class.load_from_checkpoint`` in three ways: keys are fitted to the model as in
    :func:`load_weights`, the model is on the CPU by default, and files that hold more than plain data are refused, even
    those from a URL. A class's own ``load_from_checkpoint`` is not used.

    Args:
        model_class: The LightningModule's class.
        path: A Lightning checkpoint, or a raw ``state_dict`` if ``kwargs`` suffice to build the model; or a folder with
            one, such as ``lightning_logs/version_0``.
        root: As for :func:`load_weights`.
        map_location: Device for the weights and the model, or anything else that ``torch.load`` takes.
        hparams_file: A ``.yaml`` file with hyperparameters, in place of those in the checkpoint.
        strict: As for :func:`load_weights`; ``None`` leaves it to the model's ``strict_loading``.
        weights_only: If false, opening the file may run code in it.
        **kwargs: Arguments of ``model_class``, in place of those in the checkpoint.

    Raises:
        CheckpointMismatchError: The checkpoint does not fit.
        UnsafeCheckpointError: It holds more than plain data, such as hyperparameters of other classes.
        BrokenCheckpointError: An entry is not what Lightning writes, or the file is damaged.
        ValueError: ``hparams_file`` is not ``.yaml``.
        TypeError: ``model_class`` is not the class of a LightningModule.
    """
    if not isinstance(model_class, type) or not hasattr(model_class, "load_from_checkpoint"):
        name = printable(type(model_class).__name__)
        raise TypeError(
            f"model_class must be the class of a LightningModule, got an object of {name}. Pass the class itself: "
            "load_from_checkpoint(ModelClass, path). For a model that exists, use load_weights(model, path)."
        )
    path = checkpoint_at(path)
    device = "cpu" if map_location is None else map_location
    try:
        content = read_checkpoint(path, map_location=device, weights_only=weights_only)
    except UnsafeCheckpointError as error:
        error.args = (
            f"{error}\n  Building a {model_class.__name__} also needs the rest. If you trust the author of the file: "
            f"load_from_checkpoint({model_class.__name__}, {printable_path(path)!r}, weights_only=False)",
        )
        raise
    checkpoint = as_lightning_checkpoint(own_all_but_weights(content, path), path, model_class)
    model = _build_module(model_class, checkpoint, path, hparams_file, kwargs)
    strict = model.strict_loading if strict is None else strict
    model.configure_model()
    # The hook sees the model's own names, as in a Trainer, and may make the weights fit.
    may_wait = (CheckpointError,) if "state_dict" in checkpoint else ()
    chosen = None
    with errors_about(path, model_class), contextlib.suppress(*may_wait):
        chosen = fit_weights(model, weights_in(checkpoint, path), root, strict)
        checkpoint["state_dict"], root = chosen.renamed(chosen.weights), None
    model.on_load_checkpoint(checkpoint)
    with errors_about(path, model_class):
        fit = fit_weights(model, weights_in(checkpoint, path), root, strict)
        copy_weights(model, fit)
    warn_of_averages(path, chosen or fit)
    if map_location is None:
        return model
    first = next((value for value in fit.weights.values() if isinstance(value, torch.Tensor)), torch.empty(0))
    return model.to(first.device)
