"""Samples in memory that are fetched one by one, although one operation could fetch a batch. Pure."""

from __future__ import annotations

from lightning_gpu_tools.advice.lines import MIN_SAMPLES, is_of_program, seen_in
from lightning_gpu_tools.training.phases import IN_WORKER
from lightning_gpu_tools.training.run_measurements import DATA_LOADING, LoaderSettings, RunMeasurements
from lightning_gpu_tools.units import format_duration

# Our defaults, unless a source is named.
# Indexing a few tensors and putting the rows together takes 5 to 20 us per sample (measured), decoding an image 100 us
# or more.
_MAX_SAMPLE_S = 50e-6
_MIN_BATCH = 32  # samples
_MAX_OWN = 0.20  # of the sampled lines: those of functions that the dataset calls
_SAMPLERS = ("RandomSampler", "SequentialSampler")


def fetched_at_once(run: RunMeasurements, loader: LoaderSettings, cpu_s: float, *, computes: bool) -> str | None:
    """Return how to fetch whole batches, which take this CPU time; ``None`` if that is not what takes the time.

    ``computes`` is whether loading computes for most of its time. What is in memory always does, if it has a core.
    """
    facts, size = run.loader_now, loader.batch_size or 0
    if facts is None or facts.is_iterable or size < _MIN_BATCH or cpu_s > _MAX_SAMPLE_S * size:
        return None
    lines = seen_in(run.lines, IN_WORKER if loader.num_workers else DATA_LOADING)
    own = sum(one.share for one in lines if is_of_program(one.file) and one.function != "__getitem__")
    is_known = computes and sum(one.samples for one in lines) >= MIN_SAMPLES
    if not facts.is_table and not (is_known and own <= _MAX_OWN):
        return None
    begin = f"Fetching takes {format_duration(cpu_s / size)} for each of the {size} samples of a batch"
    end = "More workers would help less."
    if not facts.is_table or not facts.collates or not facts.sampler:
        return (
            f"{begin}. Give the dataset a method `__getitems__(self, indices)` that returns a whole batch, fetched in "
            f"one operation, and the loader a collate_fn that returns it unchanged. {end}"
        )
    sampler = f"{facts.sampler}(dataset)" if facts.sampler in _SAMPLERS else "sampler"
    return (
        f"{begin}, which are in memory. Fetch each batch by one index: DataLoader(dataset, batch_size=None, "
        f"sampler=BatchSampler({sampler}, {size}, drop_last={facts.drop_last})). {end}"
    )
