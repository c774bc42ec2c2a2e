"""Checks that the environment variables, commands, classes and options that advice and pages name exist."""

import contextlib
import importlib
import inspect
import io
import re
import shlex
from collections.abc import Iterable
from functools import reduce

from lightning_gpu_tools.cli import parser

# Values that a text may give each environment variable: the package's own, and those of CUDA, NCCL and torch.
VARIABLES = {
    "LIGHTNING_GPU_TOOLS": "advise",
    "LIGHTNING_GPU_TOOLS_CLAIMS_DIR": "/.*",
    "LIGHTNING_GPU_TOOLS_DISABLE": "1",
    "LIGHTNING_GPU_TOOLS_NOTIFY": ".*",
    "CUDA_VISIBLE_DEVICES": r"[\w,-]+",
    "NCCL_DEBUG": "WARN|INFO|TRACE",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_DISTRIBUTED_DEBUG": "INFO|DETAIL",
}
# Variables of the user's own command in LIGHTNING_GPU_TOOLS_NOTIFY.
TOLD = ("EVENT", "OUTCOME", "VERDICT", "WHY", "NEXT", "REPORT", "HOST", "SCRIPT")
SET = (*TOLD, "JOB")  # by the package itself, for this command and for child processes
VARIABLES |= {f"LIGHTNING_GPU_TOOLS_{name}": ".*" for name in SET}
_MODULES = (
    *("lightning_gpu_tools", "lightning_gpu_tools.strategies", "lightning_gpu_tools.types", "builtins"),
    *("lightning.pytorch", "lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.plugins.io"),
    *("lightning.pytorch.strategies", "lightning.fabric", "torch", "torch.nn.parallel", "torch.utils.data"),
    *("torch.optim", "torch.optim.lr_scheduler"),
)
_UNITS_AND_EXAMPLES = {"KiB", "MiB", "GiB", "LitModel", "NumPy"}
_VARIABLE = re.compile(r"\b([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\b(?:=([^\s`]*\w))?")
_COMMAND = re.compile(r"lightning-gpu-tools (\w+(?: (?:--?[\w-]*|[\w./-]*\w))*)")
_CLASS = re.compile(r"(?<![.\w])[A-Z]\w*(?:[a-z]\w*[A-Z]\w*|(?=\())")
_OF_TORCH = re.compile(r"\btorch(?:\.\w+)+")
_CALL = re.compile(r"(?<![.\w])(\w+)\(((?:[^()]|\([^()]*\))*)\)")


def is_command(arguments: str) -> bool:
    """Return whether the command line takes these arguments."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        parser().parse_args(shlex.split(arguments))
        return True
    return False


def unknown_variables(text: str, prefix: str = "") -> list[str]:
    """Return the environment variables, with their values, that have no such meaning."""
    found = [match for match in _VARIABLE.finditer(text) if match[1].startswith(prefix)]
    return [
        one[0]
        for one in found
        if one[1] not in VARIABLES or (one[2] is not None and not re.fullmatch(VARIABLES[one[1]], one[2]))
    ]


def unknown_options(named: object, options: Iterable[str]) -> set[str]:
    """Return the options that a class or function does not take."""
    taken = inspect.signature(named).parameters  # type: ignore[arg-type]
    is_open = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return set() if is_open else {*options} - taken.keys()


def unknown_names(text: str) -> list[str]:
    """Return everything that advice names and that does not exist."""
    commands = [command for command in _COMMAND.findall(text) if not is_command(command)]
    classes = [name for name in _CLASS.findall(text) if name not in _UNITS_AND_EXAMPLES and _found(name) is None]
    of_torch = [name for name in _OF_TORCH.findall(text) if not _is_in_torch(name)]
    options = [
        f"{name}({option}=)"
        for name, arguments in _CALL.findall(text)
        if (named := _found(name)) is not None
        for option in sorted(unknown_options(named, re.findall(r"(\w+)=", arguments)))
    ]
    return [*unknown_variables(text), *commands, *classes, *of_torch, *options]


def _found(name: str) -> object:
    modules = map(importlib.import_module, _MODULES)
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


def _is_in_torch(name: str) -> bool:
    with contextlib.suppress(AttributeError):
        reduce(getattr, name.split(".")[1:], importlib.import_module("torch"))
        return True
    return False
