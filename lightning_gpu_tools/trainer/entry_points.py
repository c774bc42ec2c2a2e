"""What Lightning calls for every ``Trainer`` it builds (entry point ``lightning.pytorch.callbacks_factory``).

Lightning neither asks first nor catches what goes wrong here: an exception would break every Trainer of every program
in the environment. So this module imports nothing heavy, and returns ``[]`` in a program that does not use the package.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING

from lightning_gpu_tools.environment import is_disabled

if TYPE_CHECKING:
    from lightning.pytorch import Callback


def callbacks_factory() -> list[Callback]:
    """Return the callbacks that a new ``Trainer`` gets without having asked for them.

    Environment variables:
        LIGHTNING_GPU_TOOLS_DISABLE: ``1`` switches the whole package off.
        LIGHTNING_GPU_TOOLS: ``advise`` adds the monitor and the advisor to every Trainer.
    """
    if is_disabled():
        return []
    callbacks: list[Callback] = []
    # A plugin can only exist where its module was imported, so this asks whether it was.
    checkpoint_io = sys.modules.get("lightning_gpu_tools.trainer.checkpoint_plugin")
    if checkpoint_io is not None:
        callbacks += checkpoint_io.introductions()
    if os.environ.get("LIGHTNING_GPU_TOOLS") == "advise":
        callbacks += _monitor_and_advisor()
    return callbacks


def _monitor_and_advisor() -> list[Callback]:
    try:
        from lightning_gpu_tools.trainer.gpu_utilization_advisor import GPUUtilizationAdvisor
        from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor

        monitor, advisor = GPUUtilizationMonitor(), GPUUtilizationAdvisor()
    except Exception as error:  # noqa: BLE001 - measuring was asked for from outside; it must never cost the training
        warnings.warn(f"LIGHTNING_GPU_TOOLS=advise has no effect: {error!r}", RuntimeWarning, stacklevel=2)
        return []
    monitor.yields = advisor.yields = True
    return [monitor, advisor]
