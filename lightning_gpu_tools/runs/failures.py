"""Facts that an error does not include: dead workers, and the index of a sample."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import FrameType

from lightning_gpu_tools.advice.failures import (
    Failure,
    WorkerExit,
    failure_of_dataset,
    failure_of_workers,
    not_picklable,
)
from lightning_gpu_tools.host import shared_memory_bytes
from lightning_gpu_tools.loaders.workers import OF_LIVING_WORKERS, wait_for_exit_codes
from lightning_gpu_tools.runs.run import Run
from lightning_gpu_tools.training import compat


def worker_exits(run: Run, error: BaseException) -> list[WorkerExit]:
    """Return the dead workers of the loader that raised an error, or of the training loader."""
    workers = compat.workers(compat.iterator_waited_for(_frames(error)) or run.iterator)
    text = str(error)
    may_be_of_workers = "DataLoader worker" in text or isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    if may_be_of_workers and workers and not any(words in text for words in OF_LIVING_WORKERS):
        wait_for_exit_codes(workers)
    exits = [WorkerExit(i, one.pid or 0, one.exitcode) for i, one in enumerate(workers) if one.exitcode is not None]
    return [one for one in exits if one.exitcode or "exited unexpectedly" in text]


def failure_of(error: BaseException, exits: Sequence[WorkerExit], oom_kills: int) -> Failure | None:
    """Return the failure that ended training, if known beyond its error."""
    frames, shm_bytes = _frames(error), shared_memory_bytes()
    # Only "dump": code in the same file that receives tensors from a worker fails if the worker has died.
    codes = [frame.f_code for frame in frames]
    is_pickling = any(c.co_name == "dump" and c.co_filename.endswith("multiprocessing/reduction.py") for c in codes)
    if is_pickling and any("torch/utils/data/" in code.co_filename for code in codes):
        return not_picklable(str(error))
    dead = failure_of_workers(exits, oom_kills, shm_bytes)
    return dead or failure_of_dataset(str(error), compat.index_of(frames), shm_bytes)


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
