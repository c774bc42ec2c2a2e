"""Whether workers may be added to a loader; if not, why, and what to change first. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_gpu_tools.training.run_measurements import LoaderFacts
from lightning_gpu_tools.units import plural, printable

_MAX_NAMED = 3  # our default
_BY_INFO = "torch.utils.data.get_worker_info(): files[info.id::info.num_workers], or all if info is None."
# How a stream gets a part for each worker.
_SPLIT = f"Split what `__iter__` reads by {_BY_INFO}"
_SPLIT_WEBDATASET = "Add webdataset.split_by_worker to its pipeline, after the list of shards."
OPEN_IN_WORKER = "Open it in the worker, when it loads its first sample. Load no sample before the workers start."
CHANGES = (
    "its dataset changes while it is used (a cache, or its own random generator), and the copies in the workers would "
    "change separately"
)


class WorkersAllowed(NamedTuple):
    """Whether a loader may have more workers, and how many."""

    reasons: str = ""  # why it may have none as it is, and what to change about that, in sentences
    most: int | None = None  # the highest number that is of use, once there are no reasons; None: no limit
    why_most: str = ""


def workers_allowed(facts: LoaderFacts | None) -> WorkersAllowed:
    """Return whether a loader may have more workers. Without its facts, nothing is known against them."""
    if facts is None or not facts.is_torch:
        return WorkersAllowed()
    reasons = " ".join(f"{why[0].upper()}{why[1:]}. {first}" for why, first in _obstacles(facts))
    if not facts.is_iterable or facts.shards is None:
        return WorkersAllowed(reasons)
    ranks = f" for {facts.ranks} ranks" if facts.ranks > 1 else ""
    why = f"a stream can use at most as many workers as shards, and {_code(facts.dataset)} has {facts.shards}{ranks}"
    return WorkersAllowed(reasons, max(1, facts.shards // facts.ranks), why)


def _obstacles(facts: LoaderFacts) -> Iterator[tuple[str, str]]:
    """Yield each reason why the loader cannot have workers yet, and what to change."""
    if facts.is_daemonic:
        yield (
            "this process is daemonic and may not start workers",
            "Start it with multiprocessing.Process(daemon=False), or with concurrent.futures.ProcessPoolExecutor().",
        )
    if facts.open_files:
        verb = "is" if len(facts.open_files) == 1 else "are"
        consequence = "forked workers would share it" if facts.is_forked else "workers cannot have it"
        yield (
            f"{named(facts.open_files)} {verb} open, and {consequence}",
            OPEN_IN_WORKER,
        )
    if facts.not_picklable is not None:
        yield (
            f"workers cannot import {_code(facts.not_picklable)}, which is defined inside a function",
            'Define it at module level, or set multiprocessing_context="fork".',
        )
    if facts.is_iterable and not facts.splits:
        stream = _code(facts.dataset)
        if facts.splits is None:
            yield (
                f"{stream} is iterable, and its code does not show whether it splits its samples by worker",
                f"If two workers yield each sample twice, split what it reads by {_BY_INFO}",
            )
        else:
            yield (
                f"{stream} is iterable and does not split by worker, so each worker would yield all samples",
                _SPLIT_WEBDATASET if facts.is_webdataset else _SPLIT,
            )


def why_not_searched(facts: LoaderFacts) -> str | None:
    """Return why other settings of a loader cannot be tried, or would change what it yields; ``None`` if they can."""
    kind = printable(facts.kind.rpartition(".")[2])
    if not facts.is_torch:
        return f"it is a {printable(facts.kind)}, not a torch DataLoader"
    if facts.keeps_position:
        return f"a {kind} keeps its position (state_dict), which new workers would lose"
    allowed = workers_allowed(facts)
    if allowed.reasons:
        return allowed.reasons[:1].lower() + allowed.reasons[1:].rstrip(".")
    if facts.is_iterable:
        most = "" if allowed.most is None else f", to at most {allowed.most}"
        return (
            f"its dataset is iterable ({printable(facts.dataset)}), so a change during training could repeat or lose "
            f"samples. Set num_workers yourself{most}"
        )
    if not facts.in_order:
        return "its batches come in the order in which workers finish them (in_order is False)"
    if facts.own_iterator:
        return f"{kind} has its own _get_iterator"
    if facts.not_copyable is not None:
        return (
            f"worker processes cannot copy its dataset ({_code(facts.not_copyable)}). Create that in the worker, or "
            "set num_workers yourself"
        )
    return None


def why_not_switched(began: LoaderFacts, now: LoaderFacts) -> str | None:
    """Return why the settings cannot change in a run that started with one loader and now has the other."""
    if (why := why_not_searched(began)) is not None:
        return why
    if began.within:
        return f"it is inside a {printable(began.within)}, which is not a torch DataLoader"
    opened = [name for name in now.open_files if name not in began.open_files]
    if opened and now.is_forked:
        verb = "was" if len(opened) == 1 else "were"
        return (
            f"{named(tuple(opened))} {verb} opened in this process, and forked workers would share it. Start with "
            "num_workers=1, so that only workers open it"
        )
    return CHANGES if now.contents != began.contents else None


def named(names: tuple[str, ...]) -> str:
    """Return what a dataset holds as text: ```Photos.file`` and ``Photos.index```."""
    shown = [_code(name) for name in names[:_MAX_NAMED]]
    if len(names) > _MAX_NAMED:
        shown.append(plural(len(names) - _MAX_NAMED, "other"))
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _code(name: str) -> str:
    return f"`{printable(name)}`"
