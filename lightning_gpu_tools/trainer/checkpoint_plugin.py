"""A checkpoint plugin for the Trainer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.checkpoints.content import (
    LIGHTNING_VERSION,
    MODEL_STATES,
    check_contents,
    is_lightning_checkpoint,
    is_named,
)
from lightning_gpu_tools.checkpoints.copying import check_before_copying, own_what_modules_keep
from lightning_gpu_tools.checkpoints.formats import checkpoint_at, opened_source
from lightning_gpu_tools.checkpoints.key_renaming import RenamePlan, clean_names, is_average
from lightning_gpu_tools.checkpoints.key_tree import is_wrapper_name, list_groups
from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.state_dicts import (
    errors_about,
    own_all_but_weights,
    read_model,
    weights_in,
    wrapper_paths,
)
from lightning_gpu_tools.checkpoints.structure import compare_with_checksums
from lightning_gpu_tools.checkpoints.weights import fit_weights
from lightning_gpu_tools.checkpoints.writing import write_checkpoint
from lightning_gpu_tools.errors import (
    CheckpointError,
    CheckpointMismatchError,
    KeyCollisionError,
    UnsafeCheckpointError,
)
from lightning_gpu_tools.files import remove
from lightning_gpu_tools.trainer import compat
from lightning_gpu_tools.trainer.families import CheckpointIO, GuardedCallback, LightningModule, Trainer, overrides
from lightning_gpu_tools.trainer.import_hooks import when_imported
from lightning_gpu_tools.trainer.load_from_checkpoint import as_lightning_checkpoint
from lightning_gpu_tools.units import checked, printable, printable_path


class PortableCheckpointIO(CheckpointIO):
    """A checkpoint plugin that makes the Trainer's checkpoints load anywhere and never leaves a partial file.

    On save, it removes the key prefixes of ``DataParallel``, DDP, ``torch.compile`` and similar wrappers. On load
    (``ckpt_path`` of fit, validate, test and predict), it adds the prefixes that the current model needs. Files that
    Lightning alone can resume from can still be resumed. A file is moved into place once it is complete and on disk;
    local files are mapped instead of read. By default, everything is loaded to the CPU with ``weights_only=True``.
    Anything other than a Trainer's checkpoint (Fabric's dictionaries, the bare weights that ``ddp_spawn`` sends to its
    parent) is returned unchanged.

    Args:
        inner: Plugin that reads and writes the files, so that this one only changes keys. If the inner plugin leaves
            reading to Lightning, this plugin reads. ``None``: this plugin does both.
        verify: Whether to verify a file's checksums before loading; torch does not detect corruption.

    Example:
        >>> trainer = Trainer(plugins=[PortableCheckpointIO()])  # doctest: +SKIP
    """

    @checked
    def __init__(self, inner: CheckpointIO | None = None, *, verify: bool = False) -> None:
        base: Any = inner
        while hasattr(base, "checkpoint_io"):  # Lightning's wrappers, such as AsyncCheckpointIO
            base = base.checkpoint_io
        if inner is not None and not hasattr(base, "load_checkpoint"):
            raise TypeError(f"inner must be a plugin that reads and writes checkpoints, got {printable(repr(inner))}.")
        self.inner = inner
        self.verify = verify
        self._trainer: Callable[[], Trainer | None] = _nobody
        plugins.add(self)

    def attach(self, trainer: Trainer) -> None:
        """Use the keys of this trainer's model from now on, without keeping the trainer alive.

        A callback from Lightning's entry point calls this at the start of a run, and before each full checkpoint.
        """
        self._trainer = weakref.ref(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint without modifying the dictionary; warn if its keys keep the prefixes of wrappers.

        Raises:
            TypeError: ``storage_options`` are given, but there is no inner plugin.
            OSError: The file cannot be written; an older file at ``path`` is unchanged.
        """
        portable = self._make_portable(checkpoint)
        if self.inner is not None:
            self.inner.save_checkpoint(portable, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError(f"PortableCheckpointIO does not support storage_options, got {storage_options!r}.")
        write_checkpoint(portable, path)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Load a checkpoint with the keys of the trainer's model, to the CPU unless ``map_location`` is given.

        Raises:
            CheckpointNotFoundError: There is nothing at ``path``.
            BrokenCheckpointError: The file is not a checkpoint, or it is damaged.
            UnsafeCheckpointError: It holds more than plain data, and ``weights_only`` is not ``False``.
            CheckpointMismatchError: It does not fit the model, or the model's types cannot hold its values. This is not
                checked if the model overrides ``on_load_checkpoint`` or ``load_state_dict``, which may make it fit.
        """
        checkpoint: Any
        if self.inner is not None and not compat.loads_with_torch(self.inner):
            if self.verify:
                with opened_source(path, to_load=False) as structure:
                    compare_with_checksums(structure)
            given = {"map_location": map_location, "weights_only": weights_only}
            options.update((name, value) for name, value in given.items() if value is not None)
            checkpoint = self.inner.load_checkpoint(path, **options)
            check_contents(checkpoint, path)
        else:
            path = checkpoint_at(path)
            device = "cpu" if map_location is None else map_location
            try:
                content = read_checkpoint(
                    path, map_location=device, weights_only=weights_only is not False, verify=self.verify
                )
            except UnsafeCheckpointError as error:
                trainer = self._trainer()
                if trainer is not None and trainer.state.fn:
                    name, shown = trainer.state.fn.value, printable_path(path)
                    error.args = (
                        f"{error}\n  If you trust its author and have Lightning 2.6, open all of it, which may run "
                        f"code: trainer.{name}(model, ckpt_path={shown!r}, weights_only=False)",
                    )
                raise
            checkpoint = own_all_but_weights(content, path)
        fitted: dict[str, Any] = self._fit_to_model(checkpoint, path)
        return fitted

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint file, link or folder, if there is one."""
        if self.inner is not None:
            self.inner.remove_checkpoint(path)
        else:
            remove(path)

    def teardown(self) -> None:
        """Tear down the inner plugin."""
        if self.inner is not None:
            self.inner.teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": _nobody}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        plugins.add(self)  # ddp_spawn sends a copy to its processes

    def _model(self) -> LightningModule | None:
        trainer = self._trainer()
        return None if trainer is None else trainer.lightning_module

    def _make_portable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        if not is_lightning_checkpoint(checkpoint):
            return checkpoint
        model = self._model()
        if model is not None:
            try:
                return _cleaned(checkpoint, model)
            except KeyCollisionError as error:
                why_kept = str(error)
        elif any(is_wrapper_name(segment) for key in checkpoint["state_dict"] for segment in key.split(".")):
            why_kept = "no Trainer that has begun a run uses this plugin, or LIGHTNING_GPU_TOOLS_DISABLE is set."
        else:
            return checkpoint
        warnings.warn(f"The keys of the checkpoint keep the prefixes of wrappers: {why_kept}", stacklevel=3)
        return checkpoint  # the same file as without this plugin

    def _fit_to_model(self, checkpoint: Any, path: str | Path) -> Any:
        trainer, model = self._trainer(), self._model()
        if trainer is None or model is None:
            return checkpoint
        # A user's hook runs next, and may change the checkpoint, the model or the loading.
        hooks = ("on_load_checkpoint", "load_state_dict")
        may_still_change = any(overrides(model, "LightningModule", hook) for hook in hooks)
        if not is_lightning_checkpoint(checkpoint):
            # Outside of a run, it belongs to something else (ddp_spawn's parent, Fabric).
            is_for_hooks = may_still_change and isinstance(checkpoint, Mapping) and LIGHTNING_VERSION in checkpoint
            if trainer.state.status != "running" or is_for_hooks:
                return checkpoint
        checkpoint = {"epoch": 0, "global_step": 0, **as_lightning_checkpoint(checkpoint, path, trainer)}
        try:
            with errors_about(path, type(model)):
                fit = fit_weights(model, weights_in(checkpoint, path), None, model.strict_loading)
        except CheckpointError as error:
            is_lax = not model.strict_loading and isinstance(error, CheckpointMismatchError)
            if "state_dict" not in checkpoint or not (may_still_change or is_lax):
                if "root=" in str(error) or "strict=" in str(error):
                    call = f"lightning_gpu_tools.load_weights(model, {printable_path(path)!r}, ...)"
                    advice = f"A Trainer does not take these arguments. Call {call} instead of passing ckpt_path."
                    error.args = (f"{error}\n  {advice}", *error.args[1:])
                raise
            if not may_still_change:
                rank_zero_warn(
                    f"{error}\n  strict_loading is False, so only weights with the model's names are loaded."
                )
            own_what_modules_keep(checkpoint["state_dict"], read_model(model)[0])
            return checkpoint
        if not may_still_change:
            with errors_about(path, type(model)):
                check_before_copying(model, fit, leave_out_misfits=False)
        plan = fit.plan
        unused = f"not used: {list_groups(plan.unused)}" if plan.dropped_root and plan.unused else ""
        choice = fit.choice() if any(map(is_average, fit.others)) else ""
        if said := "; ".join(filter(None, (plan.describe(), unused, choice))):
            rank_zero_info(f"{printable_path(path)}: {said}.")
        fitted = {**checkpoint, "state_dict": fit.renamed(fit.weights)}
        own_what_modules_keep(fitted["state_dict"], fit.keys)
        if is_named(checkpoint.get("current_model_state")):
            fitted["current_model_state"] = fit.renamed(checkpoint["current_model_state"])
        if "optimizer_states" in checkpoint:
            fitted["optimizer_states"] = plan.rename_optimizers(checkpoint["optimizer_states"])
        return fitted


when_imported("plugins.io.checkpoint_io", lambda module: module.CheckpointIO.register(PortableCheckpointIO))


class PortableCheckpointHooks(GuardedCallback):
    """A callback that hands the trainer to its plugins, in the process that loads and saves."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin: Any = trainer.strategy.checkpoint_io
        while plugin is not None:
            if isinstance(plugin, PortableCheckpointIO):
                plugin.attach(trainer)
            # Lightning's wrappers, such as AsyncCheckpointIO; then wrappers with our attribute name.
            plugin = getattr(plugin, "checkpoint_io", None) or getattr(plugin, "inner", None)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.setup(trainer, pl_module, "")  # again: the plugin may have served another Trainer since


plugins: weakref.WeakSet[PortableCheckpointIO] = weakref.WeakSet()


def _nobody() -> None:
    return None


def _cleaned(checkpoint: dict[str, Any], model: LightningModule) -> dict[str, Any]:
    portable, wrappers = dict(checkpoint), wrapper_paths(model)
    for name in MODEL_STATES:
        state = checkpoint.get(name)
        if isinstance(state, Mapping):
            plan = RenamePlan(renames=clean_names(state, wrappers))
            portable[name] = plan.apply(state)
            if name == "state_dict" and "optimizer_states" in checkpoint:
                portable["optimizer_states"] = plan.rename_optimizers(checkpoint["optimizer_states"])
    return portable
