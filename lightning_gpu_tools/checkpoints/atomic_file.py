"""Files that are there whole or not at all: written beside their target, made durable, then put in its place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

_LEFT_OVER = re.compile(r"\.lightning-gpu-tools-([0-9a-f]{12})-[0-9a-f]{16}\.part")
# What file systems answer that cannot flush a directory (FUSE, CIFS, some network file systems); the rename is all one
# can have there.
_CANNOT_SYNC_DIRECTORY = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSYS})


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` when the block ends without an error.

    Until then ``path`` holds what it held before, also when the process is killed or the machine loses its power; after
    it, the new content, on the disk. What a killed process has left behind in the same folder is removed first.

    Raises:
        OSError: Anything the file system refuses; ``filename`` is ``path``.
    """
    directory = os.path.dirname(path) or "."
    try:
        os.makedirs(directory, exist_ok=True)
        if _is_device(path):  # /dev/null and named pipes are written to, not replaced
            with open(path, "wb") as device:
                yield device
            return
        sweep(directory)
        temporary, file = _open_beside(directory)
    except OSError as error:
        raise _about(path, error) from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        _sync_directory(directory)
    except OSError as error:
        raise _about(path, error) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def sweep(directory: str) -> list[str]:
    """Remove and return what killed processes left in ``directory``.

    Only what is proven dead: its name says that it was written under the kernel that runs now, and that kernel has let
    go of its lock. A writer on another machine, or one that cannot be locked, is left alone; so is another user's file
    that may not be removed.
    """
    swept = []
    with os.scandir(directory) as entries:
        candidates = [entry.path for entry in entries if _is_ours(entry.name)]
    for candidate in candidates:
        with contextlib.suppress(OSError):  # somebody else's file, or swept by another process in this moment
            descriptor = os.open(candidate, os.O_RDONLY)
            try:
                if _try_lock(descriptor):
                    os.unlink(candidate)
                    swept.append(candidate)
            finally:
                os.close(descriptor)
    return swept


def _is_ours(name: str) -> bool:
    match = _LEFT_OVER.fullmatch(name)
    return match is not None and match[1] == _running_kernel()


def _open_beside(directory: str) -> tuple[str, BinaryIO]:
    while True:
        name = f".lightning-gpu-tools-{_running_kernel()}-{secrets.token_hex(8)}.part"
        temporary = os.path.join(directory, name)
        # Not tempfile, which makes files that only their owner can read: the umask is to decide, as for any other save.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        _try_lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return temporary, os.fdopen(descriptor, "wb")
        os.close(descriptor)  # swept between its creation and its lock


def _try_lock(descriptor: int) -> bool:
    """Take the lock that the kernel releases when the process dies; ``False`` if it is held or there are no locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _running_kernel() -> str:
    """Return 12 hex digits that tell one boot of one machine from any other, also across containers and NFS."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # not Linux: a machine counts as one kernel for good, and a file from before a reboot is swept too
        boot = f"{platform.node()}-{uuid.getnode()}"
    return hashlib.sha256(boot.encode()).hexdigest()[:12]


def _is_device(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISBLK(mode)


def _sync_directory(directory: str) -> None:
    if sys.platform == "win32":  # a directory cannot be opened there
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_DIRECTORY:
            raise
    finally:
        os.close(descriptor)


def _about(path: str, error: OSError) -> OSError:
    """Return the same kind of error with the path that the caller knows, not the temporary one."""
    reason = error.strerror or str(error)
    return OSError(error.errno, f"{reason}, while saving (an older file at this path is as it was)", path)
