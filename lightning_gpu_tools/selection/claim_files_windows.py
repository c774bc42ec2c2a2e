"""What ``claim_files`` does, on Windows, which has no ``flock``: with ``filelock``, a lock file beside each record.

Three things are not to be had there. A lock cannot be handed on, so a claim lives as long as the process that made it
and not as long as its children. Files have no owner that can be relied on, so a user is who the record says. And the
system's folder for temporary files is another one for each user: for claims that all users see, an administrator has to
set ``LIGHTNING_GPU_TOOLS_CLAIMS_DIR``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from filelock import FileLock, Timeout

from lightning_gpu_tools.errors import ClaimsError

_PATIENCE_S = 60.0  # as in claim_files
_held: list[FileLock] = []  # filelock drops the lock with the last reference


class HeldFile(NamedTuple):
    """A file that this process holds until it ends or lets go; ``None``: another process of the job holds it."""

    lock: FileLock | None

    def pass_on(self) -> None:
        """Do nothing: there is no way."""

    def let_go(self) -> None:
        """Drop the lock."""
        if self.lock:
            self.lock.release()
            _held.remove(self.lock)


class FoundFile(NamedTuple):
    """As in ``claim_files``; the owner is never known."""

    is_held: bool
    content: bytes
    owner_id: None = None


class Folder:
    """As in ``claim_files``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(os.listdir(self._path))

    def look(self, name: str) -> FoundFile:
        """Return what is known of a file."""
        lock = self._lock(name)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            with open(os.path.join(self._path, name), "rb") as file:
                return FoundFile(is_held=True, content=file.read(64 * 1024))
        lock.release()
        return FoundFile(is_held=False, content=b"")

    def holders(self, name: str) -> set[int]:
        """Return nothing: who has locked a file cannot be asked."""
        return set()

    def create(self, name: str, content: bytes) -> HeldFile:
        """Write a new file, and hold it."""
        lock = self._lock(name)
        lock.acquire(timeout=0)
        with open(os.path.join(self._path, name), "xb") as file:
            file.write(content)
        _held.append(lock)
        return HeldFile(lock)

    def join(self, name: str) -> HeldFile:
        """Rely on the process that holds the file."""
        os.stat(os.path.join(self._path, name))
        return HeldFile(None)

    def remove(self, name: str) -> None:
        """Remove a leftover, as far as this user may."""
        for leftover in (name, f"{name}.lock"):
            with contextlib.suppress(PermissionError, FileNotFoundError):
                os.unlink(os.path.join(self._path, leftover))

    def _lock(self, name: str) -> FileLock:
        return FileLock(os.path.join(self._path, f"{name}.lock"), mode=0o666, thread_local=False)


@contextlib.contextmanager
def locked_folder(path: str, *, create: bool) -> Iterator[Folder | None]:
    """Have the folder to oneself for the duration of the block, as in ``claim_files``."""
    if create:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise ClaimsError(
                f"The folder for claims, {path}, cannot be created: {error.strerror}. Set "
                f"LIGHTNING_GPU_TOOLS_CLAIMS_DIR to one that this user can create."
            ) from error
    elif not os.path.isdir(path):
        yield None
        return
    try:
        with FileLock(os.path.join(path, "lock"), timeout=_PATIENCE_S, mode=0o666, thread_local=False):
            yield Folder(path)
    except Timeout as error:
        raise ClaimsError(
            f"Another process has held {path}\\lock for {_PATIENCE_S:.0f} s, so it is not known which GPUs are claimed."
        ) from error
