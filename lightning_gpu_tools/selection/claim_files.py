"""The claims folder, which all users of the machine share, and the entries of live processes in it; see docs/claims.md.

An entry consists of two files. The record (``.json``) is complete before it becomes visible and never changes. On the
Unix socket (``.sock``), the process listens but never answers. The kernel closes the socket when the last process that
has it open ends, so an entry is alive if a connection succeeds.

No user of the folder is trusted. The folder must be sticky, so that nobody can remove, rename, or replace other users'
files. Only names in the format of ``Folder.put`` count, and a file speaks only for its owner. No link is followed: what
is checked and what is used are one descriptor. Reads never block, and other users' files are not written. Anybody can
lock the folder and fill it, so waits and the number of files are limited.
"""

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import re
import shlex
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightning_gpu_tools.errors import ClaimsError, ClaimsLockedError
from lightning_gpu_tools.processes import process_stat, read_kernel_file, read_mounts
from lightning_gpu_tools.units import printable, printable_path, user_name

if TYPE_CHECKING:
    import socket

TIMEOUT_LOCK_S = 30.0  # about 300 picks of 0.1 s; after that, the holder hangs or keeps the lock on purpose
_TIMEOUT_CREATION_S = 2.0  # mkdir to chmod takes microseconds, unless the process loses the CPU
MAX_RECORD_BYTES = 16 * 1024  # a record of 16 GPUs with 7 MIG instances each has 6 KiB
_MAX_RECORDS_PER_USER = 1000  # the latest ones; a job has one record per process
# Our default: two files for each process of 100 users with 50 processes each. To read them all takes a second.
_MAX_FILES = 10_000
_MAX_ATTEMPTS = 10  # our default: an attacker who races for a new name wins once in fifty attempts
# The sticky bit keeps systemd-tmpfiles and the like from removing a file of a long job for its age
# (XDG Base Directory Specification, XDG_RUNTIME_DIR).
RECORD_MODE, SOCKET_MODE = 0o1644, 0o1666
# A record's name includes prefixes of its GPUs' UUIDs, which are visible even if others may not read the record.
_UUID_START = re.compile("(?:GPU|MIG)-[0-9a-f]{8}")
_MAX_UUID_STARTS = 16  # so that the name stays below 255 characters, NAME_MAX of Linux
_FILE = re.compile(
    rf"(?:((?:claim|wait)-[0-9a-f]{{16}})\.sock|\.?((?:claim|wait)-[0-9a-f]{{16}})(?:-{_UUID_START.pattern})*\.json)"
)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_PATH_ONLY = os.O_PATH | os.O_NOFOLLOW  # of a symbolic link, this opens the link itself
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class Entry(NamedTuple):
    """An entry that a live process has put into the folder."""

    since_ns: int  # ctime of the record, which nobody can backdate
    name: str  # file name of the socket, without the extension
    owner_id: int  # according to the file system
    record: str  # file name of the record
    uuid_starts: tuple[str, ...]  # prefixes of the UUIDs of its GPUs, from its name; empty if they do not fit in a name
    is_closed: bool = False  # this user may not connect to the socket


class Held:
    """An entry that this process holds until it ends or releases the entry."""

    def __init__(self, name: str, folder: int, listener: int, files: Mapping[str, os.stat_result]) -> None:
        self.name = name
        self._files = files
        self._descriptors = [(folder, listener)]  # until another thread releases it
        self.pid = os.getpid()  # a forked child has the descriptors, too, but does not hold the entry

    def is_in(self, path: str) -> bool:
        """Return whether its files are in the folder that is now at a path."""
        with contextlib.suppress(OSError):
            return all(_is_same(os.lstat(f"{path}/{file}"), own) for file, own in self._files.items())
        return False

    def pass_on(self) -> None:
        """Pass the entry on to a program that this process executes."""
        for _, listener in self._descriptors:
            os.set_inheritable(listener, True)

    def release(self) -> None:
        """Remove the entry, even if forked children still have its socket. Idempotent."""
        with contextlib.suppress(IndexError):
            folder, listener = self._descriptors.pop()
            if self.pid == os.getpid():
                _remove(folder, self._files)
            os.close(folder)
            os.close(listener)


