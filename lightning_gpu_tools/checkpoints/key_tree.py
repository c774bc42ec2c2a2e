"""Checkpoint keys as a tree of modules, and the largest part of one tree that lies over another.

``torch.compile`` adds ``_orig_mod`` to names; nobody writes that by hand, so it is left out everywhere. What adds
``module`` is ``DataParallel``, or a child that somebody gave that name: what the other tree has at its place decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | None]  # by key; None: not a tensor, or without a shape yet

# One dict a module: "name." -> the child module of that name, "name" -> the key of the module's own tensor.
# Not a class with two dicts, because 100,000 of those keep the garbage collector busy for seconds.
Node: TypeAlias = dict[str, Any]

# torch.compile, FSDP, activation checkpointing, Lightning Fabric and old Lightning, FairScale and XLA's FSDP.
PRIVATE_SEGMENTS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_fpw_module"}
)
# Where DataParallel, DistributedDataParallel, AveragedModel, DeepSpeedEngine and others keep what they wrap.
WRAPPER_SEGMENT = "module"
# AveragedModel's step counter; nothing else stands beside a wrapper's ``module``.
WRAPPER_COUNTER = "n_averaged"

_WRAPPED = WRAPPER_SEGMENT + "."


@dataclass
class Tree:
    """Keys without their private segments."""

    root: Node = field(default_factory=dict)
    collisions: dict[str, str] = field(default_factory=dict)  # key -> another key at the same place

    def find(self, path: str) -> Node | None:
        """Return the node at ``path``; wrappers on the way may be left out or named."""
        node = self.root
        for segment in filter(None, without_private_segments(path).split(".")):
            name = f"{segment}."
            while name not in node and is_wrapper(node):
                node = node[_WRAPPED]
            if name not in node:
                return None
            node = node[name]
        return node


def build_tree(keys: Iterable[str], wrappers: Iterable[str] = ()) -> Tree:
    """Sort keys into a tree; a wrapper at one of these paths and its ``module`` become one node."""
    tree = Tree()
    node_of = {"": tree.root}
    for key in keys:
        path, _, name = key.rpartition(".")
        taken = _node_at(path, node_of).setdefault(name, key)
        if taken is not key:
            tree.collisions[key] = taken
            tree.collisions.setdefault(taken, key)
    for path in sorted({*wrappers}, key=len, reverse=True):  # inner ones first: the outer paths still hold
        node = tree.find(path)  # none where state-dict hooks leave the path out
        if node is not None and is_wrapper(node):
            node.update(node.pop(_WRAPPED))
    return tree


def _node_at(path: str, node_of: dict[str, Node]) -> Node:
    if path not in node_of:
        parent, _, segment = path.rpartition(".")
        node = _node_at(parent, node_of)
        node_of[path] = node if segment in PRIVATE_SEGMENTS else node.setdefault(f"{segment}.", {})
    return node_of[path]


def is_wrapper_name(segment: str) -> bool:
    """Whether a wrapper may have put this segment into a key."""
    return segment == WRAPPER_SEGMENT or segment in PRIVATE_SEGMENTS


def without_wrappers(key: str) -> str:
    """Return a key without all segments that wrappers may have put into it."""
    return ".".join(segment for segment in key.split(".") if not is_wrapper_name(segment))


def without_private_segments(name: str) -> str:
    """Return a key or path as it is without ``torch.compile``, FSDP and the like."""
    return ".".join(segment for segment in name.split(".") if segment not in PRIVATE_SEGMENTS)


def is_inside(key: str, paths: Collection[str]) -> bool:
    """Whether a key lies in one of these modules; their paths have no private segments."""
    path = without_private_segments(key) if paths else ""
    while path:
        path = path.rpartition(".")[0]
        if path in paths:
            return True
    return False


def child_modules(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield (``"name."``, child) for every child module."""
    return ((name, value) for name, value in node.items() if not isinstance(value, str))


def keys_below(node: Node) -> Iterator[str]:
    """Yield every key at and below a node."""
    stack = [node]
    while stack:
        for value in stack.pop().values():
            if isinstance(value, str):
                yield value
            else:
                stack.append(value)


def is_wrapper(node: Node) -> bool:
    """Whether there is a child ``module`` and nothing beside it, as in a wrapper."""
    return _WRAPPED in node and node.keys() <= {_WRAPPED, WRAPPER_COUNTER}


def inside_wrappers(node: Node) -> Node:
    """Return what the wrappers around everything hold."""
    while is_wrapper(node):
        node = node[_WRAPPED]
    return node


def is_copied_into(have: Shape | None, want: Shape | None) -> bool:
    """Whether torch copies from the one shape into the other; an unknown one may fit."""
    # Also (1,) into (): torch 0.3 knew no zero-dimensional tensors.
    return have == want or have is None or want is None or (have == (1,) and want == ())


@dataclass
class Overlap:
    """What a checkpoint and a model have in common: pairs of their keys at the same place."""

    pairs: list[tuple[str, str]] = field(default_factory=list)  # of the same shape
    clashes: list[tuple[str, str]] = field(default_factory=list)  # of another shape


class Overlay:
    """Lays parts of a checkpoint's tree over parts of a model's."""

    def __init__(self, checkpoint_shapes: Shapes, model_shapes: Shapes) -> None:
        self._checkpoint_shapes = checkpoint_shapes
        self._model_shapes = model_shapes
        self._of_wrappers: dict[tuple[int, int], Overlap] = {}

    # As deep as keys have levels, which envelope.check_contents limits.
    def largest(self, checkpoint: Node, model: Node) -> Overlap:
        """Return the largest overlap, without those ``module`` levels of the checkpoint that are in the way."""
        if not is_wrapper(checkpoint):
            return self.by_name(checkpoint, model)
        nodes = id(checkpoint), id(model)  # meet again where wrappers are in a row
        if nodes not in self._of_wrappers:
            kept, unwrapped = self.by_name(checkpoint, model), self._without_wrapper(checkpoint, model)
            # On a tie the name stays: the smaller change.
            self._of_wrappers[nodes] = unwrapped if len(unwrapped.pairs) > len(kept.pairs) else kept
        return self._of_wrappers[nodes]

    def by_name(self, checkpoint: Node, model: Node) -> Overlap:
        """Return the overlap of two nodes if neither is a wrapper."""
        overlap = Overlap()
        for name, have in checkpoint.items():
            want = model.get(name)
            if want is None:
                continue
            if isinstance(have, str):
                fits = is_copied_into(self._checkpoint_shapes[have], self._model_shapes[want])
                (overlap.pairs if fits else overlap.clashes).append((have, want))
            else:
                below = self.largest(have, want)
                overlap.pairs += below.pairs
                overlap.clashes += below.clashes
        return overlap

    def _without_wrapper(self, checkpoint: Node, model: Node) -> Overlap:
        inner = self.largest(checkpoint[_WRAPPED], model)
        counter, wanted = checkpoint.get(WRAPPER_COUNTER), model.get(WRAPPER_COUNTER)
        if not counter or not wanted or any(wanted == taken for _, taken in inner.pairs):
            return inner
        return Overlap([*inner.pairs, (counter, wanted)], inner.clashes)
