"""Claims: what live jobs have said they need of which GPUs, for all users of the machine to see.

Each process of a job has a record of its own; the job's claim lives as long as one of them. That a record counts only
while a process of its owner lives is the business of ``claim_files``; here is what the records say. They are JSON, so
that people and other programs can read them; one that makes no sense is named once and ignored. docs/claims.md has the
protocol on one page.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpus.readings import GpuClaim, GpuWaiter
from lightning_gpu_tools.processes import pid_namespace, process_stat
from lightning_gpu_tools.units import MAX_BYTES, printable, printable_path, user_name

if sys.platform == "linux":
    from lightning_gpu_tools.selection import claim_files
if TYPE_CHECKING:
    from lightning_gpu_tools.selection.claim_files import Entry, Folder, Held

_Parsed = TypeVar("_Parsed")
# Names of the jobs whose claims this process and its children count as their own, comma-separated.
JOB_VARIABLE = "LIGHTNING_GPU_TOOLS_JOB"
_DEFAULT_DIRECTORY = "/tmp/lightning-gpu-tools"  # not TMPDIR, which often is another folder for each user
_SCHEMA_VERSION = 2
_KINDS = ("memory", "whole", "exclusive")
_MAX_PID = 2**22  # PID_MAX_LIMIT of 64-bit Linux, proc_sys_kernel(5)
_MAX_UUIDS = 1024  # more than 16 GPUs in MIG mode have
_UUID = re.compile(r"[\w/-]{1,100}")


def own_jobs() -> list[str]:
    """Return the names of the jobs that this process counts as its own."""
    return [job for job in os.environ.get(JOB_VARIABLE, "").split(",") if job]


def adopt_job(job: str) -> None:
    """Count a job's claims as those of this process and of its children."""
    os.environ[JOB_VARIABLE] = ",".join(dict.fromkeys([*own_jobs(), job]))


def is_of_own_job(claim: GpuClaim) -> bool:
    """Return whether a claim is that of this process's job."""
    return claim.job in own_jobs() and is_trusted(claim)


def is_trusted(claim: GpuClaim) -> bool:
    """Return whether a claim's names of job and group can be believed: others can read and write them, too."""
    return claim.owner_id in (os.geteuid(), 0)  # root may have started this job for its user


def directory() -> str:
    """Return where claims live: ``LIGHTNING_GPU_TOOLS_CLAIMS_DIR``, else ``lightning-gpu-tools`` in ``/tmp``."""
    return os.environ.get("LIGHTNING_GPU_TOOLS_CLAIMS_DIR") or _DEFAULT_DIRECTORY


@contextlib.contextmanager
def read_ledger(path: str) -> Iterator[Ledger]:
    """Read claims for the duration of the block, as others make and release them. Waits for nobody, creates nothing.

    Raises:
        ClaimsError: They cannot be read, or not be relied on; the message says why and what to do.
    """
    _check_platform()
    _warn_if_private(path)
    with claim_files.open_folder(path) as folder:
        yield Ledger(path, folder)


@contextlib.contextmanager
def open_ledger(path: str) -> Iterator[Ledger]:
    """Lock all claims for the duration of the block, so that no other process claims at the same time.

    Raises:
        ClaimsError: The folder cannot be used, or is locked by somebody else; the message says what to do.
    """
    _check_platform()
    _warn_if_private(path)
    with claim_files.locked_folder(path) as folder:
        folder.clean_up()
        yield Ledger(path, folder, takes_claims=True)


def count_waiting(names: Collection[str]) -> int:
    """Return how many of these waiting jobs have a record; one that was killed may have left its own.

    It costs a fiftieth of reading the queue.
    """
    try:
        files = {*os.listdir(directory())}
    except OSError:  # removed, or closed to this user
        return 0
    return sum(f"{name}.json" in files for name in names)


