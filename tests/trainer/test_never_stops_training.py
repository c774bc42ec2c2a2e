"""Faults in callbacks of this package, and names that a version lacks: a training ends as it does without them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from loader_switching import frozen_states
from trainings import Boom, Model, Samples, background_threads, fault_in, hide, loader, quiet_trainer

from lightning_gpu_tools import (
    GPUUtilizationAdvisor,
    GPUUtilizationMonitor,
    NumWorkersFinder,
    PortableCheckpointIO,
    load_report,
    patches,
)
from lightning_gpu_tools.loaders import plan
from lightning_gpu_tools.loaders.passes import Loading
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.runs.run_report import RunReporter
from lightning_gpu_tools.trainer import compat, num_workers_finder
from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointHooks
from lightning_gpu_tools.trainer.fit_session import FitSession
from lightning_gpu_tools.trainer.fit_timer import EvaluationTimer, FitTimer
from lightning_gpu_tools.trainer.gpu_utilization import STEP_HOOKS
from lightning_gpu_tools.training import compat as torch_compat
from lightning_gpu_tools.training.rank_exchange import RankExchange, RankPlace

STEPS, FAILS_AT = 4, 2


class Failing(Model):
    """Fails at a step, if it is told to."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.at:
            raise Boom(f"at step {batch_idx}")
        return super().training_step(batch, batch_idx) * torch.rand(1)


class Outcome(NamedTuple):
    error: str
    results: list[Any]
    weights: list[Any]
    states: Any


def train(folder: Path, callbacks: list[Callback], fails_at: int | None, workers: int = 0) -> Outcome:
    seed_everything(0, verbose=False)
    model = Failing(fails_at)
    plugins = [PortableCheckpointIO()] if any(isinstance(one, PortableCheckpointHooks) for one in callbacks) else []
    trainer = quiet_trainer(folder, callbacks=callbacks, plugins=plugins, log_every_n_steps=5, logger=False)
    error = "none"
    try:
        trainer.fit(model, loader(Samples(STEPS), shuffle=True, num_workers=workers), loader(Samples(1)))
        trainer.save_checkpoint(folder / "last.ckpt")
    except Exception as raised:  # noqa: BLE001 - whatever reaches the user
        error = repr(raised)
    # Also after an error.
    results = [run(model, loader(Samples(3)), verbose=False) for run in (trainer.validate, trainer.test)]
    results += [one.tolist() for one in trainer.predict(model, loader(Samples(3)))]  # type: ignore[union-attr]
    assert background_threads() == []
    assert "profile" not in vars(trainer.profiler)  # type: ignore[attr-defined]
    return Outcome(error, results, [weight.tolist() for weight in model.parameters()], frozen_states())


class BadText(Exception):
    def __str__(self) -> str:
        raise ValueError("has no text")


FAULTS: list[Callable[[], Exception]] = [
    lambda: RuntimeError("ours"),
    lambda: PermissionError(13, "ours"),
    lambda: AttributeError("ours"),
    lambda: StopIteration("ours"),
    lambda: UserWarning("ours"),
    BadText,
]
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "monitor": GPUUtilizationMonitor,
    "advisor": lambda: GPUUtilizationAdvisor(min_steps=1, min_seconds=0),
    "finder": lambda: NumWorkersFinder(budget_s=0.1),
    "checkpoints": PortableCheckpointHooks,
}


def hooks_of(callback: Callback) -> dict[str, Callable[..., Any]]:
    """Return the hooks that a callback has beside Lightning's empty ones, as they are without a guard."""
    found = {name: getattr(type(callback), name) for name in dir(Callback) if not name.startswith("_")}
    hidden = STEP_HOOKS if isinstance(callback, GPUUtilizationMonitor) else ()
    return {
        name: getattr(hook, "__wrapped__", hook)
        for name, hook in found.items()
        if callable(hook) and hook is not getattr(Callback, name) and name not in hidden
    }


@pytest.fixture(scope="module")
def as_usual(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Outcome]:
    """Return how the training ends without a callback: with no error, and with one of the user's."""
    return {at: train(tmp_path_factory.mktemp("alone"), [], at) for at in (None, FAILS_AT)}


HOOKS = [(kind, hook) for kind, made in CALLBACKS.items() for hook in hooks_of(made())]


@pytest.mark.parametrize(("number", "kind", "hook"), [(number, *place) for number, place in enumerate(HOOKS)])
def test_a_fault_in_any_hook_changes_nothing(
    tmp_path: Path, as_usual: dict[int | None, Outcome], number: int, kind: str, hook: str
) -> None:
    callback, at = CALLBACKS[kind](), FAILS_AT if hook == "on_exception" else None
    # All hooks have the same guard, so one of the faults is enough for each.
    with fault_in(hooks_of(callback)[hook], FAULTS[number % len(FAULTS)]) as raised:
        assert train(tmp_path, [callback], at) == as_usual[at]
    assert raised


@pytest.mark.parametrize(
    "function",
    [
        num_workers_finder.NumWorkersFinder._adopt,
        num_workers_finder.search,
        Loading.close,
        FitSession.begin,
        RunReporter.after_step,
        FitSession.finish,
        RunRecorder.measurements,
        FitTimer._start,
        EvaluationTimer._time_loop,
    ],
)
def test_a_fault_in_the_middle_of_a_hook_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_usual: dict[int | None, Outcome],
    function: Callable[..., Any],
) -> None:
    monkeypatch.setattr(plan, "STUDY_STEPS", 3)
    monkeypatch.setattr(plan, "why_no_search", lambda steps: None)
    with fault_in(function, lambda: RuntimeError("ours")) as raised:
        assert train(tmp_path, [made() for made in CALLBACKS.values()], None) == as_usual[None]
    assert raised


# A Lightning or a torch without one of the names that are private or may change


@pytest.mark.parametrize(
    ("module", "gone", "unseen"),
    [
        (patches, "on_run_start", "has no report, because this version of Lightning lacks _FitLoop.on_run_start"),
        (patches, "on_run_end", "_FitLoop.on_run_end"),
        (patches, "profile", "PassThroughProfiler.profile"),
        (compat, "_batches_that_stepped", ""),  # the optimizer's step is nearly always the same
        (compat, "_iterator", ""),
    ],
)
def test_training_goes_on_and_what_is_unseen_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_usual: dict[int | None, Outcome],
    module: ModuleType,
    gone: str,
    unseen: str,
) -> None:
    hide(monkeypatch, module, gone)
    callbacks = [GPUUtilizationMonitor(), CALLBACKS["advisor"]()]
    assert train(tmp_path, callbacks, None, workers=1) == as_usual[None]
    assert unseen in capsys.readouterr().out
    if gone != "on_run_start":
        report = load_report(tmp_path / "gpu_report" / "gpu_report.json")
        assert report.steps == STEPS
        assert sum(report.phase_s.values()) == pytest.approx(report.wall_s)


@pytest.fixture
def store() -> Iterator[Any]:
    """A real store in which torch.distributed was started."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    torch.distributed.destroy_process_group()


def test_ranks_that_cannot_meet_are_deaf_and_not_stuck(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankPlace(rank=0, world_size=2, local_ranks=2)
    assert RankExchange("seen", place, torch_compat.default_store()).ranks == 2
    hide(monkeypatch, torch_compat, "_get_default_store")
    exchange = RankExchange("unseen", place, torch_compat.default_store())
    exchange.publish(own_step=None)
    assert exchange.ranks == 1
    exchange.finish(60.0)
    assert [entry["rank"] for entry in exchange.entries()] == [0]
