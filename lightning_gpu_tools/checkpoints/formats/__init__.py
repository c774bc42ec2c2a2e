"""A checkpoint at a path, opened and described without torch and without its code; one module per format.

A new format is a module here, and an entry in ``_FILES`` or ``_FOLDERS``. A format of single files has

- ``recognizes(head)``: whether a file that begins with ``head``, its first KiB, is of this format. No two formats
  recognize the same file;
- ``describe(file, path, size_bytes)``, which reads the description in an open file and checks it against the contents.
  Errors to raise: :class:`Fault`, which may have advice; any other means that the two do not match.
  ``Structure.records`` have checksums for ``checkpoint verify``. If torch cannot load the file, ``assemble`` returns
  the content, with tensors made with ``structure.plain_tensor``, which are then mapped. Numbers in another byte order
  are a fault.

Its suffix is one of ``structure.SUFFIXES``. One that ``checkpoint convert`` does not write is added to those in
``checkpoint_at``, and not to these.

A format with several files has

- ``FILES``: a pattern for names of which a folder of this format has at least one;
- ``PART``: a pattern for names of files that are not a checkpoint without the others;
- ``DAMAGE``: what errors other than :class:`Fault` mean;
- ``describe_folder(folder)``, which returns what ``folder.assembled`` returns. If it takes time to look up the places
  of all numbers, it does so only for ``folder.to_load``.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightning_gpu_tools.checkpoints.formats.other_programs import other_file, unpacked
from lightning_gpu_tools.checkpoints.key_tree import listed, shortened
from lightning_gpu_tools.checkpoints.structure import SUFFIXES, Fault, Structure, any_error_is, damaged, faults_of
from lightning_gpu_tools.errors import CheckpointNotFoundError
from lightning_gpu_tools.files import local_copy, matching
from lightning_gpu_tools.patches import collector_paused
from lightning_gpu_tools.units import path_text, printable, printable_path

_FILES = ("torch_files", "hugging_face")
_FOLDERS = ("torch_distributed", "deepspeed", "hugging_face")

# Names by Hugging Face's tools of the file that lists the others: model.safetensors.index.json or .index.fp16.json.
INDEX = re.compile(r".+\.index(\.\w+)?\.json")
_HEAD_BYTES = 1024  # a server's whole error message
# The weights in a folder by Hugging Face's tools, the preferred file first. Others are a training's state.
_HUGGING_FACE = ("model.safetensors", "pytorch_model.bin")


def checkpoint_at(path: str | os.PathLike[str]) -> str:
    """Return the path of the only checkpoint in a folder, or in its ``checkpoints``; the path itself for anything else.

    Raises ``BrokenCheckpointError`` with their paths if there are several.
    """
    text = path_text(path)
    local = os.path.expanduser(text)
    if "://" in text or not os.path.isdir(local) or _files_at(local)[0]:
        return text
    for file in (os.path.join(local, name) for name in _HUGGING_FACE):
        if os.path.isfile(file):
            return file
    for place in ("", "checkpoints/", "version_*/checkpoints/"):  # the others are those of Lightning's loggers
        files = matching(local, *(f"{place}*{suffix}" for suffix in SUFFIXES))
        different = {os.path.realpath(file): file for file in sorted(files, reverse=True)}  # last.ckpt may be a link
        if len(different) == 1:
            return checkpoint_at(min(files))
        if different:
            newest = sorted(different.values(), key=os.path.getmtime, reverse=True)
            advice = f"Use one of them, the newest first: {shortened([*map(printable_path, newest)])}"
            with faults_of(text):
                raise Fault(f"is a folder with {len(newest)} checkpoints", advice)
    return text


def read_structure(path: str | os.PathLike[str]) -> Structure:
    """Describe a file, a folder with one checkpoint, or a file at a URL that fsspec can open."""
    with opened_source(path, to_load=False) as structure:
        return structure


@contextlib.contextmanager
def opened_source(path: str | os.PathLike[str], *, to_load: bool = True) -> Iterator[Structure]:
    """Yield the result of :func:`read_structure` with its files still open.

    Looks up the places of blocks in the files only if ``to_load``.
    """
    text = checkpoint_at(path)
    with contextlib.ExitStack() as stack:
        with faults_of(text), collector_paused():
            structure = _described_folder(text, stack, to_load)
        yield structure or describe(stack.enter_context(opened(text)), text)


def _described_folder(path: str, stack: contextlib.ExitStack, to_load: bool) -> Structure | None:
    """Open and describe a checkpoint of several files; ``None`` for anything else."""
    local = os.path.expanduser(path)
    name = os.path.basename(local)
    if INDEX.fullmatch(name) and "://" in path:
        raise Fault("lists shards at a URL", "Download the whole folder, and use the local copy.")
    if not os.path.isdir(local) and any(form.PART.fullmatch(name) for form in _modules(_FOLDERS)):
        advice = f"Use the folder with all files: {printable_path(os.path.dirname(path) or '.')}"
        raise Fault("is one of several files of a checkpoint", advice)
    form, folder, names = _files_at(local)
    if form is None or not os.path.exists(local):
        return None
    with any_error_is(damaged(form.DAMAGE)):
        return cast(Structure, form.describe_folder(Folder(path, folder, names, stack, to_load)))


def _files_at(path: str) -> tuple[Any, str, set[str]]:
    """Return the format of a local folder or index, the folder that it leads to, and the names of the files there.

    The format is ``None`` for a file, and for files that are no checkpoint together.
    """
    folder, name = os.path.split(path)
    names = {name} if INDEX.fullmatch(name) else set()
    if os.path.isdir(path):
        folder = path
        latest = os.path.join(path, "latest")  # in which DeepSpeed writes the name of the folder with its files
        if os.path.isfile(latest):
            with open(latest, encoding="utf-8", errors="replace") as file:
                tag = file.read(1000).strip()
            if is_plain_name(tag) and os.path.isdir(os.path.join(path, tag)):
                folder = os.path.join(path, tag)
        names = set(os.listdir(folder))
    form = next((form for form in _modules(_FOLDERS) if any(map(form.FILES.fullmatch, names))), None)
    return form, folder, names


def _modules(names: Sequence[str]) -> list[Any]:
    return [import_module(f"{__name__}.{name}") for name in names]


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file once for all uses, because another file may be at its path a moment later."""
    with local_copy(path) as local:
        if os.path.isdir(local):
            with faults_of(path):
                for folder in (local, *(os.path.join(local, name) for name in sorted(os.listdir(local)))):
                    if os.path.isfile(os.path.join(folder, "data.pkl")):
                        raise unpacked(os.path.abspath(folder))
                raise Fault("is a folder without shards of a checkpoint", "Use a file, or the folder with all shards.")
        try:
            file = open(local, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            no_folder = "" if Path(local).parent.is_dir() else " Its folder does not exist either."
            raise CheckpointNotFoundError(f"Checkpoint file not found: {printable_path(path)}.{no_folder}") from None
        with file:
            yield file


def describe(file: BinaryIO, path: str) -> Structure:
    """Read the description in an open file, and check it against the file's contents."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    with faults_of(path):
        for form in _modules(_FILES):
            if form.recognizes(head):
                with collector_paused(), any_error_is(damaged("its description and its contents do not match")):
                    return cast(Structure, form.describe(file, path, size_bytes))
        raise other_file(path, size_bytes, head)


@dataclass(frozen=True)
class Folder:
    """A folder with the files of a checkpoint, which stay open until the stack is closed."""

    given: str  # the path that the user named: of the folder, of one around it, or of an index
    path: str
    names: set[str]  # of its files; only the index's if that is what the user named
    stack: contextlib.ExitStack
    to_load: bool  # whether its numbers will be read, not only described

    def check_names(self, names: Iterable[Any]) -> list[str]:
        """Return each name once; raise unless the folder has a file or a link with each name."""
        unique = list(dict.fromkeys(names))
        for name in unique:
            if not is_plain_name(name):
                raise Fault(f"refers to a file outside its own folder: {printable(name)}", "It was not opened.")
        missing = [name for name in unique if not os.path.exists(os.path.join(self.path, name))]
        if missing:
            absent = f"{len(missing)} of {len(unique)} files are missing, {listed(missing, 3)}"
            advice = "Probably a save or a copy was interrupted. Copy all files again."
            raise Fault(f"is not complete: {absent}", advice)
        return unique

    def open(self, name: str) -> BinaryIO:
        """Open a file."""
        return self.stack.enter_context(opened(os.path.join(self.path, name)))

    def describe(self, name: str) -> Structure:
        """Describe a file that is a checkpoint by itself."""
        return describe(self.open(name), os.path.join(self.path, name))

    def assembled(
        self,
        form: str,
        shards: Mapping[str, Structure],
        loaded: Sequence[str],
        assemble: Callable[[Mapping[str, Any]], Any],
    ) -> Structure:
        """Return several files as one checkpoint. The arguments are as in :class:`Structure`."""
        return Structure(
            None,
            self.given,
            sum(shard.size_bytes for shard in shards.values()),
            form,
            assemble({name: shards[name].content for name in loaded}),
            set().union(*(shards[name].globals for name in loaded)),
            set().union(*(shard.devices for shard in shards.values())),
            shards=shards,
            loaded=loaded,
            assemble=assemble,
        )


def is_plain_name(name: Any) -> bool:
    """Return whether this is a file name that stays inside its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)
