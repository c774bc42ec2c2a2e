"""Picking GPUs: read, rank, and claim them in one step that is atomic with respect to other jobs."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lightning_gpu_tools.errors import ClaimsError, ClaimsLockedError, CudaAlreadyInitializedError, NotEnoughGpusError
from lightning_gpu_tools.gpus import limits
from lightning_gpu_tools.gpus.readings import GpuClaim, GpuReading, GpuWaiter
from lightning_gpu_tools.selection import claims, cuda
from lightning_gpu_tools.selection.cuda import whole_or_instances
from lightning_gpu_tools.selection.ranking import (
    Ranking,
    Rejection,
    Request,
    attainable,
    best_set,
    folded_reasons,
    rank_gpus,
    why_picked,
)
from lightning_gpu_tools.units import format_duration, plural

_T = TypeVar("_T")

# Our defaults: the first job in the queue polls about once a second, and the n-th one every n seconds, because others
# come first.
_POLL_AFTER_S = 0.8
_POLL_JITTER_S = 0.4  # random, so that waiting processes do not poll in lockstep
_MAX_POLL_AFTER_S = 300.0
_ANNOUNCE_EVERY_S = 60.0
_FULL_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class GpuSelection:
    """The picked GPUs, and the claim on them, which lasts until ``release()`` or the end of this process.

    As a context manager, it releases the claim at the end of the block.

    Attributes:
        gpus: Readings of the GPUs at the time of the pick, best first.
        reason: A sentence that explains the choice; empty if another process of the job picked them.
    """

    def __init__(self, gpus: tuple[GpuReading, ...], reason: str, claim: claims.HeldClaim | None = None) -> None:
        self.gpus = gpus
        self.reason = reason
        self._claim = claim

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs, best first."""
        return tuple(gpu.uuid for gpu in self.gpus if gpu.uuid)

    @property
    def cuda_visible_devices(self) -> str:
        """The value for ``CUDA_VISIBLE_DEVICES`` that makes only these GPUs visible, with the best as ``cuda:0``."""
        return ",".join(self.uuids)

    def apply(self) -> None:
        """Restrict this process and its children to these GPUs.

        Raises:
            CudaAlreadyInitializedError: CUDA has already started in this process and sees other GPUs.
        """
        show_gpus(self.uuids)
        self.adopt()

    def adopt(self) -> None:
        """Make the claim count as that of this process and its children."""
        if self._claim:
            claims.adopt_job(self._claim.job)

    def release(self) -> None:
        """Release the claim. Does not change ``CUDA_VISIBLE_DEVICES``."""
        if self._claim:
            self._claim.release()

    def __repr__(self) -> str:
        return self.reason or f"{self.cuda_visible_devices}, which another process of this job has picked"

    def __enter__(self) -> GpuSelection:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_applied: set[str] = set()  # values of CUDA_VISIBLE_DEVICES that this process has set


def show_gpus(uuids: Sequence[str]) -> None:
    """Set ``CUDA_VISIBLE_DEVICES``; nothing else in the package does."""
    mask, before = ",".join(uuids), os.environ.get("CUDA_VISIBLE_DEVICES")
    if before != mask and cuda.is_initialized():
        raise CudaAlreadyInitializedError(
            "CUDA has already started in this process and has read CUDA_VISIBLE_DEVICES. Pick the GPUs before anything "
            "uses CUDA, including torch.cuda.is_available(), which can start it."
        )
    if before != mask and before in _applied:
        claims.warn(
            f"All threads of this process see only {mask} from now on, instead of {before}. To use all these GPUs in "
            "one process, pick them together, with one select_gpus()."
        )
    _applied.add(mask)
    os.environ["CUDA_VISIBLE_DEVICES"] = mask


