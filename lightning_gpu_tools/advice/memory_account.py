"""What a GPU's memory is used for, as parts that add up to what the driver says is used. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.training.memory_readings import MemoryPoint, RankMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverMemory:
    """What the driver said of one GPU at a moment of the training. ``None`` = not reported.

    Attributes:
        index: The GPU, as in the report's ``gpus``.
        uuid: The GPU or MIG instance.
        node: Its node.
        total_bytes: Size of the memory.
        used_bytes: In use by all.
        driver_bytes: The part of it that the driver keeps for itself.
        processes: Who uses it, with user and name where they can be seen from here.
        own_pids: This job's processes on the node by the driver's numbers; ``None`` where these numbers are not known,
            as in a container.
    """

    index: int
    uuid: str
    node: int = 0
    total_bytes: int | None = None
    used_bytes: int | None = None
    driver_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    own_pids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProcess:
    """A process of another job on the GPU.

    Attributes:
        pid: As the driver gives it.
        used_bytes: Its memory; ``None`` if the driver does not report it.
        user: Its owner; ``None`` if it cannot be seen from here, as the next one.
        name: Its name.
    """

    pid: int
    used_bytes: int | None = None
    user: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAccount:
    """What the memory of one GPU was used for. What is not known is ``None``, or absent.

    Attributes:
        index: The GPU, as in ``gpus``.
        uuid: The GPU.
        node: Its node.
        total_bytes: Size of its memory.
        used_bytes: In use by all, as the driver says.
        free_bytes: The rest of it.
        parts_bytes: The parts by name, which add up to ``used_bytes``, or without it to what torch had reserved; see
            docs/report_schema.md.
        explained_share: Share of ``used_bytes`` that has a name.
        others: Processes of other jobs, the largest first.
        moments_bytes: What was in tensors at moments of the training, of the rank with the highest peak:
            ``before_training``, ``step_start``, ``after_forward``, ``after_backward``, ``after_step``, and
            ``after_first_step``.
        peaks_bytes: By phase in which the peak of the tensors rose, how high, of the same rank.
        timeline: The steps of rank 0 that were read, if it trains on this GPU; in at most 200 points.
    """

    index: int
    uuid: str
    node: int = 0
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    parts_bytes: Mapping[str, int] = field(default_factory=dict)
    explained_share: float | None = None
    others: tuple[OtherProcess, ...] = ()
    moments_bytes: Mapping[str, int] = field(default_factory=dict)
    peaks_bytes: Mapping[str, int] = field(default_factory=dict)
    timeline: tuple[MemoryPoint, ...] = ()


def account_for(driver: DriverMemory, ranks: Sequence[RankMemory]) -> MemoryAccount:
    """Return what a GPU's memory was used for.

    Args:
        driver: What the driver said of the GPU.
        ranks: The ranks of this job that train on it.
    """
    raise NotImplementedError
