"""Checkpoints of several files are one checkpoint for every command, and no shard is taken for a whole."""

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import TENSORS
from hypothesis import given
from hypothesis import strategies as st
from sharded_checkpoints import divided, write_deepspeed, write_distributed, write_index
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.formats import read_structure
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, verify_checkpoint
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 7)])
        self.norm = nn.BatchNorm1d(7)


NET = Net()
for _value in NET.state_dict().values():
    _value.copy_(torch.rand(_value.shape) * 9)
WEIGHTS = OrderedDict((key, value.clone()) for key, value in NET.state_dict().items())
PARAMETERS = [
    {f"layers.{key}": WEIGHTS[f"layers.{key}"] for key, _ in NET.layers.named_parameters()},
    {f"norm.{key}": WEIGHTS[f"norm.{key}"] for key, _ in NET.norm.named_parameters()},
]
BUFFERS = {key: WEIGHTS[key] for key, _ in NET.named_buffers()}
LIGHTNING = {"pytorch-lightning_version": "2.6.6", "epoch": 3, "hyper_parameters": {}, "loops": None}


def loaded_from(path: object) -> str:
    """Load weights, see that they are right, and return the report."""
    report = load_weights(net := Net(), str(path))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), WEIGHTS.values(), strict=True))
    return str(report)


def in_blocks(weights: OrderedDict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: divided(value, [1], [2]) if value.ndim == 2 else divided(value) for key, value in weights.items()}


def lightnings_folder(folder: Path) -> Path:
    state = {name: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)} for name in WEIGHTS}
    optimizer = {"state": state, "param_groups": [{"params": [*WEIGHTS], "lr": 0.1}]}
    write_distributed(folder, {"model": in_blocks(WEIGHTS), "optimizer_0": optimizer})
    torch.save(LIGHTNING, folder / "meta.pt")
    return folder


def zero(stage: int, **options: Any) -> Callable[[Path], Path]:
    return lambda folder: write_deepspeed(folder, PARAMETERS, 3, stage, kept=BUFFERS, **options)


SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder of safetensors": lambda folder: write_index(folder, WEIGHTS, 3).parent,
    ".bin files and their index": lambda folder: write_index(folder, WEIGHTS, 3, suffix="bin"),
    "torch.distributed.checkpoint": lambda folder: write_distributed(folder, in_blocks(WEIGHTS), files=2),
    "Lightning's FSDP": lightnings_folder,
    "DeepSpeed without ZeRO": zero(0),
    "DeepSpeed ZeRO 2": zero(2, padding=3),
    "DeepSpeed ZeRO 3": zero(3),
    "Lightning's DeepSpeed": zero(3, more=LIGHTNING),
}


Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("kind", SOURCES)
def test_shards_are_one_checkpoint_for_every_command(kind: str, tmp_path: Path, run: Run) -> None:
    source = SOURCES[kind](tmp_path / "folder")
    assert f"loaded {len(WEIGHTS)} weights" in loaded_from(source)
    code, out, _ = run("inspect", source)
    assert code == 0
    assert "layers.0.weight" in out
    assert "3x5" in out
    assert run("verify", source)[0] == 0
    for target in ("all.ckpt", "weights.pt", "weights.safetensors"):
        options = ["--weights"] * (target == "weights.pt")
        code, out, err = run("convert", source, tmp_path / target, *options)
        assert (code, err) == (0, "")
        assert f"{len(WEIGHTS)} weights" in out
        loaded_from(tmp_path / target)
    content = torch.load(tmp_path / "all.ckpt")
    assert ("epoch" in content) == kind.startswith("Lightning")


