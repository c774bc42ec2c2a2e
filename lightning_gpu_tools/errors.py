"""Every exception and warning of the package: one class per case that a caller would handle differently.

Each survives pickling, because Lightning passes exceptions between spawned ranks. As text, none contains control
characters but line ends, whatever a file or a driver put into it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.units import printable_lines


class _Message(Exception):
    def __str__(self) -> str:
        return printable_lines("".join(map(str, self.args[:1])))


class LightningGpuToolsError(_Message):
    """Base class of all errors that this package raises on purpose."""


class NvmlUnavailableError(LightningGpuToolsError):
    """The NVIDIA driver or its library is missing, unloaded or mismatched."""


class NotEnoughGpusError(LightningGpuToolsError):
    """Fewer GPUs than ``requested`` qualify; ``rejected`` has a sentence for each that does not, in PCI order."""

    def __init__(self, message: str, requested: int, rejected: Sequence[str] = ()) -> None:
        super().__init__(message, requested, tuple(rejected))
        self.requested = requested
        self.rejected = tuple(rejected)


class ClaimsError(LightningGpuToolsError):
    """The folder of claims that all users share is not usable."""


class ClaimsLockedError(ClaimsError):
    """Another process has locked that folder, so waiting may help."""


class UnknownOptionError(LightningGpuToolsError, TypeError):
    """A strategy got an option that neither it nor Lightning's has; the message lists the valid ones."""


class CudaAlreadyInitializedError(LightningGpuToolsError):
    """CUDA has already started in this process, so changing ``CUDA_VISIBLE_DEVICES`` has no effect."""


class CheckpointError(LightningGpuToolsError):
    """Base class of all checkpoint errors; the message names the file."""


class KeyCollisionError(CheckpointError):
    """Renaming would give two keys the same name. Nothing was changed."""


class AmbiguousCheckpointError(CheckpointError):
    """Several sets of weights in the checkpoint fit the model equally well."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint does not fit the model under any names, or what else it holds does not fit the Trainer.

    After the closest match, ``missing`` are the model's keys without a weight, ``unexpected`` those of the checkpoint
    without a place.
    """

    def __init__(self, message: str, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(missing), tuple(unexpected))
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path. The message begins as Lightning's own: "Checkpoint file not found"."""


class BrokenCheckpointError(CheckpointError):
    """The file is truncated, empty, or not a checkpoint."""


class UnsafeCheckpointError(CheckpointError):
    """Opening the file would run code that ``weights_only=True`` refuses."""


class LowGPUUtilizationWarning(_Message, UserWarning):
    """The GPU, or without one the training step, is often idle."""


class StalledTrainingWarning(_Message, UserWarning):
    """A training makes no progress."""


class ReportError(LightningGpuToolsError):
    """The file is not a report of this package, or one of a newer version."""
