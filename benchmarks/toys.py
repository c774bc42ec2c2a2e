"""Small training runs on the CPU, each slowed down in one place by sleeping or computing, with the expected diagnosis.

    python benchmarks/toys.py NAME [--seconds 6]         # one run without this package

Nothing is downloaded. The first twelve runs were also used to compare other tools. Runs labeled "healthy" or
"too_short" must get no finding.
"""

import functools
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from harness import be_quiet, make_parser, quiet_trainer
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from torch.utils.data import DataLoader, Dataset, get_worker_info


def compute(seconds: float) -> None:
    """Compute for some seconds of this thread's CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@functools.cache
def cycles_per_s() -> float:
    """Return the GPU's clock rate."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(200_000_000)  # raises the clock from its idle rate
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return 50e9 / begin.elapsed_time(end)


def occupy(seconds: float) -> None:
    """Keep the GPU busy for some seconds without blocking the host."""
    torch.cuda._sleep(int(seconds * cycles_per_s()))


class Slow(Dataset):
    """A dataset whose samples take some seconds to load.

    Args:
        seconds: Time for each sample.
        spend: Function that spends the time.
        slow_worker: The only slow worker; by default, all are slow.
        slow_rank: The only slow rank; by default, all are slow.
        length: Number of samples.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        spend: Callable[[float], None] = time.sleep,
        *,
        slow_worker: int | None = None,
        slow_rank: int | None = None,
        length: int = 100_000,
    ) -> None:
        self.seconds, self.spend, self.length = seconds, spend, length
        self.slow_worker, self.slow_rank = slow_worker, slow_rank

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        is_slow_worker = self.slow_worker is None or (worker is not None and worker.id == self.slow_worker)
        if self.seconds and is_slow_worker and self.slow_rank in (None, int(os.environ.get("LOCAL_RANK", "0"))):
            self.spend(self.seconds)
        return torch.full((4,), float(index))


class Repeated(Dataset[torch.Tensor]):
    """A dataset that returns the same batch every time, after some seconds."""

    def __init__(self, batch: torch.Tensor, seconds: float = 0.0) -> None:
        self.batch, self.seconds = batch, seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.batch


@contextmanager
def computing_on_one_core(programs: int) -> Iterator[None]:
    """Pin this process to one core, and start other programs that compute on it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    # Each program ends with this process. Their parent exits at once, so they do not count as this job's processes.
    compute_with_me = f"import os\nwhile os.path.exists('/proc/{os.getpid()}'): sum(range(100_000))"
    detach = f"import subprocess, sys\nprint(*[subprocess.Popen([sys.executable, '-c', {compute_with_me!r}], "
    detach += f"stdout=subprocess.DEVNULL).pid for _ in range({programs})])"
    started = subprocess.run([sys.executable, "-c", detach], stdout=subprocess.PIPE, check=True)
    try:
        yield
    finally:
        for pid in started.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        os.sched_setaffinity(0, before)


class CostlyToUnpack:
    """A batch that takes the receiving process 10 ms of CPU time to unpickle, as many small objects do."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples

    def __reduce__(self) -> Any:
        return _unpack, (self.samples,)


def _unpack(samples: list[torch.Tensor]) -> torch.Tensor:
    compute(0.01)
    return torch.stack(samples)


class Stream:
    """A loader that is not a torch DataLoader."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(self.seconds)
            yield torch.ones(1, 4)


