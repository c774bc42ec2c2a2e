"""Pick GPUs: read them, rank them and claim the best, all in one step that nobody else can come between."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, NamedTuple

from lightning_gpu_tools.errors import ClaimsError, CudaAlreadyInitializedError, NotEnoughGpusError
from lightning_gpu_tools.gpus.readings import GpuClaim, GpuReading, GpuWaiter
from lightning_gpu_tools.selection import claims, cuda
from lightning_gpu_tools.selection.explanations import sharding_hint, why_picked
from lightning_gpu_tools.selection.ranking import Candidate, Ranking, Rejection, Requirements, attainable, rank_gpus
from lightning_gpu_tools.selection.visibility import visible_gpus
from lightning_gpu_tools.units import format_duration, parse_bytes, parse_duration

# A look at 8 GPUs takes some 0.1 s. Random, so that those who wait do not all look at the same moment.
_POLL_AFTER_S = 0.8
_POLL_JITTER_S = 0.4
_ANNOUNCE_EVERY_S = 60.0

# Names of the jobs whose claims this process and its children count as their own, comma-separated.
JOB_VARIABLE = "LIGHTNING_GPU_TOOLS_JOB"


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """The GPUs that were picked. As a context manager it releases its claim at the end of the block.

    Without ``release`` the claim lives as long as this process.

    Attributes:
        gpus: What was read of them when they were picked, the best first.
        reason: One sentence that names them, their free memory, and what they were picked from; empty if another
            process of the job has picked them.
    """

    gpus: tuple[GpuReading, ...]
    reason: str
    _claim: claims.Held | None = None
    _released: list[bool] = field(default_factory=list)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs, the best first."""
        return tuple(gpu.uuid for gpu in self.gpus if gpu.uuid)

    @property
    def cuda_visible_devices(self) -> str:
        """The value of ``CUDA_VISIBLE_DEVICES`` with which a program sees these GPUs only, the best as ``cuda:0``."""
        return ",".join(self.uuids)

    def apply(self) -> None:
        """Let this process and its children see these GPUs only. Does nothing if they do so already.

        Raises:
            CudaAlreadyInitializedError: CUDA has started in this process, so that it is too late for that.
        """
        if os.environ.get("CUDA_VISIBLE_DEVICES") != self.cuda_visible_devices:
            if cuda.is_initialized():
                raise CudaAlreadyInitializedError(
                    "CUDA has started in this process and has read CUDA_VISIBLE_DEVICES already. Pick the GPUs before "
                    "anything uses them, which torch.cuda.is_available() may count as."
                )
            os.environ["CUDA_VISIBLE_DEVICES"] = self.cuda_visible_devices
        self.adopt()

    def adopt(self) -> None:
        """Count the claim as one of this process and of its children, so that it does not stand in their way."""
        if self._claim:
            adopt_job(self._claim.name)

    def pass_on(self) -> None:
        """Let the program that this process is about to execute hold the claim."""
        if self._claim:
            self._claim.pass_on()

    def release(self) -> None:
        """Give the GPUs back for others to claim. ``CUDA_VISIBLE_DEVICES`` stays as it is."""
        if self._claim and not self._released:
            self._released.append(True)
            self._claim.release()

    def __enter__(self) -> GpuSelection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def list_gpus() -> list[GpuReading]:
    """Return every GPU of this machine in PCI order, whatever ``CUDA_VISIBLE_DEVICES`` says.

    Raises:
        NvmlUnavailableError: There is no usable NVIDIA driver.
    """
    from lightning_gpu_tools.gpus import nvml

    return list(nvml.read_gpus())


