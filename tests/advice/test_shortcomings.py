"""Shortages that would end a training later, on synthetic data."""

import pytest

from lightning_gpu_tools.advice.shortcomings import Surroundings, shortcomings

GIB = 2**30
ENOUGH = {
    "folder": "/logs",
    "disk_free_bytes": 10 * GIB,
    "checkpoint_bytes": 5 * GIB,
    "prefetched_bytes": GIB,
    "shm_bytes": GIB,
    "workers": 4,
    "cores": 4.0,
}


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ({"why_not_writable": "permission denied"}, "cannot be written to /logs: permission denied. Choose"),
        ({"checkpoint_bytes": 6 * GIB}, "/logs has 10.0 GiB left, but two checkpoints need 12.0 GiB"),
        ({"shm_bytes": GIB // 16}, "prefetch up to 1.00 GiB of batches, but /dev/shm has only 64.0 MiB"),
        ({"cores": 3.5}, "4 DataLoader workers in total, but only 3.5 CPU cores"),
        ({"claims": (("0", "ada\x1b (PID 7)", 8 * GIB),)}, "ada\\x1b (PID 7) has claimed 8.00 GiB of the"),
        ({"claims": (("0", "ada (PID 7)", 0),)}, "has claimed all of the memory of GPU 0"),
    ],
)
def test_each_shortage_is_named_with_its_numbers(lacks: dict[str, object], words: str) -> None:
    (message,) = shortcomings(Surroundings(**{**ENOUGH, **lacks}))  # type: ignore[arg-type]
    assert words in message


def test_enough_and_unknown_resources_are_not_named() -> None:
    assert list(shortcomings(Surroundings(**ENOUGH))) == []  # type: ignore[arg-type]
    assert list(shortcomings(Surroundings(workers=64))) == []
