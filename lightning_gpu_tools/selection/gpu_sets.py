"""Of the GPUs that qualify, which ones go best together."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from lightning_gpu_tools.selection.ranking import Candidate

# Our default: where the job did not say how much memory it needs, a link may cost a tenth of it.
_MEMORY_KEPT = 0.9


def best_set(
    candidates: Sequence[Candidate],
    count: int,
    nvlinks: Collection[tuple[str, str]],
    numa_nodes: Mapping[str, int | None],
    memory_matters: bool,
) -> tuple[Candidate, ...]:
    """Return ``count`` of the candidates; both are ordered, the best first.

    The tiers of the ranking come first in any case. Within the last one, the set with more pairs joined by NVLink is
    better, then that with more pairs on one NUMA node, then that whose worst member ranks first, because it limits the
    batch size. A set is grown from each GPU, by what improves it most: comparing all would take seconds for 8 of 16.

    ``nvlinks`` are pairs of UUIDs in alphabetical order; ``memory_matters`` says that candidates may have too little.
    """
    last_tier = candidates[count - 1].tier
    certain = tuple(rank for rank, one in enumerate(candidates) if one.tier < last_tier)
    equals = [rank for rank, one in enumerate(candidates) if one.tier == last_tier]
    if memory_matters:
        min_bytes = _MEMORY_KEPT * (candidates[count - 1].effective_free_bytes or 0)
        equals = [rank for rank in equals if (candidates[rank].effective_free_bytes or 0) >= min_bytes]
    uuids = [str(one.gpu.uuid) for one in candidates]

    def quality(chosen: tuple[int, ...]) -> tuple[int, int, list[int]]:
        pairs = itertools.combinations(sorted(uuids[rank] for rank in chosen), 2)
        nodes = Counter(numa_nodes.get(uuids[rank]) for rank in chosen)
        return (
            sum(pair in nvlinks for pair in pairs),
            sum(math.comb(number, 2) for node, number in nodes.items() if node is not None),
            sorted(-rank for rank in chosen),
        )

    def grown(seed: int) -> tuple[int, ...]:
        chosen = (*certain, seed)
        while len(chosen) < count:
            chosen = max(((*chosen, rank) for rank in equals if rank not in chosen), key=quality)
        return chosen

    best = max(map(grown, equals), key=quality)
    return tuple(candidates[rank] for rank in sorted(best))
