"""Contents of a dataset: whether workers can have copies of them, and whether they have changed; and of a batch."""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any

import pytest
import torch

from lightning_gpu_tools.loaders.settings import batch_shape, fingerprint


class Index:
    """An object that leaves out a cache, like pandas, whose parts cannot be pickled."""

    class Engine:
        def __reduce__(self) -> Any:
            raise TypeError("no default __reduce__ due to non-trivial __cinit__")

    def __init__(self) -> None:
        self.labels = ["a", "b"]
        self.cache: dict[str, Any] = {"pattern": re.compile("a+")}

    def __getstate__(self) -> dict[str, Any]:
        return {"labels": self.labels}

    def look_up(self) -> None:
        self.cache.update(engine=self.Engine(), owner=weakref.ref(self))


def test_a_cache_that_a_class_leaves_out_counts_for_nothing() -> None:
    index = Index()
    before = fingerprint([index])
    index.look_up()
    assert fingerprint([index]) == before
    index.labels.append("c")
    assert fingerprint([index]) != before
    index.cache["lock"] = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        fingerprint([index])


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
