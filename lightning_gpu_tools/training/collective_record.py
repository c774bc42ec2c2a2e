"""The collectives that this process has called, by torch's record of them (its flight recorder)."""

from __future__ import annotations

import json
import math
from typing import Any

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.stall_facts import Call, GroupCalls

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
# Collectives to which each rank passes the same number of elements, by torch.distributed's documentation.
_EQUAL_SIZES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
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
    groups: dict[tuple[str, str], dict[int, Call]] = {}
    try:
        for record in compat.collective_records():
            for entry in json.loads(record).get("entries", ()):
                if not entry["is_p2p"]:  # sends and receives have no number that ranks share
                    name, description = entry["process_group"]
                    backend, _, operation = entry["profiling_name"].partition(":")
                    call = _call(entry, _PUBLIC_NAMES.get(operation, operation))
                    description = "" if description == "default_pg" else description
                    groups.setdefault((f"{backend} {name}", description), {})[call.number] = call
    except (RuntimeError, AttributeError, KeyError, TypeError, ValueError):
        return ()  # another version of the record
    found = [GroupCalls(*group, _last(calls)) for group, calls in groups.items()]
    return tuple(sorted(found, key=lambda group: all(call.is_done for call in group.calls))[:_MAX_GROUPS])


def _call(entry: dict[str, Any], operation: str) -> Call:
    text = operation
    if operation in _EQUAL_SIZES and entry["input_sizes"]:
        (dtype, *_), count = entry["input_dtypes"], sum(map(math.prod, entry["input_sizes"]))
        text += f" of {count:,} {_DTYPES.get(dtype, dtype.lower())} number{'s' * (count != 1)}"
    is_done = bool(entry["retired"]) or entry["state"] == "completed"
    return Call(int(entry["collective_seq_id"]), text, is_done)


def _last(calls: dict[int, Call]) -> list[Call]:
    ordered = [calls[number] for number in sorted(calls)]
    first = next((index for index, call in enumerate(ordered) if not call.is_done), len(ordered))
    return ordered[max(0, first - _MAX_DONE) : first + _MAX_OPEN]
