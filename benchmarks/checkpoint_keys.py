"""Checkpoints that this package and others load: keys in 13 wrappings, files of many tools, and files that must fail.

    python benchmarks/checkpoint_keys.py [--output FILE]

**Keys.** "consume" is torch's consume_prefix_in_state_dict_if_present. The rules of timm and mmengine are rewritten
here after their sources (timm 2026-08, mmengine 2025-10). None of them claims to remove an attribute, as in the five
rows with ``System``. A cell says "yes" if strict loading succeeds and every number is correct.

**Files** are loaded with the tools themselves, if installed, and in strict mode: torch (``torch.load``, and
``torch.distributed.checkpoint.load`` for its folders), Lightning (``Fabric.load_raw``), timm, mmengine, and accelerate
(their ``load_checkpoint...``). The table includes files that a tool does not claim to read. ``WRONG`` is a load without
an error that leaves wrong numbers in the model or runs code from the file.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import TESTS, load_average, make_parser, write_result
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel

sys.path.append(str(TESTS))

from sharded_checkpoints import write_deepspeed, write_index
from wrapped_models import System, compiled

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.key_renaming import plan_renaming
from lightning_gpu_tools.checkpoints.state_dicts import read_model, shape_of

Weights = dict[str, Any]


class WithModuleChild(nn.Module):
    """A network with a child named ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(3, 4), nn.Linear(4, 2)


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "DataParallel(compile)": lambda net: nn.DataParallel(compiled(net)),
    "compile(DataParallel)": lambda net: compiled(nn.DataParallel(net)),
    "DataParallel(DataParallel)": lambda net: nn.DataParallel(nn.DataParallel(net)),
    "AveragedModel": AveragedModel,
    "AveragedModel(DataParallel(compile))": lambda net: AveragedModel(nn.DataParallel(compiled(net))),
    "System": System,
    "System(DataParallel)": lambda net: System(nn.DataParallel(net)),
    "System(compile)": lambda net: System(compiled(net)),
    "compile(System(DataParallel))": lambda net: compiled(System(nn.DataParallel(net))),
    "DataParallel(System(compile))": lambda net: nn.DataParallel(System(compiled(net))),
}


def consume_prefix(weights: Weights, model: nn.Module) -> Weights:
    consume_prefix_in_state_dict_if_present(weights, "module.")
    return weights


def timm_rule(weights: Weights, model: nn.Module) -> Weights:
    return {key.removeprefix("module.").removeprefix("_orig_mod."): value for key, value in weights.items()}


def mmengine_rule(weights: Weights, model: nn.Module) -> Weights:
    return {re.sub(r"^module\.", "", key): value for key, value in weights.items()}


def lightning_gpu_tools(weights: Weights, model: nn.Module) -> Weights:
    keys, _ = read_model(model, weights)
    return plan_renaming({key: shape_of(value) for key, value in weights.items()}, keys).apply(weights)


TOOLS = {
    "consume": consume_prefix,
    "timm": timm_rule,
    "mmengine": mmengine_rule,
    "ours": lightning_gpu_tools,
}


def loads(tool: Callable[[Weights, nn.Module], Weights], source: nn.Module, wrapping: str) -> bool:
    weights = WRAPPINGS[wrapping](copy.deepcopy(source)).state_dict()
    target = copy.deepcopy(source)
    for parameter in target.parameters():
        nn.init.zeros_(parameter)
    try:
        target.load_state_dict(tool(weights, target))
    except RuntimeError:
        return False
    return all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


class RunsCode:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def write_files(folder: Path, net: nn.Module) -> dict[str, Path]:
    """Write a network's weights as every kind of file from which they should load."""
    from safetensors.torch import save_file

    weights = net.state_dict()
    lightning = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 9, "loops": None}
    contents = {
        "state_dict": weights,
        "in an entry": {"state_dict": weights, "epoch": 1},
        "DataParallel": nn.DataParallel(net).state_dict(),
        "Lightning with the net as an attribute": {**lightning, "state_dict": System(net).state_dict()},
        "with a Namespace": {"state_dict": weights, "args": argparse.Namespace(lr=0.1)},
        "pickled module": net,
        "with a pickled loss": {"model": weights, "loss": nn.CrossEntropyLoss()},
    }
    paths = {name: folder / f"{number}.pt" for number, name in enumerate(contents)}
    for name, content in contents.items():
        torch.save(content, paths[name])
    with _saved_on("cuda:7"):
        torch.save(weights, folder / "cuda.pt")
    save_file(weights, folder / "a.safetensors")
    dcp.save(dict(weights), checkpoint_id=folder / "dcp", no_dist=True)
    dcp.save({"state_dict": dict(weights)}, checkpoint_id=folder / "sharded.ckpt", no_dist=True)
    torch.save(lightning, folder / "sharded.ckpt" / "meta.pt")
    trained = {key: value.detach() for key, value in net.named_parameters()}
    buffers = dict(net.named_buffers())
    return paths | {
        "saved on cuda:7": folder / "cuda.pt",
        "safetensors": folder / "a.safetensors",
        "index of safetensors": write_index(folder / "safetensors", weights, shards=2),
        "index of .bin": write_index(folder / "bin", weights, shards=2, suffix="bin"),
        "torch.distributed.checkpoint": folder / "dcp",
        "a sharded folder by Lightning": folder / "sharded.ckpt",
        "DeepSpeed ZeRO 2": write_deepspeed(folder / "zero", [trained], ranks=1, stage=2, kept=buffers),
    }


