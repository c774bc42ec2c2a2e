"""Files that are no checkpoints: what they are, by their first bytes or the names in them, and what to do."""

import codecs
import os
import re
import shlex
from collections.abc import Sequence

from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.checkpoints.structure import RESTORE, Fault
from lightning_gpu_tools.units import format_bytes, printable, printable_path

_UNPACK = "Unpack it, and use the checkpoint inside."
_ZIP = "Zip its folder again without compression"
_EXPORTED = "Use the checkpoint that it was exported from."
_OTHER_LIBRARY = "Read it with the library that wrote it, and save its weights with torch.save."
SAVE_ARRAYS = (
    "If you trust its author, open it, and save its arrays as tensors: "
    "torch.save({name: torch.as_tensor(array) for name, array in arrays.items()}, 'weights.pt')"
)
_DOWNLOAD = "Download the file itself."
# A signature, what the file is, and what to do. The first one that matches counts.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (rb"\Z", "is empty", "Probably the disk was full, or a save was interrupted."),
    (rb"\0+\Z", "begins with zeros instead of a checkpoint", RESTORE),
    (rb"\s*version https://git-lfs", "is a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull"),
    (rb"\x89HDF\r\n\x1a\n", "is an HDF5 file, as Keras writes", _OTHER_LIBRARY),
    (rb"\x93NUMPY", "is a NumPy array", _OTHER_LIBRARY),
    (rb".{257}ustar", "is a tar archive", _UNPACK),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "is compressed (gzip, bzip2, xz or zstd)", _UNPACK),
    (rb"GGUF|lmgg|tjgg|fmgg", "is a GGUF or ggml file of llama.cpp", _EXPORTED),
    (rb".{4}TFL3", "is a TFLite model", _EXPORTED),
    # Protocol buffers begin with their first two fields: https://onnx.ai/onnx/api/classes.html#modelproto.
    (rb"\x08[\x02-\x3f][\x12\x1a\x22\x28\x32\x3a\x42]", "is an ONNX model", _EXPORTED),
    (rb"\x80[\2-\5]", "is a pickle that torch.save did not write, such as Detectron2's with NumPy arrays", SAVE_ARRAYS),
)
# The same for the start of a text.
_TEXTS: tuple[tuple[str, str, str], ...] = (
    (r"<", "is a web page (HTML or XML): the download returned a login or error page", _DOWNLOAD),
    (r"\{\s*[\"}]|\[\s*[\"{\d\[\]]", "is a JSON file", "Use the file with the weights."),
    (r"", "is a text file", "Use the file with the weights, or download it again."),
)


def other_file(path: str, size_bytes: int, head: bytes) -> Fault:
    """Return what a file is that no format has recognized; ``head`` is its beginning."""
    if os.path.basename(path) == "data.pkl":
        return unpacked(os.path.dirname(os.path.abspath(path)))
    for signature, what, advice in _SIGNATURES:
        if re.match(signature, head, re.DOTALL):
            return Fault(what, advice)
    if text := _text(head):
        what, advice = next((what, advice) for start, what, advice in _TEXTS if re.match(start, text))
        words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
        return Fault(f'{what}, "{printable(words, 80)}"' if words else what, advice)
    return Fault(f"is not a checkpoint: {format_bytes(size_bytes)} that begin with {head[:8]!r}", RESTORE)


def unpacked(folder: str) -> Fault:
    """Return the fault for torch's zip file after it has been unpacked to this folder."""
    parent, name = (shlex.quote(printable_path(part)) for part in os.path.split(folder))
    return Fault("is an unpacked checkpoint", f"{_ZIP}: cd {parent} && zip -0 -r {name}.zip {name}")


def compressed(path: str, names: Sequence[str]) -> Fault:
    """Return the fault for torch's zip file after another program has compressed it."""
    name = next(name for name in names if name.endswith("/data.pkl")).partition("/")[0]
    folder, file = shlex.quote(printable(name)), shlex.quote(printable_path(path))
    unzip = f"python -m zipfile -e {file} unpacked && cd unpacked"
    what = "is a checkpoint that another program has compressed"
    return Fault(what, f"{_ZIP}: {unzip} && zip -0 -r {folder}.zip {folder}")


def other_zip(names: Sequence[str]) -> Fault:
    """Return what a zip archive with these names is."""
    if names and all(name.endswith(".npy") for name in names):
        return Fault("holds NumPy arrays (.npz)", SAVE_ARRAYS)
    inner = {name.partition("/")[2] for name in names}
    if {"archive_format", "serialized_exported_program.json"} & inner:
        return Fault("is a program by torch.export", _EXPORTED)
    if "constants.pkl" in inner:
        return Fault("is a TorchScript program", _EXPORTED)
    if ".data/extern_modules" in inner:
        return Fault("is a torch.package archive, a program with its code", _EXPORTED)
    return Fault(f"is a zip archive but not a checkpoint; it holds {listed(names, 4) or 'nothing'}", _UNPACK)


def _text(head: bytes) -> str:
    """Return the text that a file begins with; ``""`` if it begins with something else."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return ""
    return text.lstrip() if all(letter.isprintable() or letter in "\t\r\n\f" for letter in text) else ""
