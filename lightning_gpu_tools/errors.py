"""Every exception and warning of the package.

There is one class per case that a caller would handle differently. Each carries its data as attributes and survives
pickling, because Lightning passes exceptions between spawned ranks. As text, none contains control characters except
line ends, whatever a file or a driver put into it; the attributes hold the original text.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.units import printable_lines


class LightningGpuToolsError(Exception):
    """Base class of all errors that this package raises on purpose."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NvmlUnavailableError(LightningGpuToolsError):
    """GPUs cannot be queried: the NVIDIA driver or its library is missing, unloaded or mismatched."""


class NotEnoughGpusError(LightningGpuToolsError):
    """Fewer GPUs passed the filters than were requested; the message has each reason once, with the GPUs.

    Attributes:
        requested: How many GPUs were requested.
        rejected: One sentence per GPU that was rejected, in PCI order.
    """

    def __init__(self, message: str, requested: int, rejected: Sequence[str] = ()) -> None:
        super().__init__(message, requested, tuple(rejected))
        self.requested = requested
        self.rejected = tuple(rejected)

    def __str__(self) -> str:
        return printable_lines(str(self.args[0]))


class ClaimsError(LightningGpuToolsError):
    """It is unknown which GPUs are claimed, because the folder that all users share is not usable."""


class ClaimsLockedError(ClaimsError):
    """Another process has locked that folder for long, so waiting may help."""


class UnknownOptionError(LightningGpuToolsError, TypeError):
    """A strategy got an option that neither it nor its Lightning base class has; the message lists the valid ones."""


class CudaAlreadyInitializedError(LightningGpuToolsError):
    """CUDA already read ``CUDA_VISIBLE_DEVICES``, so changing it no longer has any effect in this process."""


class CheckpointError(LightningGpuToolsError):
    """Base class of all checkpoint errors; the message names the file."""


class KeyCollisionError(CheckpointError):
    """Renaming would give two keys of a checkpoint the same name. Nothing was changed."""


class AmbiguousCheckpointError(CheckpointError):
    """Several sets of weights in the checkpoint fit the model equally well; the message names them."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint does not fit the model under any names, or what else it holds does not fit the Trainer.

    About a model, the message has the closest match and what remains.

    Attributes:
        missing: Keys of the model without a weight.
        unexpected: Keys of the checkpoint without a place.
    """

    def __init__(self, message: str, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(missing), tuple(unexpected))
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)

    def __str__(self) -> str:
        return printable_lines(str(self.args[0]))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class BrokenCheckpointError(CheckpointError):
    """The file is not a complete checkpoint: it is truncated, empty, or something else."""


class UnsafeCheckpointError(CheckpointError):
    """Opening the file would run code that ``weights_only=True`` refuses; the message names it."""


class LowGPUUtilizationWarning(UserWarning):
    """The GPU, or without one the training step, is often idle; the message says why and what to change."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class StalledTrainingWarning(UserWarning):
    """A training makes no progress; the message says since when, why, and what to do."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ReportError(LightningGpuToolsError):
    """A file is not a readable report of this package, or was written by a newer version."""
