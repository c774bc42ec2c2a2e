"""Lightning callbacks and plugins for shared GPU servers.

Pick GPUs by free memory, log how busy they are, find out why they are idle, and load checkpoints anywhere. The names
below are imported on first use (PEP 562), so ``import lightning_gpu_tools`` loads neither torch nor lightning nor
pynvml.
"""

from lightning_gpu_tools.environment import VERSION as __version__
from lightning_gpu_tools.trainer.entry_points import register_strategies as _register_strategies

TYPE_CHECKING = False  # as type checkers take it, without the import of `typing`
if TYPE_CHECKING:
    from lightning_gpu_tools.advice.findings import Diagnosis, Finding
    from lightning_gpu_tools.advice.loader_plan import LoaderResult
    from lightning_gpu_tools.checkpoints.weights import LoadReport, load_weights
    from lightning_gpu_tools.errors import (
        AmbiguousCheckpointError,
        BrokenCheckpointError,
        CheckpointError,
        CheckpointMismatchError,
        CheckpointNotFoundError,
        ClaimsError,
        CudaAlreadyInitializedError,
        KeyCollisionError,
        LightningGpuToolsError,
        LowGPUUtilizationWarning,
        NotEnoughGpusError,
        NvmlUnavailableError,
        ReportError,
        StalledTrainingWarning,
        UnknownOptionError,
        UnsafeCheckpointError,
    )
    from lightning_gpu_tools.gpus.readings import GpuClaim, GpuProcess, GpuReading
    from lightning_gpu_tools.loaders.search import find_loader_settings
    from lightning_gpu_tools.reports.report import Report, load_report
    from lightning_gpu_tools.selection.picking import GpuSelection, list_gpus, select_gpus
    from lightning_gpu_tools.trainer.accelerator import FreeMemoryCUDAAccelerator
    from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO
    from lightning_gpu_tools.trainer.gpu_utilization_advisor import GPUUtilizationAdvisor
    from lightning_gpu_tools.trainer.gpu_utilization_monitor import GPUUtilizationMonitor
    from lightning_gpu_tools.trainer.load_from_checkpoint import load_from_checkpoint
    from lightning_gpu_tools.trainer.num_workers_finder import NumWorkersFinder
    from lightning_gpu_tools.trainer.strategies import (
        FreeMemoryDDPStrategy,
        FreeMemoryDeepSpeedStrategy,
        FreeMemoryFSDPStrategy,
        FreeMemoryStrategy,
    )
    from lightning_gpu_tools.trainer.watch import TrainingWatch, watch
    from lightning_gpu_tools.training.run_measurements import LoaderSettings

_MODULE_OF = {
    "FreeMemoryCUDAAccelerator": "trainer.accelerator",
    "GPUUtilizationAdvisor": "trainer.gpu_utilization_advisor",
    "GPUUtilizationMonitor": "trainer.gpu_utilization_monitor",
    "NumWorkersFinder": "trainer.num_workers_finder",
    "PortableCheckpointIO": "trainer.checkpoint_plugin",
    "TrainingWatch": "trainer.watch",
    "watch": "trainer.watch",
    "Diagnosis": "advice.findings",
    "Finding": "advice.findings",
    "AmbiguousCheckpointError": "errors",
    "BrokenCheckpointError": "errors",
    "CheckpointError": "errors",
    "CheckpointMismatchError": "errors",
    "CheckpointNotFoundError": "errors",
    "ClaimsError": "errors",
    "CudaAlreadyInitializedError": "errors",
    "KeyCollisionError": "errors",
    "LightningGpuToolsError": "errors",
    "LowGPUUtilizationWarning": "errors",
    "NotEnoughGpusError": "errors",
    "NvmlUnavailableError": "errors",
    "ReportError": "errors",
    "StalledTrainingWarning": "errors",
    "UnknownOptionError": "errors",
    "UnsafeCheckpointError": "errors",
    "LoaderResult": "advice.loader_plan",
    "LoaderSettings": "training.run_measurements",
    "find_loader_settings": "loaders.search",
    "GpuClaim": "gpus.readings",
    "GpuProcess": "gpus.readings",
    "GpuReading": "gpus.readings",
    "GpuSelection": "selection.picking",
    "list_gpus": "selection.picking",
    "select_gpus": "selection.picking",
    "FreeMemoryDDPStrategy": "trainer.strategies",
    "FreeMemoryDeepSpeedStrategy": "trainer.strategies",
    "FreeMemoryFSDPStrategy": "trainer.strategies",
    "FreeMemoryStrategy": "trainer.strategies",
    "LoadReport": "checkpoints.weights",
    "load_from_checkpoint": "trainer.load_from_checkpoint",
    "load_weights": "checkpoints.weights",
    "Report": "reports.report",
    "load_report": "reports.report",
}

__all__ = [
    "AmbiguousCheckpointError",
    "BrokenCheckpointError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ClaimsError",
    "CudaAlreadyInitializedError",
    "Diagnosis",
    "Finding",
    "FreeMemoryCUDAAccelerator",
    "FreeMemoryDDPStrategy",
    "FreeMemoryDeepSpeedStrategy",
    "FreeMemoryFSDPStrategy",
    "FreeMemoryStrategy",
    "GPUUtilizationAdvisor",
    "GPUUtilizationMonitor",
    "GpuClaim",
    "GpuProcess",
    "GpuReading",
    "GpuSelection",
    "KeyCollisionError",
    "LightningGpuToolsError",
    "LoadReport",
    "LoaderResult",
    "LoaderSettings",
    "LowGPUUtilizationWarning",
    "NotEnoughGpusError",
    "NumWorkersFinder",
    "NvmlUnavailableError",
    "PortableCheckpointIO",
    "Report",
    "ReportError",
    "StalledTrainingWarning",
    "TrainingWatch",
    "UnknownOptionError",
    "UnsafeCheckpointError",
    "__version__",
    "find_loader_settings",
    "list_gpus",
    "load_from_checkpoint",
    "load_report",
    "load_weights",
    "select_gpus",
    "watch",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Trainer(strategy="ddp_free_memory") looks the name up in Lightning's registry before it asks any entry point.
_register_strategies()
