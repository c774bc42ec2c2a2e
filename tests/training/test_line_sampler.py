"""Source lines at which a thread is sampled, and when: by stacks, a clock and samples that a test makes."""

import gc
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator

import pytest
from synthetic import timed_steps

from lightning_gpu_tools.training import line_sampler
from lightning_gpu_tools.training.line_sampler import SWITCH_S, WINDOW_SAMPLES, LineSampler, WorkerLines
from lightning_gpu_tools.training.phases import CALLBACK, TRAINING_STEP
from lightning_gpu_tools.training.source_lines import Seen, line_in
from lightning_gpu_tools.training.step_clock import WARM_UP_STEPS

PACKAGES = sysconfig.get_path("purelib")
# The frames of a stack: file and function, each in line 2.
SCRIPT = ("/home/ada/train.py", "main")
FIT = (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", "fit")
HOOK = (f"{PACKAGES}/lightning/pytorch/trainer/call.py", "_call_callback_hooks")
SAVE = (f"{PACKAGES}/lightning/pytorch/callbacks/x.py", "save")
FETCH = (f"{PACKAGES}/torch/utils/data/_utils/fetch.py", "fetch")
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
        ((SCRIPT, GETITEM, PILLOW, JSON), ("data.py", "__getitem__", False)),
        ((SCRIPT, FIT, HOOK, OURS, DECODE), ("data.py", "decode", False)),
        ((SCRIPT, FIT, HOOK, SAVE, TORCH), ("lightning/pytorch/callbacks/x.py", "save", False)),
        ((SCRIPT, FIT, HOOK, FETCH, GETITEM, DECODE), ("data.py", "decode", True)),
        ((SCRIPT, FETCH, VISION, PILLOW), ("PIL/ImageFile.py", "load", True)),
    ],
)
def test_the_innermost_line_of_the_user_is_named(
    calls: tuple[tuple[str, str], ...], expected: tuple[str, str, bool]
) -> None:
    file, function, is_loading = expected
    assert seen_in(*calls) == Seen(file, 2, function, is_loading)


class Sampled:
    """A training after its warm-up, whose samples a test takes."""

    def __init__(self) -> None:
        self.clock = timed_steps([{TRAINING_STEP: 0.01}] * (WARM_UP_STEPS + 2))
        self.clock.start()
        self.sampler = LineSampler(self.clock, WorkerLines(), list)
        self.sampler._thread_id = self.clock.thread_id

    def sample(self, phase: str, count: int = 1) -> float:
        with self.clock.booked(phase):
            return [self.sampler._sample() for _ in range(count)][-1]

    def seen(self) -> dict[str, int]:
        return {one.phase: one.samples for one in self.sampler.seen(())}


@pytest.fixture
def steady() -> Iterator[Sampled]:
    before_s = sys.getswitchinterval()
    training = Sampled()
    yield training
    training.sampler.close()
    training.clock.stop()
    sys.setswitchinterval(before_s)


def test_a_window_ends_and_the_switch_interval_is_as_before(steady: Sampled) -> None:
    before_s = sys.getswitchinterval()
    steady.sample(TRAINING_STEP)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    idle_s = steady.sample(CALLBACK, WINDOW_SAMPLES)
    assert idle_s > 0.1
    assert steady.seen() == {CALLBACK: WINDOW_SAMPLES - 1, TRAINING_STEP: 1}
    assert sys.getswitchinterval() == before_s


class Batch:
    """A local variable of a step."""


def test_a_sample_keeps_no_variables_of_the_program(steady: Sampled) -> None:
    def step() -> weakref.ref[Batch]:
        batch = Batch()
        sampling = threading.Thread(target=steady.sampler._sample)
        sampling.start()
        sampling.join()
        return weakref.ref(batch)

    gc.disable()  # a collection would free what a cycle keeps
    try:
        with steady.clock.booked(TRAINING_STEP):
            batches = [step() for _ in range(3)]
        assert [batch() for batch in batches] == [None] * 3
    finally:
        gc.enable()
    assert steady.seen()
