"""Models for loops without a Trainer, and the traces that a `watch` of them may leave behind."""

import gc
from collections.abc import Callable

import torch
from torch.optim import optimizer as torch_optimizer
from trainings import background_threads


class Network:
    """A model with an optimizer, whose parts cost what a test says."""

    def __init__(self, spend: Callable[[float], None] = lambda seconds: None, cost_s: float = 1.0) -> None:
        self.layer = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=1e-6)
        self.optimizer.register_step_post_hook(lambda *_: spend(0.05 * cost_s))
        self.spend, self.cost_s = spend, cost_s

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.spend(0.02 * self.cost_s)
        return self.layer(batch).square().mean()

    def backward(self, batch: torch.Tensor) -> None:
        loss = self.forward(batch)
        loss.register_hook(lambda gradient: self.spend(0.03 * self.cost_s))
        loss.backward()

    def step(self, batch: torch.Tensor) -> None:
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def traces() -> tuple[object, ...]:
    """Return everything that a watch may change."""
    return (
        torch.autograd.backward,
        torch.distributed.Work.wait,
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        len(gc.callbacks),
        len(background_threads()),
    )
