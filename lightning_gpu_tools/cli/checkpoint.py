"""The command ``checkpoint``."""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_gpu_tools.checkpoints import formats
from lightning_gpu_tools.checkpoints.content import (
    check_contents,
    describe_content,
    is_lightning_checkpoint,
    shown_shape,
)
from lightning_gpu_tools.checkpoints.inert_pickle import beyond_plain_data, describe_unread
from lightning_gpu_tools.checkpoints.key_tree import group_keys, is_wrapper_name, listed
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, SUFFIXES, Structure, TensorInfo
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.files import exists
from lightning_gpu_tools.patches import collector_paused
from lightning_gpu_tools.units import format_bytes, format_duration, printable, printable_path, wrapped

_ANY = "a file, a folder with a checkpoint or its shards, their index file, or the URL of a file"
_SCHEMA_VERSION = 1  # of the JSON of `inspect`
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
    inspect.set_defaults(action=_inspect)

    verify = actions.add_parser(
        "verify",
        help="compare the whole file with its checksums, and load it",
        description="Compare every record with its checksum (CRC-32), which torch does not do on load. Then load the "
        "file without running code in it: its weights, and everything else if it is plain data. torch's legacy format "
        "and safetensors have no checksums, and the output says so.",
        epilog=_EXIT_CODES,
    )
    verify.add_argument("file", metavar="FILE", help=_ANY)
    verify.set_defaults(action=_verify)

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
    convert.set_defaults(action=_convert)


@collector_paused()
def run(args: argparse.Namespace) -> int:
    """Run the action."""
    args.action(args)
    return 0


def _inspect(args: argparse.Namespace) -> None:
    structure = formats.read_structure(args.file)
    print(_as_json(structure) if args.json else "\n".join(_describe(structure)))


def _as_json(structure: Structure) -> str:
    """Return the facts about a file as JSON. Sizes are in bytes; ``null`` means unknown."""
    weights: dict[str, list[dict[str, Any]]] = {}
    for name, described in check_contents(structure.content, structure.path).items():
        weights[name] = []
        for key, info in described.items():
            shape, dtype = getattr(info, "shape", None), getattr(info, "dtype", None)
            *_, numel, size_bytes = _facts(info)
            weights[name].append({"key": key, "shape": shape, "dtype": dtype, "numel": numel, "bytes": size_bytes})
    top = structure.content if isinstance(structure.content, Mapping) and "" not in weights else {}
    found = {
        "schema_version": _SCHEMA_VERSION,
        "path": structure.path,
        "format": structure.format,
        "shards": len(structure.shards) or None,
        "size_bytes": structure.size_bytes,
        "devices": sorted(structure.devices),
        "beyond_plain_data": beyond_plain_data(structure.globals),
        "entries": {str(name): describe_content(value) for name, value in top.items()},
        "weights": weights,
    }
    return json.dumps(found)


def _describe(structure: Structure) -> list[str]:
    """Return the facts about a file as lines, as wide as the terminal except for longer names."""
    content = structure.content
    entries = check_contents(content, structure.path)
    kind = "state_dict" if "" in entries else describe_content(content)
    if is_lightning_checkpoint(content):
        kind = "Lightning checkpoint"
    files = f" in {len(structure.shards)} files" if len(structure.shards) > 1 else ""
    size = format_bytes(structure.size_bytes)
    lines = [f"{printable_path(structure.path)}: {kind}, {size}, {structure.format}{files}"]
    if structure.devices:
        lines.append(f"  saved from {listed(sorted(structure.devices))}")
    for name, value in content.items() if isinstance(content, Mapping) and "" not in entries else ():
        if name not in entries:
            lines.append(f"  {printable(name)}: {describe_content(value)}")
    if foreign := beyond_plain_data(structure.globals):
        lines.append(f"  holds more than plain data: {', '.join(map(printable, foreign))}")
    lines = [wrapped(line, others="    ") for line in lines]  # without breaking names
    for name, weights in entries.items():
        lines += ["", *_weight_lines(name, weights)]
    return lines


def _weight_lines(name: str, weights: Mapping[str, Any]) -> list[str]:
    wrappers: Counter[str] = Counter()
    groups: dict[tuple[Any, ...], list[str]] = {}  # keys that differ only in their numbers
    numbers = total_bytes = 0
    for key, info in weights.items():
        segments = key.split(".")
        wrappers.update({segment for segment in segments[:-1] if is_wrapper_name(segment)})
        facts = _facts(info)
        groups.setdefault((*facts, *(segment for segment in segments if not segment.isdigit())), []).append(key)
        numbers += facts[2] or 0
        total_bytes += facts[3] or 0
    lines = [f"{printable(name or 'weights')}: {len(weights)} keys, {numbers:,} numbers, {format_bytes(total_bytes)}"]
    if wrappers:
        counts = (f'"{segment}." ({count})' for segment, count in sorted(wrappers.items()))
        lines.append("  in the keys: " + ", ".join(counts))
    for (shape, dtype, _, size_bytes, *_), keys in groups.items():
        size = f", {format_bytes(size_bytes * len(keys))}" if size_bytes else ""
        lines.append(wrapped(f"  {', '.join(group_keys(keys))}: {shape} {dtype}{size}", others="    "))
    return lines


def _facts(info: Any) -> tuple[str, str, int | None, int | None]:
    """Return the shape and the dtype of a tensor, and how many numbers and bytes it has; ``None`` if unknown."""
    if not isinstance(info, TensorInfo):
        return "-", "-", None, None
    kind = info.kind.rpartition(".")[2]
    dtype = printable(f"{info.dtype}{kind and f' ({kind})'}", 40)
    if info.shape is None:
        return "-", dtype, None, None
    numel, item_bytes = math.prod(info.shape), BYTES_OF_DTYPE.get(info.dtype, 0)
    # Without a block of numbers: on the meta device, sparse, or of a class that packs its numbers.
    is_known = item_bytes > 0 and (info.storage is not None or not kind)
    return shown_shape(info.shape), dtype, numel, numel * item_bytes if is_known else None


def _verify(args: argparse.Namespace) -> None:
    from lightning_gpu_tools.checkpoints.reading import verify_checkpoint

    start = time.monotonic()
    structure, unread = verify_checkpoint(args.file)
    sound = "all checksums match"
    if not structure.has_checksums:
        sound = "the structure is valid (this format has no checksums)"
    size, took = format_bytes(structure.size_bytes), format_duration(time.monotonic() - start)
    note = f"; {describe_unread(unread)}" if unread else ""
    print(f"{printable_path(args.file)}: {sound}, {size} in {took}{note}")


def _convert(args: argparse.Namespace) -> None:
    if not args.target.endswith(SUFFIXES):
        args.parser.error(f"argument TARGET: {printable_path(args.target)} must end in {', '.join(SUFFIXES)}")
    if exists(args.target) and not args.force:
        raise CheckpointError(f"{printable_path(args.target)} exists. Use --force to replace it.")
    from lightning_gpu_tools.checkpoints.key_renaming import as_root
    from lightning_gpu_tools.checkpoints.writing import convert

    summary = convert(
        args.source,
        args.target,
        entry=args.entry,
        drop_root=as_root(args.drop_root),
        add_root=as_root(args.add_root),
        weights_only=args.weights,
    )
    print(summary)