class Ledger:
    """The claims and the waiting jobs, as they were when first read.

    Where there is no folder, nothing is known to be claimed. One that ``takes_claims`` is of a folder that this process
    has locked, so that it may add claims.
    """

    def __init__(self, path: str, folder: Folder | None = None, *, takes_claims: bool = False) -> None:
        self._path = path
        self._folder = folder
        self.takes_claims = takes_claims

    def claims(self, process_ids: Collection[int] = ()) -> tuple[GpuClaim, ...]:
        """Return the live claims, the oldest first.

        Of the processes that the driver lists on the GPUs, a claim of memory is returned with those of its job.
        """
        jobs: dict[tuple[object, ...], list[_ClaimRecord]] = {}
        for record in self._claim_records:
            claim = record.claim
            # Only records of one user make one job: others can write any name.
            same = (claim.owner_id, claim.job, claim.uuids, claim.kind, claim.memory_bytes)
            jobs.setdefault(same, []).append(record)
        found = []
        for records in jobs.values():
            claim = records[0].claim
            if process_ids and claim.kind == "memory":
                holders = {one.claim.pid for one in records if one.process.is_here(one.claim.pid)}
                claim = claim._replace(process_ids=_descendants(holders, process_ids))
            found.append(claim)
        return tuple(found)

    @functools.cached_property
    def waiters(self) -> tuple[GpuWaiter, ...]:
        """The jobs that wait, the one that has waited longest first."""
        return tuple(self._parsed("wait", _parse_waiter))

    @functools.cached_property
    def _claim_records(self) -> tuple[_ClaimRecord, ...]:
        return tuple(self._parsed("claim", _parse_claim))

    def take(
        self,
        uuids: Sequence[str],
        kind: Literal["memory", "whole", "exclusive"],
        memory_bytes: int | None = None,
        *,
        group: str | None = None,
        job: str | None = None,
    ) -> Held:
        """Claim GPUs, the best first, with the ledger locked; the caller has checked that they can be claimed.

        What is claimed is as in ``GpuClaim``. ``job`` is that whose further process this is; ``None`` for a new one.

        Raises:
            ClaimsError: The claim cannot be written.
        """
        job = job or os.urandom(8).hex()
        content = {"job": job, "uuids": list(uuids), "kind": kind, "memory_bytes": memory_bytes, "group": group}
        held = self._put("claim", content)
        held.job = job
        return held

    def join(self, claim: GpuClaim) -> Held | None:
        """Hold a claim, too, so that it lives as long as the last process that does; ``None``: this one does already.

        Raises:
            ClaimsError: The record cannot be written.
        """
        own = _ProcessIdentity.of(os.getpid())
        for record in self._claim_records:
            same = (record.claim.job, record.claim.owner_id) == (claim.job, os.geteuid())
            if same and record.claim.pid == os.getpid() and record.process == own:
                return None
        return self.take(claim.uuids, claim.kind, claim.memory_bytes, group=claim.group, job=claim.job)

    def queue(self, uuids: Sequence[str], count: int) -> Held:
        """Take the last place in the queue for that many of these GPUs and MIG instances, with the ledger locked.

        Raises:
            ClaimsError: The place cannot be written down.
        """
        return self._put("wait", {"uuids": list(uuids), "requested": count})

    def _put(self, kind: str, content: dict[str, Any]) -> Held:
        assert self._folder is not None, "only open_ledger() gives a ledger to write to"
        own = _ProcessIdentity.of(os.getpid())
        record = {
            "schema_version": _SCHEMA_VERSION,
            **content,
            "pid": os.getpid(),
            "pid_namespace": own.namespace,
            "started_ticks": own.started_ticks,
            "hostname": os.uname().nodename,
        }
        return self._folder.put(kind, json.dumps(record, indent=1).encode())

    def _parsed(self, kind: str, parse: Callable[[Any, Entry], _Parsed]) -> Iterator[_Parsed]:
        """Yield what the live records of a kind say, the earliest first; name those that make no sense, and go on."""
        if self._folder is None:
            return
        for entry in self._folder.entries(kind):
            try:
                parsed = parse(json.loads(self._folder.read(entry)), entry)
            except FileNotFoundError:  # released meanwhile
                continue
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                # Somebody else's mistake, or malice, must not keep anybody from the GPUs.
                owner = user_name(entry.owner_id)
                file = printable_path(os.path.join(self._path, f"{entry.name}.json"))
                warn_once(f"{file} of {owner} cannot be read and is ignored: {printable(repr(error))}")
                continue
            yield parsed