@given(
    weights=st.dictionaries(st.text("ab.", min_size=1, max_size=4), TENSORS, min_size=1, max_size=4),
    cuts=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4),
    files=st.integers(1, 3),
    turned=st.booleans(),
)
def test_blocks_of_any_cut_make_up_the_tensor(
    tmp_path_factory: pytest.TempPathFactory,
    weights: dict[str, torch.Tensor],
    cuts: list[list[int]],
    files: int,
    turned: bool,
) -> None:
    folder = tmp_path_factory.mktemp("dcp")
    saved = {}
    if turned:  # torch.save keeps the strides
        weights = {key: value.transpose(0, -1) if value.ndim else value for key, value in weights.items()}
    for key, value in weights.items():
        inside = [[at for at in cut if at < size] for cut, size in zip(cuts, value.shape, strict=False)]
        saved[key] = divided(value.clone(), *inside)
    write_distributed(folder, {"net": saved}, files=files)
    loaded = read_checkpoint(folder)["net"]
    shutil.rmtree(folder)  # the numbers are mapped
    assert loaded.keys() == weights.keys()
    for key, value in weights.items():
        assert loaded[key].dtype is value.dtype
        mine, theirs = (tensor.reshape(-1).view(torch.uint8) for tensor in (loaded[key], value))
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stage", [2, 3])
def test_names_that_zero_has_tied_are_one_tensor(stage: int, tmp_path: Path) -> None:
    loaded = read_checkpoint(zero(stage, tied={"head": "layers.0.weight"})(tmp_path / "folder"))
    assert loaded["head"] is loaded["layers.0.weight"]


def test_an_object_with_tensors_is_loaded_like_a_file(tmp_path: Path) -> None:
    write_distributed(tmp_path / "dcp", {"net": {**WEIGHTS}, "pair": (torch.arange(3.0), "a")})
    numbers, text = read_checkpoint(tmp_path / "dcp")["pair"]
    assert (numbers.tolist(), text) == ([0, 1, 2], "a")


# -- no shard is taken for a whole ---------------------------------------------------------------------------------


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "latest")


@pytest.mark.follows("Use the folder with all files: ")
@pytest.mark.parametrize(
    "kind",
    ["folder of safetensors", ".bin files and their index", "torch.distributed.checkpoint", "DeepSpeed ZeRO 3"],
)
def test_a_single_shard_is_named_for_what_it_is(kind: str, tmp_path: Path, run: Run) -> None:
    SOURCES[kind](tmp_path / "folder")
    shards = [path for path in files_in(tmp_path / "folder") if path.suffix != ".json"]
    assert len(shards) >= 3
    for shard in shards:
        with pytest.raises(BrokenCheckpointError, match=r"one of several files.*: .*/(folder|tag)$") as refused:
            load_weights(Net(), shard, strict=False)
        loaded_from(str(refused.value).rpartition("Use the folder with all files: ")[2])
        assert run("convert", shard, tmp_path / "a.pt")[0] == 1
        assert "is one of several files of a checkpoint" in run("inspect", shard)[2]
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.follows("checkpoints. Use one of them: ")
def test_each_index_in_a_folder_is_a_checkpoint(tmp_path: Path) -> None:
    for suffix in ("bin", "safetensors"):
        write_index(tmp_path, WEIGHTS, 2, suffix=suffix)
    with pytest.raises(BrokenCheckpointError, match="holds 2 checkpoints") as refused:
        read_checkpoint(tmp_path)
    for name in str(refused.value).rpartition("Use one of them: ")[2].split(", "):
        loaded_from(tmp_path / name)


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind != "DeepSpeed without ZeRO"])
def test_a_missing_or_cut_file_is_refused(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path / "folder")
    words = r"missing|not complete|cut short|damaged|\.metadata|model_states|a folder|their index"
    for file in files_in(tmp_path / "folder"):
        if file == source or file.name == "meta.pt":
            continue
        data = file.read_bytes()
        for left in (None, data[: len(data) // 2]):
            file.unlink() if left is None else file.write_bytes(left)
            for act in (read_structure, verify_checkpoint, read_checkpoint):
                with pytest.raises(CheckpointError, match=words):
                    act(source)
        file.write_bytes(data)
    assert read_checkpoint(source)
