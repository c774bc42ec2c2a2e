"""Instants that are each booked once, whatever happens, and a timeline of phases that stays small."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainings import Boom, HandClock

from lightning_gpu_tools.training.stopwatch import PhaseTimeline, Stopwatch


def test_spans_add_up_to_the_run_and_stay_few() -> None:
    timeline = PhaseTimeline(max_spans=40, width_s=0.25)
    timeline.start(100.0)
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
    watch.start()
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
