"""A watch for stalls, in a thread that reports them while they last."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Any, Literal

from lightning_gpu_tools.advice.cause import Explanation
from lightning_gpu_tools.advice.collectives import collective_of
from lightning_gpu_tools.advice.stall_excuses import is_excused
from lightning_gpu_tools.advice.stall_patience import Patience, limit_s
from lightning_gpu_tools.advice.stall_words import where
from lightning_gpu_tools.advice.stalls import Stall, describe_rank, explain_process, explain_ranks, headline
from lightning_gpu_tools.errors import StalledTrainingWarning
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.background import BackgroundJobs
from lightning_gpu_tools.training.collective_record import called_collectives
from lightning_gpu_tools.training.phases import CHECKPOINT, base_phase
from lightning_gpu_tools.training.rank_exchange import Board, RankPlace
from lightning_gpu_tools.training.stacks import (
    ForkedStacks,
    activity,
    frames_of,
    io_counters,
    memory_stall_percent,
    stack_in_fit,
    swapped_pages,
)
from lightning_gpu_tools.training.stall_facts import (
    SETUP,
    TEARDOWN,
    Activity,
    Collective,
    Frame,
    GroupCalls,
    RankFacts,
    StallFacts,
    WorkerFacts,
    users_frame,
)
from lightning_gpu_tools.training.step_clock import StepClock
from lightning_gpu_tools.units import format_duration, printable

StallAfter = float | Literal["auto"] | None

# Our defaults.
_POLLS = 12  # within the limit for a stall
_MAX_INTERVAL_S = 5.0  # between two polls
_SAMPLE_S = 0.5  # duration of a sample of the processes
_MISSED = 6  # missed messages after which a rank is silent
_WRITING_BYTES = 1 << 20  # between two polls: a checkpoint that makes progress
_MAX_PRINTED, _MAX_KEPT = 8, 50  # calls of a stack
_MAX_WORKERS, _MAX_ASKED = 64, 4  # workers that are sampled, and asked for their stack
_MAX_STALLS = 100
_MAX_RANKS = 64


def check_stall_after(stall_after_s: StallAfter) -> None:
    """Raise ``ValueError`` if this is not a valid ``stall_after_s``."""
    if stall_after_s not in ("auto", None) and not (isinstance(stall_after_s, (int, float)) and stall_after_s > 0):
        raise ValueError(f'stall_after_s must be "auto", None or a positive number of seconds, got {stall_after_s!r}.')


class StallWatch:
    """A watch for stalls, created in the training thread.

    Its thread never touches a disk, ``torch.cuda``, a collective, or a store that training waits for: ``ranks`` has its
    own connection. It may warn, because a stalled training thread forks no worker.
    """

    def __init__(
        self,
        clock: StepClock,
        place: RankPlace,
        ranks: Board,
        stall_after_s: float | Literal["auto"],
        *,
        is_trial: Callable[[], bool],
        gpu_percent: Callable[[], float | None],
        write_report: Callable[[], None],
    ) -> None:
        """Start the watch; ``is_trial`` returns whether a tuner runs a trial, ``gpu_percent`` the GPU utilization."""
        self.stalls: tuple[Stall, ...] = ()
        self.notes: list[str] = []  # messages for the training thread to print in `pass_on`
        self.beats = 0  # validation batches begun, which the clock does not count
        self.ended: str | None = None  # the outcome, at the end
        self._clock, self._place = clock, place
        self._is_trial, self._gpu_percent, self._write_report = is_trial, gpu_percent, write_report
        self._ranks = ranks
        self._thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        first_s = limit_s(stall_after_s, 0.0)
        self._interval_s = min(_MAX_INTERVAL_S, first_s / _POLLS)
        timeout_s = compat.collective_timeout_s() if place.world_size > 1 else None
        self._patience = Patience(stall_after_s, self._interval_s, timeout_s)
        self._received: dict[int, tuple[int, float]] = {}  # by rank: its last turn, and when it arrived
        self._own: Explanation | None = None
        self._groups: tuple[GroupCalls, ...] = ()
        self._written = 0
        self._is_reported = self._is_closed = False
        self._stacks = ForkedStacks()
        self.jobs = BackgroundJobs()
        self.jobs.add("Watching for stalls", self._poll)

    def close(self, ended: str | None = None) -> None:
        """End the watch, once, and publish the outcome to the other ranks."""
        if self._is_closed:
            return
        self._is_closed, self.ended = True, ended
        self.jobs.close()
        if ended is not None:
            self._publish(self._phase)
        self._stacks.close()

    def pass_on(self) -> None:
        """Warn, in the training thread, about stalls that are over."""
        while self.notes:
            self._say(self.notes.pop(0))

    # In the thread

    def _poll(self) -> float:
        clock, patience = self._clock, self._patience
        now_s, stuck_s, phase = clock.now_s, patience.stuck_s, self._phase
        since_s = clock.since_s if clock.running else now_s
        if patience.poll(now_s, self._mark(phase), phase, since_s, clock.steps, clock.seconds):
            self._own = None
            if self._is_reported:
                self._is_reported = False
                self._change_stall(is_over=True, lasted_s=stuck_s)
                self.notes.append(f"Training continued after {format_duration(stuck_s)}.")
        if patience.has_stalled and patience.due_s <= 0:
            self._judge(phase)
        elif patience.stuck_s > patience.limit_s / 2:
            self._all_facts()  # early, so that silent ranks are known by the time of the report
        self._publish(phase)
        if self._is_reported:
            self._change_stall(lasted_s=patience.stuck_s)
        return self._interval_s

    @property
    def _phase(self) -> str:
        clock = self._clock
        return clock.current.phase if clock.running else TEARDOWN if clock.ran else SETUP

    def _mark(self, phase: str) -> tuple[int, ...]:
        """Return values that change with any progress."""
        if base_phase(phase) == CHECKPOINT:
            written = io_counters("self").get("wchar", 0)  # bytes passed to the kernel for writing
            if written - self._written >= _WRITING_BYTES:
                self._written = written
        clock = self._clock
        return clock.steps, clock.entered, self.beats, self._written

    def _judge(self, phase: str) -> None:
        mark, frames = self._mark(phase), frames_of(self._thread)
        stack = stack_in_fit(frames)
        if is_excused(stack) or self._is_trial():
            self._patience.excuse()
            return
        if self._own is None or self._is_reported:
            self._own = explain_process(self._facts(phase, stack, frames))
            self._groups = called_collectives() if self._place.world_size > 1 else ()
            if (phase, mark) != (self._phase, self._mark(phase)):  # training has continued
                self._own = None
                return
        ranks = self._all_facts()
        if ranks is not None and all(one.has_stalled or one.ended is not None or one.silent_s for one in ranks):
            self._report(phase, stack, explain_ranks(ranks) or self._own, ranks)

    def _facts(self, phase: str, stack: tuple[Frame, ...], frames: Sequence[FrameType]) -> StallFacts:
        """Sample the activity of this process and its workers."""
        iterator = compat.iterator_waited_for(frames)
        workers = (compat.worker_pids(iterator) or [])[:_MAX_WORKERS]
        processes = [(os.getpid(), self._native_thread), *((pid, None) for pid in workers)]
        before, swapped = [activity(*one) for one in processes], swapped_pages()
        time.sleep(_SAMPLE_S)
        after, swapped = [activity(*one) for one in processes], swapped_pages() - swapped
        shares = [
            0.0 if one is None or other is None else (other.cpu_s - one.cpu_s) / _SAMPLE_S
            for one, other in zip(before, after, strict=True)
        ]
        awaited = compat.awaited_worker(iterator)
        asked = sorted(range(len(workers)), key=lambda number: number != awaited)[:_MAX_ASKED]
        return StallFacts(
            phase=phase,
            stack=stack,
            activity=after[0],
            cpu_share=shares[0],
            workers=tuple(
                WorkerFacts(
                    number,
                    now or Activity(pid, "X", None, None, 0.0),
                    share,
                    number == awaited,
                    self._stacks.ask(pid) if number in asked else (),
                )
                for number, (pid, now, share) in enumerate(zip(workers, after[1:], shares[1:], strict=True))
            ),
            gpu_busy_percent=self._gpu_percent(),
            swapped_pages_per_s=swapped / _SAMPLE_S,
            memory_stall_percent=memory_stall_percent(),
        )

    # The ranks

    def _publish(self, phase: str) -> None:
        if self._place.world_size > 1:
            self._ranks.post(facts=asdict(self._own_facts(phase)))

    def _own_facts(self, phase: str) -> RankFacts:
        place, clock, patience, own = self._place, self._clock, self._patience, self._own
        stack = () if patience.stuck_s < self._interval_s else stack_in_fit(frames_of(self._thread))
        facts = RankFacts(
            rank=place.rank,
            node=place.node,
            pid=os.getpid(),
            epoch=clock.epochs,
            step=clock.steps,
            phase=phase,
            stuck_s=patience.stuck_s,
            has_stalled=patience.has_stalled and own is not None,
            epoch_steps=clock.epoch_steps,
            ended=self.ended,
            collective=collective_of(stack, phase, place.world_size),
            line=where(stack) if users_frame(stack) is not None else "",
        )
        if own is None:
            return facts
        calls = [str(frame) for frame in stack[-_MAX_PRINTED:]]
        return replace(facts, cause=own.cause, why=own.why, next_step=own.next_step, stack=calls, groups=self._groups)

    def _all_facts(self) -> list[RankFacts] | None:
        """Return the state of all ranks; ``None`` if a lower rank reports for all."""
        place, board = self._place, self._ranks
        for rank in range(place.rank):
            board.read([rank])
            one = self._facts_of(rank)
            if one is not None and one.ended is None and not one.silent_s:
                return None
        if place.world_size > 1:
            board.read_all()
        found = [
            self._own_facts(self._phase) if rank == place.rank else self._facts_of(rank)
            for rank in range(place.world_size)
        ]
        return [one for one in found if one is not None]

    def _facts_of(self, rank: int) -> RankFacts | None:
        """Return the state of another rank, from its last entry."""
        entry = self._ranks.entries.get(rank)
        if entry is None:
            return None
        now_s = time.monotonic()
        turn, received_s = self._received.get(rank, (-1, now_s))
        if entry["turn"] != turn:
            turn, received_s = self._received[rank] = entry["turn"], now_s
        groups = [
            GroupCalls(group, description, ranks, [Collective(*call) for call in calls])
            for group, description, ranks, calls in entry["facts"]["groups"]
        ]
        facts = RankFacts(**{**entry["facts"], "groups": groups})
        silent_s = now_s - received_s
        is_silent = facts.ended is None and silent_s > _MISSED * self._interval_s + _SAMPLE_S
        return replace(facts, silent_s=silent_s if is_silent else 0.0)

    # Reporting

    def _report(self, phase: str, stack: tuple[Frame, ...], found: Explanation, ranks: Sequence[RankFacts]) -> None:
        patience, step = self._patience, self._clock.steps
        patience.reported()
        lines = [headline(phase, patience.stuck_s, step), f"{found.why} {found.next_step}"]
        if not self._is_reported:
            behind = next((one for one in ranks if one.rank == found.rank and one.stack), None)
            calls = behind.stack if behind is not None else [str(frame) for frame in stack[-_MAX_KEPT:]]
            whose = "" if behind is None else f" of rank {behind.rank}"
            lines += [f"Stack of the training thread{whose}, innermost call last:"]
            lines += [f"  {printable(call, 200)}" for call in calls[-_MAX_PRINTED:]]
            places = tuple(map(describe_rank, ranks[:_MAX_RANKS])) if len(ranks) > 1 else ()
            self._keep(found, patience.stuck_s, is_over=False, step=step, phase=phase, stack=tuple(calls), ranks=places)
            self._is_reported = True
        self._write_report()
        self._say("\n".join(lines))

    def _keep(self, found: Explanation, lasted_s: float, **facts: Any) -> None:
        began = datetime.now(timezone.utc) - timedelta(seconds=lasted_s)
        stall = Stall(began_at=began.isoformat(timespec="seconds"), lasted_s=lasted_s, **facts, **found._asdict())
        self.stalls = (*self.stalls[-_MAX_STALLS:], stall)

    def _change_stall(self, **changes: Any) -> None:
        self.stalls = (*self.stalls[:-1], replace(self.stalls[-1], **changes))

    def _say(self, text: str) -> None:
        with suppress(StalledTrainingWarning):  # if a filter turns warnings into errors
            warnings.warn_explicit(text, StalledTrainingWarning, "lightning_gpu_tools", 1)
