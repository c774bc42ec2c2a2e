"""Waiting for GPUs: until they are free or time is up, first come, first served, and nothing left behind."""

import os
import pwd
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fake_driver import Driver, gpu, process
from launched_jobs import waiting
from slurm_cluster import wait_for

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.errors import NotEnoughGpusError
from lightning_gpu_tools.selection import picking
from lightning_gpu_tools.selection.claims import open_ledger
from lightning_gpu_tools.types import GpuSelection

pytestmark = pytest.mark.usefixtures("claims_dir")


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "_POLL_AFTER_S", 0.1)
    monkeypatch.setattr(picking, "_POLL_JITTER_S", 0.0)


@pytest.fixture
def driver(driver: Driver) -> Driver:
    """A machine with one idle GPU, unless a test gives it others."""
    driver.gpus = [gpu()]
    return driver


def indices(selection: GpuSelection) -> list[int]:
    return [reading.index for reading in selection.gpus]


def test_waiting_ends_when_a_gpu_is_released(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    first = select_gpus(exclusive=True)
    timer = threading.Timer(0.3, first.release)
    timer.start()
    driver.forget_calls()
    assert indices(select_gpus(exclusive=True, wait=60)) == [0]
    timer.join()
    assert re.search(
        r"Waiting for up to (60|59\.\d) s\. Asked for 1 GPU, but 0 of 1 visible GPU can be used", caplog.text
    )
    assert f"claimed exclusively by {pwd.getpwuid(os.getuid()).pw_name} (pid {os.getpid()})" in caplog.text
    assert driver.stays_open()


def test_waiting_in_vain_gives_reasons_and_leaves_nothing(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [gpu(utilization=95)]
    with pytest.raises(NotEnoughGpusError, match=r"Waited 200 ms\. .*\n  GPU 0 .*95% busy, asked for at most 5%"):
        select_gpus(max_utilization=5, wait=0.2)
    assert [entry.name for entry in claims_dir.iterdir()] == []


def test_what_can_never_be_is_not_waited_for(driver: Driver) -> None:
    driver.gpus = [gpu(memory_total="80GiB")]
    with pytest.raises(NotEnoughGpusError, match="Waiting cannot help"):
        select_gpus(min_free="100GiB", wait="1h")


def test_waiters_are_served_in_the_order_they_came(driver: Driver, claims_dir: Path, tmp_path: Path) -> None:
    mine = select_gpus(exclusive=True)
    with (tmp_path / "served").open("w") as served, ExitStack() as jobs:
        for name in "abc":
            last = jobs.enter_context(waiting(claims_dir, name, stdout=served))
        mine.release()
        last.wait(60)
    assert (tmp_path / "served").read_text().split() == ["a", "b", "c"]


@contextmanager
def others_ahead(driver: Driver, claims_dir: Path, count: int) -> Iterator[None]:
    """Other jobs in the queue for the first GPU, all in this process."""
    with open_ledger(str(claims_dir)) as ledger:
        places = [ledger.queue([str(driver.gpus[0].uuid)], 1) for _ in range(count)]
    yield
    for place in places:
        place.release()


def polls(driver: Driver) -> int:
    return [call.function for call in driver.calls()].count("nvmlDeviceGetCount_v2")


def test_a_job_far_back_polls_rarely_until_its_turn(driver: Driver, claims_dir: Path) -> None:
    mine = select_gpus(exclusive=True)
    counts = []
    for count in (0, 150):
        driver.forget_calls()
        with others_ahead(driver, claims_dir, count), pytest.raises(NotEnoughGpusError):
            select_gpus(exclusive=True, wait=0.8)
        counts.append(polls(driver))
    assert counts[1] == 2 < counts[0]  # at the beginning and at the end
    with ExitStack() as ended:
        with others_ahead(driver, claims_dir, 500):
            job = ended.enter_context(waiting(claims_dir))
        mine.release()
        assert job.communicate(timeout=30)[0] == "served\n"  # at the pace of the 501st it would be 50 s


def test_a_removed_place_in_the_queue_is_taken_again(driver: Driver, claims_dir: Path) -> None:
    mine = select_gpus(exclusive=True)
    with waiting(claims_dir) as first:
        with open_ledger(str(claims_dir)):
            for file in claims_dir.glob("wait-*"):
                file.unlink()
        wait_for(lambda: list(claims_dir.glob("wait-*.json")))
        with waiting(claims_dir, "b") as second:
            second.send_signal(signal.SIGSTOP)
            mine.release()
            assert first.communicate(timeout=60)[0] == "served\n"


def test_nobody_gets_past_one_who_has_waited_longer(driver: Driver, claims_dir: Path) -> None:
    mine = select_gpus(exclusive=True)
    with waiting(claims_dir) as job:
        with open_ledger(str(claims_dir)):  # so that it is not stopped while it has the ledger
            job.send_signal(signal.SIGSTOP)
        mine.release()
        with pytest.raises(NotEnoughGpusError, match=rf"reserved for .* \(pid {job.pid}\), who has waited longer"):
            select_gpus(wait=0.1)
        assert indices(select_gpus(min_free="1GiB", claim=False)) == [0]  # who does not wait is not in the queue
        job.send_signal(signal.SIGCONT)
        assert job.communicate()[0] == "served\n"


def test_a_small_request_passes_a_waiting_larger_one(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [gpu(memory_free=f"{gib}GiB", processes=[process(4711)]) for gib in (20, 40, 30)]
    with waiting(claims_dir):
        assert indices(select_gpus(2, min_free="5GiB", wait=60)) == [2, 0]  # the best one is kept


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_a_waiter_that_ends_holds_nobody_up(driver: Driver, claims_dir: Path, ended_by: signal.Signals) -> None:
    mine = select_gpus(exclusive=True)
    with waiting(claims_dir) as job:
        job.send_signal(ended_by)
        assert ("KeyboardInterrupt" in job.communicate()[1]) is (ended_by is signal.SIGINT)
    assert bool(list(claims_dir.glob("wait-*.json"))) is (ended_by is signal.SIGKILL)
    mine.release()
    assert indices(select_gpus(exclusive=True, wait=30)) == [0]
