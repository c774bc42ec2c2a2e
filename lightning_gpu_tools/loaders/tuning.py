"""Tries settings on a loader that is in use, batch by batch, and leaves the best ones on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from lightning_gpu_tools.advice.loader_plan import LoadCost
from lightning_gpu_tools.advice.loader_search import LoaderCase, LoaderDecision, Visit, confirmation, next_move
from lightning_gpu_tools.advice.loader_trials import LoaderResult, LoaderTrial, combine, is_slower, score, score_of
from lightning_gpu_tools.host import HostBudget, private_memory_bytes
from lightning_gpu_tools.loaders.inner_loader import LostWorkerError
from lightning_gpu_tools.loaders.ranks import Ranks
from lightning_gpu_tools.loaders.settings import batch_bytes
from lightning_gpu_tools.loaders.switch import Switch
from lightning_gpu_tools.loaders.worker_probe import spread
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# A choice: an epoch must hold some steady steps, or so many in a row without any end a trial.
_EPOCHS_IN_VAIN = 3
# A choice: a trial that takes longer than this part of the budget is cut short, to so many steps.
_LONGEST = 0.3
_LEAST_STEPS = 3
# A choice: reading a process's memory map takes the kernel milliseconds, and workers are alike.
_WORKERS_LOOKED_AT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a tuning has to keep to; see :class:`LoaderCase` for the meaning of most.

    Attributes:
        host: What the host grants this rank.
        cuda: Whether batches go to an NVIDIA GPU.
        budget_s: How long trials may take.
        epoch_steps: Steps in an epoch; ``None`` if that is unknown.
        step_cores: How many cores the training process keeps busy during a step.
        apply: Whether to leave the settings on that were found.
    """

    host: HostBudget
    cuda: bool
    budget_s: float
    epoch_steps: int | None = None
    step_cores: float = 1.0
    apply: bool = True


@dataclass
class _Ongoing:
    """The trial that is being made."""

    visit: Visit
    skip: int
    seconds: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    failed: str | None = None
    epochs_in_vain: int = 0
    alone_cpu_s: float = 0.0


