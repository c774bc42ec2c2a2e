"""Yielding idle GPUs to a waiting job: a reminder to their user, or SIGTERM if the job agreed to that; docs/claims.md.

A thread polls once a minute, in the monitor, in the process that keeps the claim of ``run``, and in each process that
claims with ``yield_after``. The first process of a job that agreed decides for the whole job.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from lightning_gpu_tools.errors import ClaimsError, NvmlUnavailableError
from lightning_gpu_tools.processes import descendants
from lightning_gpu_tools.selection import claims
from lightning_gpu_tools.units import format_duration

if TYPE_CHECKING:
    from lightning_gpu_tools.gpus.readings import GpuClaim, GpuWaiter
    from lightning_gpu_tools.gpus.sampler import Sampler
    from lightning_gpu_tools.processes import ProcessId
    from lightning_gpu_tools.selection.claims import HeldClaim

CHECK_EVERY_S = 60.0  # our default: a minute hardly matters to a waiting job
POLL_EVERY_S = 10.0  # the driver's buffer holds about 20 s
REMIND_AFTER_S = 1800.0  # our default: no training reads, compiles or saves for half an hour
_REMIND_EVERY_S = 3600.0  # our default
_SIGNAL_EVERY_S = 600.0  # our default: saving takes minutes, and a notebook outlives its training
_MIN_POLLS = 3  # the first poll only starts the sampling, and the second may be too early for a sample


def agreement(yield_after_s: float) -> str:
    """Return a sentence on the job's agreement."""
    idle = format_duration(yield_after_s)
    return f"This job gets SIGTERM once its GPUs have been idle for {idle} and another job waits for one of them."


_watched: set[HeldClaim] = set()


def watch_claims() -> None:
    """Watch this process's claims with ``yield_after``, unless they are already watched."""
    for claim in claims.held_claims():
        if claim.yield_after_s is not None and claim not in _watched:
            _watched.add(claim)
            Agreement(claim, claim.yield_after_s, claims.warn).start()


def watch_program(claim: HeldClaim, pipe: int) -> None:
    """Watch the claim of a program. Each process that holds the claim has the other end of the pipe open."""
    if claim.yield_after_s is not None:
        _poll_in_thread(Agreement(claim, claim.yield_after_s, claims.write_line, pipe).check, claims.write_line)
    else:
        sampler = functools.cache(lambda: _open_sampler(claim.uuids))  # opened by the first poll
        reminder = Reminder(claim.uuids, lambda: sampler().idle_s(claim.uuids), claims.write_line, claim)
        _poll_in_thread(reminder.check, claims.write_line)


