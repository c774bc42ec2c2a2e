"""Checks of what a pickle or a safetensors header declares against the file; its memory is in proportion to it."""

import collections
import enum
import json
import pickle
import re
import struct
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import (
    HOOKS,
    call,
    described_by,
    number,
    refuse_everywhere,
    safetensors,
    sizes,
    storage,
    tensor,
    text,
)

from lightning_gpu_tools.checkpoints.formats.safetensors import restore_metadata
from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.sources import read_structure
from lightning_gpu_tools.checkpoints.structure import BYTES_OF_DTYPE, TensorInfo
from lightning_gpu_tools.checkpoints.unsafe_globals import beyond_plain_data
from lightning_gpu_tools.errors import BrokenCheckpointError, UnsafeCheckpointError

# -- sound files -----------------------------------------------------------------------------------------------------

BASE = torch.arange(24.0).reshape(4, 6)


def quantized_to_4_bits() -> torch.Tensor:
    ones = torch.ones(4)
    return torch.quantize_per_channel(torch.ones(4, 6), ones, 0 * ones, 0, torch.quint4x2)


def parameter_with_state() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.note = "mine"  # type: ignore[attr-defined]
    return parameter


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.int64, torch.uint8, torch.uint16, torch.bool]
KINDS: dict[str, Callable[[], Any]] = {
    "views": lambda: [BASE, BASE[1:3, ::2], BASE.t(), BASE[0]],
    "expanded": lambda: torch.ones(1).expand(1000, 1000),
    "empty": lambda: [torch.empty(0), torch.empty(0, 3, dtype=torch.int64), torch.empty(3, 0)],
    "scalar": lambda: torch.tensor(1.5),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    "quantized to 4 bits": quantized_to_4_bits,
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.empty(7, device="meta"),
    "parameter": parameter_with_state,
    "requires gradients": lambda: torch.ones(2, requires_grad=True),
    "scheduler": lambda: torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([BASE]), [1, 1, 2]).state_dict(),
    "state_dict": lambda: torch.nn.Linear(3, 4).state_dict(),
    "a storage": lambda: torch.UntypedStorage(7),
    "plain data": lambda: [b"a", bytearray(b"a"), {1, "a"}, 1j, torch.Size([1]), torch.float32, torch.device("cpu")],
    "more plain data": lambda: [Counter("aab"), torch.sparse_coo, 2**100, None, {(1, 2): 3, None: 4}, ((), [[]])],
    "every type": lambda: {str(dtype): torch.zeros(3, 2, dtype=dtype) for dtype in DTYPES},
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


def shown(content: object) -> str:
    return re.sub(r"\bj\d+", "j", repr(content))  # each jagged tensor counts its kind


# torch cannot read these back itself.
NOT_IN_THE_OLD_FORMAT = {"a storage", "nested", "every type"}


def check_description(described: Any, loaded: Any) -> None:
    """Assert that a description has the structure, shapes and types of what torch loads."""
    if isinstance(described, TensorInfo):
        assert described.shape is None or described.shape == tuple(loaded.shape)
        is_of_parts = loaded.is_nested or loaded.layout is not torch.strided
        assert f"torch.{described.dtype}" == str(loaded.dtype) or (is_of_parts and described.dtype == "?")
    elif isinstance(described, dict):
        assert [*described] == [*loaded]
        for key, value in described.items():
            check_description(value, loaded[key])
    elif isinstance(described, list) and isinstance(loaded, list):
        for one, other in zip(described, loaded, strict=True):
            check_description(one, other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_content_loads_as_torch_loads_it(kind: str, tmp_path: Path) -> None:
    content = {"it": KINDS[kind]()}
    path, old = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    torch.save(content, path)
    if kind in ("nested", "jagged"):
        try:
            torch.load(path)
        except pickle.UnpicklingError:
            pytest.skip("this torch does not load them itself")
    torch.save(content, old, _use_new_zipfile_serialization=False)
    for file in (path,) if kind in NOT_IN_THE_OLD_FORMAT else (path, old):
        structure = read_structure(file)
        check_description(structure.content, torch.load(path))
        assert kind == "jagged" or not beyond_plain_data(structure.globals)
        for weights_only in (True, False):
            assert shown(read_checkpoint(file, weights_only=weights_only)) == shown(torch.load(path))
    if kind in NOT_IN_THE_OLD_FORMAT:
        with pytest.raises(BrokenCheckpointError):
            read_structure(str(old))


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
    sizes = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}
    assert {name: BYTES_OF_DTYPE.get(name) for name in sizes} == sizes


