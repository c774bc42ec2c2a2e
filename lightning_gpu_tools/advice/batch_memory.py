"""How large a batch the GPU's memory allows, from how much of it one sample needs."""

from __future__ import annotations

from lightning_gpu_tools.training.run_measurements import GpuFacts

# loadtune's aim: fill 80 % of the memory; the rest is for fragmentation, the CUDA context and the biggest sample.
_FILL = 0.80


def batch_size_that_fits(gpu: GpuFacts | None, batch_size: int | None) -> int | None:
    """Return the largest batch size that leaves a fifth of the GPU's memory free; ``None`` if it is not known.

    Memory grows in proportion to the batch beyond weights and optimizer state, so two points give the line: none of a
    batch, and the one in use.
    """
    if gpu is None or not batch_size or None in (gpu.memory_total_bytes, gpu.step_memory_bytes, gpu.kept_memory_bytes):
        return None
    assert gpu.memory_total_bytes is not None
    assert gpu.step_memory_bytes is not None
    assert gpu.kept_memory_bytes is not None
    per_sample = (gpu.step_memory_bytes - gpu.kept_memory_bytes) / batch_size
    room = _FILL * gpu.memory_total_bytes - gpu.kept_memory_bytes - (gpu.others_memory_bytes or 0)
    if per_sample <= 0 or room <= 0:
        return None
    return int(room / per_sample)


def larger_batch_advice(gpu: GpuFacts | None, batch_size: int | None) -> str:
    """Return what to set, with the number that the memory allows where that is known."""
    fits = batch_size_that_fits(gpu, batch_size)
    caveat = "scale the learning rate with it and compare the validation metric"
    if fits is None or batch_size is None:
        return f"a larger batch_size, as far as memory allows ({caveat})"
    if fits < 2 * batch_size:
        return ""  # there is no room for a batch twice as large
    doubled = batch_size * 2 ** ((fits // batch_size).bit_length() - 1)
    return f"batch_size={doubled} (now {batch_size}; by measured memory up to {fits} fit; {caveat})"
