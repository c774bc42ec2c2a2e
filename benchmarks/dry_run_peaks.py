"""Peak GPU memory of training steps on a simulated GPU, compared with the peaks on a real GPU.

    python -m lightning_gpu_tools.simulated --gpu t4 -- python benchmarks/dry_run_peaks.py [--output results.json]

    python benchmarks/dry_run_peaks.py --output h100.json     # measures the peaks of a real GPU
    python -m lightning_gpu_tools.simulated -- python benchmarks/dry_run_peaks.py --against h100.json

    python -m lightning_gpu_tools.simulated --gpu rtx-3090 -- python benchmarks/dry_run_peaks.py --batches

``--batches`` instead judges the batch sizes of timm's published training table on an RTX 3090 of 24 GB
(results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv in huggingface/pytorch-image-models, commit 5e7d47c, torch
1.12): for each model, the largest that ran, and the next that failed. It follows their benchmark.py: SGD with momentum
under fp16 autocast, and, as in torch 1.12, attention that is not fused, and gradients that are kept and updated one by
one. It also requires timm, which must be installed with --no-deps beside torch's CUDA build.

Requires torch's CUDA build, transformers, and torchvision. The peaks of the real T4 are from torch-preflight's
calibration (its tests/calibration/measured_peaks.json, torch 2.11). Its authors report that a second T4 agreed within
0.51%. The training steps follow its measure_cuda.py, on networks with random weights. Autocast uses the type that
torch says the GPU supports. On a T4, that is emulated bfloat16, so attention is not fused. If torch-preflight is
installed, the result includes its estimates. hf-mem is not compared, because it estimates inference.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # networks are built from their default configurations

import torch
import torchvision
import transformers
from harness import make_parser, write_result
from torch import nn

from lightning_gpu_tools.dry_run.result import ProcessRecord, context_bytes, judge, usable_bytes

# Bounds of the relative error of a peak, fixed before the first run.
BOUNDS = {"allocated": (-0.03, 0.08), "reserved": (-0.08, 0.12)}


class Bracket(NamedTuple):
    """Batch sizes of a model in timm's table: the largest that ran on an RTX 3090, and the next, which failed."""

    model: str
    size: int  # pixels of each side of an image
    ran: int
    failed: int


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


GPU = "rtx-3090"  # of timm's table
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
# Chosen before they were run: transformers of all kinds and sizes, and four networks of convolutions.
BRACKETS = (
    Bracket("vit_small_patch16_224", 224, 384, 512),
    Bracket("vit_base_patch16_224", 224, 192, 256),
    Bracket("vit_base_patch16_384", 384, 32, 48),
    Bracket("vit_large_patch16_224", 224, 64, 96),
    Bracket("vit_large_patch16_384", 384, 12, 16),
    Bracket("beit_base_patch16_224", 224, 192, 256),
    Bracket("beit_large_patch16_224", 224, 64, 96),
    Bracket("mixer_b16_224", 224, 256, 384),
    Bracket("swin_tiny_patch4_window7_224", 224, 256, 384),
    Bracket("swin_base_patch4_window7_224", 224, 128, 192),
    Bracket("swin_large_patch4_window12_384", 384, 16, 24),
    Bracket("cait_s24_224", 224, 128, 192),
    Bracket("xcit_large_24_p8_224", 224, 16, 24),
    Bracket("vit_huge_patch14_224", 224, 16, 24),
    Bracket("convnext_base", 224, 128, 192),
    Bracket("resnet152", 224, 192, 256),
    Bracket("crossvit_9_dagger_240", 240, 384, 512),
    Bracket("deit_small_distilled_patch16_224", 224, 384, 512),
    Bracket("pit_s_224", 224, 256, 384),
    Bracket("visformer_small", 224, 384, 512),
    Bracket("twins_pcpvt_small", 224, 256, 384),
    Bracket("xcit_tiny_24_p16_224", 224, 256, 384),
    Bracket("vit_srelpos_medium_patch16_224", 224, 256, 384),
    Bracket("xcit_small_12_p16_224", 224, 256, 384),
    Bracket("crossvit_15_240", 240, 192, 256),
    Bracket("vit_base_patch32_384", 384, 256, 384),
    Bracket("vit_tiny_patch16_384", 384, 128, 192),
    Bracket("sequencer2d_s", 224, 192, 256),
    Bracket("volo_d1_224", 224, 192, 256),
    Bracket("cait_xxs36_224", 224, 192, 256),
    Bracket("deit3_base_patch16_224", 224, 192, 256),
    Bracket("vit_relpos_base_patch16_clsgap_224", 224, 192, 256),
    Bracket("twins_svt_large", 224, 128, 192),
    Bracket("vit_small_patch16_384", 384, 64, 96),
    Bracket("xcit_medium_24_p16_224", 224, 128, 192),
    Bracket("coat_mini", 224, 128, 192),
    Bracket("vit_large_patch32_384", 384, 96, 128),
    Bracket("convnext_tiny", 224, 256, 384),
    Bracket("resnet50d", 224, 384, 512),
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


def judged(bracket: Bracket, batch: int) -> dict[str, Any]:
    """Return the verdict of a dry run on a batch size, with the memory in bytes that three steps took."""
    context = multiprocessing.get_context("fork")  # which has imported everything, and not started CUDA
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_train_in_child, args=(bracket, batch, theirs))
    child.start()
    theirs.close()
    record = ProcessRecord(torch="", uses_gpu=True, **ours.recv())
    record.outcome = "ended" if record.failures else "complete"
    child.join()
    judgment = judge(int(record.failures > 0), [record], "", GPU)
    found = {
        "model": bracket.model,
        "size": bracket.size,
        "batch": batch,
        "ran": batch == bracket.ran,
        "verdict": judgment.verdict,
        "needed": record.peak_reserved_bytes + context_bytes(GPU, 1),
        "usable": usable_bytes(GPU),
        "retries": record.retries,
    }
    print(*found.values(), flush=True)
    return found


def _train_in_child(bracket: Bracket, batch: int, pipe: Connection) -> None:
    import timm

    torch.set_num_threads(1)  # after a fork, there are no others
    model = timm.create_model(bracket.model).cuda().train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=1e-4, foreach=False
    )
    images = torch.empty(batch, 3, bracket.size, bracket.size, device="cuda")
    failures = 0
    try:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(images)
            output = output[0] if isinstance(output, tuple) else output
            labels = torch.zeros(batch, device="cuda", dtype=torch.long)
            nn.functional.cross_entropy(output, labels).backward()
            optimizer.step()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        failures = 1
    stats = torch.cuda.memory_stats()
    peaks = {f"peak_{name}_bytes": stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")}
    pipe.send({"failures": failures, "retries": stats["num_alloc_retries"], **peaks})
    os._exit(0)  # without torch's cleanup, which may not follow a fork


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--against", type=Path, help="result with a real GPU's peaks (default: a T4's published peaks)")
    parser.add_argument("--batches", action="store_true", help="judge timm's published batch sizes on an RTX 3090")
    args = parser.parse_args()
    if args.batches:
        os.environ["TIMM_FUSED_ATTN"] = "0"  # before timm is imported, once for all children
        importlib.import_module("timm")
        sides = [judged(one, batch) for one in BRACKETS for batch in (one.ran, one.failed)]
        write_result(args.output, "dry_run_batches", "timm", sides=sides)
        return
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
