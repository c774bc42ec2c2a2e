"""Every exception and warning of the package.

One class for each thing a caller would handle differently. Each carries its data as attributes and survives pickling,
because Lightning passes exceptions between spawned ranks. Shown as text, none holds a control character but line ends,
whatever a file or a driver has put into it; the attributes hold the text as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.units import printable_lines


class LightningGpuToolsError(Exception):
    """Base of all errors that this package raises on purpose."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NvmlUnavailableError(LightningGpuToolsError):
    """No GPU can be asked about: the NVIDIA driver or its library is missing, unloaded or mismatched."""


class NotEnoughGpusError(LightningGpuToolsError):
    """Fewer GPUs passed the filters than were asked for.

    Attributes:
        requested: How many GPUs were asked for.
        rejected: One sentence for each GPU that was looked at and cannot be used, in PCI order.
    """

    def __init__(self, message: str, requested: int, rejected: Sequence[str] = ()) -> None:
        super().__init__(message, requested, tuple(rejected))
        self.requested = requested
        self.rejected = tuple(rejected)

    def __str__(self) -> str:
        return printable_lines("\n  ".join([str(self.args[0]), *self.rejected]))


class ClaimsError(LightningGpuToolsError):
    """It cannot be told which GPUs are claimed: the folder that all users share cannot be used."""


class UnknownOptionError(LightningGpuToolsError, TypeError):
    """A strategy was given an option that neither it nor Lightning's strategy below it has; the message lists them."""


class CudaAlreadyInitializedError(LightningGpuToolsError):
    """CUDA has read ``CUDA_VISIBLE_DEVICES`` already, so changing it has no effect in this process any more."""


class CheckpointError(LightningGpuToolsError):
    """Base of everything that is wrong with a checkpoint; the message names the file."""


class KeyCollisionError(CheckpointError):
    """Two keys of a checkpoint would get the same name. Nothing was changed."""


class AmbiguousCheckpointError(CheckpointError):
    """Several sets of weights in the checkpoint fit the model equally well; the message names them."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint does not fit the model under any names, or what else it holds does not fit the Trainer.

    About a model, the message gives the nearest reading and what is left over.

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
    """There is no file at the path."""


class BrokenCheckpointError(CheckpointError):
    """The file is not a complete checkpoint: cut short, empty, or something else altogether."""


class UnsafeCheckpointError(CheckpointError):
    """Opening the file would run code that ``weights_only=True`` refuses; the message names what."""


class LowGPUUtilizationWarning(UserWarning):
    """The training step spends much of its time waiting; the message says for what and what to change."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ReportError(LightningGpuToolsError):
    """A file is not a report of this package, or one of a newer version."""
