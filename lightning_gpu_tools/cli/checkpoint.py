"""The command ``checkpoint``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator

from lightning_gpu_tools.checkpoints.key_tree import list_groups
from lightning_gpu_tools.checkpoints.structure import SUFFIXES, Progress, collector_paused, no_progress
from lightning_gpu_tools.errors import CheckpointError
from lightning_gpu_tools.units import format_bytes, format_duration, printable_path

_MIN_BYTES_OF_A_BAR = 256 << 20  # our default: smaller files are done before a progress bar is missed
_ANY = "a file, a folder of shards or its index, or the URL of a file"
_EXIT_CODES = "Exit code: 0 done; 1 failed, with the reason on stderr; 2 wrong usage."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Inspect, verify, convert and compare checkpoints: files of torch.save, Lightning and safetensors, folders of "
        "shards or their index (Hugging Face, torch.distributed.checkpoint, FSDP, DeepSpeed ZeRO). No code in a file "
        "is ever run."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    inspect = actions.add_parser(
        "inspect",
        help="show keys, shapes, dtypes, sizes, wrappers, versions and devices",
        description="Show what is in a file, without reading its weights.",
        epilog=_EXIT_CODES,
    )
    inspect.add_argument("file", metavar="FILE", help=_ANY)
    inspect.add_argument("--all", action="store_true", help="one line per key, not per group")
    inspect.add_argument("--json", action="store_true", help="print JSON; sizes in bytes, null = unknown")
    inspect.set_defaults(run=_inspect)

    verify = actions.add_parser(
        "verify",
        help="read the whole file and compare it with its checksums",
        description="Compare every record with its checksum (CRC-32), which torch does not do on load. torch's old "
        "format and safetensors have no checksums: for those only the structure is checked, and the output says so.",
        epilog=_EXIT_CODES,
    )
    verify.add_argument("file", metavar="FILE", help=_ANY)
    verify.add_argument("--json", action="store_true", help="print JSON: path, sound, checksums, bytes")
    verify.set_defaults(run=_verify)

    convert = actions.add_parser(
        "convert",
        help="write it with clean keys, another root, another dtype, or as safetensors",
        description="Write one file, TARGET, on the CPU, without the names that torch.compile, FSDP, activation "
        "checkpointing and Fabric leave in keys, nor the `module.` of a DataParallel or DDP that all keys begin with. "
        "Averages of the weights are converted likewise. Everything else in SOURCE is kept, unless --weights is given "
        "or TARGET is .safetensors.",
        epilog="Example: lightning-gpu-tools checkpoint convert last.ckpt net.safetensors --drop-root model. --dtype "
        f"bfloat16. {_EXIT_CODES} On failure TARGET is unchanged.",
    )
    convert.add_argument("source", metavar="SOURCE", help=_ANY)
    convert.add_argument("target", metavar="TARGET", type=_target, help=f"ends in {', '.join(SUFFIXES)}")
    convert.add_argument("--entry", metavar="NAME", help="entry of SOURCE that holds the weights, if it has several")
    names = convert.add_mutually_exclusive_group()
    names.add_argument(
        "--wrapper",
        metavar="PATH",
        action="append",
        default=[],
        help="path of a DataParallel, DDP or AveragedModel in the model whose `module.` is removed; can be repeated",
    )
    names.add_argument("--keep-prefix", action="store_true", help="keep a `module.` that all keys begin with")
    names.add_argument("--like", metavar="FILE", help="rename the keys to those of this checkpoint")
    convert.add_argument(
        "--drop-root", metavar="NAME.", default="", help="remove this prefix; keys without it are dropped"
    )
    convert.add_argument("--add-root", metavar="NAME.", default="", help="add this prefix to every key")
    convert.add_argument(
        "--dtype",
        choices=("float64", "float32", "float16", "bfloat16"),
        help="convert floating-point weights to this dtype",
    )
    convert.add_argument("--weights", action="store_true", help="write the weights and nothing else")
    convert.add_argument(
        "--force", action="store_true", help="overwrite TARGET; if it is a symlink, overwrite the file it points to"
    )
    convert.set_defaults(run=_convert)

    diff = actions.add_parser(
        "diff",
        help="compare the weights of two files: keys, shapes, dtypes, values",
        description="Compare the weights of two files; nothing else in them. Names of wrappers and of one root make no "
        "difference. Objects that only running code could open are listed, not opened.",
        epilog="Exit code: 0 all weights are the same; 1 they differ; 2 wrong usage; 3 some or all of them cannot be "
        "compared, with the reason on stderr; 70 an unexpected error, as of every command.",
    )
    diff.add_argument("first", metavar="A", help=_ANY)
    diff.add_argument("second", metavar="B", help="same as A")
    diff.add_argument("--entry", metavar="NAME", help="entry that holds the weights, for each file that has several")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(run=_diff)


@collector_paused()
def _inspect(args: argparse.Namespace) -> int:
    from lightning_gpu_tools.checkpoints.sources import read_structure
    from lightning_gpu_tools.checkpoints.summary import render, summarize

    with _errors_reported():
        summary = summarize(read_structure(args.file))
    _print(summary if args.json else render(summary, all_keys=args.all))
    return 0


@collector_paused()
def _verify(args: argparse.Namespace) -> int:
    from lightning_gpu_tools.checkpoints.sources import verify_checkpoint

    start = time.monotonic()
    with _errors_reported(), _progress("verifying") as progress:
        structure = verify_checkpoint(args.file, progress)
    if args.json:
        _print({"path": args.file, "sound": True, "checksums": structure.has_checksums, "bytes": structure.size_bytes})
    else:
        sound = "all checksums are right"
        if not structure.has_checksums:
            sound = "the structure is sound (there are no checksums)"
        size, took = format_bytes(structure.size_bytes), format_duration(time.monotonic() - start)
        part = f". This file {structure.part.what}" if structure.part else ""
        _print(f"{printable_path(args.file)}: {sound}, {size} in {took}{part}")
    return 0


@collector_paused()
def _convert(args: argparse.Namespace) -> int:
    from lightning_gpu_tools.files import exists

    with _errors_reported():
        if exists(args.target) and not args.force:
            raise CheckpointError(f"{printable_path(args.target)} exists. --force replaces it.")
    import torch

    from lightning_gpu_tools.checkpoints.convert import Changes, convert
    from lightning_gpu_tools.checkpoints.key_renaming import as_root

    changes = Changes(
        entry=args.entry,
        wrappers=tuple(args.wrapper),
        keep_prefix=args.keep_prefix,
        like=args.like,
        drop_root=as_root(args.drop_root),
        add_root=as_root(args.add_root),
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        weights_only=args.weights,
    )
    with _errors_reported(), _progress("converting") as progress:
        said = convert(args.source, args.target, changes, progress)
    _print(said)
    return 0


@collector_paused()
def _diff(args: argparse.Namespace) -> int:
    from lightning_gpu_tools.checkpoints.compare import compare, render

    try:
        with _errors_reported(), _progress("comparing") as progress:
            found = compare(args.first, args.second, progress, entry=args.entry)
    except CheckpointError as error:
        print(f"lightning-gpu-tools: {error}", file=sys.stderr)
        return 3
    _print(dataclasses.asdict(found) if args.json else render(found, args.first, args.second))
    if not found.is_same:
        return 1
    if found.not_compared:
        print(
            f"lightning-gpu-tools: Not all weights could be compared. Only running code could open "
            f"{list_groups(found.not_compared)}, so it is unknown whether the weights are the same.",
            file=sys.stderr,
        )
        return 3
    return 0


def _target(path: str) -> str:
    if not path.endswith(SUFFIXES):
        raise argparse.ArgumentTypeError(f"{printable_path(path)} must end in {', '.join(SUFFIXES)}")
    return path


def _print(what: object) -> None:
    import json

    print(what if isinstance(what, str) else json.dumps(what))


@contextlib.contextmanager
def _errors_reported() -> Iterator[None]:
    """Report errors of the file system as this command's own error."""
    try:
        yield
    except CheckpointError:  # one of them is an OSError, too
        raise
    except OSError as error:
        raise CheckpointError(f"{printable_path(error.filename or 'the file')}: {error.strerror or error}") from None


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """Show a progress bar on a terminal if there is much to do."""
    with contextlib.ExitStack() as shown:

        def begin(size_bytes: int) -> Callable[[int], object]:
            if size_bytes < _MIN_BYTES_OF_A_BAR or not sys.stderr.isatty():
                return no_progress(size_bytes)
            from rich import progress
            from rich.console import Console

            bar = progress.Progress(console=Console(file=sys.__stderr__), transient=True)
            task = shown.enter_context(bar).add_task(what, total=size_bytes)
            return lambda count: bar.advance(task, count)

        yield begin
