"""Claims: the declared needs of live jobs on GPUs, visible to all users of the machine.

Each process of a job has a record, and the claim lives as long as any of these processes. This module defines the
content of records; ``claim_files`` stores them and detects which are live. docs/claims.md describes the protocol.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, TypeVar

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpus.readings import MAX_USERS, GpuClaim, GpuWaiter, folded_claims
from lightning_gpu_tools.processes import (
    ProcessId,
    descendants,
    is_running,
    mount_of,
    process_id,
    read_kernel_file,
    read_mounts,
    running_kernel,
)
from lightning_gpu_tools.selection import claim_files
from lightning_gpu_tools.selection.claim_files import Entry, Folder, Held
from lightning_gpu_tools.units import MAX_BYTES, printable, printable_path, user_name

_Parsed = TypeVar("_Parsed")
# Names of the jobs of this process and its children, comma-separated.
JOB_VARIABLE = "LIGHTNING_GPU_TOOLS_JOB"
_DEFAULT_DIRECTORY = "/tmp/lightning-gpu-tools"  # not TMPDIR, which often differs between users
_MAX_PID = 2**22  # PID_MAX_LIMIT of 64-bit Linux, proc_sys_kernel(5)
_MAX_UUIDS = 1024  # more than on 16 GPUs in MIG mode
_UUID = re.compile(r"[\w/-]{1,100}")
_CLOSED = object()  # stands for a record that this user may not read
KEEP_EVERY_S = 1.0  # our default; it costs two lstat() calls


def own_jobs() -> list[str]:
    """Return the names of this process's jobs."""
    return [job for job in os.environ.get(JOB_VARIABLE, "").split(",") if job]


def adopt_job(job: str) -> None:
    """Add a job to those of this process and its children."""
    os.environ[JOB_VARIABLE] = ",".join(dict.fromkeys([*own_jobs(), job]))


def is_of_own_job(claim: GpuClaim) -> bool:
    """Return whether a claim belongs to one of this process's jobs."""
    return claim.job in own_jobs() and is_trusted(claim)


def is_trusted(claim: GpuClaim) -> bool:
    """Return whether a claim's job and group names, which all users can copy, can be trusted."""
    return claim.owner_id in (os.geteuid(), 0)  # root may have started this job for its user


def directory() -> str:
    """Return the path of the claims folder."""
    return os.path.abspath(os.environ.get("LIGHTNING_GPU_TOOLS_CLAIMS_DIR") or _DEFAULT_DIRECTORY)


@contextlib.contextmanager
def read_ledger(path: str) -> Iterator[Ledger]:
    """Read claims without a lock, while others make and release them. Never waits, and creates nothing."""
    with claim_files.open_folder(path) as folder:
        if folder:
            _name_owner(folder)
            folder.list_files()
        yield Ledger(folder)


@contextlib.contextmanager
def open_ledger(path: str) -> Iterator[Ledger]:
    """Lock the claims, so that no other process can claim at the same time."""
    with claim_files.locked_folder(path) as folder:
        _name_owner(folder)
        folder.list_files()
        folder.clean_up()
        yield Ledger(folder, takes_claims=True)


def is_waiting(job: GpuWaiter) -> bool:
    """Return whether a job is still in the queue. Far cheaper than reading the queue."""
    try:
        with claim_files.open_folder(directory()) as folder:
            return folder is not None and folder.is_held(job.name, job.owner_id) is True
    except ClaimsError:  # closed to this user by now, as the next poll will report
        return False


_held_claims: list[HeldClaim] = []  # a forked child has a copy of its parent's