class Reminder:
    """A message to the user of idle GPUs that another job waits for, at most once an hour.

    ``idle_s`` returns the seconds that the GPUs have been idle; ``None`` if unknown. ``claim`` is the claim of the
    program that this process watches; ``None`` if it watches its own claims.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        idle_s: Callable[[], float | None],
        say: Callable[[str], None],
        claim: HeldClaim | None = None,
    ) -> None:
        self._uuids, self._idle_s, self._say, self._claim = uuids, idle_s, say, claim
        self._reminded_s = -math.inf

    def check(self) -> float:
        """Send the message if it is due. Return the seconds until the next poll."""
        idle_s, now_s = self._idle_s(), time.monotonic()
        if idle_s is not None and idle_s >= REMIND_AFTER_S and now_s - self._reminded_s >= _REMIND_EVERY_S:
            held = claims.held_claims() if self._claim is None else [self._claim]
            records, waiter = _read({*claims.own_jobs(), *(claim.job for claim in held)}, self._uuids)
            has_agreed = any(claim.yields for claim, _ in records)
            # Each process that a launcher starts may have its own `run`. Only the first one sends the message.
            is_other = self._claim is not None and records and records[0][1].pid != self._claim.pid
            if waiter is not None and not has_agreed and not is_other:
                self._reminded_s = now_s
                facts = _facts(waiter, self._uuids, "you have", idle_s)
                self._say(f"{facts} End this job with Ctrl-C, or use --yield-after 2h next time.")
        return CHECK_EVERY_S


class Agreement:
    """SIGTERM for a job that agreed to it, once its GPUs are idle for long enough and another job waits for one.

    Each process of the job has the other end of ``pipe`` open. If ``None``, this process is part of the job, and the
    GPUs of its other claims must also be idle.
    """

    def __init__(
        self, claim: HeldClaim, yield_after_s: float, say: Callable[[str], None], pipe: int | None = None
    ) -> None:
        self._claim, self._yield_after_s, self._say, self._pipe = claim, yield_after_s, say, pipe
        self._sampler: Sampler | None = None
        self._sampled: list[str] = []
        self._has_warned = False
        self._signaled_s: dict[int, float] = {}  # PID -> time of the last signal

    def start(self) -> None:
        """Poll in a thread of this process. Print the agreement, unless another process of the job does."""
        if self._decides(self._read()[0]):
            self._say(agreement(self._yield_after_s))
        _poll_in_thread(self.check, self._say)

    def check(self) -> float:
        """End the job if it is due. Return the seconds until the next poll."""
        if self._claim.is_released:
            if self._sampler is not None:
                self._sampler.close()
            return math.inf
        agreed, waiter = self._read()
        if self._decides(agreed):
            idle_s = self._idle_s()
            if waiter is not None and idle_s is not None and idle_s >= self._yield_after_s:
                self._end(agreed, _facts(waiter, self._claim.uuids, "this job has", idle_s))
        return CHECK_EVERY_S

    def _read(self) -> tuple[list[ProcessId], GpuWaiter | None]:
        """Return the processes of the job that agreed, earliest first, and the job that has waited longest."""
        records, waiter = _read([self._claim.job], self._claim.uuids)
        return [process for claim, process in records if claim.yields], waiter

    def _decides(self, agreed: Sequence[ProcessId]) -> bool:
        return not agreed or agreed[0].pid == self._claim.pid

    def _idle_s(self) -> float | None:
        uuids = sorted({uuid for claim in (self._claim, *claims.held_claims()) for uuid in claim.uuids})
        if self._sampler is None or uuids != self._sampled:
            if self._sampler is not None:
                self._sampler.close()
            try:
                self._sampler, self._sampled = _open_sampler(uuids), uuids
            except NvmlUnavailableError as error:
                self._warn_once(str(error))
                return None
        idle_s, (polls, late) = self._sampler.idle_s(uuids), self._sampler.polled
        if idle_s is None and (polls >= _MIN_POLLS or late or self._sampler.failure):
            self._warn_once(f"The driver does not report the utilization of {' or '.join(uuids)}.")
        return idle_s

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(f"{reason} Until this changes, this job does not yield its GPUs (yield_after).")

    def _end(self, agreed: Sequence[ProcessId], facts: str) -> None:
        job = {process.pid for process in agreed if process.is_running}
        if self._pipe is not None:
            ending = topmost(job | _with_other_end(self._pipe))
        else:
            job.add(os.getpid())
            if (ranks := _world_size()) > len(job):
                self._warn_once(f"Only {len(job)} of the {ranks} ranks can get SIGTERM, and the others would hang.")
                return
            # Lightning's handler passes the signal on to the ranks that it has started.
            ending = job if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else topmost(job)
        now_s = time.monotonic()
        due = [pid for pid in ending if now_s - self._signaled_s.get(pid, -math.inf) >= _SIGNAL_EVERY_S]
        if due:
            self._say(f"{facts} This job gets SIGTERM now, as agreed (yield_after).")
        for pid in sorted(due, key=lambda pid: pid == os.getpid()):  # this process last, because it may end
            self._signaled_s[pid] = now_s
            with contextlib.suppress(ProcessLookupError):  # already ended
                os.kill(pid, signal.SIGTERM)


def topmost(pids: Collection[int]) -> set[int]:
    """Return the processes that are not descendants of other processes in the list."""
    return {pid for pid in pids if not descendants({pid}, {*pids} - {pid})}


def _poll_in_thread(poll: Callable[[], float], say: Callable[[str], None]) -> None:
    """Poll in a thread until a poll returns infinity."""
    from lightning_gpu_tools.training.background import BackgroundJobs  # not needed for a pick

    jobs = BackgroundJobs()

    def report_faults_and_poll() -> float:
        while jobs.faults:
            say(jobs.faults.pop())
        return poll()

    # The first poll comes late, so that short commands do not open the driver.
    jobs.add("Polling for waiting jobs", report_faults_and_poll, after_s=CHECK_EVERY_S)


def _open_sampler(uuids: Sequence[str]) -> Sampler:
    from lightning_gpu_tools.gpus.sampler import Sampler  # not needed for a pick

    # Only the performance monitors report the utilization of a MIG instance.
    return Sampler(uuids, interval_s=POLL_EVERY_S, gpm=any(uuid.startswith("MIG-") for uuid in uuids))


def _read(jobs: Collection[str], uuids: Sequence[str]) -> tuple[list[tuple[GpuClaim, ProcessId]], GpuWaiter | None]:
    """Return the records of these jobs, earliest first, and the other job that has waited longest for these GPUs."""
    try:
        with claims.read_ledger(claims.directory()) as ledger:
            records, waiters = ledger.records(jobs), ledger.waiters
    except ClaimsError:  # then no job can be waiting either
        return [], None
    own_pids = {os.getpid(), *(process.pid for _, process in records)}
    for waiter in waiters:
        is_own = waiter.owner_id == os.geteuid() and descendants({waiter.pid}, own_pids)
        if not is_own and not {*waiter.uuids}.isdisjoint(uuids):
            return records, waiter
    return records, None


def _facts(waiter: GpuWaiter, uuids: Sequence[str], user: str, idle_s: float) -> str:
    waited = format_duration(max(0.0, time.time() - waiter.since_s))
    gpus = "this GPU" if len(uuids) == 1 else f"one of these {len(uuids)} GPUs"
    return (
        f"{waiter.user} (pid {waiter.pid}) has waited {waited} for {gpus}, which {user} left idle for "
        f"{format_duration(idle_s)}."
    )


def _with_other_end(pipe: int) -> set[int]:
    """Return the other processes that have the pipe open."""
    own, found = os.fstat(pipe), set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # owned by another user, or already ended
            files = (os.stat(f"/proc/{pid}/fd/{descriptor}") for descriptor in os.listdir(f"/proc/{pid}/fd"))
            if int(pid) != os.getpid() and any(os.path.samestat(file, own) for file in files):
                found.add(int(pid))
    return found


def _world_size() -> int:
    """Return the number of ranks that train together with this process, on all machines."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())