class Custom(dict):  # type: ignore[type-arg]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inner = [self]


Pair = collections.namedtuple("Pair", "a b")


class Mode(enum.Enum):
    FAST = 1


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_objects_of_any_class_load_from_trusted_files(protocol: int, new_format: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    chain: Any = None
    for _ in range(50):
        chain = Custom({"next": chain})
    shared = {1, 2, 3}
    plain = [
        *(shared, shared, frozenset(shared), [{number} for number in range(1000)]),
        *(Pair(1, 2), Mode.FAST, collections.defaultdict(list, a=[1]), collections.deque([1], 3), Custom.get),
    ]
    content = {"custom": chain, "plain": plain, "numpy": [np.ones(3), np.float32(1), np.random.default_rng(0)]}
    if protocol:  # torch writes no tensors in protocol 0
        content |= {"model": torch.nn.Linear(2, 2), "keys": {torch.ones(1): 1}}
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=new_format)
    read_structure(str(path))
    loaded = read_checkpoint(path, weights_only=False)
    assert loaded["custom"]["next"].inner[0] is loaded["custom"]["next"]
    assert repr(loaded["plain"]) == repr(plain)
    with pytest.raises(UnsafeCheckpointError):
        read_checkpoint(path)


def test_a_newer_pickle_protocol_is_read_or_not_called_damage(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "last.ckpt", pickle_protocol=4)
    assert read_checkpoint(tmp_path / "last.ckpt")["w"].tolist() == [1, 1]
    torch.save({"w": torch.ones(2), "names": {"a"}}, tmp_path / "last.ckpt", pickle_protocol=4)
    with pytest.raises(UnsafeCheckpointError, match=r"Unsupported operand(.|\n)*default pickle_protocol"):
        read_checkpoint(tmp_path / "last.ckpt")


# -- pickles that declare something else -------------------------------------------------------------------------------


def write(path: Path, program: bytes) -> Path:
    path.write_bytes(described_by(program))
    return path


