"""Largest batch sizes that fit in 15 GiB: predicted from a run with small batches, and found by trying.

    python benchmarks/largest_batch.py [--model NAME ...] [--output results.json]

Requires a GPU. The models resemble GPT-2, BERT, and ResNet-50, with random weights. The prediction replays the recorded
steps on a model of torch's allocator, and leaves 2% free. benchmarks/out_of_memory.py runs this as well.
"""

import gc
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from harness import be_quiet, make_parser, quiet_trainer, write_result
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from toys import Repeated

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.trainer.fit_session import FitSession

GIB = 2**30
STEPS = 4


class Model(LightningModule):
    def __init__(self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.network(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-6)


class Transformer(nn.Module):
    """A transformer with a head over the vocabulary: causal like GPT-2, or not, like BERT."""

    def __init__(self, layers: int, width: int, *, causal: bool, vocabulary: int = 16_384) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, norm_first=causal)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device) if self.causal else None
        return self.head(self.layers(self.embedding(tokens), mask, is_causal=self.causal))


class PlainAttention(nn.Module):
    """A transformer layer with unfused attention, which keeps the weights of all pairs of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm = width // 64, nn.LayerNorm(width)
        self.inside, self.outside = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.inside(self.norm(hidden)).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        weights = (query @ key.transpose(-2, -1) / 8).softmax(-1)
        hidden = hidden + self.outside((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(hidden)


class Checkpointed(nn.Module):
    """Layers with activation checkpointing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


def plain(layers: int, width: int, *, checkpointed: bool) -> nn.Module:
    """Return a transformer with unfused attention."""
    inside = [PlainAttention(width) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(16_384, width), Checkpointed(*inside) if checkpointed else nn.Sequential(*inside),
        nn.Linear(width, 1024),
    )  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, outside: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(images) + self.shortcut(images))


def resnet() -> nn.Module:
    """Return a network like ResNet-50."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    layers: list[nn.Module] = [*stem]
    inside = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, 4 * width, 2 if stage and not block else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


TOKENS, IMAGE = torch.zeros(256, dtype=torch.long), torch.zeros(3, 160, 160)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[str, Any]]] = {
    "like GPT-2": (partial(Transformer, 8, 512, causal=True), TOKENS, {}),
    "like GPT-2, bf16-mixed": (partial(Transformer, 8, 512, causal=True), TOKENS, {"precision": "bf16-mixed"}),
    "like BERT": (partial(Transformer, 6, 768, causal=False), TOKENS, {}),
    "like ResNet-50": (resnet, IMAGE, {}),
    "like ResNet-50, bf16-mixed": (resnet, IMAGE, {"precision": "bf16-mixed"}),
    "attention of all pairs": (partial(plain, 8, 512, checkpointed=False), TOKENS, {}),
    "attention of all pairs, checkpointed": (partial(plain, 8, 512, checkpointed=True), TOKENS, {}),
    "like BERT, 4 batches accumulated": (
        partial(Transformer, 6, 768, causal=False), TOKENS, {"accumulate_grad_batches": 4}
    ),
    "like BERT, fused AdamW": (partial(Transformer, 6, 768, causal=False), TOKENS, {}),
    "like ResNet-50, SGD with momentum": (resnet, IMAGE, {}),
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "like BERT, fused AdamW": partial(torch.optim.AdamW, fused=True),
    "like ResNet-50, SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
}


def trains(name: str, batch_size: int, *callbacks: Callback) -> bool:
    """Train a few steps, and return whether the batches fit."""
    build, sample, options = MODELS[name]
    loader = DataLoader(Repeated(sample), batch_size=batch_size)
    measuring = [GPUUtilizationMonitor(report=False), *callbacks]
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, accelerator="gpu", max_steps=STEPS, callbacks=measuring, **options)
        model = Model(build(), OPTIMIZERS.get(name, torch.optim.AdamW))
        try:
            trainer.fit(model, loader)
        except torch.OutOfMemoryError:
            return False
        finally:
            trainer.strategy.teardown()
            del model, trainer
            gc.collect()
            torch.cuda.empty_cache()
    return True


class Predict(Callback):
    """A callback that predicts the largest batch size at the end."""

    size: int | None = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.session = FitSession.of(trainer, self)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        recorder = self.session.begin()
        recorder.find_largest_batch()
        self.size = recorder.largest_batch_size

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.session.release(self)


def largest_that_trains(trains: Callable[[int], bool], guess: int) -> int:
    """Return the largest batch size that trains, within one percent, by bisection."""
    fits, fails = 0, guess
    while trains(fails):
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, fits // 100):
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if trains(middle) else (fits, middle)
    return fits


def predictions(models: Sequence[str] = tuple(MODELS)) -> list[dict[str, Any]]:
    """Compare predicted with actual largest batch sizes, for these models."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 15 * GIB / total))
    rows = []
    for name in models:
        predicted = {}
        for size in (8, 32):
            predict = Predict()
            trains(name, size, predict)
            predicted[size] = predict.size
        guess = max((size for size in predicted.values() if size), default=64)
        found = largest_that_trains(partial(trains, name), guess)
        errors = {size: None if value is None else value / found - 1 for size, value in predicted.items()}
        rows.append({"model": name, "predicted": predicted, "found": found, "error": errors})
        print(f"{name}: predicted {predicted}, largest that trains {found}", flush=True)
    return rows


def mean_error(sizes: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean size of the relative errors, for predictions from the larger of the small batch sizes."""
    errors = [abs(error) for row in sizes if (error := [*row["error"].values()][-1]) is not None]
    return sum(errors) / len(errors) if errors else None


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS], help="default: all")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required")
    be_quiet()
    sizes = predictions(args.model)
    write_result(args.output, "largest_batch", mean_error=mean_error(sizes), sizes=sizes)


if __name__ == "__main__":
    main()