class _ProcessIdentity(NamedTuple):
    """What distinguishes a process from another one that has or had the same number."""

    namespace: str | None
    started_ticks: int | None

    @classmethod
    def of(cls, pid: int) -> _ProcessIdentity:
        stat = process_stat(pid)
        return cls(pid_namespace(), None if stat is None else stat.started_ticks)

    def is_here(self, pid: int) -> bool:
        """Return whether the process of that number, as this process counts them, is the one that is meant."""
        return self == _ProcessIdentity.of(pid) and self.started_ticks is not None


class _ClaimRecord(NamedTuple):
    """One process's record of its job's claim."""

    claim: GpuClaim
    process: _ProcessIdentity


def warn(message: str) -> None:
    """Log a warning."""
    import logging  # takes a twentieth of the time of a pick

    logging.getLogger(__name__).warning("%s", message)


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Log a warning, the first time in this process."""
    warn(message)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise ClaimsError("Claims need Linux, so it is not known which GPUs other jobs have claimed.")


def _warn_if_private(path: str) -> None:
    # A folder that was named on purpose is not questioned; children would repeat the first process's warning.
    if path != _DEFAULT_DIRECTORY or JOB_VARIABLE in os.environ:
        return
    why = claim_files.why_private(path)
    if why:
        warn_once(
            f"The claims folder {path} {why}, so this job and jobs outside do not see each other's claims. Set "
            "LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all jobs of this server share; docs/claims.md says how."
        )


def _parse_claim(record: Any, entry: Entry) -> _ClaimRecord:
    """Turn a record into a claim; fields that a newer version may have added are ignored."""
    kind = record["kind"]
    if kind not in _KINDS:
        raise ValueError(f"kind is {kind!r:.80}")
    claim = GpuClaim(
        job=_text(record, "job", 100),
        uuids=_uuids(record),
        kind=kind,
        memory_bytes=_number(record, "memory_bytes", 0, MAX_BYTES) if kind == "memory" else None,
        pid=_number(record, "pid", 1, _MAX_PID),
        user=user_name(entry.owner_id),
        owner_id=entry.owner_id,
        hostname=printable(_text(record, "hostname", 255)),
        since_s=entry.since_ns / 1e9,
        group=None if record.get("group") is None else _text(record, "group", 4096),
    )
    return _ClaimRecord(claim, _ProcessIdentity(record.get("pid_namespace"), record.get("started_ticks")))


def _parse_waiter(record: Any, entry: Entry) -> GpuWaiter:
    return GpuWaiter(
        name=entry.name,
        uuids=_uuids(record),
        requested=_number(record, "requested", 1, _MAX_UUIDS),
        pid=_number(record, "pid", 1, _MAX_PID),
        user=user_name(entry.owner_id),
    )


def _uuids(record: Any) -> tuple[str, ...]:
    uuids = record["uuids"]
    are_uuids = isinstance(uuids, list) and all(isinstance(uuid, str) and _UUID.fullmatch(uuid) for uuid in uuids)
    if not are_uuids or len(uuids) > _MAX_UUIDS:
        raise ValueError(f"uuids is {uuids!r:.80}")
    return tuple(uuids)


def _number(record: Any, name: str, minimum: int, maximum: int) -> int:
    value = record[name]
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def _text(record: Any, name: str, max_length: int) -> str:
    value = record[name]
    if not isinstance(value, str) or len(value) > max_length:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def _descendants(holders: Collection[int], process_ids: Collection[int]) -> frozenset[int]:
    """Return which processes are among the holders of a claim or come from one of them."""
    found = set()
    for pid in process_ids:
        ancestor: int | None = pid
        while ancestor and ancestor not in holders:
            stat = process_stat(ancestor)
            ancestor = None if stat is None else stat.parent
        if ancestor:
            found.add(pid)
    return frozenset(found)
