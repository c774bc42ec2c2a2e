"""Lightning's CUDA accelerator on the GPUs with the most free memory."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.reports.last_run import last_need
from lightning_gpu_tools.runs.run_gpus import gpu_readings
from lightning_gpu_tools.selection import placement
from lightning_gpu_tools.selection.picking import list_gpus
from lightning_gpu_tools.selection.ranking import LAST_RUN, Request, documented
from lightning_gpu_tools.selection.visibility import visible_gpus, why_fewer
from lightning_gpu_tools.trainer.families import CUDAAccelerator, front_of
from lightning_gpu_tools.trainer.import_hooks import when_imported


@documented
class FreeMemoryCUDAAccelerator(CUDAAccelerator):
    """An accelerator that picks the GPUs with the most free memory, and claims them for the lifetime of the job.

    It picks idle GPUs before busy ones, then those with the most free memory, within ``CUDA_VISIBLE_DEVICES``, and
    respects the claims of others. All processes of the job on this machine (children of DDP, ranks of torchrun, SLURM
    and MPI, the next ``Trainer``) get the same GPUs. If ``CUDA_VISIBLE_DEVICES`` lists exactly as many GPUs as
    ``devices`` requests, as under a scheduler, these are used.

    In ``Trainer(devices=...)``, a number requests that many GPUs, and a list requests those, if they qualify. ``-1`` or
    ``"auto"`` requests all that qualify or, if ``CUDA_VISIBLE_DEVICES`` is set, all that it lists. Unlike the
    strategies, it has no registered name: with one device, Lightning would train on the CPU.

    The options are those of :func:`lightning_gpu_tools.select_gpus`.

    Raises:
        ReportError: ``min_free="last"`` finds no report of a run on a GPU.
        ValueError: An option is out of range.

    Example::

        trainer = Trainer(accelerator=FreeMemoryCUDAAccelerator(min_free="8GiB"), devices=2, strategy="ddp")
    """

    _request = Request()

    def __init__(
        self,
        *,
        min_free: int | str | None = None,
        max_utilization: float | None = None,
        exclusive: bool = False,
        name: str | None = None,
        wait: float | str | None = None,
        claim: bool = True,
    ) -> None:
        super().__init__()
        type(self)._request = requested(
            min_free,
            max_utilization=max_utilization,
            exclusive=exclusive,
            name=name,
            wait=wait,
            claim=claim,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (front_of(type(self)), self._request), vars(self)

    @classmethod
    @override
    def parse_devices(cls, devices: int | str | list[int]) -> list[int] | None:
        count = _count(devices)
        wanted = super().parse_devices(devices) or [] if count is None else count
        placed = placement.place(wanted, cls._request, cuda_uuids)
        return placed if placed == [0] and placement.count_devices() else super().parse_devices(placed)

    @classmethod
    @override
    def auto_device_count(cls) -> int:
        return placement.how_many(cls._request)

    @classmethod
    @override
    def is_available(cls) -> bool:
        is_available = placement.count_devices() > 0
        if not is_available:
            rank_zero_warn(f"{cls.__name__} finds no GPU. {why_no_cuda()}")  # Lightning's error gives no reason
        return is_available


when_imported("accelerators.cuda", lambda module: module.CUDAAccelerator.register(FreeMemoryCUDAAccelerator))


def requested(min_free: int | str | None, **options: Any) -> Request:
    """Return the request for these options; for ``min_free="last"``, log the size and its run."""
    if min_free == LAST_RUN:
        need = last_need(os.curdir, sys.argv[:1])
        min_free = need.min_free_bytes
        rank_zero_info(need.origin)
    return Request(min_free=min_free, **options)


def _unpickled(cls: type[FreeMemoryCUDAAccelerator], request: Request) -> FreeMemoryCUDAAccelerator:
    accelerator = cls.__new__(cls)
    type(accelerator)._request = request
    return accelerator


def _count(devices: int | str | list[int]) -> int | None:
    """Return the number of requested devices, -1 for all; ``None`` if they are listed."""
    if isinstance(devices, str):
        text = devices.strip()
        return int(text) if text == "-1" or text.isdecimal() else None
    return devices if isinstance(devices, int) and not isinstance(devices, bool) else None


def cuda_uuids() -> list[str]:
    """Return the driver's UUIDs of CUDA's devices."""
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return [str(gpu.uuid) for gpu in gpu_readings(devices)]


def why_no_cuda() -> str:
    """Return why PyTorch cannot use a GPU and what to do, as sentences; empty if it can."""
    if placement.count_devices():
        return ""
    if torch.version.cuda is None:
        return f"This PyTorch ({torch.__version__}) was built without CUDA; see https://pytorch.org/get-started."
    try:
        gpus = list_gpus()
    except NvmlUnavailableError as error:
        return str(error)
    if not gpus:
        return "The NVIDIA driver lists no GPU."
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible_gpus(gpus, mask, "PCI_BUS_ID", list):
        return f"CUDA_VISIBLE_DEVICES={mask!r} shows none: {why_fewer(gpus, mask or '')}. Correct it, or unset it."
    return "CUDA cannot start, although the driver lists GPUs. Run `python -c 'import torch; torch.cuda.init()'`."
