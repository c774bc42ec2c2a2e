"""Faults of checkpoint files, and the errors that report them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError
from lightning_gpu_tools.units import printable_path


class Fault(Exception):
    """The reason that a file is not a valid checkpoint."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what, advice)
        self.what = what  # without the subject: "is empty"
        self.advice = advice


RESTORE = "Copy or download it again, or use an earlier checkpoint."


def damaged(what: str) -> Fault:
    """Return the fault for a file that contradicts itself."""
    return Fault(f"is damaged: {what}", RESTORE)


@contextlib.contextmanager
def faults_of(path: object) -> Iterator[None]:
    """Turn a :class:`Fault` into an error that names the file."""
    try:
        yield
    except Fault as fault:
        raise BrokenCheckpointError(f"{printable_path(path)} {fault.what}. {fault.advice}".rstrip()) from None
    except RecursionError:
        raise BrokenCheckpointError(f"{printable_path(path)} nests its contents too deeply, or endlessly.") from None


@contextlib.contextmanager
def any_error_is(fault: Fault) -> Iterator[None]:
    """Raise ``fault`` instead of any error that damaged or hostile contents cause."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (Fault, CheckpointError)) or not comes_from_contents(error):
            raise
        raise fault from None


def comes_from_contents(error: Exception) -> bool:
    """Return whether the contents, not the disk, caused the error. Impossible offsets in them cause EINVAL."""
    return not isinstance(error, OSError) or error.errno in (None, errno.EINVAL)
