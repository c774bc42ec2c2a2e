"""Checkpoint keys as a tree of modules, and as short text: ``layers.{0…11}.attn.bias``."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lightning_gpu_tools.units import printable

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | None]  # by key; None if not a tensor, or without a shape yet

# One dict per module: "name." -> child module, "name" -> key of the module's own tensor.
# Not a class with two dicts, because 100,000 of them keep the garbage collector busy for seconds.
Node: TypeAlias = dict[str, Any]

# torch.compile, FSDP, activation checkpointing, Lightning Fabric and old Lightning, FairScale and XLA's FSDP.
PRIVATE_SEGMENTS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_fpw_module"}
)
# The attribute of DataParallel, DistributedDataParallel, AveragedModel, DeepSpeedEngine, ... with the wrapped module.
WRAPPER_SEGMENT = "module"
# AveragedModel's step counter, the only sibling that a wrapper's ``module`` can have.
WRAPPER_COUNTER = "n_averaged"

WRAPPED = WRAPPER_SEGMENT + "."


@dataclass
class Tree:
    """A tree of keys without their private segments."""

    root: Node = field(default_factory=dict)
    collisions: dict[str, str] = field(default_factory=dict)  # key -> another key at the same place

    def find(self, path: str) -> Node | None:
        """Return the node at ``path``, which may include or omit wrappers."""
        node = self.root
        for segment in filter(None, without_private_segments(path).split(".")):
            name = f"{segment}."
            while name not in node and is_wrapper(node):
                node = node[WRAPPED]
            if name not in node:
                return None
            node = node[name]
        return node


def build_tree(keys: Iterable[str], wrappers: Iterable[str] = ()) -> Tree:
    """Build a tree from keys. A wrapper at one of these paths and its ``module`` become one node."""
    tree = Tree()
    node_of = {"": tree.root}
    for key in keys:
        path, _, name = key.rpartition(".")
        taken = _node_at(path, node_of).setdefault(name, key)
        if taken is not key:
            tree.collisions[key] = taken
            tree.collisions.setdefault(taken, key)
    for path in sorted({*wrappers}, key=len, reverse=True):  # inner ones first, so that outer paths stay valid
        node = tree.find(path)  # None where state-dict hooks omit the path
        if node is not None and is_wrapper(node):
            node.update(node.pop(WRAPPED))
    return tree


def _node_at(path: str, node_of: dict[str, Node]) -> Node:
    if path not in node_of:
        parent, _, segment = path.rpartition(".")
        node = _node_at(parent, node_of)
        node_of[path] = node if segment in PRIVATE_SEGMENTS else node.setdefault(f"{segment}.", {})
    return node_of[path]


def is_wrapper_name(segment: str) -> bool:
    """Return whether a wrapper may have added this segment to a key."""
    return segment == WRAPPER_SEGMENT or segment in PRIVATE_SEGMENTS


def without_wrappers(key: str) -> str:
    """Return a key without the segments that wrappers may have added to it."""
    return ".".join(segment for segment in key.split(".") if not is_wrapper_name(segment))


def without_private_segments(name: str) -> str:
    """Return a key or path without the segments of ``torch.compile``, FSDP and similar wrappers."""
    return ".".join(segment for segment in name.split(".") if segment not in PRIVATE_SEGMENTS)


def is_inside(key: str, paths: Collection[str]) -> bool:
    """Return whether a key is inside one of these modules; their paths have no private segments."""
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
    """Return whether the node has only a child ``module`` and perhaps a counter, like a wrapper."""
    return WRAPPED in node and node.keys() <= {WRAPPED, WRAPPER_COUNTER}


def inside_wrappers(node: Node) -> Node:
    """Return the node inside all outer wrappers."""
    while is_wrapper(node):
        node = node[WRAPPED]
    return node


def is_copied_into(have: Shape | None, want: Shape | None) -> bool:
    """Return whether torch copies from one shape into the other; an unknown shape may fit."""
    # Torch also copies (1,) into (), because torch 0.3 had no zero-dimensional tensors.
    return have == want or have is None or want is None or (have == (1,) and want == ())


MAX_NAME = 300  # no known real model has longer parameter names
# Longer digit strings are hashes or dates, and int() of a hostile name's million digits would be slow.
_INDEX = re.compile(r"(?<![^.])[0-9]{1,7}(?![^.])")


def group_keys(keys: Iterable[str]) -> list[str]:
    """Return one line per group of keys that differ only in their numbers, in order of first appearance.

    ``a.0.w, a.1.w, a.2.w`` becomes ``a.{0…2}.w``. If some numbers in between are missing, the line ends with the count.
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for key in keys:
        groups.setdefault(tuple(_INDEX.split(key)), []).append(tuple(map(int, _INDEX.findall(key))))
    lines = []
    for texts, indices in groups.items():
        name, possible = texts[0], 1
        for numbers, text in zip(zip(*indices, strict=True), texts[1:], strict=True):
            first, last = min(numbers), max(numbers)
            name += (str(first) if first == last else f"{{{first}…{last}}}") + text
            possible *= last - first + 1
        lines.append(printable(name, MAX_NAME) + ("" if possible == len(indices) else f" ({len(indices)} keys)"))
    return lines


def list_groups(keys: Iterable[str]) -> str:
    """Return the groups on one line. Groups beyond the sixth are only counted."""
    return shortened(group_keys(keys), 6)


def listed(names: Sequence[object], limit: int = 40) -> str:
    """Return names on one line, safe to print. Names beyond ``limit`` are only counted."""
    return shortened([*map(printable, names)], limit)


def shortened(texts: Sequence[str], limit: int = 4) -> str:
    """Return texts on one line. Texts beyond ``limit`` are only counted."""
    hidden = len(texts) - limit
    return ", ".join(texts[:limit]) + (f", … and {hidden} more" if hidden > 0 else "")


def quoted(*names: str) -> str:
    """Return names in quotes, safe to print."""
    return " and ".join(f'"{printable(name)}"' for name in names)
