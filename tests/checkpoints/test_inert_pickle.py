"""Pickles of any origin: nothing of them runs, memory fits the file, and what is described is what is loaded."""

import collections
import contextlib
import io
import os
import pkgutil
import re
import struct
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    EXPLOIT,
    Exploit,
    call,
    described_by,
    number,
    open_in_every_way,
    text,
)
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.formats import read_structure
from lightning_gpu_tools.checkpoints.inert_pickle import InertUnpickler, beyond_plain_data
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, read_weights, verify_checkpoint
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, TensorInfo
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import CheckpointError, UnsafeCheckpointError

# -- sound files -----------------------------------------------------------------------------------------------------

BASE = torch.arange(24.0).reshape(4, 6)


def parameter_with_state() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.note = "mine"  # type: ignore[attr-defined]
    return parameter


KINDS: dict[str, Callable[[], Any]] = {
    "views": lambda: [BASE, BASE[1:3, ::2], BASE.t(), BASE[0]],
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(7, device="meta"),
    "parameter": parameter_with_state,
    "state_dict": lambda: torch.nn.Linear(3, 4).state_dict(),
    "plain data": lambda: [b"a", bytearray(b"a"), {1, "a"}, 1j, torch.Size([1]), torch.float32, torch.device("cpu")],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_content_loads_as_torch_loads_it(kind: str, tmp_path: Path) -> None:
    content = {"it": KINDS[kind]()}
    for new_format in (True, False):
        path = tmp_path / "a.ckpt"
        torch.save(content, path, _use_new_zipfile_serialization=new_format)
        expected = torch.load(path)
        described = read_structure(path)
        assert not beyond_plain_data(described.globals)
        if isinstance(info := described.content["it"], TensorInfo):
            assert info.shape in (None, tuple(expected["it"].shape))
            assert info.dtype in ("?", str(expected["it"].dtype).removeprefix("torch."))
        for weights_only in (True, False):
            assert repr(read_checkpoint(path, weights_only=weights_only)) == repr(expected)


def test_plain_content_shares_what_it_shared(tmp_path: Path) -> None:
    row, weights = [1], torch.nn.Linear(2, 2).state_dict()
    torch.save({"rows": [row, row], "base": [BASE, BASE[1:]], "same": (BASE, BASE), "net": weights}, tmp_path / "a.pt")
    loaded = read_checkpoint(tmp_path / "a.pt")
    assert loaded["rows"][0] is loaded["rows"][1]
    assert loaded["same"][0] is loaded["base"][0]
    loaded["base"][0][1:] = 7  # the pages are the process's own
    assert (loaded["base"][1] == 7).all()
    assert loaded["net"]._metadata == weights._metadata  # type: ignore[attr-defined]
    gone = weakref.ref(loaded["base"][0])
    del loaded
    assert gone() is None, "a cycle keeps what was loaded"


def test_the_size_of_every_dtype_is_known() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    known = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}
    assert {name: BYTES_OF_DTYPE.get(name) for name in known} == known


def test_our_list_of_plain_data_is_torchs() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    assert beyond_plain_data(_get_allowed_globals()) == []
    tempting = ["builtins.eval", "os.system", "torch.load", "torch.hub.load", "torch.nn.Linear", "collections.deque"]
    assert beyond_plain_data(tempting) == sorted(tempting)


# -- code --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_format", [True, False])
def test_a_malicious_file_is_refused_and_has_not_run(new_format: bool, tmp_path: Path) -> None:
    path, witness = tmp_path / "gift.ckpt", tmp_path / "it ran"
    content = {"state_dict": {"w": torch.ones(2)}, "x": Exploit(witness)}
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_checkpoint(path)
    words = str(caught.value)
    assert "No code in it has run" in words
    assert f"Opening it would import or call {EXPLOIT}." in words
    assert "weights_only" not in words
    structure = read_structure(str(path))
    assert EXPLOIT in structure.globals
    assert structure.content["state_dict"]["w"].shape == (2,)
    assert not witness.exists()
    read_checkpoint(path, weights_only=False)
    assert witness.exists(), "the file is harmless, so the test proves nothing"


MKDIR = f"c{os.mkdir.__module__}\nmkdir\n".encode()
# Every opcode that calls, builds or imports.
CALLING = {
    "REDUCE": MKDIR + b"(%(name)stR",
    "INST": b"(%(name)s" + MKDIR.replace(b"c", b"i", 1),
    "NEWOBJ_EX": MKDIR + b"(%(name)st}\x92",
    "STACK_GLOBAL": text(os.mkdir.__module__) + text("mkdir") + b"\x93(%(name)stR",
    "EXT1": b"\x82\x01(%(name)stR",
    "BUILD": MKDIR + b"(%(name)stR}" + text("__setstate__") + MKDIR + b"sb",
    "PERSID": b"Pmkdir\n",
}


