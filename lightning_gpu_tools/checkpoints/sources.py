"""A checkpoint at a path: one file or a folder of shards."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_gpu_tools.checkpoints.content import is_lightning_checkpoint
from lightning_gpu_tools.checkpoints.formats import Folder, deepspeed, describe, folder_formats, hugging_face, opened
from lightning_gpu_tools.checkpoints.key_tree import shortened
from lightning_gpu_tools.checkpoints.structure import SUFFIXES, Fault, Structure, faults_of
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError
from lightning_gpu_tools.patches import collector_paused
from lightning_gpu_tools.units import path_text, printable_path

_MAX_NEIGHBORS = 8  # our default: an error message must not take long
# The weights in a folder by Hugging Face's tools, the preferred file first. The others are copies, or states of a
# training.
_HUGGING_FACE = tuple(
    f"{name}.{suffix}"
    for suffix in ("safetensors", "bin")
    for name in ("model", "pytorch_model", "diffusion_pytorch_model", "open_clip_model", "open_clip_pytorch_model")
)


def checkpoint_at(path: str | os.PathLike[str]) -> str:
    """Return the path of the only checkpoint in a folder, or in its ``checkpoints``; the path itself for anything else.

    Raises ``BrokenCheckpointError`` with their paths if there are several.
    """
    text = path_text(path)
    local = os.path.expanduser(text)
    if "://" in text or not os.path.isdir(local) or _folder_format(local):
        return text
    known = [file for file in (os.path.join(local, name) for name in _HUGGING_FACE) if os.path.isfile(file)]
    for place in ("", "checkpoints", "version_*/checkpoints"):  # the others are those of Lightning's loggers
        folder = os.path.join(glob.escape(local), place)
        found = (file for suffix in SUFFIXES for file in glob.glob(os.path.join(folder, f"*{suffix}")))
        files = sorted(filter(os.path.exists, found), reverse=True)
        different = {os.path.realpath(file): file for file in files}  # last.ckpt may be a link
        if known or len(different) == 1:
            return checkpoint_at([*known, *different.values()][0])
        if different:
            newest = sorted(different.values(), key=os.path.getmtime, reverse=True)
            advice = f"Use one of them, the newest first: {shortened([*map(printable_path, newest)])}"
            with faults_of(text):
                raise Fault(f"is a folder with {len(newest)} checkpoints", advice)
    return text


def read_structure(path: str | os.PathLike[str]) -> Structure:
    """Describe a file, a folder with one checkpoint, or a file at a URL that fsspec can open.

    The error for a broken or missing file suggests a complete checkpoint in the same folder, if there is one.
    """
    with opened_source(path, to_load=False) as structure:
        return structure


@contextlib.contextmanager
def opened_source(path: str | os.PathLike[str], *, to_load: bool = True) -> Iterator[Structure]:
    """Yield the result of :func:`read_structure` with its files still open.

    Looks up the places of blocks in the files only if ``to_load``.
    """
    text = checkpoint_at(path)
    try:
        with contextlib.ExitStack() as stack:
            with faults_of(text), collector_paused():
                structure = _described_folder(text, stack, to_load)
            yield structure or describe(stack.enter_context(opened(text)), text)
    except (BrokenCheckpointError, CheckpointNotFoundError) as error:
        other = _newest_other(Path(os.path.expanduser(text)))
        if other is not None:
            error.args = (f"{error.args[0]} The newest complete checkpoint in that folder: {printable_path(other)}",)
        raise


def _described_folder(path: str, stack: contextlib.ExitStack, to_load: bool) -> Structure | None:
    """Open and describe a checkpoint of several files; ``None`` for anything else."""
    local = os.path.expanduser(path)
    folder, name = os.path.split(local)
    names = {name}
    form: Any = hugging_face if hugging_face.INDEX.fullmatch(name) else None
    if os.path.isdir(local):
        form, folder = _folder_format(local), deepspeed.folder_in(local)
        names = set(os.listdir(folder))
    elif any(form.PART.fullmatch(name) for form in folder_formats()):
        advice = f"Use the folder with all files: {printable_path(os.path.dirname(path) or '.')}"
        raise Fault("is one of several files of a checkpoint", advice)
    elif form and "://" in path:
        raise Fault("lists shards at a URL", "Download the whole folder, and use the local copy.")
    if form is None or not os.path.exists(local):
        return None
    structure: Structure = form.describe_folder(Folder(folder, stack), names, to_load=to_load)
    return replace(structure, path=path)


def _folder_format(path: str) -> Any:
    """Return the module of the format that the files of a folder have; ``None`` if they are no checkpoint together."""
    names = os.listdir(deepspeed.folder_in(path))
    return next((form for form in folder_formats() if any(map(form.FILES.fullmatch, names))), None)


def _newest_other(path: Path) -> Path | None:
    """Return the newest other complete Lightning checkpoint in the folder."""
    with contextlib.suppress(OSError):  # the error about the file itself takes precedence
        others = [entry for entry in path.parent.iterdir() if entry.suffix == path.suffix == ".ckpt" and entry != path]
        newest_first = sorted(others, key=lambda entry: entry.stat().st_mtime, reverse=True)
        for other in newest_first[:_MAX_NEIGHBORS]:
            with contextlib.suppress(CheckpointError), opened(other) as file:
                if is_lightning_checkpoint(describe(file, str(other)).content):
                    return other
    return None
