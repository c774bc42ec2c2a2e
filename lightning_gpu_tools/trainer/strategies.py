"""Lightning's accelerator and strategies on the GPUs with the most free memory, for each of its packages."""

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gpu_tools.errors import CudaAlreadyInitializedError, NotEnoughGpusError, NvmlUnavailableError
from lightning_gpu_tools.reports.last_run import last_need
from lightning_gpu_tools.runs.run_gpus import gpu_readings
from lightning_gpu_tools.selection import placement
from lightning_gpu_tools.selection.cuda import few_visible, visible_gpus
from lightning_gpu_tools.selection.picking import list_gpus
from lightning_gpu_tools.selection.ranking import LAST_RUN, Request, documented
from lightning_gpu_tools.trainer.families import CUDAAccelerator, Strategy, family_of, front_of, subclass
from lightning_gpu_tools.trainer.import_hooks import when_imported

# By a Trainer and a Fabric, before they set any attribute.
_READ_FIRST = ("_accelerator", "_precision_plugin", "_precision", "_checkpoint_io", "cluster_environment")


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
        type(self)._request = _requested(Request(1, min_free, max_utilization, exclusive, name, wait, claim))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_accelerator, (front_of(type(self)), self._request), vars(self)

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


def _requested(request: Request) -> Request:
    """Return a request whose options are valid; for ``min_free="last"``, log the size and its run."""
    if request.min_free == LAST_RUN:
        min_free, origin = last_need(os.curdir, sys.argv[:1])
        rank_zero_info(origin)
        request = request._replace(min_free=min_free)
    return request.checked()


def _unpickled_accelerator(cls: type[FreeMemoryCUDAAccelerator], request: Request) -> FreeMemoryCUDAAccelerator:
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
    if mask is not None and not visible_gpus(gpus, mask):
        return few_visible(gpus, mask)
    return "CUDA cannot start, although the driver lists GPUs. Run `python -c 'import torch; torch.cuda.init()'`."


@documented
class _FreeMemory(Strategy):
    """A strategy that picks its GPUs, with the options of :func:`lightning_gpu_tools.select_gpus`.

    ``devices=[0, 1]`` means ``devices=2``, because a strategy cannot distinguish the two, unlike
    :class:`lightning_gpu_tools.FreeMemoryCUDAAccelerator`; other lists are respected and checked. With
    ``devices="auto"``, every visible GPU must qualify. A strategy belongs to the first Trainer or Fabric that uses it;
    before, it has none of the attributes of Lightning's strategy.

    Args:
        **kwargs: Options of Lightning's strategy.

    Raises:
        NotEnoughGpusError: Not enough GPUs qualify.
        ReportError: ``min_free="last"`` finds no report of a run on a GPU.
    """

    base_name: ClassVar[str]  # of Lightning's strategy, which becomes a base once a Trainer or a Fabric takes it
    _family: ClassVar[str | None] = None  # of that Trainer or Fabric
    _runs_on_cpu: ClassVar[bool] = False
    _max_devices: ClassVar[int | None] = None
    _fixed: ClassVar[dict[str, Any]] = {}  # options that the user does not choose

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
        self._request = _requested(Request(1, min_free, max_utilization, exclusive, name, wait, claim))
        self._picked: list[torch.device] | None = None
        self._options = {**self._fixed, **kwargs}

    def __setattr__(self, name: str, value: Any) -> None:
        # Set early, and always of the family that takes the strategy, unlike the accelerator, which is set earlier.
        if name in ("precision_plugin", "precision") and self._family is None:
            self._join(str(family_of(value)))
        super().__setattr__(name, value)

    def _join(self, family: str) -> None:
        accelerator = vars(self).pop("accelerator", None)  # now a property, of Lightning's strategy
        self.__class__ = _of_family(type(self), family)
        super().__init__(**self._options)
        self.accelerator = accelerator

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(2)
        if self._family is None:
            return reduced
        return _unpickled, (front_of(type(self)), self._family), *reduced[2:]

    if not TYPE_CHECKING:  # type checkers know Lightning's attributes

        def __getattr__(self, name: str) -> Any:
            if self._family is None and name in _READ_FIRST:
                return vars(self).get("_options", {}).get(name.lstrip("_"))
            return super().__getattribute__(name)  # which raises its own error

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


class FreeMemoryStrategy(_FreeMemory):
    """Training on the single GPU with the most free memory, however many ``Trainer(devices=...)`` requests."""

    strategy_name = "free_memory"
    base_name = "SingleDeviceStrategy"
    _max_devices = 1
    _fixed: ClassVar[dict[str, Any]] = {"device": "cuda:0"}

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device  # type: ignore[safe-super]


class FreeMemoryDDPStrategy(_FreeMemory):
    """DDP on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` requests; plain DDP on the CPU."""

    strategy_name = "ddp_free_memory"
    base_name = "DDPStrategy"
    _runs_on_cpu = True


class FreeMemoryFSDPStrategy(_FreeMemory):
    """FSDP on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` requests."""

    strategy_name = "fsdp_free_memory"
    base_name = "FSDPStrategy"


class FreeMemoryDeepSpeedStrategy(_FreeMemory):
    """DeepSpeed on the GPUs with the most free memory, as many as ``Trainer(devices=...)`` requests."""

    strategy_name = "deepspeed_free_memory"
    base_name = "DeepSpeedStrategy"

    @override
    def _refuse_numbers(self, indices: list[int]) -> None:
        if indices != list(range(len(indices))):
            raise CudaAlreadyInitializedError(
                f"DeepSpeed can only use the devices 0, 1, ..., but {indices} were picked. CUDA has already started in "
                "this process, so they cannot be renumbered. Create the Trainer before anything uses CUDA; even "
                "torch.cuda.is_available() can start it."
            )


@functools.cache
def _of_family(front: Any, family: str) -> Any:
    base = getattr(importlib.import_module(f"{family}.strategies"), front.base_name)
    return subclass(front, base, _family=family)


def _unpickled(front: type, family: str) -> Any:
    cls = _of_family(front, family)
    return cls.__new__(cls)


def _serve(strategies: ModuleType) -> None:
    """Let the Trainer or the Fabric of this family take the strategies."""
    for strategy in (FreeMemoryStrategy, FreeMemoryDDPStrategy, FreeMemoryFSDPStrategy, FreeMemoryDeepSpeedStrategy):
        getattr(strategies, strategy.base_name).register(strategy)


when_imported("strategies", _serve)
