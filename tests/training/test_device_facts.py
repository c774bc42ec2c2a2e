"""Tensors that a model on a GPU has left on the CPU, and kinds of optimizers."""

import torch
from torch import nn
from trainings import Model

from lightning_gpu_tools.training.device_facts import left_on_cpu


def test_what_lightning_moves_is_not_named() -> None:
    model = Model()
    model.register_buffer("mean", torch.ones(3))
    model.losses = nn.ModuleList([nn.CrossEntropyLoss(weight=torch.ones(3))])
    model.scale = torch.tensor(3.0)  # a number: it costs nothing to send
    model.names = ["a", "b"]
    moved = nn.Module.to(model, "meta")  # as Lightning moves it to the GPU
    moved.scale, moved.names = model.scale, model.names
    assert left_on_cpu(moved) == ()


def test_what_it_does_not_move_is_named_with_its_place() -> None:
    model = Model()
    model.weights = torch.ones(3)
    model.losses = [nn.CrossEntropyLoss(weight=torch.ones(3))]
    model.layer.tables = {"a": [torch.ones(2), torch.ones(2)], "b": 1}
    model.layer.plain = "text"
    model.to("meta")
    assert left_on_cpu(model) == (
        "Model.weights (a tensor)",
        "Model.losses (a list with 1 tensor)",
        "Model.layer.tables (a dict with 2 tensors)",
    )