@pytest.mark.parametrize("opcode", CALLING)
def test_no_opcode_runs_anything(opcode: str, tmp_path: Path) -> None:
    witness = tmp_path / "it ran"
    path = tmp_path / "a.ckpt"
    path.write_bytes(described_by(CALLING[opcode].replace(b"%(name)s", text(str(witness)))))
    for act in (read_structure, read_checkpoint, read_weights, verify_checkpoint):
        with contextlib.suppress(CheckpointError):
            act(path)
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert not witness.exists()


def test_weights_that_are_objects_are_named_and_not_opened(tmp_path: Path) -> None:
    path, witness = tmp_path / "a.pt", tmp_path / "it ran"
    for content in ({"model": {"weights": Exploit(witness)}}, Exploit(witness), {Exploit(witness): torch.ones(2)}):
        torch.save(content, path)
        with pytest.raises(UnsafeCheckpointError) as refused:
            load_weights(torch.nn.Linear(2, 2), path)
        assert f"would import or call {EXPLOIT}." in str(refused.value)
        assert [main(["checkpoint", action, str(path)]) for action in ("inspect", "verify")] == [0, 1]
        assert not witness.exists()


# A call that torch would follow to memory that is not the file's, or to much more than the file is long.
TERABYTE = number(1 << 40)
CALLS = {
    "torch.FloatTensor": call("torch.FloatTensor", TERABYTE),
    "builtins.bytearray": call("builtins.bytearray", TERABYTE),
    "_codecs.encode": call("_codecs.encode", text("a" * 9), text("hex")),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_plain_data_never_needs_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(described_by(CALLS[name]))
    with pytest.raises(UnsafeCheckpointError, match=rf"would import or call {name}\(\.\.\.\)\."):
        read_checkpoint(path)


# -- pickles that take memory or end the process ---------------------------------------------------------------------


WASTEFUL = {
    "lists": b"]" * 200_000,
    "far in the memo": b"}r\xff\xff\xff\xff",
    "copied arguments": b"cbuiltins\nobject\nq\0(" + b"N" * 50_000 + b"tq\1" + b"h\0h\1\x81" * 30_000,
    "bytes that are not there": b"\x96" + struct.pack("<Q", 2 << 30),
}


@pytest.mark.parametrize("case", WASTEFUL)
def test_memory_is_in_proportion_to_the_pickle(case: str) -> None:
    program = WASTEFUL[case] + b"."
    tracemalloc.start()
    try:
        with contextlib.suppress(Exception):
            InertUnpickler(io.BytesIO(program), len(program)).load()
        assert tracemalloc.get_traced_memory()[1] < 200 * 200_000
    finally:
        tracemalloc.stop()


PROGRAMS = st.lists(
    st.sampled_from(
        [
            *(b"}", b"]", b")", b"(", b"N", b"K\x01", b"X\x01\x00\x00\x00a", b"G" + bytes(8), b"\x8a\x01\x05", b"\x8f"),
            *(b"cos\nsystem\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
            *(b"R", b"b", b"s", b"u", b"a", b"e", b"t", b"\x85", b"\x86", b"\x87", b"\x81", b"Q", b"0", b"2", b"\x90"),
            *(b"q\x00", b"h\x00", b"r\xff\xff\xff\xff", b"\x94", b"\x93", b"X\xff\xff\xff\x7f", b"\x82\x01", b"o"),
            *(b"\x96\xff\xff\xff\xff\xff\x00\x00\x00", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x91", b"\x92"),
        ]
    ),
    max_size=25,
).map(b"".join)


@given(program=PROGRAMS)
def test_no_pickle_program_surprises(tmp_path_factory: pytest.TempPathFactory, program: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "program.ckpt"
    path.write_bytes(described_by(program))
    open_in_every_way(path)


# -- what a user can allow ---------------------------------------------------------------------------------------------


@pytest.mark.follows("To allow classes that you trust, call ")
def test_classes_are_allowed_by_the_suggested_call(tmp_path: Path) -> None:
    torch.save(net := torch.nn.Sequential(torch.nn.ReLU()), tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_checkpoint(tmp_path / "a.pt")
    words = r"import or call (.*)\. To allow classes that you trust, call (\S+)\."
    names, function = re.search(words, str(caught.value)).groups()  # type: ignore[union-attr]
    before = torch.serialization.get_safe_globals()
    try:
        pkgutil.resolve_name(function)([(pkgutil.resolve_name(name), name) for name in names.split(", ")])
        assert repr(read_checkpoint(tmp_path / "a.pt")) == repr(net)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.follows("Save only plain data")
def test_what_torch_never_fills_is_refused(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": collections.deque([1])}, tmp_path / "a.pt")
    with (
        torch.serialization.safe_globals([collections.deque]),
        pytest.raises(UnsafeCheckpointError, match=r"collections\.deque\. Save only plain data") as refused,
    ):
        read_checkpoint(tmp_path / "a.pt")
    assert "weights_only" not in str(refused.value)
