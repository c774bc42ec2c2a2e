"""The plugin in real Trainers: the keys it saves and loads at every call site; files of every kind and place."""

import functools
import gc
import inspect
import os
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from advised import code_in
from checkpoint_files import described_by, storage, tensor
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from plugin_trainings import (  # noqa: F401 - a fixture
    WRAPPINGS,
    Lit,
    make_net,
    no_tracing,
    same,
    saves_after_a_fit,
    trained,
    trainer,
    weights,
)
from torch import nn
from wrapped_models import compiled

from lightning_gpu_tools import load_from_checkpoint, load_weights
from lightning_gpu_tools.checkpoints import reading
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO


@pytest.mark.parametrize("in_thread", [False, pytest.param(True, marks=saves_after_a_fit)])
def test_the_file_has_clean_keys_and_any_wrapping_loads_it(in_thread: bool, tmp_path: Path) -> None:
    plugin, path = PortableCheckpointIO(), tmp_path / "a.ckpt"
    run, source = trained(tmp_path, "compile(DataParallel)", AsyncCheckpointIO(plugin) if in_thread else plugin)
    run.strategy.checkpoint_io.teardown()
    stored = torch.load(path)  # as any other program would
    expected = [f"net.{key}" for key in make_net().state_dict()]
    assert list(stored["state_dict"]) == expected
    for loaded_as in WRAPPINGS:
        target = Lit(loaded_as, seed=1)
        trainer(tmp_path).test(target, ckpt_path=path, verbose=False)
        assert same(source, target), loaded_as
    assert same(source, Lit.load_from_checkpoint(path))  # Lightning's own


