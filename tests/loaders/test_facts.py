"""Facts about real loaders: what their datasets hold open, whether streams split by worker, and what is inside."""

import io
import itertools
import mmap
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from tqdm import tqdm
from trainings import Samples

from lightning_gpu_tools.advice.workers import why_not_searched
from lightning_gpu_tools.loaders.facts import read_loader_facts
from lightning_gpu_tools.loaders.held import loaders_in
from lightning_gpu_tools.loaders.settings import batch_shape, settings_of
from lightning_gpu_tools.training.run_measurements import LoaderFacts


class Photos(Samples):
    """A dataset with any attributes."""

    def __init__(self, **held: Any) -> None:
        super().__init__(8)
        vars(self).update(held)


def facts_of(dataset: Any, **options: Any) -> LoaderFacts:
    return read_loader_facts(DataLoader(dataset, **options))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789" * 100)
    return path


def closed(file: Any) -> Any:
    file.close()
    return file


@pytest.mark.parametrize(
    ("make", "is_named"),
    [
        (Path.open, True),
        (lambda path: pytest.importorskip("h5py").File(path, "w"), True),
        (sqlite3.connect, True),
        (lambda path: closed(path.open()), False),
        (lambda path: path.open("w"), False),  # a log
        (lambda path: mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ), False),
    ],
)
def test_what_is_open_is_named_unless_workers_may_share_it(
    path: Path, make: Callable[[Path], Any], is_named: bool
) -> None:
    assert facts_of(Photos(file=make(path))).open_files == (("Photos.file",) if is_named else ())


class Wrapper:
    """A dataset of the program around another one, without torch's base class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@pytest.mark.parametrize("wrap", [lambda one: Subset(ConcatDataset([Photos(), one]), [0]), Wrapper])
@pytest.mark.parametrize("dataset", [Photos(), TensorDataset(torch.ones(3))])
def test_an_open_file_is_found_in_wrapped_datasets(path: Path, wrap: Callable[[Any], Any], dataset: Any) -> None:
    dataset.file = path.open()
    assert facts_of(wrap(dataset)).open_files == (f"{type(dataset).__name__}.file",)


class OpensAgain(Photos):
    """Opens its file again in another process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() != self.pid:
            self.file = io.FileIO(self.file.name)
        return super().__getitem__(index)


class ReadsAnywhere(Photos):
    def __getitem__(self, index: int) -> torch.Tensor:
        os.pread(self.file.fileno(), 1, index)
        return super().__getitem__(index)


def open_in_worker(worker: int) -> None:
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.file = io.FileIO(__file__)


def test_files_reopened_in_workers_are_no_obstacle(path: Path) -> None:
    with path.open("rb") as file:
        assert facts_of(OpensAgain(file=file, pid=1)).open_files == ()
        assert facts_of(ReadsAnywhere(file=file)).open_files == ()
        assert facts_of(Photos(file=file), worker_init_fn=open_in_worker).open_files == ()
        assert facts_of(Photos(file=file), worker_init_fn=print).open_files == ("Photos.file",)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.cache.update(b=2),
        lambda one: one.generator.random(),
        lambda one: torch.rand(1, generator=one.seeds),
    ],
)
def test_a_dataset_that_changes_has_other_contents(change: Callable[[Any], Any]) -> None:
    dataset = Photos(
        cache={"a": 1}, generator=np.random.default_rng(1), array=np.zeros(9), seeds=torch.Generator(), names=["a", "b"]
    )
    before = facts_of(dataset).contents
    assert facts_of(dataset).contents == before
    change(dataset)
    assert facts_of(dataset).contents != before


# Streams


class Numbers(IterableDataset[int]):
    def __init__(self, source: Iterable[int] = range(40)) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return iter(self.source)


class Split(Numbers):
    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.source, *part_of_worker())


def part_of_worker() -> tuple[int, None, int]:
    info = get_worker_info()
    return (0, None, 1) if info is None else (info.id, None, info.num_workers)


class Noise(Numbers):
    def __iter__(self) -> Iterator[int]:
        yield int(torch.randint(10, (1,)))


def split_in_worker(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.source = info.dataset.source[info.id :: info.num_workers]


@pytest.mark.parametrize(
    ("stream", "options", "splits"),
    [
        (Numbers(), {}, False),
        (Split(), {}, True),
        (Numbers(), {"worker_init_fn": split_in_worker}, True),
        (Noise(), {}, None),
    ],
)
def test_whether_a_stream_splits_is_read_from_its_code(
    stream: Any, options: dict[str, Any], splits: bool | None
) -> None:
    found = facts_of(stream, **options)
    assert found.is_iterable
    assert found.splits is splits
    if splits is not None:
        loaded = [int(one) for one in DataLoader(stream, batch_size=None, num_workers=2, **options)]
        assert (len(set(loaded)) == len(loaded)) == splits


def test_shards_of_a_webdataset_are_counted() -> None:
    wds = pytest.importorskip("webdataset")
    names = ["0.tar", "1.tar"]
    whole = facts_of(wds.WebDataset(names, shardshuffle=False).shuffle(5).decode(), batch_size=None)
    assert (whole.splits, whole.shards, whole.is_webdataset) == (True, 2, True)
    unsplit = facts_of(wds.WebDataset(names, shardshuffle=False, workersplitter=None).shuffle(5), batch_size=None)
    assert (unsplit.splits, unsplit.shards) == (False, 2)
    endless = facts_of(wds.WebDataset(names, resampled=True, shardshuffle=False), batch_size=None)
    assert (endless.splits, endless.shards) == (True, None)


# Tables


@pytest.mark.parametrize(
    ("dataset", "is_table"),
    [
        (TensorDataset(torch.rand(6, 2), torch.rand(6)), True),
        (Subset(TensorDataset(torch.rand(6, 2)), [1, 3, 5]), True),
        (Samples(6), False),
    ],
)
def test_a_table_is_what_a_list_of_indices_reads(dataset: Any, is_table: bool) -> None:
    assert facts_of(dataset).is_table == is_table
    if is_table:
        (batch,) = DataLoader(dataset, batch_size=2, sampler=[0, 2])
        (at_once,) = DataLoader(dataset, batch_size=None, sampler=[[0, 2]])
        assert repr(batch) == repr(at_once)


def test_nothing_of_a_loader_runs_when_it_is_read() -> None:
    class Untouchable(Dataset[int]):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

        def __getitem__(self, index: int) -> int:
            raise AssertionError("a sample was loaded")

        def __len__(self) -> int:
            return 3

        def __getstate__(self) -> Any:
            raise AssertionError("it was pickled")

    assert why_not_searched(facts_of(Untouchable())) is None


# Loaders inside of what a loop iterates, or what a Trainer gets; and the shape of a batch


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
