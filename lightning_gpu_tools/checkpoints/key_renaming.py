"""A plan that renames a checkpoint's keys to a model's, and the search for it, based only on names and shapes."""

import functools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lightning_gpu_tools.checkpoints.key_tree import (
    MAX_NAME,
    PRIVATE_SEGMENTS,
    WRAPPED,
    WRAPPER_COUNTER,
    Node,
    Shapes,
    Tree,
    build_tree,
    child_modules,
    inside_wrappers,
    is_copied_into,
    is_inside,
    is_wrapper,
    is_wrapper_name,
    keys_below,
    list_groups,
    quoted,
    shortened,
    without_wrappers,
)
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointMismatchError, KeyCollisionError
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

    def rename_optimizers(self, states: Any) -> Any:
        """Rename parameters in the states of optimizers that know them by name, as FSDP's do; most do so by number."""
        return [*map(self._rename_optimizer, states)] if isinstance(states, list) else states

    def _rename_optimizer(self, state: Any) -> Any:
        def renamed(name: Any) -> Any:
            return self.rename(name) if isinstance(name, str) else name

        match state:
            case {"state": dict(state_of), "param_groups": list(groups)} if all(
                isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
            ):
                return {
                    **state,
                    "state": {renamed(name): value for name, value in state_of.items()},
                    "param_groups": [{**group, "params": [*map(renamed, group["params"])]} for group in groups],
                }
        return state

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


