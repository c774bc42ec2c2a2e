"""Result types for annotations. Each is imported on first use."""

from typing import TYPE_CHECKING

from lightning_gpu_tools import _on_first_use

if TYPE_CHECKING:
    from lightning_gpu_tools.advice.findings import Diagnosis as Diagnosis
    from lightning_gpu_tools.advice.findings import Finding as Finding
    from lightning_gpu_tools.checkpoints.weights import LoadReport as LoadReport
    from lightning_gpu_tools.gpus.readings import GpuClaim as GpuClaim
    from lightning_gpu_tools.gpus.readings import GpuProcess as GpuProcess
    from lightning_gpu_tools.gpus.readings import GpuReading as GpuReading
    from lightning_gpu_tools.memory.free_memory import FreedMemory as FreedMemory
    from lightning_gpu_tools.reports.report import Report as Report
    from lightning_gpu_tools.selection.picking import GpuSelection as GpuSelection
    from lightning_gpu_tools.trainer.watch import TrainingWatch as TrainingWatch
    from lightning_gpu_tools.training.run_measurements import LoaderResult as LoaderResult
    from lightning_gpu_tools.training.run_measurements import LoaderSettings as LoaderSettings
    from lightning_gpu_tools.training.run_measurements import LoaderTrial as LoaderTrial

_MODULE_OF = {
    "Diagnosis": "advice.findings",
    "Finding": "advice.findings",
    "FreedMemory": "memory.free_memory",
    "GpuClaim": "gpus.readings",
    "GpuProcess": "gpus.readings",
    "GpuReading": "gpus.readings",
    "GpuSelection": "selection.picking",
    "LoadReport": "checkpoints.weights",
    "LoaderResult": "training.run_measurements",
    "LoaderSettings": "training.run_measurements",
    "LoaderTrial": "training.run_measurements",
    "Report": "reports.report",
    "TrainingWatch": "trainer.watch",
}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> object:
    return _on_first_use(__name__, name, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
