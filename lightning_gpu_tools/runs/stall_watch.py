"""Detection of stalls: a thread that watches whether training makes progress, and reports why it does not."""

import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Any, Literal

import msgspec

from lightning_gpu_tools.advice import stalls
from lightning_gpu_tools.advice.diagnosis import explain_stall
from lightning_gpu_tools.background import BackgroundJobs
from lightning_gpu_tools.errors import StalledTrainingWarning
from lightning_gpu_tools.reports.report import FILE_NAME
from lightning_gpu_tools.runs.publish import notify
from lightning_gpu_tools.runs.run import Timer
from lightning_gpu_tools.training import compat, stacks
from lightning_gpu_tools.training.phases import CHECKPOINT, base_phase
from lightning_gpu_tools.training.rank_exchange import Board, RankPlace
from lightning_gpu_tools.training.stall_facts import SETUP, TEARDOWN, GroupCalls, ProcessFacts, RankFacts, StallFacts
from lightning_gpu_tools.units import printable

StallAfter = float | Literal["auto"] | None

# Our defaults.
_POLLS = 12  # within the shortest limit for a stall
_MAX_INTERVAL_S = 5.0  # between two polls
_SAMPLE_S = 0.5  # duration of a sample of the processes
_MISSED = 6  # missed messages after which a rank is silent
_WRITING_BYTES = 1 << 20  # between two polls: a checkpoint that makes progress
_MAX_CALLS = 12  # of a stack, the innermost ones
_MAX_WORKERS = 64  # that are sampled
_MAX_RANKS = 64


def check_stall_after(stall_after_s: StallAfter) -> None:
    """Raise ``ValueError`` if this is not a valid ``stall_after_s``."""
    if stall_after_s not in ("auto", None) and not (isinstance(stall_after_s, (int, float)) and stall_after_s > 0):
        raise ValueError(f'stall_after_s must be "auto", None or a positive number of seconds, got {stall_after_s!r}.')


