"""A decision about names: which checkpoint key becomes which model key, and the same for everything that goes along."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gpu_tools.checkpoints.key_tree import PRIVATE_SEGMENTS, build_tree, inside_wrappers, is_wrapper_name
from lightning_gpu_tools.errors import KeyCollisionError
from lightning_gpu_tools.units import printable


@dataclass(frozen=True, kw_only=True)
class RenamePlan:
    """Which checkpoint key becomes which model key; what is not said here is as in ``LoadReport``.

    Attributes:
        renames: Checkpoint key -> model key, one-to-one, in the order of the checkpoint; unchanged names included.
        tied: Model key without a weight of its own in the checkpoint -> checkpoint key that holds the same tensor.
        clashes: Checkpoint key -> model key at the same place, of another shape.
        unused: Checkpoint keys beside the dropped root, and step counters of wrappers that the model does not have.
    """

    renames: Mapping[str, str]
    dropped_root: str = ""
    added_root: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    clashes: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def changes_names(self) -> bool:
        """Whether any key gets another name."""
        return any(old != new for old, new in self.renames.items())

    def describe(self) -> str:
        """Say what is renamed, for example ``removed "module." from 9 keys``; ``""`` if nothing is."""
        removed: Counter[str] = Counter()
        added: Counter[str] = Counter()
        for old, new in self.renames.items():
            if old != new:
                before, after = _parts_that_differ(old, new)
                for segment in {*before, *after}:
                    change = after.count(segment) - before.count(segment)
                    if change:
                        (added if change > 0 else removed)[segment] += 1
        parts = [f'removed "{printable(segment)}." from {count} keys' for segment, count in sorted(removed.items())]
        parts += [f'added "{printable(segment)}." to {count} keys' for segment, count in sorted(added.items())]
        return ", ".join(parts)

    def rename_key(self) -> Callable[[str], str]:
        """Return a function that renames any key or module path of the checkpoint, also one without a weight."""
        moved = _moved_modules(self.renames)

        def rename(name: str) -> str:
            known = self.renames.get(name, self.clashes.get(name))
            if known is not None:
                return known
            path, rest = name, ""
            while path and path not in moved:
                path, _, last = path.rpartition(".")
                if last not in PRIVATE_SEGMENTS:
                    rest = f"{last}.{rest}" if rest else last
            return ".".join(part for part in (moved.get(path, path), rest) if part)

        return rename

    def left_over(self, *, strict: bool) -> dict[str, str]:
        """Return the keys without a fitting place, and the names under which hooks of the model may find them one.

        If not ``strict``, those whose name another key has are left out; otherwise ``apply`` refuses them.
        """
        if not (self.unexpected or self.clashes):
            return {}
        rename = self.rename_key()
        names = {key: rename(key) for key in (*self.unexpected, *self.clashes)}
        if strict:
            return names
        first = {name: key for key, name in reversed(names.items())}
        taken = {*self.renames.values(), *self.tied}
        return {key: name for key, name in names.items() if name not in taken and first[name] == key}

    def apply(self, state_dict: Mapping[str, Any], *, keep: Collection[str] = ()) -> OrderedDict[str, Any]:
        """Return the weights under the model's names: the same objects, in the same order, ``_metadata`` along."""
        metadata = getattr(state_dict, "_metadata", None)
        rename = self.rename_key() if keep or metadata else str
        stay = {key: rename(key) for key in keep}
        renamed: OrderedDict[str, Any] = OrderedDict()
        for key, value in state_dict.items():
            name = self.renames.get(key, stay.get(key))
            if name is None:
                continue
            if name in renamed:
                shown = printable(name)
                raise KeyCollisionError(f'Two keys of the checkpoint would both become "{shown}". Nothing was changed.')
            renamed[name] = value
        for name, key in self.tied.items():
            renamed[name] = state_dict[key]
        if metadata is not None:
            # A wrapper and what it wraps come out under one name; the inner one, later in the order, is the module.
            renamed._metadata = OrderedDict((rename(path), entry) for path, entry in metadata.items())  # type: ignore[attr-defined]
        return renamed


def _parts_that_differ(old: str, new: str) -> tuple[list[str], list[str]]:
    """Return the modules in two names of a weight; only those before the shorter name if the other one ends with it."""
    if old.endswith(f".{new}"):
        return old[: -len(new) - 1].split("."), []
    if new.endswith(f".{old}"):
        return [], new[: -len(old) - 1].split(".")
    return old.split(".")[:-1], new.split(".")[:-1]


def clean_names(keys: Iterable[str], wrappers: Iterable[str] = (), *, around_all: bool = False) -> dict[str, str]:
    """Return key -> key without private segments and without the ``module`` of the wrappers at these paths.

    A child called ``module`` anywhere else stays; but if ``around_all``, one that all keys begin with is a wrapper,
    too, and its step counter is left out.

    Raises:
        KeyCollisionError: Two keys would get the same name.
    """
    tree = build_tree(keys, frozenset(wrappers))
    for key, other in tree.collisions.items():
        pair = f'"{printable(other)}" and "{printable(key)}"'
        raise KeyCollisionError(f"{pair} would both become the same key. Nothing was changed.")
    names: dict[str, str] = {}
    stack = [("", inside_wrappers(tree.root) if around_all else tree.root)]
    while stack:
        path, node = stack.pop()
        for name, value in node.items():
            if isinstance(value, str):
                names[value] = path + name
            else:
                stack.append((path + name, value))
    return names


def _moved_modules(renames: Mapping[str, str]) -> dict[str, str]:
    """Return module path in the checkpoint -> module path in the model, as far as the keys tell."""
    moved: dict[str, str] = {}
    for old, new in renames.items():
        old_path, new_path = old.rpartition(".")[0], new.rpartition(".")[0]
        while old_path not in moved:
            moved[old_path] = new_path
            parent, _, name = old_path.rpartition(".")
            new_parent, _, new_name = new_path.rpartition(".")
            while new_name != name and is_wrapper_name(new_name):
                new_path = new_parent
                new_parent, _, new_name = new_path.rpartition(".")
            if name == new_name and name:
                new_path = new_parent
            elif not is_wrapper_name(name):  # a wrapper and what it wraps come out as one
                break
            old_path = parent
    return moved
