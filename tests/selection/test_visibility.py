"""CUDA's rules for CUDA_VISIBLE_DEVICES; the table is what PyTorch's parser does with four GPUs."""

import pytest

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.selection.cuda import shown_uuid, visible_gpus

NAMES = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444")
FOUR = [GpuReading(index=index, uuid=uuid, name="A100") for index, uuid in enumerate(NAMES)]
# The first is divided into two instances, and the third into one.
DIVIDED = [
    GpuReading(
        index=index,
        uuid=uuid,
        name="A100",
        mig_mode=bool(parts),
        mig_instances=tuple(GpuReading(index=index, uuid=f"MIG-{part}") for part in parts),
    )
    for index, (uuid, parts) in enumerate([("GPU-aaaa", ("1111", "2222")), ("GPU-whole", ()), ("GPU-bbbb", ("3333",))])
]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        pytest.param(None, [0, 1, 2, 3], id="unset"),
        pytest.param("", [], id="empty"),
        pytest.param("0,2,-1,1", [0, 2], id="negative-truncates"),
        pytest.param("0,0", [], id="duplicate"),
        pytest.param("1gpu2,2ampere", [1, 2], id="text-after-numbers"),
        pytest.param("GPU-b", [2], id="unique-prefix"),
        pytest.param("GPU-b,GPU-aaaa,GPU-c", [2], id="ambiguous-prefix-truncates"),
        pytest.param("GPU-b, GPU-c", [2], id="blank-before-uuid-truncates"),
        pytest.param("0,GPU-b", [0], id="uuid-after-number-truncates"),
        pytest.param("GPU-zzzz", [], id="unknown-uuid"),
    ],
)
def test_a_list_shows_what_cuda_shows(value: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(FOUR, value, None)] == indices


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ["MIG-1111", "MIG-2222", "GPU-whole", "MIG-3333"]),
        ("0", ["MIG-1111", "MIG-2222"]),
        ("MIG-2", ["MIG-2222"]),
    ],
)
def test_mig_instances_are_found_by_every_form_of_their_name(value: str | None, uuids: list[str]) -> None:
    assert [gpu.uuid for gpu in visible_gpus(DIVIDED, value, None)] == uuids


@pytest.mark.parametrize(
    ("mask", "cuda_uuid", "uuid"),
    [
        (None, "2222", "MIG-2222"),  # CUDA's UUID is that of the instance ...
        (None, "aaaa", "MIG-1111"),  # ... or in older versions that of its GPU, of which CUDA shows the first instance
        ("MIG-2", "aaaa", "MIG-2222"),
        ("MIG-9999", "cccc", "MIG-9999"),  # the driver lists neither
    ],
)
def test_the_instance_that_cuda_shows_is_known_by_the_drivers_uuid(mask: str | None, cuda_uuid: str, uuid: str) -> None:
    assert shown_uuid(DIVIDED, mask, cuda_uuid) == uuid
