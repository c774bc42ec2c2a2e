"""The command ``gpus``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.gpus.readings import FOREIGN, GpuClaim, GpuProcess, GpuReading, folded_claims, not_none
from lightning_gpu_tools.processes import INIT
from lightning_gpu_tools.selection import claims as all_claims
from lightning_gpu_tools.selection import cuda
from lightning_gpu_tools.selection.ranking import Request, effective_free_bytes, is_outdated, rank_gpus
from lightning_gpu_tools.units import format_bytes, format_duration, line_width, printable

if TYPE_CHECKING:
    from rich.table import Table

_REFRESH_EVERY_S = 2.0
_SHORT_UUID = len("MIG-5e6f7a8b")
_MAX_NAME = len("NVIDIA RTX 6000 Ada Generation")  # longer ones are folded
_MIN_AGE_S = 300.0  # our default: a process younger than five minutes may still be loading data
_UTIL = 4  # the column
_MIN_BUSY_PERCENT, _MIN_FULL_PERCENT = 10.0, 70.0  # our defaults, of colors alone
_MAX_CLAIMS = 3  # our default: of a user, in a row
_MAX_USERS = 40  # our default: in a table; one person can act as thousands of users (subuid(5))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the help."""
    parser.description = (
        "Show every GPU of the machine, regardless of CUDA_VISIBLE_DEVICES: memory, utilization over the last seconds, "
        "processes, claims, MIG instances, and why a GPU cannot be used. A process is idle if it is older than five "
        "minutes and has no recent GPU activity. An idle process is left over if its parent has exited. A claim is "
        "unused if it is older than five minutes and its user has no process on that GPU. At most three claims of a "
        "user on a GPU are listed; others are counted. With --by-user, show what each user uses and has claimed on "
        "all GPUs together."
    )
    parser.epilog = (
        "JSON: a list of the GPUs in PCI order with the fields of lightning_gpu_tools.types.GpuReading, in bytes and "
        "seconds since the epoch; null = not reported. Each GPU also has `effective_free_bytes` (free and not claimed) "
        "and `claims`, both null if claims cannot be read. Each claim has `user`, `pid`, `hostname`, `kind` (memory, "
        "whole or exclusive), `memory_bytes`, `since_s` and `is_unused`; `pid` is null unless it is certain, and "
        "`hostname` if you may not read the claim. Each process also has `started_s`, `is_idle` and `is_left_over`. "
        "With --by-user: `users`, those with most memory first, and `unknown_gpus`, whose processes cannot be read."
    )
    parser.add_argument("--by-user", action="store_true", help="Show a row for each user instead of each GPU.")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    output.add_argument("--watch", action="store_true", help="Refresh the table until you press Ctrl-C.")


def run(args: argparse.Namespace) -> int:
    """Print the table or the JSON."""
    if args.json:
        gpus, claims = _read()
        found = _by_user(gpus, claims) if args.by_user else [_as_json(gpu, claims) for gpu in gpus]
        print(json.dumps(found))
        return 0
    from rich.console import Console

    console = Console(file=sys.__stdout__, width=line_width())  # rich writes the escape sequences of colors itself
    table = _user_table if args.by_user else _table
    if not args.watch:
        gpus, claims = _read()
        console.print(table(gpus, claims) if gpus else "The NVIDIA driver lists no GPU.")
        return 0
    from rich.live import Live

    with nvml.session(), Live(table(*_read()), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_REFRESH_EVERY_S)
                live.update(table(*_read()), refresh=True)
        except KeyboardInterrupt:
            return 0


def _read() -> tuple[Sequence[GpuReading], Sequence[GpuClaim] | None]:
    """Return the GPUs and the claims; ``None`` if the claims cannot be read."""
    gpus = nvml.read_gpus(with_loads=True)
    process_ids = {process.pid for gpu in gpus for process in gpu.processes or () if not process.is_foreign}
    all_claims.warn_if_private()
    try:
        with all_claims.read_ledger(all_claims.directory()) as ledger:
            return gpus, ledger.claims(process_ids)
    except ClaimsError as error:
        all_claims.warn_once(f"{error} The claims of other jobs are unknown.")
        return gpus, None


