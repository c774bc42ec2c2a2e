"""Train one project in this process, and write the result to `result.json`.

`benchmarks/real_projects.py` runs this with the Python of the project's environment. In `train_<name>.py`,
`train(folder, parts, ...)` trains the project, and `load(file)` opens a checkpoint with the project's own API.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import random
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

PARTS = {
    "callbacks": ("GPUUtilizationMonitor", "GPUUtilizationAdvisor"),
    "finder": ("GPUUtilizationMonitor", "GPUUtilizationAdvisor", "NumWorkersFinder"),
    "plugins": ("PortableCheckpointIO",),
}


def make_parts(names: str) -> dict[str, list[Any]]:
    """Return Trainer arguments with parts of this package, such as `{"callbacks": [...]}`."""
    if not names:
        return {}
    import lightning_gpu_tools

    made = [getattr(lightning_gpu_tools, name)() for name in PARTS[names]]
    return {"plugins" if names == "plugins" else "callbacks": made}


def fingerprint(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def weights_of(module: torch.nn.Module) -> str:
    """Return a hash of the bits of all parameters and buffers."""
    tensors = {name: one for name, one in sorted(module.state_dict().items()) if isinstance(one, torch.Tensor)}
    return fingerprint(
        part
        for name, one in tensors.items()
        for part in (name.encode(), one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    )


def random_states() -> str:
    states = (torch.get_rng_state().tolist(), numpy.random.get_state(), random.getstate())
    return fingerprint(repr(state).encode() for state in states)


def timing_fit(lightning: ModuleType, result: dict[str, Any]) -> None:
    """Patch `Trainer.fit` to record its wall time, this process's CPU time, and the final state."""
    original = lightning.Trainer.fit

    def fit(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        original(trainer, model, *args, **kwargs)
        result["fit_s"], result["cpu_s"] = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        result["steps"] = trainer.global_step
        result["threads"] = torch.get_num_threads()
        result["epochs"] = trainer.current_epoch
        result["callbacks"] = [type(callback).__name__ for callback in trainer.callbacks]
        result["weights"], result["random_states"] = weights_of(model), random_states()

    lightning.Trainer.fit = fit


def loads(project: ModuleType, file: Path) -> dict[str, str]:
    """Return the outcome of each loader for a checkpoint: a hash of the weights, or the error."""
    from lightning_gpu_tools import load_from_checkpoint, load_weights
    from lightning_gpu_tools.errors import CheckpointError

    model = project.load(file)
    found = {"own": weights_of(model)}
    for weights_only in (True, False):
        more = "" if weights_only else ", weights_only=False"
        with torch.no_grad():
            for entry in model.state_dict().values():
                if isinstance(entry, torch.Tensor):
                    entry.zero_()
        try:
            load_weights(model, file, weights_only=weights_only)
            found[f"load_weights{more}"] = weights_of(model)
        except CheckpointError as error:
            found[f"load_weights{more}"] = f"{type(error).__name__}: {error}"
        try:
            found[f"load_from_checkpoint{more}"] = weights_of(
                load_from_checkpoint(type(model), file, weights_only=weights_only)
            )
        except Exception as error:  # noqa: BLE001 - the project's class may raise any error, which is a result
            found[f"load_from_checkpoint{more}"] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", help="name of the script, without train_")
    parser.add_argument("folder", type=Path, help="folder for the run and for result.json")
    parser.add_argument(
        "--parts", default="", choices=["", *PARTS], help="parts of this package to pass to the project"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of train(), as JSON")
    parser.add_argument("--load", type=Path, help="open this checkpoint with every loader instead of training")
    args = parser.parse_args()

    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # before the import, because scvi-tools then decides where to write
    project = importlib.import_module(f"train_{args.project}")
    lightning = importlib.import_module(getattr(project, "LIGHTNING", "lightning.pytorch"))
    if args.load:
        result = loads(project, args.load)
    else:
        result = {
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in ("torch", project.PACKAGE)},
                lightning.__name__: lightning.__version__,
            }
        }
        timing_fit(lightning, result)
        lightning.seed_everything(0)
        project.train(folder, make_parts(args.parts), **args.options)
        result["checkpoint"] = str(max(folder.glob(project.CHECKPOINT), key=lambda file: file.stat().st_mtime))
    (folder / "result.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
