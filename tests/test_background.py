"""A thread that does small jobs next to a training: the times of its calls, and the errors in them."""

import math
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from trainings import background_threads

from lightning_gpu_tools import background
from lightning_gpu_tools.background import BackgroundJobs

HOUR_S = 3600.0


@pytest.fixture
def jobs() -> Iterator[BackgroundJobs]:
    made = BackgroundJobs()
    yield made
    made.close()
    assert background_threads() == []


class Job:
    """Counts its calls, and lets a test wait for them."""

    def __init__(self, again_s: float, error: Exception | None = None) -> None:
        self.calls = threading.Semaphore(0)
        self.again_s, self.error = again_s, error

    def __call__(self) -> float:
        self.calls.release()
        if self.error is not None:
            raise self.error
        return self.again_s

    def was_called(self, timeout_s: float = 20.0) -> bool:
        return self.calls.acquire(timeout=timeout_s)


def test_each_job_says_when_it_is_called_again(jobs: BackgroundJobs) -> None:
    once, often, seldom = Job(math.inf), Job(0.001), Job(HOUR_S)
    for job in (once, often, seldom):
        jobs.add("It", job)
    assert all(often.was_called() for _ in range(5))
    assert once.was_called()
    assert seldom.was_called()
    assert not seldom.was_called(0.0)
    jobs.run_now()
    assert seldom.was_called()
    assert not once.was_called(0.0)


def test_an_error_is_kept_once_and_the_job_tried_again(jobs: BackgroundJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETRY_S", 0.001)
    failing, sound = Job(0.0, OSError(28, "No space left on device")), Job(0.001)
    jobs.add("Writing", failing)
    jobs.add("Sampling", sound)
    for job in (failing, sound):
        assert all(job.was_called() for _ in range(3))
    assert jobs.faults == ["Writing failed: OSError: [Errno 28] No space left on device."]


def test_a_job_that_hangs_does_not_hold_up_the_end() -> None:
    runs, go_on = threading.Event(), threading.Event()
    jobs = BackgroundJobs()
    jobs.add("It", lambda: runs.set() or go_on.wait(60) or HOUR_S)  # type: ignore[func-returns-value]
    assert runs.wait(20)
    jobs.close(timeout_s=0.05)
    (thread,) = background_threads()
    go_on.set()
    thread.join(20)
    assert background_threads() == []


def test_neither_forks_nor_the_interpreters_end_wait_for_it(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    code = (
        "import os\n"
        "from lightning_gpu_tools.background import BackgroundJobs\n"
        "jobs = BackgroundJobs()\n"
        "jobs.add('It', lambda: sum(range(10_000)) * 0.0)\n"  # runs all the time
        "for _ in range(50):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "print('forked')\n"
    )
    ended = run_python("-c", code, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "forked\n"), ended.stderr
