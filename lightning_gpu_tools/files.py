"""File access at any path or URL: reads like from local files, and all-or-nothing writes."""

import contextlib
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from lightning_gpu_tools.errors import CheckpointNotFoundError, UnreachableError
from lightning_gpu_tools.processes import process_id, process_stat, running_kernel
from lightning_gpu_tools.units import printable, printable_path

# Here an upload becomes visible only once complete. Elsewhere (SFTP, SMB, HDFS), it is moved into place.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2"})


def scratch_prefix() -> str:
    """Return how the names of this process's temporary files and folders begin, for ``tempfile``.

    Those of killed processes of this user are removed first.
    """
    own = process_id(os.getpid())
    namespace = re.sub(r"\D", "", own["namespace"] or "")
    prefix = f"lightning-gpu-tools-{own['kernel']}-{namespace}-"  # a PID of another container means nothing here
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            named = re.match(rf"{prefix}(\d+)-(\d+)-", entry.name)
            process = process_stat(int(named[1])) if named else None
            if named is None or (process is not None and process.started_ticks == int(named[2])):
                continue
            with contextlib.suppress(OSError):  # another process just removed it
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    remove(entry.path)
    return f"{prefix}{own['pid']}-{own['started_ticks'] or 0}-"


@contextlib.contextmanager
def local_copy(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield ``path`` itself, or the path of a temporary copy of a remote file."""
    filesystem, name = _place(path)
    if filesystem is None:
        yield name
        return
    # A separate folder, without other checkpoints. NFS does not remove mapped files.
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(), ignore_cleanup_errors=True) as folder:
        copy = os.path.join(folder, "checkpoint")
        try:
            with _reaching(path, passed=FileNotFoundError):
                filesystem.get_file(name, copy)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"Checkpoint file not found: {printable_path(path)}.") from None
        yield copy


class Status(NamedTuple):
    """Facts about a file that are available without reading it."""

    size_bytes: int
    modified_s: float | None  # since the epoch; None if the file system does not report it
    kind: Literal["file", "folder", "other"]  # other: a pipe or a device


def status(path: str | os.PathLike[str]) -> Status:
    """Return the status of a file at a local path or URL. OSErrors propagate."""
    filesystem, name = _place(path)
    if filesystem is None:
        found = os.stat(name)
        is_file, is_folder = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
        return Status(found.st_size, found.st_mtime, "file" if is_file else "folder" if is_folder else "other")
    modified_s = None
    with _reaching(path):
        info = filesystem.info(name)
        if info["type"] == "directory":
            return Status(0, None, "folder")
        with contextlib.suppress(NotImplementedError):
            modified_s = filesystem.modified(name).timestamp()
    return Status(info.get("size") or 0, modified_s, "file")


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Raise the error that writing to a local folder, or reaching a URL, would cause. Creates nothing.

    Raises:
        OSError: The folder is not writable, the protocol of the URL is unknown, or its package is not installed.
    """
    filesystem, name = _place(folder)
    if filesystem is None:
        existing = os.path.abspath(name)
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        tempfile.TemporaryFile(dir=existing).close()


def last_modified(path: str | os.PathLike[str]) -> float:
    """Return the modification time of a file in seconds since the epoch; 0 if unknown."""
    try:
        return status(path).modified_s or 0.0
    except OSError:
        return 0.0


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file at a local path or URL. OSErrors propagate."""
    filesystem, name = _place(path)
    if filesystem is None:
        return Path(name).read_bytes()
    with _reaching(path):
        return bytes(filesystem.cat_file(name))


def matching(folder: str | os.PathLike[str], *patterns: str) -> list[str]:
    """Return the existing files in a local folder or URL whose relative path matches a pattern."""
    filesystem, name = _place(folder)
    if filesystem is None:
        found = [glob.glob(os.path.join(glob.escape(name), pattern)) for pattern in patterns]
        return [path for paths in found for path in paths if os.path.exists(path)]
    name = name.rstrip("/")
    with _reaching(folder):
        found = [filesystem.glob(f"{name}/{pattern}") for pattern in patterns]
    return [os.fspath(folder).rstrip("/") + path[len(name) :] for paths in found for path in paths]


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file, which appears at a path or URL once the block ends without an error."""
    filesystem, name = _place(path)
    if filesystem is None:
        with replacing(name) as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(prefix=scratch_prefix()) as temporary:
        yield temporary  # type: ignore[misc]
        temporary.flush()
        with _reaching(path):
            _upload(filesystem, temporary.name, name)


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether anything exists at a local path or URL."""
    filesystem, name = _place(path)
    if filesystem is None:
        return os.path.exists(name)
    with _reaching(path):
        return bool(filesystem.exists(name))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, link, or folder if it exists."""
    filesystem, name = _place(path)
    if filesystem is not None:
        with _reaching(path):
            if filesystem.exists(name):
                filesystem.rm(name, recursive=True)
    elif os.path.isdir(name) and not os.path.islink(name):
        shutil.rmtree(name)
    elif os.path.lexists(name):
        os.unlink(name)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Open a new file, which replaces ``path`` once the block ends without an error.

    Until then, ``path`` keeps its old content, even if the process is killed or the machine loses power. Afterwards,
    the new content is on disk. The file name of an ``OSError`` is ``path``.
    """
    directory, target = os.path.dirname(path) or ".", Path(path)
    temporary = ""
    try:
        os.makedirs(directory, exist_ok=True)
        if target.is_char_device() or target.is_block_device() or target.is_fifo():  # never replace /dev/null
            with open(path, "wb") as device:
                yield device
            return
        sweep(directory)
        while True:
            temporary = os.path.join(directory, f"{_prefix()}{secrets.token_hex(8)}.part")
            # Not with tempfile, which ignores the umask.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            _try_lock(descriptor)
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)  # another process removed it before it was locked
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        descriptor = os.open(directory, os.O_RDONLY)
        with contextlib.suppress(OSError):  # FUSE and CIFS cannot flush a directory
            os.fsync(descriptor)
        os.close(descriptor)
    except OSError as error:
        reason = f"{error.strerror or error}, while saving (an older file at this path is unchanged)"
        raise OSError(error.errno, reason, path) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def sweep(directory: str) -> None:
    """Remove temporary files of killed processes. Locked files, and files of other hosts or boots, may be in use."""
    prefix = _prefix()
    with os.scandir(directory) as entries:
        candidates = [entry.path for entry in entries if entry.name.startswith(prefix) and entry.name.endswith(".part")]
    for candidate in candidates:
        with contextlib.suppress(OSError):  # another user's file, or another process just removed it
            descriptor = os.open(candidate, os.O_RDONLY)
            try:
                if _try_lock(descriptor):
                    os.unlink(candidate)
            finally:
                os.close(descriptor)


def _prefix() -> str:
    return f".lightning-gpu-tools-{running_kernel()}-"


def _try_lock(descriptor: int) -> bool:
    """Lock the file until the process ends; return ``False`` if it is already locked or locks do not work."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _place(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the file system (``None`` if local) and the name in it."""
    text = os.fspath(path)
    # Importing fsspec takes longer than inspecting a file. Lightning shortens file:///tmp to file:/tmp.
    if "://" not in text and "::" not in text and not text.startswith("file:"):
        return None, os.path.expanduser(text)
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    with _reaching(text, passed=FileNotFoundError):
        filesystem, name = url_to_fs(text)
    return None if isinstance(filesystem, LocalFileSystem) else filesystem, name


@contextlib.contextmanager
def _reaching(url: str | os.PathLike[str], passed: type[OSError] = OSError) -> Iterator[None]:
    """Turn the errors of a file system, except those ``passed``, into one with the reason and what to do."""
    try:
        yield
    except passed:
        raise
    except Exception as error:  # each file system raises errors of the packages that it uses
        missing = getattr(error.__cause__, "name", None) if isinstance(error, ImportError) else None
        status = getattr(error, "status", None)
        words = f"the server answers {status} {getattr(error, 'message', '')}".rstrip() if status else error
        reason = printable(words, 200) or type(error).__name__
        advice = "Check the URL and your access to it, or use a local file"
        if missing:
            advice = f"To install it: pip install {printable({'smbclient': 'smbprotocol'}.get(missing, missing))}"
        unreachable = UnreachableError(f"{printable_path(url)} cannot be opened: {reason}. {advice}.")
        unreachable.strerror = f"{reason}. {advice}"
        raise unreachable from error


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