def list_gpus() -> list[GpuReading]:
    """Return every GPU of this machine in PCI order, regardless of ``CUDA_VISIBLE_DEVICES``.

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
    name: str | None = None,
    wait: float | str | None = None,
    claim: bool = True,
) -> GpuSelection:
    """Pick the GPUs with the most free memory, idle ones first, and claim them until this process ends.

    Only GPUs in the inherited ``CUDA_VISIBLE_DEVICES`` are considered. Claims are an agreement among users of this
    package; they do not keep other programs off a GPU.

    Ranks that Lightning's DDP starts get the GPUs that the first rank applied. Under torchrun, SLURM, and MPI, each
    rank picks its own GPUs. There, use :class:`lightning_gpu_tools.FreeMemoryCUDAAccelerator` or a strategy.

    Args:
        count: Number of GPUs. You never get fewer.
        min_free: Free memory that each GPU must have in addition to live claims, as bytes, ``"8GiB"`` or, as in SLURM,
            ``"8G"``. This amount is claimed on each GPU. By default, all memory is claimed, and others use these GPUs
            only as a last resort.
        max_utilization: Highest allowed utilization of each GPU, in percent.
        exclusive: Take only GPUs that nobody else uses or has claimed, and let nobody else claim them.
        name: Part of the model's name that each GPU must have, such as ``"A100"``, in upper or lower case.
        wait: Longest time to wait, in seconds or as ``"10m"``. ``None``: do not wait. First come, first served: GPUs
            are reserved for jobs that have waited longer.
        claim: Whether to claim the GPUs. The claims of others are respected in any case.

    Raises:
        NotEnoughGpusError: Fewer than ``count`` GPUs qualify; the message lists the reasons.
        NvmlUnavailableError: There is no usable NVIDIA driver.
        ClaimsError: Claims cannot be read or made, and ``exclusive`` or ``min_free`` depend on them. Otherwise, there
            is only a warning, and the GPUs are not claimed.
        ValueError: An option is out of range.
    """
    request = Request(count, min_free, max_utilization, exclusive, name, wait, claim)
    return pick(request.checked(), Attempt.choose)


class Attempt:
    """One attempt to get GPUs, with the claims locked."""

    def __init__(
        self,
        request: Request,
        ledger: claims.Ledger,
        read_gpus: Callable[[], tuple[GpuReading, ...]],
        ahead: Sequence[GpuWaiter],  # jobs that have waited longer
    ) -> None:
        self.request = request
        self.ledger = ledger
        self.read_gpus = read_gpus
        self.ahead = ahead

    @functools.cached_property
    def gpus(self) -> tuple[GpuReading, ...]:
        """All GPUs of the machine, read from the driver on first use."""
        return self.read_gpus()

    @property
    def visible(self) -> tuple[GpuReading, ...]:
        """The GPUs that may be picked, in CUDA's order."""
        if self.request.among is None:
            mask, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
            return cuda.visible_gpus(self.gpus, mask, order)
        by_uuid = {gpu.uuid: gpu for gpu in whole_or_instances(self.gpus)}
        return tuple(by_uuid[uuid] for uuid in self.request.among if uuid in by_uuid)

    @property
    def visible_uuids(self) -> tuple[str, ...]:
        """The UUIDs of ``visible``. Does not use the driver if ``CUDA_VISIBLE_DEVICES`` has full UUIDs."""
        entries = self.request.among
        if entries is None:
            entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if len({*entries}) < len(entries) or not all(map(_FULL_UUID.fullmatch, entries)):
                entries = [str(gpu.uuid) for gpu in self.visible]
        return tuple(entries)

    @functools.cached_property
    def live_claims(self) -> tuple[GpuClaim, ...]:
        """The live claims, oldest first."""
        gpus = whole_or_instances(self.gpus)
        return self.ledger.claims(
            {process.pid for gpu in gpus for process in gpu.processes or () if not process.is_foreign}
        )

    def rank(self, request: Request, ahead: Sequence[GpuWaiter] = ()) -> Ranking:
        """Rank the GPUs that may be picked, for this or another request."""
        others = [claim for claim in self.live_claims if not claims.is_of_own_job(claim)]
        return rank_gpus(self.visible, others, request, {os.getpid()}, ahead, cuda.installed_torch(self.gpus))

    def choose(self) -> GpuSelection:
        """Pick and claim GPUs. Raise the errors of :func:`select_gpus`."""
        if self.ledger.problem:
            self._continue_without_claims(self.ledger.problem)
        visible = self.visible
        by_uuid = {gpu.uuid: gpu for gpu in visible}
        for claim in reversed(self.live_claims):
            if self.is_choice_of_job(claim) and by_uuid.keys() >= {*claim.uuids}:
                held = self.ledger.join(claim) if self.ledger.takes_claims else None
                return GpuSelection(tuple(by_uuid[uuid] for uuid in claim.uuids), "", held)
        request = self.request
        ranking = self.rank(request, self.ahead)
        candidates, count = ranking.candidates, request.count
        if len(candidates) < count:
            raise self._not_enough(ranking)
        chosen = candidates[:count]
        if count not in (1, len(candidates)):
            from lightning_gpu_tools.gpus import nvml

            links, nodes = nvml.read_connections([str(candidate.gpu.uuid) for candidate in candidates])
            chosen = best_set(candidates, count, links, nodes, memory_matters=request.min_free_bytes is None)
        models = [candidate.gpu.name or "unknown" for candidate in chosen]
        if len({*models}) > 1 and not request.names_gpus:
            differ = f"The {count} picked GPUs differ ({', '.join(models)})"
            claims.warn_once(f"{differ}. Training waits for the slowest in each step.")
        if request.among is not None:  # child processes number GPUs in this order once CUDA has started in the parent
            chosen = tuple(sorted(chosen, key=lambda candidate: visible.index(candidate.gpu)))
        held = None
        if self.ledger.takes_claims and (request.claim or request.group is not None):
            try:
                held = self.take([str(candidate.gpu.uuid) for candidate in chosen])
            except ClaimsError as error:
                self._continue_without_claims(error)
        return GpuSelection(tuple(candidate.gpu for candidate in chosen), why_picked(chosen, visible), held)

    def is_choice_of_job(self, claim: GpuClaim) -> bool:
        """Return whether another process of this job made this choice. Picking again could give a different result."""
        if self.request.group is not None and claim.group == self.request.group:
            return claims.is_trusted(claim)  # anybody can write any group name
        # Lightning's DDP starts the other ranks by running the script again, so they repeat the first rank's request.
        is_rank = "LOCAL_RANK" in os.environ
        return is_rank and claims.is_of_own_job(claim) and len(claim.uuids) == self.request.count

    def take(self, uuids: Sequence[str], *, share: bool = False) -> claims.HeldClaim:
        """Claim GPUs as requested; if others ``share`` them, as ``whole``, which contradicts no other claim."""
        request = self.request
        take = functools.partial(self.ledger.take, uuids, group=request.group)
        if not request.claim:
            return take("memory", 0)  # only so that the others of the group can find it
        if share or not request.promises:
            return take("whole")
        return take("exclusive") if request.exclusive else take("memory", request.min_free_bytes)

    def _continue_without_claims(self, error: ClaimsError) -> None:
        """Warn that there are no claims, or raise the error if a guarantee depends on them."""
        request = self.request
        # If all GPUs are requested by number, every process of the group gets the same result.
        if (request.group is not None and not request.names_gpus) or (request.claim and request.promises):
            raise error
        claims.warn_once(f"{error}{' The GPUs of this job are not claimed.' * request.claim}")

    def _not_enough(self, ranking: Ranking) -> NotEnoughGpusError:
        request, mask, visible = self.request, os.environ.get("CUDA_VISIBLE_DEVICES"), self.visible
        outside = f"outside CUDA_VISIBLE_DEVICES={mask!r}" if request.among is None else "not among the requested GPUs"
        hidden = [Rejection(gpu, outside) for gpu in whole_or_instances(self.gpus) if gpu not in visible]
        rejections = [*ranking.rejections, *hidden]
        rejections.sort(key=lambda rejection: (rejection.gpu.index, rejection.gpu.mig_index or 0))
        message = f"Asked for {plural(request.count, 'GPU')}, but "
        if not self.gpus:
            message += "the NVIDIA driver lists none."
        else:
            message += f"{len(ranking.candidates)} of {plural(len(visible), 'visible GPU')} can be used."
            if mask is not None and request.among is None and (fault := cuda.few_visible(self.gpus, mask)):
                message += f" {fault}"
        message = "\n  ".join([message, *folded_reasons(rejections)])
        return NotEnoughGpusError(message, request.count, [str(rejection) for rejection in rejections])


