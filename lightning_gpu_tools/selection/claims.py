"""Claims: what live jobs have said they need of which GPUs, for all users of the machine to see.

A claim lives as long as the processes that hold it, and not longer: the kernel sees to that, see ``claim_files``. What
a claim says is JSON, so that people and other programs can read it; a record that makes no sense is named and ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpu_readings import GpuClaim, GpuWaiter
from lightning_gpu_tools.quantities import parse_bytes, printable

# What only Windows needs is imported there: it would be a tenth of the time of a pick.
if sys.platform == "win32":
    import getpass
    import socket
    import tempfile

    from lightning_gpu_tools.selection.claim_files_windows import Folder, HeldFile, locked_folder

    own_name, _hostname, _temporary_directory = getpass.getuser, socket.gethostname, tempfile.gettempdir
else:
    import pwd

    from lightning_gpu_tools.selection.claim_files import Folder, HeldFile, locked_folder

    def own_name() -> str:
        """Return what the claims of this process have as their ``user``."""
        return _user_name(os.getuid())

    def _hostname() -> str:
        return os.uname().nodename

    def _temporary_directory() -> str:
        return "/tmp"


_CLAIM_NAME = re.compile(r"[0-9a-f]{16}\.claim")
_WAITER_NAME = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.waiter")
_SCHEMA_VERSION = 1


class Held(NamedTuple):
    """A claim or a place in the queue that this process holds, until it ends or releases it.

    Attributes:
        name: ``job`` of the ``GpuClaim``, ``name`` of the ``GpuWaiter``.
        directory: Where the file is.
        file: What the kernel knows it by.
    """

    name: str
    directory: str
    file: HeldFile

    def pass_on(self) -> None:
        """Let programs that this process executes hold it, too."""
        self.file.pass_on()

    def release(self) -> None:
        """Give it back; without effect on those who hold it together with this process."""
        self.file.let_go()
        # Removes the file, if nobody else holds it. If that fails now, the next who looks will do it.
        with contextlib.suppress(ClaimsError), open_ledger(self.directory, create=False) as ledger:
            ledger.clean_up()


def directory() -> str:
    """Return where claims live: ``LIGHTNING_GPU_TOOLS_CLAIMS_DIR``, else a folder for temporary files.

    On POSIX systems it is below ``/tmp`` whatever ``TMPDIR`` says, which often is another folder for each user.
    """
    configured = os.environ.get("LIGHTNING_GPU_TOOLS_CLAIMS_DIR")
    return configured or os.path.join(_temporary_directory(), "lightning-gpu-tools")


@contextlib.contextmanager
def open_ledger(path: str, *, create: bool = True) -> Iterator[Ledger]:
    """Have all claims to oneself for the duration of the block, so that nobody else looks or claims meanwhile.

    Args:
        path: Where the claims live, see ``directory``.
        create: Whether to create that folder, which only those who claim need to.

    Raises:
        ClaimsError: The folder cannot be used; the message says what to do.
    """
    with locked_folder(path, create=create) as folder:
        yield Ledger(path, folder)


class Ledger:
    """All claims, while this process has them to itself; see ``open_ledger``."""

    def __init__(self, path: str, folder: Folder | None) -> None:
        self._path = path
        self._folder = folder

    def claims(self, process_ids: Collection[int] = ()) -> tuple[GpuClaim, ...]:
        """Return the live claims, the oldest first.

        Args:
            process_ids: Processes that the driver lists on the GPUs. A claim is told which of them belong to it.
        """
        found = []
        for name, owner_id, record in self._records(_CLAIM_NAME):
            with self._naming(name):
                claim = _parse_claim(record, name.removesuffix(".claim"), owner_id)
                if claim.kind == "memory" and process_ids and record.get("pid_namespace") == _pid_namespace():
                    holders = self._existing_folder().holders(name) or {claim.pid}
                    claim = claim._replace(process_ids=_descendants(holders, process_ids))
                found.append(claim)
        return tuple(sorted(found, key=lambda claim: (claim.since_s, claim.job)))

    def waiters(self) -> tuple[GpuWaiter, ...]:
        """Return the jobs that wait, the one that has waited longest first."""
        found = []
        for name, owner_id, record in self._records(_WAITER_NAME):
            with self._naming(name):
                found.append(_parse_waiter(record, name.removesuffix(".waiter"), owner_id))
        return tuple(found)

    def clean_up(self) -> None:
        """Remove what ended jobs have left; looking at the claims or waiters does so, too."""
        self.claims()
        self.waiters()

    def take(
        self,
        uuids: Sequence[str],
        kind: Literal["memory", "whole", "exclusive"],
        memory_bytes: int | None = None,
        group: str | None = None,
    ) -> Held:
        """Claim GPUs; the caller has seen to it that they can be claimed.

        Raises:
            ClaimsError: The claim cannot be written.
        """
        claim = GpuClaim(
            job=os.urandom(8).hex(),
            uuids=tuple(uuids),
            kind=kind,
            memory_bytes=memory_bytes,
            pid=os.getpid(),
            user=own_name(),
            hostname=_hostname(),
            since_s=time.time(),
            group=group,
        )
        return self._create(claim.job, ".claim", claim)

    def queue(self, uuids: Sequence[str], count: int) -> Held:
        """Take the last place among those who wait.

        Args:
            uuids: The GPUs and MIG instances that would do.
            count: How many of them are needed.

        Raises:
            ClaimsError: The place cannot be written down.
        """
        waiting = self.waiters()
        number = int(waiting[-1].name.partition("-")[0]) + 1 if waiting else 0
        waiter = GpuWaiter(
            name=f"{number:012d}-{os.urandom(8).hex()}",
            uuids=tuple(uuids),
            requested=count,
            pid=os.getpid(),
            user=own_name(),
            since_s=time.time(),
        )
        return self._create(waiter.name, ".waiter", waiter)

    def join(self, claim: GpuClaim) -> Held:
        """Hold a claim together with those who hold it already, so that it lives as long as the last of them.

        Raises:
            ClaimsError: It is gone.
        """
        try:
            return Held(claim.job, self._path, self._existing_folder().join(f"{claim.job}.claim"))
        except OSError as error:
            raise ClaimsError(f"The claim on {', '.join(claim.uuids)} is gone: its holder has ended.") from error

    def _records(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, int | None, dict[str, Any]]]:
        """Yield name, owner and content of each live file, in the order of the names, and remove the others."""
        if self._folder is None:
            return
        for name in filter(pattern.fullmatch, self._folder.names()):
            with self._naming(name):
                file = self._folder.look(name)
                if file.is_held:
                    yield name, file.owner_id, json.loads(file.content)
                else:
                    self._folder.remove(name)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name a file that makes no sense and go on: somebody else's mistake must not keep anybody from the GPUs."""
        try:
            yield
        except (OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError) as error:
            import logging  # takes a twentieth of the time of a pick

            _log = logging.getLogger(__name__)
            _log.warning("%s cannot be read and is ignored: %.300r", os.path.join(self._path, name), error)

    def _create(self, name: str, ending: str, content: GpuClaim | GpuWaiter) -> Held:
        record = {field: getattr(content, field) for field in content._fields if field != "process_ids"}
        record.update(schema_version=_SCHEMA_VERSION, pid_namespace=_pid_namespace())
        try:
            file = self._existing_folder().create(name + ending, json.dumps(record, indent=1).encode())
        except OSError as error:
            raise ClaimsError(
                f"{os.path.join(self._path, name)}{ending} cannot be written: {error.strerror}."
            ) from error
        return Held(name, self._path, file)

    def _existing_folder(self) -> Folder:
        if self._folder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._path)
        return self._folder


