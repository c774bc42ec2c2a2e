"""The plugin in real Trainers: every call site that reads or writes a checkpoint."""

import copy
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

import lightning_gpu_tools
from lightning_gpu_tools.checkpoints.torch_files import write_checkpoint
from lightning_gpu_tools.errors import (
    BrokenCheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from lightning_gpu_tools.trainer.checkpoint_plugin import MANIFEST, PortableCheckpointIO


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "DataParallel": nn.DataParallel,
    "compiled": compiled,
    "DataParallel(compiled)": lambda net: nn.DataParallel(compiled(net)),
}


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Lit(LightningModule):
    def __init__(self, wrapping: str = "plain", seed: int = 0, batch_size: int = 4, lr: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = WRAPPINGS[wrapping](make_net())
        self.batch_size, self.lr = batch_size, lr

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.net(batch) - batch[:, :2]).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(3)), batch_size=batch_size)  # type: ignore[arg-type]


def trainer(folder: Path, plugin: Any = None, *, epochs: int = 1, **options: Any) -> Trainer:
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", ()))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        plugins=[PortableCheckpointIO() if plugin is None else plugin],
        **{**quiet, "enable_checkpointing": keeps, **options},
    )


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.fixture(autouse=True)
def no_tracing() -> Iterator[None]:
    """Compiled modules run as they are: their names are what is tested here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def memory_files() -> Iterator[type[MemoryFileSystem]]:
    yield MemoryFileSystem
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("saved_as", "in_thread"), [*((name, False) for name in WRAPPINGS), ("DataParallel(compiled)", True)]
)
def test_the_file_has_clean_keys_and_any_wrapping_loads_it(saved_as: str, in_thread: bool, tmp_path: Path) -> None:
    plugin = PortableCheckpointIO()
    run = trainer(tmp_path, AsyncCheckpointIO(plugin) if in_thread else plugin)
    source = Lit(saved_as)
    run.fit(source)
    path = tmp_path / "a.ckpt"
    run.save_checkpoint(path)
    run.strategy.checkpoint_io.teardown()
    stored = torch.load(path)  # as any other program would
    expected = [f"net.{key}" for key in make_net().state_dict()]
    assert list(stored["state_dict"]) == expected
    assert stored["state_dict"]._metadata["net.1"] == {"version": 2}
    assert set(stored["state_dict"]._metadata) == {"", "net", "net.0", "net.1", "net.2", "net.3"}
    manifest = stored[MANIFEST]
    assert manifest["wrappers"] == ({"net": "DataParallel"} if "DataParallel" in saved_as else {})
    assert manifest["devices"] == ["cpu"]
    assert manifest["torch"] == torch.__version__
    for loaded_as in WRAPPINGS:
        target = Lit(loaded_as, seed=1)
        trainer(tmp_path).test(target, ckpt_path=path, verbose=False)
        assert same(source, target), loaded_as


def test_vanilla_lightning_reads_the_file(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    source = Lit("DataParallel")
    run.fit(source)
    run.save_checkpoint(tmp_path / "a.ckpt")
    target = Lit(seed=1)
    trainer(tmp_path, TorchCheckpointIO(), epochs=2).fit(target, ckpt_path=tmp_path / "a.ckpt")
    assert same(source, Lit.load_from_checkpoint(tmp_path / "a.ckpt"))


def test_every_entry_point_of_the_trainer_loads_through_the_plugin(tmp_path: Path) -> None:
    source = Lit("compiled")
    keeper = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="loss", save_top_k=1, save_last="link")
    run = trainer(tmp_path, epochs=3, callbacks=[keeper])
    run.fit(source)
    # One file is left of three, and the link shows it: removals and links went through the plugin's files.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [Path(keeper.best_model_path).name, "last.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink()
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


@pytest.mark.parametrize("wrapping", ["plain", "DataParallel(compiled)"])
def test_resuming_is_bitwise_the_same_as_not_having_stopped(wrapping: str, tmp_path: Path) -> None:
    straight = Lit(wrapping)
    trainer(tmp_path, epochs=4).fit(straight)
    first = Lit(wrapping)
    run = trainer(tmp_path, epochs=2)
    run.fit(first)
    run.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Lit(wrapping, seed=9)
    again = trainer(tmp_path, epochs=4)
    again.fit(resumed, ckpt_path=tmp_path / "half.ckpt")
    assert same(straight, resumed)
    assert not same(straight, first)
    whole = trainer(tmp_path, epochs=4)
    whole.fit(Lit(wrapping))
    mine, theirs = (run.optimizers[0].state_dict()["state"] for run in (again, whole))
    assert all(torch.equal(mine[i][name], theirs[i][name]) for i in theirs for name in theirs[i])


def test_resuming_survives_that_the_file_is_written_over(tmp_path: Path) -> None:
    # Optimizers keep the tensors they are given. Were those pages of the file, writing over it would change them.
    source, path = Lit(), tmp_path / "a.ckpt"
    run = trainer(tmp_path)
    run.fit(source)
    run.save_checkpoint(path)
    loaded = PortableCheckpointIO().load_checkpoint(path)
    state = loaded["optimizer_states"][0]["state"][0]["exp_avg"]
    before = state.clone()
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))
    assert torch.equal(state, before)


def test_ema_weights_and_the_raw_ones_are_both_renamed(tmp_path: Path) -> None:
    source = Lit("compiled")
    run = trainer(tmp_path, epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)])
    path = tmp_path / "ema.ckpt"

    class Save(lightning_callback()):  # type: ignore[misc]
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
        ema = EMAWeightAveraging(decay=0.5)
        resumed = trainer(tmp_path, epochs=2, callbacks=[ema])
        resumed.fit(target, ckpt_path=path)
        average = ema._average_model
        assert average is not None
        expected = stored["state_dict"]["net.0.weight"]
        assert torch.equal(next(average.module.parameters()), expected), wrapping


def lightning_callback() -> type:
    from lightning.pytorch import Callback

    return Callback


def test_tuners_restore_exactly_what_they_saved(tmp_path: Path) -> None:
    finders = [BatchSizeFinder(max_trials=2, steps_per_trial=2), LearningRateFinder(num_training_steps=5)]
    states = []
    for plugin in (PortableCheckpointIO(), TorchCheckpointIO()):
        model = Lit("DataParallel")
        run = trainer(tmp_path, plugin, callbacks=copy.deepcopy(finders))
        run.fit(model)
        states.append((model, model.batch_size))
    assert states[0][1] == states[1][1]
    assert same(states[0][0], states[1][0])
    assert not list(tmp_path.glob(".*"))


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


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_fabric_saves_and_loads_through_the_plugin(wrapping: str, tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", plugins=[PortableCheckpointIO()])
    net = WRAPPINGS[wrapping](make_net())
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    fabric.save(tmp_path / "a.ckpt", {"model": net, "optimizer": optimizer, "step": 7})
    other = WRAPPINGS[wrapping](make_net())
    second = torch.optim.Adam(other.parameters())
    rest = fabric.load(tmp_path / "a.ckpt", {"model": other, "optimizer": second})
    assert rest["step"] == 7
    assert same(net, other)
    assert torch.equal(second.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_saving_does_not_change_what_it_is_given(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(Lit("DataParallel"))
    checkpoint = run._checkpoint_connector.dump_checkpoint()
    before, keys = dict(checkpoint), list(checkpoint["state_dict"])
    run.strategy.checkpoint_io.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert checkpoint == before
    assert list(checkpoint["state_dict"]) == keys
    assert keys[0] == "net.module.0.weight"


def test_optimizer_states_by_name_are_renamed_both_ways(tmp_path: Path) -> None:
    plugin = PortableCheckpointIO()
    run = trainer(tmp_path, plugin)
    model = Lit("compiled")
    run.fit(model)
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


def test_bare_weights_and_safetensors_can_be_tested_too(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    net = make_net()
    torch.save(net.state_dict(), tmp_path / "bare.pt")
    torch.save({"model": nn.DataParallel(net).state_dict(), "epoch": 3}, tmp_path / "nested.pt")
    save_file(net.state_dict(), tmp_path / "a.safetensors")
    for name in ("bare.pt", "nested.pt", "a.safetensors"):
        target = Lit("DataParallel", seed=1)
        trainer(tmp_path).test(target, ckpt_path=tmp_path / name, verbose=False)
        assert same(net, target), name
    torch.save({"model": net.state_dict(), "ema": net.state_dict()}, tmp_path / "two.pt")
    with pytest.raises(BrokenCheckpointError, match=r"several sets of weights: model, ema.*load_weights"):
        trainer(tmp_path).test(Lit(), ckpt_path=tmp_path / "two.pt")


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(Lit())
    run.save_checkpoint(tmp_path / "a.ckpt")

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


def test_broken_missing_and_unsafe_files_are_told_apart(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(Lit())
    run.save_checkpoint(tmp_path / "a.ckpt")
    data = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(data[:-500])
    torch.save([1, 2], tmp_path / "list.ckpt")
    torch.save({**torch.load(tmp_path / "a.ckpt"), "where": tmp_path}, tmp_path / "path.ckpt")
    with pytest.raises(BrokenCheckpointError, match="is cut short"):
        run.test(Lit(), ckpt_path=tmp_path / "cut.ckpt")
    with pytest.raises(BrokenCheckpointError, match="holds no weights but a list"):
        run.test(Lit(), ckpt_path=tmp_path / "list.ckpt")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint at"):
        run.test(Lit(), ckpt_path=tmp_path / "gone.ckpt")
    with pytest.raises(UnsafeCheckpointError, match=r"pathlib\.PosixPath"):
        run.test(Lit(), ckpt_path=tmp_path / "path.ckpt")
    run.test(Lit(), ckpt_path=tmp_path / "path.ckpt", weights_only=False, verbose=False)


def test_verify_finds_what_loading_alone_does_not(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    source = Lit()
    run.fit(source)
    path = tmp_path / "a.ckpt"
    run.save_checkpoint(path)
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
    source = Lit("compiled")
    run.fit(source)
    path = tmp_path / "a.ckpt"
    run.save_checkpoint(path, storage_options={"a": 1})
    assert next(iter(torch.load(path)["state_dict"])) == "net.0.weight"
    run.test(target := Lit("DataParallel", seed=1), ckpt_path=path, verbose=False)
    assert same(source, target)
    run.strategy.remove_checkpoint(path)
    assert not path.exists()
    assert Inner.calls == ["teardown", "save {'a': 1}", "teardown", "remove"]


def test_a_trainer_without_gpus_loads_what_one_with_gpus_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, path = Lit(), tmp_path / "gpu.ckpt"
    run = trainer(tmp_path)
    run.fit(source)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        run.save_checkpoint(path)
    target = Lit("DataParallel", seed=1)
    trainer(tmp_path, epochs=2).fit(target, ckpt_path=path)
    trainer(tmp_path).test(target, ckpt_path=path, verbose=False)
    assert same(source, target)


def test_storage_options_are_refused_rather_than_ignored(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"storage_options, got \{'a': 1\}"):
        PortableCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})


def test_remote_files_are_written_whole_or_not_at_all(
    memory_files: type[MemoryFileSystem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Lit("compiled")
    run = trainer(tmp_path, callbacks=[ModelCheckpoint("memory://bucket/run", save_last=True)])
    run.fit(source)
    assert sorted(memory_files.store) == ["/bucket/run/epoch=0-step=4.ckpt", "/bucket/run/last.ckpt"]
    target = Lit("DataParallel", seed=1)
    trainer(tmp_path).test(target, ckpt_path="memory://bucket/run/last.ckpt", verbose=False)
    assert same(source, target)
    with pytest.raises(CheckpointNotFoundError, match=r"memory://bucket/gone\.ckpt"):
        PortableCheckpointIO().load_checkpoint("memory://bucket/gone.ckpt")
    memory_files.store["/bucket/cut.ckpt"] = type(memory_files.store["/bucket/run/last.ckpt"])(
        memory_files(), "/bucket/cut.ckpt", b"PK\x03\x04 and no more"
    )
    with pytest.raises(BrokenCheckpointError, match=r"^memory://bucket/cut\.ckpt is cut short"):
        PortableCheckpointIO().load_checkpoint("memory://bucket/cut.ckpt")

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


def test_a_failed_save_raises_also_from_the_thread(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plugin = AsyncCheckpointIO(PortableCheckpointIO())
    run = trainer(tmp_path, plugin)
    run.fit(Lit())

    def save_and_wait() -> None:
        run.save_checkpoint(tmp_path / "file" / "a.ckpt")  # may raise here already
        plugin.teardown()

    with pytest.raises(OSError, match=r"file/a\.ckpt"):
        save_and_wait()


def test_the_plugin_keeps_no_trainer_alive_and_can_be_pickled(tmp_path: Path) -> None:
    plugin = PortableCheckpointIO(TorchCheckpointIO(), verify=True)
    run = trainer(tmp_path, plugin)
    run.fit(Lit())
    twin = pickle.loads(pickle.dumps(plugin))
    assert twin.verify
    assert isinstance(twin.inner, TorchCheckpointIO)
    model = plugin._model()
    assert model is not None
    assert twin._model() is None


def test_a_save_with_two_keys_of_one_name_keeps_lightnings_keys(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(Lit())
    checkpoint = run._checkpoint_connector.dump_checkpoint()
    checkpoint["state_dict"] = OrderedDict({"net.w": torch.ones(1), "net._orig_mod.w": torch.zeros(1)})
    with pytest.warns(UserWarning, match=r"keeps its keys as they are.*net\._orig_mod\.w"):
        run.strategy.checkpoint_io.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert list(torch.load(tmp_path / "a.ckpt")["state_dict"]) == ["net.w", "net._orig_mod.w"]


def test_one_plugin_in_two_trainers_takes_the_names_from_the_one_that_saves(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.module = net

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.module(batch)  # type: ignore[no-any-return]

    plugin, source = PortableCheckpointIO(), Lit()
    source.net = Holder(source.net)  # its child `module` is no wrapper's
    one, two = trainer(tmp_path, plugin), trainer(tmp_path, plugin)
    one.fit(source)
    two.fit(Lit("DataParallel"))
    one.save_checkpoint(tmp_path / "a.ckpt")
    source.load_state_dict(torch.load(tmp_path / "a.ckpt")["state_dict"])
    two.save_checkpoint(tmp_path / "b.ckpt")
    assert "net.0.weight" in torch.load(tmp_path / "b.ckpt")["state_dict"]


def test_wrapped_keys_are_never_stored_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_DISABLE", "1")
    run = trainer(tmp_path)
    run.fit(Lit("DataParallel"))
    with pytest.warns(
        UserWarning, match="keeps its keys as they are, also those of wrappers: LIGHTNING_GPU_TOOLS_DISABLE keeps"
    ):
        run.save_checkpoint(tmp_path / "a.ckpt")
    monkeypatch.delenv("LIGHTNING_GPU_TOOLS_DISABLE")
    with pytest.warns(UserWarning, match="keeps its keys as they are, also those of wrappers: no Trainer"):
        run.save_checkpoint(tmp_path / "a.ckpt")


def test_a_plugin_that_writes_nothing_is_refused_as_the_inner_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the other way round: AsyncCheckpointIO\(PortableCheckpointIO\(\)\)"):
        PortableCheckpointIO(AsyncCheckpointIO())
    plugin = PortableCheckpointIO(AsyncCheckpointIO(TorchCheckpointIO()))
    run = trainer(tmp_path, plugin)
    run.fit(Lit("DataParallel"))
    run.save_checkpoint(tmp_path / "a.ckpt")
    plugin.teardown()
    assert "net.0.weight" in torch.load(tmp_path / "a.ckpt")["state_dict"]


def test_overrides_without_torchs_optional_arguments_work_in_a_trainer(tmp_path: Path) -> None:
    class Short(Lit):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return dict(super().state_dict())

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            return super().load_state_dict(state_dict, strict)

    run, source, target = trainer(tmp_path), Short("DataParallel"), Short(seed=1)
    run.fit(source)
    run.save_checkpoint(tmp_path / "a.ckpt")
    trainer(tmp_path).test(target, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert same(source, target)


# -- several processes ---------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
import torch
from lightning_gpu_tools.trainer.checkpoint_plugin import PortableCheckpointIO
sys.path.insert(0, {tests!r})
from test_checkpoint_plugin import Lit, same, trainer

torch.compiler.set_stance("force_eager")

if __name__ == "__main__":
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    run = trainer(folder, strategy=strategy, devices=2)
    model = Lit("compiled" if strategy == "ddp_spawn" else "DataParallel")
    start = next(model.parameters()).detach().clone()
    run.fit(model)
    assert not torch.equal(start, next(model.parameters())), "the trained weights did not come back"
    if strategy == "ddp":
        run.save_checkpoint(folder / "two.ckpt")
        target = Lit("compiled", seed=1)
        trainer(folder, strategy="ddp", devices=2).test(target, ckpt_path=folder / "two.ckpt", verbose=False)
        assert same(model, target)
    print("all is well", flush=True)
"""


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_two_processes(strategy: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    source = str(Path(lightning_gpu_tools.__file__).parents[1])
    child = subprocess.run(
        [sys.executable, str(program), str(tmp_path), strategy],
        env={**os.environ, "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("all is well") == (2 if strategy == "ddp" else 1)
    if strategy == "ddp":
        assert next(iter(torch.load(tmp_path / "two.ckpt")["state_dict"])) == "net.0.weight"


def test_write_checkpoint_is_what_the_plugin_writes(tmp_path: Path) -> None:
    content = {"a": torch.arange(3)}
    PortableCheckpointIO().save_checkpoint(content, tmp_path / "plugin.ckpt")
    write_checkpoint(content, tmp_path / "function.ckpt")
    assert (tmp_path / "plugin.ckpt").read_bytes() == (tmp_path / "function.ckpt").read_bytes()
