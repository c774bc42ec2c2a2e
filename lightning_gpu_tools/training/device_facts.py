"""Facts from torch about a model's GPU, its tensors left on the CPU, and its optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_gpu_tools.training.run_measurements import GpuFacts
from lightning_gpu_tools.units import printable

_MAX_NAMES, _MAX_DEPTH = 5, 3  # our defaults


def device_facts(device: torch.device) -> GpuFacts:
    """Return torch's facts about a GPU; empty for other devices."""
    if device.type != "cuda":
        return GpuFacts()
    properties = torch.cuda.get_device_properties(device)
    return GpuFacts(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        memory_total_bytes=properties.total_memory,
    )


def is_fusible(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer would benefit much from its fused kernel, unlike SGD."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not optimizer.defaults["fused"]


def left_on_cpu(module: torch.nn.Module) -> tuple[str, ...]:
    """Describe the tensors that a model on a GPU has left on the CPU.

    ``Module.to`` does not move tensors that are plain attributes, or that are in a list, a tuple, or a dictionary.
    """
    found: dict[str, None] = {}
    for path, submodule in module.named_modules():
        owner = f"{type(module).__name__}.{path}" if path else type(module).__name__
        for name, value in vars(submodule).items():
            # Names with an underscore belong to torch and Lightning: _parameters, _modules, _trainer.
            if not name.startswith("_") and (what := _on_cpu(value)):
                found[printable(f"{owner}.{name} ({what})", 200)] = None
    return tuple(found)[:_MAX_NAMES]


def _on_cpu(value: object) -> str | None:
    if isinstance(value, torch.Tensor):
        return "a tensor" if _is_left(value) else None
    if not isinstance(value, (dict, list, tuple)):
        return None
    count = sum(map(_is_left, _tensors(value, _MAX_DEPTH)))
    return f"a {type(value).__name__} with {count} tensor{'s' if count > 1 else ''}" if count else None


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, (dict, list, tuple)) and depth:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part, depth - 1)


def _is_left(tensor: torch.Tensor) -> bool:
    # A single number costs nothing as a kernel argument.
    return tensor.device.type == "cpu" and tensor.dim() > 0
