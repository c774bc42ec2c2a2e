"""Who loads what: keys in 13 wrappings, files as tools write them, and what must not happen; how fast our plan is.

    python benchmarks/checkpoint_keys.py [--output FILE]

**Keys.** ``consume`` is torch's own consume_prefix_in_state_dict_if_present. The rules of timm, mmengine and fvcore are
written here in one or two lines, after what their sources do (timm 2026-08, mmengine 2025-10, fvcore 2026-02);
``replace`` is the usual recipe, str.replace of both prefixes. They do not claim to drop an attribute, so the five rows
with ``System`` are out of their reach by design, and a line of its own counts the others. A cell says yes where strict
loading succeeds and every number is the right one.

**Files** go through the tools themselves, where they are installed: torch (``torch.load``, and
``torch.distributed.checkpoint.load`` for its folders), Lightning (``Fabric.load_raw``), timm, mmengine and accelerate
(their ``load_checkpoint...``), all strict. What they do not claim to read is in the table as well. ``WRONG`` is a load
without an error that leaves other numbers in the model, or runs code of the file.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from machine import describe_machine
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.checkpoints.model_keys import read_model
from lightning_gpu_tools.checkpoints.state_dicts import shapes_of

Weights = dict[str, Any]


class System(nn.Module):
    """A network as an attribute, as in a LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class WithModuleChild(nn.Module):
    """A network with a child that really is called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(3, 4), nn.Linear(4, 2)


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


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


def nothing(weights: Weights, model: nn.Module) -> Weights:
    return weights


def consume_prefix(weights: Weights, model: nn.Module) -> Weights:
    consume_prefix_in_state_dict_if_present(weights, "module.")
    return weights


def timm_rule(weights: Weights, model: nn.Module) -> Weights:
    return {key.removeprefix("module.").removeprefix("_orig_mod."): value for key, value in weights.items()}


def mmengine_rule(weights: Weights, model: nn.Module) -> Weights:
    return {re.sub(r"^module\.", "", key): value for key, value in weights.items()}


def fvcore_rule(weights: Weights, model: nn.Module) -> Weights:
    return mmengine_rule(weights, model) if all(key.startswith("module.") for key in weights) else weights


def replace_everywhere(weights: Weights, model: nn.Module) -> Weights:
    return {key.replace("module.", "").replace("_orig_mod.", ""): value for key, value in weights.items()}


def lightning_gpu_tools(weights: Weights, model: nn.Module) -> Weights:
    keys, _ = read_model(model, weights)
    return plan_renaming(shapes_of(weights), keys).apply(weights)


TOOLS = {
    "as it is": nothing,
    "consume": consume_prefix,
    "timm": timm_rule,
    "mmengine": mmengine_rule,
    "fvcore": fvcore_rule,
    "replace": replace_everywhere,
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
    """Makes a folder when it is opened."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def write_shards(folder: Path, weights: Weights, suffix: str) -> Path:
    """As transformers and accelerate write them; return the index."""
    from safetensors.torch import save_file

    folder.mkdir()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {key: f"{stem}-{number % 2 + 1:05}-of-00002.{suffix}" for number, key in enumerate(weights)}
    for name in {*weight_map.values()}:
        held = {key: value for key, value in weights.items() if weight_map[key] == name}
        save_file(held, folder / name) if suffix == "safetensors" else torch.save(held, folder / name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def write_zero2(folder: Path, weights: Weights, parameters: list[str]) -> Path:
    """As DeepSpeed writes the checkpoint of one rank with ZeRO 2 and bf16."""
    (folder / "tag").mkdir(parents=True)
    (folder / "latest").write_text("tag")
    model = {
        "module": {key: value.bfloat16() if key in parameters else value for key, value in weights.items()},
        "buffer_names": [key for key in weights if key not in parameters],
        "param_shapes": [{key: weights[key].shape for key in parameters}],
        "frozen_param_shapes": None,
        "shared_params": {},
        "dp_world_size": 1,
        "ds_version": "0.19.8",
    }
    flat = torch.cat([weights[key].flatten() for key in parameters])
    optimizer = {"zero_stage": 2, "partition_count": [1], "single_partition_of_fp32_groups": [flat]}
    torch.save(model, folder / "tag" / "mp_rank_00_model_states.pt")
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, folder / "tag" / name)
    return folder


