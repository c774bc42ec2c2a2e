"""Classes and functions in pickles: plain data, harmless objects, and code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.units import printable, printable_path

_NUMBERS = "Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|Complex(Float|Double)"
# Accepted by torch.load(weights_only=True) since 2.6: torch/_weights_only_unpickler.py. A test compares them.
_PLAIN = re.compile(
    r"collections\.(OrderedDict|Counter)"
    r"|torch\.nn\.parameter\.Parameter"
    r"|torch\.(Size|Tensor|device|serialization\._get_layout|_tensor\._rebuild_from_type_v2)"
    r"|torch\._utils\._rebuild_(parameter(_with_state)?|q?tensor|tensor_v[23]|(sparse|nested)_tensor"
    r"|meta_tensor_no_storage|wrapper_subclass|device_tensor_from_(numpy|cpu_tensor))"
    rf"|torch\.(cuda\.)?({_NUMBERS}|QU?Int8|QInt32|QUInt4x2|QUInt2x4)Storage"
    r"|torch\.storage\.(Unt|T)ypedStorage"
    rf"|torch\.(cuda\.|sparse\.|cuda\.sparse\.)?({_NUMBERS})Tensor"
    r"|torch\.(q?u?int\d+(x\d)?|quint\dx\d|b?float\d+\w*|float4_e2m1fn_x2|b?complex\d+|bool|bits\w+)"
    r"|torch\.per_(tensor_affine|tensor_symmetric|channel_affine(_float_qparams)?|channel_symmetric)"
    r"|_codecs\.encode"
    r"|builtins\.(bytearray|set|complex)"
)
# These only store values. Not collections.deque, which torch refuses to fill even if it is allowed.
_HARMLESS = re.compile(
    r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path"
    r"|datetime\.\w+|decimal\.Decimal|fractions\.Fraction|uuid\.UUID|zoneinfo\.ZoneInfo"
    r"|argparse\.Namespace|types\.SimpleNamespace|collections\.defaultdict|functools\.partial"
    r"|builtins\.(list|dict|tuple|int|float|str|bytes|bool|slice|range|frozenset)"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+)"
    r"|numpy\.(_core|core)\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)"
    r"|torch\.nn\.modules\.\w+\.\w+"
    r"|torch\.optim\.(\w+\.)?\w+"
    r"|torch\.torch_version\.TorchVersion|_io\.BytesIO"
    r"|(lightning\.|lightning_)fabric\.utilities\.data\.AttributeDict"
    r"|(lightning(\.pytorch)?|pytorch_lightning)\.utilities\.parsing\.AttributeDict"
    r"|omegaconf\.\w+\.\w+|typing\.Any"
)
# Modules that can run code: TorchScript's, and those of the standard library except these, which only hold values.
_CODE_MODULES = {"__torch__", *sys.stdlib_module_names} - {
    *("array", "collections", "datetime", "decimal", "enum", "ipaddress", "random")
}
_RUNS_CODE = re.compile(
    r"(nt|posix|distutils|setuptools|pip|pkg_resources|requests|aiohttp|torch\.(hub|jit|utils|serialization))\.\S+"
    r"|torch\.[a-z]\w*"
)


def beyond_plain_data(names: Iterable[str]) -> list[str]:
    """Return the names that ``weights_only=True`` refuses by default, and the calls ``module.name(...)``."""
    return sorted(name for name in names if not _PLAIN.fullmatch(name))


def explain_blocked(path: str, names: Iterable[str], filled: Iterable[str] = (), reason: str = "") -> str:
    """Return a message with the names that block a file, and with a line that allows them if none of them runs code.

    ``filled`` are classes of objects that get elements, which torch never fills. ``reason`` is why torch refuses a file
    whose names are allowed.
    """
    blocked = sorted({*names})
    risky = [name for name in blocked if _can_run_code(name)]
    others = [name for name in blocked if name not in risky]
    lines = [f"{printable_path(path)} holds more than plain data, so it was not opened. No code in it has run."]
    if reason:
        lines.append(f"torch refuses it, although all its classes are allowed: {printable(reason, 300)}.")
        lines.append("Save only lists, dictionaries and numbers, with torch.save's default pickle_protocol.")
    for some, label in (
        (sorted(filled), "cannot be allowed, because torch fills only plain lists and dictionaries:"),
        (risky, "can run code when opened, so open it only if you trust its author:"),
        (others, "holds objects of:"),
    ):
        if some:
            lines.append(f"{label} {listed(some)}.")
    can_be_typed = all(name == printable(name) and all(map(str.isidentifier, name.split("."))) for name in blocked)
    if can_be_typed and not (risky or filled) and (not reason or "numpy.dtype" in blocked):
        lines.append(f"To allow these classes, if you trust them: {_allowing(blocked)}")
    return "\n  ".join(lines)


def _can_run_code(name: str) -> bool:
    is_code = name.endswith("(...)") or name.partition(".")[0] in _CODE_MODULES or _RUNS_CODE.fullmatch(name)
    return bool(is_code) and not _HARMLESS.fullmatch(name)


def _allowing(names: Iterable[str]) -> str:
    imports, items = ["import torch"], []
    for name in names:
        module, _, kind = name.rpartition(".")
        imports.append(f"from {module} import {kind}")
        items.append(f'({kind}, "{name}")')
    if "numpy.dtype" in names:  # torch also needs the class of an array's dtype, which is not in the file
        imports.append("import numpy")
        items.append('*{type(numpy.dtype(code)) for code in numpy.typecodes["All"]}')
    return f"{'; '.join(imports)}; torch.serialization.add_safe_globals([{', '.join(items)}])"


def describe_unread(names: Sequence[str]) -> str:
    """Return a note on unread parts; ``""`` if there are none."""
    return f"not read, because opening would run code: {listed(names, 3)}" if names else ""
