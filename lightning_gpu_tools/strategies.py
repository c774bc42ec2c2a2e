"""The strategies by the name that other programs import; Lightning knows ``"ddp_free_memory"`` and the like then."""

from __future__ import annotations

from lightning_gpu_tools.trainer.strategies import (
    FreeMemoryDDPStrategy,
    FreeMemoryDeepSpeedStrategy,
    FreeMemoryFSDPStrategy,
    FreeMemoryStrategy,
)

__all__ = ["FreeMemoryDDPStrategy", "FreeMemoryDeepSpeedStrategy", "FreeMemoryFSDPStrategy", "FreeMemoryStrategy"]
