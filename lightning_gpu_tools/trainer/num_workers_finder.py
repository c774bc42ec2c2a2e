"""A callback that finds DataLoader settings in a short pause of training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gpu_tools.advice.workers import why_not_searched, why_not_switched
from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.host import read_host_budget
from lightning_gpu_tools.loaders import plan
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.passes import ContinuedLoader, Loading, Pass, continued
from lightning_gpu_tools.loaders.search import draws_late, search
from lightning_gpu_tools.loaders.settings import settings_of
from lightning_gpu_tools.patches import Patches
from lightning_gpu_tools.trainer.facts import trains_on_gpu
from lightning_gpu_tools.trainer.families import GuardedCallback, LightningModule, Trainer
from lightning_gpu_tools.trainer.fit_session import FitSession
from lightning_gpu_tools.training.run_measurements import DATA_LOADING, LoaderFacts, LoaderResult
from lightning_gpu_tools.units import check_seconds, checked, format_duration, number_ranges, plural, printable

# Our default: ranks reach a search at the same time, and trials end with the budget.
_RANKS_TIMEOUT_S = 10.0
_POLL_S = 0.005
_OBSTACLE = "The training loader{} is unchanged: {}."


class _Adopted(NamedTuple):
    """A training loader as given to the Trainer, and its stand-in."""

    given: object
    made: object
    facts: LoaderFacts  # before the first batch
    fixed: str | None  # the reason why its settings cannot be changed

    @property
    def loading(self) -> Loading | None:
        return self.made.loading if self.fixed is None and isinstance(self.made, ContinuedLoader) else None


class NumWorkersFinder(GuardedCallback):
    """A callback that finds and applies ``num_workers``, ``prefetch_factor``, ``persistent_workers``, ``pin_memory``.

    If training waits for data in its first 25 steps, it pauses, usually for 2 to 10 s. A few settings that suit the
    cost of a batch and this machine's cores, memory and ``/dev/shm`` are tried with a stand-in for the training step.
    From the next batch on, the fewest workers within 3% of the best are used, but not fewer than predicted. Nothing
    changes if trials do not reproduce the speed of training. If a hundred steps with them take longer than before, or
    if loading fails, the original settings are restored.

    Batches, their order and the random numbers of the training process stay the same. There is one exception: with
    ``num_workers=0``, random numbers that the dataset draws come from the workers afterwards, as with every change of
    ``num_workers``; the result reports it. With ``ExactResume``, these stay the same, too. A failure of this callback
    never stops training. All ranks make the same decision.

    Loaders that workers would break keep their settings, with the reason in the result and what to change first. With
    several training loaders, the one that training waits for most is changed. Nothing happens with ``fast_dev_run``,
    ``overfit_batches`` or ``barebones``.

    Args:
        budget_s: Maximum seconds that training may pause, even if an item of the dataset hangs.
        apply: Whether to use the best settings; otherwise they are only measured.

    Attributes:
        result: The result with ``.settings``, ``.reason`` and ``.trials``; ``None`` until the search has ended.

    Raises:
        ValueError: ``budget_s`` is not a positive number.

    Example::

        finder = NumWorkersFinder()
        Trainer(callbacks=[finder]).fit(model, DataLoader(dataset, batch_size=32))
        print(finder.result.settings)
    """

    is_on = False

    @checked
    def __init__(self, *, budget_s: float = 30.0, apply: bool = True) -> None:
        check_seconds(budget_s, "budget_s")
        self.budget_s = budget_s
        self.apply = apply
        self.result: LoaderResult | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unreal = trainer.fast_dev_run or trainer.overfit_batches or trainer.barebones  # type: ignore[attr-defined]
        is_wanted = stage == "fit" and not is_disabled() and not unreal
        if not is_wanted or self.is_superfluous(trainer.callbacks):  # type: ignore[attr-defined]
            return
        self.result = None
        self._trainer: Any = trainer
        self._session = FitSession.of(trainer, self)
        self._adopted: list[_Adopted] = []  # the training loaders
        self._place: int | None = None  # of the next training loader, while loaders are created
        self._tuned = 0  # the place of the loader to tune
        self._before: plan.Step | None = None  # the cost of a step with the original settings
        self._steps = 0
        self._next: Callable[[], None] | None = None
        self._due = plan.STUDY_STEPS
        self._rounds = 0  # of facts for the other ranks
        # Even in a tuner's trials (LearningRateFinder, BatchSizeFinder): training may get their last loader.
        self._patches = Patches()
        self._patches.put(trainer, "fit_loop.setup_data", partial(partial, self._set_up_in_order))
        self._patches.put(trainer.strategy, "process_dataloader", partial(partial, self._process_loader))
        self.is_on = True

    def _set_up_in_order(self, setup_data: Callable[[], None]) -> None:
        self._place = 0
        try:
            setup_data()
        finally:
            self._place = None

    def _process_loader(self, process: Callable[[object], object], loader: object) -> object:
        loader, place = process(loader), self._place
        if place is None:
            return loader
        self._place = place + 1
        try:
            return self._adopt(loader, place)
        except Exception as error:  # noqa: BLE001 - like an error in a hook
            self.turn_off(error)
            return loader

    def _adopt(self, loader: object, place: int) -> object:
        before = self._adopted[place] if place < len(self._adopted) else None
        if before is not None and (loader is before.given or loader is before.made):
            return before.made  # keeps its persistent workers
        facts = read_loader_facts(loader)
        fixed = why_not_searched(facts)
        made = continued(loader) if fixed is None else loader  # type: ignore[arg-type]
        after = _Adopted(loader, made, facts, fixed)
        self._adopted[place : place + 1] = [after]
        replaced = None if before is None else before.loading
        if (loading := after.loading) is not None:
            loading.steps = [] if replaced is None else replaced.steps
            loading.as_own_work = self._as_own_work
            if replaced is not None and replaced.in_use != replaced.original:
                loading.use(replaced.in_use)
        if replaced is not None:
            replaced.close()
        return made

    @property
    def _loadings(self) -> list[Loading]:
        return [loading for one in self._adopted if (loading := one.loading) is not None]

    def _set_result(self, found: LoaderResult) -> None:
        self.result = self._session.loader_result = found

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Steps of a tuner's trial do not count.
        for loading in self._loadings:
            loading.steps = []
        self._next = self._search

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps += 1
        if self._next is not None and self._steps >= self._due:
            action, self._next = self._next, None
            try:
                self._as_own_work(action)
            except TimeoutError as error:
                self._revert(f"The new settings could not be confirmed ({error})")
                if self.result is None:
                    self._leave(_OBSTACLE.format(self._name, error))

    def _as_own_work(self, action: Callable[[], object]) -> None:
        self._session.clock.as_own_work(action, part=NumWorkersFinder.__name__)

    def _gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the facts of all ranks, by rank."""
        if self._trainer.world_size == 1:
            return [facts]
        self._rounds += 1
        board = self._session.board(f"loader {self._rounds}")
        if not board.is_shared:  # without torch.distributed
            raise TimeoutError("the ranks cannot reach each other")
        board.post(**facts)
        began_s, ranks = time.monotonic(), range(self._trainer.world_size)
        while late := [rank for rank in ranks if rank not in board.entries]:
            waited_s = time.monotonic() - began_s
            if waited_s > self.budget_s + _RANKS_TIMEOUT_S:
                raise TimeoutError(f"ranks {number_ranges(late)} did not respond")
            time.sleep(max(_POLL_S, waited_s / 8))
            board.read(late)
        return [entry for _, entry in sorted(board.entries.items())]

    def _search(self) -> None:
        trainer, run, clock = self._trainer, self._session.run, self._session.clock
        costs = [self._end_study(one.loading) for one in self._adopted]
        wait_s = clock.so_far().get(DATA_LOADING, 0.0) / max(1, clock.steps)
        rest_s = max(0.0, wait_s - sum(cost.wait_s for cost in costs if cost is not None))
        own = [
            {
                "wait_s": rest_s if cost is None else cost.wait_s,  # the rest is for loaders that are not measured
                "obstacle": self._obstacle(one, cost),
                "step": None if cost is None else cost._asdict(),
            }
            for one, cost in zip(self._adopted, costs, strict=True)
        ]
        everyones = [facts["loaders"] for facts in self._gather({"loaders": own})]
        if not self._adopted:
            self._leave(_OBSTACLE.format("", "there is no loader"))
            return
        waits_s = [sum(facts["wait_s"] for facts in of_ranks) for of_ranks in zip(*everyones, strict=True)]
        self._tuned = waits_s.index(max(waits_s))
        loading, self._before = self._adopted[self._tuned].loading, costs[self._tuned]
        all_facts = [loaders[self._tuned] for loaders in everyones]
        obstacle = next((facts["obstacle"] for facts in all_facts if facts["obstacle"]), None)
        if obstacle or loading is None or self._before is None:
            self._leave(_OBSTACLE.format(self._name, obstacle))
            return
        steps = [plan.Step(**facts["step"]) for facts in all_facts]
        if all(plan.why_no_search(step) for step in steps):
            self._leave(str(plan.why_no_search(self._before)))
            return
        given = self._adopted[self._tuned].given
        assert isinstance(given, DataLoader)
        _say(f"training pauses for at most {self.budget_s:g} s to try DataLoader settings.")
        found = search(
            given,
            # Ranks wait for each other inside the step, so the shortest time is that of the step itself.
            step=min(steps, key=lambda step: step.step_s),
            host=read_host_budget(local_ranks=run.place.local_ranks),
            cuda=trains_on_gpu(trainer),
            budget_s=self.budget_s,
            can_persist=not trainer.reload_dataloaders_every_n_epochs,  # which recreates the loader
            bar=trainer.is_global_zero and trainer.progress_bar_callback is not None,
            gather=self._gather,
        )
        self._use(loading, found)

    @property
    def _name(self) -> str:
        """The name of the tuned loader among several, after a space; empty if it is the only one."""
        loaders = self._session.run.loaders
        if len(self._adopted) < 2:
            return ""
        named = loaders[self._tuned].name if len(loaders) == len(self._adopted) else f"number {self._tuned + 1}"
        dataset = getattr(self._adopted[self._tuned].given, "dataset", None)
        return f" {printable(named)}" + ("" if dataset is None else f" ({printable(type(dataset).__name__)})")

    def _end_study(self, loading: Loading | None) -> plan.Step | None:
        """Return the cost of the steps since the last call; ``None`` if they were not measured."""
        steps = []
        if loading is not None:
            steps, loading.steps = loading.steps or [], None
        return plan.step_cost(steps, torch.get_num_threads(), loading.in_use) if loading is not None and steps else None

    def _obstacle(self, one: _Adopted, cost: plan.Step | None) -> str | None:
        """Return the reason why the loader cannot be changed."""
        made: Any = one.made
        if one.loading is None or not one.loading.has_begun:
            return one.fixed or f"a {type(made).__qualname__} has its own iteration"
        if cost is None:
            return "its epochs are too short to measure a step"
        obstacle = why_not_switched(one.facts, read_loader_facts(made))
        if obstacle is None and one.loading.new_pass is Pass and draws_late(made):
            return "its sampler draws random numbers during the epoch, and other settings would draw them earlier"
        return obstacle

    def _use(self, loading: Loading, found: LoaderResult) -> None:
        chosen, reason = found.settings, found.reason
        applied = chosen is not None and chosen != found.original and self.apply
        if chosen is not None and applied:
            loading.use(chosen)
            loading.steps = []
            self._due = self._steps + plan.ramp_up(chosen) + plan.CONFIRM_STEPS
            self._next = partial(self._confirm, loading)
            if chosen.num_workers and not loading.original.num_workers:
                reason += " Random numbers that the dataset draws (augmentation) now come from the workers."
        if self._name:
            reason += f" The loader is{self._name}."
        self._set_result(dataclasses.replace(found, applied=applied, reason=reason))
        if chosen is not None:
            state = "is now in use" if applied else "was found, but not applied"
            state = "is unchanged" if chosen == found.original else state
            others = ("prefetch_factor", "persistent_workers", "pin_memory")
            set_ones = [f"{name}={getattr(chosen, name)}" for name in others if getattr(chosen, name)]
            _say(f"{', '.join([f'num_workers={chosen.num_workers}', *set_ones])} {state}. {reason}")

    def _confirm(self, loading: Loading) -> None:
        """Keep the settings if steps take no longer than before, on the slowest rank."""
        after = self._end_study(loading)
        before_s, after_s = (0.0 if cost is None else cost.total_s for cost in (self._before, after))
        all_facts = self._gather({"fault": loading.fault, "before_s": before_s, "after_s": after_s})
        fault = next((facts["fault"] for facts in all_facts if facts["fault"]), None)
        before_s, after_s = (max(facts[name] for facts in all_facts) for name in ("before_s", "after_s"))
        if fault:
            self._revert(f"The new settings failed in use ({fault})")
        elif after_s > before_s:
            took, original = format_duration(after_s), format_duration(before_s)
            self._revert(f"The new settings were slower in use: a step took {took}, not {original}")
        elif after is not None and self.result is not None:
            self._set_result(dataclasses.replace(self.result, confirmed=True, wait_share=after.wait_share))

    def _revert(self, why: str) -> None:
        for loading in self._loadings:
            loading.steps = None
            if loading.in_use != loading.original:
                loading.use(loading.original)
        result = self.result
        if result is not None and result.applied:
            why = f"{why}, so the original settings were restored."
            reverted = dataclasses.replace(result, settings=result.original, applied=False, confirmed=False)
            self._set_result(dataclasses.replace(reverted, reason=f"{result.reason} {why}"))
            rank_zero_warn(f"NumWorkersFinder: {why}")

    def _leave(self, reason: str) -> None:
        given = self._adopted[self._tuned].given if self._adopted else None
        original = settings_of(given) if isinstance(given, DataLoader) else None
        share = None if self._before is None else self._before.wait_share
        self._set_result(LoaderResult(original=original, settings=original, reason=reason, wait_share=share))
        _say(reason)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the report is created.
        for loading in self._loadings:
            if loading.fault is not None:
                self._revert(f"The new settings failed in use ({loading.fault})")
        if self.result is None:
            self._leave(f"Training ended after {plural(self._steps, 'step')}, but a search needs {plan.STUDY_STEPS}.")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    def _finish(self) -> None:
        self._patches.undo()
        for loading in self._loadings:
            loading.close()
        self._session.release(self)
        self.__dict__ = self.__getstate__()  # last: after Ctrl-C during close, this is called again

    @override
    def _give_up(self) -> None:
        self._session.release(self)  # the end of the fit itself may have failed
        self._next = None
        self._revert("An error occurred")

    def __getstate__(self) -> dict[str, Any]:
        return {"budget_s": self.budget_s, "apply": self.apply, "result": self.result}


def _say(text: str) -> None:
    rank_zero_info(f"NumWorkersFinder: {text}")
