"""Ranking: from readings, claims, and a request to usable GPUs, best first, and reasons against the others. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from lightning_gpu_tools.gpus.readings import (
    FOREIGN,
    MAX_USERS,
    GpuClaim,
    GpuProcess,
    GpuReading,
    GpuWaiter,
    folded_claims,
)
from lightning_gpu_tools.units import check_percentage, format_bytes, number_ranges, parse_bytes, parse_duration, plural

_Class = TypeVar("_Class", bound=type)

LAST_RUN = "last"  # as ``min_free``: reports/last_run.py replaces it with a size

# For --help of the command line and of LightningCLI, and for help().
OPTIONS = {
    "min_free": "Free memory that each GPU must have in addition to the claims of others, such as 8GiB, 8G or "
    "500MB; or `last`, 1.2 times what the last run needed, from the newest report below the current folder.",
    "max_utilization": "Highest allowed utilization of each GPU, in percent.",
    "exclusive": "Take only GPUs that nobody else uses or has claimed, and let nobody else claim them.",
    "name": "Take only GPUs with this text in their model's name, such as A100. Case is ignored.",
    "wait": "Longest time to wait for the GPUs, for example 90s, 10m or 2h. First come, first served.",
    "claim": "Claim the GPUs until the job ends. The claims of others are respected in any case.",
}


class Request(NamedTuple):
    """A job's request, with the options of :func:`lightning_gpu_tools.select_gpus`, and where it picks."""

    count: int = 1  # type: ignore[assignment]  # tuples have a method of this name, which nobody needs here
    min_free: int | str | None = None
    max_utilization: float | None = None
    exclusive: bool = False
    name: str | None = None
    wait: float | str | None = None
    claim: bool = True
    # Name of the processes that share one choice. The first process makes it, and the others adopt it.
    group: str | None = None
    # UUIDs to pick from, in the order of the result. None: those in CUDA_VISIBLE_DEVICES, best first.
    among: Sequence[str] | None = None

    def checked(self) -> "Request":
        """Return the request; raise ``ValueError`` if an option is out of range."""
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ValueError(f"count must be an integer of at least 1, got {self.count!r}.")
        for option, value in (("exclusive", self.exclusive), ("claim", self.claim)):
            if value not in (True, False):
                raise ValueError(f"{option} must be True or False, got {value!r}.")
        if self.max_utilization is not None:
            check_percentage(self.max_utilization, "max_utilization")
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip()):
            raise ValueError(f'name must be a part of a model\'s name like "A100", got {self.name!r}.')
        if self.min_free == LAST_RUN:
            raise ValueError(
                "min_free='last' is only for the command line, the accelerator and strategies. Give a size."
            )
        _ = self.min_free_bytes, self.wait_s  # raises if they are invalid
        return self

    @property
    def names_gpus(self) -> bool:
        """Whether the request is for exactly the GPUs that it is ``among``."""
        return self.among is not None and len(self.among) == self.count

    @property
    def promises(self) -> bool:
        """Whether the request includes guarantees that depend on claims."""
        return self.exclusive or self.min_free is not None

    @property
    def min_free_bytes(self) -> int | None:
        """Effective free memory that each GPU must have; ``None`` if there is no requirement."""
        return None if self.min_free is None else parse_bytes(self.min_free, "min_free")

    @property
    def wait_s(self) -> float | None:
        """Seconds to wait; ``None``: do not wait."""
        return None if self.wait is None else parse_duration(self.wait, "wait")


def documented(cls: _Class) -> _Class:
    """Add the options to the arguments in the docstring of a class that takes them."""
    import inspect  # not needed for a pick

    text = inspect.cleandoc(cls.__doc__ or "")
    if "Args:\n" not in text:
        text = text.replace("Raises:\n", "Args:\n\nRaises:\n")
    options = "".join(f"    {name}: {meaning}\n" for name, meaning in OPTIONS.items())
    cls.__doc__ = text.replace("Args:\n", f"Args:\n{options}")
    return cls


# Source: nvitop's default threshold between light and moderate load (--gpu-util-thresh). It is a threshold, not a
# scale, because one percent of noise must not outweigh 20 GiB of memory.
BUSY_FROM_PERCENT = 10.0


# PyPI's wheels of torch 2.6 (CUDA 12.4) and later. Source: torch.cuda.PYTORCH_RELEASES_CODE_CC, and its history.
_OLDEST_CAPABILITY = (5, 0)


