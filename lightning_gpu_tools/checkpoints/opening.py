"""Opening a checkpoint file once for all uses."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lightning_gpu_tools.checkpoints.faults import Fault, faults_of
from lightning_gpu_tools.checkpoints.key_tree import listed
from lightning_gpu_tools.errors import CheckpointNotFoundError
from lightning_gpu_tools.files import local_copy
from lightning_gpu_tools.units import printable_path

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file, once for all uses: another may be at its path in the next moment."""
    with local_copy(path) as local:
        try:
            with faults_of(path):
                file = _open(local)
        except FileNotFoundError:
            no_folder = "" if Path(local).parent.is_dir() else " The folder does not exist either."
            raise CheckpointNotFoundError(f"Checkpoint file not found: {printable_path(path)}.{no_folder}") from None
        with file:
            yield file


def _open(path: str) -> BinaryIO:
    if os.path.isdir(path):
        inside = sorted(name for name in os.listdir(path) if name.endswith(SUFFIXES))
        if inside:
            raise Fault("is a folder", f"It holds {listed(inside, 5)}; name the file.")
        raise Fault("is a folder without the shards of a checkpoint", "Name a file, or the folder of all shards.")
    # Else opening a pipe waits until somebody writes to it.
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | without_waiting))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise Fault("is a pipe or a device, not a file")
