"""The plugin in real Trainers: files of every kind and place, inner plugins, several processes."""

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import described_by, storage, tensor
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from plugin_trainings import Lit, make_net, no_tracing, same, saves_after_a_fit, trained, trainer, weights  # noqa: F401 - a fixture

from lightning_gpu_tools import load_from_checkpoint, load_weights
from lightning_gpu_tools.checkpoints import reading
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO


def test_broken_missing_and_unsafe_files_are_told_apart(tmp_path: Path) -> None:
    run, _ = trained(tmp_path)
    data = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(data[:-500])
    torch.save([1, 2], tmp_path / "list.ckpt")
    torch.save({**torch.load(tmp_path / "a.ckpt"), "where": tmp_path}, tmp_path / "path.ckpt")
    with pytest.raises(BrokenCheckpointError, match="is cut short"):
        run.test(Lit(), ckpt_path=tmp_path / "cut.ckpt")
    with pytest.raises(BrokenCheckpointError, match="holds no weights within two dictionaries, only a list"):
        run.test(Lit(), ckpt_path=tmp_path / "list.ckpt")
    with pytest.raises(FileNotFoundError) as lightnings:
        TorchCheckpointIO().load_checkpoint(tmp_path / "gone.ckpt")
    with pytest.raises(CheckpointNotFoundError, match=re.escape(str(lightnings.value))):
        run.test(Lit(), ckpt_path=tmp_path / "gone.ckpt")
    for plugin in (None, PortableCheckpointIO(TorchCheckpointIO())):  # which runs a file's code on Lightning 2.5
        with pytest.raises(UnsafeCheckpointError, match=r"pathlib\.PosixPath"):
            trainer(tmp_path, plugin).test(Lit(), ckpt_path=tmp_path / "path.ckpt")