def pick(request: Request, decide: Callable[[Attempt], _T]) -> _T:
    """Call ``decide`` with the claims locked. With ``wait``, repeat until it raises no ``NotEnoughGpusError``."""
    from lightning_gpu_tools.gpus import nvml

    waits = request.wait_s is not None
    give_up_s = time.monotonic() + (request.wait_s or 0.0)
    announced_s = -math.inf
    place = None  # in the queue
    with contextlib.ExitStack() as until_the_end:

        @functools.cache
        def keep_open() -> None:
            # A process with a job opens the driver while others wait for the claims. This is fast: its GPUs are awake.
            limit_s = limits.LIMIT_S if claims.own_jobs() else limits.OPENING_LIMIT_S
            until_the_end.enter_context(nvml.session(limit_s))

        def read_gpus() -> tuple[GpuReading, ...]:
            keep_open()
            return nvml.read_gpus(limit_s=limits.LIMIT_S)

        if not claims.own_jobs():  # otherwise, the driver may not be needed
            keep_open()  # before taking the lock, because this takes seconds without persistence mode
        if request.promises or waits:
            claims.warn_if_private()
        while True:
            with _ledger(waits or request.claim or request.group is not None) as ledger:
                if isinstance(ledger.problem, ClaimsLockedError) and time.monotonic() < give_up_s:
                    claims.warn_once(f"{ledger.problem} Waiting for the lock.")
                    continue
                ahead = ledger.waiters if waits else ()
                if place and place.name in (names := [waiter.name for waiter in ahead]):
                    ahead = ahead[: names.index(place.name)]
                attempt = Attempt(request, ledger, read_gpus, ahead)
                try:
                    return decide(attempt)
                except NotEnoughGpusError as error:
                    if not waits:
                        raise
                    reasons = error
                if announced_s == -math.inf:  # the first time
                    uuids = attainable(attempt.visible, attempt.request, cuda.installed_torch(attempt.gpus))
                    if len(uuids) < attempt.request.count:
                        raise _prefixed(reasons, "Waiting cannot help, because even idle GPUs would not qualify.")
                if ledger.takes_claims and not (place and place.is_in(claims.directory())):  # it may have been removed
                    place = ledger.queue(uuids, attempt.request.count)
                    until_the_end.callback(place.release)
            now_s = time.monotonic()
            if now_s >= give_up_s:
                raise _prefixed(reasons, f"Waited {format_duration(request.wait_s or 0.0)}.")
            if now_s - announced_s >= _ANNOUNCE_EVERY_S:
                announced_s = now_s
                queue = f", behind {plural(len(ahead), 'other job')}" if ahead else ""
                claims.warn(f"Waiting for up to {format_duration(give_up_s - now_s)}{queue}. {reasons}")
            _sleep(now_s, give_up_s, ahead)


