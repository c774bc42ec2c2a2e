"""The strategies. Importing this module registers ``"ddp_free_memory"`` etc. with Lightning."""

from lightning_gpu_tools.trainer.strategies import (
    FreeMemoryDDPStrategy,
    FreeMemoryDeepSpeedStrategy,
    FreeMemoryFSDPStrategy,
    FreeMemoryStrategy,
)

__all__ = ["FreeMemoryDDPStrategy", "FreeMemoryDeepSpeedStrategy", "FreeMemoryFSDPStrategy", "FreeMemoryStrategy"]
