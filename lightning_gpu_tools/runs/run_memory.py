"""What the GPUs' memory was used for, by what the ranks counted and the driver said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gpu_tools.advice.memory_account import DriverMemory, MemoryAccount, account_for
from lightning_gpu_tools.gpus.watch import GpuWatch
from lightning_gpu_tools.runs.run import gpu_readings
from lightning_gpu_tools.runs.run_recorder import RunRecorder
from lightning_gpu_tools.training.memory_readings import RankMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """What one rank knows."""

    gpu: DriverMemory  # which GPU it trains on
    memory: RankMemory  # what it has counted there
    drivers: tuple[DriverMemory, ...] = ()  # of the GPUs of its node, if this rank asks the driver


def own_share(recorder: RunRecorder) -> MemoryShare | None:
    """Return what this rank knows; ``None`` without a GPU, or if nothing could be counted."""
    run, memory = recorder.run, None if recorder.memory is None else recorder.memory.facts()
    if memory is None or run.gpu is None:
        return None
    node = run.place.node
    (gpu,) = gpu_readings([run.gpu])
    drivers = () if recorder.gpus is None else tuple(_driver_memory(recorder.gpus, node))
    return MemoryShare(gpu=DriverMemory(index=gpu.index, uuid=str(gpu.uuid), node=node), memory=memory, drivers=drivers)


def _driver_memory(gpus: GpuWatch, node: int) -> Iterable[DriverMemory]:
    from lightning_gpu_tools.gpus import nvml  # only where there are GPUs: it imports pynvml

    own_pids = gpus.own_pids
    for gpu, sample in gpus.noted_memory():
        yield DriverMemory(
            index=gpu.index,
            uuid=sample.uuid,
            node=node,
            total_bytes=sample.memory_total_bytes,
            used_bytes=sample.memory_used_bytes,
            driver_bytes=sample.driver_memory_bytes,
            processes=None if sample.processes is None else tuple(map(nvml.identified, sample.processes)),
            own_pids=None if own_pids is None else tuple(sorted(own_pids)),
        )


def accounts(shares: Iterable[MemoryShare]) -> tuple[MemoryAccount, ...]:
    """Return what the memory of each GPU was used for."""
    drivers: dict[tuple[int, str], DriverMemory] = {}
    ranks: defaultdict[tuple[int, str], list[RankMemory]] = defaultdict(list)
    for share in shares:
        gpu = share.gpu
        drivers.setdefault((gpu.node, gpu.uuid), gpu)
        drivers |= {(driver.node, driver.uuid): driver for driver in share.drivers}
        ranks[gpu.node, gpu.uuid].append(share.memory)
    found = (account_for(drivers[gpu], memories) for gpu, memories in ranks.items())
    return tuple(sorted(found, key=lambda account: (account.node, account.index)))