class SlowLayer(torch.nn.Linear):
    """A layer that sleeps in ``forward``, where tools with module hooks can see it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(4, 1)
        self.seconds = seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return super().forward(batch)


class TrainedBySGD(LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class ToyModel(TrainedBySGD):
    def __init__(
        self,
        step_s: float = 0.0,
        validation_s: float = 0.005,
        *,
        fail_at: int | None = None,
        killed_at: int | None = None,
    ) -> None:
        super().__init__()
        self.layer = SlowLayer(step_s)
        self.validation_s, self.fail_at, self.killed_at = validation_s, fail_at, killed_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise KeyError("unknown label")
        if batch_idx == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.layer(batch).square().mean() / 1e9
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(self.validation_s)


class ComputingModel(ToyModel):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        compute(0.005)
        return super().training_step(batch, batch_idx)


def slowed(name: str, kind: type, method: str) -> Any:
    """Return a subclass in which one method takes 20 ms longer."""

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return getattr(super(made, self), method)(*args, **kwargs)

    made = type(name, (kind,), {method: slow})
    return made


SlowCallback = slowed("SlowCallback", Callback, "on_train_batch_end")
SlowGradientCallback = slowed("SlowGradientCallback", Callback, "on_before_backward")
SlowLogger = slowed("SlowLogger", CSVLogger, "log_metrics")
SlowPrecision = slowed("SlowPrecision", Precision, "convert_input")  # runs in no named hook
SlowScheduler = slowed("SlowScheduler", torch.optim.lr_scheduler.ConstantLR, "step")
SlowHookModel = slowed("SlowHookModel", ToyModel, "on_train_batch_start")
SlowClippingModel = slowed("SlowClippingModel", ToyModel, "configure_gradient_clipping")
SlowOptimizerStepModel = slowed("SlowOptimizerStepModel", ToyModel, "optimizer_step")
SlowTransferModel = slowed("SlowTransferModel", ToyModel, "transfer_batch_to_device")
SlowSaveModel = slowed("SlowSaveModel", ToyModel, "on_save_checkpoint")


class SlowSchedulerModel(ToyModel):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": SlowScheduler(optimizer), "interval": "step"}]


class SlowRankModel(ToyModel):
    """A model whose forward, backward, or optimizer step takes 25 ms longer on rank 1."""

    def __init__(self, part: str = "") -> None:
        super().__init__(0.005)
        self.part = part

    def take_part(self, part: str) -> None:
        if part == self.part and self.global_rank == 1:
            time.sleep(0.025)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.take_part("forward")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.take_part("backward"))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.take_part("optimizer"))
        return optimizer


class SlowOnRank1(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.025)


class NowAndThenModel(ToyModel):
    """A model that takes 400 ms in every 20th step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02 if batch_idx % 20 else 0.4)
        return super().training_step(batch, batch_idx)


class LengthModel(ToyModel):
    """A model whose step time is proportional to the length of the batch, usually 10 ms."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(1e-4 * batch.numel() / 4)
        return super().training_step(batch, batch_idx)


class Lengths(Slow):
    """Samples of length 100, and one in eight, at random, of length 800."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(800 if random.Random(index).random() < 1 / 8 else 100, 4)


class SlowShard(Slow):
    """Samples of which every 40th is slow, as when it opens the next file."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) if index % 40 == 0 else torch.ones(4)


class CollectingModel(ToyModel):
    """A model that collects garbage every 25th step; torch and Lightning alone keep 400,000 objects."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx % 25 == 0:
            gc.collect()
        return super().training_step(batch, batch_idx)


class RecompilingModel(ToyModel):
    """A model that recompiles its loss for each new batch length, without torch's limit."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        no_limit = {"cache_size_limit": 10_000, "accumulated_cache_size_limit": 10_000}
        with torch._dynamo.config.patch(**no_limit):
            return self._loss(self.layer, batch)

    @staticmethod
    @torch.compile(backend="eager", dynamic=False)
    def _loss(layer: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return layer(batch).square().mean() / 1e4


class NewLengths(Slow):
    """Samples that get longer after every eighth."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1 + index // 8, 4)


class MedianCallback(Callback):
    """A callback that adds 300 losses per step, and sorts all of them, or the latest."""

    def __init__(self, latest: int | None = None) -> None:
        self.losses: deque[float] = deque(maxlen=latest)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.extend(random.random() for _ in range(300))
        self.median = sorted(self.losses)[len(self.losses) // 2]


class NewNamesModel(ToyModel):
    """A model that logs each loss under a new name."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log(f"loss of batch {batch_idx}", loss)
        return loss


class SumModel(ToyModel):
    """A model that sums its losses with their graphs, and trains on the sum."""

    total_loss: Any = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.total_loss = self.total_loss + super().training_step(batch, batch_idx)
        return self.total_loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)


class Stop(Callback):
    """A callback that ends the run after some seconds, on all ranks at the same step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_start(self, *args: Any) -> None:
        self.end = time.perf_counter() + self.seconds

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        is_over = time.perf_counter() > self.end
        if trainer.world_size > 1 and trainer.global_step % 20 == 0:
            is_over = trainer.strategy.reduce_boolean_decision(is_over, all=False)
            trainer.should_stop = trainer.should_stop or is_over
        elif trainer.world_size == 1:
            trainer.should_stop = is_over


def checkpoint_every_step() -> Callback:
    return ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)


