"""Files at any path or URL: read as local ones, and there whole or not at all when they are written.

A local file is written beside its target, made durable, then put in its place; another is uploaded when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from lightning_gpu_tools.errors import CheckpointNotFoundError
from lightning_gpu_tools.processes import running_kernel
from lightning_gpu_tools.units import printable_path

if sys.platform != "win32":
    import fcntl

_LEFT_OVER = re.compile(r"\.lightning-gpu-tools-([0-9a-f]{12})-[0-9a-f]{16}\.part")
# What file systems answer that cannot flush a directory (FUSE, CIFS, some network file systems); the rename is all one
# can have there.
_CANNOT_SYNC_DIRECTORY = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSYS})
# Where an upload appears under its name only when it is complete. Elsewhere (SFTP, SMB, HDFS) it is moved there.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2"})


@contextlib.contextmanager
def local_copy(path: str | os.PathLike[str]) -> Iterator[str]:
    """Give a local path to what is at ``path``: itself, or a copy of a remote file that lives as long as the block."""
    filesystem, name = _place(path)
    if filesystem is None:
        yield name
        return
    # In a folder of its own, so that nobody takes what else is in the temporary folder for its neighbours. On Windows a
    # mapped file cannot be removed; the temporary folder is cleaned anyway.
    with tempfile.TemporaryDirectory(prefix="lightning-gpu-tools-", ignore_cleanup_errors=True) as folder:
        copy = os.path.join(folder, "checkpoint")
        try:
            filesystem.get_file(name, copy)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"There is no checkpoint at {printable_path(path)}.") from None
        yield copy


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file for ``path``, a local path or a URL, that is there when the block ends without an error."""
    filesystem, name = _place(path)
    if filesystem is None:
        with replacing(name) as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(prefix="lightning-gpu-tools-") as temporary:
        yield temporary  # type: ignore[misc]
        temporary.flush()
        _upload(filesystem, temporary.name, name)


def behind_links(path: str | os.PathLike[str]) -> str:
    """Return the path of the file that a symbolic link names, also if it is not there yet; other paths as they are.

    To be written instead of a link that is to stay. :func:`writing` puts the new file in the link's own place: the
    ``last.ckpt`` of a Trainer may be a link to its best checkpoint, which the next save must not touch.
    """
    filesystem, name = _place(path)
    return os.path.realpath(name) if filesystem is None and os.path.islink(name) else os.fspath(path)


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is anything at a local path or URL."""
    filesystem, name = _place(path)
    return os.path.exists(name) if filesystem is None else bool(filesystem.exists(name))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, link or folder; nothing happens where there is none."""
    filesystem, name = _place(path)
    if filesystem is not None:
        if filesystem.exists(name):
            filesystem.rm(name, recursive=True)
    elif os.path.isdir(name) and not os.path.islink(name):
        shutil.rmtree(name)
    elif os.path.lexists(name):
        os.unlink(name)


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
        left_over = ((entry.path, _LEFT_OVER.fullmatch(entry.name)) for entry in entries)
        candidates = [path for path, match in left_over if match and match[1] == running_kernel()]
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


def _open_beside(directory: str) -> tuple[str, BinaryIO]:
    while True:
        name = f".lightning-gpu-tools-{running_kernel()}-{secrets.token_hex(8)}.part"
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


def _place(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the file system of a URL, ``None`` for the local one, and the name in it."""
    text = os.fspath(path)
    if "://" not in text and "::" not in text:  # without fsspec, whose import costs more than a short look into a file
        return None, os.path.expanduser(text)
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    filesystem, name = url_to_fs(text)
    return None if isinstance(filesystem, LocalFileSystem) else filesystem, name


def _upload(filesystem: Any, source: str, target: str) -> None:
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    folder = filesystem._parent(target)
    if folder:
        filesystem.makedirs(folder, exist_ok=True)
    try:
        if protocols & _OBJECT_STORES:
            filesystem.put_file(source, target)
            return
        part = f"{target}.{os.path.basename(source)}.part"
        try:
            filesystem.put_file(source, part)
            filesystem.mv(part, target)
        finally:
            if filesystem.exists(part):
                filesystem.rm(part)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror or error}, while uploading", target) from error