class HeldClaim:
    """A claim that this process holds until it ends or releases the claim."""

    def __init__(self, path: str, content: dict[str, Any], held: Held) -> None:
        self.job: str = content["job"]
        self._path = path
        self._content = content
        self.held = held
        self._said: set[str] = set()
        _held_claims.append(self)

    def release(self) -> None:
        """Release the claim, even if forked children still hold it. Idempotent."""
        with contextlib.suppress(ValueError):
            _held_claims.remove(self)
        self.held.release()

    def keep(self) -> str:
        """Take the claim again if its files were removed. Return a message about it, or ``""`` if none is new."""
        if self not in _held_claims or self.held.is_in(self._path):
            return ""
        try:
            event = self._take_again()
        except Exception as error:  # noqa: BLE001 - after any error, the next attempt may succeed
            event = f"The claim of this job was removed and cannot be restored. {printable(error, 1000)}"
        if event in self._said:
            return ""
        self._said.add(event)
        return event

    def _take_again(self) -> str:
        kind, uuids = self._content["kind"], self._content["uuids"]
        with open_ledger(self._path) as ledger:
            rivals = ledger.rivals(uuids, kind, [self.job])
            content = {**self._content, "kind": "whole", "memory_bytes": None} if rivals else self._content
            before, self.held = self.held, ledger.put("claim", content)
        owner_id = os.stat(self._path).st_uid  # who can remove the files of others
        before.release()
        if self not in _held_claims:  # released meanwhile, by another thread
            self.held.release()
        by = f", which belongs to {user_name(owner_id)}" if _is_foreign(owner_id) else ""
        event = f"The claim of this job on {', '.join(uuids)} was removed from {printable_path(self._path)}{by}."
        if not rivals:
            return f"{event} No other job had claimed it exclusively, so this job has claimed it again."
        names = ", ".join(folded_claims(rivals, str))
        return f"{event} Meanwhile {names} claimed it. Both jobs now use it: talk to them, or stop this job."


def held_claims() -> list[HeldClaim]:
    """Return the claims that this process holds."""
    return [claim for claim in [*_held_claims] if claim.held.pid == os.getpid()]


def pass_claims_on() -> None:
    """Pass the claims of this process on to a program that it executes."""
    for claim in held_claims():
        claim.held.pass_on()


def keep_claims() -> list[str]:
    """Restore claims of this process whose files were removed. Return messages. Safe in any thread."""
    return [event for claim in held_claims() if (event := claim.keep())]


class Ledger:
    """The claims and the waiting jobs as of the first read; empty without a folder.

    ``takes_claims`` is true if this process has locked the folder; ``problem`` is the reason that it could not do so.
    """

    def __init__(self, folder: Folder | None = None, *, takes_claims: bool = False) -> None:
        self._folder = folder
        self.takes_claims = takes_claims
        self.problem: ClaimsError | None = None

    def claims(self, process_ids: Collection[int] = ()) -> tuple[GpuClaim, ...]:
        """Return the live claims, oldest first, with the PIDs that are certain.

        Claims on memory list their jobs' processes among ``process_ids``.
        """
        jobs: dict[tuple[object, ...], list[GpuClaim]] = {}
        for claim in self._claim_records:
            # Only records of the same user form a job, because other users can write any name.
            same = (claim.owner_id, claim.job, claim.uuids, claim.kind, claim.memory_bytes)
            jobs.setdefault(same, []).append(claim)
        found = []
        for records in jobs.values():
            claim = records[0]
            if process_ids and claim.kind == "memory":
                pids = {record.pid for record in records if record.pid is not None}
                claim = claim._replace(process_ids=descendants(process_ids, pids))
            found.append(claim)
        return tuple(found)

    def rivals(self, uuids: Collection[str], kind: str, own_jobs: Collection[str]) -> list[GpuClaim]:
        """Return the claims of other jobs that contradict a claim of this kind, because one of the two is exclusive."""
        return [
            claim
            for claim in self.claims()
            if any(map(claim.is_on, uuids))
            and "exclusive" in (kind, claim.kind)
            and not (claim.job in own_jobs and is_trusted(claim))
        ]

    @functools.cached_property
    def waiters(self) -> tuple[GpuWaiter, ...]:
        """The waiting jobs in queue order."""
        return tuple(self._parsed("wait", _parse_waiter))

    @functools.cached_property
    def _claim_records(self) -> tuple[GpuClaim, ...]:
        return tuple(self._parsed("claim", _parse_claim))

    def take(
        self,
        uuids: Sequence[str],
        kind: Literal["memory", "whole", "exclusive"],
        memory_bytes: int | None = None,
        *,
        group: str | None = None,
        job: str | None = None,
    ) -> HeldClaim:
        """Claim GPUs as in ``GpuClaim``, for a new job or for another process of an existing job."""
        job = job or os.urandom(8).hex()
        content = {"job": job, "uuids": list(uuids), "kind": kind, "memory_bytes": memory_bytes, "group": group}
        held = self.put("claim", content)
        assert self._folder is not None
        return HeldClaim(self._folder.path, content, held)

    def join(self, claim: GpuClaim) -> HeldClaim | None:
        """Hold an existing claim in this process, too; return ``None`` if it already does."""
        own = (os.geteuid(), os.getpid(), claim.job)
        if any((record.owner_id, record.pid, record.job) == own for record in self._claim_records):
            return None
        return self.take(claim.uuids, claim.kind, claim.memory_bytes, group=claim.group, job=claim.job)

    def queue(self, uuids: Sequence[str], count: int) -> Held:
        """Take the last place in the queue for ``count`` of these GPUs."""
        return self.put("wait", {"uuids": list(uuids), "requested": count})

    def put(self, kind: str, content: dict[str, Any]) -> Held:
        """Create an entry of this process; raise the problem of a ledger that has one."""
        if self.problem:
            raise self.problem
        assert self._folder is not None, "only a ledger of open_ledger can be written to"
        process = process_id(os.getpid())
        record = {
            "schema_version": 2,
            **content,
            "pid": process["pid"],
            "pid_namespace": process["namespace"],
            "started_ticks": process["started_ticks"],
            "hostname": os.uname().nodename,
        }
        return self._folder.put(kind, json.dumps(record, indent=1).encode(), content["uuids"])

    def _parsed(self, kind: str, parse: Callable[[Any, Entry], _Parsed]) -> Iterator[_Parsed]:
        """Yield the parsed live records of a kind, earliest first, and warn about invalid ones.

        A record that this user may not read is parsed as ``_CLOSED``.
        """
        if self._folder is None:
            return
        closed: list[tuple[str, int | None, str]] = []
        unreadable = self._folder.unreadable
        for entry in self._folder.entries(kind):
            try:
                closed_file = f"{entry.name}.sock" if entry.is_closed else None
                try:
                    record = json.loads(self._folder.read(entry))
                except PermissionError:
                    closed_file, record = entry.record, _CLOSED
                if closed_file and kind != "claim":
                    raise ValueError("it is closed to other users")
                parsed = parse(record, entry)
            except FileNotFoundError:  # already released
                continue
            except (OSError, ValueError, AttributeError, RecursionError) as error:
                # Mistakes or malice of other users must not keep anybody from using GPUs.
                unreadable.append((entry.record, entry.owner_id, repr(error)))
                continue
            if closed_file:
                mode = claim_files.RECORD_MODE if record is _CLOSED else claim_files.SOCKET_MODE
                closed.append((closed_file, entry.owner_id, f"{mode:o}"))
            yield parsed
        _warn_of_files(self._folder.path, unreadable, "{file} of {owner} cannot be read and is ignored: {reason}{more}")
        _warn_of_files(
            self._folder.path,
            closed,
            "{file} of {owner} is closed to other users{more}, so its GPUs count as claimed. {owner} or an "
            "administrator can open it: chmod {reason} {file}",
        )