class Configured(Lit):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.follows("If you trust its author and have Lightning 2.6, open all of it, which may run ")
@pytest.mark.skipif("weights_only" not in inspect.signature(Trainer.fit).parameters, reason="Lightning 2.6 added it")
def test_settings_of_omegaconf_are_opened_as_the_error_says(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    settings = omegaconf.OmegaConf.create({"width": 4, "layers": [1, {"name": "x"}]})
    run = trainer(tmp_path)
    run.fit(source := Configured(settings))
    run.save_checkpoint(path := tmp_path / "a.ckpt")
    again, model = trainer(tmp_path, epochs=1), Configured(settings)
    with pytest.raises(UnsafeCheckpointError, match=r"omegaconf\.dictconfig\.DictConfig") as refusal:
        again.fit(model, ckpt_path=path)
    call = str(refusal.value).rpartition("which may run code: ")[2]
    assert call.startswith("trainer.fit(")
    eval(call, {"trainer": again, "model": model})
    assert same(source, model)


@pytest.mark.follows("A Trainer does not take these arguments. Call ")
def test_arguments_that_a_trainer_lacks_are_passed_to_load_weights(tmp_path: Path) -> None:
    net = make_net()
    torch.save({"teacher": net.state_dict(), "student": make_net().state_dict()}, tmp_path / "two.pt")
    torch.save({**net.state_dict(), "other": torch.ones(1)}, tmp_path / "more.pt")
    for name in ("two.pt", "more.pt"):
        model = Lit(seed=1)
        with pytest.raises(CheckpointError) as refusal:
            trainer(tmp_path).test(model, ckpt_path=tmp_path / name)
        argument = re.search(r'root="teacher"|strict=False', str(refusal.value))
        call = re.search(r"Call lightning_gpu_tools\.(load_weights\(.*), \.\.\.\)", str(refusal.value))
        assert argument is not None
        assert call is not None
        eval(f"{call[1]}, {argument[0]})", {"load_weights": load_weights, "model": model})
        trainer(tmp_path).test(model, verbose=False)
        assert same(net, model)


# Torch before 2.10 reads beyond the record (CVE-2026-24747).
CRAFTED = tensor(storage(5))


def test_no_way_to_load_leads_past_the_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, match = tmp_path / "a.bin", "its description and its contents do not match"
    path.write_bytes(described_by(CRAFTED))
    (tmp_path / "a.bin.index.json").write_text('{"weight_map": {"w": "a.bin"}}')
    plugins = [
        PortableCheckpointIO(),
        PortableCheckpointIO(TorchCheckpointIO()),
        PortableCheckpointIO(AsyncCheckpointIO(TorchCheckpointIO())),
        AsyncCheckpointIO(PortableCheckpointIO()),
    ]
    ways: list[Callable[..., Any]] = [
        *(functools.partial(plugin.load_checkpoint, path) for plugin in plugins),
        functools.partial(load_weights, Lit(), path),
        functools.partial(load_weights, Lit(), tmp_path),
        functools.partial(load_from_checkpoint, Lit, path),
    ]
    for load in [*ways, *(functools.partial(way, weights_only=False) for way in ways)]:
        with pytest.raises(BrokenCheckpointError, match=match):
            load()
    with pytest.raises(BrokenCheckpointError, match=match):
        trainer(tmp_path).fit(Lit(), ckpt_path=path)
    for command in ("inspect", "verify", "convert"):
        second = [str(tmp_path / "b.pt")] if command == "convert" else []
        assert main(["checkpoint", command, str(path), *second]) == 1
        assert match in capsys.readouterr().err


@pytest.mark.follows("has known vulnerabilities in weights_only=True")
def test_a_torch_with_known_holes_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    torch.save({"lr": 1}, tmp_path / "a.ckpt")

    def warnings(version: str) -> list[str]:
        monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
        reading._warn_of_old_torch.cache_clear()
        recwarn.clear()
        for _ in range(2):
            PortableCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
        return [str(one.message) for one in recwarn if "CVE-2026-24747" in str(one.message)]

    (words,) = warnings("2.9.1+cu126")
    advised = re.search(r"please update to torch (\S+) or later", words)
    assert not warnings(advised[1])  # type: ignore[index]


def test_verify_finds_what_loading_alone_does_not(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    _, source = trained(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(weights(source)[0].detach().numpy().tobytes())] ^= 1
    path.write_bytes(data)
    trainer(tmp_path).test(Lit(), ckpt_path=path, verbose=False)
    for plugin in (PortableCheckpointIO(verify=True), PortableCheckpointIO(TorchCheckpointIO(), verify=True)):
        with pytest.raises(BrokenCheckpointError, match="checksum of the record data/0"):
            trainer(tmp_path, plugin).test(Lit(), ckpt_path=path)


def test_an_inner_plugin_does_the_files_and_is_torn_down(tmp_path: Path) -> None:
    class Inner(TorchCheckpointIO):
        calls: list[str] = []  # noqa: RUF012 - the test's record

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            self.calls.append(f"save {storage_options}")
            super().save_checkpoint(checkpoint, path)

        def remove_checkpoint(self, path: Any) -> None:
            self.calls.append("remove")
            super().remove_checkpoint(path)

        def teardown(self) -> None:
            self.calls.append("teardown")

    run = trainer(tmp_path, PortableCheckpointIO(Inner()))
    source = Lit("compile")
    run.fit(source)
    path = tmp_path / "a.ckpt"
    run.save_checkpoint(path, storage_options={"a": 1})
    with pytest.raises(TypeError, match="does not support storage_options, got"):
        PortableCheckpointIO().save_checkpoint({}, path, storage_options={"a": 1})
    assert next(iter(torch.load(path)["state_dict"])) == "net.0.weight"
    run.test(target := Lit("DataParallel", seed=1), ckpt_path=path, verbose=False)
    assert same(source, target)
    run.strategy.remove_checkpoint(path)
    assert not path.exists()
    assert Inner.calls == ["teardown", "save {'a': 1}", "teardown", "remove"]


def test_remote_files_are_written_whole_or_not_at_all(
    memory_files: type[MemoryFileSystem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Lit("compile")
    run = trainer(tmp_path, callbacks=[ModelCheckpoint("memory://bucket/run", save_last=True)])
    run.fit(source)
    assert sorted(memory_files.store) == ["/bucket/run/epoch=0-step=4.ckpt", "/bucket/run/last.ckpt"]
    target = Lit("DataParallel", seed=1)
    trainer(tmp_path).test(target, ckpt_path="memory://bucket/run/last.ckpt", verbose=False)
    assert same(source, target)

    def breaks_off(self: MemoryFileSystem, source: str, target: str, **options: Any) -> None:
        self.pipe_file(target, Path(source).read_bytes()[:100])
        raise ConnectionResetError(104, "Connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", breaks_off)
        with pytest.raises(OSError, match=r"Connection reset by peer, while uploading.*last\.ckpt"):
            run.save_checkpoint("memory://bucket/run/last.ckpt")
    assert sorted(memory_files.store)[-1] == "/bucket/run/last.ckpt"
    PortableCheckpointIO(verify=True).load_checkpoint("memory://bucket/run/last.ckpt")
    run.strategy.remove_checkpoint("memory://bucket/run/last.ckpt")
    assert "/bucket/run/last.ckpt" not in memory_files.store


def test_resuming_survives_that_the_file_is_written_over(tmp_path: Path) -> None:
    # Optimizers keep the tensors they are given. Were those pages of the file, writing over it would change them.
    path = tmp_path / "a.ckpt"
    trained(tmp_path)
    loaded = PortableCheckpointIO().load_checkpoint(path)
    state = loaded["optimizer_states"][0]["state"][0]["exp_avg"]
    before = state.clone()
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
    assert torch.equal(state, before)
