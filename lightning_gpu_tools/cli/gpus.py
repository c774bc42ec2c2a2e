"""``lightning-gpu-tools gpus``: every GPU of the machine, who uses it, who claims it, and why it cannot be used."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.units import format_bytes, format_duration, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from lightning_gpu_tools.gpus.readings import GpuClaim, GpuReading

_REFRESH_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command and its help."""
    parser.description = (
        "Show every GPU of the machine, whatever CUDA_VISIBLE_DEVICES says: free memory, utilization over "
        "the last seconds, processes, claims, MIG instances, and why a GPU cannot be used."
    )
    parser.epilog = (
        "JSON: a list with an object for each GPU, in PCI order. Its fields are those of "
        "lightning_gpu_tools.GpuReading: sizes in bytes, null = not reported. Two are added, and are null where claims "
        "cannot be read: `effective_free_bytes`, what is free and not claimed, and `claims`. A claim has `user`, "
        "`pid`, `hostname`, `kind` (memory, whole or exclusive), `memory_bytes` and `since_s` (seconds since the "
        "epoch). `mig_instances` have the same fields."
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    output.add_argument("--watch", action="store_true", help="Update the table until Ctrl-C.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table or the JSON."""
    if args.json:
        import json

        gpus, claims = _read()
        print(json.dumps([_as_json(gpu, claims) for gpu in gpus]))
        return 0
    from rich.console import Console

    console = Console(file=sys.__stdout__)  # rich writes the escape sequences of colors itself
    if console.width > 100 or not console.is_terminal:
        console.width = 100
    if args.watch:
        return _watch(console)
    gpus, claims = _read()
    console.print(_table(gpus, claims) if gpus else "The NVIDIA driver lists no GPU.")
    return 0


def _watch(console: Any) -> int:
    from rich.live import Live

    from lightning_gpu_tools.gpus import nvml

    with nvml.session(), Live(_table(*_read()), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_REFRESH_EVERY_S)
                live.update(_table(*_read()), refresh=True)
        except KeyboardInterrupt:
            return 0


def _read() -> tuple[Sequence[GpuReading], Sequence[GpuClaim] | None]:
    """Return the GPUs and the claims on them, ``None`` where these cannot be read."""
    from lightning_gpu_tools.gpus import nvml
    from lightning_gpu_tools.selection import claims

    gpus = nvml.read_gpus()
    process_ids = {process.pid for gpu in gpus for process in gpu.processes or ()}
    try:
        with claims.read_ledger(claims.directory()) as ledger:
            return gpus, ledger.claims(process_ids)
    except ClaimsError as error:
        claims.warn_once(f"{error} It is not known what other jobs have claimed.")
        return gpus, None


def _as_json(gpu: GpuReading, claims: Sequence[GpuClaim] | None) -> dict[str, Any]:
    import dataclasses

    from lightning_gpu_tools.selection.ranking import effective_free_bytes

    here = [claim for claim in claims or () if gpu.uuid in claim.uuids]
    fields = ("user", "pid", "hostname", "kind", "memory_bytes", "since_s")
    return {
        **dataclasses.asdict(gpu),
        "mig_instances": [_as_json(instance, claims) for instance in gpu.mig_instances],
        "effective_free_bytes": None if claims is None else effective_free_bytes(gpu, here),
        "claims": None if claims is None else [{field: getattr(claim, field) for field in fields} for claim in here],
    }


def _table(gpus: Sequence[GpuReading], claims: Sequence[GpuClaim] | None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("name", max_width=24)
    table.add_column("free", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("util", justify="right", no_wrap=True)
    table.add_column("used by", overflow="fold")
    table.add_column("claimed by", overflow="fold")
    for gpu in gpus:
        # Text, so that rich does not take a bracket in a name for markup.
        table.add_row(*map(Text, _row(str(gpu.index), gpu, claims)))
        for instance in gpu.mig_instances:
            table.add_row(*map(Text, _row("MIG", instance, claims)))
    return table


def _row(title: str, gpu: GpuReading, claims: Sequence[GpuClaim] | None) -> tuple[str, ...]:
    now_s = time.time()
    claimed = [
        f"{claim.user} (pid {claim.pid}): {_what(claim)} for {format_duration(max(0.0, now_s - claim.since_s))}"
        for claim in claims or ()
        if gpu.uuid in claim.uuids
    ]
    return (
        title,
        printable(gpu.name or "?"),
        _size(gpu.memory_free_bytes),
        _size(gpu.memory_total_bytes),
        "?" if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f} %",
        _use(gpu),
        "?" if claims is None else "\n".join(claimed),
    )


def _use(gpu: GpuReading) -> str:
    """Return who is on the GPU, or why it cannot be used."""
    if gpu.error:
        return f"cannot be used: {printable(gpu.error, 300)}"
    if gpu.mig_instances:
        return "divided into MIG instances"
    if gpu.mig_mode:
        return "cannot be used: MIG mode without an instance"
    if gpu.compute_mode == "prohibited":
        return "cannot be used: compute mode PROHIBITED"
    if gpu.processes is None:
        return "?"
    return "\n".join(
        " ".join(printable(part) for part in (one.user, one.name or f"pid {one.pid}", _memory(one)) if part)
        for one in gpu.processes
    )


def _memory(process: Any) -> str:
    return "" if process.memory_used_bytes is None else format_bytes(process.memory_used_bytes)


def _size(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else format_bytes(size_bytes)


def _what(claim: GpuClaim) -> str:
    if claim.kind == "memory":
        return _size(claim.memory_bytes)
    return "the whole GPU" if claim.kind == "whole" else "the whole GPU, exclusively,"
