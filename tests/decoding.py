"""A dataset that takes nearly all of its time in one line; on its own, so that spawned workers import little."""

import torch
from torch.utils.data import Dataset


class Decoded(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(self.decode()))

    def decode(self) -> int:
        return sum(number & 7 for number in range(100_000))


LINE = Decoded.decode.__code__.co_firstlineno + 1  # that takes the time
