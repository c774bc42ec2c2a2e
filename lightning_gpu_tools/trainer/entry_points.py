"""What Lightning finds of this package by itself.

It calls the factories for every Trainer and Fabric of the environment and catches nothing. So this module imports
nothing heavy, and what goes wrong is a warning.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.trainer.families import Callback, only_warn, when_imported

_STRATEGIES = {
    "free_memory": "FreeMemoryStrategy",
    "ddp_free_memory": "FreeMemoryDDPStrategy",
    "fsdp_free_memory": "FreeMemoryFSDPStrategy",
    "deepspeed_free_memory": "FreeMemoryDeepSpeedStrategy",
}


def callbacks_factory() -> list[Callback]:
    """Return what every new ``Trainer`` gets: with ``LIGHTNING_GPU_TOOLS=advise`` the monitor and the advisor."""
    if is_disabled():
        return []
    callbacks: list[Callback] = []
    # Without this module there is no plugin.
    plugins = sys.modules.get("lightning_gpu_tools.trainer.checkpoint_plugin")
    if plugins is not None:
        lost = "PortableCheckpointIO does not rename keys to fit the model"
        callbacks += _or_warn(lost, lambda: plugins.introductions())
    if _advises():
        callbacks += _or_warn("LIGHTNING_GPU_TOOLS=advise has no effect", _monitor_and_advisor)
    return callbacks


def fabric_callbacks_factory() -> list[Any]:
    """Return no callbacks; warn, once, if some are asked for."""
    if _advises() and not is_disabled():
        _warn_of_fabric()
    return []


def _advises() -> bool:
    return os.environ.get("LIGHTNING_GPU_TOOLS") == "advise"


@functools.cache
def _warn_of_fabric() -> None:
    only_warn(
        "LIGHTNING_GPU_TOOLS=advise has no effect on Fabric, which does not run the training loop. Put the loop into "
        "`with lightning_gpu_tools.watch(fabric) as run:`."
    )


def register_strategies() -> None:
    """Give Lightning the names of the strategies, which are imported when one is asked for."""
    when_imported("strategies", _register)


def _monitor_and_advisor() -> list[Callback]:
    from lightning_gpu_tools.trainer.gpu_utilization_advisor import GPUUtilizationAdvisor
    from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor

    monitor, advisor = GPUUtilizationMonitor(), GPUUtilizationAdvisor()
    monitor.yields = advisor.yields = True
    return [monitor, advisor]


def _register(strategies: ModuleType) -> None:
    registry = strategies.STRATEGY_REGISTRY if "fabric" in strategies.__name__ else strategies.StrategyRegistry
    for name, strategy in _STRATEGIES.items():
        make = functools.partial(_make, strategy)
        # The package may be imported again, as in a notebook.
        registry.register(name, make, description="On the GPUs with the most free memory.", override=True)


def _make(strategy: str, **options: Any) -> Any:
    return getattr(importlib.import_module("lightning_gpu_tools.trainer.strategies"), strategy)(**options)


def _or_warn(consequence: str, act: Callable[[], list[Callback]]) -> list[Callback]:
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - the program may not even use this package
        only_warn(f"{consequence}: {error!r}. Is lightning_gpu_tools installed completely?")
        return []
