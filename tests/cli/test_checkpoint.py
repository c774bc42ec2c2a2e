"""``checkpoint inspect | verify | convert | diff`` as a user runs them: output, exit code, files."""

import json
import os
import re
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.torch_files import read_checkpoint, write_checkpoint
from lightning_gpu_tools.cli import main


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


@pytest.fixture
def net() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def last(net: Tied, tmp_path: Path) -> str:
    write_checkpoint(lightning_checkpoint(wrapped(net)), tmp_path / "last.ckpt")
    return str(tmp_path / "last.ckpt")


Run = Callable[..., tuple[int, str, str]]


def test_inspect_imports_no_torch_and_takes_milliseconds(
    last: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    program = (
        "import sys, time; from lightning_gpu_tools.cli import main; start = time.process_time(); "
        f"code = main(['checkpoint', 'inspect', {last!r}]); took = time.process_time() - start; "
        "print([code, 'torch' in sys.modules, 'lightning' in sys.modules, 'rich' in sys.modules, took < 0.25])"
    )
    answer = run_python("-c", program)
    assert answer.stdout.splitlines()[-1] == "[0, False, False, False, True]", answer.stderr


def test_inspect_shows_what_is_inside(last: str, run: Run) -> None:
    code, out, err = run("inspect", last)
    assert (code, err) == (0, "")
    assert "Lightning checkpoint" in " ".join(out.split())  # a long path may part the words
    assert "epoch 3, step 812, Lightning 2.6.6, saved from cpu, optimizers 1" in out
    assert "hyperparameters: width" in out
    assert 'in the keys: "_orig_mod." (13), "module." (13)' in out
    assert "model.module._orig_mod.layers.{0…2}.weight" in out
    assert "192 B" in out
    assert max(map(len, out.splitlines())) <= max(100, len(last) + 40)
    assert "model.module._orig_mod.layers.2.bias" in run("inspect", last, "--all")[1]


def test_inspect_gives_json(last: str, run: Run) -> None:
    summary = json.loads(run("inspect", last, "--json")[1])
    assert summary["schema_version"] == 1
    assert summary["kind"] == "lightning"
    assert summary["devices"] == ["cpu"]
    assert summary["size_bytes"] == os.path.getsize(last)
    assert summary["wrappers_in_keys"] == {"state_dict": {"_orig_mod": 13, "module": 13}}
    first = summary["weights"]["state_dict"][0]
    assert first == {
        "key": "model.module._orig_mod.layers.0.weight",
        "shape": [4, 4],
        "dtype": "float32",
        "numel": 16,
        "bytes": 64,
        "device": "cpu",
    }
    assert summary["torch_version"] is None


def test_inspect_knows_the_manifest_and_foreign_classes(net: Tied, tmp_path: Path, run: Run) -> None:
    manifest = {"version": 1, "wrappers": {"net": "DataParallel"}, "torch": "2.13.0", "devices": ["cuda:7"]}
    path = tmp_path / "a.ckpt"
    write_checkpoint(lightning_checkpoint(net.state_dict(), lightning_gpu_tools=manifest, where=tmp_path), path)
    out = run("inspect", str(path))[1]
    assert "saved from cuda:7" in out
    assert "wrappers removed when it was saved: DataParallel at net" in out
    assert "holds more than plain data: pathlib.PosixPath" in out


@pytest.mark.parametrize("legacy", [True, False])
def test_inspect_reads_what_is_not_lightnings(net: Tied, legacy: bool, tmp_path: Path, run: Run) -> None:
    path = str(tmp_path / "a.pt")
    content = {"model": net.state_dict(), "ema": net.state_dict(), "optimizer": {"state": {}, "param_groups": []}}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    summary = json.loads(run("inspect", path, "--json")[1])
    assert summary["kind"] == "dictionary"
    assert list(summary["weights"]) == ["model", "ema"]
    assert summary["format"] == ("legacy" if legacy else "zip")


def test_what_cannot_be_read_exits_1_with_a_reason(tmp_path: Path, run: Run) -> None:
    (tmp_path / "web.ckpt").write_bytes(b"<html>")
    for action in ("inspect", "verify"):
        code, out, err = run(action, str(tmp_path / "web.ckpt"))
        assert (code, out) == (1, "")
        assert "is a web page" in err
        assert "no checkpoint at" in run(action, str(tmp_path / "gone.ckpt"))[2]


def test_verify_finds_a_flipped_bit(last: str, run: Run) -> None:
    code, out, _ = run("verify", last)
    assert code == 0
    assert "all checksums are right" in out
    assert json.loads(run("verify", last, "--json")[1])["checksums"] is True
    data = bytearray(Path(last).read_bytes())
    data[data.index(struct.pack("<4f", 1, 1, 1, 1))] ^= 1
    Path(last).write_bytes(data)
    code, out, err = run("verify", last)
    assert (code, out) == (1, "")
    assert "checksum of the record data/6 is wrong" in err


def test_verify_says_where_there_are_no_checksums(net: Tied, tmp_path: Path, run: Run) -> None:
    torch.save(net.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    code, out, _ = run("verify", str(tmp_path / "old.pt"))
    assert code == 0
    assert "no checksums" in out


def test_convert_cleans_the_keys_and_keeps_the_rest(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    target = str(tmp_path / "clean.ckpt")
    code, out, _ = run("convert", last, target, "--wrapper", "model")
    assert code == 0
    assert '13 weights, removed "_orig_mod." from 13 keys, removed "module." from 13 keys' in out
    content = torch.load(target)
    assert list(content["state_dict"]) == [f"model.{key}" for key in net.state_dict()]
    assert content["epoch"] == 3
    assert content["optimizer_states"][0]["state"][0]["exp_avg"].tolist() == [1] * 4
    assert content["state_dict"]._metadata["model.norm"] == {"version": 2}


def test_convert_leaves_module_alone_unless_told(last: str, tmp_path: Path, run: Run) -> None:
    run("convert", last, str(tmp_path / "a.ckpt"))
    assert next(iter(torch.load(tmp_path / "a.ckpt")["state_dict"])) == "model.module.layers.0.weight"


def test_convert_to_safetensors_and_back_loses_nothing_of_the_weights(
    net: Tied, last: str, tmp_path: Path, run: Run
) -> None:
    tensors, back = str(tmp_path / "a.safetensors"), str(tmp_path / "b.pt")
    assert run("convert", last, tensors, "--wrapper", "model", "--drop-root", "model.")[0] == 0
    from safetensors.torch import load_file

    assert set(load_file(tensors)) == set(net.state_dict()) - {"head.weight"}
    summary = json.loads(run("inspect", tensors, "--json")[1])
    assert summary["format"] == "safetensors"
    assert summary["lightning_version"] == "2.6.6"
    assert run("convert", tensors, back)[0] == 0
    weights = torch.load(back)
    assert set(weights) == set(net.state_dict())
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    assert weights._metadata == net.state_dict()._metadata  # type: ignore[attr-defined]
    assert run("diff", last, back)[0] == 0
    other = Tied()
    load_weights(other, tensors)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True))


def test_tensors_of_any_size_and_type_go_through_safetensors(tmp_path: Path, run: Run) -> None:
    from safetensors.torch import load_file

    kinds = (torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.float8_e5m2, torch.complex64, torch.uint16)
    shapes = [(3, 5), (), (0, 2), (1 << 19,), (7,)]
    weights = {f"{kind}.{i}": torch.randn(s).to(kind) for i, s in enumerate(shapes) for kind in kinds}
    weights["turned"] = torch.randn(4, 3).T
    torch.save(weights, tmp_path / "a.pt")
    assert run("convert", str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors"))[0] == 0
    for loaded in (load_file(tmp_path / "a.safetensors"), read_checkpoint(tmp_path / "a.safetensors")):
        assert loaded.keys() == weights.keys()
        for key, value in weights.items():
            assert (loaded[key].shape, loaded[key].dtype) == (value.shape, value.dtype), key
            mine, theirs = (tensor.reshape(-1).view(torch.uint8) for tensor in (loaded[key], value))
            assert torch.equal(mine, theirs), key


def test_convert_changes_precision_of_floating_point_only(last: str, tmp_path: Path, run: Run) -> None:
    for suffix in ("ckpt", "safetensors"):
        target = str(tmp_path / f"half.{suffix}")
        assert run("convert", last, target, "--dtype", "bfloat16")[0] == 0
        weights = read_checkpoint(target)
        weights = weights.get("state_dict", weights)
        dtypes = {key.rpartition(".")[2]: value.dtype for key, value in weights.items()}
        assert dtypes["weight"] == torch.bfloat16
        assert dtypes["num_batches_tracked"] == torch.int64


def test_convert_gives_the_names_of_another_file(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    torch.save(net.state_dict(), tmp_path / "plain.pt")
    target = str(tmp_path / "a.pt")
    assert run("convert", last, target, "--like", str(tmp_path / "plain.pt"), "--weights")[0] == 0
    assert list(torch.load(target)) == list(net.state_dict())
    torch.save({"other": torch.ones(1)}, tmp_path / "other.pt")
    code, _, err = run("convert", last, target, "--like", str(tmp_path / "other.pt"), "--force")
    assert code == 1
    assert "does not fit" in err
    assert list(torch.load(target)) == list(net.state_dict())


def test_convert_adds_a_root(net: Tied, tmp_path: Path, run: Run) -> None:
    torch.save(net.state_dict(), tmp_path / "a.pt")
    run("convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--add-root", "net")
    assert list(torch.load(tmp_path / "b.pt")) == [f"net.{key}" for key in net.state_dict()]


def test_convert_refuses_what_it_cannot_do(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    Path(tmp_path / "there.ckpt").write_text("mine")
    for arguments, words in (
        ((last, str(tmp_path / "there.ckpt")), "exists. --force replaces it"),
        ((last, str(tmp_path / "a.ckpt"), "--drop-root", "net"), "no key begins with 'net.'"),
        ((last, str(tmp_path / "a.ckpt"), "--entry", "ema"), "no weights called 'ema'; it has state_dict"),
        ((str(tmp_path / "gone.ckpt"), str(tmp_path / "a.ckpt")), "no checkpoint at"),
    ):
        code, out, err = run("convert", *arguments)
        assert (code, out) == (1, "")
        assert words in err
    assert Path(tmp_path / "there.ckpt").read_text() == "mine"
    torch.save({"a": net.state_dict(), "b": net.state_dict()}, tmp_path / "two.pt")
    two = str(tmp_path / "two.pt")
    for arguments in (("convert", two, str(tmp_path / "c.pt")), ("diff", last, two)):
        err = run(*arguments)[2]
        assert "holds several sets of weights: a, b" in err
        assert "Choose one with --entry NAME" in err
    assert run("diff", two, two, "--entry", "b")[0] == 0
    torch.save(OrderedDict(w=torch.ones(2), _extra_state={"a": 1}), tmp_path / "extra.pt")
    code, _, err = run("convert", str(tmp_path / "extra.pt"), str(tmp_path / "c.safetensors"))
    assert "safetensors holds plain tensors only, not _extra_state" in err
    assert not (tmp_path / "c.safetensors").exists()


@pytest.fixture
def memory_files() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.usefixtures("memory_files")
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_every_action_takes_a_url(
    name: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    url = f"memory://b/{name}"
    monkeypatch.chdir(tmp_path)
    assert run("convert", last, url)[0] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    before = MemoryFileSystem.store[f"/b/{name}"].getvalue()
    code, _, err = run("convert", last, url, "--add-root", "x")
    assert (code, f"{url} exists. --force replaces it" in err) == (1, True)
    assert MemoryFileSystem.store[f"/b/{name}"].getvalue() == before
    assert run("inspect", url)[1].startswith(f"{url}: ")
    assert json.loads(run("verify", url, "--json")[1])["path"] == url
    assert run("diff", last, url)[0] == 0
    assert "no checkpoint at memory://b/gone" in run("inspect", "memory://b/gone")[2]


def test_convert_writes_through_a_link(last: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "real.pt", tmp_path / "link.pt"
    link.symlink_to("disk/real.pt")
    assert "link to" in run("convert", last, str(link))[1]  # its file is not there yet
    first = real.read_bytes()
    assert "exists" in run("convert", last, str(link))[2]
    assert run("convert", last, str(link), "--add-root", "net", "--force")[0] == 0
    assert link.is_symlink()
    assert os.readlink(link) == "disk/real.pt"
    assert real.read_bytes() != first
    assert next(iter(torch.load(link)["state_dict"])).startswith("net.")
    assert os.listdir(tmp_path / "disk") == ["real.pt"]


def test_convert_renames_all_that_goes_by_the_models_names(net: Tied, tmp_path: Path, run: Run) -> None:
    raw, average = wrapped(net), wrapped(Tied())
    name = "model.module._orig_mod.norm.bias"
    optimizer = {"state": {name: {"step": 1}}, "param_groups": [{"params": [name]}]}
    content = lightning_checkpoint(average, current_model_state=raw, optimizer_states=[optimizer])
    write_checkpoint(content, tmp_path / "ema.ckpt")
    source, target = str(tmp_path / "ema.ckpt"), str(tmp_path / "a.ckpt")
    for entry in ((), ("--entry", "current_model_state")):
        assert run("convert", source, target, "--wrapper", "model", "--force", "--dtype", "bfloat16", *entry)[0] == 0
        stored = torch.load(target)
        for state, expected in (("current_model_state", raw), ("state_dict", average)):
            assert list(stored[state]) == [f"model.{key}" for key in net.state_dict()]
            values = zip(stored[state].values(), expected.values(), strict=True)
            assert all(torch.equal(a, b.to(a.dtype)) for a, b in values)
        assert stored["optimizer_states"][0]["param_groups"][0]["params"] == ["model.norm.bias"]
        assert list(stored["optimizer_states"][0]["state"]) == ["model.norm.bias"]
    tensors = str(tmp_path / "raw.pt")
    assert run("convert", source, tensors, "--weights", "--entry", "current_model_state")[0] == 0
    assert torch.equal(torch.load(tensors)["model.module.norm.bias"], raw[name])


def test_converted_weights_stay_tied_and_take_nothing_along(tmp_path: Path, run: Run) -> None:
    big = torch.randn(100_000)
    torch.save({"model.e": big, "model.h": big, "model.part": big[:10]}, tmp_path / "a.pt")
    for suffix in ("pt", "safetensors"):
        target = tmp_path / f"half.{suffix}"
        assert run("convert", str(tmp_path / "a.pt"), str(target), "--dtype", "float16")[0] == 0
        assert 200_000 < target.stat().st_size < 205_000
    half = torch.load(tmp_path / "half.pt")
    assert half["model.e"].data_ptr() == half["model.h"].data_ptr()
    torch.save({"model.part": big[:10], "rest": big}, tmp_path / "b.pt")
    run("convert", str(tmp_path / "b.pt"), str(tmp_path / "part.pt"), "--drop-root", "model")
    assert torch.equal(torch.load(tmp_path / "part.pt")["part"], big[:10])
    assert (tmp_path / "part.pt").stat().st_size < 5000


def test_convert_refuses_a_dtype_in_which_weights_would_become_infinite(tmp_path: Path, run: Run) -> None:
    torch.save({"norm.running_var": torch.tensor([1e5, float("inf")]), "w": torch.ones(1)}, tmp_path / "a.pt")
    arguments = ("convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--dtype")
    code, _, err = run(*arguments, "float16")
    assert (code, (tmp_path / "b.pt").exists()) == (1, False)
    assert "values of norm.running_var are beyond the range of torch.float16" in err
    assert run(*arguments, "bfloat16")[0] == 0


def test_tensors_of_any_make_are_compared_and_converted_or_refused(tmp_path: Path, run: Run) -> None:
    path, target = str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors")
    conjugate = torch.tensor([1 + 2j]).conj()
    torch.save({"sparse": torch.eye(3).to_sparse(), "conjugate": conjugate}, path)
    assert run("diff", path, path)[0] == 0
    torch.save({"a": conjugate, "b": conjugate.conj()}, path)
    assert run("diff", path, path)[0] == 0
    assert run("convert", path, target)[0] == 0
    assert {key: value.tolist() for key, value in read_checkpoint(target).items()} == {"a": [1 - 2j], "b": [1 + 2j]}
    torch.save({"nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, path)
    assert run("diff", path, path)[0] == 0
    assert "holds plain tensors only, not nested" in run("convert", path, target, "--force")[2]


@given(data=st.data())
def test_diff_tells_any_two_values_apart(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    from lightning_gpu_tools.checkpoints.compare import compare

    def quantized(numbers: list[int]) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.tensor(numbers, dtype=torch.float32), 1.0, 0, torch.qint8)

    # Longer than what repr() prints of a tensor, and closer than what it prints of a number.
    spot = st.integers(0, 4095)
    tensor = st.one_of(
        st.builds(lambda at: torch.arange(4096) == at, spot),
        st.builds(lambda at: torch.tensor(1 + at * 1e-6, dtype=torch.float64), spot),
        st.builds(lambda at: torch.tensor(2**62 + at), spot),
        st.builds(lambda at: torch.eye(4096)[at].to_sparse(), spot),
        st.builds(lambda at: quantized([at % 100] * 2000), spot),
    )
    value = st.recursive(
        st.one_of(tensor, st.integers(), st.floats(), st.text(), st.booleans(), st.none()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
        max_leaves=4,
    )
    one, two = data.draw(value), data.draw(value)
    folder = tmp_path_factory.getbasetemp()
    for name, state in (("one", one), ("two", two)):
        torch.save(OrderedDict(w=torch.ones(1), _extra_state=state), folder / f"{name}.pt")
    assert compare(str(folder / "one.pt"), str(folder / "one.pt")).is_same
    assert compare(str(folder / "one.pt"), str(folder / "two.pt")).is_same == (canonical(one) == canonical(two))


def canonical(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.dequantize() if value.is_quantized else value.to_dense()
        return (str(value.dtype), tuple(value.shape), str(dense.tolist()))
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    return [*map(canonical, value)] if isinstance(value, list) else (type(value), repr(value))


def test_diff_sees_keys_shapes_dtypes_and_values(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    other = str(tmp_path / "other.pt")
    weights = net.state_dict()
    torch.save(weights, other)
    code, out, _ = run("diff", last, other)
    assert code == 0
    assert "13 weights are the same" in out
    assert 'names of the first: removed "_orig_mod." from 13 keys, removed "model."' in out
    weights = {key: value.clone() for key, value in weights.items()}
    weights["layers.0.weight"][1, 1] += 0.5
    weights["layers.1.weight"][0, 0] = float("nan")
    weights["layers.2.bias"] = torch.ones(7)
    weights["norm.weight"] = weights["norm.weight"].half()
    weights["extra"] = weights.pop("norm.bias")
    torch.save(weights, other)
    code, out, _ = run("diff", last, other)
    assert code == 1
    assert "only in the first: model.module._orig_mod.norm.bias" in out
    assert "only in the second: extra" in out
    found = json.loads(run("diff", last, other, "--json")[1])
    seen = {(d["key"], d["what"]): d for d in found["differences"]}
    assert seen["layers.0.weight", "values"]["largest"] == pytest.approx(0.5)
    assert seen["layers.0.weight", "values"]["share"] == 1 / 16
    assert seen["layers.1.weight", "values"]["largest"] is None
    assert seen["layers.2.bias", "shape"]["detail"] == "4 and 7"
    assert seen["norm.weight", "dtype"]["detail"] == "float32 and float16"
    assert len(seen) == 4
    assert found["same"] == 8


def test_an_unexpected_error_is_one_line_and_no_answer(
    last: str, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('a broken\\x1b installation')")
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    for action in ("diff", "convert"):
        answer = run_python(
            *("-m", "lightning_gpu_tools", "checkpoint", action, last, str(tmp_path / "b.pt")), env={"PYTHONPATH": path}
        )
        assert (answer.returncode, answer.stdout) == (70, "")
        assert re.fullmatch(
            r"lightning-gpu-tools \S+ stopped on an unexpected error. Please report this line with the command: "
            r"RuntimeError: a broken\\x1b installation \(.*checkpoint.py:\d+ .*> __init__.py:1\)\n",
            answer.stderr,
        )


def test_diff_exits_3_where_there_is_nothing_to_compare(last: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty.ckpt").touch()
    code, out, err = run("diff", last, str(tmp_path / "empty.ckpt"))
    assert (code, out) == (3, "")
    assert "is empty" in err
    torch.save({"elsewhere": torch.ones(1)}, tmp_path / "other.pt")
    code, out, _ = run("diff", last, str(tmp_path / "other.pt"))
    assert code == 1
    assert "0 weights are the same" in out


def test_long_files_show_their_progress_on_a_terminal(tmp_path: Path) -> None:
    import pty

    path = tmp_path / "long.ckpt"
    write_checkpoint({"state_dict": OrderedDict(w=torch.zeros(70 << 20))}, path)  # 280 MiB
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "lightning_gpu_tools", "checkpoint", "verify", str(path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux's way of saying that the other end is closed
            break
        if not part:
            break
        shown += part
    out, _ = child.communicate()
    assert child.returncode == 0
    assert b"verifying" in shown
    assert b"all checksums are right" in out
    path.unlink()


@pytest.mark.parametrize("action", ["inspect", "verify", "convert", "diff"])
def test_help_documents_the_exit_codes(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", action, "--help"])
    assert caught.value.code == 0
    assert "Exit code: 0" in " ".join(capsys.readouterr().out.split())