class Candidate(NamedTuple):
    """A GPU or MIG instance that meets the request."""

    gpu: GpuReading
    effective_free_bytes: int | None
    whole_claims: int  # number of jobs that have claimed the whole GPU

    @property
    def tier(self) -> tuple[bool, bool, int, int]:
        """Criteria before memory: not outdated, known memory, fewer claims, then idle before busy before unknown."""
        percent = self.gpu.utilization_percent
        load = 2 if percent is None else 1 if percent >= BUSY_FROM_PERCENT else 0
        return (is_outdated(self.gpu), self.effective_free_bytes is None, self.whole_claims, load)

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key, best first: tier, then most effective free memory, then the higher index."""
        return (*self.tier, -(self.effective_free_bytes or 0), -self.gpu.index, self.gpu.uuid or "")


def is_outdated(gpu: GpuReading) -> bool:
    """Return whether none of torch's wheels on PyPI has code for a GPU. Which build will use it may be unknown."""
    return gpu.compute_capability is not None and gpu.compute_capability < _OLDEST_CAPABILITY


class TorchBuild(NamedTuple):
    """A build of torch for CUDA, and the GPUs that it has code for."""

    version: str
    codes: tuple[str, ...]  # as in torch.cuda.get_arch_list()

    def why_not(self, gpu: GpuReading) -> str | None:
        """Return why this build cannot use a GPU; ``None`` if it can, or if the GPU's compute capability is unknown."""
        capability = gpu.compute_capability
        if capability is None or any(_runs(code, capability) for code in self.codes):
            return None
        versions = sorted({_capability_of(code) for code in self.codes})
        listed = ", ".join(f"{major}.{minor}" for major, minor in versions)
        own = f"compute capability {capability[0]}.{capability[1]}"
        return f"{own}; the installed torch {self.version} has code for {listed} only"


def _capability_of(code: str) -> tuple[int, int]:
    major, minor = divmod(int(code.rpartition("_")[2].rstrip("af")), 10)
    return major, minor


def _runs(code: str, capability: tuple[int, int]) -> bool:
    """Return whether code such as ``sm_86`` runs on a GPU. Source: CUDA programming guide, "Compute Capabilities"."""
    target = _capability_of(code)
    if code.endswith("a"):  # specific to one architecture
        return target == capability
    if code.startswith("compute_") and not code.endswith("f"):  # PTX, which the driver compiles for any later GPU
        return target <= capability
    return target[0] == capability[0] and target <= capability


class Rejection(NamedTuple):
    """A GPU that does not meet the request."""

    gpu: GpuReading
    reason: str

    def __str__(self) -> str:
        return f"{label(self.gpu)}: {self.reason}"


class Ranking(NamedTuple):
    """The usable GPUs, best first, and the unusable ones, in any order."""

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]


def rank_gpus(
    gpus: Sequence[GpuReading],
    claims: Sequence[GpuClaim],
    request: Request,
    own_process_ids: Collection[int] = (),
    ahead: Sequence[GpuWaiter] = (),
    torch: TorchBuild | None = None,
) -> Ranking:
    """Return the GPUs that meet the request, best first, and the reasons against the others.

    ``claims`` are those of other jobs; ``own_process_ids`` do not count as others' use. Jobs ``ahead`` have waited
    longer, the first one longest. The best GPUs that each of them could use are reserved for it, up to its count.
    Without a ``torch``, or with an unknown compute capability, it is not known whether torch can use a GPU: it may.
    """
    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    for gpu in gpus:
        here = [claim for claim in claims if claim.is_on(gpu.uuid)]
        candidate = Candidate(gpu, effective_free_bytes(gpu, here), sum(claim.kind != "memory" for claim in here))
        others = None
        if gpu.processes is not None:  # processes that only draw, like a desktop, do not count
            own = [process for process in gpu.processes if process.pid in own_process_ids and not process.is_foreign]
            others = [process for process in gpu.processes if process not in own and not process.graphics_only]
        outdated = torch and torch.why_not(gpu)
        reasons = "; ".join([outdated] if outdated else _objections(candidate, others, here, request))
        if reasons:
            rejections.append(Rejection(gpu, reasons))
        else:
            candidates.append(candidate)
    candidates.sort(key=lambda candidate: candidate.order)
    named = [*dict.fromkeys(waiter.user for waiter in ahead)][:MAX_USERS]
    for waiter in ahead:
        kept = [candidate for candidate in candidates if candidate.gpu.uuid in waiter.uuids][: waiter.requested]
        candidates = [candidate for candidate in candidates if candidate not in kept]
        reason = f"reserved for {waiter if waiter.user in named else 'another user'}, who has waited longer"
        rejections += [Rejection(candidate.gpu, reason) for candidate in kept]
    return Ranking(tuple(candidates), tuple(rejections))


