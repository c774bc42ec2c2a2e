"""Selection of the program's own line on a stack: the innermost line that the user wrote."""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from types import FrameType
from typing import Literal, NamedTuple

from lightning_gpu_tools.training.stacks import TRAINER_FILE, TRAINER_FUNCTIONS

# Owner of a file's code. In `fetch`, torch's loader calls the program; in `trainer`, the Trainer does.
_Owner = Literal["user", "library", "torch", "python", "own", "fetch", "trainer"]
_TRAINERS = ("lightning", "pytorch_lightning")
_LIBRARIES = (*_TRAINERS, "lightning_fabric", "lightning_utilities")
_OWN = __name__.partition(".")[0]
_PYTHON = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_FETCH_FILE = os.path.join("torch", "utils", "data", "_utils", "fetch.py")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
_MAX_FILES = 10_000  # in the cache of owners

_files: dict[str, tuple[_Owner, str]] = {}


class Seen(NamedTuple):
    """The source line at which a thread was sampled."""

    file: str
    line: int
    function: str
    is_loading: bool  # torch's loader was getting samples from the program


def line_of(frame: FrameType | None) -> Seen | None:
    """Return the user's innermost line on a stack, ignoring callers of the Trainer or the loader; ``None`` if empty.

    Without a line of the user, return the innermost line of a library, else the outermost line of torch.
    """
    users = library = outermost = None
    owner: _Owner = "python"
    while frame is not None:
        owner, _ = _owner(frame)
        if owner == "trainer" and frame.f_code.co_name in TRAINER_FUNCTIONS:
            break
        if owner == "user":
            users = users or frame
        elif owner in ("library", "trainer"):
            library = library or frame
        if owner == "fetch":
            outermost = outermost or frame
            break
        if owner != "own":
            outermost = frame
        frame = frame.f_back
    found = users or library or outermost
    if found is None:
        return None
    line = found.f_lineno or found.f_code.co_firstlineno
    return Seen(_owner(found)[1], line, _function(found), owner == "fetch")


def _function(frame: FrameType) -> str:
    """Return the function of a frame; for a comprehension, the enclosing function."""
    around = frame.f_back
    while frame.f_code.co_name in _COMPREHENSIONS and around is not None:
        if around.f_code.co_filename != frame.f_code.co_filename:
            break
        frame, around = around, around.f_back
    return frame.f_code.co_name


def _owner(frame: FrameType) -> tuple[_Owner, str]:
    """Return the owner of a frame's code, and its file as shown to the user."""
    path = frame.f_code.co_filename
    known = _files.get(path)
    if known is None:
        if len(_files) >= _MAX_FILES:
            _files.clear()
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        known = _files[path] = _owner_of(path, package), _shown(path)
    return known


def _owner_of(path: str, package: str) -> _Owner:
    if path.endswith(_FETCH_FILE):
        return "fetch"
    if package == _OWN:
        return "own"
    if package == "torch":
        return "torch"
    if package in _TRAINERS and path.endswith(TRAINER_FILE):
        return "trainer"
    if package in _LIBRARIES or any(part in path for part in _PACKAGES):
        return "library"
    return "python" if path.startswith((*_PYTHON, "<")) else "user"


def _shown(path: str) -> str:
    for part in _PACKAGES:
        if part in path:
            return path.rpartition(part)[2]
    with suppress(OSError):  # the current folder was removed
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    return path
