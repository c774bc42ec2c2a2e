"""The sampling thread over the real nvidia-ml-py over the fake driver. Nothing here sleeps: `take(wait_s=...)` has the
thread look and waits for it, and the driver's clock stands still until it is advanced."""

from __future__ import annotations

import functools
import pickle
import threading
import time

import pytest
from fake_driver import GIB, gpu, mig

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.gpus import sampler
from lightning_gpu_tools.gpus.nvml import probe
from lightning_gpu_tools.gpus.readings import GpuProcess, UtilizationSample
from lightning_gpu_tools.gpus.sampler import Reader, Sampler, subscribe
from lightning_gpu_tools.gpus.samples import GpuSample

PATIENCE_S = 30.0
NEVER_S = 3600.0  # longer than the test: the thread looks when it is told


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "sampler" in thread.name]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert sampling_threads() == []


@pytest.fixture
def clock(driver, monkeypatch):
    """The driver's clock, which stands still, is also that of the probes."""
    with driver.change():
        driver.now_s = time.time()
        driver.start_s = driver.now_s - 100
    monkeypatch.setattr(probe, "GpuProbe", functools.partial(probe.GpuProbe, clock=lambda: driver.now_s))
    return driver


def test_a_window_holds_what_happened_between_two_calls(clock):
    clock.gpus = [gpu(utilization=[(0, 20), (102, 80)], power_watts=200, memory_free="60GiB", sample_period_s=0.25)]
    uuid = clock.gpus[0].uuid
    with subscribe([uuid], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        clock.advance(4)
        window = reader.take(wait_s=PATIENCE_S)[uuid]
    assert window.utilization_mean_percent == pytest.approx(50, abs=4)
    assert window.utilization_p5_percent == 20
    assert window.utilization_p95_percent == 80
    assert window.utilization_observed_s == pytest.approx(4, abs=0.3)
    assert window.duration_s == pytest.approx(4)
    assert window.energy_joules == pytest.approx(800)
    assert window.memory_used_bytes == 20 * GIB
    assert window.problems == ()
    assert reader.failure is None


def test_windows_of_a_run_add_up_to_the_run(clock):
    clock.gpus = [gpu(utilization=[(0, 0), (101, 100), (104, 0)], power_watts=100)]
    uuid = clock.gpus[0].uuid
    windows = []
    with subscribe([uuid], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        for _ in range(10):
            clock.advance(0.7)
            windows.append(reader.take(wait_s=PATIENCE_S)[uuid])
    busy_s = sum((one.utilization_mean_percent or 0) / 100 * one.utilization_observed_s for one in windows)
    assert busy_s == pytest.approx(3, abs=0.01)
    assert sum(one.energy_joules for one in windows) == pytest.approx(700)


def test_every_reader_gets_everything_from_one_thread(clock):
    clock.gpus = [gpu(power_watts=100), gpu(power_watts=200)]
    a, b = (card.uuid for card in clock.gpus)
    with subscribe([a], interval_s=NEVER_S) as first, subscribe([a, b], interval_s=NEVER_S) as second:
        assert len(sampling_threads()) == 1
        first.take(wait_s=PATIENCE_S)
        second.take()
        clock.advance(5)
        assert second.take(wait_s=PATIENCE_S)[b].energy_joules == pytest.approx(1000)
        clock.advance(5)
        assert second.take(wait_s=PATIENCE_S)[a].energy_joules == pytest.approx(500)
        assert set(first.take()) == {a}
        first.close()
        first.close()
        assert len(sampling_threads()) == 1  # the other one still reads
    assert sampling_threads() == []
    functions = [call.function for call in clock.calls()]
    assert functions.count("nvmlInitWithFlags") == functions.count("nvmlShutdown") == 2  # one probe a GPU


def test_nothing_is_left_open_and_one_can_begin_again(clock):
    clock.gpus = [gpu(gpm={2: 10})]
    for _ in range(2):
        clock.forget_calls()
        with subscribe([clock.gpus[0].uuid], interval_s=NEVER_S) as reader:
            reader.take(wait_s=PATIENCE_S)
            assert len(sampling_threads()) == 1
        functions = [call.function for call in clock.calls()]
        assert functions.count("nvmlInitWithFlags") == functions.count("nvmlShutdown") > 0
        assert functions.count("nvmlGpmSampleAlloc") == functions.count("nvmlGpmSampleFree") == 2


def test_the_thread_looks_by_itself(driver):
    driver.gpus = [gpu(utilization=40)]
    with subscribe([driver.gpus[0].uuid], interval_s=0.01) as reader:
        assert reader._sampler.poll_now(PATIENCE_S)
        looks, deadline_s = reader._sampler._polls_done, time.monotonic() + PATIENCE_S
        with reader._sampler._changed:
            assert reader._sampler._changed.wait_for(
                lambda: reader._sampler._polls_done >= looks + 3, deadline_s - time.monotonic()
            )


class RecordingProbe:
    """Remembers which threads have read it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.was_read = threading.Event()

    def read(self) -> GpuSample:
        self.threads.append(threading.current_thread())
        self.was_read.set()
        return GpuSample(uuid="GPU-a", time_s=float(len(self.threads)))

    def close(self) -> None:
        pass


def test_only_the_thread_asks_the_driver():
    probe = RecordingProbe()
    with Sampler(open_probe=lambda uuid, gpm: probe).subscribe(["GPU-a"], NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        reader.take()
        reader.timelines("GPU-a")
    assert probe.threads
    assert threading.current_thread() not in probe.threads


def test_the_driver_hears_from_the_thread_only(clock):
    clock.gpus = [gpu(gpm={2: 10}, processes=[])]
    readings = sampler.read_gpus()
    with subscribe([readings[0].uuid], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        reader.enter("validation")
        clock.advance(1)
        reader.take(wait_s=PATIENCE_S)
    assert {call.thread for call in clock.calls()} == {"lightning-gpu-tools-sampler"}


def test_what_happened_in_validation_is_kept_apart(clock, monkeypatch):
    monkeypatch.setattr(sampler.time, "time", lambda: clock.now_s)  # the clock of the phases is the driver's
    clock.gpus = [gpu(utilization=[(0, 90), (102, 10), (105, 90)], power_watts=100, sample_period_s=0.1)]
    uuid = clock.gpus[0].uuid
    with subscribe([uuid], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        clock.advance(2)
        reader.enter("validation")  # no look at this moment, nor at the end of validation
        clock.advance(3)
        reader.enter("training")
        clock.advance(1)
        training = reader.take(wait_s=PATIENCE_S)[uuid]
        validation = reader.take(phase="validation")[uuid]
    assert training.utilization_mean_percent == pytest.approx(90, abs=3)
    assert validation.utilization_mean_percent == pytest.approx(10, abs=3)
    assert (training.duration_s, validation.duration_s) == (pytest.approx(3), pytest.approx(3))
    assert (training.energy_joules, validation.energy_joules) == (pytest.approx(300), pytest.approx(300))


def test_gpm_is_left_alone_as_long_as_one_reader_wants_that(clock):
    clock.gpus = [gpu(gpm={2: 50})]
    uuid = clock.gpus[0].uuid

    def sm_active_percent(reader):
        for _ in range(2):
            clock.advance(1)
            window = reader.take(wait_s=PATIENCE_S)[uuid]
        return window.sm_active_percent

    with subscribe([uuid], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        assert sm_active_percent(reader) == 50
        with subscribe([uuid], interval_s=NEVER_S, gpm=False) as other:
            other.take(wait_s=PATIENCE_S)
            clock.forget_calls()
            assert sm_active_percent(reader) is None
            assert not any("Gpm" in call.function for call in clock.calls())
        assert sm_active_percent(reader) == 50
    functions = [call.function for call in clock.calls()]
    assert functions.count("nvmlInitWithFlags") == functions.count("nvmlShutdown") - 1  # one was before


def test_the_latest_utilization_can_be_asked_for_at_any_time(clock):
    clock.gpus = [gpu(utilization=80), gpu(utilization=20)]
    with subscribe([card.uuid for card in clock.gpus], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        assert reader.latest_percent is None
        clock.advance(1)
        reader.take(wait_s=PATIENCE_S)
        assert reader.latest_percent == 50


def test_a_week_takes_the_memory_of_a_minute(clock):
    reader = Reader(Sampler(), ["GPU-a"], 1.0, True)
    seconds = 7 * 24 * 3600

    def kept() -> int:
        return len(pickle.dumps((reader._recent, reader._whole, reader._timelines, reader._phases._since)))

    def add(second: int) -> None:
        times = [second + sixth / 6 for sixth in range(1, 7)]
        reader._add(
            GpuSample(
                uuid="GPU-a",
                time_s=float(second + 1),
                utilization=tuple(UtilizationSample(time_s=t, percent=float(second % 101)) for t in times),
                memory_used_bytes=second,
                power_watts=float(second % 700),
                energy_joules=100.0 * second,
                processes=(GpuProcess(pid=second, utilization_percent=50.0),),
                errors=(f"Xid {second}",),
                problems=(f"problem {second}",),
            )
        )

    for second in range(0, seconds, 60):  # one sample a minute is enough of them; what is added is the same
        if second % 3600 == 0:
            reader._phases.enter("validation" if second % 7200 else "training", float(second))
        add(second)
        if second == 24 * 3600:
            after_a_day = kept()
    assert kept() < 1.2 * after_a_day < 2e6
    assert max(len(points) for points in reader.timelines("GPU-a").values()) <= 2000
    assert reader.take()["GPU-a"].energy_joules == pytest.approx(100 * seconds / 2, rel=0.02)


def test_the_first_look_is_at_once():
    probe = RecordingProbe()
    with Sampler(open_probe=lambda uuid, gpm: probe).subscribe(["GPU-a"], NEVER_S):
        assert probe.was_read.wait(5.0)  # half the time until the thread looks by itself


def test_what_was_collected_can_be_taken_after_closing(clock):
    clock.gpus = [gpu(power_watts=100)]
    uuid = clock.gpus[0].uuid
    with subscribe([uuid], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        clock.advance(1)
        assert reader._sampler.poll_now(PATIENCE_S)
    assert reader.take(wait_s=PATIENCE_S)[uuid].energy_joules == pytest.approx(100)
    assert reader.timelines(uuid)["power_watts"]


def test_a_timeline_covers_the_run(clock):
    clock.gpus = [gpu(utilization=[(0, 0), (103, 100)], power_watts=None)]
    uuid = clock.gpus[0].uuid
    with subscribe([uuid], interval_s=1.0) as reader:
        for _ in range(7):
            reader.take(wait_s=PATIENCE_S)
            clock.advance(1)
        timelines = reader.timelines(uuid)
    percents = [value for _, value in timelines["utilization_percent"]]
    assert percents[0] == 0
    assert percents[-1] == 100
    assert "power_watts" not in timelines  # what the GPU does not report
    times = [time_s for time_s, _ in timelines["memory_used_bytes"]]
    assert times == sorted(times)
    assert times[-1] - times[0] == pytest.approx(6)


def test_a_gpu_that_is_lost_and_back_is_a_problem_of_that_gpu_only(clock):
    clock.gpus = [gpu(), gpu()]
    a, b = (card.uuid for card in clock.gpus)
    with subscribe([a, b], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        with clock.change():
            clock.gpus[0].lost = True
        clock.advance(1)
        windows = reader.take(wait_s=PATIENCE_S)
        assert windows[a].utilization_mean_percent is windows[a].memory_used_bytes is None
        assert "fallen off the bus" in windows[a].problems[0]
        assert windows[b].problems == ()
        assert windows[b].memory_used_bytes == 0
        clock.advance(1)
        assert reader.take(wait_s=PATIENCE_S)[a].problems == ()
        with clock.change():
            clock.gpus[0].lost = False
        clock.advance(1)
        assert reader.take(wait_s=PATIENCE_S)[a].memory_used_bytes == 0
    assert reader.failure is None


def test_mig_instances_can_be_read(clock):
    clock.gpus = [gpu(mig=[mig(gpm={1: 70, 2: 35})], gpm={})]
    uuid = clock.gpus[0].mig[0].uuid
    with subscribe([uuid], interval_s=NEVER_S) as reader:
        reader.take(wait_s=PATIENCE_S)
        clock.advance(1)
        window = reader.take(wait_s=PATIENCE_S)[uuid]
    assert (window.utilization_mean_percent, window.sm_active_percent) == (70, 35)


def test_without_a_driver_subscribing_says_so_and_leaves_nothing(driver):
    with driver.change():
        driver.init_error = "DRIVER_NOT_LOADED"
    with pytest.raises(NvmlUnavailableError, match="not loaded"):
        subscribe(["GPU-a"])
    with driver.change():
        driver.init_error = None
    driver.gpus = [gpu()]
    with subscribe([driver.gpus[0].uuid], interval_s=NEVER_S) as reader:
        assert reader.take(wait_s=PATIENCE_S)


@pytest.mark.parametrize("interval_s", [0, -1.0, float("nan")])
def test_an_interval_must_be_positive(driver, interval_s):
    driver.gpus = [gpu()]
    with pytest.raises(ValueError, match="interval_s must be positive, got"):
        subscribe([driver.gpus[0].uuid], interval_s=interval_s)


class BrokenProbe:
    """A probe with a programming error in it."""

    def read(self) -> GpuSample:
        raise ZeroDivisionError("a bug")

    def close(self) -> None:
        pass


def test_a_bug_in_the_thread_reaches_the_reader_and_stops_nothing(driver):
    broken = Sampler(open_probe=lambda uuid, gpm: BrokenProbe())
    with broken.subscribe(["GPU-a"]) as reader:
        window = reader.take(wait_s=PATIENCE_S)["GPU-a"]
        assert isinstance(reader.failure, ZeroDivisionError)
        assert window.duration_s == 0
        assert not broken.running


def test_a_new_reader_does_not_get_a_thread_that_has_failed(driver, monkeypatch):
    broken = Sampler(open_probe=lambda uuid, gpm: BrokenProbe())
    monkeypatch.setattr(sampler, "_shared", broken)
    driver.gpus = [gpu()]
    with broken.subscribe(["GPU-a"]) as old:
        old.take(wait_s=PATIENCE_S)
        with subscribe([driver.gpus[0].uuid], interval_s=NEVER_S) as reader:
            reader.take(wait_s=PATIENCE_S)
            assert reader.failure is None


def test_a_driver_that_hangs_holds_up_nobody_for_long(driver, monkeypatch):
    monkeypatch.setattr(sampler, "_TIMEOUT_S", 0.05)
    release = threading.Event()

    class HangingProbe:
        def read(self) -> GpuSample:
            release.wait(PATIENCE_S)
            return GpuSample(uuid="GPU-a", time_s=1.0)

        def close(self) -> None:
            pass

    hanging = Sampler(open_probe=lambda uuid, gpm: HangingProbe())
    reader = hanging.subscribe(["GPU-a"], NEVER_S)
    assert reader.take(wait_s=0.05)["GPU-a"].duration_s == 0
    (thread,) = sampling_threads()
    reader.close()
    release.set()
    thread.join(PATIENCE_S)


def test_a_forked_child_is_not_held_up_and_can_begin_anew(driver, run_python):
    driver.gpus = [gpu(memory_free="21GiB")]
    code = """
import os, threading
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus import sampler
uuid = nvml.read_gpus()[0].uuid
reader = sampler.subscribe([uuid], interval_s=0.001)
reader.take(wait_s=30)
for _ in range(20):  # sometimes while the thread holds its lock
    if (child := os.fork()) == 0:
        assert reader.take(wait_s=30) == {} == reader.timelines(uuid)
        reader.close()
        with sampler.subscribe([uuid], interval_s=3600) as own:
            window = own.take(wait_s=30)[uuid]
            assert window.memory_used_bytes == 59 * 2**30 and window.problems == (), window
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert reader.take(wait_s=30)[uuid].problems == ()
reader.close()
print(threading.active_count())
"""
    result = run_python("-W", "ignore", "-c", code)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr


def test_a_program_that_forgets_to_close_still_ends(driver, run_python):
    driver.gpus = [gpu()]
    start = f"sampler.subscribe([{driver.gpus[0].uuid!r}], interval_s=0.01)"
    code = f"from lightning_gpu_tools.gpus import sampler; {start}"
    result = run_python("-c", code, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_importing_starts_and_loads_nothing(run_python):
    code = "import sys, lightning_gpu_tools.gpus.sampler\nassert not {'pynvml', 'torch'} & set(sys.modules)"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
