"""Checkpoint keys as a tree of modules, and the largest part of one tree that lies over another.

Wrappers of a module show in the names of its parameters: ``torch.compile`` adds ``_orig_mod``, ``DataParallel`` adds
``module``. The first kind of name nobody writes by hand, so it is left out wherever it stands. The second kind may be a
child that somebody called ``module``; whether it is a wrapper is decided here, by what the other tree has at its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, Union

Shape = tuple[int, ...]

# One dict a module: "name." -> the child module of that name, "name" -> the key of the module's own tensor.
# Not a class with two dicts, because 100,000 of those keep the garbage collector busy for seconds.
Node: TypeAlias = dict[str, Union[str, "Node"]]

# torch.compile, FSDP, activation checkpointing, Lightning Fabric and old Lightning, FairScale and XLA's FSDP.
PRIVATE_SEGMENTS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_fpw_module"}
)
# nn.DataParallel, DistributedDataParallel, AveragedModel, DeepSpeedEngine and others keep the module they wrap here.
WRAPPER_SEGMENT = "module"
# AveragedModel's step counter, the one thing that stands beside a wrapper's ``module``.
WRAPPER_COUNTER = "n_averaged"

_WRAPPER_CHILD = WRAPPER_SEGMENT + "."


@dataclass
class Tree:
    """Keys without their private segments.

    Attributes:
        root: The outermost module.
        collisions: Keys that got the same place as another one, and that other one.
    """

    root: Node = field(default_factory=dict)
    collisions: dict[str, str] = field(default_factory=dict)

    def find(self, path: str) -> Node | None:
        """Return the node at ``path``; wrappers on the way may be left out or named. ``None``: there is none."""
        node = self.root
        for segment in path.split("."):
            if segment in PRIVATE_SEGMENTS or not segment:
                continue
            inner = node
            while (child := _child(inner, segment)) is None and is_wrapper(inner):
                inner = unwrap(inner)
            if child is None:
                return None
            node = child
        return node


def build_tree(keys: Iterable[str], wrappers: Collection[str] = ()) -> Tree:
    """Sort keys into a tree; the wrappers at these paths and the ``module`` inside become one node."""
    tree = Tree()
    node_of: dict[str, Node] = {"": tree.root}
    for key in keys:
        path, _, name = key.rpartition(".")
        node = node_of.get(path)
        if node is None:
            node = _make(path, node_of)
        taken = node.setdefault(name, key)
        if taken is not key and isinstance(taken, str):
            tree.collisions[key] = taken
            tree.collisions.setdefault(taken, key)
    absorbed: dict[int, int] = {}
    for path in sorted(wrappers, key=lambda path: path.count(".") if path else -1):
        _absorb(tree.root, path, absorbed)
    return tree


def is_wrapper_name(segment: str) -> bool:
    """Whether a wrapper may have put this segment into a key."""
    return segment == WRAPPER_SEGMENT or segment in PRIVATE_SEGMENTS


def without_wrappers(key: str) -> str:
    """Return a key without any segment that a wrapper may have put into it, for comparisons."""
    return ".".join(segment for segment in key.split(".") if not is_wrapper_name(segment))


def without_private_segments(name: str) -> str:
    """Return a key or module path as it would be without ``torch.compile``, FSDP and the like."""
    return ".".join(segment for segment in name.split(".") if segment not in PRIVATE_SEGMENTS)


class PathSet:
    """Whether a key lies at or below one of some module paths."""

    def __init__(self, paths: frozenset[str]) -> None:
        self._paths = frozenset(without_private_segments(path) for path in paths)

    def __contains__(self, key: str) -> bool:
        path = without_private_segments(key) if self._paths else ""
        while path:
            path = path.rpartition(".")[0]
            if path in self._paths:
                return True
        return False


def child_modules(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield (``"name."``, child) for every child module of a node."""
    for name, value in node.items():
        if not isinstance(value, str):
            yield name, value


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
    """Whether there is a child ``module`` and nothing beside it, as in every wrapper that uses that name."""
    return _WRAPPER_CHILD in node and (len(node) == 1 or (len(node) == 2 and WRAPPER_COUNTER in node))


def unwrap(node: Node) -> Node:
    """Return the child ``module`` of a node."""
    inner = node[_WRAPPER_CHILD]
    assert not isinstance(inner, str)  # a name that ends in a dot is never a tensor's
    return inner


def inside_wrappers(node: Node) -> Node:
    """Return what the wrappers around everything hold."""
    while is_wrapper(node):
        node = unwrap(node)
    return node


def _child(node: Node, name: str) -> Node | None:
    child = node.get(name + ".")
    return None if isinstance(child, str) else child


