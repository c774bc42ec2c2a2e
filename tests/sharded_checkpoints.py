"""Checkpoints of several files, as Hugging Face's tools, torch.distributed.checkpoint and DeepSpeed write them."""

import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Weights = Mapping[str, torch.Tensor]


def write_index(folder: Path, weights: Weights, shards: int, *, suffix: str = "safetensors") -> Path:
    """Write shards like huggingface_hub.save_torch_state_dict, transformers and accelerate; return the index."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    names = [f"{stem}-{number + 1:05}-of-{shards:05}.{suffix}" for number in range(shards)]
    weight_map = {key: names[number * shards // len(weights)] for number, key in enumerate(weights)}
    for name in names:
        held = {key: value for key, value in weights.items() if weight_map[key] == name}
        if suffix == "bin":
            torch.save(held, folder / name)
        else:
            save_file(held, folder / name, metadata={"format": "pt"})
    index = folder / f"{stem}.{suffix}.index.json"
    size = sum(value.nbytes for value in weights.values())
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n")
    return index


class _Divided(torch.Tensor):
    """A tensor of which torch.distributed.checkpoint is told to write blocks, as those of many ranks."""

    cuts: Sequence[Sequence[int]]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        plain = self.as_subclass(torch.Tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(plain), plain.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        edges = [sorted({0, size, *cut}) if size else [0, 0] for size, cut in zip(self.shape, self.cuts, strict=True)]
        return [
            ChunkStorageMetadata(torch.Size(a for a, _ in block), torch.Size(b - a for a, b in block))
            for block in itertools.product(*(list(itertools.pairwise(edge)) for edge in edges))
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        chunk = next(chunk for chunk in self.__create_chunk_list__() if chunk.offsets == index.offset)
        place = tuple(slice(a, a + size) for a, size in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.as_subclass(torch.Tensor)[place]


def divided(value: torch.Tensor, *cuts: Sequence[int]) -> torch.Tensor:
    """Return a tensor that is saved in blocks: cut at these places of its first, second, ... dimension."""
    made = value.as_subclass(_Divided)
    made.cuts = [*cuts, *[()] * (value.ndim - len(cuts))]
    return made


def write_distributed(folder: Path, content: dict[str, Any], *, files: int = 1) -> Path:
    """Write a folder with torch.distributed.checkpoint, like FSDP's and ModelParallel's sharded checkpoints."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=files, sync_files=False)
    dcp.save(content, storage_writer=writer)
    return folder


def write_deepspeed(
    folder: Path, groups: Sequence[Weights], ranks: int, stage: int, *, more: Mapping[str, Any] | None = None,
    kept: Mapping[str, torch.Tensor] | None = None, tied: Mapping[str, str] | None = None, padding: int = 0,
) -> Path:  # fmt: skip
    """Write like DeepSpeedEngine.save_checkpoint: groups of trained weights, buffers (``kept``), tied names."""
    (folder / "tag").mkdir(parents=True)
    (folder / "latest").write_text("tag")
    kept, tied = kept or {}, tied or {}
    trained = {key: value for group in groups for key, value in group.items()}
    trained.update((name, trained[other]) for name, other in tied.items())
    empty = torch.zeros(0)
    shapes = [OrderedDict((key, value.shape) for key, value in group.items()) for group in groups]
    whole_model = OrderedDict({**trained, **kept})
    for rank in range(ranks):
        model = {
            "module": OrderedDict(whole_model, **dict.fromkeys(trained, empty)) if stage == 3 else whole_model,
            "buffer_names": [*kept],
            "param_shapes": shapes if stage else None,
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": dict(tied),
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": "0.19.8",
            **(more or {}),
        }
        if stage == 3:
            torch.save(model, folder / "tag" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, folder / "tag" / "mp_rank_00_model_states.pt")
        if stage:
            flat = [_partition(group, rank, ranks, stage, padding) for group in groups]
            name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
            state = {"zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks] * len(groups), name: flat}
            if padding:
                state["param_alignment_paddings"] = [[padding] * len(group) for group in groups]
            torch.save(
                {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
                folder / "tag" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    return folder


def _partition(group: Weights, rank: int, ranks: int, stage: int, padding: int) -> torch.Tensor:
    if stage == 3:
        pieces = []
        for value in group.values():
            size = math.ceil(value.numel() / ranks)
            padded = torch.nn.functional.pad(value.reshape(-1), (0, size * ranks - value.numel()))
            pieces.append(padded[rank * size : (rank + 1) * size])
        return torch.cat(pieces)
    flat = torch.cat([torch.nn.functional.pad(value.reshape(-1), (0, padding)) for value in group.values()])
    size = 2 * math.ceil(flat.numel() / (2 * ranks))  # aligned to twice the ranks; the padding is not saved
    return flat[rank * size : (rank + 1) * size].clone()
