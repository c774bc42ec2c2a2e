"""The folder that all users of a machine share, and the kernel's locks on the files in it.

A claim is a file that its holders keep locked (``flock``, shared among them). The kernel drops the locks of a process
when it ends, however it ends, so a file that nobody has locked is a leftover. Every look and every change happens under
one more lock, the file ``lock``, so that a look, which has to try a lock to see if it is held, disturbs nobody.

Nothing in a folder that everybody can write to is trusted: no symbolic link is followed, no read waits for the other
end of a pipe, and no existing file is ever written to. The folder has to be on a local file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from lightning_gpu_tools.errors import ClaimsError

# A pick holds the lock for about 0.1 s, so this is some hundred picks in front of ours: something hangs.
_PATIENCE_S = 60.0
# Between creating a file and setting its mode lie microseconds, but the process may lose the CPU.
_CREATION_S = 2.0
_LARGEST_RECORD_BYTES = 64 * 1024
# fs.protected_regular (Linux): opening an existing file of someone else with O_CREAT fails in a folder like this one.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ELSEWHERE = "set LIGHTNING_GPU_TOOLS_CLAIMS_DIR to another folder, the same for all users of the machine."
_ADVICE = f"Its owner or an administrator can `chmod 1777` the folder and `chmod 666` the files in it; or {_ELSEWHERE}"


class HeldFile(NamedTuple):
    """A file that this process keeps locked until it ends or lets go.

    Attributes:
        descriptors: Of the file, and of the folder.
        pid: The process that took it; a forked child has the descriptors, too, but does not hold the file.
    """

    descriptors: tuple[int, int]
    pid: int

    def pass_on(self) -> None:
        """Let programs that this process executes keep the lock."""
        for descriptor in self.descriptors:
            os.set_inheritable(descriptor, True)

    def let_go(self) -> None:
        """Drop the lock."""
        for descriptor in self.descriptors:
            if self.pid == os.getpid():
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class FoundFile(NamedTuple):
    """What is known of a file: whether a live process holds it, its content, and the user that it belongs to."""

    is_held: bool
    content: bytes
    owner_id: int


class Folder:
    """The folder while this process has it to itself; see ``locked_folder``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(os.listdir(self._descriptor))

    def look(self, name: str) -> FoundFile:
        """Return what is known of a file.

        Raises:
            OSError: It is gone, a symbolic link, no file, or may not be read.
        """
        descriptor = os.open(name, _READ, dir_fd=self._descriptor)
        try:
            is_held = not _try_lock(descriptor, fcntl.LOCK_EX)
            content = os.read(descriptor, _LARGEST_RECORD_BYTES)
            return FoundFile(is_held=is_held, content=content, owner_id=os.fstat(descriptor).st_uid)
        finally:
            os.close(descriptor)

    def holders(self, name: str) -> set[int]:
        """Return the processes that have locked a file themselves, not those that were handed the lock.

        Empty where the kernel does not list them, or under another device number, as for a subvolume of btrfs.

        Raises:
            OSError: The file is gone.
        """
        found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        try:
            with open("/proc/locks") as locks:
                return {int(words[-4]) for words in map(str.split, locks) if words[-3] == file}
        except OSError:  # no Linux
            return set()

    def create(self, name: str, content: bytes) -> HeldFile:
        """Write a new file that every user can read, and hold it.

        Raises:
            OSError: It cannot be written, for want of space for example; nothing is left of it.
        """
        descriptor = os.open(name, _CREATE, 0o666, dir_fd=self._descriptor)
        try:
            os.fchmod(descriptor, 0o666)  # whatever this process's umask is
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        except OSError:
            os.close(descriptor)
            self.remove(name)
            raise
        return self._hold(descriptor)

    def join(self, name: str) -> HeldFile:
        """Hold a file together with those who hold it already.

        Raises:
            OSError: It is gone.
        """
        return self._hold(os.open(name, _READ, dir_fd=self._descriptor))

    def remove(self, name: str) -> None:
        """Remove a leftover. In a sticky folder only its owner can; others' leftovers wait for their owners."""
        with contextlib.suppress(PermissionError, FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def _hold(self, descriptor: int) -> HeldFile:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # systemd-tmpfiles removes what has not been touched for days from /tmp, except in folders that are locked
        # (tmpfiles.d(5), "Age"). A job may well run for longer.
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._descriptor)
        _try_lock(folder, fcntl.LOCK_SH)
        return HeldFile(descriptors=(descriptor, folder), pid=os.getpid())


