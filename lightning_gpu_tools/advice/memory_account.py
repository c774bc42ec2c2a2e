"""What a GPU's memory is used for, as parts that add up to what the driver says is used. Pure; bytes throughout."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_gpu_tools.gpus.readings import GpuProcess
from lightning_gpu_tools.training.memory_readings import RankMemory

UNEXPLAINED = "unexplained"


class MemoryPart(NamedTuple):
    """A part of a GPU's memory.

    Attributes:
        name: In ``parts_bytes``.
        label: In the text of the report.
        group: What it is a part of in the text: ``tensors``, ``cache``, or nothing.
        color: In the plot.
        meaning: What it is.
    """

    name: str
    label: str
    group: str
    color: str
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverMemory:
    """What the driver said of one GPU when most of its memory was in use.

    Attributes:
        uuid: The GPU or MIG instance.
        index: Its number, as in the report's ``gpus``.
        node: Its node.
        total_bytes: Size of the memory; ``None`` = not reported, as below.
        used_bytes: In use by all.
        driver_bytes: The part of it that the driver keeps for itself.
        processes: Who uses it, with user and name where they can be seen; ``None`` if they cannot be listed.
    """

    uuid: str
    index: int = 0
    node: int = 0
    total_bytes: int | None = None
    used_bytes: int | None = None
    driver_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProcess:
    """A process of somebody else's on the GPU.

    Attributes:
        pid: As the driver gives it.
        used_bytes: Its memory; ``None`` if the driver does not say.
        user: Its owner; ``None`` if it cannot be seen from here, as the next one.
        name: Its name.
    """

    pid: int
    used_bytes: int | None = None
    user: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAccount:
    """What one GPU's memory was used for when most of it was.

    Attributes:
        index: The GPU, as in ``gpus``.
        uuid: The GPU.
        node: Its node.
        total_bytes: Size of its memory; ``None`` = not reported, as below.
        used_bytes: In use by all, as the driver says.
        free_bytes: The rest.
        parts_bytes: The parts by name, which add up to ``used_bytes``; where the driver says nothing, to what torch has
            reserved.
        explained_share: Share of ``used_bytes`` that has a name.
        others: The processes of others, the largest first.
        peaks_bytes: By phase in which the peak of the tensors rose, how high; of the rank with the highest.
        torch_peak_bytes: The highest peak of the tensors, of all ranks on the GPU together.
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
    peaks_bytes: Mapping[str, int] = field(default_factory=dict)
    torch_peak_bytes: int = 0


def account_for(driver: DriverMemory, ranks: Sequence[RankMemory], own_pids: Collection[int] | None) -> MemoryAccount:
    """Return what a GPU's memory was used for.

    Args:
        driver: What the driver said of the GPU.
        ranks: The ranks of this job that train on it; none if it is only watched.
        own_pids: This job's processes by the driver's numbers; ``None`` if those are not known.
    """
    raise NotImplementedError