def attainable(gpus: Sequence[GpuReading], request: Request, torch: TorchBuild | None = None) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that would meet the request if nobody used them."""
    left_alone = [
        gpu._replace(
            memory_free_bytes=gpu.memory_total_bytes,
            utilization_percent=None if gpu.utilization_percent is None else 0.0,
            processes=(),
        )
        for gpu in gpus
    ]
    return tuple(str(candidate.gpu.uuid) for candidate in rank_gpus(left_alone, (), request, torch=torch).candidates)


def effective_free_bytes(gpu: GpuReading, claims: Sequence[GpuClaim]) -> int | None:
    """Return the free memory minus memory that is claimed on this GPU but not yet used."""
    if gpu.memory_free_bytes is None:
        return None
    pending = 0
    for claim in claims:
        used = sum(
            process.memory_used_bytes or 0 for process in gpu.processes or () if process.pid in claim.process_ids
        )
        pending += max(0, (claim.memory_bytes or 0) - used)
    return max(0, gpu.memory_free_bytes - pending)


def why_picked(chosen: Sequence[Candidate], visible: Sequence[GpuReading]) -> str:
    """Return a sentence that lists the picked GPUs and explains the choice."""
    parts = []
    for candidate in chosen:
        free, percent = candidate.effective_free_bytes, candidate.gpu.utilization_percent
        memory = "free memory unknown" if free is None else f"{format_bytes(free)} free"
        load = "utilization unknown" if percent is None else f"{percent:.0f}% busy"
        claimed = ", also claimed by others" if candidate.whole_claims else ""
        parts.append(f"{label(candidate.gpu)} with {memory}, {load}{claimed}")
    return f"Picked {'; '.join(parts)}. Chosen from {len(visible)} visible: idle first, then most free memory."


def label(gpu: GpuReading) -> str:
    """Return ``GPU 2 (GPU-1a2b3c4d…)`` or ``MIG instance 2:0 (MIG-5e6f7a8b…)``."""
    kind = "GPU" if gpu.mig_index is None else "MIG instance"
    uuid = gpu.uuid or "UUID unknown"
    return f"{kind} {gpu.number} ({uuid if len(uuid) <= 13 else f'{uuid[:12]}…'})"


def folded_reasons(rejections: Sequence[Rejection]) -> list[str]:
    """Return each reason once, with its GPUs."""
    rejected: dict[str, list[GpuReading]] = {}
    for gpu, reason in rejections:
        rejected.setdefault(reason, []).append(gpu)
    return [f"{_labels(gpus)}: {reason}" for reason, gpus in rejected.items()]


def _labels(gpus: Sequence[GpuReading]) -> str:
    """Return ``8 GPUs (0 to 7)`` or ``112 MIG instances (of GPUs 0 to 15)``."""
    if len(gpus) == 1:
        return label(gpus[0])
    whole = [gpu.index for gpu in gpus if gpu.mig_index is None]
    parts = [gpu.index for gpu in gpus if gpu.mig_index is not None]
    named = [f"{plural(len(whole), 'GPU')} ({number_ranges(whole)})"] if whole else []
    if parts:
        of = f"of GPU{'s' * (len({*parts}) > 1)} {number_ranges(parts)}"
        named.append(f"{plural(len(parts), 'MIG instance')} ({of})")
    return " and ".join(named)


def _describe(process: GpuProcess) -> str:
    if not process.name:
        return FOREIGN if process.is_foreign else f"pid {process.pid}"
    owner = f" of {process.user}" if process.user else ""
    return f"{process.name}{owner} (pid {process.pid})"


def _objections(
    candidate: Candidate, others: list[GpuProcess] | None, claims: Sequence[GpuClaim], request: Request
) -> Iterator[str]:
    """Yield a reason for each requirement that the GPU does not meet. Unknown values meet no requirement."""
    gpu, free, percent = candidate.gpu, candidate.effective_free_bytes, candidate.gpu.utilization_percent
    if gpu.error or not gpu.uuid:
        yield gpu.error or "the driver does not report its UUID"
        return
    if gpu.mig_mode and not gpu.uuid.startswith("MIG-"):
        yield "is in MIG mode but has no instance; create one (`nvidia-smi mig -cgi ... -C`) or disable MIG mode"
        return
    if request.count > 1 and gpu.uuid.startswith("MIG-"):
        # MIG user guide, "CUDA Device Enumeration": a process can enumerate a single compute instance.
        # https://github.com/NVIDIA/nccl/issues/1716: NCCL has no support for MIG.
        limit = "CUDA shows a process only one MIG instance, and NCCL does not support MIG"
        yield f"{limit}, so it cannot be one of {request.count}"
    users = f"{_describe(others[0])}{f' and {len(others) - 1} more' * (len(others) > 1)}" if others else ""
    # A driver that does not report the mode (WSL, some vGPUs) has none to set, so unknown counts as "default".
    if gpu.compute_mode == "prohibited":
        yield "compute mode PROHIBITED; an administrator can change it with `nvidia-smi -c DEFAULT`"
    elif gpu.compute_mode == "exclusive_process" and others != []:
        yield f"compute mode EXCLUSIVE_PROCESS and in use by {users or 'processes that are not visible'}"
    exclusive = [claim for claim in claims if claim.kind == "exclusive"]
    if exclusive:
        yield f"claimed exclusively by {', '.join(folded_claims(exclusive, str))}"
    elif request.exclusive and claims:
        yield f"claimed by {', '.join(folded_claims(claims, str))}, but exclusive asks for a GPU without claims"
    if request.name is not None and request.name.strip().lower() not in (gpu.name or "").lower():
        yield f"is {gpu.name or 'a GPU without a name'}, asked for {request.name.strip()}"
    if request.min_free_bytes is not None:
        asked = f"asked for {format_bytes(request.min_free_bytes)}"
        if free is None:
            yield f"does not report its free memory, {asked}"
        elif free < request.min_free_bytes:
            claimed = (gpu.memory_free_bytes or 0) - free
            detail = f" ({format_bytes(claimed)} more are claimed)" if claimed else ""
            yield f"{format_bytes(free)} free{detail}, {asked}"
    if request.max_utilization is not None:
        asked = f"asked for at most {request.max_utilization:g}%"
        if percent is None:
            yield f"does not report its utilization, {asked}"
        elif percent > request.max_utilization:
            yield f"{percent:.0f}% busy, {asked}"
    if request.exclusive:
        if others is None:
            yield "its processes cannot be read, so it may be in use"
        elif others:
            yield f"in use by {users}"
        elif not gpu.processes and (percent or 0) >= BUSY_FROM_PERCENT:  # as seen from a container
            yield f"{percent:.0f}% busy although no process is visible from here"


# Our default: without a memory requirement of the job, a link may cost a tenth of the memory.
_MEMORY_KEPT = 0.9


def best_set(
    candidates: Sequence[Candidate],
    count: int,
    nvlinks: Collection[tuple[str, str]],
    numa_nodes: Mapping[str, int | None],
    memory_matters: bool,
) -> tuple[Candidate, ...]:
    """Return ``count`` of the candidates; both are ordered, best first.

    Tiers of the ranking always come first. Within the last tier, GPUs of one model come first. Such sets compare by
    pairs connected by NVLink, then by pairs on one NUMA node, then by the rank of their worst member. That member
    limits the batch size. A set is grown greedily from each GPU, because comparing all sets would take seconds for 8 of
    16.

    ``nvlinks`` are pairs of UUIDs in alphabetical order; ``memory_matters`` means that candidates may have too little.
    """
    last_tier = candidates[count - 1].tier
    certain = tuple(rank for rank, candidate in enumerate(candidates) if candidate.tier < last_tier)
    equals = [rank for rank, candidate in enumerate(candidates) if candidate.tier == last_tier]
    missing = count - len(certain)
    names = {candidates[rank].gpu.name for rank in certain}
    models: dict[str | None, list[int]] = {}
    for rank in equals:
        models.setdefault(candidates[rank].gpu.name, []).append(rank)
    # Members of one group, in their order, can complete the set.
    groups = [ranks for name, ranks in models.items() if name and names <= {name} and len(ranks) >= missing] or [equals]
    if memory_matters:
        free_bytes = [candidate.effective_free_bytes or 0 for candidate in candidates]
        min_bytes = _MEMORY_KEPT * max(free_bytes[ranks[missing - 1]] for ranks in groups)
        groups = [[rank for rank in ranks if free_bytes[rank] >= min_bytes] for ranks in groups]
    uuids = [str(candidate.gpu.uuid) for candidate in candidates]

    def quality(chosen: Iterable[int]) -> tuple[int, int, list[int]]:
        pairs = itertools.combinations(sorted(uuids[rank] for rank in chosen), 2)
        nodes = Counter(numa_nodes.get(uuids[rank]) for rank in chosen)
        return (
            sum(pair in nvlinks for pair in pairs),
            sum(math.comb(number, 2) for node, number in nodes.items() if node is not None),
            sorted(-rank for rank in chosen),
        )

    def grown(seed: int, ranks: Sequence[int]) -> tuple[int, ...]:
        chosen = (*certain, seed)
        while len(chosen) < count:
            chosen = max(((*chosen, rank) for rank in ranks if rank not in chosen), key=quality)
        return chosen

    sets = [grown(seed, ranks) for ranks in groups if len(ranks) >= missing for seed in ranks]
    return tuple(candidates[rank] for rank in sorted(max(sets, key=quality)))
