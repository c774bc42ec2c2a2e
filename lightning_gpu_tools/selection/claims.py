"""Claims: what live jobs have said they need of which GPUs, for all users of the machine to see.

Each process of a job has a record; the job's claim lives as long as one of them. Here is what the records say;
``claim_files`` keeps them and knows which live. docs/claims.md has the protocol on one page.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpus.readings import GpuClaim, GpuWaiter
from lightning_gpu_tools.processes import ProcessId, process_stat, running_kernel
from lightning_gpu_tools.units import MAX_BYTES, printable, printable_path, user_name

if sys.platform == "linux":
    from lightning_gpu_tools.selection import claim_files
if TYPE_CHECKING:
    from lightning_gpu_tools.selection.claim_files import Entry, Folder, Held

_Parsed = TypeVar("_Parsed")
# Names of the jobs of this process and of its children, comma-separated.
JOB_VARIABLE = "LIGHTNING_GPU_TOOLS_JOB"
_DEFAULT_DIRECTORY = "/tmp/lightning-gpu-tools"  # not TMPDIR, which often is another folder for each user
_MAX_PID = 2**22  # PID_MAX_LIMIT of 64-bit Linux, proc_sys_kernel(5)
_MAX_UUIDS = 1024  # more than 16 GPUs in MIG mode have
_UUID = re.compile(r"[\w/-]{1,100}")


def own_jobs() -> list[str]:
    """Return the names of this process's jobs."""
    return [job for job in os.environ.get(JOB_VARIABLE, "").split(",") if job]


def adopt_job(job: str) -> None:
    """Make a job one of this process and of its children."""
    os.environ[JOB_VARIABLE] = ",".join(dict.fromkeys([*own_jobs(), job]))


def is_of_own_job(claim: GpuClaim) -> bool:
    """Return whether a claim is that of one of this process's jobs."""
    return claim.job in own_jobs() and is_trusted(claim)


def is_trusted(claim: GpuClaim) -> bool:
    """Return whether a claim's names of job and group, which all users can copy, are to be believed."""
    return claim.owner_id in (os.geteuid(), 0)  # root may have started this job for its user


def directory() -> str:
    """Return where claims live."""
    return os.environ.get("LIGHTNING_GPU_TOOLS_CLAIMS_DIR") or _DEFAULT_DIRECTORY


@contextlib.contextmanager
def read_ledger(path: str) -> Iterator[Ledger]:
    """Read claims while others make and release them; waits for nobody, creates nothing."""
    _check(path)
    with claim_files.open_folder(path) as folder:
        yield Ledger(path, folder)


@contextlib.contextmanager
def open_ledger(path: str) -> Iterator[Ledger]:
    """Lock all claims, so that no other process claims at the same time."""
    _check(path)
    with claim_files.locked_folder(path) as folder:
        folder.clean_up()
        yield Ledger(path, folder, takes_claims=True)


def count_waiting(names: Collection[str]) -> int:
    """Return how many waiting jobs have a record, alive or not: 50 times faster than the queue."""
    try:
        files = {*os.listdir(directory())}
    except OSError:  # removed, or closed to this user
        return 0
    return sum(f"{name}.json" in files for name in names)


