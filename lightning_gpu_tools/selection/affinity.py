"""Keep a process on the CPU cores that are near its GPU."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable


def bind_to_gpus(uuids: Iterable[str]) -> frozenset[int] | None:
    """Keep this process and its children on those cores near the GPUs that it may use now, and return them.

    ``None``: nothing was changed, because the near cores are unknown (as outside Linux) or none of them may be used.
    """
    from lightning_gpu_tools.gpus import nvml

    if sys.platform != "linux":
        return None
    with nvml.session():
        near = [nvml.read_cpu_affinity(uuid) for uuid in uuids]
    allowed = os.sched_getaffinity(0)
    cores = frozenset(core for one in near for core in one or () if core in allowed)
    if not cores or None in near:
        return None
    for thread_id in os.listdir("/proc/self/task"):  # OpenMP, for example, has started its threads already
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.sched_setaffinity(int(thread_id), cores)
    return cores
