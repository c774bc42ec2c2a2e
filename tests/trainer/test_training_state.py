"""Resuming from loops, callbacks, optimizers and schedulers of any form: a Trainer trains or says what is wrong."""

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from plugin_trainings import trainer
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_gpu_tools import PortableCheckpointIO
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError, CheckpointMismatchError

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": functools.partial(optim.Adam, lr=0.1),
    "AdamW": functools.partial(optim.AdamW, lr=0.1, amsgrad=True),
    "SGD": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "RMSprop": optim.RMSprop,
    "NAdam": optim.NAdam,
    "ASGD": optim.ASGD,
    "Adafactor": optim.Adafactor,
    "Adagrad": optim.Adagrad,
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 99, cycle_momentum=False),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [1]
    ),
    "ReduceLROnPlateau": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer),
        "monitor": "loss",
    },
}


class Lit(LightningModule):
    def __init__(self, optimizer: str = "Adam", scheduler: str = "StepLR", groups: int = 1) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3)
        self.choice = optimizer, scheduler, groups

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        name, scheduler, groups = self.choice
        parts = [[*self.net.parameters()]] if groups == 1 else [[self.net.weight], [self.net.bias]]
        optimizer = OPTIMIZERS[name]([{"params": part} for part in parts])
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[scheduler](optimizer)}


class Manual(Lit):
    """Two optimizers and no scheduler, as a GAN has them."""

    def __init__(self, optimizers: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.number = optimizers

    def training_step(self, batch: torch.Tensor, index: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, index))
        for optimizer in self.optimizers() if self.number > 1 else [self.optimizers()] * self.number:  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [optim.Adam([parameter]) for parameter in [*self.net.parameters()][: self.number]]


def fit(model: LightningModule, folder: Path, path: Any = None, plugin: Any = None, **options: Any) -> Trainer:
    stopping = [EarlyStopping("loss", patience=9, check_on_train_epoch_end=True)]
    run = trainer(folder, plugin, **{"epochs": 3, "callbacks": stopping, **options})
    run.fit(model, DataLoader(torch.ones(2, 2), 2), ckpt_path=path)  # type: ignore[arg-type]
    return run


@functools.cache
def checkpoint(folder: Path, model: Callable[..., LightningModule] = Lit, *choice: Any) -> dict[str, Any]:
    """What a Trainer saves after one step; do not change it."""
    fit(model(*choice), folder, epochs=1).save_checkpoint(folder / "saved.ckpt")
    return torch.load(folder / "saved.ckpt")  # type: ignore[no-any-return]


def resume(content: Any, model: LightningModule, folder: Path, **options: Any) -> Trainer:
    torch.save(content, folder / "odd.ckpt")
    return fit(model, folder, folder / "odd.ckpt", **options)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places(inner, (*path, key))


ENTRIES = ("loops", "optimizer_states", "lr_schedulers", "callbacks")
ODD = ({}, [], "text", 3, 1.5, [{}], torch.ones(7), torch.tensor(1.0))


@given(
    draw=st.data(),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    scheduler=st.sampled_from(["StepLR", "SequentialLR", "ReduceLROnPlateau"]),  # the others follow a plan
)
def test_a_training_state_changed_anywhere_trains_or_is_refused(
    draw: st.DataObject, optimizer: str, scheduler: str, folder: Path
) -> None:
    content = copy.deepcopy(checkpoint(folder, Lit, optimizer, scheduler))
    name = draw.draw(st.sampled_from(ENTRIES))
    *way, last = draw.draw(st.sampled_from([(name, *rest) for rest in places(content[name])]))
    place = functools.reduce(lambda inner, key: inner[key], way, content)
    change = draw.draw(st.sampled_from(["remove", *range(len(ODD))]))
    if change == "remove":
        del place[last]
    elif last != "best_score" or not isinstance(ODD[change], (int, float)):  # a number is taken where a tensor is
        place[last] = copy.deepcopy(ODD[change])
    try:
        resume(content, Lit(optimizer, scheduler), folder)
    except CheckpointError as error:
        assert "odd.ckpt" in str(error)  # noqa: PT017 - both outcomes are right


PAIRS = [(optimizer, "StepLR") for optimizer in OPTIMIZERS] + [("Adam", scheduler) for scheduler in SCHEDULERS]


@pytest.mark.parametrize("groups", [1, 2])
def test_what_a_trainer_has_saved_it_resumes(groups: int, folder: Path) -> None:
    for pair in PAIRS:
        assert resume(checkpoint(folder, Lit, *pair, groups), Lit(*pair, groups), folder).global_step == 3, pair


def test_an_optimizer_that_needs_the_loss_to_step_is_resumed(folder: Path) -> None:
    class Searching(Lit):
        def configure_optimizers(self) -> Any:
            return optim.LBFGS(self.parameters())

    assert resume(checkpoint(folder, Searching), Searching(), folder).global_step == 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_several_optimizers_or_none_are_resumed(number: int, folder: Path) -> None:
    content = checkpoint(folder, Manual, number)
    assert resume(content, Manual(number), folder, callbacks=[]).current_epoch == 3