def write_files(folder: Path, net: nn.Module) -> dict[str, Path]:
    """Write the weights of a network in every way that they should load from."""
    from safetensors.torch import save_file

    weights = net.state_dict()
    lightning = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 9, "loops": None}
    contents = {
        "state_dict": weights,
        "in an entry": {"state_dict": weights, "epoch": 1},
        "DataParallel": nn.DataParallel(net).state_dict(),
        "Lightning with the net as an attribute": {**lightning, "state_dict": System(net).state_dict()},
        "beside a Namespace": {"state_dict": weights, "args": argparse.Namespace(lr=0.1)},
        "pickled module": net,
        "beside a pickled loss": {"model": weights, "loss": nn.CrossEntropyLoss()},
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
    parameters = [key for key, _ in net.named_parameters()]
    return paths | {
        "saved on cuda:7": folder / "cuda.pt",
        "safetensors": folder / "a.safetensors",
        "index of safetensors": write_shards(folder / "safetensors", weights, "safetensors"),
        "index of .bin": write_shards(folder / "bin", weights, "bin"),
        "torch.distributed.checkpoint": folder / "dcp",
        "a sharded folder by Lightning": folder / "sharded.ckpt",
        "DeepSpeed ZeRO 2": write_zero2(folder / "zero", weights, parameters),
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
    """Return ``loads``, ``refuses`` or ``WRONG``."""
    try:
        load(model, path)
    except (Exception, dcp.CheckpointException):  # noqa: BLE001 - each tool has errors of its own, torch no Exception
        return "refuses"
    state = model.state_dict()
    return "loads" if all(torch.equal(state[key], value) for key, value in expected.items()) else "WRONG"


def files_loaded(tool: str, folder: Path) -> dict[str, str]:
    """Return what becomes of each file that should load."""
    net = plain_net()
    found = {}
    for name, path in write_files(folder, net).items():
        target = plain_net()
        found[name] = outcome(LOADERS[tool], target, path, net.state_dict())
    return found


def harm_done(tool: str, folder: Path) -> dict[str, str]:
    """Return what becomes of files that must not load as they are: anything but ``WRONG`` is right."""
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


def print_table(title: str, table: dict[str, dict[str, str]]) -> None:
    tools = [*table]
    print(f"\n{title}:\n{'':38}" + "".join(f"{tool:>12}" for tool in tools))
    for row in table[tools[0]]:
        print(f"{row:38}" + "".join(f"{table[tool][row]:>12}" for tool in tools))


def planning_times() -> dict[str, float]:
    """Median seconds over five plans, by number of keys and what is to be done with them."""
    times = {}
    for count in (1_000, 10_000, 100_000):
        names = [
            f"layers.{layer}.{part}.{kind}"
            for layer in range(count // 8)
            for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
            for kind in ("weight", "bias")
        ]
        model = ModelKeys(shapes=dict.fromkeys(names, (4, 4)))
        for change, prefix in (("already fits", ""), ("two wrappers", "_orig_mod.module."), ("another root", "model.")):
            checkpoint = {prefix + name: (4, 4) for name in names}
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                plan_renaming(checkpoint, model)
                seconds.append(time.perf_counter() - start)
            times[f"{count} keys, {change}"] = statistics.median(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file too")
    args = parser.parse_args()
    load_average = os.getloadavg()[0]
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    tables: dict[str, dict[str, dict[str, bool]]] = {}
    for title, make in (("a network without a child called module", plain_net), ("with one", WithModuleChild)):
        source = make()
        table = {name: {tool: loads(rule, source, name) for tool, rule in TOOLS.items()} for name in WRAPPINGS}
        tables[title] = table
        print(f"\n{title}:\n{'':36}" + "".join(f"{tool:>9}" for tool in TOOLS))
        for name, row in table.items():
            print(f"{name:36}" + "".join(f"{'yes' if row[tool] else '-':>9}" for tool in TOOLS))
        for label, names in (
            ("all 13", list(table)),
            ("the 8 without System", [n for n in table if "System" not in n]),
        ):
            sums = [sum(table[name][tool] for name in names) for tool in TOOLS]
            print(f"{label:36}" + "".join(f"{count:>9}" for count in sums))
    installed = [tool for tool in LOADERS if tool in ("torch", "ours") or importlib.util.find_spec(tool)]
    tables_of_files: dict[str, dict[str, dict[str, str]]] = {}
    for title, ask in (("files", files_loaded), ("what must not load as it is", harm_done)):
        tables_of_files[title] = {}
        for tool in installed:
            with tempfile.TemporaryDirectory() as folder:
                tables_of_files[title][tool] = ask(tool, Path(folder))
        print_table(title, tables_of_files[title])
    times = planning_times()
    print("\nplanning:")
    for name, seconds in times.items():
        print(f"{name:37}{seconds * 1e3:>12.1f} ms")
    if args.output:
        versions = {tool: importlib.metadata.version(tool) for tool in installed if tool != "ours"}
        result = {
            "machine": describe_machine() | versions,
            "load_average_before": load_average,
            "who_loads_what": tables,
            **tables_of_files,
            "planning_seconds": times,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
