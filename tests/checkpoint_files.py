"""Checkpoint files as torch, archive tools and those who craft them write them."""

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.formats import read_structure
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, read_weights, verify_checkpoint
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError

TENSORS = st.builds(
    lambda shape, dtype, seed: (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.one_of(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([[300], [1 << 11], [2, 700]])),
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]
    ),
    st.integers(0, 9),
)


def saved(content: object, **options: Any) -> bytes:
    """Return what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def records_of(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def zipped(records: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # duplicate names
        for name, data in records:
            archive.writestr(name, data)
    return buffer.getvalue()


def described_by(program: bytes) -> bytes:
    """Return a file whose description is this pickle program, with a block of four numbers."""
    described = [("archive/data.pkl", b"\x80\x02" + program + b"."), ("archive/version", b"3\n")]
    return zipped([*described, ("archive/data/0", struct.pack("<4f", 1, 2, 3, 4))])


def text(value: str) -> bytes:
    content = value.encode()
    return b"X" + struct.pack("<L", len(content)) + content


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def call(name: str, *arguments: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def sizes(*numbers: int) -> bytes:
    return b"(" + b"".join(map(number, numbers)) + b"t"


def storage(numel: int = 4, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text("0") + text("cpu") + number(numel) + b"tQ"


HOOKS = b"\x89" + b"ccollections\nOrderedDict\n)R"


def tensor(block: bytes, offset: int = 0, shape: bytes = sizes(4), strides: bytes = sizes(1)) -> bytes:
    return call("torch._utils._rebuild_tensor_v2", block, number(offset), shape, strides, HOOKS)


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# Places, as fractions of a file's length, and the bytes that are written over what is there.
EDITS = st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=4)


def overwritten(data: bytes, edits: list[tuple[float, bytes]]) -> bytes:
    changed = bytearray(data)
    for place, patch in edits:
        start = int(place * (len(data) - 1))
        changed[start : start + len(patch)] = patch
    return bytes(changed)


def refuse_everywhere(path: Path, match: str) -> str:
    """See every way to open a file refuse it in the same words, and return these."""
    words = set()
    for act in (
        lambda: read_structure(path),
        lambda: verify_checkpoint(path),
        lambda: read_checkpoint(path),
        lambda: read_checkpoint(path, weights_only=False),
        lambda: load_weights(nn.Linear(2, 2), path),
    ):
        with pytest.raises(BrokenCheckpointError, match=match) as refused:
            act()
        words.add(str(refused.value))
    (message,) = words
    return message


def open_in_every_way(path: Path) -> None:
    """Open a file, or see it refused in words; nothing else may come out, and never torch's dangerous advice."""
    for read in (read_checkpoint, read_weights, read_structure, verify_checkpoint):
        message = ""
        try:
            read(path)  # type: ignore[operator]
        except CheckpointError as error:
            message = str(error)
        assert not message or (str(path) in message and "weights_only" not in message)


class Exploit:
    """An object that makes a folder when it is opened."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.witness),)


EXPLOIT = f"{os.mkdir.__module__}.mkdir"  # what a file with one names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def wrapped(net: nn.Module) -> OrderedDict[str, Any]:
    system = nn.Module()
    system.model = nn.DataParallel(torch.compile(net, backend="eager"))  # type: ignore[arg-type]
    return system.state_dict()  # type: ignore[return-value]


def lightning_checkpoint(weights: Any, **more: Any) -> dict[str, Any]:
    return {
        "pytorch-lightning_version": "2.6.6",
        "epoch": 3,
        "global_step": 812,
        "state_dict": weights,
        "hyper_parameters": {"width": 4},
        "callbacks": {"ModelCheckpoint": {}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}],
        **more,
    }
