"""Peak GPU memory of training steps on a simulated GPU, compared with the peaks on a real GPU.

    python -m lightning_gpu_tools.simulated --gpu t4 -- python benchmarks/dry_run_peaks.py [--output results.json]

    python benchmarks/dry_run_peaks.py --output h100.json     # measures the peaks of a real GPU
    python -m lightning_gpu_tools.simulated -- python benchmarks/dry_run_peaks.py --against h100.json

Requires torch's CUDA build, transformers, and torchvision. The peaks of the real T4 are from torch-preflight's
calibration (its tests/calibration/measured_peaks.json, torch 2.11). Its authors report that a second T4 agreed within
0.51 %. The training steps follow its measure_cuda.py, on networks with random weights. Autocast uses the type that
torch says the GPU supports. On a T4, that is emulated bfloat16, so attention is not fused. If torch-preflight is
installed, the result includes its estimates. hf-mem is not compared, because it estimates inference.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # networks are built from their default configurations

import torch
import torchvision
import transformers
from harness import make_parser, write_result
from torch import nn

# Bounds of the relative error of a peak, fixed before the first run.
BOUNDS = {"allocated": (-0.03, 0.08), "reserved": (-0.08, 0.12)}


class Run(NamedTuple):
    """A training run, and its peak on a real GPU.

    Attributes:
        model: Name on the Hugging Face Hub.
        batch: Samples in a batch.
        size: Tokens in a sample, or pixels of each side of an image.
        allocated: Bytes in tensors at the peak of the second step.
        reserved: Bytes reserved by torch's allocator at that time.
    """

    model: str
    batch: int
    size: int
    allocated: int = 0
    reserved: int = 0


CONTEXT = 141426688  # bytes in use on the real T4 in addition to torch's reserved memory
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
# Runs for larger GPUs, without published peaks.
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
    """Return the peaks of the second step, when the optimizer has its states."""
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
            else:  # ``outputs`` keeps tensors until the step ends
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
    """Return torch-preflight's estimate of the used GPU memory in bytes, or ``None`` if it is not installed."""
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
    """Train, and return peaks in bytes, errors as fractions, and whether these are within the bounds.

    "in use" is reserved memory plus the context, which is what torch-preflight estimates.
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
    parser = make_parser(__doc__)
    parser.add_argument("--against", type=Path, help="result with a real GPU's peaks (default: a T4's published peaks)")
    args = parser.parse_args()
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    result: dict[str, Any] = {}
    packages = ["transformers", "torchvision"]
    if "SIMULATED_CUDA" not in os.environ:
        peaks = [run._replace(**trained(run))._asdict() for run in RUNS + LARGER]
        result |= {"context": context, "peaks": peaks}
        print(json.dumps(peaks, indent=1))
    else:
        runs, real_context = RUNS, CONTEXT
        if args.against:
            real = json.loads(args.against.read_text())
            runs, real_context = tuple(Run(**one) for one in real["peaks"]), real["context"]
            result["real_machine"] = real["machine"]
        result |= {"bounds": BOUNDS, "runs": [compared(run, context, real_context) for run in runs]}
        packages += ["torch-preflight"] if result["runs"][0]["torch-preflight"] else []
    write_result(args.output, "dry_run_peaks", *packages, **result)


if __name__ == "__main__":
    main()