class StallWatch:
    """A watch for stalls, created in the training thread.

    Its thread never touches a disk, ``torch.cuda``, a collective, or a store that training waits for: ``board`` has its
    own connection. It may warn, because a stalled training thread forks no worker.
    """

    def __init__(
        self,
        timer: Timer,
        place: RankPlace,
        board: Board,
        stall_after_s: float | Literal["auto"],
        *,
        write_report: Callable[[], None],
        folder: str | None,
    ) -> None:
        """Start the watch. ``folder`` is that of the report, if there will be one."""
        self.stalls: tuple[stalls.Stall, ...] = ()
        self.beats = 0  # validation batches begun, which the clock does not count
        self.ended: str | None = None  # the outcome, at the end
        self._timer, self._clock = timer, timer.clock
        self._place, self._board = place, board
        self._write_report, self._folder = write_report, folder
        self._thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        shortest_s = stalls.MIN_S if stall_after_s == "auto" else stall_after_s
        self._interval_s = min(_MAX_INTERVAL_S, shortest_s / _POLLS)
        self._patience = stalls.Patience(stall_after_s, self._interval_s)
        self._received: dict[int, tuple[int, float]] = {}  # by rank: its last turn, and when it arrived
        self._facts: StallFacts | None = None  # of this process, once it has stalled
        self._groups: tuple[GroupCalls, ...] = ()
        self._written = 0
        self.jobs = BackgroundJobs()
        self.jobs.add("Watching for stalls", self._poll)

    def close(self, ended: str) -> None:
        """End the watch, and publish the outcome of training to the other ranks."""
        self.jobs.close()
        self.ended = ended
        self._publish()

    # In the thread

    def _poll(self) -> float:
        clock, patience, lasted_s = self._clock, self._patience, self._patience.stuck_s
        is_reported = bool(self.stalls) and not self.stalls[-1].is_over
        if patience.poll(clock.now_s, self._mark(), self._phase, clock.steps):
            self._facts, self._groups = None, ()
            if is_reported:
                self._change_stall(is_over=True, lasted_s=lasted_s)
        elif is_reported:
            self._change_stall(lasted_s=patience.stuck_s)
        elif patience.has_stalled:
            self._judge()
        elif patience.stuck_s > patience.limit_s / 2:
            self._all_ranks()  # early, so that silent ranks are known by the time of the report
        self._publish()
        return self._interval_s

    @property
    def _phase(self) -> str:
        clock = self._clock
        return clock.current.phase if clock.running else TEARDOWN if clock.ran else SETUP

    def _mark(self) -> tuple[int, ...]:
        """Return values that change with any progress."""
        if base_phase(self._phase) == CHECKPOINT:
            written = stacks.io_counters("self").get("wchar", 0)  # bytes passed to the kernel for writing
            if written - self._written >= _WRITING_BYTES:
                self._written = written
        clock = self._clock
        return clock.running, clock.steps, clock.entered, self.beats, self._written

    def _judge(self) -> None:
        if self._facts is None:
            mark, frames = self._mark(), stacks.frames_of(self._thread)
            if stalls.is_excused(stacks.stack_in_fit(frames)) or self._timer.is_trial:
                self._patience.excuse()
                return
            facts = self._read_facts(frames)
            groups = stacks.called_collectives() if self._place.world_size > 1 else ()
            if mark != self._mark():  # training has continued
                return
            self._facts, self._groups = facts, groups
        ranks = self._all_ranks()
        if ranks is not None and all(rank.has_stalled or rank.ended is not None or rank.silent_s for rank in ranks):
            self._report(replace(self._facts, ranks=ranks))

    def _read_facts(self, frames: list[FrameType]) -> StallFacts:
        """Sample the activity of this process and its workers."""
        iterator = compat.iterator_waited_for(frames)
        pids, awaited = compat.worker_pids(iterator)[:_MAX_WORKERS], compat.awaited_worker(iterator) or 0
        own = f"{os.getpid()}/task/{self._native_thread}"
        before_s = {place: stacks.cpu_seconds(place) for place in (own, *map(str, pids))}
        time.sleep(_SAMPLE_S)
        sampled = []
        for place, cpu_s in before_s.items():
            share = (stacks.cpu_seconds(place) - cpu_s) / _SAMPLE_S
            sampled.append(ProcessFacts(int(place.partition("/")[0]), *stacks.activity(place), share))
        process, *workers = sampled
        if awaited < len(workers):
            workers[awaited] = workers[awaited]._replace(stack=self._timer.worker_lines.stacks.ask(pids[awaited]))
        return StallFacts(
            phase=self._phase,
            process=process._replace(stack=stacks.stack_in_fit(frames)),
            workers=workers,
            awaited_worker=min(awaited, max(0, len(workers) - 1)),
            memory_stall_percent=stacks.memory_stall_percent(),
        )

    # The ranks

    def _publish(self) -> None:
        if self._place.world_size > 1:
            self._board.post(facts=asdict(self._own_rank()))

    def _own_rank(self) -> RankFacts:
        place, clock, facts = self._place, self._clock, self._facts
        rank = RankFacts(
            rank=place.rank,
            node=place.node,
            pid=os.getpid(),
            epoch=clock.epochs,
            step=clock.steps,
            phase=self._phase,
            epoch_steps=clock.epoch_steps,
            ended=self.ended,
        )
        if facts is None:
            return rank
        found, stack = explain_stall(facts), facts.process.stack
        return replace(
            rank,
            has_stalled=True,
            waits_in=stalls.collective_of(stack, facts.phase, self._groups) if place.world_size > 1 else None,
            line=stalls.in_function([frame for frame in stack if not frame.is_library]),
            groups=self._groups,
            why=found.why,
            next_step=found.advice,
            stack=[str(frame) for frame in stack[-_MAX_CALLS:]],
        )

    def _all_ranks(self) -> list[RankFacts] | None:
        """Return the state of all ranks; ``None`` if a lower rank reports for all."""
        place, board = self._place, self._board
        for number in range(place.rank):
            board.read([number])
            rank = self._rank(number)
            if rank is not None and rank.ended is None and not rank.silent_s:
                return None
        if place.world_size > 1:
            board.read_all()
        ranks = [self._own_rank() if number == place.rank else self._rank(number) for number in range(place.world_size)]
        return [rank for rank in ranks if rank is not None]

    def _rank(self, number: int) -> RankFacts | None:
        """Return the state of another rank, from its last entry."""
        entry = self._board.entries.get(number)
        if entry is None:
            return None
        now_s = time.monotonic()
        turn, received_s = self._received.get(number, (-1, now_s))
        if entry["turn"] != turn:
            turn, received_s = self._received[number] = entry["turn"], now_s
        rank = msgspec.convert(entry["facts"], RankFacts)
        silent_s = now_s - received_s
        is_silent = rank.ended is None and silent_s > _MISSED * self._interval_s + _SAMPLE_S
        return replace(rank, silent_s=silent_s if is_silent else 0.0)

    # Reporting

    def _report(self, facts: StallFacts) -> None:
        found, lasted_s, step = explain_stall(facts), self._patience.stuck_s, self._clock.steps
        waited_for = found.evidence.get("rank")
        rank = next((rank for rank in facts.ranks if rank.rank == waited_for and rank.stack), self._own_rank())
        whose = "" if waited_for is None else f" of rank {rank.rank}"
        lines = [
            stalls.headline(facts.phase, lasted_s, step),
            f"{found.why} {found.advice}",
            f"Stack of the training thread{whose}, innermost call last:",
            *(f"  {printable(call, 200)}" for call in rank.stack),
        ]
        began = datetime.now(timezone.utc) - timedelta(seconds=lasted_s)
        stall = stalls.Stall(
            began_at=began.isoformat(timespec="seconds"),
            lasted_s=lasted_s,
            is_over=False,
            step=step,
            phase=facts.phase,
            stack=tuple(rank.stack),
            ranks=tuple(map(stalls.describe_rank, facts.ranks[:_MAX_RANKS])) if len(facts.ranks) > 1 else (),
            cause=found.cause,
            why=found.why,
            next_step=found.advice,
            rank=None if waited_for is None else int(waited_for),
        )
        self.stalls = (*self.stalls, stall)
        self._write_report()
        with suppress(StalledTrainingWarning):  # if a filter turns warnings into errors
            warnings.warn_explicit("\n".join(lines), StalledTrainingWarning, "lightning_gpu_tools", 1)
        if self._place.rank == 0 and self._folder is not None:
            report = os.path.join(self._folder, FILE_NAME) if self._clock.ran else ""
            notify("stall", self._folder, outcome=lines[0], why=found.why, next_step=found.advice, report=report)

    def _change_stall(self, **changes: Any) -> None:
        self.stalls = (*self.stalls[:-1], replace(self.stalls[-1], **changes))