def _sleep(polled_s: float, give_up_s: float, ahead: Sequence[GpuWaiter]) -> None:
    """Sleep until the next poll is due, or the job directly ahead no longer waits."""
    due_s = min(give_up_s, polled_s + min(_MAX_POLL_AFTER_S, len(ahead) * _POLL_AFTER_S))
    while True:
        pause_s = _POLL_AFTER_S + _POLL_JITTER_S * os.urandom(1)[0] / 255
        time.sleep(max(0.0, min(pause_s, give_up_s - time.monotonic())))
        if time.monotonic() >= due_s or (ahead and not claims.is_waiting(ahead[-1])):
            return


def _prefixed(error: NotEnoughGpusError, sentence: str) -> NotEnoughGpusError:
    return NotEnoughGpusError(f"{sentence} {error.args[0]}", error.requested, error.rejected)


@contextlib.contextmanager
def _ledger(writes: bool) -> Iterator[claims.Ledger]:
    """Yield the claims, locked if ``writes`` and if that is possible."""
    path = claims.directory()
    problem = None
    with contextlib.ExitStack() as stack:
        try:
            ledger = stack.enter_context(claims.open_ledger(path) if writes else claims.read_ledger(path))
        except ClaimsError as error:
            problem = error
            try:
                ledger = stack.enter_context(claims.read_ledger(path))  # works even if another process has locked it
            except ClaimsError:
                problem = ClaimsError(f"{error} The claims of other jobs are unknown.")
                ledger = claims.Ledger()
        ledger.problem = problem
        yield ledger
