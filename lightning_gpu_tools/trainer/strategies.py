"""Lightning's strategies on the GPUs with the most free memory, for each of its packages."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.errors import CudaAlreadyInitializedError, NotEnoughGpusError, UnknownOptionError
from lightning_gpu_tools.selection import placement
from lightning_gpu_tools.selection.ranking import OPTIONS, documented
from lightning_gpu_tools.trainer.accelerator import cuda_uuids, requested, why_no_cuda
from lightning_gpu_tools.trainer.families import FamilyStrategy, Root, adopt, bases_of


@documented
class _FreeMemory(FamilyStrategy):
    """A strategy that picks its GPUs, with the options of :func:`lightning_gpu_tools.select_gpus`.

    ``devices=[0, 1]`` means ``devices=2``, because a strategy cannot distinguish the two, unlike
    :class:`lightning_gpu_tools.FreeMemoryCUDAAccelerator`; other lists are respected and checked. With
    ``devices="auto"``, every visible GPU must qualify. A strategy belongs to the first Trainer or Fabric that uses it.

    Args:
        **kwargs: Options of Lightning's strategy.

    Raises:
        NotEnoughGpusError: Not enough GPUs qualify.
        ReportError: ``min_free="last"`` finds no report of a run on a GPU.
        TypeError: An option is unknown.
    """

    _wrapper: ClassVar[str | None] = None  # gets the options that Lightning's strategy does not have
    _runs_on_cpu: ClassVar[bool] = False
    _max_devices: ClassVar[int | None] = None

    def __init__(
        self,
        *,
        min_free: int | str | None = None,
        max_utilization: float | None = None,
        exclusive: bool = False,
        name: str | None = None,
        wait: float | str | None = None,
        claim: bool = True,
        **kwargs: Any,
    ) -> None:
        self._request = requested(
            min_free,
            max_utilization=max_utilization,
            exclusive=exclusive,
            name=name,
            wait=wait,
            claim=claim,
        )
        self._picked: list[torch.device] | None = None
        super().__init__(**kwargs)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine; picked when the ``Trainer`` sets them."""
        return self._picked

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and devices[0].type == "cuda":
            indices = [device.index for device in devices][: self._max_devices]
            is_count = indices == list(range(len(indices)))  # as when the Trainer was given a number
            placed = placement.place(len(indices) if is_count else indices, self._request, cuda_uuids)
            self._refuse_numbers(placed)
            devices = [torch.device("cuda", index) for index in placed]
        elif devices:
            name, accelerator, why = type(self).__name__, type(self.accelerator).__name__, why_no_cuda()
            if not self._runs_on_cpu:
                raise NotEnoughGpusError(
                    f"{name} picks CUDA GPUs, but this Trainer would run on the {accelerator}. {why} To train on the "
                    f"CPU, use Trainer(accelerator='cpu') without {name}.".replace("  ", " "),
                    requested=1,
                )
            if why:
                rank_zero_warn(f"{name} picks no GPU, and training runs on the {accelerator}. {why}")
        self._picked = devices

    def _refuse_numbers(self, indices: list[int]) -> None:
        """Raise an error for device indices that the strategy cannot use."""

    @override
    def _refuse_unknown(self, options: dict[str, Any]) -> None:
        # Lightning detects a misspelled option only when training starts, or never.
        bases = bases_of(type(self))
        if not bases:  # Lightning is not imported yet
            return
        known = {name for base in bases for name in inspect.signature(base).parameters} - {"kwargs"}
        if self._wrapper and not options.keys() <= known:
            known |= {*inspect.signature(pkgutil.resolve_name(self._wrapper)).parameters} - {"module"}
        for name in sorted(options.keys() - known):
            raise UnknownOptionError(
                f"{type(self).__name__} has no option {name!r} (got {name}={options[name]!r}). "
                f"It has {', '.join([*OPTIONS, *sorted(known)])}."
            )


class _FirstDevice(Root):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(device="cuda:0", **kwargs)  # type: ignore[call-arg]


class FreeMemoryStrategy(_FreeMemory, _FirstDevice):
    """Training on the single GPU with the most free memory, however many ``Trainer(devices=...)`` requests."""

    strategy_name = "free_memory"
    _max_devices = 1

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device  # type: ignore[safe-super]


class FreeMemoryDDPStrategy(_FreeMemory):
    """DDP on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` requests; plain DDP on the CPU."""

    strategy_name = "ddp_free_memory"
    _wrapper = "torch.nn.parallel:DistributedDataParallel"
    _runs_on_cpu = True


class FreeMemoryFSDPStrategy(_FreeMemory):
    """FSDP on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` requests."""

    strategy_name = "fsdp_free_memory"
    _wrapper = "torch.distributed.fsdp:FullyShardedDataParallel"


class FreeMemoryDeepSpeedStrategy(_FreeMemory):
    """DeepSpeed on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` requests."""

    strategy_name = "deepspeed_free_memory"

    @override
    def _refuse_numbers(self, indices: list[int]) -> None:
        if indices != list(range(len(indices))):
            raise CudaAlreadyInitializedError(
                f"DeepSpeed can only use the devices 0, 1, ..., but {indices} were picked. CUDA has already started in "
                "this process, so they cannot be renumbered. Create the Trainer before anything uses CUDA; even "
                "torch.cuda.is_available() can start it."
            )


adopt(FreeMemoryStrategy, "strategies", "SingleDeviceStrategy")
adopt(FreeMemoryDDPStrategy, "strategies", "DDPStrategy")
adopt(FreeMemoryFSDPStrategy, "strategies", "FSDPStrategy")
adopt(FreeMemoryDeepSpeedStrategy, "strategies", "DeepSpeedStrategy")
