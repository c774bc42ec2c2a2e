"""Who loads what: checkpoints in 13 wrappings into the bare network, by each tool's rule for keys; how fast ours is.

    python benchmarks/checkpoint_keys.py [--output FILE]

``consume`` is torch's own consume_prefix_in_state_dict_if_present. The rules of timm, mmengine and fvcore are written
here in one or two lines, after what their sources do (timm 2026-08, mmengine 2025-10, fvcore 2026-02), because
installing them for one table would be out of proportion; ``replace`` is the usual recipe, str.replace of both prefixes.
They do not claim to drop an attribute, so the five rows with ``System`` are out of their reach by design, and a line of
its own counts the others. A cell says yes where strict loading succeeds and every number is the right one.
"""

import argparse
import copy
import json
import re
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel

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
    times = planning_times()
    print("\nplanning:")
    for name, seconds in times.items():
        print(f"{name:37}{seconds * 1e3:>12.1f} ms")
    if args.output:
        result = {"machine": describe_machine(), "who_loads_what": tables, "planning_seconds": times}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
