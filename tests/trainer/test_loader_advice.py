"""Advice on loaders, followed: the text of a real report is done, and it holds."""

import importlib
import multiprocessing
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import advice_on, code_in, diagnosed, finding_on, settings_in
from loader_switching import shorten_trials
from own_loops import Network
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from tqdm import tqdm
from trainings import Model, Samples, quiet_trainer

from lightning_gpu_tools import GPUUtilizationMonitor, NumWorkersFinder, find_loader_settings, load_report, watch
from lightning_gpu_tools.training import line_sampler
from lightning_gpu_tools.types import TrainingWatch

# A batch takes six times as long as a step.
LOAD_S, STEP_S, BATCHES = 0.024, 0.004, 48

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_gpu_tools.errors.LowGPUUtilizationWarning",
    "ignore:.*shardshuffle.*:UserWarning",
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample many lines, and try few settings."""
    monkeypatch.setattr(line_sampler, "MEAN_S", 1 / 200)
    shorten_trials(monkeypatch.setattr)


class Counting(Model):
    """A model that counts the samples it gets."""

    def __init__(self) -> None:
        super().__init__(time.sleep, STEP_S)
        self.seen: Counter[int] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = (batch if isinstance(batch, torch.Tensor) else batch[0]).reshape(-1, 4).float()
        self.seen.update(rows[:, 0].int().tolist())
        return super().training_step(rows, batch_idx)


def trained(folder: Path, loader: Any, *callbacks: Any, **options: Any) -> Counter[int]:
    model = Counting()
    quiet_trainer(folder, callbacks=[*callbacks], **options).fit(model, loader)
    assert not multiprocessing.active_children()
    return model.seen


def found_by_finder(folder: Path, loader: Any) -> Any:
    finder = NumWorkersFinder(budget_s=5)
    trained(folder, loader, finder, max_epochs=1)
    return finder.result


def slow_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(BATCHES, time.sleep, LOAD_S), **options)


def a_row(number: int) -> torch.Tensor:
    time.sleep(LOAD_S)
    return torch.full((4,), float(number))


ALL = Counter(range(BATCHES))


# Open files


class Photos(Samples):
    """A file of rows, opened at once or on first use."""

    def __init__(self, path: Path, *, at_once: bool) -> None:
        super().__init__(BATCHES)
        self.path, self.file = path, None
        if at_once:
            self.open_file()

    def open_file(self) -> Any:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)  # type: ignore[assignment]
        return self.file

    def __getitem__(self, index: int) -> torch.Tensor:
        file = self.open_file()
        file.seek(index)
        time.sleep(LOAD_S)  # while another process may move the position
        return torch.full((4,), float(file.read(1)[0]))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    path = tmp_path / "photos"
    path.write_bytes(bytes(range(BATCHES)) + bytes(BATCHES))  # what is read at a wrong position is there as well
    return path


@pytest.mark.follows(
    " open, and ", "Open it in the worker, when it loads its first sample.", "first what the advice says: open the file"
)
def test_a_file_opened_in_the_worker_is_read_right(tmp_path: Path, photos: Path) -> None:
    dataset = Photos(photos, at_once=True)
    advice = diagnosed(tmp_path, Counting(), DataLoader(dataset)).advice
    name, attribute = re.search(r"`(\w+)\.(\w+)` is open, and forked workers would share it", advice).groups()  # type: ignore[union-attr]
    assert type(dataset).__name__ == name
    assert "NumWorkersFinder" not in advice
    result = found_by_finder(tmp_path, DataLoader(dataset))
    assert not result.trials
    for reason in (result.reason, find_loader_settings(DataLoader(dataset), STEP_S, budget_s=2).reason):
        assert "`Photos.file` is open, and forked workers would share it. Open it in the worker" in reason
    getattr(dataset, attribute).close()
    assert "Open it in the worker, when it loads its first sample." in advice
    followed = DataLoader(Photos(photos, at_once=False), **settings_in(advice))
    assert trained(tmp_path, followed, max_epochs=1) == ALL


@pytest.mark.follows("Start with num_workers=1")
def test_a_file_opened_on_first_use_gets_workers(tmp_path: Path, photos: Path) -> None:
    finding = diagnosed(tmp_path, Counting(), DataLoader(Photos(photos, at_once=False)))
    assert finding.evidence["kind"] == "too_few_workers"
    assert "NumWorkersFinder" not in finding.advice  # which would fork this process, with the file open
    result = found_by_finder(tmp_path, DataLoader(Photos(photos, at_once=False)))
    assert "`Photos.file` was opened in this process" in result.reason
    begin = int(code_in(result.reason, r"Start with num_workers=(\d+)"))
    result = found_by_finder(tmp_path, DataLoader(Photos(photos, at_once=False), num_workers=begin))
    assert result.trials


@pytest.mark.follows(", open since before they were forked")
def test_workers_that_share_an_open_file_are_warned_about_once(tmp_path: Path, photos: Path) -> None:
    with pytest.warns(UserWarning, match=r"workers share `Photos\.file`, open since before") as warned:
        trained(tmp_path, DataLoader(Photos(photos, at_once=True), num_workers=1), GPUUtilizationMonitor())
    assert len([one for one in warned if "share `Photos.file`" in str(one.message)]) == 1
    with pytest.warns() as warned:
        seen = trained(tmp_path, DataLoader(Photos(photos, at_once=False), num_workers=1), GPUUtilizationMonitor())
    assert not [one for one in warned if "`Photos.file`" in str(one.message)]
    assert set(seen) == set(ALL)


# Streams


class Stream(IterableDataset[torch.Tensor]):
    """A stream of files. With code from advice, each worker reads a part of them."""

    def __init__(self, part: str = "files", info: str = "None") -> None:
        self.part, self.info = part, info

    def __iter__(self) -> Iterator[torch.Tensor]:
        files, info = range(BATCHES), eval(self.info)
        for number in files if info is None else eval(self.part):
            yield a_row(number)


@pytest.mark.follows(
    "split what `__iter__` reads by ",
    "torch.utils.data.get_worker_info(): files[",
    "split the stream by `get_worker_info()`",
)
def test_a_stream_split_as_advised_yields_each_sample_once(tmp_path: Path) -> None:
    finding = diagnosed(tmp_path, Counting(), DataLoader(Stream()))
    assert finding.evidence["kind"] == "too_few_workers"
    assert "NumWorkersFinder" not in finding.advice
    settings = settings_in(finding.advice)
    twice = trained(tmp_path, DataLoader(Stream(), **{**settings, "num_workers": 2}), max_epochs=1)
    assert set(twice.values()) == {2}
    part = code_in(finding.advice, r"files\[[^]]*\]")
    info = code_in(finding.advice, r"torch\.utils\.data\.get_worker_info\(\)")
    assert "or all if info is None" in finding.advice
    assert trained(tmp_path, DataLoader(Stream(part, info), **settings), max_epochs=1) == ALL


class Split(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        numbers = range(BATCHES)
        for number in numbers if info is None else numbers[info.id :: info.num_workers]:
            yield a_row(number)


@pytest.mark.follows("Set num_workers yourself")
def test_a_finder_that_skips_a_stream_says_what_to_set(tmp_path: Path) -> None:
    result = found_by_finder(tmp_path, DataLoader(Split()))
    assert "could repeat or lose samples. Set num_workers yourself" in result.reason
    name = code_in(result.reason, r"Set (\w+) yourself")
    assert trained(tmp_path, DataLoader(Split(), **{name: 2}), max_epochs=1) == ALL


def webdataset_of(folder: Path, shards: int, *stages: Callable[[Any], Any]) -> Any:
    wds = pytest.importorskip("webdataset")
    names = [str(folder / f"{i}.tar") for i in range(shards)]
    for i, name in enumerate(names):
        with wds.TarWriter(name) as writer:
            for number in range(i, BATCHES, shards):
                writer.write({"__key__": f"{number}", "txt": str(number)})
    return wds.DataPipeline(
        *(wds.SimpleShardList(names), *stages, wds.tarfile_to_samples(), wds.map(lambda one: a_row(int(one["txt"]))))
    )


@pytest.mark.follows("Add webdataset.split_by_worker to its pipeline", "Store the data in more shards.")
def test_a_webdataset_is_split_by_worker_and_has_a_shard_for_each(tmp_path: Path) -> None:
    advice = diagnosed(tmp_path, Counting(), DataLoader(webdataset_of(tmp_path, 8), batch_size=None)).advice
    package, _, name = code_in(advice, r"Add ([\w.]+) to its pipeline, after the list of shards").partition(".")
    stage = getattr(importlib.import_module(package), name)
    followed = DataLoader(webdataset_of(tmp_path, 8, stage), batch_size=None, **settings_in(advice))
    assert trained(tmp_path, followed, max_epochs=1) == ALL
    needed = {}
    for shards in (1, 16):
        dataset = webdataset_of(tmp_path, shards, stage)
        advice = diagnosed(tmp_path, Counting(), DataLoader(dataset, batch_size=None)).advice
        needed[shards] = settings_in(advice)["num_workers"]
        assert ("the dataset has 1 shard, and a worker needs its own." in advice) == (shards == 1)
    assert needed[1] == 1 < needed[16]


# Processes


def measured_loop(folder: str, options: dict[str, Any]) -> None:
    """Load with a loop in a child process, and leave the advice, or the samples seen, in a file."""
    seen = Counter[int]()
    with watch(folder=folder, min_steps=10, min_seconds=0) as run:
        for batch in run.batches(slow_loader(**options)):
            seen.update(int(row[0]) for row in batch)
            time.sleep(STEP_S)
    Path(folder, "said").write_text(repr((advice_on(run, "data_loading"), seen == ALL)))


def said_by(process: Any, folder: Path) -> tuple[str, bool]:
    process.start()
    process.join()
    found: tuple[str, bool] = eval((folder / "said").read_text())
    (folder / "said").unlink()
    return found


@pytest.mark.follows(
    "Start it with multiprocessing.Process(daemon=False)",
    "start the process with `multiprocessing.Process(daemon=False)`",
)
def test_a_process_that_is_not_daemonic_may_start_workers(tmp_path: Path) -> None:
    daemon = multiprocessing.Process(target=measured_loop, args=(str(tmp_path), {}), daemon=True)
    advice, _ = said_by(daemon, tmp_path)
    assert "This process is daemonic and may not start workers" in advice
    assert "find_loader_settings" not in advice
    name, option, value = re.search(r"multiprocessing\.(\w+)\((\w+)=(\w+)\)", advice).groups()  # type: ignore[union-attr]
    (pool,) = re.search(r"or with ([\w.]+)\(\)", advice).groups()  # type: ignore[union-attr]
    arguments: Any = (str(tmp_path), settings_in(advice))
    options = {option: eval(value)}
    follower = getattr(multiprocessing, name)(target=measured_loop, args=arguments, **options)
    assert said_by(follower, tmp_path)[1]
    module, _, kind = pool.rpartition(".")
    with getattr(importlib.import_module(module), kind)(1) as executor:
        executor.submit(measured_loop, *arguments).result()
    assert eval((tmp_path / "said").read_text())[1]


# Several loaders


class OfSeveral(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["real"], batch_idx)


@pytest.mark.follows("DataLoader(..., {}) (now {})", " for the loader")
def test_the_slow_loader_of_a_trainer_is_named_and_gets_workers(tmp_path: Path) -> None:
    loaders = {"noise": DataLoader(Samples(BATCHES)), "real": slow_loader()}
    found = diagnosed(tmp_path, OfSeveral(time.sleep, STEP_S), loaders)
    before = load_report(tmp_path).diagnosis.waiting_share
    key, dataset = re.search(r'for the loader "(\w+)" \((\w+)\)', found.advice).groups()  # type: ignore[union-attr]
    assert found.evidence["loader"] == f'"{key}"'
    assert type(loaders[key].dataset).__name__ == dataset == "Samples"
    loaders[key] = slow_loader(**settings_in(found.advice))
    quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor()]).fit(OfSeveral(time.sleep, STEP_S), loaders)
    after = load_report(tmp_path).diagnosis.waiting_share
    assert after < before  # on a busy machine, workers wait for cores, too


# Loops


def measured(folder: Path, batches: Callable[[TrainingWatch], Iterable[Any]]) -> Any:
    """Train in a loop, and return the finding on waiting for data; ``None`` if it hardly waits."""
    network = Network(time.sleep, STEP_S / 0.1)
    with watch(folder=str(folder), min_steps=10, min_seconds=0) as run:
        for batch in batches(run):
            while not isinstance(batch, torch.Tensor):
                batch = batch[-1]
            network.step(batch)
    return finding_on(run, "data_loading")


@pytest.mark.follows(" finds them.")
def test_a_wrapped_loader_gets_the_settings_of_the_loader_itself(tmp_path: Path) -> None:
    found = measured(tmp_path, lambda run: run.batches(tqdm(slow_loader(), disable=True)))
    assert (found.evidence["kind"], found.evidence["num_workers"]) == ("too_few_workers", 0)
    workers = settings_in(found.advice)["num_workers"]
    after = measured(tmp_path, lambda run: run.batches(slow_loader(num_workers=workers)))
    assert after is None or after.share < found.share
    assert load_report(tmp_path).settings["dataset"] == "Samples"
    call = code_in(found.advice, r"(\w+\(loader, step_time_s=)\.\.\.\) finds them")
    names = {"loader": slow_loader(), "find_loader_settings": find_loader_settings}
    assert eval(f"{call}{STEP_S}, budget_s=20)", names).settings.num_workers > 1


@pytest.mark.follows("watch() sees no DataLoader inside of this ", "enumerate(run.batches(loader)), not")
def test_a_hidden_loader_gets_settings_once_passed_directly(tmp_path: Path) -> None:
    found = measured(tmp_path, lambda run: run.batches(enumerate(slow_loader())))
    assert "watch() sees no DataLoader inside of this enumerate." in found.advice
    code = code_in(found.advice, r"enumerate\(run\.batches\(loader\)\)")
    after = measured(tmp_path, lambda run: eval(code, {"run": run, "loader": slow_loader()}))
    assert settings_in(after.advice)["num_workers"] > 1


# Samples in memory that are fetched one by one

ROWS, BATCH = 40_000, 1000
TABLE = torch.arange(ROWS).repeat(4, 1).T.contiguous().float()


class AtOnce(TensorDataset):
    def __getitems__(self, indices: list[int]) -> Any:
        return self[indices]


@pytest.mark.follows("Give the dataset a method `__getitems__(self, indices)`")
def test_cheap_samples_are_fetched_at_once_as_advised(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, Counting(), DataLoader(TensorDataset(TABLE), batch_size=BATCH), max_epochs=4)
    if found.evidence["load_cpu_ms_per_batch"] < 0.6 * found.evidence["load_ms_per_batch"]:
        pytest.skip("other programs take the cores")
    assert found.evidence["kind"] == "cpu_bound"
    assert hasattr(AtOnce, code_in(found.advice, r"`(\w+)\(self, indices\)`"))
    option = code_in(found.advice, r"the loader a (\w+) that returns it unchanged")
    followed = DataLoader(AtOnce(TABLE), batch_size=BATCH, **{option: lambda batch: batch})
    assert trained(tmp_path, followed, max_epochs=1) == Counter(range(ROWS))