@contextlib.contextmanager
def locked_folder(path: str, *, create: bool) -> Iterator[Folder | None]:
    """Have the folder to oneself for the duration of the block.

    Args:
        path: The folder.
        create: Whether to create it. Otherwise ``None`` is given where it, and so any claim, does not exist.

    Raises:
        ClaimsError: It cannot be used, or others have had it for a minute; the message says what to do.
    """
    while True:
        with contextlib.ExitStack() as open_descriptors:
            folder = _open_folder(path, create)
            if folder is None:
                yield None
                return
            open_descriptors.callback(os.close, folder)
            lock = _open_lock(folder, path, create)
            if lock is None:
                yield None
                return
            open_descriptors.callback(os.close, lock)
            _wait_for(lock, os.path.join(path, "lock"))
            # Whoever owns the folder can remove files from it, and two locks on two files exclude nobody.
            if _is_same(lock, os.path.join(path, "lock")) and _is_same(folder, path):
                yield Folder(folder)
                return


def _open_folder(path: str, create: bool) -> int | None:
    made = False
    if create:
        try:
            os.makedirs(path, mode=0o1777)
            made = True
        except FileExistsError:
            pass
        except OSError as error:
            raise ClaimsError(
                f"The folder for claims, {path}, cannot be created: {error.strerror}. An administrator may be able to, "
                f"with `mkdir -m 1777`; or {_ELSEWHERE}"
            ) from error
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = "it is a symbolic link or a file" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror
        raise ClaimsError(f"The folder for claims, {path}, cannot be used: {reason}. {_ADVICE}") from error
    if made:
        os.fchmod(folder, 0o1777)  # whatever this process's umask is
    mode = os.fstat(folder).st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        os.close(folder)
        raise ClaimsError(f"The folder for claims, {path}, lets users remove the files of others. {_ADVICE}")
    return folder


def _open_lock(folder: int, path: str, create: bool) -> int | None:
    give_up_s = time.monotonic() + _CREATION_S
    while True:
        try:
            return os.open("lock", _READ, dir_fd=folder)
        except FileNotFoundError:
            if not create:
                return None
        except OSError as error:
            # Whoever creates it may be between creating it and setting its mode.
            if error.errno != errno.EACCES or time.monotonic() > give_up_s:
                raise ClaimsError(f"{path}/lock cannot be opened: {error.strerror}. {_ADVICE}") from error
            time.sleep(0.01)
            continue
        try:
            lock = os.open("lock", _CREATE, 0o666, dir_fd=folder)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno != errno.EACCES or time.monotonic() > give_up_s:
                raise ClaimsError(f"{path}/lock cannot be created: {error.strerror}. {_ADVICE}") from error
            time.sleep(0.01)
            continue
        os.fchmod(lock, 0o666)
        return lock


def _wait_for(lock: int, path: str) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not _try_lock(lock, fcntl.LOCK_EX):
        if time.monotonic() > give_up_s:
            raise ClaimsError(
                f"Another process has held {path} for {_PATIENCE_S:.0f} s, so it is not known which GPUs are claimed. "
                f"`fuser -v {path}` names it; if it hangs, end it."
            )
        time.sleep(0.005 + 0.015 * os.urandom(1)[0] / 255)  # random, so that those who wait do not move in step


def _is_same(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, operation: int) -> bool:
    """Take a lock unless another one excludes it, be it this process's own through another descriptor."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
