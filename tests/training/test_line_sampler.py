"""Source lines at which a thread is sampled, and when: by stacks, a clock and samples that a test makes."""

from __future__ import annotations

import _thread
import gc
import json
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from trainings import HandClock

from lightning_gpu_tools.training import line_sampler
from lightning_gpu_tools.training.line_sampler import SWITCH_S, WINDOW_SAMPLES, LineSampler, WorkerLines
from lightning_gpu_tools.training.phases import (
    BACKWARD,
    CALLBACK,
    IN_WORKER,
    MONITORING,
    TRAINING_STEP,
)
from lightning_gpu_tools.training.run_measurements import SourceLine
from lightning_gpu_tools.training.source_lines import Seen, line_in, line_of
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS, StepClock

PACKAGES = sysconfig.get_path("purelib")
# The frames of a stack: file and function, each in line 2.
SCRIPT = ("/home/ada/train.py", "main")
FIT = (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", "fit")
HOOK = (f"{PACKAGES}/lightning/pytorch/trainer/call.py", "_call_callback_hooks")
SAVE = (f"{PACKAGES}/lightning/pytorch/callbacks/x.py", "save")
FETCH = (f"{PACKAGES}/torch/utils/data/_utils/fetch.py", "fetch")
COLLATE = (f"{PACKAGES}/torch/utils/data/_utils/collate.py", "default_collate")
TORCH = (f"{PACKAGES}/torch/nn/functional.py", "linear")
PILLOW = (f"{PACKAGES}/PIL/ImageFile.py", "load")
VISION = (f"{PACKAGES}/torchvision/datasets/folder.py", "__getitem__")
JSON = (f"{sysconfig.get_path('stdlib')}/json/decoder.py", "decode")
OURS = (line_sampler.__file__, "timed")
DECODE = (f"{os.getcwd()}/data.py", "decode")
GETITEM = (f"{os.getcwd()}/data.py", "__getitem__")


def seen_in(*calls: tuple[str, str]) -> Seen | None:
    """Return the line of a stack of these calls, outermost first."""
    return line_in({"filename": path, "line": 2, "name": function} for path, function in reversed(calls))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((SCRIPT, DECODE), ("data.py", "decode", False)),
        ((SCRIPT, DECODE, TORCH), ("data.py", "decode", False)),
        ((SCRIPT, GETITEM, PILLOW, JSON), ("data.py", "__getitem__", False)),
        ((SCRIPT, FIT, HOOK, OURS, DECODE), ("data.py", "decode", False)),
        ((SCRIPT, FIT, HOOK, SAVE, TORCH), ("lightning/pytorch/callbacks/x.py", "save", False)),
        ((SCRIPT, FIT, HOOK, FETCH, GETITEM, DECODE), ("data.py", "decode", True)),
        ((SCRIPT, OURS, FETCH, COLLATE, TORCH), ("torch/utils/data/_utils/collate.py", "default_collate", True)),
        ((SCRIPT, FETCH, VISION, PILLOW), ("PIL/ImageFile.py", "load", True)),
        ((SCRIPT, FETCH), ("torch/utils/data/_utils/fetch.py", "fetch", True)),
    ],
)
def test_the_innermost_line_of_the_user_is_named(
    calls: tuple[tuple[str, str], ...], expected: tuple[str, str, bool]
) -> None:
    file, function, is_loading = expected
    assert seen_in(*calls) == Seen(file, 2, function, is_loading)


def test_a_comprehension_has_the_name_of_its_function() -> None:
    seen = next(line_of(sys._getframe()) for _ in range(1))
    here = "test_a_comprehension_has_the_name_of_its_function"
    assert (seen.file, seen.function) == (os.path.relpath(__file__), here)


class Sampled:
    """A training whose steps a test makes, and whose samples it takes."""

    def __init__(self) -> None:
        self.time = HandClock()
        self.clock = StepClock(self.time)
        self.clock.start()
        self.sampler = LineSampler(self.clock, WorkerLines(), list)
        self.sampler._thread_id = self.clock.thread_id
        self.clock.begin_epoch()

    def step(self, count: int = 1, seconds: float = 0.01) -> None:
        for _ in range(count):
            self.clock.begin_fetch()
            self.clock.end_fetch()
            with self.clock.booked(TRAINING_STEP):
                self.time.spend(seconds)

    def sample(self, phase: str, count: int = 1) -> float:
        with self.clock.booked(phase):
            return [self.sampler._sample() for _ in range(count)][-1]

    def seen(self) -> dict[str, int]:
        return {one.phase: one.samples for one in self.sampler.seen(())}


