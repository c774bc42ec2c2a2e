"""The entry points of this package for Lightning.

Lightning calls the factories for every Trainer and Fabric in the environment and catches no errors, so a failed import
becomes a warning. ``import lightning_gpu_tools`` runs this file, so it imports as little as possible.
"""

from __future__ import annotations

import os
import sys

from lightning_gpu_tools.environment import is_disabled
from lightning_gpu_tools.trainer.import_hooks import only_warn, when_imported

TYPE_CHECKING = False  # true for type checkers, without an import of `typing`
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from lightning_gpu_tools.trainer.families import Callback

_STRATEGIES = {
    "free_memory": "FreeMemoryStrategy",
    "ddp_free_memory": "FreeMemoryDDPStrategy",
    "fsdp_free_memory": "FreeMemoryFSDPStrategy",
    "deepspeed_free_memory": "FreeMemoryDeepSpeedStrategy",
}
_warned: set[str] = set()  # values of the variable already warned about, or "Fabric"


def callbacks_factory() -> list[Callback]:
    """Return the callbacks of a new ``Trainer``: with ``LIGHTNING_GPU_TOOLS=advise``, the monitor and the advisor."""
    if is_disabled():
        return []
    callbacks: list[Callback] = []
    # Without this module there is no plugin.
    module = sys.modules.get("lightning_gpu_tools.trainer.checkpoint_plugin")
    if module is not None and module.plugins:
        callbacks.append(module.PortableCheckpointHooks())
    if _advises():
        try:
            from lightning_gpu_tools.trainer.gpu_utilization import GPUUtilizationAdvisor, GPUUtilizationMonitor
        except Exception as error:  # noqa: BLE001 - the program may not even use this package
            only_warn(
                f"LIGHTNING_GPU_TOOLS=advise has no effect: {error!r}. Is lightning_gpu_tools installed completely?"
            )
            return callbacks
        monitor, advisor = GPUUtilizationMonitor(), GPUUtilizationAdvisor()
        monitor.yields = advisor.yields = True
        callbacks += [monitor, advisor]
    return callbacks


def fabric_callbacks_factory() -> list[Any]:
    """Return no callbacks; warn once if any are requested."""
    if _advises() and not is_disabled() and "Fabric" not in _warned:
        _warned.add("Fabric")
        only_warn(
            "LIGHTNING_GPU_TOOLS=advise has no effect on Fabric, which does not run the training loop. Wrap the loop "
            "in `with lightning_gpu_tools.watch(fabric) as run:`."
        )
    return []


def _advises() -> bool:
    value = os.environ.get("LIGHTNING_GPU_TOOLS", "")
    if value not in ("", "0", "advise", *_warned):
        from lightning_utilities.core.rank_zero import rank_zero_only

        from lightning_gpu_tools.units import printable

        _warned.add(value)
        rank_zero_only(only_warn)(
            f"LIGHTNING_GPU_TOOLS={printable(value)!r} has no effect. Set LIGHTNING_GPU_TOOLS=advise for a report on "
            "every Trainer, or unset it."
        )
    return value == "advise"


def register_strategies() -> None:
    """Register the names of the strategies with Lightning; they are imported when one is requested."""
    when_imported("strategies", _register)


def _register(strategies: ModuleType) -> None:
    import functools

    registry = strategies.STRATEGY_REGISTRY if "fabric" in strategies.__name__ else strategies.StrategyRegistry
    for name, strategy in _STRATEGIES.items():
        make = functools.partial(_make, strategy)
        # The package may be imported again, as in a notebook.
        registry.register(name, make, description="On the GPUs with the most free memory.", override=True)


def _make(strategy: str, **options: Any) -> Any:
    import importlib

    return getattr(importlib.import_module("lightning_gpu_tools.trainer.strategies"), strategy)(**options)
