"""Of the GPUs that qualify, which ones go best together."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from lightning_gpu_tools.gpus.readings import GpuLink
from lightning_gpu_tools.selection.ranking import Candidate

# Without a stated need, memory is all that is known to matter, so that a link may cost a tenth of it and not more.
_MEMORY_KEPT = 0.9
# All sets are compared up to this number, which takes some 0.05 s: 16 GPUs, 4 of them, are 1820. Beyond it sets are
# grown from each GPU.
_MAX_SETS = 5000


def best_set(
    candidates: Sequence[Candidate],
    count: int,
    links: Collection[GpuLink],
    numa_nodes: Mapping[str, int | None],
    memory_matters: bool,
) -> tuple[Candidate, ...]:
    """Return ``count`` of the candidates, the best first.

    Idle GPUs come before busy ones and unclaimed before claimed ones in any case. Among equals in that, a set in which
    more pairs are joined by NVLink is better, then one in which more pairs hang on the same NUMA node, then the one
    whose worst member ranks first, because that one decides how large a batch can be.

    Args:
        candidates: The best first, at least ``count``.
        count: How many.
        links: How they are joined, as far as known.
        numa_nodes: Their NUMA nodes by UUID, ``None`` where unknown.
        memory_matters: Whether the smallest of the set must not have much less memory than without regard to links.
            Otherwise every candidate has enough.
    """
    last_tier = candidates[count - 1].tier
    certain = tuple(rank for rank, one in enumerate(candidates) if one.tier < last_tier)
    equals = [rank for rank, one in enumerate(candidates) if one.tier == last_tier]
    missing = count - len(certain)
    if memory_matters:
        min_bytes = _MEMORY_KEPT * (candidates[count - 1].effective_free_bytes or 0)
        equals = [rank for rank in equals if (candidates[rank].effective_free_bytes or 0) >= min_bytes]
    uuids = [str(one.gpu.uuid) for one in candidates]
    joined = {link.uuids for link in links if link.nvlink}

    def quality(chosen: tuple[int, ...]) -> tuple[int, int, list[int]]:
        ranks = (*certain, *chosen)
        pairs = itertools.combinations(sorted(uuids[rank] for rank in ranks), 2)
        nodes = Counter(numa_nodes.get(uuids[rank]) for rank in ranks)
        return (
            sum(pair in joined for pair in pairs),
            sum(math.comb(number, 2) for node, number in nodes.items() if node is not None),
            sorted(-rank for rank in ranks),
        )

    sets: Iterable[tuple[int, ...]] = itertools.combinations(equals, missing)
    if math.comb(len(equals), missing) > _MAX_SETS:
        sets = [_grow((seed,), equals, missing, quality) for seed in equals]
    return tuple(candidates[rank] for rank in sorted((*certain, *max(sets, key=quality))))


def _grow(
    chosen: tuple[int, ...],
    ranks: Sequence[int],
    count: int,
    quality: Callable[[tuple[int, ...]], tuple[int, int, list[int]]],
) -> tuple[int, ...]:
    """Add to a set, each time what improves it most."""
    while len(chosen) < count:
        chosen = max(((*chosen, rank) for rank in ranks if rank not in chosen), key=quality)
    return chosen