@pytest.fixture
def sampled() -> Iterator[Sampled]:
    before_s = sys.getswitchinterval()
    training = Sampled()
    yield training
    training.sampler.close()
    training.clock.stop()
    sys.setswitchinterval(before_s)


@pytest.fixture
def steady(sampled: Sampled) -> Sampled:
    sampled.step(WARM_UP_STEPS + 2)
    return sampled


def test_nothing_is_sampled_before_steps_are_steady(sampled: Sampled) -> None:
    sampled.step(WARM_UP_STEPS)
    sampled.sample(TRAINING_STEP, 5)
    assert sampled.seen() == {}
    assert sys.getswitchinterval() > SWITCH_S


def test_a_window_ends_and_the_switch_interval_is_as_before(steady: Sampled) -> None:
    before_s = sys.getswitchinterval()
    steady.sample(TRAINING_STEP)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    idle_s = steady.sample(CALLBACK, WINDOW_SAMPLES)
    assert idle_s > 0.1
    assert steady.seen() == {CALLBACK: WINDOW_SAMPLES - 1, TRAINING_STEP: 1}
    assert sys.getswitchinterval() == before_s


def test_this_packages_own_work_is_not_counted(steady: Sampled) -> None:
    steady.sample(MONITORING, 5)
    assert steady.seen() == {}


@pytest.mark.parametrize(("seconds", "windows"), [(0.01, 1), (0.011, 1), (0.02, 2), (0.005, 2)])
def test_another_window_begins_at_another_pace(steady: Sampled, seconds: float, windows: int) -> None:
    steady.step(100)
    steady.sample(TRAINING_STEP, WINDOW_SAMPLES + 1)
    steady.step(100, seconds)
    steady.sample(TRAINING_STEP, WINDOW_SAMPLES + 1)
    assert steady.seen() == {TRAINING_STEP: windows * WINDOW_SAMPLES}


def test_a_switch_interval_that_the_program_sets_stays(steady: Sampled) -> None:
    steady.sample(TRAINING_STEP)
    sys.setswitchinterval(0.02)
    steady.sample(TRAINING_STEP)
    steady.sampler.close()
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_a_fault_puts_the_switch_interval_back(steady: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    before_s = sys.getswitchinterval()
    steady.sample(TRAINING_STEP)
    monkeypatch.delattr(sys, "_current_frames")
    with pytest.raises(AttributeError):
        steady.sample(TRAINING_STEP)
    assert sys.getswitchinterval() == before_s


class Batch:
    """A local variable of a step."""


@pytest.mark.parametrize("phase", [TRAINING_STEP, BACKWARD])
def test_a_sample_keeps_no_variables_of_the_program(steady: Sampled, phase: str) -> None:
    def step() -> weakref.ref[Batch]:
        batch = Batch()
        sampling = threading.Thread(target=steady.sampler._sample)
        sampling.start()
        sampling.join()
        return weakref.ref(batch)

    gc.disable()  # a collection would free what a cycle keeps
    try:
        with steady.clock.booked(phase):
            batches = [step() for _ in range(3)]
        assert [batch() for batch in batches] == [None] * 3
    finally:
        gc.enable()
    assert steady.seen()


def test_a_thread_from_before_training_is_not_taken_for_autograds() -> None:
    began, ends = threading.Event(), threading.Event()

    def read() -> None:
        began.set()
        ends.wait()

    _thread.start_new_thread(read, ())  # like those of C, and unlike those of threading
    assert began.wait(10)
    before_s, training = sys.getswitchinterval(), Sampled()
    training.step(WARM_UP_STEPS + 2)
    training.sample(BACKWARD)
    ends.set()
    training.sampler.close()
    training.clock.stop()
    assert sys.getswitchinterval() == before_s
    (line,) = training.sampler.seen(())
    assert line.function != "read"


def test_a_loop_that_somebody_else_has_put_there_stays() -> None:
    def loop() -> None:
        """Stand in for torch's."""

    assert WorkerLines().sampled(loop) is loop


def test_lines_of_workers_stay_as_they_were_read_when_files_are_broken_or_gone() -> None:
    workers = WorkerLines()
    workers.sampled(line_sampler._worker_loop)
    folder = Path(str(workers._folder))
    line = SourceLine(phase=IN_WORKER, file="data.py", line=7, function="decode", samples=40)
    (folder / "7.json").write_text(json.dumps([asdict(line)]))
    assert workers.lines([1]) == []
    assert workers.lines([1, 7]) == [line]
    (folder / "7.json").write_text("{")
    assert workers.lines([7]) == [line]
    workers.close()
    assert not folder.exists()
    assert workers.lines([7]) == [line]
