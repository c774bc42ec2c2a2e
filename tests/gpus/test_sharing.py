"""Division of a GPU's use between this job and others, including unknown values."""

from lightning_gpu_tools.gpus.metrics import GpuWindow, with_shares
from lightning_gpu_tools.gpus.readings import GpuProcess

OURS = GpuProcess(pid=1, memory_used_bytes=5, utilization_percent=60.0)
MATE = GpuProcess(pid=2, memory_used_bytes=3, utilization_percent=10.0)
THEIRS = GpuProcess(pid=9, memory_used_bytes=7, utilization_percent=20.0)


def shares(processes: list[GpuProcess] | None, own_pids: set[int] | None) -> tuple[float | None, ...]:
    found = with_shares(GpuWindow(processes=None if processes is None else tuple(processes)), own_pids)
    memory = found.own_memory_bytes, found.others_memory_bytes
    return *memory, found.own_utilization_percent, found.others_utilization_percent


def test_each_side_is_added_up() -> None:
    assert shares([OURS, MATE, THEIRS], {1, 2}) == (8, 7, 70.0, 20.0)


def test_what_the_driver_does_not_tell_of_one_process_is_unknown_of_its_side_only() -> None:
    assert shares([OURS, THEIRS, GpuProcess(pid=8)], {1}) == (5, None, 60.0, None)


def test_without_numbers_that_are_ours_nothing_is_known() -> None:
    assert shares([OURS, THEIRS], None) == shares(None, {1}) == shares([], {1}) == (None,) * 4
