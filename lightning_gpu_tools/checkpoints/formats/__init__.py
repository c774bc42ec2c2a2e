"""Checkpoint files and folders, opened and described without torch and without their code; one module per format.

Files of other programs are named, by their first bytes and the names in them, with what to do.

A new format is a module here, and an entry in ``_FILES`` or ``_FOLDERS``. A format of single files has

- ``recognizes(head)``: whether a file that begins with ``head``, its first KiB, is of this format. No two formats
  recognize the same file;
- ``describe(file, path, size_bytes)``, which reads the description in an open file and checks it against the contents.
  Errors to raise: :class:`Fault`, which may have advice; ``ValueError`` and the like mean that the two do not match.
  ``Structure.records`` have checksums for ``checkpoint verify``.

A format with several files has

- ``FILES``: a pattern for names of which a folder of this format has at least one;
- ``PART``: a pattern for names of files that are not a checkpoint without the others;
- ``describe_folder(folder, names, to_load=...)``, which returns what ``structure.assembled`` returns, with the
  places of all numbers if that costs no time or ``to_load`` is true.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.structure import RESTORE, Fault, Structure, any_error_is, damaged, faults_of
from lightning_gpu_tools.errors import CheckpointNotFoundError
from lightning_gpu_tools.files import local_copy
from lightning_gpu_tools.patches import collector_paused
from lightning_gpu_tools.units import format_bytes, printable, printable_path

_FILES = ("torch_files", "hugging_face")
_FOLDERS = ("torch_distributed", "deepspeed", "hugging_face")

_HEAD_BYTES = 1024  # a server's whole error message

_UNPACK = "Unpack it, and use the checkpoint inside."
_EXPORTED = "Use the checkpoint that it was exported from."
_OTHER_LIBRARY = "Read it with the library that wrote it, and save its weights with torch.save."
_DOWNLOAD = "Download the file itself."
# A signature, what the file is, and what to do. The first one that matches counts.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (rb"\s*version https://git-lfs", "is a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull"),
    (rb"\x89HDF\r\n\x1a\n", "is an HDF5 file, as Keras writes", _OTHER_LIBRARY),
    (rb"\x93NUMPY", "is a NumPy array", _OTHER_LIBRARY),
    (rb".{257}ustar", "is a tar archive", _UNPACK),
    (rb"\x1f\x8b", "is compressed (gzip)", _UNPACK),
    (rb"BZh", "is compressed (bzip2)", _UNPACK),
    (rb"\xfd7zXZ", "is compressed (xz)", _UNPACK),
    (rb"\x28\xb5\x2f\xfd", "is compressed (zstd)", _UNPACK),
    (rb"GGUF", "is a GGUF file of llama.cpp", _EXPORTED),
    (rb".{4}PTMF", "is a TorchScript program for mobile devices", _EXPORTED),
    # Protocol buffers begin with their first two fields: https://onnx.ai/onnx/api/classes.html#modelproto.
    (rb"\x08[\x02-\x3f][\x12\x1a\x22\x28\x32\x3a\x42]", "is an ONNX model", _EXPORTED),
)
# The same for the start of a text.
_TEXTS: tuple[tuple[str, str, str], ...] = (
    (r"<", "is a web page (HTML or XML): the download returned a login or error page", _DOWNLOAD),
    (r"\{\s*[\"}]|\[\s*[\"{\d\[\]]", "is a JSON file", "Use the file with the weights."),
    (r"", "is a text file", "Use the file with the weights, or download it again."),
)


def _modules(names: Sequence[str]) -> list[Any]:
    return [import_module(f"{__name__}.{name}") for name in names]


def folder_formats() -> list[Any]:
    """Return the formats with several files."""
    return _modules(_FOLDERS)


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
                    structure: Structure = form.describe(file, path, size_bytes)
                    return structure
        raise other_file(path, size_bytes, head)


class Folder:
    """A folder with the files of a checkpoint, which stay open until the stack is closed."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        self.path = path
        self._stack = stack

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
        return self._stack.enter_context(opened(os.path.join(self.path, name)))

    def describe(self, name: str) -> Structure:
        """Describe a file that is a checkpoint by itself."""
        return describe(self.open(name), os.path.join(self.path, name))


