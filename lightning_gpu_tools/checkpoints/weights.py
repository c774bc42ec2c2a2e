"""All-or-nothing loading of any checkpoint into any module, regardless of wrappers."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from lightning_gpu_tools.checkpoints.content import Entries, likely
from lightning_gpu_tools.checkpoints.copying import Fit, copy_weights, has_same_numbers
from lightning_gpu_tools.checkpoints.formats import checkpoint_at
from lightning_gpu_tools.checkpoints.inert_pickle import describe_unread
from lightning_gpu_tools.checkpoints.key_renaming import RenamePlan, is_average, plan_renaming, preferred
from lightning_gpu_tools.checkpoints.key_tree import list_groups, quoted, shortened
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, read_weights
from lightning_gpu_tools.checkpoints.state_dicts import (
    errors_about,
    others_of_this_model,
    read_model,
    shape_of,
    weights_in,
)
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointError, CheckpointMismatchError
from lightning_gpu_tools.patches import collector_paused
from lightning_gpu_tools.units import checked, plural, printable, printable_path


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The result of ``load_weights``.

    Attributes:
        path: Path of the file.
        entry: Entry of the file with the weights, such as ``"state_dict"``; ``""`` if the file holds only weights.
        loaded: Model keys with a weight from the file.
        renamed: Checkpoint key -> model key, for keys that differ.
        root: Attribute that was dropped (``"model."``) or added; ``""`` if none.
        others: Entries and attributes of the file with other weights of the same model, such as averages. To load one,
            pass it as ``root``.
        buffers: Checkpoint keys of buffers that the model does not save, with the same numbers as in the model.
        kept: Counters of wrappers and of batch normalization that the file lacks; the model keeps its values.
        missing: Model keys without a weight in the file, which keep their values; empty if ``strict``.
        unexpected: Checkpoint keys that the model does not have; empty if ``strict``.
        mismatched: (checkpoint key, its shape, shape in the model); empty if ``strict``.
        unused: Checkpoint keys outside the dropped root.
        unread: Classes and functions in the rest of the file; none was imported or called.
        summary: The result as text.
    """

    path: str
    entry: str
    loaded: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    others: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
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
@checked
def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    strict: bool = True,
    weights_only: bool = True,
) -> LoadReport:
    """Load a checkpoint into a model, regardless of the wrappers (DataParallel, DDP, FSDP, torch.compile) in its keys.

    The page "Missing key(s)" of the documentation lists the formats of files and folders. Weights are read on the CPU
    and copied to the model's devices. Other objects (hyperparameters, arguments) are not read.

    Loading is all-or-nothing: every error below is raised before anything is copied. A model with load hooks or its own
    ``load_state_dict`` is loaded twice, the first time as a check. A model can be partly loaded only after an
    interrupt, an error in code that runs after copying (``set_extra_state``), lack of memory, an unreadable disk, or
    truncation of the local file. The last two end the process (SIGBUS).

    Args:
        model: Any module, wrapped or not. If it is sharded, every process must call this function.
        path: A local file, a folder with one checkpoint (shards, a Hugging Face model, ``lightning_logs/version_0``),
            or the URL of a file that fsspec can open.
        root: Attribute that only one side has, such as ``"model."``, or the entry of the file with the weights.
            ``None`` searches for a root; ``""`` keeps the names.
        strict: Whether every key of the model must match a key of the checkpoint with the same shape, and vice versa.
            If false, the weights that fit are loaded, and the report lists the rest.
        weights_only: If false, everything in the file is opened, which may run code.

    Raises:
        CheckpointMismatchError: The checkpoint does not fit, or the model's types cannot hold its numbers.
        AmbiguousCheckpointError: Several sets of weights in the checkpoint fit; choose one with ``root``.
        KeyCollisionError: Two keys of the checkpoint would become the same key of the model.
        BrokenCheckpointError: The file is not a checkpoint, or it is damaged.
        UnsafeCheckpointError: Some weights can be built only by running code.
        TypeError: ``model`` is not a module, or ``path`` is not a path.

    Warns:
        UserWarning: The file also holds averages of these weights.

    Example:
        >>> report = load_weights(net, "last.ckpt")  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
        last.ckpt: loaded 161 weights; removed "module." from 161 keys
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"The first argument of load_weights must be a torch.nn.Module, got {printable(repr(model), 100)}. Create "
            "a model, and call load_weights(model, path)."
        )
    path = checkpoint_at(path)
    content, classes = read_weights(path) if weights_only else (read_checkpoint(path, weights_only=False), ())
    entries = weights_in(content, path)
    with errors_about(path, type(model)):
        fit = fit_weights(model, entries, root, strict)
        plan, loaded = copy_weights(model, fit)
    warn_of_averages(path, fit)
    return _report(str(path), fit, plan, loaded, classes)


def warn_of_averages(path: str | os.PathLike[str], fit: Fit) -> None:
    """Warn about averages that were not loaded."""
    if any(map(is_average, fit.others)):
        warnings.warn(f"{printable_path(path)}: {fit.choice()}", stacklevel=4)


def fit_weights(model: nn.Module, entries: Entries, root: str | None, strict: bool) -> Fit:
    """Return the match for the only entry of a checkpoint that fits the model."""
    dropped = (root or "").rstrip(".")
    named = [entry for entry in entries if entry and f"{dropped}.".startswith(f"{entry}.")]
    if named:
        entry = max(named, key=len)
        inside = dropped.removeprefix(entry).lstrip(".")
        return _fit(model, entry, entries, inside or None, strict)
    fits: list[Fit] = []
    refusals: dict[str, CheckpointError] = {}
    for entry in likely(entries):
        try:
            fits.append(_fit(model, entry, entries, root, strict))
        except CheckpointError as error:  # noqa: PERF203 - a handful of entries
            if isinstance(error, AmbiguousCheckpointError) and not is_average(entry):
                raise
            refusals[entry] = error
    if not fits:
        entry = min(refusals, key=lambda entry: len(getattr(refusals[entry], "missing", ())))  # lacks the fewest keys
        closest = refusals[entry]
        if len(entries) > 1:
            message = f"Of the entries {shortened([*map(quoted, entries)], 8)}, {quoted(entry)} is closest. {closest}"
            closest.args = (message, *closest.args[1:])
        raise closest
    if not strict:
        most = max(len(fit.plan.renames) for fit in fits)
        fits = [fit for fit in fits if len(fit.plan.renames) == most]
    meant = preferred(fits, lambda fit: fit.entry)
    if len(meant) > 1:
        names = [quoted(fit.entry) for fit in fits]
        raise AmbiguousCheckpointError(
            f"Several entries of the file fit: {' and '.join(names)}. Choose one by calling "
            f"lightning_gpu_tools.load_weights with root={' or root='.join(names)}."
        )
    fit = meant[0]

    def fits_as_well(entry: str) -> bool:
        with contextlib.suppress(CheckpointError):
            return len(_fit(model, entry, entries, None, strict).plan.renames) >= len(fit.plan.renames)
        return False

    others = filter(fits_as_well, others_of_this_model(fit.entry, entries)) if root is None else ()
    attributes = (f"{fit.entry}.{name}" if fit.entry else name for name in fit.plan.others)
    return fit._replace(others=(*others, *attributes))


def _fit(model: nn.Module, entry: str, entries: Entries, root: str | None, strict: bool) -> Fit:
    weights = entries[entry]
    keys, state = read_model(model, weights)
    shapes = {key: shape_of(value) for key, value in weights.items()}
    plan = plan_renaming(shapes, keys, root=root, strict=strict, entry=entry)
    buffers = {key: name for key, name in plan.renames.items() if name not in state}
    others = [key for key, name in buffers.items() if not has_same_numbers(weights[key], model.get_buffer(name))]
    if others and strict:
        raise CheckpointMismatchError(
            f"The model does not save {list_groups(others)} (persistent=False), and has other numbers there. Nothing "
            "was changed. To keep the model's numbers, use strict=False.",
            (),
            others,
        )
    plan = replace(
        plan,
        renames={key: name for key, name in plan.renames.items() if key not in buffers},
        kept=tuple(key for key in plan.kept if key in state),
        unexpected=(*plan.unexpected, *others),
    )
    return Fit(entry, weights, plan, keys, state, strict, tuple(key for key in buffers if key not in others))


def _report(path: str, fit: Fit, plan: RenamePlan, loaded: tuple[str, ...], unread: tuple[str, ...]) -> LoadReport:
    lists = {
        "equal to buffers that the model does not save": fit.buffers,
        "kept": plan.kept,
        "missing": plan.missing,
        "unexpected": plan.unexpected,
        "not used": plan.unused,
        "other shape": tuple(plan.clashes),
    }
    words = (
        f"{printable(Path(path).name)}: loaded {plural(len(loaded) - len(plan.tied), 'weight')}",
        plan.describe(),
        f"{len(plan.tied)} more {'is' if len(plan.tied) == 1 else 'are'} tied to them" if plan.tied else "",
        *(f"{label}: {list_groups(keys)}" for label, keys in lists.items() if keys),
        describe_unread(unread),
        fit.choice() if fit.others else "",
    )
    return LoadReport(
        path=path,
        entry=fit.entry,
        loaded=loaded,
        renamed={old: new for old, new in plan.renames.items() if old != new},
        root=plan.dropped_root or plan.added_root,
        others=fit.others,
        buffers=fit.buffers,
        kept=plan.kept,
        missing=plan.missing,
        unexpected=plan.unexpected,
        mismatched=tuple((old, shape_of(fit.weights[old]), fit.keys.shapes[new]) for old, new in plan.clashes.items()),
        unused=plan.unused,
        unread=unread,
        summary="; ".join(filter(None, words)),
    )
