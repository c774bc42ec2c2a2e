"""The collectives that this process has called, by torch's record of them (its flight recorder)."""

from __future__ import annotations

import json
import math
from typing import Any

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.stall_facts import Collective, GroupCalls

# Our defaults, so that other ranks can read the calls of all groups in one entry.
_MAX_DONE, _MAX_OPEN = 8, 32  # calls of a group that have ended, and that have not
_MAX_GROUPS = 8  # those with open calls first

# torch's internal names of collectives that users call by another name.
_PUBLIC_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_reduce_barrier": "barrier",
}
# c10's names of the types whose torch names are not the same in lower case.
_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


def called_collectives() -> tuple[GroupCalls, ...]:
    """Return the last collectives of each process group; empty if torch has no record that can be read.

    Call this from a thread during a stall: it holds the GIL for up to 0.1 s. It queries the GPU whether collectives
    have completed, and does not wait for them.
    """
    try:
        entries = [entry for record in compat.collective_records() for entry in json.loads(record).get("entries", ())]
        members = compat.group_ranks()
        groups: dict[tuple[str, str, str], dict[int, Collective]] = {}
        for entry in entries:
            if not entry["is_p2p"]:  # sends and receives have no number that ranks share
                backend, _, operation = entry["profiling_name"].partition(":")
                call = _call(entry, _PUBLIC_NAMES.get(operation, operation))
                groups.setdefault((backend, *entry["process_group"]), {})[call.number] = call
        found = [
            GroupCalls(f"{backend} {name}", description, members.get(name, []), _last(calls))
            for (backend, name, description), calls in groups.items()
        ]
    except (RuntimeError, AttributeError, KeyError, TypeError, ValueError):
        return ()  # another version of the record
    return tuple(sorted(found, key=lambda one: one.first_open is None)[:_MAX_GROUPS])


def _call(entry: dict[str, Any], operation: str) -> Collective:
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    size = None if operation == "barrier" or not sizes else sum(map(math.prod, sizes))
    dtype = _DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else ""
    is_done = bool(entry["retired"]) or entry["state"] == "completed"
    return Collective(int(entry["collective_seq_id"]), operation, size, dtype, is_done)


def _last(calls: dict[int, Collective]) -> list[Collective]:
    ordered = [calls[number] for number in sorted(calls)]
    is_open = [index for index, call in enumerate(ordered) if not call.is_done]
    first = is_open[0] if is_open else len(ordered)
    return ordered[max(0, first - _MAX_DONE) : first + _MAX_OPEN]