def is_plain_name(name: Any) -> bool:
    """Return whether this is a file name that stays inside its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def is_torchs(names: Sequence[str]) -> bool:
    """Return whether a zip archive with these names is one that torch writes."""
    return any(name.count("/") == 1 and name.endswith("/data.pkl") for name in names)


def other_file(path: str, size_bytes: int, head: bytes) -> Fault:
    """Return what a file is that no format has recognized; ``head`` is its first ``_HEAD_BYTES`` bytes."""
    if os.path.basename(path) == "data.pkl" and head.startswith(b"\x80"):
        return unpacked(os.path.dirname(os.path.abspath(path)))
    for signature, what, advice in _SIGNATURES:
        if re.match(signature, head, re.DOTALL):
            return Fault(what, advice)
    if re.match(rb"\x80[\2-\5]", head):
        what = "is a Python pickle that torch.save did not write, such as Detectron2's weights in NumPy arrays"
        load = f"import pickle, torch; saved = pickle.load(open({printable_path(path)!r}, 'rb'), encoding='latin1')"
        save = _saved_as_tensors("saved.get('model', saved).items()")
        return Fault(what, f"If you trust its author, save them as tensors: {load}; {save}")
    if not head:
        return Fault("is empty", "Probably the disk was full, or a save was interrupted.")
    if not head.strip(b"\0"):
        return Fault(f"begins with zeros instead of a checkpoint: {format_bytes(size_bytes)}", RESTORE)
    if text := _text(head):
        what, advice = next((what, advice) for start, what, advice in _TEXTS if re.match(start, text))
        words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
        return Fault(f'{what}, "{printable(words, 80)}"' if words else what, advice)
    return Fault(f"is not a checkpoint: {format_bytes(size_bytes)} that begin with {head[:8]!r}", RESTORE)


def _saved_as_tensors(arrays: str) -> str:
    return f"torch.save({{name: torch.as_tensor(array) for name, array in {arrays}}}, 'weights.pt')"


def other_zip(path: str, names: Sequence[str]) -> Fault:
    """Return what a zip archive with these names is."""
    if names and all(name.endswith(".npy") for name in names):
        save = _saved_as_tensors(f"numpy.load({printable_path(path)!r}).items()")
        return Fault("holds NumPy arrays (.npz)", f"Save them as tensors: import numpy, torch; {save}")
    inner = {name.partition("/")[2] for name in names}
    if {"archive_format", "serialized_exported_program.json"} & inner:
        return Fault("is a program by torch.export", _EXPORTED)
    if ".data/extern_modules" in inner:
        return Fault("is a torch.package archive, a program with its code", _EXPORTED)
    return Fault(f"is a zip archive but not a checkpoint; it holds {listed(names, 4) or 'nothing'}", _UNPACK)


def compressed(path: str, names: Sequence[str]) -> Fault:
    """Return the fault for torch's zip file after another program has compressed it."""
    name = next(name for name in names if is_torchs([name])).partition("/")[0]
    folder, file = shlex.quote(printable(name)), shlex.quote(printable_path(path))
    unzip = f"python -m zipfile -e {file} unpacked && cd unpacked"
    advice = f"Unpack it, and zip its folder again without compression: {unzip} && zip -0 -r {folder}.zip {folder}"
    return Fault("is a checkpoint that another program has compressed", advice)


def unpacked(folder: str) -> Fault:
    """Return the fault for torch's zip file after it has been unpacked to this folder."""
    parent, name = (shlex.quote(printable_path(part)) for part in os.path.split(folder))
    advice = f"Zip its folder again, without compression: cd {parent} && zip -0 -r {name}.zip {name}"
    return Fault("is an unpacked checkpoint", advice)


def _text(head: bytes) -> str:
    """Return the text that a file begins with; ``""`` if it begins with something else."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return ""
    return text.lstrip() if all(letter.isprintable() or letter in "\t\r\n\f" for letter in text) else ""