def select_gpus(
    count: int = 1,
    *,
    min_free: int | str | None = None,
    max_utilization: float | None = None,
    exclusive: bool = False,
    wait: float | str | None = None,
    claim: bool = True,
) -> GpuSelection:
    """Pick the GPUs with the most free memory, idle ones first, and claim them until this process ends.

    Only GPUs inside the inherited ``CUDA_VISIBLE_DEVICES`` are looked at. Claims are a promise among those who use this
    package; they keep nobody else away.

    In a script that Lightning's DDP starts once more for each rank, the ranks find what the first one has claimed and
    applied, and get the same GPUs. Under torchrun and SLURM each rank picks for itself; there
    :class:`lightning_gpu_tools.FreeMemoryCUDAAccelerator` and the strategies choose once for all of them.

    Args:
        count: How many. Fewer are never given.
        min_free: Memory that each must have free, beyond what live claims still mean to use: ``"8GiB"`` or bytes. That
            much is then claimed of each. Without it all of each is claimed, which makes others pick it last.
        max_utilization: Highest utilization in percent that each may have.
        exclusive: Whether nobody else may be on them, and nobody else may claim them meanwhile.
        wait: For how long to wait for them, ``"10m"`` or seconds. Those who wait are served in the order in which they
            came: for who came before, as many GPUs are kept as they asked for. ``None``: do not wait.
        claim: Whether to claim them at all; the claims of others count in any case.

    Raises:
        NotEnoughGpusError: Fewer than ``count`` GPUs qualify; the message says why each other one does not.
        NvmlUnavailableError: There is no usable NVIDIA driver.
        ClaimsError: Claims cannot be read or made, and ``exclusive`` or ``min_free`` rest on them. Without these it is
            logged as a warning, and the GPUs are not claimed.
        ValueError: An argument is out of range.
    """
    return pick(Request.parse(count, min_free, max_utilization, exclusive, wait, claim))


class Request(NamedTuple):
    """The arguments of ``select_gpus``, checked, and what its other callers have to add.

    Attributes:
        requirements: What is asked for.
        wait_s: For how long to wait, ``None`` = not at all.
        claim: Whether to claim.
        group: Name of processes which share one choice: the first one makes it, the others take it over.
        among: UUIDs to pick from, instead of ``CUDA_VISIBLE_DEVICES``. The choice is then given in their order, not
            the best first. ``None`` = what ``CUDA_VISIBLE_DEVICES`` says.
        uuids_only: Whether nothing but the UUIDs is wanted of the choice. Then no more is read than deciding takes.
    """

    requirements: Requirements
    wait_s: float | None = None
    claim: bool = True
    group: str | None = None
    among: tuple[str, ...] | None = None
    uuids_only: bool = False

    @classmethod
    def parse(
        cls,
        count: int = 1,
        min_free: int | str | None = None,
        max_utilization: float | None = None,
        exclusive: bool = False,
        wait: float | str | None = None,
        claim: bool = True,
    ) -> Request:
        """Check what the user typed, see ``select_gpus``.

        Raises:
            ValueError: An argument is out of range.
        """
        requirements = Requirements(
            count=count,
            min_free_bytes=None if min_free is None else parse_bytes(min_free, "min_free"),
            max_utilization_percent=max_utilization,
            exclusive=exclusive,
        )
        wait_s = None if wait is None else parse_duration(wait, "wait")
        return cls(requirements=requirements, wait_s=wait_s, claim=claim)


def pick(request: Request) -> GpuSelection:
    """Do what ``select_gpus`` does."""
    from lightning_gpu_tools.gpus import nvml

    # One session for all the attempts: opening the driver can take seconds where persistence mode is off.
    with nvml.session():
        if request.wait_s is not None:
            return _wait_and_pick(request, request.wait_s)
        with _ledger(request) as ledger:
            return _attempt(request, ledger)


def visible() -> tuple[GpuReading, ...]:
    """Return the GPUs and MIG instances that ``CUDA_VISIBLE_DEVICES`` lets through, in CUDA's order."""
    return _read(None)[1]


def known_claims() -> tuple[GpuClaim, ...]:
    """Return the live claims; none where they cannot be read, which whoever claims is told."""
    with contextlib.suppress(ClaimsError), claims.read_ledger(claims.directory()) as ledger:
        return ledger.claims()
    return ()


def own_jobs() -> list[str]:
    """Return the names of the jobs that this process counts as its own."""
    return [job for job in os.environ.get(JOB_VARIABLE, "").split(",") if job]


def is_of_own_job(claim: GpuClaim) -> bool:
    """Return whether a claim is that of this process's job. Others know its name, too, so its owner counts."""
    return claim.job in own_jobs() and _is_trusted(claim)


def _is_trusted(claim: GpuClaim) -> bool:
    return claim.owner_id in (os.geteuid(), 0)  # root may have started this job for its user


def adopt_job(job: str) -> None:
    """Count a job's claims as those of this process and of its children."""
    os.environ[JOB_VARIABLE] = ",".join(dict.fromkeys([*own_jobs(), job]))


