"""The finder in real trainings on the CPU: what it finds, that it changes nothing else, and what happens in a fault."""

import copy
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in, settings_in
from cause_examples import TIME_EXAMPLES
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from loader_switching import DrawsAlways, Watch, shorten_trials
from rank_processes import run_ranks
from torch.utils.data import DataLoader, get_worker_info
from trainings import Model, Samples, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, NumWorkersFinder, load_report
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.loaders import plan

# A batch takes nine times as long as a step, and both are waiting, which no load of the machine shortens: workers
# are faster than none whatever else the machine does.
LOAD_S, STEP_S = 0.036, 0.004


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_trials(monkeypatch.setattr)


class Slow(Samples):
    """Does something in worker processes in addition to waiting."""

    def __init__(self, count: int = 40, act: Callable[[], object] = lambda: None) -> None:
        super().__init__(count, time.sleep, LOAD_S)
        self.act = act

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            self.act()
        return super().__getitem__(index)


class Noisy(Model):
    """A model whose steps draw random numbers, as dropout does, and that trains on one of several loaders."""

    def __init__(self, step_s: float = STEP_S, key: Any = None) -> None:
        super().__init__(time.sleep, step_s)
        self.key = key

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.rand(1)
        return super().training_step(batch if self.key is None else batch[self.key], batch_idx)


def train(
    folder: Path, callbacks: list[Callback], loader: Any, model: LightningModule | None = None, **options: Any
) -> Watch:
    seed_everything(7)
    watch = Watch()
    trainer = quiet_trainer(folder, callbacks=[*callbacks, watch], **options)
    trainer.fit(model or Noisy(), loader)
    return watch


shuffled = partial(DataLoader, shuffle=True)


def find(folder: Path, loader: Any, *others: Callback, **options: Any) -> tuple[Any, Watch]:
    """Train with a finder; return what it found, and what the training did."""
    finder = NumWorkersFinder(budget_s=12.0)
    watch = train(folder, [*others, finder], loader, **options)
    assert not multiprocessing.active_children()
    return finder.result, watch


@pytest.mark.follows(
    "NumWorkersFinder() finds and applies them.",
    "let `NumWorkersFinder()` measure and apply them",
    "*Next* has `DataLoader(..., num_workers=...)`",
)
def test_a_short_training_gets_workers_and_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advised = diagnose(TIME_EXAMPLES["data_loading"].sick).next_step
    assert "num_workers" in settings_in(advised)
    assert code_in(advised, r"(\w+)\(\) finds and applies them") == NumWorkersFinder.__name__
    caplog.set_level("INFO")
    monkeypatch.setattr(plan, "CONFIRM_STEPS", 50)
    tuned = Noisy()
    plain = copy.deepcopy(tuned)
    plain.step_s = 0.0
    loader = shuffled(Slow(40))
    before = dict(vars(loader))
    result, watch = find(tmp_path, loader, GPUUtilizationMonitor(), model=tuned, max_epochs=3)
    as_usual = train(tmp_path, [], shuffled(Samples(40)), plain, max_epochs=3)
    assert result.applied
    assert result.confirmed
    assert result.settings.num_workers >= 2
    assert "batches/s instead of" in result.reason
    assert watch.workers[-1] == result.settings.num_workers
    assert re.search(rf"num_workers={watch.workers[-1]}, .* is now in use", caplog.text)
    assert watch.batches == as_usual.batches
    assert watch.states == as_usual.states
    assert all(map(torch.equal, tuned.parameters(), plain.parameters()))
    # Afterwards, the loader is as it was, and so is the Trainer's.
    assert vars(loader) == before
    assert watch.loader.num_workers == 0
    assert type(iter(watch.loader)).__module__.startswith("torch.")
    report = load_report(tmp_path)
    assert report.loader.confirmed
    assert report.phase_s.get("unexplained", 0.0) <= 0.05 * report.wall_s  # also with a search
    assert report.unseen == ()  # a loader without workers has none to be polled until the search is over


