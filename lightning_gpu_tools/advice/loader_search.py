"""Which DataLoader settings to try next, and when to stop: decided from the trials so far, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from lightning_gpu_tools.advice.findings import MIN_CEILING
from lightning_gpu_tools.advice.loader_plan import TOLERANCE, LoadCost, LoaderPlan, plan_loader
from lightning_gpu_tools.advice.loader_trials import LoaderScore, LoaderTrial, score
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import LoaderSettings
from lightning_gpu_tools.units import format_duration

# A choice: the time in which a block of steps is measured, as a part of the budget (1 s of 60 s), so that there is time
# for some twenty visits of two blocks each.
_BLOCKS_IN_BUDGET = 60
_BLOCKS_A_VISIT = 2
# A choice: the mean of fewer steps says little.
_LEAST_STEPS_A_BLOCK = 8
# A choice: where not even the user's own settings leave time for others, a few steps show more than none.
_LEAST_STEPS = 3
# A choice: two visits are needed for a comparison that a slow change of the machine does not fool (A B B A), and more
# than three do not make a noisy machine quieter.
_VISITS, _MOST_VISITS = 2, 3
# A choice: what is known to 5 % need not be visited again.
_PRECISION = 0.05
# A choice: kernels are chosen and caches are filled during the first steps of a training.
_FIRST_STEPS = 10
# A choice: workers that live on between epochs keep their memory, for which they must save so much of an epoch.
_PERSISTENT_FROM = 0.01
# A choice: within 3 % of the best is what is promised, and a part of that is left to the noise of the trials.
_CHOICE = 0.02
# A choice: a loader may take so much longer without workers than it does now, and still be tried without any: the
# prediction does not know what it costs to hand a batch over from a worker.
_ALONE = 1.10
# The prediction is off by up to 11 % where workers wait for storage (measured with up to 8 workers); what falls short
# of it by more than that was disturbed, or is limited by something unknown, and gets a second look.
_SURPRISE = 0.85
# A choice: each trial makes the prediction better; after so many sets of settings only the neighbours are of interest.
_MOST_PLANS = 3
# A choice: what has failed twice is not a matter of how many workers there are.
_MOST_FAILURES = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderCase:
    """What does not change while settings are looked for.

    Attributes:
        users: The user's own settings.
        host: What the host grants.
        cuda: Whether batches go to an NVIDIA GPU.
        budget_s: How long trials may take altogether.
        epoch_steps: Steps in an epoch; ``None`` if that is unknown.
        step_cores: How many cores the training process keeps busy during a step.
        alone_allowed: Whether the training process may load by itself. Not if the user has workers that he prepares
            with a ``worker_init_fn``, or a dataset that cannot be copied for it.
    """

    users: LoaderSettings
    host: HostBudget
    cuda: bool
    budget_s: float
    epoch_steps: int | None = None
    step_cores: float = 1.0
    alone_allowed: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A trial to make: ``skip`` steps that do not count, then ``blocks`` blocks of ``steps`` steps."""

    settings: LoaderSettings
    skip: int
    steps: int
    blocks: int = _BLOCKS_A_VISIT


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderDecision:
    """The settings to use, and why."""

    settings: LoaderSettings
    reason: str


def next_move(case: LoaderCase, trials: Sequence[LoaderTrial]) -> Visit | LoaderDecision:
    """Return what to try next, or the decision when there is nothing left to find out or no time left.

    The user's own settings come first. What they cost to load predicts the number of workers; that one and its
    neighbours are tried, further up as long as it gets faster, further down as long as it gets no slower. What could be
    the answer is visited again in reverse order.
    """
    if not trials:
        return _visit(case, trials, case.users)
    scores = score(trials)
    users = scores[0]
    if users.failed is not None:
        return LoaderDecision(settings=case.users, reason=f"Nothing could be tried: {users.failed}.")
    if len(scores) == 1 and (waiting := _waiting(case, users)) is not None:
        return LoaderDecision(settings=case.users, reason=waiting)
    left_s = case.budget_s - sum(trial.seconds for trial in trials)
    plan = _plan(case, trials)
    unknown = list(_explore(case, trials, scores, plan))
    for settings in (*unknown, *_repeat(case, trials, scores)):
        visit = _visit(case, trials, settings)
        if (visit.skip + visit.steps * visit.blocks) * _expected_step_s(trials, settings) <= left_s:
            return visit
    if unknown and len(scores) == 1:
        # Slow loading is what most needs other settings: the best guess gets a short visit beyond the budget.
        return replace(_visit(case, trials, unknown[0]), steps=_LEAST_STEPS, blocks=1)
    return _decide(case, trials, scores, plan)