# Names of averaged weights in timm, Lightning, torch.optim.swa_utils, BasicSR (params_ema) and StyleGAN (g_ema).
_AVERAGES = frozenset({"ema", "swa", "avg", "average", "averaged", "shadow"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")

Set = TypeVar("Set")


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """The facts about a model that a plan needs."""

    shapes: Shapes  # of ``state_dict()``, and of buffers that an older version of the model may have saved
    wrappers: frozenset[str] = frozenset()  # paths of modules that contain only a child called ``module``
    tied: Mapping[str, str] = field(default_factory=dict)  # each key of a tied tensor -> first key of the tensor
    optional: frozenset[str] = frozenset()  # keys that a complete checkpoint may lack
    untracked: frozenset[str] = frozenset()  # statistics that a norm does not keep, as in files of torch 0.3
    self_loading: frozenset[str] = frozenset()  # modules with their own loading code, as paths without private segments


def plan_renaming(
    checkpoint: Shapes,
    model: ModelKeys,
    *,
    root: str | None = None,
    strict: bool = True,
    entry: str = "",
) -> RenamePlan:
    """Find the only plan by which a checkpoint fits a model; arguments and errors as in ``load_weights``.

    ``entry`` is the name of this set of weights in a file with several. A root in a message begins with it. If it is
    the name of an average, averages inside it are preferred.
    """
    return _Search(checkpoint, model, root, entry).run(strict)


def is_average(name: str) -> bool:
    """Return whether this is a name for averaged weights, such as ``model_ema`` or ``swa_model``."""
    return any(word.lower() in _AVERAGES for word in _WORD.findall(name))


def preferred(sets: Sequence[Set], name_of: Callable[[Set], str], *, averages: bool = False) -> list[Set]:
    """Return the default sets if the user names none: those that are not averages, or that are, if there are any."""
    return [one for one in sets if is_average(name_of(one)) is averages] or [*sets]


@dataclass
class _Reading:
    """A part of the checkpoint laid over a part of the model: pairs of keys at the same place."""

    pairs: list[tuple[str, str]] = field(default_factory=list)  # of the same shape
    clashes: list[tuple[str, str]] = field(default_factory=list)  # of different shapes
    roots: tuple[str, str] = ("", "")  # paths of the two parts


@dataclass
class _Search:
    """A search through the readings of a checkpoint for a model, from the smallest change to the largest."""

    shapes: Shapes
    model: ModelKeys
    root: str | None
    entry: str

    def __post_init__(self) -> None:
        self.given = as_root(self.root or "")
        self.parts: dict[str, Node] = {}  # of the checkpoint, by the path without wrappers
        self.of_wrappers: dict[tuple[int, int], _Reading] = {}
        self.required = {self._leader(key) for key in self.model.shapes.keys() - self.model.optional}

    def _leader(self, key: str) -> str:
        return self.model.tied.get(key, key)

    def run(self, strict: bool) -> RenamePlan:
        unchanged = self._overlap({key: key for key in self.shapes}, {key: key for key in self.model.shapes})
        is_same = len(unchanged.pairs) == len(self.shapes) == len(self.model.shapes)
        if is_same and not self.root:
            return RenamePlan(renames=dict(unchanged.pairs))  # the usual case, which needs no tree
        self.checkpoint_tree = build_tree(self.shapes)
        self.model_tree = build_tree(self.model.shapes, self.model.wrappers)
        tried: list[_Reading] = []
        for readings in self._levels(unchanged):
            fits = [reading for reading in readings if self._covers(reading)]
            if fits:
                plan = self._only(fits)
                return self._accept(plan) if strict else plan
            tried += readings
        if not tried:
            raise CheckpointMismatchError(
                f"Neither the checkpoint ({_roots(self.checkpoint_tree)}) nor the model ({_roots(self.model_tree)}) "
                f"has {quoted(self.root or '')}. Check root.",
                tuple(self.model.shapes),
            )
        most = max(len(reading.pairs) for reading in tried)
        nearest = [reading for reading in tried if len(reading.pairs) == most]
        plan = self._to_plan(nearest[0])
        if strict:
            return self._accept(plan)
        if self.shapes and self.model.shapes and not (plan.renames and self._is_meant(plan)):
            raise self._mismatch(plan)
        if not any(nearest[0].roots):
            return plan
        return self._only([reading for reading in nearest if bool(reading.roots[0]) == bool(plan.dropped_root)])

    def _levels(self, unchanged: _Reading) -> Iterator[list[_Reading]]:
        """Yield readings without a change of roots, then those with roots one level deep, then two levels deep."""
        for dropped, added in ((self.given, ""), ("", self.given)):
            part = self.checkpoint_tree.find(dropped)
            if part is not None and self.model_tree.find(added) is not None:
                self.parts[dropped] = part
                break
        else:
            return
        has_all = len(unchanged.pairs) + len(unchanged.clashes) == len(self.model.shapes)
        # Keys that fit are never renamed.
        is_unchanged = not self.root and (has_all or self._covers(unchanged))
        yield [unchanged if is_unchanged else self._reading(dropped, added)]
        if self.root == "":
            return
        parts = self._parts(dropped)
        in_averages = [name for part in parts if is_average(part) for name in self._parts(part)]
        averages = [name for name in in_averages if is_average(name.split(".")[-2])]
        yield [self._reading(part, added) for part in (*parts, *averages)]
        places = [] if self.root else self._places(added)
        yield [self._reading(dropped, place) for place in places]
        yield [self._reading(inner, added) for part in parts for inner in self._parts(part)]
        yield [self._reading(dropped, inner) for place in places for inner in self._places(place)]

    # The recursion is limited by the number of levels in keys; see content.check_contents.
    def _largest_overlap(self, checkpoint: Node, model: Node) -> _Reading:
        """Return the largest overlap, skipping ``module`` levels of the checkpoint if necessary."""
        if not is_wrapper(checkpoint):
            return self._overlap(checkpoint, model)
        nodes = id(checkpoint), id(model)  # the pair recurs where wrappers are nested
        if nodes not in self.of_wrappers:
            kept, unwrapped = self._overlap(checkpoint, model), self._largest_overlap(checkpoint[WRAPPED], model)
            counter, wanted = checkpoint.get(WRAPPER_COUNTER), model.get(WRAPPER_COUNTER)
            if counter and wanted and all(wanted != taken for _, taken in unwrapped.pairs):
                unwrapped = _Reading([*unwrapped.pairs, (counter, wanted)], unwrapped.clashes)
            # On a tie, keep the name, which is the smaller change.
            self.of_wrappers[nodes] = unwrapped if len(unwrapped.pairs) > len(kept.pairs) else kept
        return self.of_wrappers[nodes]

    def _overlap(self, checkpoint: Node, model: Node) -> _Reading:
        """Return the overlap of two nodes, assuming that neither is a wrapper."""
        overlap = _Reading()
        for name, have in checkpoint.items():
            want = model.get(name)
            if want is None:
                continue
            if isinstance(have, str):
                fits = is_copied_into(self.shapes[have], self.model.shapes[want])
                (overlap.pairs if fits else overlap.clashes).append((have, want))
            else:
                below = self._largest_overlap(have, want)
                overlap.pairs += below.pairs
                overlap.clashes += below.clashes
        return overlap

    def _reading(self, part: str, place: str) -> _Reading:
        model = self.model_tree.find(place) or {}
        return replace(self._largest_overlap(self.parts[part], model), roots=(part, place))

    def _parts(self, path: str) -> list[str]:
        """Return the paths of the child modules of a module in the checkpoint, without its wrappers."""
        children = {path + name: node for name, node in child_modules(inside_wrappers(self.parts[path]))}
        self.parts.update(children)
        return [*children]

    def _places(self, path: str) -> list[str]:
        """Return the paths of the child modules of a module in the model."""
        return [path + name for name, _ in child_modules(self.model_tree.find(path) or {})]

    def _covers(self, reading: _Reading) -> bool:
        enough = len(reading.pairs) >= len(self.required)
        return enough and self.required <= {self._leader(key) for _, key in reading.pairs}

    def _is_meant(self, plan: RenamePlan) -> bool:
        """Return whether the root was given, or matches most keys. A single bias can fit by chance."""
        roots = (plan.dropped_root, plan.added_root)
        is_guess = any(roots) and roots not in ((self.given, ""), ("", self.given))
        named = len(plan.renames) + len(plan.clashes)
        return not is_guess or 2 * named > min(len(self.required), len(self.shapes))

    def _only(self, found: list[_Reading]) -> RenamePlan:
        """Return the plan of the only fitting reading that is not an average."""
        averages = is_average(self.entry) or is_average(self.given)
        chosen = preferred(found, lambda reading: reading.roots[0].removeprefix(self.given), averages=averages)
        if len(chosen) != 1:
            choices = " or ".join(f"root={self._shown(reading.roots)}" for reading in found)
            sides = "checkpoint has {} sets of weights" if found[0].roots[0] else "model has {} attributes"
            names = quoted(*("".join(reading.roots) for reading in found))
            raise AmbiguousCheckpointError(
                f"The {sides.format(len(found))} that fit: {names}. Choose one with {choices}."
            )
        others = tuple(reading.roots[0] for reading in found if reading is not chosen[0] and not self.root)
        return replace(self._to_plan(chosen[0]), others=others)

    def _to_plan(self, reading: _Reading) -> RenamePlan:
        target, clashes = dict(reading.pairs), dict(reading.clashes)
        for key, other in self.checkpoint_tree.collisions.items():
            if key in target:
                raise collision(quoted(other, key), f"{quoted(target[key])} of the model")
        source = {self._leader(key): old for old, key in target.items()}
        covered = {*target.values(), *clashes.values()}
        uncovered = [key for key in self.model.shapes if key not in covered]
        tied = {key: source[self._leader(key)] for key in uncovered if self._leader(key) in source}
        absent = [key for key in uncovered if key not in tied]
        left = [key for key in self.shapes if key not in target and key not in clashes]
        inside = {*keys_below(self.parts[reading.roots[0]]), *self.checkpoint_tree.collisions} if left else set()
        unexpected = {key: None for key in left if key in inside}
        for key in [key for key in unexpected if key.rpartition(".")[2] == WRAPPER_COUNTER]:
            node = self.checkpoint_tree.find(key.rpartition(".")[0])
            if node is not None and is_wrapper(node) and node.get(WRAPPER_COUNTER) == key:
                del unexpected[key]
        return RenamePlan(
            renames={key: target[key] for key in self.shapes if key in target},
            dropped_root=reading.roots[0],
            added_root=reading.roots[1],
            tied=tied,
            kept=tuple(key for key in absent if key in self.model.optional),
            missing=tuple(key for key in absent if key not in self.model.optional),
            unexpected=tuple(unexpected),
            clashes=clashes,
            unused=tuple(key for key in left if key not in unexpected),
        )

    def _accept(self, plan: RenamePlan) -> RenamePlan:
        """Return the plan; raise if any key is left over that no loading code of the model may match."""
        inside = self.model.self_loading
        left_over = [key for key in plan.unexpected if not is_inside(plan.rename(key), inside)]
        misfits = [key for key in (*plan.missing, *plan.clashes.values()) if not is_inside(key, inside)]
        if not (left_over or misfits):
            return plan
        bare = {without_wrappers(key): key for key in plan.renames}
        for key in left_over:
            if without_wrappers(key) in bare and not misfits:
                other = bare[without_wrappers(key)]
                raise collision(quoted(other, key), f"{quoted(plan.renames[other])} of the model")
        raise self._mismatch(plan)

    def _mismatch(self, plan: RenamePlan) -> CheckpointMismatchError:
        covered = len(plan.renames) + len(plan.tied)
        change = f" ({plan.describe()})" if plan.describe() else ""
        lines = [f"{covered} of the model's {len(self.model.shapes)} keys fit{change}. Nothing was changed."]
        for where, keys in (("checkpoint", plan.missing), ("model", plan.unexpected)):
            if keys:
                lines.append(f"not in the {where}: {list_groups(keys)}")
        if plan.clashes:
            shapes = [
                f"{printable(old)} {self.shapes[old]} instead of {self.model.shapes[new]}"
                for old, new in plan.clashes.items()
            ]
            lines.append(f"other shape: {shortened(shapes)}")
        if covered and self._is_meant(plan):
            lines.append("To load the weights that fit and report the rest, use strict=False.")
        elif covered:
            roots = self._shown((plan.dropped_root, plan.added_root))
            lines.append(f"Too few keys fit to guess the root. To load them, use root={roots} and strict=False.")
        return CheckpointMismatchError("\n  ".join((*lines, *plan.hints())), plan.missing, plan.unexpected)

    def _shown(self, roots: tuple[str, str]) -> str:
        """Return a root as Python code, after the name of the entry."""
        dropped, added = roots
        inside = ".".join(filter(None, (self.entry, dropped)))
        return f'"{printable(inside or added, MAX_NAME)}"'


def _roots(tree: Tree) -> str:
    return list_groups(name for name, _ in child_modules(tree.root)) or "no attributes"


def as_root(name: str) -> str:
    """Return an attribute as a key prefix, ``"model."``; ``""`` for none."""
    return f"{name.rstrip('.')}." if name else ""
