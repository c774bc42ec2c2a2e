"""DeepSpeed's folders: the files of all ranks, joined like in its zero_to_fp32.py. Runs no code."""

import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_gpu_tools.checkpoints.content import LIGHTNING_VERSION
from lightning_gpu_tools.checkpoints.formats import Folder
from lightning_gpu_tools.checkpoints.structure import (
    BYTES_OF_DTYPE,
    Fault,
    Part,
    Structure,
    TensorInfo,
    are_sizes,
    damaged,
)
from lightning_gpu_tools.units import printable

# DeepSpeedEngine._get_ckpt_name and _get_rank_zero_ckpt_name, if only ZeRO splits the model.
_WHOLE_MODEL = "mp_rank_00_model_states.pt"
_MODEL_OF_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_OPTIMIZER_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
FILES = re.compile(r".*(model|optim)_states\.pt")
PART = re.compile(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt")
# DeepSpeedEngine._common_checkpoint_state; all else is Lightning's.
_OWN_ENTRIES = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "ds_version"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "ds_config", "sparse_tensor_module_names"),
    }
)
_OPTIMIZER, _RANKS = "optimizer_state_dict", "partition_count"
_GROUPS, _GROUPS_OF_STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
DAMAGE = "its files do not describe a ZeRO checkpoint"

Shards = Sequence[Structure]  # by rank
Shapes = Mapping[str, tuple[int, ...]]
Piece = tuple[str, int, int]  # file, offset in bytes, number of elements


def describe_folder(folder: Folder) -> Structure:
    """Describe the checkpoint in a folder."""
    model_names, optimizer_names = (_by_rank(folder.names, pattern) for pattern in (_MODEL_OF_RANK, _OPTIMIZER_OF_RANK))
    others = {name for name in folder.names if FILES.fullmatch(name)} - {_WHOLE_MODEL, *model_names, *optimizer_names}
    if others:
        raise Fault(
            f"is a DeepSpeed checkpoint with parallelism other than ZeRO ({printable(min(others))})",
            "Experts, pipeline stages and tensor-parallel parts can be joined only by the program that trained it.",
        )
    is_whole = _WHOLE_MODEL in folder.names
    if is_whole == bool(model_names):
        raise damaged("its model_states.pt are from two checkpoints" if is_whole else "it has no model_states.pt")
    models = [folder.describe(name) for name in model_names or [_WHOLE_MODEL]]
    optimizers = [folder.describe(name) for name in optimizer_names]
    loaded = models[0].name
    model: Mapping[str, Any] = models[0].content
    split: dict[str, TensorInfo] = {}
    if model["param_shapes"] is not None:  # None: nothing is split, stage 0
        _check_ranks(optimizers)
        if is_whole:
            split = dict(_join_stages_1_and_2(model["param_shapes"], optimizers))
        else:
            _check_ranks(models)
            split = dict([*_join_stage_3(model["param_shapes"], optimizers), *_join_frozen(models)])
        tied = model["shared_params"].items()
        split.update((name, split[stored]) for name, stored in tied if stored in split)
    buffers = set(model["buffer_names"])

    def assemble(contents: Mapping[str, Any]) -> Any:
        content = contents[loaded]
        weights: OrderedDict[str, Any] = OrderedDict(content["module"])
        if not split.keys() <= weights.keys():
            raise damaged(DAMAGE)
        for name, value in weights.items():  # at stage 3 there is only an empty tensor for each parameter
            is_empty = not is_whole and tuple(getattr(value, "shape", None) or ()) == (0,)
            if is_empty and name not in split and name not in buffers:
                raise damaged(f"no file has the numbers of {printable(name)}")
        weights.update(split)
        if LIGHTNING_VERSION not in content:
            return weights
        return {**{name: entry for name, entry in content.items() if name not in _OWN_ENTRIES}, "state_dict": weights}

    shards = {shard.name: shard for shard in (*models, *optimizers)}
    return folder.assembled("DeepSpeed", shards, [loaded], assemble)


