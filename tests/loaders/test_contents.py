"""Contents of a dataset: whether workers can have copies of them, and whether they have changed; and of a batch."""

from __future__ import annotations

import random
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpu_tools.loaders.settings import batch_shape, fingerprint


class Holding:
    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Reopening(Holding):
    """A holder that can be pickled, because it leaves out what a forked process would get."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


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


class Own(torch.utils.data.Dataset[int]):
    """A class that only this module knows, with attributes of all kinds."""

    def __init__(self) -> None:
        class Local:
            values: tuple[int, ...] = (1, 2)

        self.local, self.function, self.method = Local(), lambda item: item, self.__len__
        self.tensor, self.array, self.names = torch.rand(10_000), np.zeros((50, 50)), {"a": ["b"]}
        self.itself = self

    def __len__(self) -> int:
        return 3


def test_what_can_be_forked_need_not_be_pickled() -> None:
    own = Own()
    assert fingerprint(own) == fingerprint(own)


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


@pytest.mark.parametrize("kind", [Holding, Reopening])
@pytest.mark.parametrize("thing", [threading.Lock(), (i for i in range(3))], ids=lambda thing: type(thing).__name__)
def test_what_workers_could_not_have_is_found(kind: type[Holding], thing: Any) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        fingerprint([{"deep": kind(thing)}])


@pytest.mark.parametrize("kind", [Holding, Reopening])
def test_an_open_file_is_found(kind: type[Holding]) -> None:
    with Path(__file__).open() as file, pytest.raises(TypeError, match="an open file"):
        fingerprint(kind(file))


@pytest.mark.parametrize(
    "change",
    [
        lambda own: own.tensor.fill_(2.0),
        lambda own: own.names["a"].append("c"),
        lambda own: setattr(own.local, "values", (1, 3)),
        lambda own: own.array.fill(1.0),
    ],
)
def test_a_change_anywhere_changes_the_fingerprint(change: Any) -> None:
    own = Own()
    before = fingerprint(own)
    change(own)
    assert fingerprint(own) != before


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda own: torch.rand(1, generator=own)),
        (np.random.default_rng(1), lambda own: own.random()),
        (random.Random(1), lambda own: own.random()),
    ],
)
def test_drawing_from_a_generator_of_its_own_is_a_change(generator: Any, draw: Any) -> None:
    before = fingerprint(Holding(generator))
    draw(generator)
    assert fingerprint(Holding(generator)) != before


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
