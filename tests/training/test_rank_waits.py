"""Waits for other ranks within backward, with real autograd and a clock that moves by hand."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trainings import HandClock

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import BACKWARD, FORWARD, RANK_WAIT_IN_STEP
from lightning_gpu_tools.training.rank_waits import BucketWaits, RankWaits
from lightning_gpu_tools.training.step_clock import StepClock

WAIT = "rank_wait/training step"


class Reducing:
    """A model of two layers whose gradients are reduced as DistributedDataParallel does it.

    Computing the gradient of the last layer takes 1 s, of the first one 2 s, and waiting for other ranks 4 s.
    """

    def __init__(self) -> None:
        self.time = HandClock()
        self.clock = StepClock(self.time)
        self.waits = RankWaits(self.clock)
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.first.weight.register_post_accumulate_grad_hook(lambda _: self.time.spend(2.0))
        self.last.weight.register_post_accumulate_grad_hook(lambda _: self._last_computed())
        self.clock.start()
        self.backward = self.clock.timed(BACKWARD, self.waits.around_backward(lambda loss: loss.backward()))

    def _last_computed(self) -> None:
        self.time.spend(1.0)
        queue = compat.find(compat.QUEUE_IN_BACKWARD)
        queue(lambda: self.time.spend(4.0))

    def loss(self, run_first: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        hidden = (run_first or self.first)(torch.ones(2, 4, requires_grad=True))
        loss: torch.Tensor = self.last(hidden).square().mean()
        return loss

    @property
    def spent_s(self) -> tuple[float, float]:
        self.clock.stop()
        return self.clock.seconds.get(BACKWARD, 0.0), self.clock.seconds.get(WAIT, 0.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_end_of_backward_is_waiting(use_reentrant: bool) -> None:
    model = Reducing()
    model.backward(model.loss(lambda batch: checkpoint(model.first, batch, use_reentrant=use_reentrant)))
    assert model.spent_s == (3.0, 4.0)
    assert not model.waits.unseen


def test_an_error_in_backward_leaves_the_clock_right() -> None:
    model = Reducing()
    model.first.bias.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.backward(model.loss())
    model.clock.timed(FORWARD, model.time.spend)(8.0)
    model.clock.stop()
    assert model.clock.seconds[FORWARD] == 8.0


def test_a_torch_that_refuses_costs_only_the_distinction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "QUEUE_IN_BACKWARD", "lacking")
    model = Reducing()
    monkeypatch.undo()
    model.backward(model.loss())
    assert model.spent_s == (7.0, 0.0)
    assert model.waits.unseen
    assert model.first.weight.grad is not None


# Where a GPU waits within backward


class Bucketed:
    """A DDP model that sends its gradients in two buckets, and the marks at them: phase, and collectives before it."""

    def __init__(self) -> None:
        layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        self.ddp = DistributedDataParallel(layers, bucket_cap_mb=3)
        self.marks: list[tuple[str, int]] = []
        self.waits = BucketWaits(self.ddp.parameters, self._mark)

    def _mark(self, phase: str) -> None:
        self.marks.append((phase, compat.collectives_started()))

    def backward(self, *, is_sampled: bool = False) -> int:
        """Return the number of collectives before this backward."""
        loss = self.ddp(torch.ones(2, 512)).sum()
        before = compat.collectives_started()
        self.marks.clear()
        with self.waits.around_backward(is_sampled=is_sampled):
            loss.backward()
        return before


@pytest.fixture
def bucketed(tmp_path: Path) -> Iterator[Bucketed]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Bucketed()
    torch.distributed.destroy_process_group()


def test_each_bucket_is_sent_between_two_marks(bucketed: Bucketed) -> None:
    for _ in range(3):
        bucketed.backward()
        assert bucketed.marks == []
    for _ in range(2):
        before = bucketed.backward(is_sampled=True)
        assert bucketed.marks == [
            (RANK_WAIT_IN_STEP, before),
            (BACKWARD, before + 1),
            (RANK_WAIT_IN_STEP, before + 1),
            (BACKWARD, before + 2),
        ]
    bucketed.backward()
    assert bucketed.marks == []


def test_buckets_without_marks_are_noticed_and_learned(bucketed: Bucketed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "waits_for_each_bucket", lambda: True)
    bucketed.backward(is_sampled=True)
    assert bucketed.waits.unseen
    for _ in range(2):
        bucketed.backward()
    bucketed.backward(is_sampled=True)
    assert len(bucketed.marks) == 4
    assert not bucketed.waits.unseen