def _as_json(gpu: GpuReading, claims: Sequence[GpuClaim] | None) -> dict[str, Any]:
    found = gpu.as_json()
    for process, fields in zip(gpu.processes or (), found["processes"] or (), strict=True):
        fields.update(_state(process))
    found["mig_instances"] = [_as_json(instance, claims) for instance in gpu.mig_instances]
    found["effective_free_bytes"] = found["claims"] = None
    if claims is not None:
        here = [claim for claim in claims if claim.is_on(gpu.uuid)]
        names = ("user", "pid", "hostname", "kind", "memory_bytes", "since_s")
        found["effective_free_bytes"] = effective_free_bytes(gpu, here)
        found["claims"] = [
            {**{name: getattr(claim, name) for name in names}, "is_unused": _is_unused(claim, gpu)} for claim in here
        ]
    return found


def _new_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    for name in columns:
        is_number = name in ("GPU", "free", "total", "util", "memory")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def _table(gpus: Sequence[GpuReading], claims: Sequence[GpuClaim] | None) -> Table:
    from rich.text import Text

    rows = [row for gpu in gpus for row in _rows(gpu, claims)]
    table = _new_table("GPU", "name", "free", "total", "util", "used by", "claimed by")
    table.columns[1].no_wrap = max((len(row[1]) for row in rows), default=0) <= _MAX_NAME
    for row in rows:
        cells = [Text(cell) for cell in row]  # Text, so that rich does not take a bracket in a name for markup
        if row[_UTIL] != "?":
            percent = float(row[_UTIL].removesuffix("%"))
            busy = "red" if percent >= _MIN_FULL_PERCENT else "yellow"
            cells[_UTIL].stylize("green" if percent < _MIN_BUSY_PERCENT else busy)
        table.add_row(*cells)
    return table


def _by_user(gpus: Sequence[GpuReading], claims: Sequence[GpuClaim] | None) -> dict[str, Any]:
    """Return what each user uses and has claimed; processes that are not visible from here are of the user ``None``."""
    places = [place for gpu in gpus for place in (gpu, *gpu.mig_instances)]
    read = [place for place in places if not place.mig_instances]
    used = [(gpu, process) for gpu in read for process in gpu.processes or ()]
    names = [*(process.user for _, process in used), *(claim.user for claim in claims or ())]
    users: list[dict[str, Any]] = []
    for user in dict.fromkeys(names):
        mine = [(gpu, process) for gpu, process in used if process.user == user]
        sizes = not_none(process.memory_used_bytes for _, process in mine)
        own_claims = [claim for claim in claims or () if claim.user == user]
        claimed = [(place, claim) for place in places for claim in own_claims if claim.is_on(place.uuid)]
        facts = {
            "user": user,
            "gpus": [*dict.fromkeys(gpu.number for gpu, _ in mine)],
            "memory_used_bytes": sum(sizes) if sizes or not mine else None,
            "claimed_gpus": None if claims is None else [*dict.fromkeys(place.number for place, _ in claimed)],
            "claimed_memory_bytes": None if claims is None else sum(claim.memory_bytes or 0 for _, claim in claimed),
        }
        users.append(facts)
    users.sort(key=lambda entry: (-(entry["memory_used_bytes"] or 0), str(entry["user"])))
    return {"users": users, "unknown_gpus": [gpu.number for gpu in read if gpu.processes is None]}


def _user_table(gpus: Sequence[GpuReading], claims: Sequence[GpuClaim] | None) -> Table:
    from rich.text import Text

    found = _by_user(gpus, claims)
    table = _new_table("user", "GPUs", "memory", "claimed GPUs", "claimed memory")
    for user in found["users"][:_MAX_USERS]:
        cells = (
            "not visible from here" if user["user"] is None else printable(user["user"]),
            ", ".join(user["gpus"]),
            _size(user["memory_used_bytes"]),
            "?" if claims is None else ", ".join(user["claimed_gpus"]),
            _size(user["claimed_memory_bytes"]),
        )
        table.add_row(*map(Text, cells))
    left = len(found["users"]) - _MAX_USERS
    notes = [f"and {left:,} more users"] if left > 0 else []
    if found["unknown_gpus"]:
        notes.append(f"processes that cannot be read: GPU {', '.join(found['unknown_gpus'])}")
    table.caption = Text("; ".join(notes)) if notes else None
    return table