def _certain_pid(record: Any, owner_id: int) -> int | None:
    """Return the PID in a record if its start time and its owner prove that this process wrote the record."""
    pid = _number(record, "pid", 1, _MAX_PID)
    process = ProcessId(
        kernel=running_kernel(),  # sockets of an earlier kernel are dead
        namespace=record.get("pid_namespace"),
        pid=pid,
        started_ticks=record.get("started_ticks"),
    )
    if is_running(process):
        with contextlib.suppress(OSError):  # just ended
            return pid if os.stat(f"/proc/{pid}").st_uid == owner_id else None
    return None


def warn(message: str) -> None:
    """Log a warning."""
    import logging  # this import takes a twentieth of the time of a pick

    logging.getLogger(__name__).warning("%s", message)


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Log a warning once in this process."""
    warn(message)


_warned_of: dict[tuple[str, str], list[int | None]] = {}  # by folder and message: the users named so far


def _warn_of_files(path: str, files: Sequence[tuple[str, int | None, str]], message: str) -> None:
    """Warn about the first file of each user and the number of further files, once in this process, of three users."""
    named = _warned_of.setdefault((path, message), [])
    of_users: dict[int | None, dict[str, str]] = {}
    for file, owner_id, reason in files:  # some occur several times
        of_users.setdefault(owner_id, {}).setdefault(file, reason)
    for owner_id, reasons in of_users.items():
        if owner_id in named or len(named) > MAX_USERS:
            continue
        named.append(owner_id)
        if len(named) > MAX_USERS:
            warn(f"More users have such files in {printable_path(path)}. They are not named.")
            return
        file, reason = next(iter(reasons.items()))
        owner = "an unknown user" if owner_id is None else user_name(owner_id)
        more = f" (and {len(reasons) - 1:,} more of {owner})" if len(reasons) > 1 else ""
        place = printable_path(os.path.join(path, file))
        warn(message.format(file=place, owner=owner, reason=printable(reason), more=more))


def _is_foreign(user_id: int) -> bool:
    """Return whether a user is neither this user nor root."""
    if user_id in (0, os.geteuid()):
        return False
    # In an unprivileged container, root of the host appears as the overflow user, like all unmapped users.
    is_outside = read_kernel_file("/proc/sys/kernel/overflowuid").strip() == str(user_id)
    return not is_outside or read_kernel_file("/proc/self/uid_map").split() == ["0", "0", str(2**32 - 1)]


def _name_owner(folder: Folder) -> None:
    if JOB_VARIABLE not in os.environ and _is_foreign(folder.owner_id):  # children would repeat the warning
        path = printable_path(folder.path)
        warn_once(
            f"The claims folder {path} belongs to {user_name(folder.owner_id)}, who can remove the claims of others. "
            f"To prevent this, an administrator can run: chown root {path}"
        )


def warn_if_private() -> None:
    """Warn this user once, ever, if other jobs cannot see the claims that this job's guarantees depend on."""
    path = directory()
    # A folder that was set explicitly is not checked. Children would repeat the first process's warning.
    if path != _DEFAULT_DIRECTORY or JOB_VARIABLE in os.environ:
        return
    own_mounts = read_mounts()
    mount, why = mount_of(path, own_mounts), ""
    markers = ("/.dockerenv", "/run/.containerenv")  # created by Docker; by Podman
    is_contained = any(map(os.path.exists, markers)) or "KUBERNETES_SERVICE_HOST" in os.environ
    if mount != mount_of(path, read_mounts(1) or own_mounts):  # hidden by hidepid
        why = "is on a mount that only this job sees"
    elif is_contained and mount == mount_of("/", own_mounts):
        why = "is inside this container"
    if why and not claim_files.was_told(path):
        warn_once(
            f"The claims folder {path} {why}, so this job and jobs outside do not see each other's claims. Set "
            "LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all jobs of this server share (see docs/claims.md)."
        )