@dataclass
class Toy:
    """A run and its expected diagnosis.

    Attributes:
        known: The expected verdict, or the expected cause with its kind or name.
        model: Makes the model.
        loader: Makes the training loader.
        callbacks: Make the run's own callbacks.
        options: Trainer options; a logger is given as its class.
        validate: Whether there is a validation loader.
        last: Whether the measuring callbacks come last; ``None`` = in random order.
        is_killed: Whether the process is killed, so that only the report written before can have the diagnosis.
        others: Number of other programs on the run's only core; ``None`` = it has all cores.
    """

    known: str
    model: Callable[[], LightningModule] = ToyModel
    loader: Callable[[], Any] = lambda: DataLoader(Slow())
    callbacks: Sequence[Callable[[], Callback]] = ()
    options: dict[str, Any] = field(default_factory=dict)
    validate: bool = False
    last: bool | None = None
    is_killed: bool = False
    others: int | None = None

    @property
    def needs_a_process(self) -> bool:
        """Return whether the run needs its own process."""
        return self.is_killed or self.options.get("devices", 1) > 1


def workers(count: int, seconds: float, **options: Any) -> Callable[[], DataLoader]:
    """Return a function that makes a loader whose samples take some seconds each."""
    more = {name: options.pop(name) for name in ("persistent_workers", "batch_size") if name in options}
    return lambda: DataLoader(Slow(seconds, **options), num_workers=count, **{"batch_size": 2, **more})


