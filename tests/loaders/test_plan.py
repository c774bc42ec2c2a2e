"""Choices of the settings to try and to take, decided from what was measured."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import GIB, NO_WORKERS, a_host

from lightning_gpu_tools.advice.loader_plan import LoadCost
from lightning_gpu_tools.loaders.plan import LoaderCase, Step, choose, max_workers, next_trial, step_cost, why_no_search
from lightning_gpu_tools.training.run_measurements import LoaderTrial
from lightning_gpu_tools.types import LoaderSettings

HOST = a_host(8.0)


def workers(count: int, prefetch: int = 2) -> LoaderSettings:
    return replace(NO_WORKERS, num_workers=count, prefetch_factor=prefetch if count else None)


def case(load_s: float = 0.04, step_s: float = 0.01, **changes: object) -> LoaderCase:
    made = LoaderCase(
        original=NO_WORKERS,
        cost=LoadCost(wall_s=load_s, cpu_s=0.0),
        step=Step(step_s),
        host=HOST,
        cuda=False,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def trial(count: int, batch_s: float | None, prefetch: int = 2, wait_s: float = 0.0, **more: object) -> LoaderTrial:
    made = LoaderTrial(settings=workers(count, prefetch), batch_s=batch_s, wait_s=wait_s)
    return replace(made, **{"measured": count > 0, **more})  # type: ignore[arg-type]


def tried(of: LoaderCase, speed: object) -> list[LoaderTrial]:
    """Play a whole search in which a number of workers has the speed that a function says."""
    alone_s = of.cost.wall_s + of.step.step_s
    trials = [trial(0, alone_s, wait_s=of.cost.wall_s)]
    while (settings := next_trial(of, trials)) is not None:
        batch_s = speed(settings)  # type: ignore[operator]
        wait_s = max(0.0, batch_s - of.step.step_s)
        trials.append(trial(settings.num_workers, batch_s, settings.prefetch_factor or 2, wait_s))
        assert len(trials) < 40
    return trials


def counts(trials: list[LoaderTrial]) -> list[int]:
    return [one.settings.num_workers for one in trials]


def test_the_prediction_comes_first_then_twice_and_half_of_it() -> None:
    assert counts(tried(case(), lambda settings: max(0.01, 0.04 / settings.num_workers)))[:4] == [0, 5, 10, 3]


def test_what_still_waits_gets_more_workers_and_a_longer_queue() -> None:
    found = tried(case(), lambda settings: max(0.01, 0.4 / settings.num_workers))
    assert max(counts(found)) == 32  # four a core
    assert any(one.settings.prefetch_factor == 8 for one in found)


def test_items_that_compute_get_one_worker_more_than_cores() -> None:
    computing = LoadCost(wall_s=0.2, cpu_s=0.2)
    assert max_workers(case(cost=computing)) == 9
    assert max_workers(case(cost=replace(computing, cpu_s=0.21))) == 9  # with other threads of the worker
    assert max_workers(case(cost=computing, host=replace(HOST, local_ranks=4))) == 3
    assert max_workers(case(cost=replace(computing, cpu_s=0.1))) == 17
    assert max_workers(case(cost=replace(computing, cpu_s=0.01))) == 32


@pytest.mark.parametrize(
    ("cost", "host", "most"),
    [
        ({"batch_bytes": GIB}, {"shm_free_bytes": 8 * GIB}, 3),  # 80% of it, two batches a worker
        ({"worker_bytes": 4 * GIB}, {"memory_available_bytes": 64 * GIB}, 8),  # half of it
        ({"batch_bytes": GIB}, {"shm_free_bytes": None}, 32),
    ],
)
def test_workers_fit_into_memory_and_shm(cost: dict[str, int], host: dict[str, int | None], most: int) -> None:
    limited = case(cost=LoadCost(wall_s=1.0, cpu_s=0.0, **cost), host=replace(HOST, **host))  # type: ignore[arg-type]
    assert max_workers(limited) == most
    assert max(counts(tried(limited, lambda settings: 1 / settings.num_workers))) <= most


def test_a_failure_ends_the_way_up_and_two_end_the_search() -> None:
    trials = [trial(0, 0.05, wait_s=0.04), trial(5, None, failed="killed")]
    following = next_trial(case(), trials)
    assert following is not None
    assert 0 < following.num_workers < 5
    assert next_trial(case(), [*trials, trial(2, None, failed="killed")]) is None


ON_CPU = case(step=Step(0.01, 0.01, threads=1))
KILLED = trial(4, None, failed="killed")


@pytest.mark.parametrize(
    ("of", "trials", "count", "said"),
    [
        # The fewest workers within 3% of the best.
        (case(), [trial(0, 0.05), trial(10, 0.01), trial(5, 0.0101), trial(3, 0.014)], 5, "99 batches/s instead of 20"),
        (case(), [trial(0, 0.0102), trial(5, 0.0100)], 0, "more than 3% faster"),
        # The prediction is five workers, for steps that turn out shorter. Fewer have to be faster than five.
        (case(), [trial(0, 0.05), trial(5, 0.0101), trial(10, 0.01), trial(3, 0.0100)], 5, "99 batches/s"),
        (case(), [trial(0, 0.05), trial(5, 0.0105), trial(10, 0.0105), trial(3, 0.0100)], 3, "100 batches/s"),
        # A loader in memory loses the workers that it does not need.
        (case(0.0001, original=workers(4)), [trial(0, 0.0101), trial(4, 0.0105), trial(2, 0.0104)], 0, "99 batches/s"),
        # A step that computes needs a gain of 15%.
        (ON_CPU, [trial(0, 0.0113), trial(2, 0.0100)], 0, "more than 15% faster. The training step also uses the CPU"),
        (ON_CPU, [trial(0, 0.0116), trial(2, 0.0100)], 2, "batches/s instead of"),
        (case(), [trial(0, 0.0113), trial(2, 0.0100)], 2, "batches/s instead of"),
        # Nothing is changed for a prediction alone.
        (case(original=workers(4)), [trial(0, 0.05), KILLED, trial(2, 0.01)], 4, "killed"),
        (case(), [trial(0, 0.05)], 0, "The time budget was too short."),
    ],
)
def test_what_is_taken_and_why(of: LoaderCase, trials: list[LoaderTrial], count: int, said: str) -> None:
    settings, reason = choose(of, trials)
    assert settings.num_workers == count
    assert said in reason
    # Workers live on, unless the loader is recreated.
    assert settings.persistent_workers == (count > of.original.num_workers)
    assert not choose(replace(of, can_persist=False), trials)[0].persistent_workers


TRAINED = Step(0.01, wait_s=0.04, error_s=0.001)


@pytest.mark.parametrize(
    ("of", "current"),
    [
        # Without workers, only the stand-in for the step can differ: 10 ms, plus the noise.
        (case(step=TRAINED), trial(0, 0.0525, wait_s=0.04)),
        (case(step=TRAINED, original=workers(1)), trial(1, 0.043)),
    ],
)
def test_trials_that_do_not_reproduce_training_change_nothing(of: LoaderCase, current: LoaderTrial) -> None:
    trials = [current]
    if of.original.num_workers:  # another program may have disturbed the trial
        trials = [trial(0, 0.05, wait_s=0.04), current]
        assert next_trial(of, trials) == of.original
        assert next_trial(of, [*trials, current]) == of.original
    assert next_trial(of, [*trials, current, current]) is None
    settings, reason = choose(of, [*trials, trial(5, 0.01)])
    assert settings == of.original
    assert f"took 50 ms from batch to batch, but a trial took {1000 * current.batch_s:.3g} ms" in reason  # type: ignore[operator]
    # Up to a tenth, and the noise of the study, it is the same.
    near = replace(current, batch_s=0.05 + 0.7 * (current.batch_s - 0.05))  # type: ignore[operator]
    assert next_trial(of, [*trials[:-1], near]) not in (None, of.original)
    assert choose(of, [*trials[:-1], near, trial(5, 0.01)])[0] != of.original
    assert next_trial(replace(of, step=of.step._replace(error_s=None)), trials) not in (None, of.original)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slower", [0.9, 1.25])
def test_choices_are_near_the_best_despite_slow_stand_ins(slower: float, seed: int) -> None:
    drawn, step_s = random.Random(seed), 0.01
    load_s, stand_in_s = step_s * drawn.uniform(0.5, 12.0), step_s * slower
    of = case(load_s, step=Step(stand_in_s, wait_s=load_s, error_s=0.0))
    # Two trials of the same settings differ by up to 3%.
    trials = tried(of, lambda settings: max(stand_in_s, load_s / settings.num_workers) * drawn.uniform(1.0, 1.03))
    chosen = choose(of, trials)[0].num_workers
    assert chosen > 0
    assert load_s / chosen <= 1.03 * step_s


SPEEDS = st.floats(0.001, 1.0)


@given(load_s=SPEEDS, step_s=SPEEDS, cores=st.integers(1, 64), noise=st.randoms(use_true_random=False))
def test_a_search_ends_and_is_never_worse_than_the_original(
    load_s: float, step_s: float, cores: int, noise: object
) -> None:
    of = case(load_s, step_s, host=replace(HOST, cores=float(cores)))
    jitter = noise.uniform  # type: ignore[attr-defined]
    trials = tried(of, lambda settings: max(step_s, load_s / settings.num_workers) * jitter(1.0, 1.5))
    settings, _ = choose(of, trials)
    assert max(counts(trials)) <= 4 * cores
    chosen = [one.batch_s for one in trials if one.settings.num_workers == settings.num_workers]
    assert min(batch_s for batch_s in chosen if batch_s is not None) <= load_s + step_s


def step(wait_s: float, step_s: float, cpu_s: float = 0.0) -> Step:
    return Step(wait_s=wait_s, step_s=step_s, cpu_s=cpu_s)


def test_validation_in_between_does_not_count_as_a_step() -> None:
    cost = step_cost([step(0.02, 0.01)] * 24 + [step(0.0, 5.0)], 8, NO_WORKERS)
    assert cost.step_s == pytest.approx(0.01)
    assert cost.total_s == pytest.approx(0.029)


@pytest.mark.parametrize(
    ("cpu_s", "torch_threads", "threads"),
    [(0.001, 1, 0), (0.01, 1, 1), (0.01, 8, 0), (0.02, 2, 2), (0.04, 8, 4)],
)
def test_a_step_computes_from_a_quarter_of_torchs_threads_on(cpu_s: float, torch_threads: int, threads: int) -> None:
    assert step_cost([step(0.0, 0.01, cpu_s)] * 20, torch_threads, NO_WORKERS).threads == threads


def test_the_wait_is_measured_once_the_batches_loaded_ahead_are_used() -> None:
    steps = [step(0.0, 0.01)] * 15 + [step(0.02, 0.01)] * 10
    assert step_cost(steps, 8, workers(4, prefetch=2)).wait_s == pytest.approx(0.02 * 10 / 11)
    assert step_cost(steps, 8, workers(8, prefetch=2)).error_s is None


def test_a_loader_that_keeps_up_is_not_searched() -> None:
    assert why_no_search(step(0.0004, 0.01)) is not None
    assert why_no_search(step(0.001, 0.01)) is None
