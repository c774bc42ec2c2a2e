"""Contents of a dataset: whether workers can have copies of them, and whether they have changed; and of a batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpu_tools.loaders.settings import batch_shape, fingerprint


class Index:
    """An object that leaves out a cache when it is pickled."""

    def __init__(self) -> None:
        self.labels = ["a", "b"]
        self.cache: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"labels": self.labels}


def test_what_a_class_leaves_out_must_be_possible_to_copy() -> None:
    index = Index()
    before = fingerprint([index])
    assert fingerprint([index]) == before
    index.labels.append("c")
    assert fingerprint([index]) != before
    index.cache["lock"] = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        fingerprint([index])


def test_one_element_of_a_small_tensor_or_array_counts() -> None:
    held = [torch.zeros(2000, dtype=torch.bfloat16), np.zeros(2000)]
    before = fingerprint(held)
    held[0][1777] = 1
    between = fingerprint(held)
    held[1][1777] = 1
    assert len({before, between, fingerprint(held)}) == 3


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
