"""How GPUs are joined with each other and with the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pynvml

from lightning_gpu_tools.gpus.nvml.calls import tolerate
from lightning_gpu_tools.gpus.nvml.session import session

_SCOPE_NODE = pynvml.NVML_AFFINITY_SCOPE_NODE


def read_nvlinks(uuids: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Return the pairs of these GPUs that NVLink or NVSwitch joins, in alphabetical order."""
    with session():
        handles = {uuid: _handle(uuid) for uuid in uuids}
        # This shows NVSwitch, too, where the far end of a link is no GPU.
        return frozenset(
            (a, b)
            for a, b in itertools.combinations(sorted(handles), 2)
            if tolerate(pynvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            == pynvml.NVML_P2P_STATUS_OK
        )


def read_numa_nodes(uuids: Sequence[str]) -> dict[str, int | None]:
    """Return the NUMA node of the host that each GPU hangs on; ``None`` where unknown."""
    with session():
        # Not nvmlDeviceGetNumaNodeId: that is the node of the GPU's own memory on Grace Hopper.
        nodes = {
            uuid: _members(tolerate(pynvml.nvmlDeviceGetMemoryAffinity, _handle(uuid), 16, _SCOPE_NODE))
            for uuid in uuids
        }
    return {uuid: next(iter(found)) if len(found) == 1 else None for uuid, found in nodes.items()}


def read_cpu_affinity(uuid: str) -> frozenset[int] | None:
    """Return the CPUs near a GPU, also those that this process may not use; ``None`` where unknown."""
    with session():
        # 64 words are 4096 CPUs: no machine with NVIDIA GPUs has more.
        cpus = _members(tolerate(pynvml.nvmlDeviceGetCpuAffinityWithinScope, _handle(uuid), 64, _SCOPE_NODE))
    return cpus or None


def _members(mask: Sequence[int] | None) -> frozenset[int]:
    """Return the bits that are set in 64-bit words."""
    return frozenset(64 * word + bit for word, bits in enumerate(mask or ()) for bit in range(64) if bits >> bit & 1)


def _handle(uuid: str) -> Any:
    return tolerate(pynvml.nvmlDeviceGetHandleByUUID, uuid)
