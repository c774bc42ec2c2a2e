"""The output of ``lightning-gpu-tools checkpoint inspect``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_gpu_tools.checkpoints.content import (
    LIGHTNING_VERSION,
    check_contents,
    describe_content,
    is_lightning_checkpoint,
    shown_shape,
)
from lightning_gpu_tools.checkpoints.key_tree import group_keys, is_wrapper_name
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, Opaque, Structure, TensorInfo
from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data
from lightning_gpu_tools.units import format_bytes, line_width, printable, printable_path, wrapped

SCHEMA_VERSION = 1
# Entries that have their own line or number.
_SHOWN = frozenset(
    {"epoch", "global_step", "hyper_parameters", "hparams_name", "hparams_type", "callbacks", "loops"}
    | {"optimizer_states", LIGHTNING_VERSION}
)


def summarize(structure: Structure) -> dict[str, Any]:
    """Return the facts about a file, ready for JSON. Sizes are in bytes; ``None`` means unknown."""
    content = structure.content
    top = content if isinstance(content, Mapping) else {}
    entries = check_contents(content, structure.path)
    version, states = top.get(LIGHTNING_VERSION), top.get("optimizer_states")
    kind = "state_dict" if "" in entries else "dictionary"
    if is_lightning_checkpoint(content):
        kind = "lightning"
    elif not isinstance(content, Mapping) or {"param_groups", "state"} <= content.keys():
        kind = "other"
    wrappers: dict[str, Counter[str]] = {name: Counter() for name in entries}
    for name, weights in entries.items():
        for key in weights:
            wrappers[name].update({segment for segment in key.split(".")[:-1] if is_wrapper_name(segment)})
    return {
        "schema_version": SCHEMA_VERSION,
        "path": structure.path,
        "format": structure.format,
        "shards": len(structure.assembly.shards) if structure.assembly else None,
        "size_bytes": structure.size_bytes,
        "kind": kind,
        "content": describe_content(content),
        "lightning_version": version if isinstance(version, str) and version else None,
        "epoch": top["epoch"] if isinstance(top.get("epoch"), int) else None,
        "global_step": top["global_step"] if isinstance(top.get("global_step"), int) else None,
        "hyper_parameters": _names(top.get("hyper_parameters")),
        "callbacks": _names(top.get("callbacks")),
        "optimizers": len(states) if kind == "lightning" and isinstance(states, list) else None,
        "devices": sorted(structure.devices) or None,
        "wrappers_in_keys": {name: dict(sorted(counts.items())) for name, counts in wrappers.items()},
        "beyond_plain_data": beyond_plain_data(structure.globals),
        "entries": {} if "" in entries else {_text(name): describe_content(value) for name, value in top.items()},
        "weights": {name: [_describe(key, info) for key, info in w.items()] for name, w in entries.items()},
    }


def render(summary: Mapping[str, Any]) -> str:
    """Return the summary as text, as wide as the terminal except for longer names."""
    kind = {"lightning": "Lightning checkpoint", "other": summary["content"]}.get(summary["kind"], summary["kind"])
    size = format_bytes(summary["size_bytes"])
    how = {"dcp": "torch.distributed.checkpoint", "deepspeed": "DeepSpeed"}.get(summary["format"], summary["format"])
    files = f" in {summary['shards']} files" if (summary["shards"] or 0) > 1 else ""
    lines = _prose(f"{printable_path(summary['path'])}: {kind}, {size}, {how}{files}")
    facts = {
        "epoch": summary["epoch"],
        "step": summary["global_step"],
        "Lightning": summary["lightning_version"],
        "saved from": ", ".join(summary["devices"] or ()) or None,
        "optimizers": summary["optimizers"],
    }
    lines += _prose(
        "  " + ", ".join(f"{name} {printable(value)}" for name, value in facts.items() if value is not None)
    )
    for label, names in {"hyperparameters": summary["hyper_parameters"], "callbacks": summary["callbacks"]}.items():
        if names:
            lines += _prose(f"  {label}: {', '.join(map(printable, names))}")
    for name, described in summary["entries"].items():
        if name not in _SHOWN and name not in summary["weights"]:
            lines += _prose(f"  {printable(name)}: {described}")
    if summary["beyond_plain_data"]:
        lines += _prose(f"  holds more than plain data: {', '.join(map(printable, summary['beyond_plain_data']))}")
    for name, weights in summary["weights"].items():
        lines += ["", *_weights(name, weights, summary["wrappers_in_keys"][name])]
    return "\n".join(lines)


def _prose(line: str) -> list[str]:
    """Wrap a line of text without breaking names."""
    return wrapped(line, others="    ").splitlines()


def _weights(name: str, weights: list[Mapping[str, Any]], wrappers: Mapping[str, int]) -> list[str]:
    numbers = sum(weight["numel"] or 0 for weight in weights)
    total = sum(weight["bytes"] or 0 for weight in weights)
    lines = [f"{printable(name or 'weights')}: {len(weights)} keys, {numbers:,} numbers, {format_bytes(total)}"]
    if wrappers:
        lines.append("  in the keys: " + ", ".join(f'"{segment}." ({count})' for segment, count in wrappers.items()))
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for weight in weights:
        words = [segment for segment in weight["key"].split(".") if not segment.isdigit()]
        groups.setdefault((*words, str(weight["shape"]), weight["dtype"], weight["kind"]), []).append(weight)
    rows = [("key", "shape", "dtype", "size")]
    for members in groups.values():
        shape = "-" if members[0]["shape"] is None else shown_shape(members[0]["shape"])
        sizes = [member["bytes"] for member in members if member["bytes"] is not None]
        size = format_bytes(sum(sizes)) if sizes else "-"
        keys = group_keys(member["key"] for member in members)
        kind = (members[0]["kind"] or "").rpartition(".")[2]
        dtype = printable(f"{members[0]['dtype'] or '-'}{kind and f' ({kind})'}", 40)
        rows += [(key, shape, dtype, size if i == 0 else '"') for i, key in enumerate(keys)]
    return lines + _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as aligned lines of at most 100 columns. A longer name gets its own line."""
    longest, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    first = min(longest, line_width() - 2 - sum(widths) - 2 * len(widths))
    lines = []
    for name, *cells in rows:
        if len(name) > first:
            lines.append(f"  {name}")
            name = ""
        aligned = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"  {name.ljust(first)}  {aligned}".rstrip())
    return lines


def _describe(key: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, TensorInfo):
        return {"key": key, **dict.fromkeys(("shape", "dtype", "kind", "numel", "bytes", "device"))}
    numel = None if info.shape is None else math.prod(info.shape)
    element_bytes = BYTES_OF_DTYPE.get(info.dtype)
    if info.kind and info.storage is None:  # on the meta device, sparse, or of a class that packs its numbers
        element_bytes = None
    return {
        "key": key,
        "shape": info.shape,
        "dtype": info.dtype,
        "kind": info.kind or None,
        "numel": numel,
        "bytes": None if numel is None or element_bytes is None else numel * element_bytes,
        "device": info.storage.location if info.storage else None,
    }


def _text(name: Any) -> str:
    return name if isinstance(name, str) else printable(name)


def _names(value: Any) -> list[str]:
    if isinstance(value, Opaque):  # OmegaConf's, Lightning's AttributeDict and argparse's
        value = value.items or value.state
    if isinstance(value, Mapping) and isinstance(value.get("_content"), Mapping):
        value = value["_content"]
    return [*map(_text, value)] if isinstance(value, Mapping) else []
