"""Peak GPU memory of real trainings on a simulated GPU, against the peaks on a real one.

    python -m lightning_gpu_tools.simulated --gpu t4 -- python benchmarks/dry_run_peaks.py [--output results.json]

    python benchmarks/dry_run_peaks.py --output h100.json     # on a real GPU: its peaks, for a simulated one:
    python -m lightning_gpu_tools.simulated -- python benchmarks/dry_run_peaks.py --against h100.json

It needs torch's CUDA build, transformers and torchvision. The peaks of the real T4 are those of torch-preflight's
calibration (its tests/calibration/measured_peaks.json, torch 2.11), of which its authors say that a second T4 had them
within 0.51 %. The trainings are as its measure_cuda.py has them, on networks with random weights. Autocast takes the
type that torch says the GPU supports, which on a T4 is bfloat16, emulated, so that attention is not one of the fused
ones. Where torch-preflight is installed, what it estimates for the same trainings is written, too. hf-mem, which
estimates inference, is not compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # networks are made from their default configurations

import torch
import torchvision
import transformers
from machine import describe_machine
from torch import nn

# How far a peak may be from the real one, as a fraction; fixed before the first run.
BOUNDS = {"allocated": (-0.03, 0.08), "reserved": (-0.08, 0.12)}


class Run(NamedTuple):
    """A training whose peak is published.

    Attributes:
        model: The name, as on the Hugging Face Hub.
        batch: Samples in a batch.
        size: Tokens of a sample, or pixels of each side of an image.
        allocated: Bytes in tensors at the peak of the second step, on the real T4.
        reserved: Bytes that torch's allocator has then.
    """

    model: str
    batch: int
    size: int
    allocated: int = 0
    reserved: int = 0


CONTEXT = 141426688  # bytes that the real T4 had in use beside what torch reserved
RUNS = (
    Run("gpt2", 4, 128, 2705153536, 3042967552),
    Run("gpt2", 8, 256, 5736883712, 6092226560),
    Run("distilbert-base-uncased", 4, 128, 1354818048, 1501560832),
    Run("distilbert-base-uncased", 8, 256, 1757328384, 1954545664),
    Run("bert-base-uncased", 4, 128, 2209738240, 2483027968),
    Run("bert-base-uncased", 8, 256, 3185408000, 3491758080),
    Run("resnet50", 16, 224, 1119203840, 1195376640),
    Run("resnet50", 32, 224, 1839903232, 2000683008),
)
# What a larger GPU is used for; peaks of these are not published.
LARGER = (
    Run("gpt2", 32, 1024),
    Run("bert-base-uncased", 64, 512),
    Run("resnet50", 256, 224),
)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    "distilbert-base-uncased": lambda: transformers.DistilBertModel(transformers.DistilBertConfig()),
    "bert-base-uncased": lambda: transformers.BertModel(transformers.BertConfig()),
    "resnet50": torchvision.models.resnet50,
}


def trained(run: Run) -> dict[str, int]:
    """Return the peaks of a training's second step, when the optimizer has its states."""
    torch.cuda.empty_cache()
    model = NETWORKS[run.model]().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if run.model == "resnet50":
        batch = torch.randn(run.batch, 3, run.size, run.size, device="cuda")
        labels = torch.randint(0, 1000, (run.batch,), device="cuda")
    else:
        batch = labels = torch.randint(0, model.config.vocab_size - 1, (run.batch, run.size), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype):
            if run.model == "resnet50":
                loss = nn.functional.cross_entropy(model(batch), labels)
            else:  # the outputs live until the step ends
                outputs = model(input_ids=batch, **({"labels": labels} if run.model == "gpt2" else {}))
                loss = outputs.loss if run.model == "gpt2" else outputs.last_hidden_state.float().pow(2).mean()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def estimate(run: Run) -> int | None:
    """Return torch-preflight's estimate of what is in use on the GPU, in bytes; None where it is not installed."""
    if importlib.util.find_spec("torch_preflight") is None:
        return None
    from torch_preflight.vram import archdb, costmodel, hardware
    from torch_preflight.vram.types import OptimizerKind, PrecisionMode, RunConfig

    size = {"image_size" if run.model == "resnet50" else "seq_len": run.size}
    config = RunConfig(batch_size=run.batch, precision=PrecisionMode.AMP, optimizer=OptimizerKind.ADAMW, **size)
    return costmodel.estimate(
        archdb.resolve(run.model), config, hardware.resolve("t4" if "T4" in torch.cuda.get_device_name() else "h100")[0]
    ).total


def compared(run: Run, context: int, real_context: int) -> dict[str, Any]:
    """Train, and return peaks in bytes, errors as fractions, and whether they are within the bounds.

    "in use" is what torch's allocator reserves and the context, which is what torch-preflight estimates.
    """
    ours, theirs = trained(run), estimate(run)
    real = {"allocated": run.allocated, "reserved": run.reserved, "in use": run.reserved + real_context}
    ours["in use"] = ours["reserved"] + context
    errors = {name: ours[name] / real[name] - 1 for name in real}
    found = {
        "model": run.model,
        "batch": run.batch,
        "size": run.size,
        "real": real,
        "ours": ours,
        "error": errors,
        "within": all(low <= errors[name] <= high for name, (low, high) in BOUNDS.items()),
        "torch-preflight": theirs,
        "torch-preflight_error": None if theirs is None else theirs / real["in use"] - 1,
    }
    print(*(f"{key}: {found[key]}" for key in ("model", "batch", "error", "torch-preflight_error")), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="peaks of a real GPU (default: those that are published of a T4)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    result: dict[str, Any] = {"benchmark": "dry_run_peaks", "machine": describe_machine()}
    result["machine"] |= {name: importlib.metadata.version(name) for name in ("transformers", "torchvision")}
    if "SIMULATED_CUDA" not in os.environ:
        peaks = [run._replace(**trained(run))._asdict() for run in RUNS + LARGER]
        result |= {"context": context, "peaks": peaks}
        print(json.dumps(peaks, indent=1))
    else:
        runs, real_context = RUNS, CONTEXT
        if arguments.against:
            real = json.loads(arguments.against.read_text())
            runs, real_context = tuple(Run(**one) for one in real["peaks"]), real["context"]
            result["real_machine"] = real["machine"]
        result |= {"bounds": BOUNDS, "runs": [compared(run, context, real_context) for run in runs]}
        if result["runs"][0]["torch-preflight"]:
            result["machine"]["torch-preflight"] = importlib.metadata.version("torch-preflight")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
