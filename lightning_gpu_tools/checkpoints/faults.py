"""What is wrong with a file, and the error that says so."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError
from lightning_gpu_tools.units import printable_path


class Fault(Exception):
    """Why a file is no checkpoint."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what, advice)
        self.what = what  # without the subject: "is empty"
        self.advice = advice


RESTORE = "Restore it from where it came from, or use an earlier checkpoint."


def damaged(what: str) -> Fault:
    """Return the fault of a file that contradicts itself."""
    return Fault(f"is damaged: {what}", RESTORE)


@contextlib.contextmanager
def faults_of(path: object) -> Iterator[None]:
    """Turn a :class:`Fault` into the error that says which file has it."""
    try:
        yield
    except Fault as fault:
        raise BrokenCheckpointError(f"{printable_path(path)} {fault.what}. {fault.advice}".rstrip()) from None
    except RecursionError:
        raise BrokenCheckpointError(f"{printable_path(path)} nests its contents too deep, or without end.") from None


@contextlib.contextmanager
def any_error_is(fault: Fault) -> Iterator[None]:
    """Raise this instead of whatever damaged or hostile contents raise."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Fault, CheckpointError)) or not comes_from_contents(error):
            raise
        raise fault from None


def comes_from_contents(error: Exception) -> bool:
    """Whether the contents made reading fail, not the disk; they cause EINVAL by impossible offsets."""
    return not isinstance(error, OSError) or error.errno in (None, errno.EINVAL)