def test_a_crafted_description_that_is_sound_loads(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt", tensor(storage(), 1, sizes(3)))
    assert read_checkpoint(path).tolist() == [2, 3, 4]
    assert read_checkpoint(write(path, tensor(storage(), 2**40, sizes(0, 9), sizes(9, 1)))).shape == (0, 9)


DEEP = 100_000
ITEM = number(0) + number(9)
ENDLESS_KEY = b")" + b"2\x86" * 60
PAIR = b"(" + tensor(storage()) * 2 + b"t"
# Descriptions that contradict the file, and those that torch.save does not write.
CONTRADICTIONS = {
    "more numbers than the record has": tensor(storage(5)),
    "another dtype": tensor(storage(4, kind="DoubleStorage")),
    "fewer numbers than the record has": tensor(storage(3), 0, sizes(3)),
}
FOREIGN = {
    "an unknown dtype": tensor(storage(4, kind="FancyStorage")),
    "a negative number of elements": storage(-4),
    "a huge number of elements": storage(2**63),
    "a key that is a number": storage(4, number(0)),
    "one storage of two types": b"(" + storage(4) + storage(4, kind="IntStorage") + b"t",
    "one storage of two lengths": b"(" + storage(4) + storage(2) + b"t",
    "a storage with a part": storage(4, view=b"N"),
    "a sparse tensor of two parts": call("torch._utils._rebuild_sparse_tensor", b"N", PAIR),
    "a shape beyond the storage": tensor(storage(), 0, sizes(5)),
    "an offset beyond the storage": tensor(storage(), 1),
    "strides beyond the storage": tensor(storage(), 0, sizes(2, 2), sizes(3, 1)),
    "more elements than 64 bits": tensor(storage(), 0, sizes(2**40, 2**40), sizes(0, 0)),
    "no elements, but sizes beyond 64 bits": tensor(storage(), 0, sizes(2**40, 2**40, 0), sizes(0, 0, 0)),
    "a negative offset": tensor(storage(), -1),
    "a negative size": tensor(storage(), 0, sizes(-1)),
    "a negative stride": tensor(storage(), 3, sizes(4), sizes(-1)),
    "fewer strides than sizes": tensor(storage(), 0, sizes(2, 2), sizes(1)),
    "a negative size on meta": call(
        "torch._utils._rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\n", sizes(-1), sizes(1), b"\x89"
    ),
    "fewer scales than channels": call(
        "torch._utils._rebuild_qtensor",
        *(storage(4, text("1"), "QInt8Storage"), number(0), sizes(2, 2), sizes(2, 1)),
        b"(ctorch\nper_channel_affine\n" + tensor(storage(), 0, sizes(1)) * 2 + number(0) + b"t",
        HOOKS,
    ),
    "an item put into a tensor": tensor(storage()) + ITEM + b"s",
    "items put into a tensor": tensor(storage()) + b"(" + ITEM + b"u",
    "a key nested so deep that hashing ends the process": b"})" + b"\x85" * DEEP + number(1) + b"s",
    "a key that takes for ever to hash": b"}" + ENDLESS_KEY + number(1) + b"s",
    "a set of the same": call("builtins.set", b"](" + ENDLESS_KEY + b"e"),
    "copies of copies": b"](" + number(7) * 5000 + b"eq\0(c__builtin__\nset\nq\1" + b"h\1h\0\x85R" * 1000 + b"t",
    "a call of a number": number(1) + b")R",
}
MISMATCH = "its description and its contents do not match"


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_description_that_contradicts_the_file_is_refused(case: str, tmp_path: Path) -> None:
    refuse_everywhere(write(tmp_path / "last.ckpt", CONTRADICTIONS[case]), MISMATCH)


@pytest.mark.parametrize("case", FOREIGN)
def test_a_description_that_torch_never_writes_is_refused(case: str, tmp_path: Path) -> None:
    refuse_everywhere(write(tmp_path / "last.ckpt", FOREIGN[case]), "was not written by torch.save")


# A call that torch would follow to memory that is not the file's, or to much more than the file is long.
TERABYTE = number(1 << 40)
CALLS = {
    "torch.FloatTensor": call("torch.FloatTensor", TERABYTE),
    "torch.Tensor": call("torch.Tensor", TERABYTE),
    "torch.storage.UntypedStorage": call("torch.storage.UntypedStorage", TERABYTE),
    "torch.sparse.FloatTensor": call("torch.sparse.FloatTensor"),
    "torch.Tensor.__setstate__": tensor(storage()) + b"(" + tensor(storage()) + number(0) + sizes(9) + sizes(1) + b"tb",
    "builtins.bytearray": call("builtins.bytearray", TERABYTE),
    "_codecs.encode": call("_codecs.encode", text("a" * 9), text("hex")),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": call(
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        tensor(storage(), 0, sizes(1 << 40), sizes(0)),
        b"ctorch\nfloat64\n" + text("cpu") + b"\x89",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_plain_data_never_needs_are_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt", CALLS[name])
    with pytest.raises(UnsafeCheckpointError, match=rf"can run code when opened.*: {name}\(\.\.\.\)") as caught:
        read_checkpoint(path)
    assert "add_safe_globals" not in str(caught.value)
    assert f"{name}(...)" in read_structure(str(path)).globals


def test_sparse_indices_outside_of_the_tensor_are_refused(tmp_path: Path) -> None:
    indices = torch.tensor([[0, 10**6]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(2), (3,), check_invariants=False)
    torch.save({"w": tensor}, tmp_path / "last.ckpt")
    with pytest.raises(BrokenCheckpointError):
        read_checkpoint(tmp_path / "last.ckpt")


PEAK = """
import resource, sys
from lightning_gpu_tools.checkpoints.sources import read_structure
from lightning_gpu_tools.errors import CheckpointError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_structure(path)
    except CheckpointError:
        pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
WASTEFUL = {
    "lists": b"]" * 200_000,
    "sets": b"\x8f" * 200_000,
    "dictionaries": b"}K\x01Ns" * 40_000,
    "remembered": b"}\x94" * 100_000,
    "objects": b"cbuiltins\nobject\nq\0" + b"h\0)\x81" * 50_000,
    "copied arguments": b"cbuiltins\nobject\nq\0(" + b"N" * 50_000 + b"tq\1" + b"h\0h\1\x81" * 30_000,
    "bytes that are not there": b"\x96" + struct.pack("<Q", 2 << 30),
    "classes": b"".join(b"ca\n%d\n" % i for i in range(25_000)),
}


def test_memory_is_in_proportion_to_the_pickle(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / f"{case}.ckpt", program)) for case, program in WASTEFUL.items()]
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, text=True, check=True)
    peaks = dict(zip(WASTEFUL, map(int, done.stdout.split()), strict=True))
    assert max(peaks.values()) * 1024 < 200 * 200_000, peaks


# -- the format before torch 1.6 ---------------------------------------------------------------------------------------


def old_file(path: Path, weights: object) -> bytes:
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def test_an_old_file_holds_the_storages_that_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    data = old_file(path, {"w": torch.ones(4)})
    keys = data.index(b"]q", data.index(b"OrderedDict"))
    path.write_bytes(data[:keys] + b"]." + data[data.rindex(b"\x04" + bytes(7)) :])
    refuse_everywhere(path, MISMATCH)  # torch leaves the memory as it is
    path.write_bytes(data.replace(struct.pack("<q4f", 4, 1, 1, 1, 1), struct.pack("<q4f", 3, 1, 1, 1, 1)))
    refuse_everywhere(path, MISMATCH)


def test_shared_storages_from_before_torch_04_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    empty = old_file(path, {})
    start = empty[: empty.index(b"}q\x00.") - 2]  # up to the description
    rest = pickle.dumps(["0"], 2) + struct.pack("<q4f", 4, 1, 2, 3, 4)
    path.write_bytes(start + b"\x80\x02" + tensor(storage(view=b"N")) + b"." + rest)
    assert read_checkpoint(path).tolist() == [1, 2, 3, 4]
    part = storage(view=b"(" + text("1") + number(2) + number(2) + b"t")
    path.write_bytes(start + b"\x80\x02" + tensor(part) + b"." + rest)
    refuse_everywhere(path, "was not written by torch.save")


def test_every_pickle_of_an_old_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    empty = old_file(path, {})
    version = pickle.dumps(1001, 2)
    start = empty.index(version) + len(version)
    contents = empty.index(b"}q\x00.") - 2
    path.write_bytes(empty[:start] + b"\x80\x02" + CALLS["torch.FloatTensor"] + b"." + empty[contents:])
    with pytest.raises(UnsafeCheckpointError, match="can run code when opened"):
        read_checkpoint(path)


# -- safetensors -------------------------------------------------------------------------------------------------------


def entry(start: int, end: int, shape: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ONE = json.dumps(entry(0, 4, [1])).encode()
HEADERS = {
    "a gap": safetensors({"a": entry(4, 8, [1])}, bytes(8)),
    "an overlap": safetensors({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, bytes(4)),
    "bytes that belong to nothing": safetensors({"a": entry(0, 4, [1])}, bytes(8)),
    "a shape that does not fit": safetensors({"a": entry(0, 4, [2])}, bytes(4)),
    "a negative size": safetensors({"a": entry(0, 4, [-1, -1])}, bytes(4)),
    "a broken size": safetensors({"a": entry(0, 4, [1.0])}, bytes(4)),
    "a dtype that is no text": safetensors({"a": entry(0, 4, [1], ["F32"])}, bytes(4)),  # type: ignore[arg-type]
    "half of a byte": safetensors({"a": entry(0, 1, [1], "F4")}, bytes(1)),
    "a name twice": safetensors(b'{"a":%s,"a":%s}' % (ONE, ONE), bytes(4)),
    "metadata that is no text": safetensors({"__metadata__": {"a": 1}, "b": entry(0, 4, [1])}, bytes(4)),
    "a header nested deep": safetensors(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "a size beyond 64 bits": safetensors({"a": entry(0, 0, [0, 2**63])}),
    "no elements, but sizes beyond 64 bits": safetensors({"a": entry(0, 0, [2**62, 2**62, 0])}),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_safetensors_header_that_contradicts_the_file_is_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    path.write_bytes(HEADERS[case])
    refuse_everywhere(path, MISMATCH)


def test_safetensors_files_load_wherever_their_numbers_begin(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {f"{i}.{dtype}": torch.arange(i).to(dtype) for i in range(4) for dtype in (torch.float32, torch.bool)}
    path = tmp_path / "a.safetensors"
    save_file(weights, path)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    for shift in (0, 1, 7):
        path.write_bytes(struct.pack("<Q", length + shift) + data[8 : 8 + length] + b" " * shift + data[8 + length :])
        loaded = read_checkpoint(path)
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "texts",
    [
        {"tied": '["b"]', "module_versions": "7"},
        {"tied": '{"a": "c", "b": 1, "d": ["a"]}'},
        {"tied": "[" * DEEP},
        {"module_versions": '{"": {"version": [2]}}'},
        {"module_versions": '{"": 2}'},
    ],
)
def test_texts_of_another_program_do_not_change_the_weights(texts: dict[str, str]) -> None:
    weights = OrderedDict(a=torch.ones(1), c=torch.zeros(1))
    restore_metadata(weights, texts)
    assert weights == {"a": torch.ones(1), "c": torch.zeros(1)}
    assert not hasattr(weights, "_metadata")
