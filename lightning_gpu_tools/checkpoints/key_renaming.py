"""The mapping of a checkpoint's weights to a model's parameters, based only on names and shapes."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lightning_gpu_tools.checkpoints.key_plan import RenamePlan, collision
from lightning_gpu_tools.checkpoints.key_tree import (
    MAX_NAME,
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
    keys_below,
    list_groups,
    quoted,
    shortened,
    without_wrappers,
)
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointMismatchError
from lightning_gpu_tools.units import printable

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
    average: bool = False,
) -> RenamePlan:
    """Find the only plan by which a checkpoint fits a model; arguments and errors as in ``load_weights``.

    ``entry`` is the name that a root in a message begins with, for a file with several sets of weights. ``average`` is
    whether the whole checkpoint is an average. Averages inside it are preferred.
    """
    return _Search(checkpoint, model, root, entry, average).run(strict)


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
    scope: Node = field(default_factory=dict)  # the part of the checkpoint
    roots: tuple[str, str] = ("", "")


@dataclass
class _Search:
    """A search through the readings of a checkpoint for a model, from the smallest change to the largest."""

    shapes: Shapes
    model: ModelKeys
    root: str | None
    entry: str
    average: bool

    def __post_init__(self) -> None:
        self.given = as_root(self.root or "")
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
            part, place = self.checkpoint_tree.find(dropped), self.model_tree.find(added)
            if part is None or place is None:
                continue
            # Keys that fit are never renamed.
            has_all = len(unchanged.pairs) + len(unchanged.clashes) == len(self.model.shapes)
            if not self.root and (has_all or self._covers(unchanged)):
                yield [replace(unchanged, scope=part)]
            else:
                yield [self._reading((dropped, part), (added, place))]
            if self.root == "":
                return
            parts = _below([(dropped, inside_wrappers(part))])
            inside = [(name, inside_wrappers(node)) for name, node in parts]
            in_averages = _below([(name, node) for name, node in inside if is_average(name)])
            averages = [(name, node) for name, node in in_averages if is_average(name.split(".")[-2])]
            yield [self._reading(inner, (added, place)) for inner in (*parts, *averages)]
            places = [] if self.root else _below([(added, place)])
            yield [self._reading((dropped, part), inner) for inner in places]
            yield [self._reading(inner, (added, place)) for inner in _below(inside)]
            yield [self._reading((dropped, part), inner) for inner in _below(places)]
            return

    # The recursion is limited by the number of levels in keys; see structure.check_contents.
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

    def _reading(self, part: tuple[str, Node], place: tuple[str, Node]) -> _Reading:
        return replace(self._largest_overlap(part[1], place[1]), scope=part[1], roots=(part[0], place[0]))

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
        averages = self.average or is_average(self.given)
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
        inside = {*keys_below(reading.scope), *self.checkpoint_tree.collisions} if left else set()
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


def _below(nodes: Iterable[tuple[str, Node]]) -> list[tuple[str, Node]]:
    """Return the child modules of these nodes, with their whole names."""
    return [(path + name, child) for path, node in nodes for name, child in child_modules(node)]


def _roots(tree: Tree) -> str:
    return list_groups(name for name, _ in child_modules(tree.root)) or "no attributes"


def as_root(name: str) -> str:
    """Return an attribute as a key prefix, ``"model."``; ``""`` for none."""
    return f"{name.rstrip('.')}." if name else ""
