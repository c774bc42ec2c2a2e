"""The timeline of phases: nothing is lost, and it stays small."""

import pytest

from lightning_gpu_tools.monitoring.stopwatch import PhaseTimeline


def test_spans_add_up_to_the_run_and_are_few_however_long_it_is() -> None:
    timeline = PhaseTimeline(max_spans=40, width_s=0.25)
    timeline.start(100.0)
    seconds = {"training_step": 0.0, "callback/Slow": 0.0}
    now_s = 100.0
    for step in range(20_000):  # a step of 30 s: a week
        now_s += 30.0
        seconds["training_step"] += 20.0
        seconds["callback/Slow"] += 10.0
        if now_s >= timeline.due_s:
            timeline.cut(now_s, seconds)
        assert len(timeline.spans()) <= 40 or step % 100
    spans = timeline.spans()
    assert spans[0].begin_s == 0
    assert [span.end_s for span in spans[:-1]] == [span.begin_s for span in spans[1:]]
    for span in spans:
        assert sum(span.phase_s.values()) == pytest.approx(span.end_s - span.begin_s)
        assert span.phase_s["callback"] == pytest.approx(span.phase_s["training_step"] / 2)


def test_what_begins_has_an_edge_of_its_own() -> None:
    timeline = PhaseTimeline(width_s=100.0)
    timeline.start(0.0)
    timeline.cut_at_edge(50.0, {"training_step": 50.0})
    timeline.cut_at_edge(80.0, {"training_step": 50.0, "validation": 30.0})
    timeline.cut_at_edge(81.0, {"training_step": 51.0, "validation": 30.0})  # too short for a span
    timeline.cut(90.0, {"training_step": 60.0, "validation": 30.0})
    assert [(span.end_s, dict(span.phase_s)) for span in timeline.spans()] == [
        (50, {"training_step": 50}),
        (80, {"validation": 30}),
        (90, {"training_step": 10}),
    ]