_DDP = {"devices": 2, "strategy": "ddp"}
TOYS = {
    # The first twelve, which were also used to compare other tools.
    "a": Toy("data_loading too_few_workers", loader=workers(0, 0.01, batch_size=4)),
    "a2": Toy("data_loading too_few_workers", loader=workers(2, 0.01, batch_size=4)),
    "b": Toy("callback SlowCallback", callbacks=[SlowCallback], last=True),
    "b2": Toy("callback SlowCallback", callbacks=[SlowCallback], last=False),
    "c": Toy("logging SlowLogger", options={"log_every_n_steps": 1, "logger": SlowLogger}),
    "d": Toy(
        "checkpoint", model=SlowSaveModel, callbacks=[checkpoint_every_step], options={"enable_checkpointing": True}
    ),
    "e": Toy("healthy", model=lambda: ToyModel(0.05)),
    "f": Toy("validation", options={"val_check_interval": 5}, validate=True),
    "g": Toy("too_short", options={"max_steps": 10}),
    "h": Toy("data_loading too_few_workers", loader=workers(0, 0.01, batch_size=4),
             model=lambda: ToyModel(fail_at=110)),
    "h, killed": Toy("data_loading too_few_workers", loader=workers(0, 0.005),
                     model=lambda: ToyModel(killed_at=250), is_killed=True),
    "n": Toy("healthy", options={"max_steps": 2500}),
    "ddp": Toy("straggler data_loading", loader=lambda: DataLoader(Slow(0.02, slow_rank=1), batch_size=1),
               options=_DDP),
    "ddp, a slow callback": Toy(
        "straggler callback/SlowOnRank1", model=SlowRankModel, callbacks=[SlowOnRank1], options=_DDP
    ),
    **{
        f"ddp, slow {part}": Toy(f"straggler {part}", model=partial(SlowRankModel, part), options=_DDP)
        for part in ("forward", "backward", "optimizer")
    },
    "ddp, no slow rank": Toy("healthy", model=lambda: ToyModel(0.03), options=_DDP),
    "computing data": Toy("data_loading cpu_bound", loader=workers(4, 0.01, spend=compute)),
    "one slow worker": Toy("data_loading slow_worker", loader=workers(3, 0.04, slow_worker=1, batch_size=1)),
    "costly to unpack": Toy(
        "data_loading main_process", loader=lambda: DataLoader(Slow(), num_workers=2, collate_fn=CostlyToUnpack)
    ),
    "another loader": Toy("data_loading", loader=lambda: Stream(0.02)),
    "slow hook of the model": Toy("callback SlowHookModel.on_train_batch_start", model=SlowHookModel),
    "slow scheduler": Toy("callback SlowScheduler.step", model=SlowSchedulerModel),
    "slow clipping": Toy("callback SlowClippingModel.configure_gradient_clipping", model=SlowClippingModel),
    "slow optimizer_step": Toy("callback SlowOptimizerStepModel.optimizer_step", model=SlowOptimizerStepModel),
    "slow before backward": Toy("callback SlowGradientCallback", callbacks=[SlowGradientCallback]),
    "slow where nothing has a name": Toy("unexplained trainer", options={"plugins": SlowPrecision()}),
    "slow transfer": Toy("host_to_device_copy", model=SlowTransferModel),
    "short epochs": Toy(
        "epoch_start", model=lambda: ToyModel(0.002), loader=workers(2, 0.0, length=20), options={"max_epochs": -1}
    ),
    "data and a callback": Toy("callback SlowCallback", loader=workers(0, 0.002), callbacks=[SlowCallback]),
    "data hidden behind the step": Toy("healthy", model=lambda: ToyModel(0.03), loader=workers(2, 0.01)),
    "validation now and then": Toy(
        "healthy", model=lambda: ToyModel(0.01), options={"val_check_interval": 100}, validate=True
    ),
    "logs now and then": Toy(
        "healthy", model=lambda: ToyModel(0.01), options={"log_every_n_steps": 50, "logger": SlowLogger}
    ),
    "every 20th step": Toy("slow_steps training_step/forward", model=NowAndThenModel),
    "longer batches": Toy("slow_steps training_step/forward", model=LengthModel, loader=lambda: DataLoader(Lengths())),
    "slow batches": Toy(
        "slow_steps data_loading", model=lambda: ToyModel(0.01), loader=lambda: DataLoader(SlowShard(0.5))
    ),
    "others on its core": Toy("cpu_contention other_programs", model=ComputingModel, others=2),
    "alone on its core": Toy("healthy", model=ComputingModel, others=0),
    "garbage collection": Toy("garbage_collection", model=lambda: CollectingModel(0.005)),
    "new lengths, compiled": Toy(
        "recompilation", model=RecompilingModel, loader=lambda: DataLoader(NewLengths(), shuffle=False)
    ),
    "a list that grows": Toy("slowing_down kept_memory", model=lambda: ToyModel(0.002), callbacks=[MedianCallback]),
    "a list of the latest": Toy(
        "healthy", model=lambda: ToyModel(0.004), callbacks=[partial(MedianCallback, latest=1000)]
    ),
    "a log with new names": Toy(
        "slowing_down unknown", model=lambda: NewNamesModel(0.002),
        options={"log_every_n_steps": 1, "logger": partial(CSVLogger, flush_logs_every_n_steps=10)},
    ),
    "a graph that is kept": Toy("slowing_down kept_memory", model=lambda: SumModel(0.002)),
    "10 steps of slow data": Toy("too_short", loader=workers(0, 0.05), options={"max_steps": 10}),
}  # fmt: skip


def train(toy: Toy, seconds: float, folder: str, measuring: Sequence[Callback] = (), *, last: bool = True) -> None:
    """Train for at most some seconds, with measuring callbacks after or before the run's own."""
    options = dict(toy.options)
    if "logger" in options:
        options["logger"] = options["logger"](folder)
    own = [*(make() for make in toy.callbacks), Stop(seconds)]
    trainer = quiet_trainer(folder, callbacks=[*own, *measuring] if last else [*measuring, *own], **options)
    with nullcontext() if toy.others is None else computing_on_one_core(toy.others):
        trainer.fit(toy.model(), toy.loader(), DataLoader(Slow(length=4)) if toy.validate else None)


def main() -> None:
    parser = make_parser(__doc__, seconds=6.0, output=False)
    parser.add_argument("name", choices=TOYS)
    parser.add_argument("--traceml", action="store_true", help="add TraceML's callback")
    args = parser.parse_args()
    be_quiet()
    measuring: list[Callback] = []
    if args.traceml:
        from traceml_ai.integrations.lightning import TraceMLCallback, init

        init()
        measuring = [TraceMLCallback()]
    with tempfile.TemporaryDirectory() as folder:
        train(TOYS[args.name], args.seconds, folder, measuring)


if __name__ == "__main__":
    main()