def confirmation(case: LoaderCase, trials: Sequence[LoaderTrial], settings: LoaderSettings) -> Visit:
    """Return the visit that looks at the chosen settings in the first hundred steps of their real use."""
    visit = _visit(case, trials, settings)
    return replace(visit, steps=max(math.ceil(100 / 4), 2 * settings.num_workers), blocks=4)


def _own_step_s(trials: Sequence[LoaderTrial]) -> float:
    """Return the time of a step without any wait: the least that was seen, for workers take cores away from it."""
    return max(1e-6, min(mean(trial.block_step_s) - trial.wait_s for trial in trials if trial.block_step_s))


def _waiting(case: LoaderCase, users: LoaderScore) -> str | None:
    """Return why there is nothing to gain; ``None`` if there is."""
    step_s = 1 / users.batches_per_s if users.batches_per_s else 0.0
    if step_s > MIN_CEILING * (step_s - users.wait_s):
        return None
    return (
        f"Training waits {format_duration(max(0.0, users.wait_s))} of {format_duration(step_s)} a step for data: no "
        f"settings can make it {100 * (MIN_CEILING - 1):.0f} % faster."
    )


def _cost(trials: Sequence[LoaderTrial]) -> LoadCost | None:
    """Return what a batch costs where nobody disturbs: the least of what was seen.

    Trials with workers count more than one without, because a worker computes with one thread.
    """
    known = [(trial.settings.num_workers > 0, trial.cost) for trial in trials if trial.cost is not None]
    costs = [cost for in_worker, cost in known if in_worker] or [cost for _, cost in known]
    if not costs:
        return None
    return LoadCost(
        wall_s=min(cost.wall_s for cost in costs),
        cpu_s=min((cost.cpu_s for cost in costs if cost.cpu_s is not None), default=None),
        batch_bytes=max((cost.batch_bytes for cost in costs if cost.batch_bytes is not None), default=None),
        spread=min((cost.spread for cost in costs if cost.spread is not None), default=None),
        worker_bytes=max((cost.worker_bytes for cost in costs if cost.worker_bytes is not None), default=None),
    )


def _plan(case: LoaderCase, trials: Sequence[LoaderTrial]) -> LoaderPlan | None:
    cost = _cost(trials)
    if cost is None:
        return None
    plan = plan_loader(
        case.users,
        cost,
        step_s=_own_step_s(trials),
        host=case.host,
        cuda=case.cuda,
        step_cores=case.step_cores,
    )
    return replace(plan, settings=_with_workers(case, plan.settings.num_workers, plan.settings.prefetch_factor))


def _with_workers(case: LoaderCase, num_workers: int, prefetch_factor: int | None) -> LoaderSettings:
    users = case.users
    return replace(
        users,
        num_workers=num_workers,
        prefetch_factor=max(users.prefetch_factor or 0, prefetch_factor or 2) if num_workers else None,
        persistent_workers=users.persistent_workers and num_workers > 0,
    )


