"""A plan for renaming the keys of a checkpoint: what it does to keys, to weights, and how it is told."""

import functools
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gpu_tools.checkpoints.key_tree import (
    PRIVATE_SEGMENTS,
    build_tree,
    inside_wrappers,
    is_wrapper_name,
    quoted,
)
from lightning_gpu_tools.errors import KeyCollisionError
from lightning_gpu_tools.units import plural, printable

# Names of the two factors in peft, loralib and diffusers.
_LORA = r"(?<![A-Za-z])lora[._](?:A|B|down|up|embedding_A|embedding_B)(?![A-Za-z])"
# One of the two parts of a weight by torch.nn.utils.weight_norm, or by that of torch.nn.utils.parametrizations.
_WEIGHT_NORM = re.compile(r"(?:^|\.)(?:weight_g|parametrizations\.\w+\.original0)$")
# Patterns of keys without a match that show which tool has changed the checkpoint, or else the model; and what to do.
_HINTS_OF_CHECKPOINT = {
    re.compile(_LORA): (
        "The checkpoint holds LoRA weights, which modify a base model. Merge them first (peft: merge_and_unload()), or "
        "load them with peft."
    ),
    re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?$"): (
        "The checkpoint holds FSDP's flat parameters, each with parts of several weights. During training, save the "
        "full weights from torch.distributed.checkpoint.state_dict.get_model_state_dict with "
        "StateDictOptions(full_state_dict=True)."
    ),
    _WEIGHT_NORM: (
        "It was saved with weight_norm. Create the model with torch.nn.utils.parametrizations.weight_norm on these "
        "layers."
    ),
}
_HINTS_OF_MODEL = {
    re.compile(rf"{_LORA}|^base_model\.model\.|\.base_layer\."): (  # the latter two by get_peft_model
        "The model has been changed by peft. Load the weights before get_peft_model."
    ),
    _WEIGHT_NORM: ("The model has weight_norm. Load the weights before weight_norm is called."),
}


@dataclass(frozen=True, kw_only=True)
class RenamePlan:
    """A plan for renaming keys; fields without a comment are as in ``LoadReport``."""

    renames: Mapping[str, str]  # one-to-one, in the order of the checkpoint; unchanged names included
    dropped_root: str = ""
    added_root: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)  # other names of a tensor -> its checkpoint key
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    clashes: Mapping[str, str] = field(default_factory=dict)  # like renames, but with different shapes
    unused: tuple[str, ...] = ()  # outside the dropped root, or counters of wrappers that the model lacks
    others: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a summary of the renames, such as ``removed "module." from 9 keys``; ``""`` if there are none."""
        removed: Counter[str] = Counter()
        added: Counter[str] = Counter()
        for old, new in self.renames.items():
            if old != new:
                before, after = Counter(old.split(".")), Counter(new.split("."))
                removed.update((before - after).keys())
                added.update((after - before).keys())
        return ", ".join(
            f'{verb} "{printable(segment)}." {where} {plural(count, "key")}'
            for verb, where, counts in (("removed", "from", removed), ("added", "to", added))
            for segment, count in sorted(counts.items())
        )

    def rename(self, name: str) -> str:
        """Rename any key or module path of the checkpoint, even one without a weight."""
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
        """Module path in the checkpoint -> module path in the model, as far as the keys show it."""
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
                elif not is_wrapper_name(name):  # a wrapper and its module become one
                    break
                old_path = parent
        return moved

    def hints(self) -> Iterator[str]:
        """Yield what to do about keys without a match, if they show which tool has changed file or model."""
        unexpected = [*map(self.rename, self.unexpected)]
        for keys, hints in ((unexpected, _HINTS_OF_CHECKPOINT), (self.missing, _HINTS_OF_MODEL)):
            yield from (advice for pattern, advice in hints.items() if any(map(pattern.search, keys)))

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
            # A wrapper and its module get the same name. The module comes later and wins.
            versions = OrderedDict((self.rename(path), entry) for path, entry in metadata.items())
            renamed._metadata = versions  # type: ignore[attr-defined]
        return renamed


def collision(keys: str, name: str) -> KeyCollisionError:
    """Return the error for keys that would get the same name."""
    return KeyCollisionError(f"{keys} would both become {name}. Nothing was changed.")


def clean_names(keys: Iterable[str], wrappers: Iterable[str] = (), *, around_all: bool = False) -> dict[str, str]:
    """Return key -> key without private segments and without the ``module`` of the wrappers at these paths.

    With ``around_all``, a ``module`` that all keys begin with counts as a wrapper, and its counter is dropped. Raises
    ``KeyCollisionError`` if two keys would get the same name.
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