class Tuning:
    """Listens to a :class:`Switch` and sets it, from one trial to the next, until the best settings are known and on.

    A trial ends after a number of batches that was fixed when it began, so ranks that go through the same steps end
    theirs at the same step, exchange what they measured, and by the same data come to the same decision.

    Args:
        switch: The loader.
        terms: What to keep to.
        ranks: Who must decide the same.
        report: Called with each trial when it has ended.
        conclude: Called with the result when it is known, and again when that has changed: confirmed, taken back.

    Attributes:
        result: What came out; ``None`` until it is known.
    """

    def __init__(
        self,
        switch: Switch,
        terms: Terms,
        *,
        ranks: Ranks,
        report: Callable[[LoaderTrial], None] = lambda trial: None,
        conclude: Callable[[LoaderResult], None] = lambda result: None,
    ) -> None:
        self.result: LoaderResult | None = None
        self._switch = switch
        self._terms = terms
        self._ranks = ranks
        self._report = report
        self._conclude = conclude
        self._trials: list[LoaderTrial] = []
        self._case = LoaderCase(
            users=switch.users,
            host=terms.host,
            cuda=terms.cuda,
            budget_s=terms.budget_s,
            epoch_steps=terms.epoch_steps,
            step_cores=terms.step_cores,
            alone_allowed=switch.alone_allowed,
        )
        self._then: Callable[[LoaderTrial], None] = self._search
        self._confirming: LoaderTrial | None = None
        self._decision: LoaderDecision | None = None
        self._now: _Ongoing | None = None
        visit = next_move(self._case, [])
        assert isinstance(visit, Visit)
        self._begin(visit)

    def move_to(self, switch: Switch) -> None:
        """Go on with another loader in the place of the one so far."""
        self._switch.listener = None
        switch.watched = self._switch.watched
        switch.follow(self._switch)
        switch.listener = self
        self._switch = switch

    def abandon(self) -> None:
        """Say that training ends; nothing happens if the result is known."""
        if self.result is None:
            self._finish(self._case.users, "Training ended before enough could be tried.", applied=False)

    # What the switch tells

    def on_batch(self, batch: Any, wait_s: float, since_last_s: float | None) -> None:
        """Count the batch, and go on to the next trial when this one is complete."""
        now = self._now
        if now is None:
            return
        now.seconds += since_last_s or 0.0
        # Ranks must end a trial at the same step, whatever the time.
        too_long = self._ranks.count == 1 and now.seconds > _LONGEST * self._terms.budget_s
        if now.skip > 0:
            now.skip = 0 if too_long else now.skip - 1
            if not now.skip:
                self._forget(now)
            return
        if since_last_s is None:
            return
        now.epochs_in_vain = 0
        now.steps_s.append(since_last_s)
        now.waits_s.append(wait_s)
        if len(now.steps_s) == now.visit.steps or (too_long and len(now.waits_s) >= _LEAST_STEPS):
            now.blocks.append(mean(now.steps_s))
            now.steps_s = []
            if len(now.blocks) == now.visit.blocks or too_long:
                self._end(now, batch)

    def on_epoch_start(self) -> None:
        """Let the first steps of the epoch pass, in which the workers come into step."""
        now = self._now
        if now is None:
            return
        settings = now.visit.settings
        now.skip = max(now.skip, settings.num_workers * (1 + (settings.prefetch_factor or 0)) + 1)
        now.epochs_in_vain += 1
        if now.epochs_in_vain > _EPOCHS_IN_VAIN:
            now.failed = (
                f"epochs of {self._case.epoch_steps or 'so few'} steps are over before {settings.num_workers} workers "
                "are in step with training"
            )
            self._end(now, None)

    def on_fault(self, settings: LoaderSettings, error: Exception) -> None:
        """Note that settings failed. The user's own are on again."""
        why = str(error) if isinstance(error, LostWorkerError) else f"{type(error).__name__}: {error}"
        why = why.strip().splitlines()[-1]  # of an error from a worker: the last line of the traceback there
        now = self._now
        if now is None:
            self._revert(f"num_workers={settings.num_workers} failed in use ({why}), so yours are back.")
            return
        now.failed = why
        if self._ranks.count == 1:
            self._end(now, None)

    # From trial to trial

    def _begin(self, visit: Visit) -> None:
        now = self._now = _Ongoing(visit, visit.skip)
        if not visit.skip:
            self._forget(now)
        began_s = self._switch.clock()
        self._use(visit.settings)  # last: should it fail, the next trial begins at once
        now.seconds += self._switch.clock() - began_s

    def _use(self, settings: LoaderSettings) -> None:
        """Set the loader, which may be in the place of the first one by now, to what was meant for that one."""
        users = self._switch.users
        self._switch.use(users if settings == self._case.users else replace(settings, batch_size=users.batch_size))

    def _forget(self, now: _Ongoing) -> None:
        inner = self._switch.inner
        if inner is not None:
            now.alone_cpu_s = inner.alone_cpu_s
            if inner.probe is not None:
                inner.probe.forget()

    def _end(self, now: _Ongoing, batch: Any) -> None:
        own = LoaderTrial(
            settings=now.visit.settings,
            seconds=now.seconds,
            block_step_s=tuple(now.blocks),
            wait_s=mean(now.waits_s) if now.waits_s else 0.0,
            cost=None if now.failed else self._cost(now, batch),
            start_s=self._start_s(),
            failed=now.failed,
        )
        self._now = None
        if not self._trials:
            self._switch.look_for_obstacles()
        everyones = self._ranks.gather(
            {
                "trial": dataclasses.asdict(own),
                "host": dataclasses.asdict(self._terms.host),
                "obstacle": self._switch.obstacle,
            }
        )
        if everyones is None:
            self._finish(self._case.users, "Another rank did not say how its trial went.", applied=False)
            return
        trial = combine([_trial_from(facts["trial"]) for facts in everyones])
        self._case = replace(self._case, host=_tightest([HostBudget(**facts["host"]) for facts in everyones]))
        self._trials.append(trial)
        self._report(trial)
        obstacle = next((facts["obstacle"] for facts in everyones if facts["obstacle"] is not None), None)
        if obstacle is not None:
            self._finish(self._case.users, f"The loader is left as it is: {obstacle}.", applied=False)
        else:
            self._then(trial)

    def _cost(self, now: _Ongoing, batch: Any) -> LoadCost | None:
        inner = self._switch.inner
        if inner is None:
            return None
        size = batch_bytes(batch) or None
        if not inner.settings.num_workers:
            cpu_s = (inner.alone_cpu_s - now.alone_cpu_s) / len(now.waits_s)
            return LoadCost(wall_s=mean(now.waits_s), cpu_s=cpu_s, batch_bytes=size, spread=spread(now.waits_s))
        if inner.probe is None or not inner.probe.wall_s:
            return None
        return LoadCost(
            wall_s=mean(inner.probe.wall_s),
            cpu_s=mean(inner.probe.cpu_s),
            batch_bytes=size,
            spread=spread(inner.probe.wall_s),
            worker_bytes=private_memory_bytes(inner.pids[:_WORKERS_LOOKED_AT]),
        )

    def _start_s(self) -> float | None:
        inner = self._switch.inner
        return None if inner is None or inner.probe is None else inner.probe.start_s

    def _search(self, trial: LoaderTrial) -> None:
        move = next_move(self._case, self._trials)
        if isinstance(move, Visit):
            self._begin(move)
            return
        if move.settings == self._case.users or not self._terms.apply:
            self._finish(move.settings, move.reason, applied=False)
            return
        self._result(move.settings, move.reason, applied=True)
        self._then = self._confirm
        self._decision = move
        self._begin(confirmation(self._case, self._trials, move.settings))

    def _confirm(self, trial: LoaderTrial) -> None:
        users = next(known for known in reversed(self._trials) if known.settings == self._case.users)
        if trial.failed is not None:
            self._revert(f"They failed in use ({trial.failed}), so yours are back.")
        elif not is_slower(trial, users):
            self._confirmed()
        else:
            # The machine may have become slower, not the loader: look at the user's own settings again.
            self._confirming = trial
            self._then = self._compare
            self._begin(replace(confirmation(self._case, self._trials, self._case.users), blocks=2))

    def _compare(self, trial: LoaderTrial) -> None:
        assert self._confirming is not None
        if is_slower(self._confirming, trial):
            self._revert("In the first steps of their use they were slower than yours, so yours are back.")
        else:
            self._confirmed()

    def _confirmed(self) -> None:
        assert self._decision is not None
        self._finish(self._decision.settings, self._decision.reason, applied=True, confirmed=True)

    def _revert(self, why: str) -> None:
        reason = "" if self._decision is None else self._decision.reason
        self._finish(self._case.users, f"{reason} {why}".strip(), applied=False, confirmed=False)

    def _finish(self, settings: LoaderSettings, reason: str, *, applied: bool, confirmed: bool | None = None) -> None:
        self._now = None
        self._result(settings, reason, applied=applied, confirmed=confirmed)
        self._use(settings if applied else self._case.users)
        self._switch.watched = False

    def _result(self, settings: LoaderSettings, reason: str, *, applied: bool, confirmed: bool | None = None) -> None:
        scores = score(self._trials)
        found = score_of(scores, settings)
        self.result = LoaderResult(
            users=self._case.users,
            settings=settings,
            reason=reason,
            applied=applied,
            confirmed=confirmed,
            trials=tuple(self._trials),
            scores=tuple(scores),
            seconds=sum(trial.seconds for trial in self._trials),
            wait_share=None if found is None else found.wait_s * found.batches_per_s,
        )
        self._conclude(self.result)


def _trial_from(facts: dict[str, Any]) -> LoaderTrial:
    cost = facts["cost"]
    return LoaderTrial(
        **{
            **facts,
            "settings": LoaderSettings(**facts["settings"]),
            "block_step_s": tuple(facts["block_step_s"]),
            "cost": None if cost is None else LoadCost(**cost),
        }
    )


def _tightest(hosts: Sequence[HostBudget]) -> HostBudget:
    shm = [host.shm_free_bytes for host in hosts if host.shm_free_bytes is not None]
    return HostBudget(
        cores=min(host.cores for host in hosts),
        memory_available_bytes=min(host.memory_available_bytes for host in hosts),
        shm_free_bytes=min(shm, default=None),
        local_ranks=max(host.local_ranks for host in hosts),
    )
