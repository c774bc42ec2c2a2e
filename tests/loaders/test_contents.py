"""Contents of a dataset, and whether they have changed; and of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gpu_tools.loaders.settings import batch_shape

IMAGES = [torch.zeros(3, 80, 60), torch.zeros(3, 50, 90)]
SEQUENCES = torch.zeros(3, 10, 8)


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((torch.zeros(16, 3, 8, 8), torch.zeros(16)), (16, 3, 8, 8)),
        (([*IMAGES, IMAGES[0]], [{}, {}, {}]), (3, 3, 80, 90)),  # as torchvision's models for detection get them
        ({"images": tuple(IMAGES), "boxes": []}, (2, 3, 80, 90)),
        ((SEQUENCES, SEQUENCES), (3, 10, 8)),  # two arguments with a batch of 3
        ((3, torch.zeros(2)), None),
    ],
)
def test_a_list_of_images_is_as_large_as_it_is_long(batch: Any, shape: tuple[int, ...] | None) -> None:
    assert batch_shape(batch) == shape
