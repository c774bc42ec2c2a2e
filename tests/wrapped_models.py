"""Architectures and wrappers as real models have them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel


class TiedTransformer(nn.Module):
    """Embedding and output share one matrix, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.SyncBatchNorm(3), nn.LSTM(3, 4))


def recurrent_with_module_child() -> nn.Module:
    return nn.ModuleDict({"module": nn.GRU(3, 4), "head": nn.ModuleList([nn.Linear(4, 1), nn.PReLU()])})


ARCHITECTURES = [TiedTransformer, normed, recurrent_with_module_child]


class System(nn.Module):
    """A net as the attribute of a larger thing, as in a LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.model = net


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "compile(DataParallel)": lambda net: compiled(nn.DataParallel(net)),
    "AveragedModel(DataParallel)": lambda net: AveragedModel(nn.DataParallel(net)),
    "DataParallel(System(compile))": lambda net: nn.DataParallel(System(compiled(net))),
}


def fill(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.dtype.is_floating_point:
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator))


def contents(net: nn.Module) -> list[Any]:
    return [t.tolist() for name, t in (*net.named_parameters(), *net.named_buffers()) if "n_averaged" not in name]
