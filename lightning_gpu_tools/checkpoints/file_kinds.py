"""What files and folders of other programs are, by their first bytes and the names in them, and what to do then."""

from __future__ import annotations

import codecs
import os
import re
import shlex
from collections.abc import Sequence

from lightning_gpu_tools.checkpoints.faults import RESTORE, Fault
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.units import format_bytes, printable, printable_path

HEAD_BYTES = 1024  # a server's whole error message, or the signature of an HDF5 file behind 512 bytes of its user

# In the advice, FILE is the file, and NEW is a name for what the advice makes. In Python, they are in quotes.
_EXPORTED = "Use the checkpoint that it was exported from."
_LLAMA = "Use the model's original files, such as .safetensors."
_TENSORFLOW = "Read it with TensorFlow, or use weights of this model for torch."
_SAVE = "To save its weights for torch, run in Python: "
_TRUSTED = "If you trust its author, extract its weights, which may run code in it. Run in Python: "
_HDF5 = (
    "is an HDF5 file, as Keras writes",
    f"Its names and axes differ from torch's. {_SAVE}import h5py, torch; weights = {{}}; "
    "h5py.File('FILE').visititems(lambda name, item: weights.update({name: torch.as_tensor(item[()])}) "
    "if hasattr(item, 'dtype') else None); torch.save(weights, 'NEW.pt')",
)
_NUMPY = (
    "is a NumPy array",
    "To save it under the name of a weight, run in Python: import numpy, torch; "
    "torch.save({'weight': torch.from_numpy(numpy.load('FILE'))}, 'NEW.pt')",
)
_ONNX = (
    "is an ONNX model",
    f"{_SAVE}import onnx, onnx.numpy_helper, torch; "
    "torch.save({weight.name: torch.from_numpy(onnx.numpy_helper.to_array(weight).copy()) "
    "for weight in onnx.load('FILE').graph.initializer}, 'NEW.pt')",
)
_EXPORT = (
    "is a program by torch.export",
    f"{_TRUSTED}import torch; torch.save(dict(torch.export.load('FILE').state_dict), 'NEW.pt')",
)
_PACKAGE = (
    "is a torch.package archive, a program with its code",
    f"{_TRUSTED}import torch, torch.package; "
    "torch.save(torch.package.PackageImporter('FILE').load_pickle('PACKAGE', 'RESOURCE').state_dict(), 'NEW.pt')",
)
_TORCH_TAR = (
    "is in the tar format of torch 0.1",
    f"{_TRUSTED}import torch; torch.save(torch.load('FILE', weights_only=False), 'NEW.pt')",
)
# A signature, what the file is, and what to do. The first one that matches counts.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (
        rb"\s*version https://git-lfs",
        "is a Git LFS pointer, not the file itself",
        "In the folder of its git clone, fetch the file with: git lfs pull",
    ),
    (rb"(.{512})?\x89HDF\r\n\x1a\n", *_HDF5),
    (rb"\x93NUMPY", *_NUMPY),
    (rb"\x1f\x8b", "is compressed (gzip)", "Unpack it: gzip -dc FILE > NEW"),
    (rb"BZh", "is compressed (bzip2)", "Unpack it: bzip2 -dc FILE > NEW"),
    (rb"\xfd7zXZ", "is compressed (xz)", "Unpack it: xz -dc FILE > NEW"),
    (rb"\x28\xb5\x2f\xfd", "is compressed (zstd)", "Unpack it: zstd -dc FILE > NEW"),
    (rb"Rar!", "is a rar archive", "Unpack it, and use NEW: 7z x FILE -o./NEW"),
    (rb"7z\xbc\xaf\x27\x1c", "is a 7z archive", "Unpack it, and use NEW: 7z x FILE -o./NEW"),
    (rb"GGUF", "is a GGUF file of llama.cpp", _LLAMA),
    (rb"lmgg|[tfal]jgg", "is a ggml file of llama.cpp", _LLAMA),
    (rb".{4}TFL3", "is a TFLite model", _EXPORTED),
    (rb".{4}ET\d\d", "is an ExecuTorch program", _EXPORTED),
    (rb".{4}PTMF", "is a TorchScript program for mobile devices", _EXPORTED),
    (rb"ftrt", "is a TensorRT engine", _EXPORTED),
    # Protocol buffers begin with their first two fields: https://onnx.ai/onnx/api/classes.html#modelproto.
    (rb"\x08\x01\x12", "is a TensorFlow SavedModel", _TENSORFLOW),
    (rb"\x08[\x02-\x3f][\x12\x1a\x22\x28\x32\x3a\x42]", *_ONNX),
    (
        rb"\x80[\2-\5]",
        "is a Python pickle that torch.save did not write",
        "Save it with torch.save or as safetensors.",
    ),
)
# The same for the start of a text.
_TEXTS: tuple[tuple[str, str, str], ...] = (
    (
        r"<",
        "is a web page (HTML or XML): the download returned a login or error page",
        "Download the file itself.",
    ),
    (r"\{\s*[\"}]|\[\s*[\"{\d\[\]]", "is a JSON file", "Use the file with the weights."),
    (r"", "is a text file", "Use the file with the weights, or download it again."),
)
_TENSORFLOWS_NAME = re.compile(r".+\.(index|meta|data-\d{5}-of-\d{5})")
_WITH_WEIGHTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".tar", "/data.pkl", ".h5", ".npz", ".onnx", ".pt2")


