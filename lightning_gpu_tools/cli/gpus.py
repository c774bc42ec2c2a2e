"""``lightning-gpu-tools gpus``: every GPU of the machine, who uses it, who claims it, and why it cannot be used."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.units import format_bytes, format_duration, number_ranges, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from lightning_gpu_tools.gpus.readings import GpuClaim, GpuProcess, GpuReading

_REFRESH_EVERY_S = 2.0
_MIN_UUID = len("MIG-5e6f7a8b")
_MAX_NAME = len("NVIDIA RTX 6000 Ada Generation")  # longer ones are folded
# Our default: who has begun less than five minutes ago may still load data.
_MIN_AGE_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command and its help."""
    parser.description = (
        "Show every GPU of the machine, whatever CUDA_VISIBLE_DEVICES says: free memory, utilization over "
        "the last seconds, processes, claims, MIG instances, and why a GPU cannot be used. A process is idle that is "
        "older than five minutes and has run nothing on the GPU in the driver's samples, of some seconds. It is left "
        "over if whoever started it has ended as well. A claim is unused that is as old, of a user without a process "
        "there."
    )
    parser.epilog = (
        "JSON: a list with an object for each GPU, in PCI order. Its fields are those of "
        "lightning_gpu_tools.GpuReading: sizes in bytes, times in seconds since the epoch, null = not reported. "
        "Two are added, and are null where claims cannot be read: `effective_free_bytes`, what is free and not "
        "claimed, and `claims`. A claim has `user`, `pid`, `hostname`, `kind` (memory, whole or exclusive), "
        "`memory_bytes`, `since_s` and `is_unused`. A process also has `started_s`, `is_idle` and `is_left_over`. "
        "`mig_instances` have the same fields."
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

    gpus = nvml.read_gpus(with_loads=True)
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
        "processes": None
        if gpu.processes is None
        else [{**dataclasses.asdict(one), **_state(one)._asdict()} for one in gpu.processes],
        "mig_instances": [_as_json(instance, claims) for instance in gpu.mig_instances],
        "effective_free_bytes": None if claims is None else effective_free_bytes(gpu, here),
        "claims": None
        if claims is None
        else [
            {**{field: getattr(claim, field) for field in fields}, "is_unused": _is_unused(claim, gpu)}
            for claim in here
        ],
    }


def _table(gpus: Sequence[GpuReading], claims: Sequence[GpuClaim] | None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    uuids = {str(instance.uuid) for gpu in gpus for instance in gpu.mig_instances}
    # CUDA_VISIBLE_DEVICES takes the beginning of a UUID for it, too.
    length = next(length for length in count(_MIN_UUID) if len({uuid[:length] for uuid in uuids}) == len(uuids))
    rows = [row for gpu in gpus for row in _rows(gpu, claims, length)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("GPU", justify="right", no_wrap=True)
    table.add_column("name", overflow="fold", no_wrap=max((len(row[1]) for row in rows), default=0) <= _MAX_NAME)
    table.add_column("free", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    table.add_column("util", justify="right", no_wrap=True)
    table.add_column("used by", overflow="fold")
    table.add_column("claimed by", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, so that rich does not take a bracket in a name for markup
    return table


def _rows(gpu: GpuReading, claims: Sequence[GpuClaim] | None, uuid_length: int) -> Iterator[tuple[str, ...]]:
    """Yield the row of a GPU, of each MIG instance in use, and of the empty ones of each kind."""
    yield gpu.number, printable(gpu.name or "?"), *_cells(gpu, claims)
    empty: dict[tuple[str, ...], list[tuple[str, GpuReading]]] = {}
    for one in gpu.mig_instances:
        profile, cells = printable((one.name or "?").rpartition(" MIG ")[2]), _cells(one, claims)
        name = f"{profile} {printable(str(one.uuid)[:uuid_length])}"
        if any(cells[-2:]):
            yield one.number, name, *cells
        else:
            empty.setdefault((profile, *cells[:-2]), []).append((name, one))
    for (profile, *sizes), alike in empty.items():
        numbers = number_ranges(one.mig_index or 0 for _, one in alike)
        short = numbers.replace(" to ", "-").replace(" and ", ",").replace(" ", "")
        name = alike[0][0] if len(alike) == 1 else f"{len(alike)} x {profile}"
        yield f"{gpu.index}:{short}", name, *sizes, "nobody", ""


def _cells(gpu: GpuReading, claims: Sequence[GpuClaim] | None) -> tuple[str, ...]:
    """Return free and total memory, utilization, who uses the GPU, and who has claimed it."""
    now_s = time.time()
    claimed = [
        f"{claim.user} (pid {claim.pid}): {_what(claim)} for {format_duration(max(0.0, now_s - claim.since_s))}"
        f"{', unused' if _is_unused(claim, gpu) else ''}"
        for claim in claims or ()
        if gpu.uuid in claim.uuids
    ]
    return (
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
        return f"{len(gpu.mig_instances)} MIG instances"
    if gpu.mig_mode:
        return "cannot be used: MIG mode without an instance"
    if gpu.compute_mode == "prohibited":
        return "cannot be used: compute mode PROHIBITED"
    if gpu.processes is None:
        return "?"
    return "\n".join(
        " ".join(printable(part) for part in (one.user, one.name or f"pid {one.pid}", _memory(one)) if part)
        + _remark(one)
        for one in gpu.processes
    )


class _State(NamedTuple):
    """What is known of a process beside what the driver says; ``None`` if it cannot be seen from here.

    Attributes:
        started_s: When it started, seconds since the epoch.
        is_idle: Whether it only holds memory.
        is_left_over: Whether nobody is there any more who has started it.
    """

    started_s: float | None = None
    is_idle: bool | None = None
    is_left_over: bool | None = None


def _state(process: GpuProcess) -> _State:
    from lightning_gpu_tools.processes import INIT, process_stat, started_s

    stat = None if process.user is None else process_stat(process.pid)  # else the number is of another namespace
    began_s = None if stat is None else started_s(stat)
    if stat is None or began_s is None:
        return _State()
    if process.utilization_percent is None or process.graphics_only:
        return _State(began_s)
    is_idle = process.utilization_percent == 0 and time.time() - began_s >= _MIN_AGE_S
    return _State(began_s, is_idle, is_idle and stat.parent == INIT)


def _remark(process: GpuProcess) -> str:
    state = _state(process)
    if not state.is_idle or state.started_s is None:
        return ""
    age = format_duration(time.time() - state.started_s)
    return f" (pid {process.pid}), {'left over' if state.is_left_over else 'idle'}, started {age} ago"


def _is_unused(claim: GpuClaim, gpu: GpuReading) -> bool | None:
    """Return whether a claim's owner has no process on the GPU; ``None`` where processes cannot be seen."""
    if gpu.processes is None or any(one.user is None for one in gpu.processes) or not _sees_processes():
        return None
    return time.time() - claim.since_s >= _MIN_AGE_S and all(one.user != claim.user for one in gpu.processes)


def _sees_processes() -> bool:
    from lightning_gpu_tools.gpus import nvml

    return nvml.pids_are_ours()


def _memory(process: Any) -> str:
    return "" if process.memory_used_bytes is None else format_bytes(process.memory_used_bytes)


def _size(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else format_bytes(size_bytes)


def _what(claim: GpuClaim) -> str:
    if claim.kind == "memory":
        return _size(claim.memory_bytes)
    return "the whole GPU" if claim.kind == "whole" else "the whole GPU, exclusively,"
