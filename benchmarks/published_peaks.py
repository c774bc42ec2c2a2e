"""Peak GPU memory of trainings that others measured on real GPUs, compared with that on simulated GPUs.

    python -m lightning_gpu_tools.simulated --gpu t4 -- python benchmarks/published_peaks.py bert
    python -m lightning_gpu_tools.simulated --gpu a100-40gb -- python benchmarks/published_peaks.py lora
    python -m lightning_gpu_tools.simulated --gpu a100-40gb -n 4 -- python benchmarks/published_peaks.py mlp

- bert: bert-large as a classifier of 512 tokens, under Hugging Face's Trainer on a V100 of 16 GB in January 2022
  (huggingface/transformers, docs/source/en/perf_train_gpu_one.mdx, commit 0016acf). They read all memory in use from
  NVML, of which the context was 1,343 MiB; compared is the rest with what torch reserves. As in the torch of that time,
  attention is not fused, and gradients are kept and updated one by one.
- lora: phi-1.5 with LoRA of rank 8 on queries and values, bf16-true, AdamW, 1,044 tokens, on an A100 of 40 GB with
  torch 2.1 (Lightning-AI/litgpt, tutorials/resource-tables.md of 2023-10-20, commit 8641822); allocated, in 10^9 bytes.
- mlp: six linear layers of 8192 x 8192 under DDP, FSDP and FSDP2 on four GPUs, batch 256 and Adam; the most that a rank
  allocates. The number of layers is inferred from their figures, because their model is not published with them.

Requires torch's CUDA build; bert also transformers, and lora litgpt, which must be installed with --no-deps beside it.
Weights are random. Sizes are in bytes.
"""

import gc
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from harness import make_parser, write_result
from torch import nn
from torch.multiprocessing.spawn import spawn

MIB = 2**20
STEPS = 3  # the second is the first with the optimizer's states


class Bert(NamedTuple):
    """A training of bert-large, and the MiB in use on a real V100."""

    name: str
    mib: int
    batch: int = 4
    accumulate: int = 1
    is_checkpointed: bool = False
    is_fp16: bool = False
    has_adafactor: bool = False


CONTEXT_MIB = 1343
BERT = (
    Bert("batch 4", 14949),
    Bert("batch 1, 4 accumulated", 8681, batch=1, accumulate=4),
    Bert("the same, checkpointed", 6775, batch=1, accumulate=4, is_checkpointed=True),
    Bert("batch 4, fp16", 13939, is_fp16=True),
    Bert("batch 1, 4 accumulated, checkpointed, fp16", 7275, batch=1, accumulate=4, is_checkpointed=True, is_fp16=True),
    Bert("batch 4, Adafactor", 12295, has_adafactor=True),
    Bert("all of it", 4847, batch=1, accumulate=4, is_checkpointed=True, is_fp16=True, has_adafactor=True),
)
LORA_GB = {1: 4.82, 2: 6.76, 4: 10.68}  # allocated, by micro-batch
WIDTH, LAYERS, BATCH, RANKS = 8192, 6, 256, 4
MLP_MIB = {"DDP": 9265, "FSDP": 2496, "FSDP2": 2504}  # the largest allocated


def bert_reserved_bytes(run: Bert) -> int:
    """Train bert-large for three steps, and return the most that torch reserved."""
    from transformers import Adafactor, BertConfig, BertForSequenceClassification

    _free()
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("cuda"):
        model = BertForSequenceClassification(BertConfig(**large, attn_implementation="eager")).train()
    if run.is_checkpointed:
        model.gradient_checkpointing_enable()
    optimizer: torch.optim.Optimizer
    if run.has_adafactor:
        optimizer = Adafactor(model.parameters(), lr=1e-4, scale_parameter=False, relative_step=False)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=run.is_fp16)
    tokens = torch.zeros(run.batch, 512, dtype=torch.long, device="cuda")
    labels = torch.zeros(run.batch, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        for _ in range(run.accumulate):
            with torch.autocast("cuda", dtype=torch.float16, enabled=run.is_fp16):
                loss = model(input_ids=tokens, labels=labels).loss
            scaler.scale(loss / run.accumulate).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def lora_allocated_bytes(batch: int) -> int:
    """Train phi-1.5's adapters for three steps, and return the most that tensors allocated."""
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
    from litgpt.utils import chunked_cross_entropy

    _free()
    lora = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True, "lora_value": True}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = GPT(Config.from_name("phi-1_5", **lora))
    torch.set_default_dtype(torch.float32)
    mark_only_lora_as_trainable(model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-4)
    tokens = torch.zeros(batch, 1044, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        logits = model(tokens, lm_head_chunk_size=128)
        logits[-1] = logits[-1][..., :-1, :]
        chunked_cross_entropy(logits, tokens[..., 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def mlp_allocated_bytes(wrapping: str) -> int:
    """Train the layers on four ranks, and return the most that a rank allocated."""
    with torch.multiprocessing.Manager() as manager:
        peaks = manager.dict()
        spawn(_train_rank, (wrapping, peaks), RANKS)
        return max(peaks.values())


def _train_rank(rank: int, wrapping: str, peaks: dict[int, int]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank))
    with torch.device("cuda"):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = WRAPPINGS[wrapping](nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, targets = (torch.zeros(BATCH, WIDTH, device="cuda") for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    torch.cuda.synchronize()
    peaks[rank] = torch.cuda.max_memory_allocated()
    torch.distributed.destroy_process_group()


def _ddp(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def _fsdp2(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


WRAPPINGS: dict[str, Callable[[nn.Sequential], nn.Module]] = {"DDP": _ddp, "FSDP": _fsdp, "FSDP2": _fsdp2}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("training", choices=("bert", "lora", "mlp"))
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []

    def add(name: str, real: float, ours: int) -> None:
        runs.append({"name": name, "real": round(real), "ours": ours, "error": ours / real - 1})
        print(*runs[-1].values(), flush=True)

    packages = {"bert": ["transformers"], "lora": ["litgpt"], "mlp": []}[args.training]
    if args.training == "bert":
        for run in BERT:
            add(run.name, (run.mib - CONTEXT_MIB) * MIB, bert_reserved_bytes(run))
    elif args.training == "lora":
        for batch, gb in LORA_GB.items():
            add(f"micro-batch {batch}", gb * 1e9, lora_allocated_bytes(batch))
    else:
        for wrapping, mib in MLP_MIB.items():
            add(wrapping, mib * MIB, mlp_allocated_bytes(wrapping))
    write_result(args.output, f"published_peaks_{args.training}", *packages, runs=runs)


if __name__ == "__main__":
    main()
