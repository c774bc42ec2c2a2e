"""The command ``checkpoint``."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_gpu_tools.checkpoints import formats
from lightning_gpu_tools.checkpoints.content import (
    LIGHTNING_VERSION,
    check_contents,
    describe_content,
    is_lightning_checkpoint,
    shown_shape,
)
from lightning_gpu_tools.checkpoints.inert_pickle import beyond_plain_data, describe_unread
from lightning_gpu_tools.checkpoints.key_tree import group_keys, is_wrapper_name
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, SUFFIXES, Structure, TensorInfo
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.files import exists
from lightning_gpu_tools.patches import collector_paused
from lightning_gpu_tools.units import format_bytes, format_duration, line_width, printable, printable_path, wrapped

_ANY = "a file, a folder with a checkpoint or its shards, their index file, or the URL of a file"
_SCHEMA_VERSION = 1  # of the JSON of `inspect`
_IN_FIRST_LINES = frozenset({"epoch", "global_step", LIGHTNING_VERSION})
_EXIT_CODES = "Exit code: 0 done; 1 failed, with the reason on stderr; 2 wrong usage."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Inspect, verify and convert checkpoints, files and folders of shards. Never runs code in a file. "
        "docs/missing_keys.md lists the formats."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    inspect = actions.add_parser(
        "inspect",
        help="show keys, shapes, dtypes, sizes, wrappers, versions and devices",
        description="Show the contents of a file without reading its weights.",
        epilog=_EXIT_CODES,
    )
    inspect.add_argument("file", metavar="FILE", help=_ANY)
    inspect.add_argument("--json", action="store_true", help="print JSON (sizes in bytes, null = unknown)")
    inspect.set_defaults(run=_inspect)

    verify = actions.add_parser(
        "verify",
        help="compare the whole file with its checksums, and load it",
        description="Compare every record with its checksum (CRC-32), which torch does not do on load. Then load the "
        "file without running code in it: its weights, and everything else if it is plain data. torch's legacy format "
        "and safetensors have no checksums, and the output says so.",
        epilog=_EXIT_CODES,
    )
    verify.add_argument("file", metavar="FILE", help=_ANY)
    verify.set_defaults(run=_verify)

    convert = actions.add_parser(
        "convert",
        help="remove wrappers from the keys, change the prefix, or write safetensors",
        description="Write SOURCE to one file, TARGET, with all tensors on the CPU. Removes the names that "
        "torch.compile, FSDP, activation checkpointing and Fabric add to keys, and the `module.` that DataParallel or "
        "DDP adds to all keys. Converts averaged weights in the same way. Keeps everything else in SOURCE, unless "
        "--weights is given or TARGET is .safetensors.",
        epilog="Example: lightning-gpu-tools checkpoint convert last.ckpt net.safetensors --drop-root model. "
        f"{_EXIT_CODES} On failure TARGET is unchanged.",
    )
    convert.add_argument("source", metavar="SOURCE", help=_ANY)
    convert.add_argument("target", metavar="TARGET", help=f"output file, ends in {', '.join(SUFFIXES)}")
    convert.add_argument("--entry", metavar="NAME", help="entry of SOURCE with the weights, if it has several")
    convert.add_argument(
        "--drop-root", metavar="NAME.", default="", help="remove this prefix; keys without it are dropped"
    )
    convert.add_argument("--add-root", metavar="NAME.", default="", help="add this prefix to every key")
    convert.add_argument("--weights", action="store_true", help="write only the weights")
    convert.add_argument("--force", action="store_true", help="overwrite TARGET")
    convert.set_defaults(run=_convert)


@collector_paused()
def _inspect(args: argparse.Namespace) -> int:
    found = _summarize(formats.read_structure(args.file))
    print(json.dumps(found) if args.json else _render(found))
    return 0


def _summarize(structure: Structure) -> dict[str, Any]:
    """Return the facts about a file, ready for JSON. Sizes are in bytes; ``None`` means unknown."""
    content = structure.content
    top = content if isinstance(content, Mapping) else {}
    entries = check_contents(content, structure.path)
    version = top.get(LIGHTNING_VERSION)
    kind = "state_dict" if "" in entries else describe_content(content)
    if is_lightning_checkpoint(content):
        kind = "Lightning checkpoint"
    wrappers: dict[str, Counter[str]] = {name: Counter() for name in entries}
    for name, weights in entries.items():
        for key in weights:
            wrappers[name].update({segment for segment in key.split(".")[:-1] if is_wrapper_name(segment)})
    return {
        "schema_version": _SCHEMA_VERSION,
        "path": structure.path,
        "format": structure.format,
        "shards": len(structure.shards) or None,
        "size_bytes": structure.size_bytes,
        "kind": kind,
        "lightning_version": version if isinstance(version, str) and version else None,
        "epoch": top["epoch"] if isinstance(top.get("epoch"), int) else None,
        "global_step": top["global_step"] if isinstance(top.get("global_step"), int) else None,
        "devices": sorted(structure.devices) or None,
        "wrappers_in_keys": {name: dict(sorted(counts.items())) for name, counts in wrappers.items()},
        "beyond_plain_data": beyond_plain_data(structure.globals),
        "entries": {
            name if isinstance(name, str) else printable(name): describe_content(value)
            for name, value in (() if "" in entries else top.items())
        },
        "weights": {name: [_describe(key, info) for key, info in w.items()] for name, w in entries.items()},
    }


def _render(summary: Mapping[str, Any]) -> str:
    """Return the summary as text, as wide as the terminal except for longer names."""
    size = format_bytes(summary["size_bytes"])
    files = f" in {summary['shards']} files" if (summary["shards"] or 0) > 1 else ""
    lines = [f"{printable_path(summary['path'])}: {summary['kind']}, {size}, {summary['format']}{files}"]
    facts = {
        "epoch": summary["epoch"],
        "step": summary["global_step"],
        "Lightning": summary["lightning_version"],
        "saved from": ", ".join(summary["devices"] or ()) or None,
    }
    lines.append("  " + ", ".join(f"{name} {printable(value)}" for name, value in facts.items() if value is not None))
    for name, described in summary["entries"].items():
        if name not in _IN_FIRST_LINES and name not in summary["weights"]:
            lines.append(f"  {printable(name)}: {described}")
    if summary["beyond_plain_data"]:
        lines.append(f"  holds more than plain data: {', '.join(map(printable, summary['beyond_plain_data']))}")
    lines = [wrapped(line, others="    ") for line in lines]  # without breaking names
    for name, weights in summary["weights"].items():
        lines += ["", *_weight_lines(name, weights, summary["wrappers_in_keys"][name])]
    return "\n".join(lines)


def _weight_lines(name: str, weights: list[Mapping[str, Any]], wrappers: Mapping[str, int]) -> list[str]:
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
        keys = ", ".join(group_keys(member["key"] for member in members))
        kind = (members[0]["kind"] or "").rpartition(".")[2]
        dtype = printable(f"{members[0]['dtype'] or '-'}{kind and f' ({kind})'}", 40)
        rows.append((keys, shape, dtype, size))
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


@collector_paused()
def _verify(args: argparse.Namespace) -> int:
    from lightning_gpu_tools.checkpoints.reading import verify_checkpoint

    start = time.monotonic()
    structure, unread = verify_checkpoint(args.file)
    sound = "all checksums match"
    if not structure.has_checksums:
        sound = "the structure is valid (this format has no checksums)"
    size, took = format_bytes(structure.size_bytes), format_duration(time.monotonic() - start)
    note = f"; {describe_unread(unread)}" if unread else ""
    print(f"{printable_path(args.file)}: {sound}, {size} in {took}{note}")
    return 0


@collector_paused()
def _convert(args: argparse.Namespace) -> int:
    if not args.target.endswith(SUFFIXES):
        args.parser.error(f"argument TARGET: {printable_path(args.target)} must end in {', '.join(SUFFIXES)}")
    if exists(args.target) and not args.force:
        raise CheckpointError(f"{printable_path(args.target)} exists. Use --force to replace it.")
    from lightning_gpu_tools.checkpoints.key_renaming import as_root
    from lightning_gpu_tools.checkpoints.writing import convert

    result = convert(
        args.source,
        args.target,
        entry=args.entry,
        drop_root=as_root(args.drop_root),
        add_root=as_root(args.add_root),
        weights_only=args.weights,
    )
    print(result)
    return 0