def test_another_number_of_optimizers_is_paired_with_a_warning(folder: Path) -> None:
    with pytest.warns(UserWarning, match="states of 1 optimizer, and the model has 2"):
        resume(checkpoint(folder, Manual, 1), Manual(2), folder, callbacks=[])


OTHERS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "class": (("SGD",), ("Adam",), r'"optimizer_states"\[0\] cannot be used \(KeyError: \'step\'\)'),
    "options": (("Adam",), ("SGD",), r"KeyError: 'momentum'"),
    "groups": (("Adam", "StepLR", 1), ("Adam", "StepLR", 2), r"has groups of \[2\] .* Adam has groups of \[1, 1\]"),
    "scheduler": (("Adam", "StepLR"), ("Adam", "LambdaLR"), r"state of LambdaLR .*KeyError: 'lr_lambdas'"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_state_of_another_optimizer_is_refused_before_training(what: str, folder: Path) -> None:
    saved, now, words = OTHERS[what]
    with pytest.raises(CheckpointMismatchError, match=rf"odd\.ckpt does not fit: .*{words}.*load_weights"):
        resume(checkpoint(folder, Lit, *saved), Lit(*now), folder)


def test_states_of_parameters_in_another_order_are_refused(folder: Path) -> None:
    content = copy.deepcopy(checkpoint(folder))
    states = content["optimizer_states"][0]["state"]
    states[0], states[1] = states[1], states[0]
    with pytest.raises(CheckpointMismatchError, match=r"RuntimeError: The size of tensor"):
        resume(content, Lit(), folder)


def test_what_a_scheduler_left_in_the_groups_is_checked(folder: Path) -> None:
    content = copy.deepcopy(checkpoint(folder))
    content["optimizer_states"][0]["param_groups"][0]["initial_lr"] = "text"
    with pytest.raises(CheckpointMismatchError, match="has 'text' for \"initial_lr\""):
        resume(content, Lit(), folder)


class Hooked(Lit):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The one hook that may still complete a checkpoint."""


def refused(content: Any, model: LightningModule, folder: Path, match: str) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=match):
        resume(content, model, folder)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    resume(checkpoint(folder), model, folder)  # nothing of the refusal is left


def test_fit_refuses_a_file_of_weights_alone_before_it_loads_one(folder: Path) -> None:
    content = checkpoint(folder)
    weights_only = {name: content[name] for name in content if name not in ENTRIES[1:]}
    for stored in (weights_only, content["state_dict"]):
        for model in (Lit(), Hooked()):
            refused(stored, model, folder, r'no "optimizer_states" .*save_weights_only=True.*load_weig')
    without_loop = {**content, "loops": {**content["loops"], "fit_loop": {"epoch_progress": 3}}}
    for model in (Lit(), Hooked()):
        refused(without_loop, model, folder, r'has 3 for the dictionary "fit_loop\.epoch_progress"')


def test_hooks_may_complete_a_file_of_weights_alone(folder: Path) -> None:
    content = checkpoint(folder)
    weights_only = {name: content[name] for name in content if name not in ENTRIES[1:]}
    missing = {"optimizer_states": [], "lr_schedulers": []}

    class Completes(Lit):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint.update(missing)

    class CompletesToo(Callback):
        def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
            checkpoint.update(missing)

    with pytest.warns(UserWarning, match="states of 0 optimizers, and the model has 1"):
        resume(weights_only, Completes(), folder)
    assert resume({**weights_only, "callbacks": {}}, Lit(), folder, callbacks=[CompletesToo()]).global_step == 3


# What Lightning and torch take in the place of what they write.
TAKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "dictionaries for lists": lambda content: content.update(optimizer_states={}, lr_schedulers={}),
    "tuples": lambda content: content.update(optimizer_states=(*content["optimizer_states"],), lr_schedulers=()),
    "states beyond the optimizers": lambda content: content["optimizer_states"].append("more"),
    "a scheduler's empty state": lambda content: content.update(lr_schedulers=[[]]),
    "a state without parameters": lambda content: content["optimizer_states"][0].update(state={}),
    "no callbacks": lambda content: content.update(callbacks=None),
    "no loops": lambda content: content.update(loops=None),
    "other loops": lambda content: content["loops"].update(validate_loop=3, mine="text"),
    "no progress": lambda content: content["loops"].update(fit_loop={}),
    "numbers of other types": lambda content: content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"].update(
        ready=torch.tensor(1), completed=1.0
    ),
    "entries of others by our names": lambda content: content.update(averaging_state=3, current_model_state="text"),
}


@pytest.mark.parametrize("what", TAKEN)
def test_what_lightning_resumes_from_the_plugin_resumes_from(what: str, folder: Path) -> None:
    content = copy.deepcopy(checkpoint(folder))
    TAKEN[what](content)
    alone = resume(content, Lit(), folder, plugin=TorchCheckpointIO())
    assert resume(content, Lit(), folder).global_step == alone.global_step


def test_averages_are_checked_only_where_they_are_read(folder: Path) -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning 2.6 added it")
    content = {**checkpoint(folder), "averaging_state": 3, "current_model_state": {}}
    assert resume(content, Lit(), folder).global_step == 3
    with pytest.raises(BrokenCheckpointError, match=r'"averaging_state" .* must be a dictionary'):
        resume(content, Lit(), folder, callbacks=[averaging.EMAWeightAveraging()])


def test_weights_under_other_names_are_no_error_where_loading_is_not_strict(folder: Path) -> None:
    class Lax(Lit):
        strict_loading = False  # type: ignore[assignment]

    content = {**checkpoint(folder), "state_dict": {"other": torch.ones(2)}}
    with pytest.warns(UserWarning, match=r"(?s)odd\.ckpt does not fit Lax.*strict_loading is False"):
        assert resume(content, Lax(), folder).global_step == 3


def test_a_model_that_makes_its_own_weights_gets_the_whole_checkpoint(folder: Path) -> None:
    content = {**checkpoint(folder), "mine": 3}
    content["my_weights"] = content.pop("state_dict")

    class Makes(Lit):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = checkpoint["my_weights"]
            self.mine = checkpoint["mine"]

    model = Makes()
    assert resume(content, model, folder).global_step == 3
    assert model.mine == 3


def test_what_older_versions_left_out_of_loops_is_no_fault(folder: Path) -> None:
    content = copy.deepcopy(checkpoint(folder))
    loop = content["loops"]["fit_loop"]
    del loop["epoch_loop.manual_optimization.state_dict"], loop["epoch_loop.state_dict"]["_batches_that_stepped"]
    del loop["epoch_progress"]["total"]["processed"]
    assert resume(content, Lit(), folder).current_epoch == 3
    del loop["epoch_progress"]["total"]
    with pytest.raises(BrokenCheckpointError, match=r'has no "total" in "fit_loop\.epoch_progress".*Take "loops" out'):
        resume(content, Lit(), folder)
    del content["loops"]
    assert resume(content, Lit(), folder).current_epoch == 3


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net)  # type: ignore[arg-type]
        pl_module.net.weight.requires_grad_(True)  # type: ignore[union-attr]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: optim.Optimizer) -> None:
        if epoch == 0:
            pl_module.net.bias.requires_grad_(True)  # type: ignore[union-attr]
            optimizer.add_param_group({"params": [pl_module.net.bias]})


class Finetuned(Lit):
    """Its callback comes last, and makes its second group of parameters when the fit starts."""

    def configure_callbacks(self) -> Any:
        return [Unfreezes()]

    def configure_optimizers(self) -> Any:
        return optim.Adam([self.net.weight])


def test_groups_that_hooks_add_before_restoring_are_no_mismatch(folder: Path) -> None:
    content = checkpoint(folder, Finetuned)
    assert len(content["optimizer_states"][0]["param_groups"]) == 2
    assert resume(content, Finetuned(), folder).global_step == 3


def test_an_optimizer_hook_may_make_a_state_fit(folder: Path) -> None:
    class Merging(Lit):
        def configure_optimizers(self) -> Any:
            optimizer = optim.Adam(self.parameters())
            optimizer.register_load_state_dict_pre_hook(self.merge)
            return optimizer

        def merge(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
            group = {**state["param_groups"][0], "params": [0, 1]}
            return {**state, "param_groups": [group]}

    assert resume(checkpoint(folder, Lit, "Adam", "StepLR", 2), Merging(), folder).global_step == 3


def test_errors_of_the_users_optimizer_pass_unchanged(folder: Path) -> None:
    class Own(optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            raise LookupError("mine")

    class Uses(Lit):
        def configure_optimizers(self) -> Any:
            return Own(self.parameters())

    with pytest.raises(LookupError, match="mine"):
        resume(checkpoint(folder), Uses(), folder)


def test_the_loss_scale_is_checked_too(folder: Path) -> None:
    plugins = [PortableCheckpointIO(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    content = {**checkpoint(folder), "MixedPrecision": {"scale": 2.0}}
    with pytest.raises(CheckpointMismatchError, match='"MixedPrecision" cannot be used'):
        resume(content, Lit(), folder, plugins=plugins)


def test_checking_leaves_the_optimizer_and_the_counts_alone(folder: Path) -> None:
    steps = []

    class Watching(Lit):
        def on_fit_start(self) -> None:
            steps.append(self.global_step)

        def on_train_start(self) -> None:
            optimizer = self.trainer.optimizers[0]
            optimizer.load_state_dict(optimizer.state_dict())  # the user's own affair
            steps.extend(int(entries["step"]) for entries in optimizer.state.values())

    resume(checkpoint(folder), Watching(), folder)
    assert steps == [0, 1, 1]