def _by_rank(names: set[str], pattern: re.Pattern[str]) -> list[str]:
    found = {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
    return [found[rank] for rank in sorted(found)]


def _check_ranks(shards: Shards) -> None:
    """Raise unless there is one file for each rank, all of the same checkpoint."""
    there = [int(re.findall(r"pp_rank_(\d+)", shard.name)[0]) for shard in shards]
    for shard in shards:
        content = shard.content
        ranks = content[_OPTIMIZER][_RANKS] if _OPTIMIZER in content else content["dp_world_size"]
        if isinstance(ranks, list) and ranks and are_sizes(ranks):  # one per group
            ranks = max(ranks)
        if ranks != len(there) or there != [*range(len(there))]:
            what = f"is not complete: {printable(shard.name)} is from {printable(ranks)} ranks, but it has {len(there)}"
            raise Fault(
                what, "Probably a save or a copy was interrupted, or the folder has files of an older checkpoint."
            )
    if not shards:
        raise Fault(
            "is not complete: *_optim_states.pt, the optimizer's files with the fp32 weights, are missing",
            f"At stages 1 and 2, {_WHOLE_MODEL} holds the weights in the precision of the training.",
        )


def _join_stages_1_and_2(param_shapes: Sequence[Shapes], optimizers: Shards) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the parameters of stages 1 and 2, where each rank has a part of one row of numbers per group."""
    states = [shard.content[_OPTIMIZER] for shard in optimizers]
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in param_shapes]
    if {len(paddings), *(len(state[_GROUPS]) for state in states)} != {len(param_shapes)}:
        raise damaged(DAMAGE)
    align = 2 * len(states)  # "Z2 started to align to 2*world_size to improve nccl performance"
    for number, shapes in enumerate(param_shapes):
        dtype = states[0][_GROUPS][number].dtype
        row: list[Piece] = []
        for shard, state in zip(optimizers, states, strict=True):
            row += _row(shard, [state[_GROUPS][number]], dtype)
        at = 0
        for (key, shape), padding in zip(shapes.items(), paddings[number], strict=True):
            yield key, _joined(dtype, shape, [row], at)
            at += math.prod(shape) + padding
        if -(-at // align) != -(-_length(row) // align):
            raise damaged(DAMAGE)


def _join_stage_3(param_shapes: Sequence[Shapes], optimizers: Shards) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the parameters of stage 3, where each rank has a row with its part of each parameter."""
    groups = [shard.content[_OPTIMIZER][_GROUPS_OF_STAGE_3] for shard in optimizers]
    dtype = groups[0][0].dtype
    rows = [_row(shard, group, dtype) for shard, group in zip(optimizers, groups, strict=True)]
    at = 0
    for key, shape in (item for shapes in param_shapes for item in shapes.items()):
        yield key, _joined(dtype, shape, rows, at)
        at += -(-math.prod(shape) // len(rows))
    if {*map(_length, rows)} != {at}:
        raise damaged(DAMAGE)


def _join_frozen(models: Shards) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the frozen parameters, which are split in the same way but not stored with the optimizer."""
    for key, shape in (models[0].content["frozen_param_shapes"] or {}).items():
        fragments = [shard.content["frozen_param_fragments"][key] for shard in models]
        dtype = fragments[0].dtype
        rows = [_row(shard, [info], dtype) for shard, info in zip(models, fragments, strict=True)]
        yield key, _joined(dtype, shape, rows, 0)


def _row(shard: Structure, tensors: Sequence[TensorInfo], dtype: str) -> list[Piece]:
    row = []
    for info in tensors:
        if info.kind or len(info.shape or ()) != 1 or info.strides != (1,) or info.dtype != dtype:
            raise damaged(DAMAGE)
        start = shard.places[info.storage.key] + info.offset * BYTES_OF_DTYPE[dtype]  # type: ignore[union-attr]
        row.append((shard.name, start, info.shape[0]))  # type: ignore[index]
    return row


def _length(row: Sequence[Piece]) -> int:
    return sum(numel for *_, numel in row)


def _joined(dtype: str, shape: tuple[int, ...], rows: Sequence[Sequence[Piece]], at: int) -> TensorInfo:
    """Return a tensor split into equal shares, one in each row from ``at`` on; the last share is padded."""
    left = math.prod(shape)
    share = -(-left // len(rows))
    parts: list[Part] = []
    end = 0
    for row in rows:
        skip, take = at, min(share, left)
        left -= take
        for name, start, numel in row:
            skipped = min(skip, numel)
            taken = min(take, numel - skipped)
            if taken:
                parts.append(Part(name, start + skipped * BYTES_OF_DTYPE[dtype], (end,), (taken,), (1,)))
            skip, take, end = skip - skipped, take - taken, end + taken
        if take:
            raise damaged(DAMAGE)
    return TensorInfo(dtype, shape, None, laid_out=(end,), parts=tuple(parts))