@contextlib.contextmanager
def _saved_on(device: str) -> Iterator[None]:
    original, torch.serialization.location_tag = torch.serialization.location_tag, lambda _: device
    try:
        yield
    finally:
        torch.serialization.location_tag = original


def by_torch(model: nn.Module, path: Path) -> None:
    if path.is_dir():
        weights = model.state_dict()
        dcp.load(weights, checkpoint_id=path, no_dist=True)
    else:
        weights = torch.load(path, map_location="cpu")
    model.load_state_dict(weights)


def by_lightning(model: nn.Module, path: Path) -> None:
    from lightning import Fabric

    Fabric(accelerator="cpu", devices=1).load_raw(path, model)


def by_timm(model: nn.Module, path: Path) -> None:
    importlib.import_module("timm.models").load_checkpoint(model, str(path))


def by_mmengine(model: nn.Module, path: Path) -> None:
    importlib.import_module("mmengine.runner").load_checkpoint(model, str(path), map_location="cpu", strict=True)


def by_accelerate(model: nn.Module, path: Path) -> None:
    importlib.import_module("accelerate").load_checkpoint_in_model(model, str(path), strict=True)


LOADERS = {
    "torch": by_torch,
    "lightning": by_lightning,
    "timm": by_timm,
    "mmengine": by_mmengine,
    "accelerate": by_accelerate,
    "ours": load_weights,
}


def outcome(load: Callable[[nn.Module, Path], object], model: nn.Module, path: Path, expected: Weights) -> str:
    """Return "loads", "refuses", or "WRONG"."""
    try:
        load(model, path)
    except (Exception, dcp.CheckpointException):  # noqa: BLE001 - tools raise errors of any type
        return "refuses"
    state = model.state_dict()
    return "loads" if all(torch.equal(state[key], value) for key, value in expected.items()) else "WRONG"


def files_loaded(tool: str, folder: Path) -> dict[str, str]:
    """Return the outcome for each file that should load."""
    net = plain_net()
    found = {}
    for name, path in write_files(folder, net).items():
        target = plain_net()
        found[name] = outcome(LOADERS[tool], target, path, net.state_dict())
    return found


def harm_done(tool: str, folder: Path) -> dict[str, str]:
    """Return the outcome for each file that must not load as it is; only ``WRONG`` is a failure."""
    load, found = LOADERS[tool], {}
    net = plain_net()
    witness = folder / "it ran"
    torch.save({"state_dict": net.state_dict(), "gift": RunsCode(witness)}, folder / "code.pt")
    found["code in the file"] = outcome(load, plain_net(), folder / "code.pt", net.state_dict())
    if witness.exists():
        found["code in the file"] = "WRONG"
    weights = net.state_dict()
    torch.save({**weights, "0.bias": torch.full((4,), 1e6)}, folder / "large.pt")
    found["1e6 for float16"] = outcome(load, plain_net().half(), folder / "large.pt", {"0.bias": torch.full((4,), 1e6)})
    torch.save({**weights, **{f"module.{key}": value + 1 for key, value in weights.items()}}, folder / "twice.pt")
    found["two sets of keys"] = outcome(load, plain_net(), folder / "twice.pt", {"0.bias": torch.full((4,), torch.nan)})
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    torch.save(tied.state_dict(), folder / "untied.pt")
    tied[1].weight = tied[0].weight
    found["two tensors for a tied one"] = outcome(
        load, tied, folder / "untied.pt", {"0.weight": torch.full((3, 3), torch.nan)}
    )
    return found


def print_table(title: str, rows: dict[str, dict[str, str]]) -> None:
    """Print a row for each name, with a column for each tool."""
    columns = [*next(iter(rows.values()))]
    print(f"\n{title}:\n{'':38}" + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        print(f"{name:38}" + "".join(f"{row[column]:>12}" for column in columns))


def main() -> None:
    args = make_parser(__doc__).parse_args()
    load = load_average()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    keys: dict[str, dict[str, dict[str, bool]]] = {}
    for title, make in (("a network without a child called module", plain_net), ("with one", WithModuleChild)):
        source = make()
        keys[title] = {name: {tool: loads(rule, source, name) for tool, rule in TOOLS.items()} for name in WRAPPINGS}
        rows = {name: {tool: "yes" if row[tool] else "-" for tool in TOOLS} for name, row in keys[title].items()}
        rows["sum"] = {tool: str(sum(row[tool] for row in keys[title].values())) for tool in TOOLS}
        print_table(title, rows)
    installed = [tool for tool in LOADERS if tool in ("torch", "ours") or importlib.util.find_spec(tool)]
    files: dict[str, dict[str, dict[str, str]]] = {}
    for title, ask in (("files", files_loaded), ("what must not load as it is", harm_done)):
        files[title] = {}
        for tool in installed:
            with tempfile.TemporaryDirectory() as folder:
                files[title][tool] = ask(tool, Path(folder))
        print_table(
            title, {name: {tool: files[title][tool][name] for tool in installed} for name in files[title]["ours"]}
        )
    versions = [tool for tool in installed if tool != "ours"]
    write_result(args.output, "checkpoint_keys", *versions, load_average_before=load, who_loads_what=keys, **files)


if __name__ == "__main__":
    main()
