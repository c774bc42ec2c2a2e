"""How GPUs are joined with each other and with the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pynvml

from lightning_gpu_tools.gpus.nvml.calls import tolerate
from lightning_gpu_tools.gpus.nvml.session import session
from lightning_gpu_tools.gpus.readings import GpuLink

_SCOPE_NODE = pynvml.NVML_AFFINITY_SCOPE_NODE


def read_links(uuids: Sequence[str]) -> tuple[GpuLink, ...]:
    """Return how each pair of these GPUs is joined. A GPU that cannot be read has links of which nothing is known.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    with session():
        handles = {uuid: _handle(uuid) for uuid in sorted(set(uuids))}
        return tuple(
            GpuLink(
                uuids=(a, b),
                nvlink=_nvlink(handles[a], handles[b]),
                topology_level=tolerate(pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b]),
            )
            for a in handles
            for b in handles
            if a < b
        )


def _nvlink(a: Any, b: Any) -> bool | None:
    # Asking for the status of peer access finds NVSwitch as well as bridges, where the far end of a link is no GPU.
    status = tolerate(pynvml.nvmlDeviceGetP2PStatus, a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return None if status is None else status == pynvml.NVML_P2P_STATUS_OK


def read_numa_nodes(uuids: Sequence[str]) -> dict[str, int | None]:
    """Return the NUMA node of the host that each GPU hangs on; ``None`` where unknown (always outside Linux).

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    with session():
        # Not nvmlDeviceGetNumaNodeId: that is the node which the GPU's own memory forms on Grace Hopper.
        nodes = {
            uuid: _members(tolerate(pynvml.nvmlDeviceGetMemoryAffinity, _handle(uuid), 16, _SCOPE_NODE))
            for uuid in uuids
        }
    return {uuid: next(iter(found)) if len(found) == 1 else None for uuid, found in nodes.items()}


def read_cpu_affinity(uuid: str) -> frozenset[int] | None:
    """Return the CPUs that are near a GPU, ``None`` where unknown (always outside Linux).

    They are CPUs of the machine; intersect them with those that this process may use.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    with session():
        # 64 words: Linux kernels are built for at most 8192 CPUs, and no machine with NVIDIA GPUs has over 4096.
        cpus = _members(tolerate(pynvml.nvmlDeviceGetCpuAffinityWithinScope, _handle(uuid), 64, _SCOPE_NODE))
    return cpus or None


def _members(mask: Sequence[int] | None) -> frozenset[int]:
    """Return the numbers of the bits that are set in a bit mask of 64-bit words."""
    return frozenset(64 * word + bit for word, bits in enumerate(mask or ()) for bit in range(64) if bits >> bit & 1)


def _handle(uuid: str) -> Any:
    return tolerate(pynvml.nvmlDeviceGetHandleByUUID, uuid)
