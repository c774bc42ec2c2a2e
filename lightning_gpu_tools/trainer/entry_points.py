"""What Lightning finds of this package by itself: callbacks for every ``Trainer``, and the names of strategies.

Lightning calls ``callbacks_factory`` for every Trainer of every program in the environment (entry point
``lightning.pytorch.callbacks_factory``). It neither asks first nor catches what goes wrong. So this module imports
nothing heavy, and whatever goes wrong in what it calls is a warning.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_gpu_tools.environment import is_disabled

if TYPE_CHECKING:
    from lightning.pytorch import Callback

_STRATEGIES = {
    "free_memory": "FreeMemoryStrategy",
    "ddp_free_memory": "FreeMemoryDDPStrategy",
    "fsdp_free_memory": "FreeMemoryFSDPStrategy",
    "deepspeed_free_memory": "FreeMemoryDeepSpeedStrategy",
}


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
    plugins = sys.modules.get("lightning_gpu_tools.trainer.checkpoint_plugin")
    if plugins is not None:
        lost = "PortableCheckpointIO does not rename keys to fit the model"
        callbacks += _or_warn(lost, lambda: plugins.introductions())
    if os.environ.get("LIGHTNING_GPU_TOOLS") == "advise":
        callbacks += _or_warn("LIGHTNING_GPU_TOOLS=advise has no effect", _monitor_and_advisor)
    return callbacks


def register_strategies() -> None:
    """Let ``Trainer(strategy="ddp_free_memory")`` find the strategies, which are imported when one is asked for."""
    _or_warn('The names of strategies ("ddp_free_memory", ...) are not registered', _register)


def _monitor_and_advisor() -> list[Callback]:
    from lightning_gpu_tools.trainer.gpu_utilization_advisor import GPUUtilizationAdvisor
    from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor

    monitor, advisor = GPUUtilizationMonitor(), GPUUtilizationAdvisor()
    monitor.yields = advisor.yields = True
    return [monitor, advisor]


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    for name, strategy in _STRATEGIES.items():
        # Overriding, so that the package can be imported again, in a notebook for example.
        StrategyRegistry.register(
            name,
            functools.partial(_make, strategy),
            description="On the GPUs with the most free memory.",
            override=True,
        )


def _make(strategy: str, **options: Any) -> Any:
    return getattr(importlib.import_module("lightning_gpu_tools.trainer.strategies"), strategy)(**options)


def _or_warn(consequence: str, act: Callable[[], list[Callback] | None]) -> list[Callback]:
    try:
        return act() or []
    except Exception as error:  # noqa: BLE001 - whatever it is, a Trainer that may not even use the package goes on
        warnings.warn(f"{consequence}: {error!r}. Is lightning_gpu_tools installed completely?", stacklevel=3)
        return []
