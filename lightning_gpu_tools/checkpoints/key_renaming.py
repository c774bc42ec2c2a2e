"""Which weight of a checkpoint belongs to which parameter of a model, decided on names and shapes alone.

The answer is a :class:`RenamePlan` that covers the model one-to-one, or a refusal that says why. Nothing is guessed
about the model: its wrappers are read from its module types and handed in. In the checkpoint a level called ``module``
is taken for a wrapper only where that makes the model fit. The order is that of least change: names as they are, one
attribute (``model.``) less, one attribute more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from lightning_gpu_tools.checkpoints.key_groups import list_groups
from lightning_gpu_tools.checkpoints.key_tree import (
    WRAPPER_COUNTER,
    Node,
    Overlap,
    Overlay,
    PathSet,
    Shape,
    Tree,
    build_tree,
    child_modules,
    is_wrapper,
    is_wrapper_name,
    keys_below,
    unwrap,
)
from lightning_gpu_tools.checkpoints.rename_plan import RenamePlan
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointMismatchError, KeyCollisionError
from lightning_gpu_tools.units import printable


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """What a plan has to know about a model.

    Attributes:
        shapes: Shape of every key of ``state_dict()``; ``None`` for what is not a tensor or has no shape yet.
        wrappers: Paths of the modules whose whole content is a child called ``module`` (``DataParallel``, ...).
        tied: Key -> the first key that is the same tensor, for every tensor that has several keys.
        optional: Keys that a complete checkpoint may lack.
        self_loading: Paths of modules that translate the keys below them on their own when they are loaded.
    """

    shapes: Mapping[str, Shape | None]
    wrappers: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    self_loading: frozenset[str] = frozenset()


def plan_renaming(
    checkpoint: Mapping[str, Shape | None],
    model: ModelKeys,
    *,
    root: str | None = None,
    strict: bool = True,
    same_tensor: Callable[[], Mapping[str, Hashable]] = dict,
) -> RenamePlan:
    """Find the one way in which a checkpoint fits a model.

    Args:
        checkpoint: Shape of every key; ``None`` for what is not a tensor.
        model: The model's side.
        root: Attribute that only one side has, such as ``"model."``; ``""`` for none; ``None`` searches for it.
        strict: Refuse unless every key of the model gets a weight of its shape and every key of the checkpoint finds
            its place, apart from keys beside a dropped root. If false, take what fits and list the rest.
        same_tensor: Returns what tells whether two checkpoint keys hold the same tensor, as far as that is known.

    Raises:
        AmbiguousCheckpointError: Several sets of weights fit.
        KeyCollisionError: Two keys of the checkpoint would become the same key of the model.
        CheckpointMismatchError: Nothing fits.
    """
    return _Search(checkpoint, model, same_tensor).run(root, strict)


@dataclass(frozen=True)
class _Reading:
    """One way to read the checkpoint: the part that is laid over the model, and how far it covers it."""

    overlap: Overlap
    scope: Node
    dropped_root: str = ""
    added_root: str = ""


class _Search:
    """The readings of one checkpoint for one model, from least change to most."""

    def __init__(
        self,
        checkpoint: Mapping[str, Shape | None],
        model: ModelKeys,
        same_tensor: Callable[[], Mapping[str, Hashable]],
    ) -> None:
        self.shapes = checkpoint
        self.model = model
        self.same_tensor = same_tensor
        self.overlay = Overlay(checkpoint, model.shapes)
        self.required = {model.tied.get(key, key) for key in model.shapes.keys() - model.optional}

    def run(self, root: str | None, strict: bool) -> RenamePlan:
        unchanged = self._unchanged()
        if not root and len(unchanged.pairs) == len(self.shapes) == len(self.model.shapes):
            return RenamePlan(renames=dict(unchanged.pairs))  # nearly always, and no tree is needed
        self.checkpoint_tree = build_tree(self.shapes)
        self.model_tree = build_tree(self.model.shapes, self.model.wrappers)
        tried: list[_Reading] = []
        for readings in self._levels(root, unchanged):
            fits = [reading for reading in readings if self._covers(reading.overlap)]
            if fits:
                plan = self._to_plan(self._only(fits))
                return self._accept(plan) if strict else plan
            tried += readings
        if not tried:
            raise CheckpointMismatchError(
                f'There is no "{printable(root)}" in the checkpoint ({_roots(self.checkpoint_tree)}) nor in the model '
                f"({_roots(self.model_tree)})."
            )
        # max() returns the first of equals: the one with the least change.
        nearest = max(tried, key=lambda reading: len(reading.overlap.pairs))
        plan = self._to_plan(nearest)
        if strict:
            return self._accept(plan)
        if not plan.renames and self.shapes and self.model.shapes:
            raise self._mismatch(plan)
        if nearest.dropped_root or nearest.added_root:
            same_kind = (r for r in tried if bool(r.dropped_root) == bool(nearest.dropped_root))
            self._only([r for r in same_kind if len(r.overlap.pairs) == len(nearest.overlap.pairs)])
        return plan

    def _unchanged(self) -> Overlap:
        """Return what the two have in common under the very same names."""
        same = Overlap()
        for key in self.shapes:
            if key in self.model.shapes:
                (same.pairs if self.overlay.fits(key, key) else same.clashes).append((key, key))
        return same

    def _levels(self, root: str | None, unchanged: Overlap) -> Iterable[list[_Reading]]:
        checkpoint, model = self.checkpoint_tree.root, self.model_tree.root
        if root:
            part = self.checkpoint_tree.find(root)
            place = self.model_tree.find(root)
            name = root.rstrip(".") + "."
            if part is not None:
                yield [_Reading(self.overlay.largest(part, model), part, dropped_root=name)]
            elif place is not None:
                yield [_Reading(self.overlay.largest(checkpoint, place), checkpoint, added_root=name)]
            return
        # What fits is never touched.
        has_all = len(unchanged.pairs) + len(unchanged.clashes) == len(self.model.shapes)
        keeps_names = has_all or self._covers(unchanged)
        yield [_Reading(unchanged if keeps_names else self.overlay.largest(checkpoint, model), checkpoint)]
        if root is None:
            yield [
                _Reading(self.overlay.largest(part, model), part, dropped_root=name)
                for name, part in child_modules(_inside_wrappers(checkpoint))
            ]
            yield [
                _Reading(self.overlay.largest(checkpoint, place), checkpoint, added_root=name)
                for name, place in child_modules(model)
            ]

    def _covers(self, overlap: Overlap) -> bool:
        if len(overlap.pairs) < len(self.required):
            return False
        leader = self.model.tied.get
        return self.required <= {leader(key, key) for _, key in overlap.pairs}

    def _only(self, fits: list[_Reading]) -> _Reading:
        different: dict[frozenset[tuple[str, Hashable]], _Reading] = {}
        same_tensor = self.same_tensor() if len(fits) > 1 else {}
        for reading in fits:
            weights = ((key, same_tensor.get(source, source)) for source, key in reading.overlap.pairs)
            different.setdefault(frozenset(weights), reading)
        if len(different) > 1:
            roots = [reading.dropped_root or reading.added_root for reading in different.values()]
            choices = " or ".join(f'root="{printable(name)}"' for name in roots)
            found = "checkpoint holds {} sets of weights" if fits[0].dropped_root else "model has {} places"
            raise AmbiguousCheckpointError(
                f"The {found.format(len(roots))} that fit: {_quote(*roots)}. Choose one with {choices}."
            )
        return fits[0]

    def _to_plan(self, reading: _Reading) -> RenamePlan:
        target, clashes = dict(reading.overlap.pairs), dict(reading.overlap.clashes)
        for key, other in self.checkpoint_tree.collisions.items():
            if key in target:
                raise _collision(other, key, target[key])
        leader = self.model.tied.get
        source = {leader(key, key): old for old, key in target.items()}
        laid_on = {*target.values(), *clashes.values()}
        uncovered = [key for key in self.model.shapes if key not in laid_on]
        tied = {key: source[leader(key, key)] for key in uncovered if leader(key, key) in source}
        absent = [key for key in uncovered if key not in tied]
        unexpected, unused = self._without_place(target, clashes, reading.scope)
        return RenamePlan(
            renames={key: target[key] for key in self.shapes if key in target},
            dropped_root=reading.dropped_root,
            added_root=reading.added_root,
            tied=tied,
            kept=tuple(key for key in absent if key in self.model.optional),
            missing=tuple(key for key in absent if key not in self.model.optional),
            unexpected=unexpected,
            clashes=clashes,
            unused=unused,
        )

    def _without_place(
        self, target: Mapping[str, str], clashes: Mapping[str, str], scope: Node
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Checkpoint keys that were not laid on the model: those nobody can explain, and those beside the root."""
        left = [key for key in self.shapes if key not in target and key not in clashes]
        if not left:
            return (), ()
        inside = {*keys_below(scope), *self.checkpoint_tree.collisions}
        unexplained = {key for key in left if key in inside and not self._is_wrapper_counter(key)}
        return tuple(k for k in left if k in unexplained), tuple(k for k in left if k not in unexplained)

    def _is_wrapper_counter(self, key: str) -> bool:
        path, _, name = key.rpartition(".")
        if name != WRAPPER_COUNTER:
            return False
        node = self.checkpoint_tree.find(path)
        return node is not None and is_wrapper(node) and node.get(name) == key

    def _accept(self, plan: RenamePlan) -> RenamePlan:
        """Return the plan unless something is left over that neither side can explain."""
        if not (plan.unexpected or plan.missing or plan.clashes):
            return plan
        rename = plan.rename_key()
        inside = PathSet(self.model.self_loading)
        left_over = [key for key in plan.unexpected if rename(key) not in inside]
        misfits = [key for key in (*plan.missing, *plan.clashes.values()) if key not in inside]
        if not (left_over or misfits):
            return plan
        bare = {_bare(key): key for key in plan.renames}
        for key in left_over:
            if _bare(key) in bare and not misfits:
                other = bare[_bare(key)]
                raise _collision(other, key, plan.renames[other])
        raise self._mismatch(plan)

    def _mismatch(self, plan: RenamePlan) -> CheckpointMismatchError:
        covered, wanted = len(plan.renames) + len(plan.tied), len(self.model.shapes)
        change = f" ({plan.describe()})" if plan.changes_names else ""
        lines = [f"{covered} of the model's {wanted} keys fit{change}. Nothing was changed."]
        if plan.missing:
            lines.append(f"not in the checkpoint: {list_groups(plan.missing)}")
        if plan.unexpected:
            lines.append(f"not in the model: {list_groups(plan.unexpected)}")
        if plan.clashes:
            shapes = [
                f"{printable(old)} {self.shapes[old]} instead of {self.model.shapes[new]}"
                for old, new in islice(plan.clashes.items(), 4)
            ]
            more = len(plan.clashes) - len(shapes)
            lines.append("other shape: " + ", ".join(shapes) + (f", … and {more} more" if more else ""))
        if covered:
            lines.append("strict=False loads what fits and reports the rest.")
        return CheckpointMismatchError("\n  ".join(lines), plan.missing, plan.unexpected)


def _collision(one: str, other: str, place: str) -> KeyCollisionError:
    return KeyCollisionError(
        f"{_quote(one, other)} would both become {_quote(place)} of the model. Nothing was changed."
    )


def _inside_wrappers(node: Node) -> Node:
    while is_wrapper(node):
        node = unwrap(node)
    return node


def _bare(key: str) -> str:
    return ".".join(segment for segment in key.split(".") if not is_wrapper_name(segment))


def _roots(tree: Tree) -> str:
    return list_groups(name for name, _ in child_modules(tree.root)) or "no attributes at all"


def _quote(*names: str) -> str:
    return " and ".join(f'"{printable(name)}"' for name in names)
