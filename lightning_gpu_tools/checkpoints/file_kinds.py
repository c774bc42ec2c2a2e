"""What files of other programs are, by their first bytes and the names in them, and what to do then."""

from __future__ import annotations

import codecs
import os
import re
import shlex
from collections.abc import Sequence

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.units import format_bytes, printable, printable_path

HEAD_BYTES = 1024  # a server's whole error message

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
    (rb"lmgg|[tfal]jgg", "is a ggml file of llama.cpp", _EXPORTED),
    (rb".{4}TFL3", "is a TFLite model", _EXPORTED),
    (rb".{4}PTMF", "is a TorchScript program for mobile devices", _EXPORTED),
    # Protocol buffers begin with their first two fields: https://onnx.ai/onnx/api/classes.html#modelproto.
    (rb"\x08\x01\x12", "is a TensorFlow SavedModel", _OTHER_LIBRARY),
    (rb"\x08[\x02-\x3f][\x12\x1a\x22\x28\x32\x3a\x42]", "is an ONNX model", _EXPORTED),
)
# The same for the start of a text.
_TEXTS: tuple[tuple[str, str, str], ...] = (
    (r"<", "is a web page (HTML or XML): the download returned a login or error page", _DOWNLOAD),
    (r"\{\s*[\"}]|\[\s*[\"{\d\[\]]", "is a JSON file", "Use the file with the weights."),
    (r"", "is a text file", "Use the file with the weights, or download it again."),
)


def is_torchs(names: Sequence[str]) -> bool:
    """Return whether a zip archive with these names is one that torch writes."""
    return any(name.count("/") == 1 and name.endswith("/data.pkl") for name in names)


def other_file(path: str, size_bytes: int, head: bytes) -> Fault:
    """Return what a file is that no format has recognized; ``head`` is its first ``HEAD_BYTES`` bytes."""
    if os.path.basename(path) == "data.pkl" and head.startswith(b"\x80"):
        return unpacked(os.path.dirname(os.path.abspath(path)))
    for signature, what, advice in _SIGNATURES:
        if re.match(signature, head, re.DOTALL):
            return Fault(what, advice)
    if re.match(rb"\x80[\2-\5]", head):
        what = "is a Python pickle that torch.save did not write, such as Detectron2's weights in NumPy arrays"
        return Fault(what, f"If you trust its author, save them as tensors: {_of_pickle(path)}")
    if not head:
        return Fault("is empty", "Probably the disk was full, or a save was interrupted.")
    if not head.strip(b"\0"):
        return Fault(f"begins with zeros instead of a checkpoint: {format_bytes(size_bytes)}", RESTORE)
    if text := _text(head):
        what, advice = next((what, advice) for start, what, advice in _TEXTS if re.match(start, text))
        words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
        return Fault(f'{what}, "{printable(words, 80)}"' if words else what, advice)
    return Fault(f"is not a checkpoint: {format_bytes(size_bytes)} that begin with {head[:8]!r}", RESTORE)


def _of_pickle(path: str) -> str:
    load = f"import pickle, torch; saved = pickle.load(open({printable_path(path)!r}, 'rb'), encoding='latin1')"
    arrays = "saved.get('model', saved).items()"
    return f"{load}; torch.save({{name: torch.as_tensor(array) for name, array in {arrays}}}, 'weights.pt')"


def other_zip(path: str, names: Sequence[str]) -> Fault:
    """Return what a zip archive with these names is."""
    if names and all(name.endswith(".npy") for name in names):
        arrays = f"numpy.load({printable_path(path)!r}).items()"
        save = f"torch.save({{name: torch.as_tensor(array) for name, array in {arrays}}}, 'weights.pt')"
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
