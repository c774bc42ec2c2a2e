"""Which checkpoint key becomes which model key, and the renaming of all that goes along."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gpu_tools.checkpoints.key_tree import PRIVATE_SEGMENTS, build_tree, inside_wrappers, is_wrapper_name
from lightning_gpu_tools.errors import KeyCollisionError
from lightning_gpu_tools.units import printable


@dataclass(frozen=True, kw_only=True)
class RenamePlan:
    """A decision about names; fields without a comment are as in ``LoadReport``."""

    renames: Mapping[str, str]  # one-to-one, in the order of the checkpoint; unchanged names included
    dropped_root: str = ""
    added_root: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)  # further names of a tensor -> its checkpoint key
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    clashes: Mapping[str, str] = field(default_factory=dict)  # as renames, but of another shape
    unused: tuple[str, ...] = ()  # beside the dropped root, or the counter of a wrapper that the model lacks
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
                before, after = old.split(".")[:-1], new.split(".")[:-1]
                for segment in {*before, *after}:
                    change = after.count(segment) - before.count(segment)
                    if change:
                        (added if change > 0 else removed)[segment] += 1
        parts = [f'removed "{printable(segment)}." from {count} keys' for segment, count in sorted(removed.items())]
        parts += [f'added "{printable(segment)}." to {count} keys' for segment, count in sorted(added.items())]
        return ", ".join(parts)

    def rename(self, name: str) -> str:
        """Rename any key or module path of the checkpoint, also one without a weight."""
        known = self.renames.get(name, self.clashes.get(name))
        if known is not None:
            return known
        path, rest = name, ""
        while path and path not in self._moved_modules:
            path, _, last = path.rpartition(".")
            if last not in PRIVATE_SEGMENTS:
                rest = f"{last}.{rest}" if rest else last
        return ".".join(filter(None, (self._moved_modules.get(path, path), rest)))

    @functools.cached_property
    def _moved_modules(self) -> dict[str, str]:
        """Module path in the checkpoint -> module path in the model, as far as the keys tell."""
        moved: dict[str, str] = {}
        for old, new in self.renames.items():
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

    def left_over(self, *, strict: bool) -> dict[str, str]:
        """Return the keys without a fitting place, and the names under which hooks of the model may find them one.

        If not ``strict``, without those whose name another key has; otherwise ``apply`` refuses them.
        """
        names = {key: self.rename(key) for key in (*self.unexpected, *self.clashes)}
        if strict or not names:
            return names
        first = {name: key for key, name in reversed(names.items())}
        taken = {*self.renames.values(), *self.tied}
        return {key: name for key, name in names.items() if name not in taken and first[name] == key}

    def apply(self, state_dict: Mapping[str, Any], left_over: Mapping[str, str] | None = None) -> OrderedDict[str, Any]:
        """Return the same weights in the same order under the model's names, with ``_metadata``."""
        names = {**self.renames, **(left_over or {})}
        renamed: OrderedDict[str, Any] = OrderedDict()
        for key, value in state_dict.items():
            if key in names:
                if names[key] in renamed:
                    raise collision("Two keys of the checkpoint", quoted(names[key]))
                renamed[names[key]] = value
        renamed.update((name, state_dict[key]) for name, key in self.tied.items())
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            # A wrapper and what it wraps get one name; the inner one, which comes later, is the module.
            versions = OrderedDict((self.rename(path), entry) for path, entry in metadata.items())
            renamed._metadata = versions  # type: ignore[attr-defined]
        return renamed


def quoted(*names: str) -> str:
    """Return names in quotes, printable."""
    return " and ".join(f'"{printable(name)}"' for name in names)


def collision(keys: str, name: str) -> KeyCollisionError:
    """Return the error about keys that would get one name."""
    return KeyCollisionError(f"{keys} would both become {name}. Nothing was changed.")


def clean_names(keys: Iterable[str], wrappers: Iterable[str] = (), *, around_all: bool = False) -> dict[str, str]:
    """Return key -> key without private segments and without the ``module`` of the wrappers at these paths.

    With ``around_all`` a ``module`` that all keys begin with is a wrapper, too, and its counter is left out. Raises
    ``KeyCollisionError`` where two keys would get the same name.
    """
    tree = build_tree(keys, wrappers)
    for key, other in tree.collisions.items():
        raise collision(quoted(other, key), "the same key")
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
