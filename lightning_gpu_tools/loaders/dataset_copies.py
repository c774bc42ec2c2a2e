"""The dataset as another process, or this one in the place of another, should get it: sharing samples, but no files."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpu_tools.loaders.contents import Contents, Path, Step, words


class UnshareableError(Exception):
    """The dataset holds what processes must not share."""


class DatasetCopies:
    """Gives a loader's dataset and ``collate_fn`` to those who load with other settings than the user's own.

    Two processes that read from one file move each other's position. Many datasets open their file at the first sample,
    so that each worker has one of its own. A worker that is forked after that sample has been loaded in this process
    would find the file open and share it: what workers are given has again ``None``, or nothing, where there was none
    at first. Training may set what it likes in a dataset: all else is as it is now.

    Args:
        loader: Not used yet.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._first = Contents(self.originals)

    @property
    def originals(self) -> dict[str, Any]:
        """Those of the loader, to which training may have given another ``collate_fn`` since."""
        return {"dataset": self._loader.dataset, "collate_fn": self._loader.collate_fn}

    def for_workers(self) -> dict[str, Any]:
        """Return ``dataset`` and ``collate_fn`` for forked workers of which there may be several.

        Raises:
            UnshareableError: They would share a file, or the like, that was open from the start or cannot be left out.
        """
        roots = self.originals
        paths = Contents(roots).unshareable()
        if not paths:
            return roots
        try:
            given: dict[str, Any] = self._without(roots, list(paths))
        except Exception:  # noqa: BLE001 - anybody's classes, which may do anything when they are copied
            given = roots
        _refuse(Contents(given))
        return given

    def for_this_process(self) -> dict[str, Any]:
        """Return copies that share the data, and in which this process can open what it likes.

        Raises:
            UnshareableError: They cannot be copied.
        """
        contents = Contents(self.originals)
        _refuse(contents)
        if not contents.complete:
            raise UnshareableError("the dataset holds too many objects to copy them for the training process")
        try:
            own: dict[str, Any] = copy.deepcopy(self.originals, dict(contents.data))
        except Exception as error:
            raise UnshareableError(f"the dataset cannot be copied for the training process: {error!r}") from error
        return own

    def _made_in_use(self, path: Path) -> Path | None:
        """Return the part of a path that was ``None`` or absent at first; ``None`` if it was all there."""
        first = self._first
        for end in range(2, len(path) + 1):
            there, parent = path[:end], path[: end - 1]
            is_new = there not in first.facts and there[-1] not in first.names.get(parent, {there[-1]})
            # Of attributes all names are known, of items those that were looked at.
            if first.facts.get(there) == _NONE or (is_new and (there[-1][0] == "." or first.complete)):
                return there
        return None

    def _without(self, holder: Any, paths: Sequence[Path], at: Path = ()) -> Any:
        """Return a copy, and copies of what leads to the ends of some paths, without what was made in use there.

        The rest may be gone, too: a class may leave out what is not to be copied.
        """
        own = copy.copy(holder)
        for step in {path[len(at)] for path in paths}:
            there = (*at, step)
            beyond = [path for path in paths if path[: len(there)] == there and len(path) > len(there)]
            if there in map(self._made_in_use, paths):
                _take_out(own, step, leave_none=there in self._first.facts)
            elif beyond and (held := _get(own, step)) is not None:
                _put(own, step, self._without(held, beyond, there))
        return own


_NONE = (type(None), None)


def _refuse(contents: Contents) -> None:
    for path, what in contents.unshareable().items():
        raise UnshareableError(
            f"the dataset holds {what} ({words(path)}), and worker processes would share it; open it where a sample is "
            "loaded, not before"
        )


def _get(holder: Any, step: Step) -> Any:
    kind, name = step
    return getattr(holder, str(name), None) if kind == "." else holder[name]


def _put(holder: Any, step: Step, value: Any) -> None:
    kind, name = step
    if kind == ".":
        object.__setattr__(holder, str(name), value)
    else:
        holder[name] = value


def _take_out(holder: Any, step: Step, *, leave_none: bool) -> None:
    kind, name = step
    if leave_none:
        _put(holder, step, None)
    elif kind == ".":
        object.__delattr__(holder, str(name))
    else:
        del holder[name]