def is_tar(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` is a tar archive."""
    return head.startswith(b"ustar", 257)


def is_torchs(names: Sequence[str]) -> bool:
    """Return whether a zip archive with these names is one that torch writes."""
    return any(name.count("/") == 1 and name.endswith("/data.pkl") for name in names)


def other_file(path: str, size_bytes: int, head: bytes, names: Sequence[str] = ()) -> Fault:
    """Return what a file is that no format has recognized, and what to do.

    ``head`` is its first ``HEAD_BYTES`` bytes, and ``names`` are those in it if it is a zip or tar archive.
    """
    name = os.path.basename(path)
    if head.startswith(b"PK"):
        return _zip(path, names)
    if is_tar(head):
        return _tar(path, names)
    if name == "data.pkl" and head.startswith(b"\x80"):
        return _unpacked(os.path.dirname(os.path.abspath(path)))
    for signature, what, advice in _SIGNATURES:
        if re.match(signature, head, re.DOTALL):
            return _fault(path, what, advice)
    if _TENSORFLOWS_NAME.fullmatch(name):
        return Fault("is a part of a TensorFlow checkpoint", _TENSORFLOW)
    if not head:
        return Fault("is empty", "Probably the disk was full, or a save was interrupted.")
    if not head.strip(b"\0"):
        return Fault(f"begins with zeros instead of a checkpoint: {format_bytes(size_bytes)}", RESTORE)
    if text := _text(head):
        what, advice = next((what, advice) for start, what, advice in _TEXTS if re.match(start, text))
        words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
        return Fault(f'{what}, "{printable(words, 80)}"' if words else what, advice)
    return Fault(f"is not a checkpoint: {format_bytes(size_bytes)} that begin with {head[:8]!r}", RESTORE)


def other_folder(path: str, names: Sequence[str], unpacked: Sequence[str]) -> Fault | None:
    """Return what a folder with these names is if it is no checkpoint; ``None`` if they do not tell.

    ``unpacked`` are the folders in it that hold a ``data.pkl``.
    """
    if "data.pkl" in names:
        return _unpacked(os.path.abspath(path))
    if unpacked:
        return _unpacked(os.path.join(path, unpacked[0]))
    if "saved_model.pb" in names:
        return Fault("is a TensorFlow SavedModel", _TENSORFLOW)
    if any(map(_TENSORFLOWS_NAME.fullmatch, names)):
        return Fault("is a TensorFlow checkpoint", _TENSORFLOW)
    return None


def compressed(path: str, names: Sequence[str]) -> Fault:
    """Return the fault for torch's zip file after another program has compressed it."""
    return _fault(
        path,
        "is a checkpoint that another program has compressed",
        "Unpack it, and zip its folder again without compression: "
        "python -m zipfile -e FILE NEW && cd NEW && zip -0 -r FOLDER.pt FOLDER",
        FOLDER=next(name for name in names if is_torchs([name])).partition("/")[0],
    )


def in_other_byte_order(path: str) -> Fault:
    """Return the fault for torch's zip file by a machine with another byte order."""
    return _fault(
        path,
        "was written on a machine with another byte order",
        "Convert it. Run in Python: import torch; torch.save(torch.load('FILE'), 'NEW.pt')",
    )


def _unpacked(folder: str) -> Fault:
    """Return the fault for torch's zip file after it has been unpacked."""
    parent, name = os.path.split(folder)
    return _fault(
        parent or ".",
        "is an unpacked checkpoint",
        "Zip its folder again, without compression: cd FILE && zip -0 -r ZIPPED.pt FOLDER",
        FOLDER=name,
        ZIPPED=f"{name}-zipped",
    )


def _zip(path: str, names: Sequence[str]) -> Fault:
    inner = {name.partition("/")[2] for name in names}
    if {"archive_format", "serialized_exported_program.json"} & inner:
        return _fault(path, *_EXPORT)
    pickles = sorted(name for name in inner if "/" in name and name.endswith(".pkl"))
    if ".data/extern_modules" in inner and pickles:
        package, _, resource = pickles[0].rpartition("/")
        return _fault(path, *_PACKAGE, PACKAGE=package.replace("/", "."), RESOURCE=resource)
    if "data.pkl" in names:
        advice = "Unpack it into a folder, and zip that: python -m zipfile -e FILE NEW && zip -0 -r NEW.pt NEW"
        return _fault(path, "is a checkpoint without its inner folder", advice)
    return _archive(path, "zip", names, "python -m zipfile -e FILE NEW")


def _tar(path: str, names: Sequence[str]) -> Fault:
    if {"storages", "tensors", "pickle"} <= {*names}:
        return _fault(path, *_TORCH_TAR)
    return _archive(path, "tar", names, "mkdir NEW && tar -xf FILE -C NEW")


def _archive(path: str, kind: str, names: Sequence[str], command: str) -> Fault:
    what = f"is a {kind} archive but not a checkpoint; it holds {listed(names, 4) or 'nothing'}"
    inside = [name for name in names if name.endswith(_WITH_WEIGHTS)]
    if not inside:
        return Fault(what, "Use the file with the weights.")
    advice = f"Unpack it, and use NEW/INSIDE: {command}"
    return _fault(path, what, advice, INSIDE=inside[0].removesuffix("/data.pkl"))


def _fault(path: str, what: str, advice: str, **names: str) -> Fault:
    """Return a fault with names in its advice: as Python strings where they are in quotes, otherwise for a shell."""
    file = os.path.basename(path) if "://" in path else path
    names |= {"FILE": file, "NEW": os.path.splitext(os.path.basename(file))[0] + "-unpacked"}
    words = "|".join(names)

    def put(match: re.Match[str]) -> str:
        name = printable_path(names[match["word"]])
        return repr(name + match["suffix"]) if match["quote"] else shlex.quote(name + match["suffix"])

    filled, count = re.subn(rf"(?P<quote>'?)\b(?P<word>{words})(?P<suffix>(?:\.pt)?)\b(?P=quote)", put, advice)
    return Fault(what, f"Download it first. {filled}" if count and file != path else filled)


def _text(head: bytes) -> str:
    """Return the text that a file begins with; ``""`` if it begins with something else."""
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return ""
    return text.lstrip() if all(letter.isprintable() or letter in "\t\r\n\f" for letter in text) else ""
