"""Loaders inside of what a loop iterates, or what a Trainer gets; and the shape of a batch."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from trainings import Samples

from lightning_gpu_tools.loaders.held import loaders_in
from lightning_gpu_tools.loaders.settings import batch_shape, settings_of


def quiet(loader: Iterable[Any]) -> "tqdm[Any]":
    return tqdm(loader, disable=True)


class Prefetcher:
    """A loader of the program's own around another one, as many projects have."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.queue = loader, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda loader: loader,
    "tqdm": quiet,
    "class": Prefetcher,
    "tqdm of a class": lambda loader: quiet(Prefetcher(loader)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_loader_is_found_in_a_wrapper_with_its_settings(wrapper: str) -> None:
    loader = DataLoader(Samples(12), batch_size=3, drop_last=True, num_workers=1, persistent_workers=True)
    (found,) = loaders_in(WRAPPERS[wrapper](loader))
    assert isinstance(found.loader, DataLoader)
    assert asdict(settings_of(found.loader)) == asdict(settings_of(loader))
    assert found.loader.dataset is loader.dataset
    assert found.loader.drop_last
    assert found.name == ""
    assert bool(found.within) == (wrapper != "itself")


def test_several_loaders_have_names() -> None:
    one, other = DataLoader(Samples(3)), DataLoader(Samples(4))
    keyed = loaders_in({"real": one, "noise": [other, [1, 2]]})
    assert [(found.name, found.loader) for found in keyed] == [('"real"', one), ('"noise"', other), ('"noise"', [1, 2])]
    assert [found.name for found in loaders_in([one, other])] == ["number 1", "number 2"]


IMAGES = [torch.zeros(3, 80, 60), torch.zeros(3, 50, 90)]


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((torch.zeros(16, 3, 8, 8), torch.zeros(16)), (16, 3, 8, 8)),
        (([*IMAGES, IMAGES[0]], [{}, {}, {}]), (3, 3, 80, 90)),  # as torchvision's models for detection get them
        ((3, torch.zeros(2)), None),
    ],
)
def test_a_list_of_images_is_as_large_as_it_is_long(batch: Any, shape: tuple[int, ...] | None) -> None:
    assert batch_shape(batch) == shape