def test_without_apply_the_settings_are_measured_and_advised(tmp_path: Path) -> None:
    finder = NumWorkersFinder(budget_s=12.0, apply=False)
    advisor = GPUUtilizationAdvisor(min_steps=10, min_seconds=0.0)
    watch = train(tmp_path, [advisor, finder], shuffled(Slow(36)))
    assert finder.result.settings.num_workers >= 2
    assert not finder.result.applied
    assert set(watch.workers) == {0}
    (finding,) = advisor.diagnosis.findings
    assert settings_in(finding.advice)["num_workers"] == finder.result.settings.num_workers
    assert finder.result.reason in finding.advice


def test_a_training_that_is_too_short_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        train(tmp_path, [GPUUtilizationMonitor(), NumWorkersFinder()], shuffled(Samples(20)), Noisy(0.0))
    (line,) = [line for line in caplog.messages if "NumWorkersFinder" in line]
    assert line == "NumWorkersFinder: Training ended after 20 steps, but a search needs 25."
    report = load_report(tmp_path)
    assert report.loader.reason in line


class Drawing(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(4)


def test_what_was_found_holds_for_loaders_that_are_made_again(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return shuffled(Drawing(20))

    result, watch = find(tmp_path, Data(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert result.applied
    assert watch.workers[-20:] == [result.settings.num_workers] * 20
    assert not result.settings.persistent_workers
    assert "Random numbers that the dataset draws (augmentation) now come from the workers" in result.reason
    for epoch in range(0, 60, 20):
        assert sorted(int(batch[0]) for batch in watch.batches[epoch : epoch + 20]) == list(range(20))


class OwnKind:
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(30):
            time.sleep(STEP_S)
            yield torch.ones(1, 4)


class Caching(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        vars(self)[str(index)] = index
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: [shuffled(Samples(30)), OwnKind()], "number 2 is unchanged: it is a "),  # the slower one
        (lambda: shuffled(Caching(30)), "its dataset changes while it is used"),
        (lambda: DataLoader(Samples(30), sampler=DrawsAlways()), "its sampler draws random numbers during the epoch"),
    ],
)
def test_what_cannot_be_changed_is_left_alone_with_the_reason(
    tmp_path: Path, loader: Callable[[], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        given = loader()
        model = Noisy(0.0, key=0 if isinstance(given, list) else None)
        result, watch = find(tmp_path, given, model=model, limit_train_batches=30, max_epochs=2)
    assert why in result.reason
    assert caplog.text.count(why) == 1
    assert not result.applied
    assert len(set(watch.workers)) == 1


def test_it_stays_out_of_a_trial_of_the_code(tmp_path: Path) -> None:
    finder = NumWorkersFinder()
    train(tmp_path, [finder], shuffled(Samples(50)), Noisy(0.0), fast_dev_run=True)
    assert finder.result is None


# What fails


class WhenApplied(Callback):
    """Does something once other settings have been in use for some steps."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.steps = act, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps += trainer.train_dataloader.num_workers > 0
        if self.steps == 5:
            self.act()


def kill_the_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.kill()


@pytest.mark.follows("The original settings were restored (num_workers={}). No batch was lost.")
def test_settings_that_fail_are_reverted_without_losing_a_batch(tmp_path: Path) -> None:
    restored = r"killed by SIGKILL.*The original settings were restored \(num_workers=0\)\. No batch was lost"
    with pytest.warns(UserWarning, match=restored):
        result, watch = find(tmp_path, DataLoader(Slow(40)), WhenApplied(kill_the_workers))
    assert [int(batch[0]) for batch in watch.batches] == list(range(40))
    assert watch.workers[-1] == 0
    assert result.settings == result.original
    assert result.confirmed is False
    assert "The new settings failed in use" in result.reason


def test_settings_slower_than_the_original_are_reverted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CONFIRM_STEPS", 8)
    monkeypatch.setattr(plan, "_DEEP_PREFETCH", 2)  # more batches under way would need a longer training
    flag = tmp_path / "slow"  # four workers then take 150 ms a batch
    dataset = Slow(80, lambda: flag.exists() and time.sleep(0.6))
    result, watch = find(tmp_path, DataLoader(dataset), WhenApplied(flag.touch))
    assert [int(batch[0]) for batch in watch.batches] == list(range(80))
    assert watch.workers[-1] == 0
    assert max(watch.workers) > 0
    assert result.settings == result.original
    assert (result.applied, result.confirmed) == (False, False)
    assert re.search(r"in use: a step took .*, not .*, so the original", result.reason)


# Two ranks that train together

RANKS_LOAD_S = 0.03  # so that workers help on a busy machine, too


class Faulty(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        if os.environ["RANK"] == "1" and get_worker_info():
            raise OSError("only on rank 1")
        return super().__getitem__(index)


def train_each_way(folder: Path, rank: int) -> None:
    shorten_trials()
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    for mode in ("untouched", "tuned", "faulty"):
        seed_everything(3)
        is_tuned = mode != "untouched"
        watch, finder = Watch(), NumWorkersFinder()
        model = Model(time.sleep, STEP_S * is_tuned)
        data = (Faulty if mode == "faulty" else Samples)(60, time.sleep, RANKS_LOAD_S * is_tuned)
        callbacks = [finder, watch] if is_tuned else [watch]
        trainer = quiet_trainer(folder, callbacks=callbacks, max_epochs=2, **options)
        trainer.fit(model, DataLoader(data, shuffle=True))
        found[mode] = {
            "workers": watch.workers,
            "batches": watch.batches,
            "weights": [p.detach().flatten().tolist() for p in model.parameters()],
        }
        if finder.result is not None:
            found[mode] |= {
                "chosen": finder.result.settings and finder.result.settings.num_workers,
                "applied": finder.result.applied,
                "reason": finder.result.reason,
                "trials": [repr(trial) for trial in finder.result.trials],
            }
    # Two loaders, of which each rank waits longer for another one.
    waits_s = {"one": (RANKS_LOAD_S, RANKS_LOAD_S / 4), "other": (RANKS_LOAD_S / 8, RANKS_LOAD_S / 2)}
    pair = {key: DataLoader(Samples(60, time.sleep, wait_s[rank])) for key, wait_s in waits_s.items()}
    finder = NumWorkersFinder()
    quiet_trainer(folder, callbacks=[finder], **options).fit(Noisy(key="one"), pair)
    found["pair"] = finder.result and finder.result.reason
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_all_ranks_try_and_decide_the_same(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, train_each_way)
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name in ("workers", "chosen", "applied", "reason", "trials"):
        assert ranks[0]["tuned"][name] == ranks[1]["tuned"][name]
        assert name == "trials" or ranks[0]["faulty"][name] == ranks[1]["faulty"][name]
    assert 'The loader is "one" (Samples).' in ranks[0]["pair"]
    assert ranks[0]["pair"] == ranks[1]["pair"]
    for rank in ranks:
        assert rank["tuned"]["applied"], rank["tuned"]["reason"]
        assert rank["tuned"]["chosen"] >= 1
        assert rank["tuned"]["workers"][-1] == rank["tuned"]["chosen"]
        assert "only on rank 1" in rank["faulty"]["reason"]
        assert rank["faulty"]["chosen"] == 0
        for mode in ("tuned", "faulty"):
            assert rank[mode]["batches"] == rank["untouched"]["batches"]
            assert rank[mode]["weights"] == rank["untouched"]["weights"]
    said = "".join(one.stderr for one in ended)
    assert said.count("training pauses for at most 30 s to try DataLoader settings") == 3  # of rank 0
