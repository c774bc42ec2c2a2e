"""Lightning callbacks and plugins for shared GPU servers.

Pick GPUs by free memory, log their utilization, find out why they are idle, and load checkpoints anywhere. The names
below are imported on first use (PEP 562), so ``import lightning_gpu_tools`` does not load torch, lightning, or pynvml.
Errors and warnings are in ``lightning_gpu_tools.errors``, strategies in ``.strategies``, and result types for
annotations in ``.types``.
"""

from lightning_gpu_tools.environment import VERSION as __version__
from lightning_gpu_tools.trainer.entry_points import register_strategies as _register_strategies

TYPE_CHECKING = False  # recognized by type checkers, without importing `typing`
if TYPE_CHECKING:
    from lightning_gpu_tools.checkpoints.weights import load_weights as load_weights
    from lightning_gpu_tools.errors import LightningGpuToolsError as LightningGpuToolsError
    from lightning_gpu_tools.loaders.search import find_loader_settings as find_loader_settings
    from lightning_gpu_tools.memory.free_memory import free_memory as free_memory
    from lightning_gpu_tools.reports.report import load_report as load_report
    from lightning_gpu_tools.selection.picking import list_gpus as list_gpus
    from lightning_gpu_tools.selection.picking import select_gpus as select_gpus
    from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO as PortableCheckpointIO
    from lightning_gpu_tools.trainer.exact_resume import ExactResume as ExactResume
    from lightning_gpu_tools.trainer.gpu_utilization import GPUUtilizationAdvisor as GPUUtilizationAdvisor
    from lightning_gpu_tools.trainer.gpu_utilization import GPUUtilizationMonitor as GPUUtilizationMonitor
    from lightning_gpu_tools.trainer.load_from_checkpoint import load_from_checkpoint as load_from_checkpoint
    from lightning_gpu_tools.trainer.num_workers_finder import NumWorkersFinder as NumWorkersFinder
    from lightning_gpu_tools.trainer.strategies import FreeMemoryCUDAAccelerator as FreeMemoryCUDAAccelerator
    from lightning_gpu_tools.trainer.watch import watch as watch

_MODULE_OF = {
    "ExactResume": "trainer.exact_resume",
    "FreeMemoryCUDAAccelerator": "trainer.strategies",
    "GPUUtilizationAdvisor": "trainer.gpu_utilization",
    "GPUUtilizationMonitor": "trainer.gpu_utilization",
    "LightningGpuToolsError": "errors",
    "NumWorkersFinder": "trainer.num_workers_finder",
    "PortableCheckpointIO": "trainer.checkpoint_plugin",
    "find_loader_settings": "loaders.search",
    "free_memory": "memory.free_memory",
    "list_gpus": "selection.picking",
    "load_from_checkpoint": "trainer.load_from_checkpoint",
    "load_report": "reports.report",
    "load_weights": "checkpoints.weights",
    "select_gpus": "selection.picking",
    "watch": "trainer.watch",
}

__all__ = ["__version__", *_MODULE_OF]


def _on_first_use(module: str, name: str, module_of: dict[str, str]) -> object:
    """Import a name from a submodule."""
    if name not in module_of:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{module_of[name]}"), name)


def __getattr__(name: str) -> object:
    return _on_first_use(__name__, name, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Trainer(strategy="ddp_free_memory") looks up the name in Lightning's registry before any entry points are loaded.
_register_strategies()