def _parse_claim(record: Any, entry: Entry) -> GpuClaim:
    of_file: dict[str, Any] = {  # the file system vouches for these
        "user": user_name(entry.owner_id),
        "owner_id": entry.owner_id,
        "since_s": entry.since_ns / 1e9,
    }
    if record is _CLOSED:  # it may be a claim of any kind, on all GPUs
        uuids = entry.uuid_starts or ("GPU-", "MIG-")
        return GpuClaim(job="", uuids=uuids, kind="exclusive", memory_bytes=None, hostname=None, **of_file)
    kind = _valid(record, "kind", lambda value: value in ("memory", "whole", "exclusive"))
    return GpuClaim(
        job=_text(record, "job", 100),
        uuids=_uuids(record),
        kind=kind,
        memory_bytes=_number(record, "memory_bytes", 0, MAX_BYTES) if kind == "memory" else None,
        hostname=printable(_text(record, "hostname", 255)),
        group=None if record.get("group") is None else _text(record, "group", 4096),
        pid=_certain_pid(record, entry.owner_id),
        **of_file,
    )


def _parse_waiter(record: Any, entry: Entry) -> GpuWaiter:
    return GpuWaiter(
        name=entry.name,
        uuids=_uuids(record),
        requested=_number(record, "requested", 1, _MAX_UUIDS),
        pid=_certain_pid(record, entry.owner_id),
        user=user_name(entry.owner_id),
        owner_id=entry.owner_id,
    )


def _text(record: Any, name: str, max_length: int) -> str:
    """Return a field of a record, which another user wrote; raise ``ValueError`` if its value is invalid."""
    return str(_valid(record, name, lambda value: isinstance(value, str) and len(value) <= max_length))


def _number(record: Any, name: str, minimum: int, maximum: int) -> int:
    return int(_valid(record, name, lambda value: type(value) is int and minimum <= value <= maximum))


def _uuids(record: Any) -> tuple[str, ...]:
    def are_uuids(value: Any) -> bool:
        is_list = isinstance(value, list) and len(value) <= _MAX_UUIDS
        return is_list and all(isinstance(uuid, str) and _UUID.fullmatch(uuid) for uuid in value)

    return tuple(_valid(record, "uuids", are_uuids))


def _valid(record: Any, name: str, is_valid: Callable[[Any], bool]) -> Any:
    value = record.get(name)
    if not is_valid(value):
        raise ValueError(f"{name} is {value!r:.80}")
    return value
