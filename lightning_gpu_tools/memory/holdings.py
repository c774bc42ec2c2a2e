"""The GPU memory that training holds across steps: the model, the optimizers, and cuBLAS workspaces."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from lightning_gpu_tools.memory.blocks import live_blocks
from lightning_gpu_tools.memory.readings import MemoryHoldings

# Of cuBLASLt, by aten/src/ATen/cuda/CUDABlas.cpp, in versions of torch whose cuBLASLt does not share that of cuBLAS.
_LT_WORKSPACE = 2**20
_HOPPER = 9  # major compute capability, from which on workspaces are larger


class Training(Protocol):
    """The parts of a run that hold memory; ``None`` = unknown, or none."""

    gpu: torch.device | None  # on which this rank trains; None if it is not NVIDIA's
    module: torch.nn.Module | None
    optimizer_steps: int  # that the optimizers have made, including earlier fits
    precision: str | None  # such as "32-true"

    @property
    def device(self) -> torch.device:
        """The device on which this rank trains."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers."""

    @property
    def is_plain_ddp(self) -> bool:
        """Whether ranks meet only at the end of backward, and not in every layer as with FSDP or DeepSpeed."""


def count_holdings(training: Training) -> MemoryHoldings:
    """Return the memory that training holds on its GPU now; no buffers without a model. 7 ms for 1,000 parameters."""
    module, optimizers, weights = training.module, training.optimizers, weights_of(training)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    of_gradients: set[int] = set()
    gradients_bytes = _size(gradients, training.device, of_gradients)
    # With DDP's gradient_as_bucket_view=True, a gradient is a view of larger storage.
    are_views = any(one.layout is torch.strided and one.untyped_storage().nbytes() > one.nbytes for one in gradients)
    seen: set[int] = set()
    size = partial(_size, device=training.device, seen=seen)
    held = MemoryHoldings(
        parameters_bytes=size(weights),
        gradients_bytes=gradients_bytes,
        gradients_kept_bytes=gradients_bytes,
        gradient_buckets_bytes=gradients_bytes if training.is_plain_ddp and not are_views else 0,
        optimizer_bytes=size([[*one.state.values()] for one in optimizers]),
        buffers_bytes=0 if module is None else size([*module.buffers()]),
    )
    # cuBLAS' workspaces: tensors of exactly their size that are nothing else.
    others, blocks = seen | of_gradients, [] if training.gpu is None else live_blocks(training.gpu)
    sizes = workspace_sizes(training.gpu) if blocks else ()
    workspaces = (one.size for one in blocks if one.size in sizes and one.address not in others)
    return replace(held, workspaces_bytes=sum(workspaces))


def workspace_sizes(gpu: torch.device | None) -> set[int]:
    """Return the possible sizes of the workspace that torch gives to a handle of cuBLAS on each stream of a GPU.

    The environment variable has pairs of KiB and a count, as in ``:4096:2:16:8``. The defaults are those of torch's
    aten/src/ATen/cuda/CublasHandlePool.cpp: the second one is for Hopper and, depending on the version, later GPUs.
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return {sum(int(kib) * int(count) for kib, count in pairs) * 2**10}
    is_large = torch.cuda.get_device_capability(gpu)[0] >= _HOPPER
    return {8320 * 2**10, 32 * 2**20} if is_large else {8320 * 2**10}


def fixed_sizes(gpu: torch.device | None) -> set[int]:
    """Return the sizes of blocks that hold a workspace of cuBLAS or cuBLASLt on a GPU, whatever the batch size."""
    return workspace_sizes(gpu) | {_LT_WORKSPACE}


def trained_bytes(training: Training) -> int:
    """Return the memory of the trained weights on its device, and thereby of their gradients."""
    return _size([one for one in weights_of(training) if one.requires_grad], training.device, set())


def weights_of(training: Training) -> list[torch.nn.Parameter]:
    """Return the model's parameters, or those of the optimizers if the model is unknown."""
    if training.module is not None:
        return list(training.module.parameters())
    return [weight for one in training.optimizers for group in one.param_groups for weight in group["params"]]


def _size(objects: object, device: torch.device, seen: set[int]) -> int:
    """Return the size of the storages on a device that are not in ``seen``, and add them to it."""
    size = 0
    for tensor in plain_tensors(objects):
        if tensor.device == device:
            storage = tensor.untyped_storage()
            size += 0 if storage.data_ptr() in seen else storage.nbytes()
            seen.add(storage.data_ptr())
    return size


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a structure, including those wrapped by a tensor such as DTensor."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors([getattr(value, name) for name in names])
        elif value.layout is torch.sparse_coo:
            yield from (value._indices(), value._values())
        else:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from plain_tensors(one)
