"""The plugin in real Trainers: the keys it saves and loads, at every call site."""

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
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

from lightning_gpu_tools.errors import CheckpointMismatchError
from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO


@pytest.mark.parametrize(
    "in_thread",
    [False, pytest.param(True, marks=saves_after_a_fit)],
)
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
        assert average is not None
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
