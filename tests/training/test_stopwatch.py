"""Instants that are each booked once, a timeline of phases that stays small, and durations of steps."""

import contextlib
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import timed_steps
from trainings import Boom, HandClock

from lightning_gpu_tools.training.phases import TRAINING_STEP
from lightning_gpu_tools.training.run_measurements import StepTimes
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock
from lightning_gpu_tools.training.stopwatch import PhaseTimeline, Stopwatch


def test_spans_add_up_to_the_run_and_stay_few() -> None:
    timeline = PhaseTimeline(max_spans=40, width_s=0.25)
    timeline.cut(100.0, {}, 0)
    seconds = {"training_step": 0.0, "callback/Slow": 0.0}
    now_s = 100.0
    for step in range(5_000):  # a step of 30 s: two days
        now_s += 30.0
        seconds["training_step"] += 20.0
        seconds["callback/Slow"] += 10.0
        if now_s >= timeline.due_s:
            timeline.cut(now_s, seconds, step + 1)
        assert len(timeline.spans()) <= 40 or step % 100
    spans = timeline.spans()
    lengths_s = [span.end_s - span.begin_s for span in spans]
    assert max(lengths_s) <= 2.1 * min(lengths_s[:-1])  # the last one may have just begun
    assert spans[0].begin_s == 0
    assert [span.end_s for span in spans[:-1]] == [span.begin_s for span in spans[1:]]
    for span in spans:
        assert sum(span.phase_s.values()) == pytest.approx(span.end_s - span.begin_s)
        assert span.phase_s["callback"] == pytest.approx(span.phase_s["training_step"] / 2)
    assert sum(span.steps for span in spans) >= 5_000 - 2**10  # all but those of the last span, which is not cut


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Return what a thread does, one after the other: seconds that go by, phases with such a list inside, errors."""
    inside = st.deferred(trees)
    phase = st.tuples(st.sampled_from("abc"), inside)
    return draw(st.lists(st.one_of(st.integers(1, 1000), phase, st.just(Boom)), max_size=3))


@given(trees())
def test_phases_add_up_whatever_is_raised_inside(tree: Any) -> None:
    time, booked = HandClock(), dict.fromkeys("abc", 0.0)
    watch = Stopwatch("outside", time)
    contexts = {phase: watch.booked(phase, except_in="c" if phase == "b" else "") for phase in "abc"}
    booked["outside"] = 0.0
    began_s = time()

    def act(tree: Any, phase: str) -> None:
        for part in tree:
            if part is Boom:
                raise Boom
            if isinstance(part, int):
                time.spend(part)
                booked[phase] += part
            else:
                inner, rest = part
                with contextlib.suppress(Boom), contexts[inner]:
                    act(rest, phase if (inner, phase) == ("b", "c") else inner)
                assert watch.current.phase == phase

    with contextlib.suppress(Boom):
        act(tree, "outside")
    watch.switch(watch.current)
    assert watch.seconds == pytest.approx({phase: seconds for phase, seconds in booked.items() if seconds}, abs=1e-6)
    assert sum(watch.seconds.values()) == pytest.approx(time() - began_s)


Step = dict[str, float]


def timed(steps: Sequence[Step], warm_up: Step | None = None) -> StepTimes | None:
    """Return what is known of steps with these seconds by phase, after the warm-up."""
    clock = timed_steps([*[warm_up or {TRAINING_STEP: 1.0}] * WARM_UP_STEPS, *steps, {}])
    return clock.times.facts()


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=300))
def test_percentiles_are_of_steps_after_the_warm_up_and_parts_add_up(seconds: list[float]) -> None:
    times = timed([{TRAINING_STEP: one} for one in seconds], warm_up={TRAINING_STEP: 3e3})
    assert times.count == len(seconds)
    assert times.seconds == pytest.approx(sum(seconds))
    assert times.max_s == pytest.approx(max(seconds))
    ordered = sorted(seconds)
    assert times.p50_s == pytest.approx(ordered[(len(ordered) - 1) // 2])
    assert times.p95_s == pytest.approx(ordered[-1 - len(ordered) // 20])
    assert sum(slow.seconds for slow in times.slow) <= times.seconds * (1 + 1e-9)


def test_slow_steps_are_grouped_by_phase() -> None:
    usual = {"data_loading": 0.005, TRAINING_STEP: 0.02}
    steps = [dict(usual) for _ in range(200)]
    for i in range(9, 200, 20):
        steps[i][TRAINING_STEP] = 0.42
    for i in range(24, 200, 50):
        steps[i]["callback/Slow"] = 1.0
    steps[150]["data_loading"] = 0.505
    found = {slow.phase: slow for slow in timed(steps).slow}
    counts = {phase: slow.count for phase, slow in found.items()}
    assert counts == {TRAINING_STEP: 10, "callback/Slow": 4, "data_loading": 1}
    seconds = {phase: slow.seconds for phase, slow in found.items()}
    assert seconds == pytest.approx({TRAINING_STEP: 10 * 0.425, "callback/Slow": 4 * 1.025, "data_loading": 0.525})
    assert found[TRAINING_STEP].steps == tuple(WARM_UP_STEPS + 1 + i for i in range(9, 200, 20))


def test_garbage_collection_is_booked_wherever_it_starts_in_this_thread() -> None:
    time = HandClock()
    clock = StepClock(time)
    clock.start()
    gc.callbacks.append(spend := lambda stage, info: time.spend(0.5 if stage == "start" else 0.0))
    gc.disable()  # but for what the test collects
    try:
        clock.timed(TRAINING_STEP, lambda: (time.spend(1.0), gc.collect(), time.spend(2.0)))()
        clock.timed(TRAINING_STEP, lambda: gc.collect(0))()
        elsewhere = threading.Thread(target=gc.collect)
        clock.timed(TRAINING_STEP, lambda: (elsewhere.start(), elsewhere.join()))()
        clock.stop()
        gc.collect()
    finally:
        gc.enable()
        gc.callbacks.remove(spend)
    assert clock.seconds == {TRAINING_STEP: 1.0 + 2.0 + 2 * 0.5, "garbage_collection": 0.5}
    assert clock.wall_s == 4.5
