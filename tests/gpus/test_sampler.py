"""The sampling thread over the real nvidia-ml-py over the fake driver. Nothing here sleeps: `whole(wait_s=...)` has the
thread poll and waits for it, and the driver's clock stands still until it is advanced."""

import contextlib
import threading
import time

import pytest
from fake_driver import GIB, gpu

from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.gpus import watch as watch_module
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.watch import GpuWatch

TIMEOUT_S = 30.0


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "background" in thread.name]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert sampling_threads() == []


@pytest.fixture
def clock(driver, monkeypatch):
    """A driver whose clock stands still and is that of this process, too; polls come only when they are asked for."""
    driver.freeze()
    monkeypatch.setattr(time, "time", lambda: driver.now_s)
    monkeypatch.setattr(watch_module, "_MAX_INTERVAL_S", 3600.0)
    return driver


def watching(driver, trained_on=None, **options):
    """Watch all GPUs, of which the first ``trained_on`` train the model (by default all)."""
    gpus = [GpuReading(index=index, uuid=card.uuid) for index, card in enumerate(driver.gpus)]
    options = {"trained_on": gpus[:trained_on], "interval_s": 3600.0, "node": 0, **options}
    return contextlib.closing(GpuWatch(gpus, lambda: None, **options))


def poll_and_take(reader):
    reader.whole(wait_s=TIMEOUT_S)
    return reader.take()


def test_a_window_holds_what_happened_between_two_calls(clock):
    clock.gpus = [gpu(utilization=[(0, 20), (102, 80)], power_watts=200, memory_free="60GiB", sample_period_s=0.25)]
    uuid = clock.gpus[0].uuid
    with watching(clock) as reader:
        poll_and_take(reader)
        clock.advance(4)
        window = poll_and_take(reader)[uuid]
        clock.advance(1)
        reader.whole(wait_s=TIMEOUT_S)
    after, whole = poll_and_take(reader)[uuid], reader.whole()[uuid]  # also when it is closed
    assert window.utilization_percent_mean == pytest.approx(50, abs=4)
    assert (window.utilization_percent_p5, window.utilization_percent_p95) == (20, 80)
    assert window.utilization_observed_s == pytest.approx(4, abs=0.3)
    assert window.memory_used_bytes == 20 * GIB
    assert [one.energy_joules for one in (window, after, whole)] == pytest.approx([800, 200, 1000])
    assert window.problems == ()


def test_what_happened_in_validation_is_kept_apart(clock):
    clock.gpus = [gpu(utilization=[(0, 90), (102, 10), (105, 90)], power_watts=100, sample_period_s=0.1)]
    uuid = clock.gpus[0].uuid
    with watching(clock) as reader:
        poll_and_take(reader)
        clock.advance(2)
        reader.enter("validation")  # no poll at this moment, nor at the end of validation
        clock.advance(3)
        reader.enter("training")
        clock.advance(1)
        training = poll_and_take(reader)[uuid]
        validation = reader.take(phase="validation")[uuid]
    assert training.utilization_percent_mean == pytest.approx(90, abs=3)
    assert validation.utilization_percent_mean == pytest.approx(10, abs=3)
    observed = [one.utilization_observed_s for one in (training, validation)]
    assert observed == pytest.approx([3, 3], abs=0.2)
    assert (training.energy_joules, validation.energy_joules) == (pytest.approx(300), pytest.approx(300))


def test_an_unusable_answer_ends_sampling_of_one_gpu_only(clock):
    started_s = time.monotonic()
    clock.gpus = [gpu(utilization=90), gpu(utilization=10)]
    broken = clock.gpus[0].uuid
    with watching(clock) as watch:
        for _ in range(2):
            clock.advance(1)
            watch.whole(wait_s=TIMEOUT_S)
        clock.gpus[0].field_values = {"83": {"type": 99}}  # of a newer driver
        for _ in range(2):
            clock.advance(1)
            watch.whole(wait_s=TIMEOUT_S)
            metrics, problems = watch.take_metrics()
            assert watch.take_metrics() == ({}, [])  # once for each poll: a Trainer may ask a thousand times a second
            assert metrics["gpu/1/utilization_percent/mean"] == pytest.approx(10)
            error = "IndexError('tuple index out of range')"
            assert problems == [f"{broken} is no longer measured after an unexpected error: {error}."]
    assert time.monotonic() - started_s < TIMEOUT_S  # nobody waits for a thread that has ended


def test_a_hanging_gpu_is_named_and_delays_no_other(clock, monkeypatch):
    monkeypatch.setattr(limits, "LIMIT_S", 1.0)
    clock.gpus = [gpu(memory_free="60GiB", utilization=90), gpu(utilization=10)]
    hanging = clock.gpus[0].uuid
    taken = []

    def take(watch, troubles):
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s:
            watch.whole(wait_s=TIMEOUT_S)
            taken[:] = watch.take_metrics()
            if taken[1] == troubles:
                return taken[0]
            time.sleep(0.01)  # nobody waits for a GPU that hangs, and its thread has to notice that it answers again
        raise AssertionError(taken)

    problem = f"The driver has not answered for {hanging} within 1 s"
    with watching(clock) as watch:
        take(watch, [])
        clock.advance(1)
        take(watch, [])
        clock.gpus[0].hangs, clock.gpus[1].memory_free = "nvmlDeviceGetPowerUsage", 0
        metrics = take(watch, [f"{problem}. This GPU is not measured until it answers. Check `dmesg`."])
        assert metrics["gpu/1/memory_used_bytes"] == 80 * GIB
        clock.gpus[0].hangs, clock.gpus[0].memory_free = None, 0
        take(watch, [])
        assert watch.whole(wait_s=TIMEOUT_S)[hanging].memory_used_bytes == 80 * GIB


def test_a_driver_that_hangs_at_the_start_holds_no_training_up(driver, monkeypatch):
    monkeypatch.setattr(limits, "LIMIT_S", 0.05)
    monkeypatch.setattr(limits, "OPENING_LIMIT_S", 0.2)
    driver.gpus = [gpu()]
    driver.hangs = "nvmlInitWithFlags"
    reader = watching(driver).thing
    threads = sampling_threads()
    assert threads
    driver.hangs = None
    reader.close()
    for thread in threads:
        thread.join(TIMEOUT_S)


def test_a_forked_child_is_not_held_up_and_can_sample(driver, run_python):
    driver.gpus = [gpu(memory_free="21GiB")]
    code = """
import os, threading
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.gpus.watch import GpuWatch
gpus = nvml.read_gpus()
uuid, options = gpus[0].uuid, {"trained_on": gpus, "node": 0}
reader = GpuWatch(gpus, lambda: None, interval_s=0.001, **options)
reader.whole(wait_s=30)
for _ in range(20):  # sometimes while the thread holds its lock
    if (child := os.fork()) == 0:
        assert reader.whole(wait_s=30) == {} and reader.summaries(at_end=True) == ()
        reader.enter("validation")
        reader.close()
        own = GpuWatch(gpus, lambda: None, interval_s=3600, **options)
        window = own.whole(wait_s=30)[uuid]
        own.close()
        assert window.memory_used_bytes == 59 * 2**30 and window.problems == (), window
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert reader.whole(wait_s=30)[uuid].problems == ()
reader.close()
print(threading.active_count())
"""
    result = run_python("-W", "ignore", "-c", code)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
