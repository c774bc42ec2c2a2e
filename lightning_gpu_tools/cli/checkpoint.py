"""The command ``checkpoint``."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator

from lightning_gpu_tools.checkpoints import sources, summary
from lightning_gpu_tools.checkpoints.structure import SUFFIXES
from lightning_gpu_tools.checkpoints.unsafe_globals import describe_unread
from lightning_gpu_tools.collector import collector_paused
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.files import exists
from lightning_gpu_tools.units import format_bytes, format_duration, printable_path

_ANY = "a file, a folder with a checkpoint or its shards, their index file, or the URL of a file"
_EXIT_CODES = "Exit code: 0 done; 1 failed, with the reason on stderr; 2 wrong usage."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Inspect, verify and convert checkpoints: files of torch.save, Lightning, TorchScript and safetensors, "
        "and folders of shards (Hugging Face, torch.distributed.checkpoint, FSDP, DeepSpeed ZeRO). Never runs code in "
        "a file."
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
    verify.add_argument("--json", action="store_true", help="print JSON with path, sound, checksums, bytes, unread")
    verify.set_defaults(run=_verify)

    convert = actions.add_parser(
        "convert",
        help="remove wrappers from the keys, change the prefix or dtype, or write safetensors",
        description="Write SOURCE to one file, TARGET, with all tensors on the CPU. Removes the names that "
        "torch.compile, FSDP, activation checkpointing and Fabric add to keys, and the `module.` that DataParallel or "
        "DDP adds to all keys. Converts averaged weights in the same way. Keeps everything else in SOURCE, unless "
        "--weights is given or TARGET is .safetensors.",
        epilog="Example: lightning-gpu-tools checkpoint convert last.ckpt net.safetensors --drop-root model. --dtype "
        f"bfloat16. {_EXIT_CODES} On failure TARGET is unchanged.",
    )
    convert.add_argument("source", metavar="SOURCE", help=_ANY)
    convert.add_argument("target", metavar="TARGET", type=_target, help=f"output file, ends in {', '.join(SUFFIXES)}")
    convert.add_argument("--entry", metavar="NAME", help="entry of SOURCE with the weights, if it has several")
    convert.add_argument("--keep-prefix", action="store_true", help="keep a `module.` that all keys begin with")
    convert.add_argument(
        "--drop-root", metavar="NAME.", default="", help="remove this prefix; keys without it are dropped"
    )
    convert.add_argument("--add-root", metavar="NAME.", default="", help="add this prefix to every key")
    convert.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="convert floating-point weights to this dtype",
    )
    convert.add_argument("--weights", action="store_true", help="write only the weights")
    convert.add_argument("--force", action="store_true", help="overwrite TARGET")
    convert.set_defaults(run=_convert)


@collector_paused()
def _inspect(args: argparse.Namespace) -> int:
    with _errors_reported():
        found = summary.summarize(sources.read_structure(args.file))
    _print(found if args.json else summary.render(found))
    return 0


@collector_paused()
def _verify(args: argparse.Namespace) -> int:
    from lightning_gpu_tools.checkpoints.reading import verify_checkpoint

    start = time.monotonic()
    with _errors_reported():
        structure, unread = verify_checkpoint(args.file)
    if args.json:
        found = {"path": args.file, "sound": True, "checksums": structure.has_checksums, "bytes": structure.size_bytes}
        _print({**found, "unread": unread.classes})
    else:
        sound = "all checksums match"
        if not structure.has_checksums:
            sound = "the structure is valid (this format has no checksums)"
        size, took = format_bytes(structure.size_bytes), format_duration(time.monotonic() - start)
        note = f"; {describe_unread(unread.classes)}" if unread.classes else ""
        _print(f"{printable_path(args.file)}: {sound}, {size} in {took}{note}")
    return 0


@collector_paused()
def _convert(args: argparse.Namespace) -> int:
    with _errors_reported():
        if exists(args.target) and not args.force:
            raise CheckpointError(f"{printable_path(args.target)} exists. Use --force to replace it.")
    import torch

    from lightning_gpu_tools.checkpoints.convert import convert
    from lightning_gpu_tools.checkpoints.key_renaming import as_root

    with _errors_reported():
        result = convert(
            args.source,
            args.target,
            entry=args.entry,
            keep_prefix=args.keep_prefix,
            drop_root=as_root(args.drop_root),
            add_root=as_root(args.add_root),
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            weights_only=args.weights,
        )
    _print(result)
    return 0


def _target(path: str) -> str:
    if not path.endswith(SUFFIXES):
        raise argparse.ArgumentTypeError(f"{printable_path(path)} must end in {', '.join(SUFFIXES)}")
    return path


def _print(result: object) -> None:
    print(result if isinstance(result, str) else json.dumps(result))


@contextlib.contextmanager
def _errors_reported() -> Iterator[None]:
    """Report file system errors as this command's own error."""
    try:
        yield
    except CheckpointError:  # CheckpointNotFoundError is also an OSError
        raise
    except OSError as error:
        raise CheckpointError(f"{printable_path(error.filename or 'the file')}: {error.strerror or error}") from None
