"""``checkpoint inspect | verify`` as a user runs them; exit codes, URLs and progress of every action."""

import json
import os
import re
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_files import Tied, lightning_checkpoint
from fsspec.implementations.memory import MemoryFileSystem

from lightning_gpu_tools.checkpoints.torch_files import write_checkpoint
from lightning_gpu_tools.cli import main

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
        "kind": None,
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
    assert re.search(r"checksum of the record data/\d+ is wrong", err)  # torch numbers them in its own way


def test_verify_says_where_there_are_no_checksums(net: Tied, tmp_path: Path, run: Run) -> None:
    torch.save(net.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    code, out, _ = run("verify", str(tmp_path / "old.pt"))
    assert code == 0
    assert "no checksums" in out


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