def _explore(
    case: LoaderCase, trials: Sequence[LoaderTrial], scores: Sequence[LoaderScore], plan: LoaderPlan | None
) -> Iterable[LoaderSettings]:
    """Return settings that have not been tried and could be the answer, the most promising first."""
    if plan is None:
        return
    failed = [_workers(item) for item in scores if item.failed is not None]
    if len(failed) > _MOST_FAILURES:
        return
    tried = {_workers(item) for item in scores} - set(failed)
    most = min([math.inf if plan.most_workers is None else plan.most_workers, *(count - 1 for count in failed)])
    if failed:  # for lack of memory perhaps: half as many might do
        halved = min(plan.settings.num_workers, min(failed) // 2)
        plan = replace(plan, settings=_with_workers(case, halved, plan.settings.prefetch_factor))
    planned = plan.settings.num_workers
    if plan.limited_by == "cores":
        most = min(most, math.ceil(1.3 * planned))
    if len(scores) <= _MOST_PLANS and not any(abs(count - planned) <= 0.15 * planned for count in tried):
        yield from _new(scores, plan.settings)
    best = max(scores, key=lambda item: item.batches_per_s)
    around: list[int] = []
    slower = [item for item in scores if item.failed is None and 0 < _workers(item) < _workers(best)]
    nearest = max(slower, key=_workers, default=None)
    still_rising = nearest is None or best.batches_per_s > (1 + TOLERANCE) * nearest.batches_per_s
    if best.batches_per_s * _own_step_s(trials) < 1 - TOLERANCE and _workers(best) >= max(tried) and still_rising:
        around.append(math.ceil(1.3 * max(1, _workers(best))) if _workers(best) else 1)
    smallest = _smallest(scores)
    below = max(1, math.floor(0.7 * _workers(smallest)))
    if _workers(smallest) > 1 and not any(below <= count < _workers(smallest) for count in tried):
        around.append(below)
    if _workers(best) and (best.settings.prefetch_factor or 0) < (plan.settings.prefetch_factor or 0):
        yield from _new(scores, replace(best.settings, prefetch_factor=plan.settings.prefetch_factor))
    for count in around:
        if count <= most and count not in tried:
            yield from _new(scores, _with_workers(case, count, plan.settings.prefetch_factor))
    if case.alone_allowed and 0 not in tried and _alone_s(trials) <= _ALONE / best.batches_per_s:
        yield from _new(scores, _with_workers(case, 0, None))
    if case.cuda and not case.users.pin_memory:
        yield from _new(scores, replace(smallest.settings, pin_memory=True))


def _new(scores: Sequence[LoaderScore], settings: LoaderSettings) -> Iterable[LoaderSettings]:
    if all(item.settings != settings for item in scores):
        yield settings


def _repeat(case: LoaderCase, trials: Sequence[LoaderTrial], scores: Sequence[LoaderScore]) -> list[LoaderSettings]:
    """Return settings that need another visit: those seldom visited first, and among these the last ones first."""
    best = max(item.batches_per_s for item in scores)
    again = []
    for place, item in enumerate(scores):
        if item.failed is not None or item.visits >= _MOST_VISITS:
            continue
        contends = item.upper >= (1 - TOLERANCE) * best or item.settings == case.users
        surprises = item.batches_per_s < _SURPRISE / _predicted_step_s(case, trials, item.settings)
        vague = item.upper - item.lower > 2 * _PRECISION * item.batches_per_s
        unsure = item.visits < _VISITS or (vague and item.settings != case.users)
        if (contends and unsure) or (surprises and item.visits < _VISITS):
            # There and back again: A B B A A B.
            again.append((item.visits, place if item.visits % 2 == 0 else -place, item.settings))
    return [settings for _, _, settings in sorted(again, key=lambda entry: entry[:2])]


def _decide(
    case: LoaderCase, trials: Sequence[LoaderTrial], scores: Sequence[LoaderScore], plan: LoaderPlan | None
) -> LoaderDecision:
    chosen = _smallest(scores)
    users, own_s = scores[0], _own_step_s(trials)
    settings = _persistent(case, trials, chosen.settings)
    reason = (
        f"{chosen.batches_per_s:.3g} batches/s against {users.batches_per_s:.3g} with the settings before"
        if chosen.settings != case.users
        else "No other settings promise to be faster"
        if len(scores) == 1
        else f"No other settings came out more than {100 * TOLERANCE:.0f} % faster, or as fast with fewer workers"
    )
    fed = min(1.0, own_s * chosen.batches_per_s)
    if fed > 1 / MIN_CEILING or plan is None or plan.limited_by is None:
        return LoaderDecision(settings=settings, reason=f"{reason}.")
    limit = {
        "cores": "CPU-limited: with any number of workers the training step can be kept busy at most "
        f"{100 * fed:.0f} % of the time; {plan.workers_needed} workers would feed it, but this job has "
        f"{case.host.cores:g} cores",
        "shm": f"/dev/shm has no room for the batches of the {plan.workers_needed} workers that would feed the step",
        "memory": f"there is no memory for the {plan.workers_needed} workers that would feed the step",
    }[plan.limited_by]
    return LoaderDecision(settings=settings, reason=f"{reason}. {limit[0].upper()}{limit[1:]}.")


def _persistent(case: LoaderCase, trials: Sequence[LoaderTrial], settings: LoaderSettings) -> LoaderSettings:
    """Let workers live on between epochs where starting them takes a noticeable part of an epoch."""
    start_s = [trial.start_s for trial in trials if trial.start_s and trial.settings.num_workers]
    if not settings.num_workers or not start_s or case.epoch_steps is None:
        return settings
    worth_it = max(start_s) > _PERSISTENT_FROM * case.epoch_steps * _own_step_s(trials)
    return replace(settings, persistent_workers=settings.persistent_workers or worth_it)


def _smallest(scores: Sequence[LoaderScore]) -> LoaderScore:
    """Return the score with the fewest workers among those as good as the best."""
    best = max(item.batches_per_s for item in scores)
    good = [item for item in scores if item.failed is None and item.batches_per_s >= (1 - _CHOICE) * best]
    # Of two with as many workers: the faster one, unless page-locked memory is all the difference and brings nothing.
    return min(good, key=lambda item: (_workers(item), item.settings.pin_memory, -item.batches_per_s))


def _workers(item: LoaderScore) -> int:
    return item.settings.num_workers


def _alone_s(trials: Sequence[LoaderTrial]) -> float:
    return min((trial.cost.wall_s for trial in trials if trial.cost is not None), default=math.inf) + _own_step_s(
        trials
    )


def _predicted_step_s(case: LoaderCase, trials: Sequence[LoaderTrial], settings: LoaderSettings) -> float:
    """Return the time of a step that the model expects; it is infinite where nothing was measured."""
    cost = _cost(trials)
    if cost is None:
        return math.inf
    own_s = _own_step_s(trials)
    if not settings.num_workers:
        return cost.wall_s + own_s
    core_s = ((cost.cpu_s or 0.0) + case.step_cores * own_s) * case.host.local_ranks / case.host.cores
    return max(own_s, core_s, cost.wall_s / settings.num_workers)


def _expected_step_s(trials: Sequence[LoaderTrial], settings: LoaderSettings) -> float:
    """Return how long a step will take, by the trial with the nearest number of workers."""
    measured = [trial for trial in trials if trial.block_step_s]
    if not measured:
        return 0.0
    nearest = min(measured, key=lambda trial: abs(trial.settings.num_workers - settings.num_workers))
    if not nearest.settings.num_workers and settings.num_workers and nearest.cost is not None:
        return max(_own_step_s(trials), nearest.cost.wall_s / settings.num_workers)
    return median(nearest.block_step_s)


def _visit(case: LoaderCase, trials: Sequence[LoaderTrial], settings: LoaderSettings) -> Visit:
    ahead = settings.num_workers * (settings.prefetch_factor or 0)
    # What the workers before have begun comes first, then what the new ones load before they are in step with training.
    before = trials[-1].settings if trials else settings
    skip = before.num_workers * (before.prefetch_factor or 0) + ahead + settings.num_workers + 2
    if trials and before == settings:
        skip = 0
    step_s = _expected_step_s(trials, settings)
    steps = math.ceil(case.budget_s / _BLOCKS_IN_BUDGET / step_s) if step_s > 0 else 0
    return Visit(
        settings=settings,
        skip=max(skip, 0 if trials else _FIRST_STEPS),
        # All workers of a loader deliver at about the same time: a block has several turns of them.
        steps=max(steps, _LEAST_STEPS_A_BLOCK, 2 * settings.num_workers),
    )