def _rows(gpu: GpuReading, claims: Sequence[GpuClaim] | None) -> Iterator[tuple[str, ...]]:
    """Yield a row for a GPU, and for each of its MIG instances."""
    yield gpu.number, printable(gpu.name or "?"), *_cells(gpu, claims)
    for instance in gpu.mig_instances:
        # CUDA_VISIBLE_DEVICES also accepts the beginning of a UUID.
        profile, uuid = (instance.name or "?").rpartition(" MIG ")[2], str(instance.uuid)[:_SHORT_UUID]
        *sizes, used_by, claimed_by = _cells(instance, claims)
        yield instance.number, printable(f"{profile} {uuid}"), *sizes, used_by or "nobody", claimed_by


def _cells(gpu: GpuReading, claims: Sequence[GpuClaim] | None) -> tuple[str, ...]:
    """Return the cells after the number and the name."""

    def describe(claim: GpuClaim) -> str:
        share = "the whole GPU, exclusively," if claim.kind == "exclusive" else "the whole GPU"
        share = _size(claim.memory_bytes) if claim.kind == "memory" else share
        age = format_duration(max(0.0, time.time() - claim.since_s))
        return f"{claim}: {share} for {age}{', unused' if _is_unused(claim, gpu) else ''}"

    here = [claim for claim in claims or () if claim.is_on(gpu.uuid)]
    return (
        _size(gpu.memory_free_bytes),
        _size(gpu.memory_total_bytes),
        "?" if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f}%",
        _use(gpu),
        "?" if claims is None else "\n".join(folded_claims(here, describe, _MAX_CLAIMS)),
    )


def _use(gpu: GpuReading) -> str:
    """Return who uses the GPU, or why it cannot be used."""
    if gpu.mig_instances and not gpu.error:
        return f"{len(gpu.mig_instances)} MIG instances"
    rejections = rank_gpus([gpu], (), Request(), torch=cuda.installed_torch([gpu])).rejections
    lines = [f"cannot be used: {printable(rejection.reason, 300)}" for rejection in rejections]
    if not lines and is_outdated(gpu):
        lines = ["picked last: its compute capability is too old for torch's wheels on PyPI"]
    if gpu.processes is None and not lines:
        return "?"
    for one in gpu.processes or ():
        memory = "" if one.memory_used_bytes is None else format_bytes(one.memory_used_bytes)
        process = one.name or (FOREIGN if one.is_foreign else f"pid {one.pid}")
        line = " ".join(printable(part) for part in (one.user, process, memory) if part)
        state = _state(one)
        if state["is_idle"]:
            label = "left over" if state["is_left_over"] else "idle"
            line += f" (pid {one.pid}), {label}, started {format_duration(time.time() - state['started_s'])} ago"
        lines.append(line)
    return "\n".join(lines)


def _state(process: GpuProcess) -> dict[str, Any]:
    """Return facts that the driver does not report; ``None`` if the process is not visible from here."""
    state: dict[str, Any] = {"started_s": None, "is_idle": None, "is_left_over": None}
    if process.user is not None:  # otherwise the PID is from another namespace
        with contextlib.suppress(psutil.Error):
            seen = psutil.Process(process.pid)
            state["started_s"] = seen.create_time()
            if process.utilization_percent is not None and not process.graphics_only:
                is_old = time.time() - seen.create_time() >= _MIN_AGE_S
                state["is_idle"] = is_old and process.utilization_percent == 0
                state["is_left_over"] = state["is_idle"] and seen.ppid() == INIT
    return state


def _is_unused(claim: GpuClaim, gpu: GpuReading) -> bool | None:
    if gpu.processes is None or any(process.user is None for process in gpu.processes) or not nvml.pids_are_ours():
        return None
    is_old = time.time() - claim.since_s >= _MIN_AGE_S
    return is_old and all(process.user != claim.user for process in gpu.processes)


def _size(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else format_bytes(size_bytes)
