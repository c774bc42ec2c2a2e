"""Lightning's strategies on the GPUs with the most free memory. Importing this module registers their names.

``Trainer(strategy="ddp_free_memory", devices=2)``, or with options ``Trainer(strategy=FreeMemoryDDPStrategy(...))``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_gpu_tools.errors import CudaAlreadyInitializedError, NotEnoughGpusError, UnknownOptionError
from lightning_gpu_tools.selection.affinity import bind_to_gpus
from lightning_gpu_tools.selection.picking import Request
from lightning_gpu_tools.trainer.accelerator import cuda_uuids, place_devices

# Lightning shows what its own loggers say from INFO on.
_log = logging.getLogger("lightning.pytorch.lightning_gpu_tools")

if TYPE_CHECKING:
    _Base = Strategy
else:
    _Base = object  # the strategies to which it is added have bases of their own


class _FreeMemory(_Base):
    """The options with which a strategy picks its GPUs, and the picking for strategies with several devices.

    ``devices=[0, 1]`` means 2 here, because a strategy cannot tell the two apart; other lists are respected and
    checked. :class:`lightning_gpu_tools.FreeMemoryCUDAAccelerator` can tell them apart. With ``devices="auto"`` every
    visible GPU has to qualify.

    Args:
        min_free: Memory that each GPU must have free, such as ``"8GiB"`` or bytes; see
            :func:`lightning_gpu_tools.select_gpus`, also for the others.
        max_utilization: Highest utilization in percent that each may have.
        exclusive: Whether nobody else may be on them.
        wait: For how long to wait for them, such as ``"10m"`` or seconds; ``None``: do not wait.
        claim: Whether to claim them.
        bind_numa: Whether to keep each process on the CPU cores near its GPU (Linux).
        **kwargs: Those of Lightning's strategy.

    Raises:
        NotEnoughGpusError: Not enough GPUs qualify.
        TypeError: An option is unknown.
    """

    # Who takes the options that this class does not.
    _takers: ClassVar[tuple[Callable[..., None], ...]]
    _parallel_devices: list[torch.device] | None = None

    def __init__(
        self,
        min_free: int | str | None = None,
        max_utilization: float | None = None,
        exclusive: bool = False,
        wait: float | str | None = None,
        claim: bool = True,
        bind_numa: bool = False,
        **kwargs: Any,
    ) -> None:
        # Lightning would find misspelt options only when the training starts, or never.
        known = {name for taker in self._takers for name in inspect.signature(taker).parameters}
        known -= {"self", "kwargs", "module"}
        for name in sorted(kwargs.keys() - known):
            options = [*inspect.signature(_FreeMemory).parameters][:-1]
            raise UnknownOptionError(
                f"{type(self).__name__} has no option {name!r} (got {name}={kwargs[name]!r}). It has "
                f"{', '.join([*options, *sorted(known)])}."
            )
        self._request = Request.parse(1, min_free, max_utilization, exclusive, wait, claim)
        self._bind_numa = bind_numa
        super().__init__(**kwargs)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine that the job trains on; picked when the ``Trainer`` sets them."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and devices[0].type == "cuda":
            devices = self._pick(devices, len(devices))
        self._parallel_devices = devices

    @override
    def setup_environment(self) -> None:
        """Set the process up as Lightning does, and keep it near its GPU if asked to."""
        super().setup_environment()
        if self._bind_numa:
            _bind(self)

    def _pick(self, devices: list[torch.device], count: int) -> list[torch.device]:
        """Return the devices to use instead of those that the Trainer gives, which are 0, 1, ... if it is a number."""
        indices = [device.index for device in devices]
        placed = place_devices(count if indices == list(range(len(indices))) else indices, self._request)
        return devices if placed is None else [torch.device("cuda", index) for index in placed]


class FreeMemoryStrategy(_FreeMemory, SingleDeviceStrategy):
    """Trains on the one GPU with the most free memory, however many ``Trainer(devices=...)`` asks for."""

    strategy_name = "free_memory"
    _takers = (SingleDeviceStrategy.__init__,)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(device="cuda:0", **kwargs)

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, in a list; picked when the ``Trainer`` sets it."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if not devices or devices[0].type != "cuda":
            raise _needs_cuda(self)
        self._parallel_devices = self._pick(devices, count=1)[:1]
        self._root_device = self._parallel_devices[0]


class FreeMemoryDDPStrategy(_FreeMemory, DDPStrategy):
    """DDP on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` asks for; on the CPU plain DDP."""

    strategy_name = "ddp_free_memory"
    _takers = (DDPStrategy.__init__, DistributedDataParallel.__init__)


class FreeMemoryFSDPStrategy(_FreeMemory, FSDPStrategy):
    """FSDP on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` asks for."""

    strategy_name = "fsdp_free_memory"
    _takers = (FSDPStrategy.__init__, FullyShardedDataParallel.__init__)

    @override
    def _configure_launcher(self) -> None:
        # Lightning checks this by the exact type FSDPStrategy, which a subclass is not.
        if not isinstance(self.accelerator, CUDAAccelerator):
            raise _needs_cuda(self)
        super()._configure_launcher()


class FreeMemoryDeepSpeedStrategy(_FreeMemory, DeepSpeedStrategy):
    """DeepSpeed on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` asks for."""

    strategy_name = "deepspeed_free_memory"
    _takers = (DeepSpeedStrategy.__init__,)

    @override
    def _configure_launcher(self) -> None:
        indices = [device.index for device in self.parallel_devices or ()]
        if indices != list(range(len(indices))):
            raise CudaAlreadyInitializedError(
                f"DeepSpeed can only use the devices 0, 1, ..., and CUDA has started in this process, so that the "
                f"devices picked, {indices}, cannot be renumbered any more. Create the Trainer before anything uses "
                f"CUDA, which torch.cuda.is_available() may count as."
            )
        super()._configure_launcher()


def _bind(strategy: Any) -> None:  # SingleDeviceStrategy and the others have no base in common that has ranks
    devices = strategy.parallel_devices
    if devices[0].type == "cuda":
        device = devices[strategy.local_rank]
        cores = bind_to_gpus([cuda_uuids()[device.index]])
        _log.info("Rank %d: %s.", strategy.global_rank, f"on cores {sorted(cores)}" if cores else "cores left as is")


def _needs_cuda(strategy: Strategy) -> NotEnoughGpusError:
    name = type(strategy).__name__
    return NotEnoughGpusError(
        f"{name} picks CUDA GPUs, but this Trainer would run on the {type(strategy.accelerator).__name__}: is there a "
        f"GPU that PyTorch can use here? To train on the CPU, say Trainer(accelerator='cpu') without {name}.",
        requested=1,
    )


for _strategy in (FreeMemoryStrategy, FreeMemoryDDPStrategy, FreeMemoryFSDPStrategy, FreeMemoryDeepSpeedStrategy):
    # Overriding, so that the module can be imported again, in a notebook for example.
    StrategyRegistry.register(
        _strategy.strategy_name, _strategy, description="On the GPUs with the most free memory.", override=True
    )