@contextlib.contextmanager
def _ledger(request: Request) -> Iterator[claims.Ledger]:
    """The claims: to oneself if there is something to write, as they are if not; empty where they cannot be read."""
    path = claims.directory()
    writes = request.claim or request.group is not None or request.wait_s is not None
    with contextlib.ExitStack() as stack:
        try:
            ledger = stack.enter_context(claims.open_ledger(path) if writes else claims.read_ledger(path))
        except ClaimsError as error:
            try:
                ledger = stack.enter_context(claims.read_ledger(path))  # as where another process has locked it
            except ClaimsError:
                ledger = claims.Ledger(path)
                _go_on_without(error, request, "It is not known what other jobs have claimed.")
            else:
                _go_on_without(error, request)
        yield ledger


def _go_on_without(error: ClaimsError, request: Request, consequence: str = "") -> None:
    """Say that claims cannot be read or made; raise the error if a promise rests on them."""
    needs = request.requirements
    if request.group is not None or (request.claim and (needs.exclusive or needs.min_free_bytes is not None)):
        raise error
    if request.claim:
        consequence += " The GPUs of this job are not claimed."
    claims.warn_once(f"{error} {consequence.strip()}".strip())


def _wait_and_pick(request: Request, wait_s: float) -> GpuSelection:
    import logging  # takes a twentieth of the time of a pick

    deadline_s = time.monotonic() + wait_s
    announce_s = -math.inf
    with contextlib.ExitStack() as place_in_queue:
        place = ""
        is_worth_it = False
        while True:
            with _ledger(request) as ledger:
                names = [waiter.name for waiter in ledger.waiters]
                ahead = ledger.waiters[: names.index(place) if place in names else None]
                try:
                    return _attempt(request, ledger, ahead)
                except NotEnoughGpusError as error:
                    reasons = error
                    if not is_worth_it:
                        uuids = _attainable(request, reasons)
                        is_worth_it = True
                        if ledger.takes_claims:
                            waiter = ledger.queue(uuids, request.requirements.count)
                            place = waiter.name
                            place_in_queue.callback(waiter.release)
            now_s = time.monotonic()
            if now_s >= deadline_s:
                message = f"Waited {format_duration(wait_s)}. {reasons.args[0]}"
                raise NotEnoughGpusError(message, reasons.requested, reasons.rejected)
            if now_s - announce_s >= _ANNOUNCE_EVERY_S:
                announce_s = now_s
                logging.getLogger(__name__).warning(
                    "Waiting for up to %s. %s", format_duration(deadline_s - now_s), reasons
                )
            time.sleep(min(_POLL_AFTER_S + _POLL_JITTER_S * os.urandom(1)[0] / 255, deadline_s - now_s))


def _attainable(request: Request, reasons: NotEnoughGpusError) -> tuple[str, ...]:
    """Return the GPUs worth waiting for.

    Raises:
        NotEnoughGpusError: No waiting can help.
    """
    _, visible = _read(request.among)
    uuids = attainable(visible, request.requirements)
    if len(uuids) < request.requirements.count:
        message = f"{reasons.args[0]} Waiting cannot help: even unused GPUs would not do."
        raise NotEnoughGpusError(message, reasons.requested, reasons.rejected)
    return uuids


def _attempt(request: Request, ledger: claims.Ledger, ahead: Sequence[GpuWaiter] = ()) -> GpuSelection:
    """Pick and claim, with the ledger to oneself so that nobody picks from the same readings.

    Raises:
        NotEnoughGpusError: There is no such set.
    """
    brief = request.uuids_only and _suffices_brief(request, ledger)
    gpus, visible = _read(request.among, brief=brief)
    process_ids = {process.pid for gpu in _with_instances(gpus) for process in gpu.processes or ()}
    live = ledger.claims(process_ids)
    for other in reversed(live):
        if is_choice_of_job(other, request) and set(other.uuids) <= {gpu.uuid for gpu in visible}:
            return _take_over(other, visible, ledger.join(other) if ledger.takes_claims else None)
    others = [other for other in live if not is_of_own_job(other)]
    ranking = rank_gpus(visible, others, request.requirements, {os.getpid()}, ahead)
    if len(ranking.candidates) < request.requirements.count:
        if brief:  # the reasons take all there is to read
            return _attempt(request._replace(uuids_only=False), ledger, ahead)
        raise _not_enough(request, gpus, visible, ranking, others)
    chosen = _choose(ranking.candidates, request.requirements)
    if request.among is not None:
        chosen = tuple(sorted(chosen, key=lambda one: visible.index(one.gpu)))
    held = None
    if ledger.takes_claims and (request.claim or request.group is not None):
        kind, memory_bytes = what_to_claim(request)
        try:
            held = ledger.take([str(one.gpu.uuid) for one in chosen], kind, memory_bytes, group=request.group)
        except ClaimsError as error:
            _go_on_without(error, request)
    return GpuSelection(tuple(one.gpu for one in chosen), why_picked(chosen, visible), held)