class Folder:
    """The open folder. ``put`` and ``clean_up`` require its lock."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.owner_id = os.fstat(descriptor).st_uid
        self.unreadable: list[tuple[str, int | None, str]] = []  # files skipped so far: name, owner if known, reason
        self._descriptor = descriptor
        self._files: list[tuple[str, os.DirEntry[str]]] = []  # of entries, each with the name of its entry

    def entries(self, kind: str) -> list[Entry]:
        """Return the entries of live processes, earliest first."""
        found = []
        for name, file in self._files:
            if file.name.startswith(f"{kind}-") and file.name.endswith(".json"):
                try:
                    facts = file.stat(follow_symlinks=False)
                except FileNotFoundError:  # already released
                    continue
                except OSError as error:
                    self._skip(file.name, str(error.strerror))
                    continue
                starts = tuple(_UUID_START.findall(file.name))
                found.append(Entry(facts.st_ctime_ns, name, facts.st_uid, file.name, starts))
        per_user: Counter[int] = Counter()
        alive = []
        for entry in sorted(found, reverse=True):
            per_user[entry.owner_id] += 1
            if per_user[entry.owner_id] > _MAX_RECORDS_PER_USER:
                continue
            is_held = self.is_held(entry.name, entry.owner_id)
            if is_held is not False:
                alive.append(entry._replace(is_closed=is_held is None))
        return alive[::-1]

    def read(self, entry: Entry) -> bytes:
        """Return an entry's record; raise ``OSError`` or ``ValueError`` if it is unreadable or invalid."""
        descriptor = os.open(entry.record, _READ, dir_fd=self._descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != entry.owner_id:
                raise ValueError("it is not a regular file of its owner")
            if found.st_size > MAX_RECORD_BYTES:
                raise ValueError(f"it has {found.st_size} bytes, more than {MAX_RECORD_BYTES}")
            return os.read(descriptor, MAX_RECORD_BYTES)
        finally:
            os.close(descriptor)

    def put(self, kind: str, record: bytes, uuids: Sequence[str] = ()) -> Held:
        """Create and hold an entry. Remove its files on failure."""
        from socket import AF_UNIX, socket

        starts = [uuid[: len("GPU-12345678")] for uuid in uuids]
        fit = len(starts) <= _MAX_UUID_STARTS and all(map(_UUID_START.fullmatch, starts))
        culprit, failure = None, OSError()
        for _ in range(_MAX_ATTEMPTS):
            name = f"{kind}-{os.urandom(8).hex()}"
            file = "-".join([name, *starts] if fit else [name]) + ".json"
            listener = socket(AF_UNIX)
            made: dict[str, os.stat_result] = {}
            try:
                self._listen(listener, f"{name}.sock", made)
                self._write(file, record, made)
                return Held(name, os.dup(self._descriptor), listener.detach(), made)
            except OSError as error:
                listener.close()
                _remove(self._descriptor, made)
                culprit = self._owner_of_others((f"{name}.sock", f".{file}", file)) or culprit
                failure = error
        if culprit is not None:
            user = user_name(culprit)
            reason = f"a process of {user} takes every file name that this claim tries"
            advice = f"Ask {user} or an administrator to end that process"
        elif failure.errno == errno.EACCES:
            reason, advice = "you may not create files in it", _open_to_all(self.path)
        else:
            reason = f"no file or Unix socket can be created in it ({failure.strerror})"
            advice = "Put it on a local file system with free space"
        raise _unusable(self.path, reason, advice) from failure

    def clean_up(self) -> None:
        """Remove the files of ended processes: those of this user, or of all users as root."""
        for name, file in self._files:
            with contextlib.suppress(OSError):  # already released, or unreadable; a file that stays only takes space
                owner_id = file.stat(follow_symlinks=False).st_uid
                if os.geteuid() in (0, owner_id) and self.is_held(name, owner_id) is False:
                    os.unlink(file.name, dir_fd=self._descriptor)

    @functools.cached_property
    def _mounted(self) -> dict[str, int | None]:
        return _mounted_in(self._descriptor)

    def list_files(self) -> None:
        """List the files, on which all other methods rely; raise ``ClaimsError`` if that takes too long."""
        try:
            with os.scandir(self._descriptor) as files:
                found = [*itertools.islice(files, _MAX_FILES + 1)]
        except OSError as error:
            raise _unusable(self.path, f"it cannot be listed ({error.strerror})", "Check its file system") from error
        if len(found) > _MAX_FILES:
            owners: Counter[int] = Counter()
            for file in found:
                with contextlib.suppress(OSError):  # already removed
                    if file.name not in self._mounted:
                        owners[file.stat(follow_symlinks=False).st_uid] += 1
            owner_id = max(owners, key=owners.__getitem__, default=0)
            reason = f"it has more than {_MAX_FILES:,} files, most of them of {user_name(owner_id)}"
            remove = f"find {shlex.quote(self.path)} -mindepth 1 -user {owner_id} -delete"
            raise _unusable(self.path, reason, f"{user_name(owner_id)} or an administrator can remove them: {remove}")
        self._files = []
        for file in found:
            if match := _FILE.fullmatch(file.name):
                if file.name in self._mounted:
                    self._skip(file.name, "another file system is mounted on it")
                else:
                    self._files.append((match[1] or match[2], file))

    def _skip(self, file: str, reason: str) -> None:
        self.unreadable.append((file, self._mounted.get(file), reason))

    def is_held(self, name: str, owner_id: int) -> bool | None:
        """Return whether a process of the owner has the socket open; ``None`` if it has, but with a closed mode."""
        from socket import AF_UNIX, socket  # takes a twentieth of the time of a pick without claims

        file = f"{name}.sock"
        try:
            if file in self._mounted:
                return False
            descriptor = os.open(file, _PATH_ONLY, dir_fd=self._descriptor)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._skip(file, str(error.strerror))
            return False
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != owner_id:
                return False
            with socket(AF_UNIX) as probe:
                probe.setblocking(False)
                probe.connect(_path_of(descriptor))
            return True
        except BlockingIOError:  # another process has already connected, and nobody accepts
            return True
        except PermissionError:  # due to its mode, or to an ACL or a security module
            if f"/{name}.sock\n" not in self._listening:
                return False
            return True if found.st_mode & stat.S_IWOTH else None
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT, errno.EPROTOTYPE)
        finally:
            os.close(descriptor)

    @functools.cached_property
    def _listening(self) -> str:
        """The kernel's list of the open sockets in this network namespace, which needs no permission."""
        return read_kernel_file("/proc/net/unix")

    def _listen(self, listener: "socket.socket", file: str, made: dict[str, os.stat_result]) -> None:
        listener.bind(f"{_path_of(self._descriptor)}/{file}")
        # The folder's owner may have replaced the file, and chmod() follows links.
        descriptor = os.open(file, _PATH_ONLY, dir_fd=self._descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            made[file] = found
            os.chmod(_path_of(descriptor), SOCKET_MODE)
        finally:
            os.close(descriptor)
        listener.listen(0)  # one connection is enough for checks; it is never accepted

    def _write(self, file: str, record: bytes, made: dict[str, os.stat_result]) -> None:
        descriptor = os.open(f".{file}", _CREATE, 0o600, dir_fd=self._descriptor)
        try:
            made[f".{file}"] = found = os.fstat(descriptor)
            if os.write(descriptor, record) < len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fchmod(descriptor, RECORD_MODE)  # regardless of this process's umask
        finally:
            os.close(descriptor)
        os.rename(f".{file}", file, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        made[file] = made.pop(f".{file}")
        if not os.path.samestat(os.stat(file, dir_fd=self._descriptor, follow_symlinks=False), found):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _owner_of_others(self, files: Iterable[str]) -> int | None:
        """Return the owner of the first file that belongs to another user; ``None`` if there is none."""
        mounted = _mounted_in(self._descriptor)
        for file in files:
            owner_id = mounted.get(file)
            with contextlib.suppress(OSError):
                if file not in mounted:
                    owner_id = os.stat(file, dir_fd=self._descriptor, follow_symlinks=False).st_uid
            if owner_id not in (None, os.geteuid()):
                return owner_id
        return None


@contextlib.contextmanager
def open_folder(path: str) -> Iterator[Folder | None]:
    """Open the folder for reading; yield ``None`` if it does not exist."""
    try:
        descriptor = _open(path)
    except FileNotFoundError:
        yield None
        return
    try:
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_folder(path: str) -> Iterator[Folder]:
    """Lock the folder, and create it if it does not exist."""
    began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    give_up_s = time.monotonic() + TIMEOUT_LOCK_S
    while True:
        try:
            descriptor = _create_and_open(path)
        except FileNotFoundError:  # already removed
            continue
        try:
            is_locked = False
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The folder may have been replaced by now, and locks on two folders do not exclude each other.
                is_locked = os.path.samestat(os.fstat(descriptor), os.lstat(path))
            if is_locked:
                yield Folder(path, descriptor)
                return
            if time.monotonic() > give_up_s:
                holder, advice = _holder_of_lock(descriptor, path, began_s)
                reason = f"{holder} has locked it for {TIMEOUT_LOCK_S:.0f} s"
                raise ClaimsLockedError(*_unusable(path, reason, advice).args)
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # because a child that was forked in between has this descriptor too
            os.close(descriptor)
        time.sleep(0.005 + 0.015 * os.urandom(1)[0] / 255)  # random, so that waiting processes do not poll in lockstep


def was_told(path: str) -> bool:
    """Return whether this user has been told of the folder before, and remember it in the folder."""
    mark = f".told-{os.getuid()}"
    try:
        folder = _create_and_open(path)
    except (ClaimsError, FileNotFoundError):  # unusable, or already removed
        return False
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=folder))
    except FileExistsError:  # of another user, it says nothing
        return os.stat(mark, dir_fd=folder, follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False
    finally:
        os.close(folder)
    return False


def _create_and_open(path: str) -> int:
    try:
        os.makedirs(path, mode=0o1777)
    except FileExistsError:
        give_up_s = time.monotonic() + _TIMEOUT_CREATION_S
        while _is_being_made(os.lstat(path)) and time.monotonic() < give_up_s:
            time.sleep(0.01)
        return _open(path)
    except OSError as error:
        advice = f"An administrator can create it: mkdir -m 1777 {printable_path(path)}"
        raise _unusable(path, f"it cannot be created ({error.strerror})", advice) from error
    descriptor = _open(path)
    os.fchmod(descriptor, 0o1777)  # regardless of this process's umask
    return descriptor


def _is_being_made(found: os.stat_result) -> bool:
    """Return whether another user may have created the folder just now, and not yet opened it to everybody."""
    return found.st_uid != os.geteuid() and not found.st_mode & 0o002 and time.time() - found.st_ctime < 1


def _open(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except PermissionError as error:
        raise _unusable(path, "you may not read it", _open_to_all(path)) from error
    except NotADirectoryError as error:
        kind = "a symbolic link, which is not followed" if os.path.islink(path) else "not a folder"
        raise _unusable(path, f"it is {kind}", "Remove it") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unusable(path, f"it cannot be opened ({error.strerror})", "Check its file system") from error
    mode, problem = os.fstat(descriptor).st_mode, None
    if not os.access(".", os.X_OK, dir_fd=descriptor, effective_ids=True):  # the user may be allowed only to list it
        problem = "you may not read its files", _open_to_all(path)
    elif mode & 0o022 and not mode & stat.S_ISVTX:
        problem = "it lets users remove the files of others", _open_to_all(path)
    elif not os.path.exists(_path_of(descriptor)):  # without it, every socket would seem dead
        problem = "/proc is not mounted", "Mount it"
    if problem:
        os.close(descriptor)
        raise _unusable(path, *problem)
    return descriptor


def _open_to_all(path: str) -> str:
    try:
        owner = f"Its owner {user_name(os.lstat(path).st_uid)} or an administrator"
    except OSError:  # a parent folder is closed, too
        owner = "An administrator"
    return f"{owner} can open it to all users: chmod 1777 {printable_path(path)}"


def _unusable(path: str, reason: str, advice: str) -> ClaimsError:
    return ClaimsError(
        f"The claims folder {printable_path(path)} cannot be used: {reason}. {advice}. Or set "
        "LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all users share."
    )


def _remove(folder: int, files: Mapping[str, os.stat_result]) -> None:
    """Remove the files of an entry, unless they were replaced by others."""
    for file, own in sorted(files.items()):  # the record before the socket that keeps it alive
        with contextlib.suppress(OSError):  # missing; or it stays and only takes space
            if _is_same(os.stat(file, dir_fd=folder, follow_symlinks=False), own):
                os.unlink(file, dir_fd=folder)


def _is_same(found: os.stat_result, own: os.stat_result) -> bool:
    """Return whether it is the same file, not another user's file that reuses the inode."""
    return os.path.samestat(found, own) and found.st_uid == own.st_uid


def _holder_of_lock(descriptor: int, path: str, began_s: float) -> tuple[str, str]:
    """Return who has locked the folder since ``began_s``, in seconds since boot, and what to do."""
    found = os.fstat(descriptor)
    file = f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} "
    unknown = "a process that cannot be identified", f"Root can find it: fuser -v {shlex.quote(path)}"
    lines = read_kernel_file("/proc/locks").splitlines()
    pid = next((line.split()[-4] for line in lines if file in line and "->" not in line), "0")  # arrow: it waits
    # This process took the lock. Since then, it may have left the lock to a child, and another may have got its PID.
    stat = process_stat(int(pid))
    if stat is None or stat.started_ticks / os.sysconf("SC_CLK_TCK") > began_s:
        return unknown
    try:
        user = user_name(os.stat(f"/proc/{pid}").st_uid)
        holder = f"{printable(read_kernel_file(f'/proc/{pid}/comm').strip())} of {user} (pid {pid})"
        is_certain = any(file in read_kernel_file(entry.path) for entry in os.scandir(f"/proc/{pid}/fdinfo"))
    except PermissionError:  # of another user
        return f"probably {holder} or one of its children", f"Ask {user} or an administrator to end it"
    except OSError:  # it has just ended
        return unknown
    return (holder, "End that process") if is_certain else unknown


def _path_of(descriptor: int) -> str:
    """Return a path for calls that accept no descriptor, short enough for a socket address."""
    return f"/proc/self/fd/{descriptor}"


def _mounted_in(folder: int) -> dict[str, int | None]:
    """Return files that are mount points, whose file systems may fail or hang, with the mounting users."""
    below = f"{os.readlink(_path_of(folder))}/"
    return {point[len(below) :]: mount.user_id for point, mount in read_mounts().items() if point.startswith(below)}
