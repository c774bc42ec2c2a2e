"""A GPU with one queue, on a clock that moves by hand, standing in for torch.cuda.Event; and trainings on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_as_cuda
import torch
from lightning.pytorch import Callback
from trainings import HandClock, Model, Samples, Spending, Watch, loader, quiet_trainer

from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training.run_measurements import LoaderSettings, RunMeasurements
from lightning_gpu_tools.training.step_clock import StepClock

# CUDA holds some thousand launches and then lets the host wait; here 10 launches are a step.
_QUEUE = 30


class SimulatedGpu:
    """Does what is launched one after the other, while the host goes on until the queue is full.

    Attributes:
        busy: When kernels ran: (begin, end) in seconds of the clock. A copy is no kernel.
        waited_for: How often somebody asked the host to wait for the GPU.
    """

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.busy: list[tuple[float, float]] = []
        self.waited_for = 0
        self._free_s = 0.0
        self._queue: deque[float] = deque()

    def launch(self, seconds: float, kernel: bool = True) -> None:
        if len(self._queue) == _QUEUE:
            self.clock.now_s = max(self.clock(), self._queue.popleft())
        begin_s = max(self.clock(), self._free_s)
        self._free_s = begin_s + seconds
        self._queue.append(self._free_s)
        if kernel:
            self.busy.append((begin_s, self._free_s))

    def copy(self, seconds: float, pageable: bool) -> None:
        """Copy a batch; out of pageable memory the host waits for it, and for all that comes before it."""
        self.launch(seconds, kernel=False)
        if pageable:
            self.clock.now_s = self._free_s

    def synchronize(self) -> None:
        self.waited_for += 1
        self.clock.now_s = max(self.clock(), self._free_s)

    def utilization_percent(self, since_s: float) -> float:
        """Return the share of the time up to now in which a kernel ran."""
        busy_s = sum(max(0.0, min(end, self.clock()) - max(begin, since_s)) for begin, end in self.busy)
        return 100 * busy_s / (self.clock() - since_s)

    def install(self, set_attribute: Callable[[Any, str, Any], None]) -> None:
        """Be torch's GPU, as far as events go."""
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.passed_s: float | None = None

            def record(self) -> None:
                self.passed_s = max(gpu.clock(), gpu._free_s)

            def query(self) -> bool:
                return self.passed_s is None or gpu.clock() >= self.passed_s

            def elapsed_time(self, end_event: Event) -> float:
                assert self.query()
                assert end_event.query(), "CUDA raises an error here"
                assert self.passed_s is not None
                assert end_event.passed_s is not None
                return float(torch.tensor(end_event.passed_s - self.passed_s, dtype=torch.float32)) * 1e3

            def synchronize(self) -> None:
                gpu.synchronize()

        set_attribute(torch.cuda, "Event", Event)
        set_attribute(torch.cuda, "synchronize", gpu.synchronize)


STEPS = 400


class GpuModel(Model):
    """A model whose step takes the host so long and gives the GPU that much to do.

    Args:
        time: The host's clock.
        device: The GPU.
        host_s: The host's time for a step.
        kernel_s: The GPU's.
        copy_s: The GPU's time to copy a batch.
        pageable: Whether the host waits for the copy.
        item: Whether forward ends with a wait for the GPU.
        backward_s: The GPU's time in backward; the host takes none.
        optimizer_s: Likewise in the optimizer's step.
    """

    def __init__(
        self,
        time: HandClock,
        device: SimulatedGpu,
        *,
        host_s: float = 0.001,
        kernel_s: float = 0.020,
        copy_s: float = 0.0,
        pageable: bool = False,
        item: bool = False,
        backward_s: float = 0.0,
        optimizer_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.time, self.device_, self.host_s, self.kernel_s = time, device, host_s, kernel_s
        self.copy_s, self.pageable, self.item = copy_s, pageable, item
        self.backward_s, self.optimizer_s = backward_s, optimizer_s

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.device_.copy(self.copy_s, self.pageable)
        return batch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # Kernels are launched one after the other, not all at the end.
        for _ in range(10):
            self.time.spend(self.host_s / 10)
            self.device_.launch(self.kernel_s / 10)
        if self.item:
            self.device_.synchronize()
        loss = super().training_step(batch, batch_idx)
        if self.backward_s:
            loss.register_hook(lambda gradient: self.device_.launch(self.backward_s))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        if self.optimizer_s:
            optimizer.register_step_post_hook(lambda *args: self.device_.launch(self.optimizer_s))
        return optimizer


def train_on_simulated_gpu(
    folder: Path, set_attribute: Callable[[Any, str, Any], None], *others: Callback, data_s: float = 0.0, **options: Any
) -> tuple[StepClock, SimulatedGpu, RunMeasurements]:
    """Train 400 steps over the fake driver, and return the clock, the GPU and the measurements.

    Args:
        folder: For what the Trainer writes.
        set_attribute: Replaces what asks CUDA.
        *others: Callbacks; those that spend time spend that of the simulation.
        data_s: How long a sample takes to load.
        **options: Of the model.
    """
    cpu_as_cuda.install(set_attribute)
    time = HandClock()
    for callback in others:
        if isinstance(callback, Spending):
            callback.spend = time.spend
    device = SimulatedGpu(time)
    device.install(set_attribute)
    watch = Watch(time)
    trainer = quiet_trainer(folder, accelerator="cuda", callbacks=[watch, *others])
    trainer.fit(GpuModel(time, device, **options), loader(Samples(STEPS, time.spend, data_s)))
    # Nobody but the model itself has made the host wait for the GPU.
    assert device.waited_for == (STEPS if options.get("item", False) else 0)
    clock = watch.clock
    measured = RunMeasurements(
        wall_s=clock.wall_s,
        steps=clock.steps,
        phase_s=clock.seconds,
        blocks=clock.blocks,
        host=HostBudget(cores=8, memory_available_bytes=2**36, shm_free_bytes=2**35),
        on_gpu=True,
        utilization_percent=device.utilization_percent(time() - clock.wall_s),
        loader=LoaderSettings(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False),
        gpu_idle=clock.gpu_idle(),
    )
    return clock, device, measured
