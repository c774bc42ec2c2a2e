"""Tables generated from the package itself: fields, causes, options, and commands."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from lightning_gpu_tools.advice.causes import STALL_CAUSES
from lightning_gpu_tools.advice.findings import Cause
from lightning_gpu_tools.advice.memory_account import PARTS
from lightning_gpu_tools.cli import parser
from lightning_gpu_tools.gpus.metrics import LOGGED
from lightning_gpu_tools.reports.report import SCHEMA_VERSION, Report
from lightning_gpu_tools.selection.ranking import OPTIONS
from lightning_gpu_tools.training.phases import PHASES

from .markdown import block, table


def fields(kind: type) -> str:
    """Return the fields of a dataclass as in its JSON object, with their documentation."""
    _, _, attributes = str(inspect.getdoc(kind)).partition("Attributes:\n")
    described = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE) or _commented(kind)
    hints = get_type_hints(kind)
    rows = []
    for name, text in described:
        meaning = re.sub(r"\s+", " ", text).replace("``", "`").replace("`None`", "`null`")
        meaning = meaning.replace("see docs/report_schema.md", "see [Phases](report_schema_parts.md#phases)")
        rows.append((f"`{name}`", in_json(hints[name]), meaning))
    assert [row[0] for row in rows] == [f"`{name}`" for name in hints], kind
    first = (
        ("`schema_version`", "integer", str(SCHEMA_VERSION)),
        ("`summary`", "object", "The verdict and the first finding in short; see [below](#summary)."),
    )
    return table(("field", "type", "meaning"), *(first if kind is Report else ()), *rows)


def _commented(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each field with the comment above it or behind it, as a sentence."""
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        name, comment = re.match(r"(?:    (\w+): [^#]*)?(?:\s*# (.*))?", line).groups()  # type: ignore[union-attr]
        above = [*above, comment] if comment else [] if name is None else above
        if name is not None:
            text = " ".join(above)
            assert text, f"{kind.__name__}.{name} has no comment"
            yield name, f"{text[:1].upper()}{text[1:]}" + "." * (not text.endswith("."))
            above = []


_UNITS = {
    "percent": "%",
    "bytes": "bytes",
    "watts": "W",
    "joules": "J",
    "celsius": "degrees C",
    "bytes_per_second": "bytes/s",
}


def gpu_metrics() -> str:
    """Return the logged metrics of a GPU, whose names end with their units."""

    def unit(name: str) -> str:
        units = [_UNITS[one] for one in _UNITS if name.partition("/")[0].endswith(f"_{one}")]
        assert units, f"_UNITS lacks the unit of {name}"
        return units[0]

    rows = ((f"`{name}`", unit(name), meaning) for name, meaning in LOGGED.items())
    return table(("metric of each GPU, `gpu/<i>/...`", "unit", "meaning"), *rows)


def in_json(kind: Any) -> str:
    """Return the JSON type of a Python type, in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("null" if one is NoneType else in_json(one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return "string"
    is_object = dataclasses.is_dataclass(kind) or is_typeddict(kind) or get_origin(kind) is Mapping
    return {bool: "boolean", int: "integer", float: "number", str: "string"}.get(
        kind, "object" if is_object else "list"
    )


_IN_PHASE = {
    "callback": "in a hook of a callback, the model, the DataModule or the strategy, or in a learning rate scheduler",
    "logging": "in a logger, or collecting the metrics of `self.log`",
    "checkpoint": "in a checkpoint callback, or saving one",
    "validation": "in validation",
    "outside_loop": "in code outside `run.batches`",
    "monitoring": "in a hook of this package",
    "garbage_collection": "in Python's garbage collector, except for the youngest generation",
    "trainer": "in its own work around a step",
    "rank_wait": "waiting in a collective for other ranks; after the slash, the phase. Includes the check for "
    "signals in every step, in which a rank also waits for its own GPU",
    "unexplained": "anywhere else",
    "epoch_start": "starting an epoch: its iterator, its workers, its first batch",
    "data_loading": "waiting for a batch",
    "host_to_device_copy": "moving the batch to the device",
    "training_step": "in forward, backward and optimizer",
}


def phases() -> str:
    only = {None: "", True: "with a Trainer, ", False: "without a Trainer, "}
    rows = [(f"`{phase}`", only[one.has_trainer] + _IN_PHASE[phase]) for phase, one in PHASES.items()]
    return table(("phase", "the training thread is"), *rows)


def causes(known: Mapping[str, Cause[Any]]) -> str:
    """Return causes with the report's words, the change to make, and where the cause was verified."""
    rows = [
        (_named(name, variant.kind), variant.says, variant.change, cause.verified_on)
        for name, cause in known.items()
        for variant in cause.variants
    ]
    return table(("cause", "the report says", "what to change", "verified on"), *sorted(rows))


def stall_causes() -> str:
    """Return causes of hanging runs with their symptoms, the change to make, and where the cause was verified."""
    rows = [(f"`{name}`", one.says, one.change, one.verified_on) for name, one in STALL_CAUSES.items()]
    return table(("cause", "what you see", "what to change", "verified on"), *sorted(rows))


def _named(cause: str, kind: str) -> str:
    return f"`{cause}`" + (f", `{kind}`" if kind else "")


_PARTS = {
    "parameters": "parameters of the model",
    "buffers": "buffers of the model",
    "optimizer_states": "states of the optimizers, master weights included",
    "gradients": "all gradients, even if a peak within backward has only some of them",
    "gradient_buckets": "DistributedDataParallel's copies of gradients; `gradient_as_bucket_view=True` saves them",
    "workspaces": "torch's workspaces for each cuBLAS handle and stream: 8 MiB, or 32 MiB on Hopper",
    "earlier_tensors": "tensors that existed before training, without the model and the optimizer",
    "other_tensors": "other tensors at the start of a step: its batch, metrics, caches, tensors kept by mistake",
    "activations": "the rest of the peak",
    "cache_reusable": "free memory that torch's allocator holds beyond the peak",
    "cache_fragmented": "free memory between tensors, usable only by tensors that fit into a gap",
    "context": "memory of this job's processes outside torch's allocator: contexts, kernels, libraries, communication "
    "buffers",
    "other_processes": "processes of other jobs",
    "driver": "memory that the driver reserves",
    "unexplained": "the rest of the used memory that the driver reports",
}


def memory_parts() -> str:
    return table(("part", "meaning"), *((f"`{name}`", _PARTS[name]) for name in PARTS))


def options() -> str:
    """Return the options for selecting GPUs, which the accelerator and the strategies share."""
    return table(("option", "meaning"), *((f"`{name}`", text) for name, text in OPTIONS.items()))


def commands() -> str:
    """Return the description and the arguments of each command."""
    parts = []

    def add(command: argparse.ArgumentParser) -> None:
        actions = [one for one in command._actions if not isinstance(one, argparse._HelpAction)]
        nested = next((one for one in actions if isinstance(one, argparse._SubParsersAction)), None)
        if nested is None:
            rows = [(f"`{in_words(one)}`", (one.help or "") % vars(one)) for one in actions]
            parts.extend([f"## {command.prog}", command.description or "", table(("argument", "meaning"), *rows)])
        for one in dict.fromkeys(nested.choices.values()) if nested else ():
            add(one)

    add(parser())
    return "\n\n".join(part if part.startswith(("|", "#")) else block(part) for part in parts)


def in_words(action: argparse.Action) -> str:
    """Return an argument in the form of ``--help``."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    return f"{', '.join(action.option_strings)} {value}".strip()
