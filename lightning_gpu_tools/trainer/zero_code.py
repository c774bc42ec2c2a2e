"""The monitor and the advisor for a Trainer whose author did not add them: ``LIGHTNING_GPU_TOOLS=advise``."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gpu_tools.trainer.gpu_utilization_advisor import GPUUtilizationAdvisor
from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor


def monitor_and_advisor() -> list[Callback]:
    """Return a monitor and an advisor with their defaults, led by what withdraws them where the user has their own."""
    added = (GPUUtilizationMonitor(), GPUUtilizationAdvisor())
    return [_YieldToUsers(added), *added]


class _YieldToUsers(Callback):
    """Withdraws the added callbacks from a Trainer that has one of the same class already.

    The factory cannot see the Trainer's own callbacks; ``setup`` is the first hook that can.
    """

    def __init__(self, added: Sequence[Callback]) -> None:
        self.added = tuple(added)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning is iterating over this very list. The added ones stand right behind this callback, so taking them
        # out in place only makes the iteration go on with what follows them.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        for callback in self.added:
            if callback in callbacks and any(type(c) is type(callback) and c is not callback for c in callbacks):
                callbacks.remove(callback)