def _parse_claim(record: dict[str, Any], job: str, owner_id: int | None) -> GpuClaim:
    """Turn a record into a claim; fields that a newer version may have added are ignored."""
    kind, group = record["kind"], record.get("group")
    if kind not in ("memory", "whole", "exclusive"):
        raise ValueError(f"kind is {kind!r:.80}")
    if not (group is None or isinstance(group, str)):
        raise ValueError(f"group is {group!r:.80}")
    return GpuClaim(
        job=job,
        uuids=_uuids(record),
        kind=kind,
        memory_bytes=parse_bytes(record["memory_bytes"], "memory_bytes") if kind == "memory" else None,
        pid=int(record["pid"]),
        user=_user(record, owner_id),
        hostname=printable(record["hostname"]),
        since_s=_seconds(record),
        group=group,
    )


def _parse_waiter(record: dict[str, Any], name: str, owner_id: int | None) -> GpuWaiter:
    return GpuWaiter(
        name=name,
        uuids=_uuids(record),
        requested=int(record["requested"]),
        pid=int(record["pid"]),
        user=_user(record, owner_id),
        since_s=_seconds(record),
    )


def _uuids(record: dict[str, Any]) -> tuple[str, ...]:
    uuids = record["uuids"]
    if not (isinstance(uuids, list) and all(isinstance(uuid, str) for uuid in uuids)):
        raise ValueError(f"uuids is {uuids!r:.80}")
    return tuple(uuids)


def _seconds(record: dict[str, Any]) -> float:
    since_s = float(record["since_s"])
    if not math.isfinite(since_s):
        raise ValueError(f"since_s is {since_s}")
    return since_s


def _user(record: dict[str, Any], owner_id: int | None) -> str:
    """Return whose file it is. What the record says counts only where files have no owners."""
    return printable(record["user"]) if owner_id is None else _user_name(owner_id)


def _user_name(user_id: int) -> str:
    if sys.platform != "win32":
        with contextlib.suppress(KeyError):  # a user without a name, as in many containers
            return pwd.getpwuid(user_id).pw_name
    return f"uid {user_id}"


def _pid_namespace() -> str | None:
    """Return a name of the numbering of processes, which differs between containers; ``None`` where there is one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        return None


def _descendants(holders: Collection[int], process_ids: Collection[int]) -> frozenset[int]:
    """Return which processes are among the holders of a claim or come from one of them."""
    import psutil  # a fifth of the time of a pick, and only needed where memory is claimed

    found = set()
    for pid in process_ids:
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or hidden
            if not {pid, *(parent.pid for parent in psutil.Process(pid).parents())}.isdisjoint(holders):
                found.add(pid)
    return frozenset(found)