class Ledger:
    """The claims and the waiting jobs, as they were when first read; none where there is no folder.

    It ``takes_claims`` if this process has locked the folder.
    """

    def __init__(self, path: str, folder: Folder | None = None, *, takes_claims: bool = False) -> None:
        self._path = path
        self._folder = folder
        self.takes_claims = takes_claims

    def claims(self, process_ids: Collection[int] = ()) -> tuple[GpuClaim, ...]:
        """Return the live claims, the oldest first; those of memory with their jobs' processes among the given ones."""
        jobs: dict[tuple[object, ...], list[tuple[GpuClaim, ProcessId]]] = {}
        for claim, process in self._claim_records:
            # Only records of one user make one job: others can write any name.
            same = (claim.owner_id, claim.job, claim.uuids, claim.kind, claim.memory_bytes)
            jobs.setdefault(same, []).append((claim, process))
        found = []
        for records in jobs.values():
            claim = records[0][0]
            if process_ids and claim.kind == "memory":
                holders = {process.pid for _, process in records if process.is_running}
                claim = claim._replace(process_ids=_descendants(holders, process_ids))
            found.append(claim)
        return tuple(found)

    @functools.cached_property
    def waiters(self) -> tuple[GpuWaiter, ...]:
        """The waiting jobs, the first in the queue first."""
        return tuple(self._parsed("wait", _parse_waiter))

    @functools.cached_property
    def _claim_records(self) -> tuple[tuple[GpuClaim, ProcessId], ...]:
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
        """Claim GPUs as in ``GpuClaim``, for a new job or as a further process of one."""
        job = job or os.urandom(8).hex()
        content = {"job": job, "uuids": list(uuids), "kind": kind, "memory_bytes": memory_bytes, "group": group}
        held = self._put("claim", content)
        held.job = job
        return held

    def join(self, claim: GpuClaim) -> Held | None:
        """Hold a claim, too, which lives as long as its last holder; ``None``: this process does already."""
        own = (claim.job, os.geteuid(), ProcessId.of(os.getpid()))
        if own in ((one.job, one.owner_id, process) for one, process in self._claim_records):
            return None
        return self.take(claim.uuids, claim.kind, claim.memory_bytes, group=claim.group, job=claim.job)

    def queue(self, uuids: Sequence[str], count: int) -> Held:
        """Take the last place in the queue for ``count`` of these GPUs."""
        return self._put("wait", {"uuids": list(uuids), "requested": count})

    def _put(self, kind: str, content: dict[str, Any]) -> Held:
        assert self._folder is not None, "only open_ledger() gives a ledger to write to"
        own = ProcessId.of(os.getpid())
        record = {
            "schema_version": 2,
            **content,
            "pid": own.pid,
            "pid_namespace": own.namespace,
            "started_ticks": own.started_ticks,
            "hostname": os.uname().nodename,
        }
        return self._folder.put(kind, json.dumps(record, indent=1).encode())

    def _parsed(self, kind: str, parse: Callable[[Any, Entry], _Parsed]) -> Iterator[_Parsed]:
        """Yield what the live records of a kind say, the earliest first, and name those that make no sense."""
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


def warn(message: str) -> None:
    """Log a warning."""
    import logging  # takes a twentieth of the time of a pick

    logging.getLogger(__name__).warning("%s", message)


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Log a warning, the first time in this process."""
    warn(message)


def _check(path: str) -> None:
    if sys.platform != "linux":
        raise ClaimsError("Claims need Linux, so it is not known which GPUs other jobs have claimed.")
    # A folder that was named on purpose is not questioned; children would repeat the first process's warning.
    if path != _DEFAULT_DIRECTORY or JOB_VARIABLE in os.environ:
        return
    why = claim_files.why_private(path)
    if why:
        warn_once(
            f"The claims folder {path} {why}, so this job and jobs outside do not see each other's claims. Set "
            "LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all jobs of this server share; docs/claims.md says how."
        )


def _parse_claim(record: Any, entry: Entry) -> tuple[GpuClaim, ProcessId]:
    kind = record["kind"]
    if kind not in ("memory", "whole", "exclusive"):
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
    return claim, ProcessId(
        kernel=running_kernel(),  # which has ended all others' sockets
        namespace=record.get("pid_namespace"),
        pid=claim.pid,
        started_ticks=record.get("started_ticks"),
    )


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
    """Return which processes are holders of a claim or their children."""
    found = set()
    for pid in process_ids:
        ancestor = pid
        while ancestor and ancestor not in holders:
            stat = process_stat(ancestor)
            ancestor = stat.parent if stat else 0
        if ancestor:
            found.add(pid)
    return frozenset(found)
