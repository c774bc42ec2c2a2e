"""Marks at which a GPU waits for buckets of gradients within backward, with real DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.phases import BACKWARD, RANK_WAIT_IN_STEP
from lightning_gpu_tools.training.rank_waits import BucketWaits


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Reducing:
    """A model whose gradients are sent in two buckets, and the marks at them: phase, and collectives before it."""

    def __init__(self) -> None:
        layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        self.ddp = DistributedDataParallel(layers, bucket_cap_mb=3)
        self.marks: list[tuple[str, int]] = []
        self.waits = BucketWaits(
            self.ddp.parameters, lambda phase: self.marks.append((phase, compat.collectives_started()))
        )

    def backward(self, *, is_sampled: bool = False) -> int:
        """Return the number of collectives before this backward."""
        loss = self.ddp(torch.ones(2, 512)).sum()
        before = compat.collectives_started()
        self.marks.clear()
        with self.waits.around_backward(is_sampled=is_sampled):
            loss.backward()
        return before


def test_each_bucket_is_sent_between_two_marks() -> None:
    model = Reducing()
    for _ in range(3):
        model.backward()
        assert model.marks == []
    for _ in range(2):
        before = model.backward(is_sampled=True)
        assert model.marks == [
            (RANK_WAIT_IN_STEP, before),
            (BACKWARD, before + 1),
            (RANK_WAIT_IN_STEP, before + 1),
            (BACKWARD, before + 2),
        ]
    model.backward()
    assert model.marks == []


def test_gradients_that_are_not_sent_teach_nothing() -> None:
    """Accumulate gradients first."""
    model = Reducing()
    with model.ddp.no_sync():
        for _ in range(4):
            model.backward()
    model.backward()
    assert model.marks == []
    model.backward()
    model.backward(is_sampled=True)
    assert len(model.marks) == 4


def test_buckets_without_marks_are_noticed_and_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "waits_for_each_bucket", lambda: True)
    model = Reducing()
    model.backward(is_sampled=True)
    assert model.waits.unseen
    for _ in range(2):
        model.backward()
    model.backward(is_sampled=True)
    assert len(model.marks) == 4
    assert not model.waits.unseen


def test_an_error_in_backward_leaves_no_hook() -> None:
    model = Reducing()
    for _ in range(3):
        model.backward()
    loss = model.ddp(torch.ones(2, 512)).sum()
    handle = loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), model.waits.around_backward(is_sampled=True):
        loss.backward()
    handle.remove()
    assert not model.ddp.module[0].weight._post_accumulate_grad_hooks


def test_a_model_without_buckets_in_backward_is_not_searched_in_each_step() -> None:
    model, searched = Reducing(), []
    model.waits._weights = lambda: searched.append(1) or ()
    for _ in range(10):
        model.backward()
    assert len(searched) == 3


def test_weights_that_allow_no_hooks_do_not_stop_training() -> None:
    model = Reducing()
    model.backward()
    model.waits._weights = lambda: [model.ddp.module[0].weight, NoHooks()]
    for is_sampled in (False, True, False):
        model.backward(is_sampled=is_sampled)
        assert not model.ddp.module[0].weight._post_accumulate_grad_hooks
    assert model.ddp.module[0].weight.grad is not None


class NoHooks:
    """A weight of an odd class."""

    requires_grad = is_leaf = True
