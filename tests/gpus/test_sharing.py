"""Division of a GPU's use between this job and others, including unknown values."""

from lightning_gpu_tools.gpus.readings import GpuProcess, Sharing, share_out

OURS = GpuProcess(pid=1, memory_used_bytes=5, utilization_percent=60.0)
MATE = GpuProcess(pid=2, memory_used_bytes=3, utilization_percent=10.0)
THEIRS = GpuProcess(pid=9, memory_used_bytes=7, utilization_percent=20.0)


def test_each_side_is_added_up() -> None:
    assert share_out([OURS, MATE, THEIRS], {1, 2}) == Sharing(
        own_memory_bytes=8,
        others_memory_bytes=7,
        own_utilization_percent=70.0,
        others_utilization_percent=20.0,
    )


def test_what_the_driver_does_not_tell_of_one_process_is_unknown_of_its_side_only() -> None:
    silent = GpuProcess(pid=8)
    sharing = share_out([OURS, THEIRS, silent], {1})
    assert sharing == Sharing(own_memory_bytes=5, own_utilization_percent=60.0)


def test_without_numbers_that_are_ours_nothing_is_known() -> None:
    assert share_out([OURS, THEIRS], None) == share_out(None, {1}) == share_out([], {1}) == Sharing()
