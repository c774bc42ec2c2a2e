"""All exceptions and warnings of the package, one class for each case that a caller would handle differently.

All can be pickled, because Lightning passes exceptions between spawned ranks. Their text has no control characters
except newlines, even if it quotes a file or a driver.
"""

from collections.abc import Sequence

from lightning_gpu_tools.units import printable_lines


class _Message(Exception):
    def __str__(self) -> str:
        return printable_lines("".join(map(str, self.args[:1])))


class LightningGpuToolsError(_Message):
    """Base class of all errors that this package deliberately raises."""


class NvmlUnavailableError(LightningGpuToolsError):
    """The NVIDIA driver or its library is missing, not loaded, or mismatched."""


class NotEnoughGpusError(LightningGpuToolsError):
    """Fewer GPUs than ``requested`` qualify. ``rejected`` has a sentence for each rejected GPU, in PCI order."""

    def __init__(self, message: str, requested: int, rejected: Sequence[str] = ()) -> None:
        super().__init__(message, requested, tuple(rejected))
        self.requested = requested
        self.rejected = tuple(rejected)


class ClaimsError(LightningGpuToolsError):
    """The claims folder, which all users share, cannot be used."""


class ClaimsLockedError(ClaimsError):
    """Another process has locked the claims folder. Waiting may help."""


class CudaAlreadyInitializedError(LightningGpuToolsError):
    """CUDA has already started in this process, so changes to ``CUDA_VISIBLE_DEVICES`` have no effect."""


class CheckpointError(LightningGpuToolsError):
    """Base class of all checkpoint errors. The message contains the path of the file."""


class KeyCollisionError(CheckpointError):
    """Renaming would give two keys the same name. Nothing was changed."""


class AmbiguousCheckpointError(CheckpointError):
    """Several sets of weights in the checkpoint fit the model equally well."""


class CheckpointMismatchError(CheckpointError):
    """The weights do not fit the model under any key names, or the rest of the checkpoint does not fit the Trainer.

    ``missing`` and ``unexpected`` refer to the closest match. They are the model's keys without a weight, and the
    checkpoint's keys that the model does not have.
    """

    def __init__(self, message: str, missing: Sequence[str] = (), unexpected: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(missing), tuple(unexpected))
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint exists at the path. The message begins like Lightning's: "Checkpoint file not found"."""


class UnreachableError(CheckpointError, OSError):
    """A URL cannot be opened: its package is not installed, or its server does not answer or refuses."""


class BrokenCheckpointError(CheckpointError):
    """The file is truncated, empty, or not a checkpoint."""


class UnsafeCheckpointError(CheckpointError):
    """Opening the file would run code that ``weights_only=True`` refuses."""


class LowGPUUtilizationWarning(_Message, UserWarning):
    """The GPU is often idle (without a GPU: the training step)."""


class StalledTrainingWarning(_Message, UserWarning):
    """Training makes no progress."""


class ReportError(LightningGpuToolsError):
    """The file is not a report of this package, or comes from a newer version of it."""