def is_choice_of_job(claim: GpuClaim, request: Request) -> bool:
    """Return whether another process of this job has made the choice already, and this process only has to follow.

    To choose anew could give another order, or nothing: meanwhile the job itself uses these GPUs.
    """
    if request.group is not None and claim.group == request.group:
        return _is_trusted(claim)  # anybody can write any name of a group
    # Lightning's DDP starts its other ranks by running the script again, so that they ask what the first one has asked.
    is_rank = "LOCAL_RANK" in os.environ
    return is_rank and is_of_own_job(claim) and len(claim.uuids) == request.requirements.count


def _choose(candidates: Sequence[Candidate], requirements: Requirements) -> tuple[Candidate, ...]:
    """Return the best set of them. How GPUs are joined is only asked if there is something to choose."""
    if requirements.count in (1, len(candidates)):
        return tuple(candidates[: requirements.count])
    from lightning_gpu_tools.gpus import nvml
    from lightning_gpu_tools.selection.gpu_sets import best_set

    uuids = [str(one.gpu.uuid) for one in candidates]
    return best_set(
        candidates,
        requirements.count,
        nvml.read_links(uuids),
        nvml.read_numa_nodes(uuids),
        memory_matters=requirements.min_free_bytes is None,
    )


def _suffices_brief(request: Request, ledger: claims.Ledger) -> bool:
    """Return whether names, PCI addresses and processes cannot change the choice."""
    by_uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-").startswith(("GPU-", "MIG-"))
    return by_uuid and not request.requirements.exclusive and not ledger.claims()


def _read(among: Sequence[str] | None, *, brief: bool = False) -> tuple[tuple[GpuReading, ...], tuple[GpuReading, ...]]:
    """Return all GPUs, and those of them and of their MIG instances that may be picked, in CUDA's order."""
    from lightning_gpu_tools.gpus import nvml

    gpus = nvml.read_gpus(brief=brief)
    if among is not None:
        by_uuid = {gpu.uuid: gpu for gpu in _with_instances(gpus)}
        return gpus, tuple(by_uuid[uuid] for uuid in among if uuid in by_uuid)
    mask, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    return gpus, visible_gpus(gpus, mask, order, cuda.device_order)


def _not_enough(
    request: Request,
    gpus: Sequence[GpuReading],
    visible: Sequence[GpuReading],
    ranking: Ranking,
    others: Sequence[GpuClaim],
) -> NotEnoughGpusError:
    count, mask = request.requirements.count, os.environ.get("CUDA_VISIBLE_DEVICES")
    outside = f"outside CUDA_VISIBLE_DEVICES={mask!r}" if request.among is None else "not among those asked for"
    hidden = [Rejection(gpu=gpu, reason=outside) for gpu in _with_instances(gpus) if gpu not in visible]
    rejections = sorted([*ranking.rejections, *hidden], key=lambda rejection: rejection.gpu.index)
    asked = f"Asked for {count} GPU{'s' if count > 1 else ''}"
    if gpus:
        message = f"{asked}, but {len(ranking.candidates) or 'none'} of {len(visible)} visible qualify."
        message += sharding_hint(visible, others, request.requirements, {os.getpid()})
    else:
        message = f"{asked}, but the NVIDIA driver lists none."
    return NotEnoughGpusError(message, count, [str(rejection) for rejection in rejections])


def _with_instances(gpus: Sequence[GpuReading]) -> list[GpuReading]:
    return [part for gpu in gpus for part in (gpu.mig_instances or (gpu,))]


def what_to_claim(request: Request) -> tuple[Literal["memory", "whole", "exclusive"], int | None]:
    """Return the kind of claim that a request asks for, and its ``memory_bytes``."""
    if not request.claim:
        return "memory", 0  # only to be found by the others of the group
    if request.requirements.exclusive:
        return "exclusive", None
    if request.requirements.min_free_bytes is not None:
        return "memory", request.requirements.min_free_bytes
    return "whole", None


def _take_over(claim: GpuClaim, visible: Sequence[GpuReading], held: claims.Held | None) -> GpuSelection:
    by_uuid = {gpu.uuid: gpu for gpu in visible}
    return GpuSelection(tuple(by_uuid[uuid] for uuid in claim.uuids), "", held)