def test_every_entry_point_of_the_trainer_loads_through_the_plugin(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", monitor="loss", save_top_k=1, save_last="link")
    run, source = trained(tmp_path, "compile", epochs=3, callbacks=[keeper])
    # One file is left of three, and the link shows it: removals and links went through the plugin's files.
    last = tmp_path / "kept" / "last.ckpt"
    assert sorted(last.parent.iterdir()) == [Path(keeper.best_model_path), last]
    assert last.is_symlink()
    best = torch.load(keeper.best_model_path)["state_dict"]["net.0.weight"]
    for path in ("best", "last", keeper.best_model_path, f"file://{keeper.best_model_path}"):
        for act in (run.validate, run.test, run.predict):
            with torch.no_grad():
                weights(source)[0].zero_()
            act(source, ckpt_path=path)  # type: ignore[operator]
            assert torch.equal(weights(source)[0], best), (path, act)
    run.fit_loop.max_epochs = 4
    run.fit(source, ckpt_path="last")
    assert run.current_epoch == 4


def test_ema_weights_and_the_raw_ones_are_both_renamed(tmp_path: Path) -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning 2.6 added it")
    source = Lit("compile")
    run = trainer(tmp_path, epochs=2, callbacks=[averaging.EMAWeightAveraging(decay=0.5)])
    path = tmp_path / "ema.ckpt"

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(path)

    run.callbacks.append(Save())
    run.fit(source)
    stored = torch.load(path)
    assert list(stored["current_model_state"]) == list(stored["state_dict"])
    assert not any("_orig_mod" in key for key in stored["state_dict"])
    assert not torch.equal(stored["current_model_state"]["net.0.weight"], stored["state_dict"]["net.0.weight"])
    for wrapping in WRAPPINGS:
        target = Lit(wrapping, seed=1)
        ema = averaging.EMAWeightAveraging(decay=0.5)
        resumed = trainer(tmp_path, epochs=2, callbacks=[ema])
        resumed.fit(target, ckpt_path=path)
        average = ema._average_model
        expected = stored["state_dict"]["net.0.weight"]
        assert torch.equal(next(average.module.parameters()), expected), wrapping


def test_dictionaries_that_are_no_trainers_come_back_as_they_were(tmp_path: Path) -> None:
    plugin = PortableCheckpointIO()
    trainer(tmp_path, plugin).fit(Lit("DataParallel"))  # it knows a model with wrappers now
    bare = nn.DataParallel(compiled(make_net())).state_dict()
    for content in (bare, {"model": bare, "step": 3, "module._orig_mod.x": [1, {"module.a": None}]}, {}):
        plugin.save_checkpoint(content, tmp_path / "a.ckpt")
        back = plugin.load_checkpoint(tmp_path / "a.ckpt")
        assert list(back) == list(content)
        assert pickle.dumps([*back], 2) == pickle.dumps([*content], 2)
        model = back.get("model", back)
        assert all(torch.equal(model[key], bare[key]) for key in bare if key in model)
        assert getattr(model, "_metadata", None) == (bare._metadata if model else None)


def test_optimizer_states_by_name_are_renamed_both_ways(tmp_path: Path) -> None:
    plugin = PortableCheckpointIO()
    run, model = trained(tmp_path, "compile", plugin)
    names = [name for name, _ in model.named_parameters()]
    by_name = {"state": {name: {"step": 1} for name in names}, "param_groups": [{"lr": 1, "params": names}]}
    by_number = {"state": {0: {"step": 1}}, "param_groups": [{"lr": 1, "params": [0]}]}
    checkpoint = {**run._checkpoint_connector.dump_checkpoint(), "optimizer_states": [by_name, by_number]}
    plugin.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt")["optimizer_states"]
    assert list(stored[0]["state"]) == stored[0]["param_groups"][0]["params"]
    assert stored[0]["param_groups"][0]["params"][0] == "net.0.weight"
    assert stored[1] == by_number
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["optimizer_states"] == [by_name, by_number]


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    trained(tmp_path)

    class Wider(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    with pytest.raises(CheckpointMismatchError, match=r"a\.ckpt does not fit Wider\. 9 of the model's 11 keys fit"):
        trainer(tmp_path).test(Wider(), ckpt_path=tmp_path / "a.ckpt")

    class Fixer(Wider):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].update({f"extra.{k}": v for k, v in self.extra.state_dict().items()})

    trainer(tmp_path).test(Fixer(), ckpt_path=tmp_path / "a.ckpt", verbose=False)

    class Partial(Wider):
        strict_loading = False  # type: ignore[assignment]

    trainer(tmp_path).test(Partial(), ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_the_plugin_keeps_no_trainer_alive_and_can_be_pickled(tmp_path: Path) -> None:
    plugin = PortableCheckpointIO(TorchCheckpointIO(), verify=True)
    run, model = trained(tmp_path, plugin=plugin)
    twin = pickle.loads(pickle.dumps(plugin))
    assert twin.verify
    assert isinstance(twin.inner, TorchCheckpointIO)
    assert plugin._model() is model
    assert twin._model() is None
    watch = weakref.ref(run)
    del run, model
    gc.collect()
    assert watch() is None


def test_wrapped_keys_are_never_stored_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    run = trainer(tmp_path)
    run.fit(Lit("DataParallel"))
    with pytest.warns(UserWarning, match="keep the prefixes of wrappers: no Trainer that has begun a run"):
        run.save_checkpoint(tmp_path / "a.ckpt")


# Files of every kind and place


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
        argument = code_in(str(refusal.value), r'root="teacher"|strict=False')
        call = code_in(str(refusal.value), r"Call lightning_gpu_tools\.(load_weights\(.*), \.\.\.\)")
        eval(f"{call}, {argument})", {"load_weights": load_weights, "model": model})
        trainer(tmp_path).test(model, verbose=False)
        assert same(net, model)


def test_no_way_to_load_leads_past_the_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, match = tmp_path / "a.bin", "its description and its contents do not match"
    path.write_bytes(described_by(tensor(storage(5))))  # torch before 2.10 reads beyond it (CVE-2026-24747)
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
    assert not warnings(code_in(words, r"please update to torch (\S+) or later"))


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