def _make(path: str, node_of: dict[str, Node]) -> Node:
    """Add the node at ``path`` and all above it. The parent is most often there already; this is the hot spot."""
    parent, _, segment = path.rpartition(".")
    node = node_of.get(parent)
    if node is None:
        node = _make(parent, node_of)
    if segment not in PRIVATE_SEGMENTS:
        name = segment + "."
        child = node.get(name)
        if child is None or isinstance(child, str):
            child = node[name] = {}
        node = child
    node_of[path] = node
    return node


def _absorb(node: Node, path: str, absorbed: dict[int, int]) -> None:
    """Put what the wrapper at ``path`` holds in its place. ``absorbed`` counts by node; outer wrappers come first."""
    skip = absorbed.get(id(node), 0)
    for segment in path.split(".") if path else ():
        if segment in PRIVATE_SEGMENTS:
            continue
        if segment == WRAPPER_SEGMENT and skip:
            skip -= 1
            continue
        child = _child(node, segment)
        if child is None:  # state-dict hooks of the module, or of one around it, already leave this path out
            return
        node, skip = child, absorbed.get(id(child), 0)
    if is_wrapper(node):
        inner = unwrap(node)
        del node[_WRAPPER_CHILD]
        node.update(inner)
        absorbed[id(node)] = absorbed.get(id(node), 0) + 1


def is_copied_into(have: Shape | None, want: Shape | None) -> bool:
    """Whether torch would copy a tensor of the one shape into one of the other; ``None`` is unknown, and may fit."""
    # torch loads a tensor of shape (1,) into one of shape (): torch 0.3 knew no zero-dimensional tensors.
    return have == want or have is None or want is None or (have == (1,) and want == ())


@dataclass
class Overlap:
    """What two trees have in common.

    Attributes:
        pairs: Key of the one and key of the other, same place and same shape.
        clashes: The same for places where the shapes differ.
    """

    pairs: list[tuple[str, str]] = field(default_factory=list)
    clashes: list[tuple[str, str]] = field(default_factory=list)


class Overlay:
    """Lays parts of a checkpoint's tree over parts of a model's tree."""

    def __init__(self, checkpoint_shapes: Mapping[str, Shape | None], model_shapes: Mapping[str, Shape | None]) -> None:
        self._checkpoint_shapes = checkpoint_shapes
        self._model_shapes = model_shapes
        self._wrapper_readings: dict[tuple[int, int], Overlap] = {}

    def largest(self, checkpoint: Node, model: Node) -> Overlap:
        """Return the largest overlap, taking out ``module`` levels of the checkpoint where that makes it larger."""
        overlap = Overlap()
        self._add_largest(checkpoint, model, overlap)
        return overlap

    def fits(self, checkpoint_key: str, model_key: str) -> bool:
        """Whether torch would copy the one tensor into the other."""
        return is_copied_into(self._checkpoint_shapes[checkpoint_key], self._model_shapes[model_key])

    # As deep as keys have levels, which envelope.check_contents limits.
    def _add_largest(self, checkpoint: Node, model: Node, overlap: Overlap) -> None:
        if not is_wrapper(checkpoint):
            self._add_by_name(checkpoint, model, overlap)
            return
        # The same two nodes meet again on several ways through a row of wrappers.
        pair = (id(checkpoint), id(model))
        if pair not in self._wrapper_readings:
            kept, unwrapped = Overlap(), Overlap()
            self._add_by_name(checkpoint, model, kept)
            self._add_without_wrapper(checkpoint, model, unwrapped)
            # On a tie the name stays: the smaller change.
            self._wrapper_readings[pair] = unwrapped if len(unwrapped.pairs) > len(kept.pairs) else kept
        overlap.pairs += self._wrapper_readings[pair].pairs
        overlap.clashes += self._wrapper_readings[pair].clashes

    def _add_by_name(self, checkpoint: Node, model: Node, overlap: Overlap) -> None:
        for name, have in checkpoint.items():
            want = model.get(name)
            if isinstance(have, str):
                if isinstance(want, str):
                    (overlap.pairs if self.fits(have, want) else overlap.clashes).append((have, want))
            elif isinstance(want, dict):
                self._add_largest(have, want, overlap)

    def _add_without_wrapper(self, checkpoint: Node, model: Node, overlap: Overlap) -> None:
        self._add_largest(unwrap(checkpoint), model, overlap)
        counter, wanted = checkpoint.get(WRAPPER_COUNTER), model.get(WRAPPER_COUNTER)
        free = all(wanted != taken for _, taken in overlap.pairs)
        if isinstance(counter, str) and isinstance(wanted, str) and free:
            overlap.pairs.append((counter, wanted))
