"""The measurements of a run, as plain data: the input of the diagnosis. ``None`` = not measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_gpu_tools.gpus.metrics import GpuWindow
from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training import phases
from lightning_gpu_tools.training.dataset import GrownAttribute

if TYPE_CHECKING:
    from lightning_gpu_tools.memory.readings import MemoryGrowth, RankMemory

# What a Trainer does: its method, and in words. A loop without a Trainer is "fit".
Stage = Literal["fit", "validate", "test", "predict"]
ACTIVITIES = {"fit": "training", "validate": "validation", "test": "testing", "predict": "prediction"}
# The phases that rules refer to.
DATA_LOADING, COPY = phases.DATA_LOADING, phases.HOST_TO_DEVICE_COPY
TRAINING_STEP, VALIDATION = phases.TRAINING_STEP, phases.VALIDATION

_PAUSED = (*phases.PAUSES, *map(phases.rank_wait_in, phases.PAUSES))

MANY_THREADS = 1.5  # our default: runnable threads of a worker: from here on, a library in it has a thread pool


class PhaseSpan(NamedTuple):
    """A part of a run, and the phases that its time was spent on."""

    begin_s: float  # since the start of the run
    end_s: float
    phase_s: Mapping[str, float]  # by phase, without the part after a slash; adds up to the span
    steps: int = 0  # number of steps that began in it


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Totals over consecutive steady training steps. A step lasts from the start of its fetch to the next fetch."""

    steps: int = 0
    wall_s: float = 0.0
    data_loading_cpu_s: float = 0.0  # of the training thread while it waits for data; near zero if workers load
    data_loading_core_wait_s: float = 0.0  # the part of core_wait_s while it waits for data
    cpu_s: float = 0.0  # of all threads of the training process outside that wait; 0 if not measured
    core_wait_s: float = 0.0  # the training thread was runnable but had no core; 0 if not measured
    phase_s: Mapping[str, float] = field(default_factory=dict)  # all of the time, as in RunMeasurements; the last field

    @property
    def data_loading_s(self) -> float:
        """Time of waiting for data."""
        return self.phase_s.get(DATA_LOADING, 0.0)

    @property
    def step_s(self) -> float:
        """Mean time of a step, without pauses and the waits for other ranks in them."""
        return (self.wall_s - sum(self.phase_s.get(phase, 0.0) for phase in _PAUSED)) / self.steps

    def __add__(self, other: StepBlock) -> StepBlock:
        return _combined(operator.add, self, other)

    def __sub__(self, other: StepBlock) -> StepBlock:
        return _combined(operator.sub, self, other)


# In C, because the training thread adds up blocks.
_parts = operator.attrgetter(*(name for name in StepBlock.__dataclass_fields__ if name != "phase_s"))


def _combined(combine: Callable[[Any, Any], Any], one: StepBlock, other: StepBlock) -> StepBlock:
    ones, others = one.phase_s, other.phase_s
    phase_s = {phase: combine(ones.get(phase, 0.0), others.get(phase, 0.0)) for phase in {**ones, **others}}
    parts: list[Any] = [*map(combine, _parts(one), _parts(other)), phase_s]
    return StepBlock(*parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """The settings of a ``torch.utils.data.DataLoader`` that determine its speed.

    Attributes:
        num_workers: Number of worker processes; 0 = the training process loads the data.
        prefetch_factor: Number of batches that each worker loads ahead; ``None`` without workers.
        persistent_workers: Whether workers outlive an epoch.
        pin_memory: Whether batches are put in page-locked memory, from which a GPU can copy in the background.
        batch_size: Number of samples in a batch; ``None`` if the loader does not batch.
    """

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTrial:
    """A trial of one set of settings: some batches, each followed by a step."""

    settings: LoaderSettings
    batch_s: float | None = None  # mean time from batch to batch, including the step
    wait_s: float = 0.0  # mean part of batch_s spent waiting
    measured: bool = True  # False without workers, where batch_s needs no trial
    failed: str | None = None  # the error, if the settings could not be tried

    @property
    def batches_per_s(self) -> float | None:
        """The speed of loader and step together; ``None`` if not measured."""
        return 1 / self.batch_s if self.batch_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderResult:
    """The result of a search for the settings of a loader.

    Attributes:
        original: The original settings of the loader; ``None`` if it is not a torch DataLoader.
        settings: The best settings: the original ones if nothing is better, or nothing may be changed.
        reason: The reason for them, with numbers.
        applied: Whether the best settings are in use.
        confirmed: Whether they were as good in their first hundred steps; ``None`` if training ended too early.
        trials: The trials, in order.
        seconds: Duration of the search, during which training paused.
        wait_share: Share of the time in which training waited for data, with ``settings`` if they were tried;
            ``None`` if unknown.
    """

    original: LoaderSettings | None
    settings: LoaderSettings | None
    reason: str
    applied: bool = False
    confirmed: bool | None = None
    trials: tuple[LoaderTrial, ...] = ()
    seconds: float = 0.0
    wait_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderFacts:
    """What decides whether a loader may get workers, as read without running its dataset; by default, nothing is."""

    kind: str = ""  # class of the loader, with its module; empty if nothing was read
    name: str = ""  # its name among several: a key in quotes, or its number; empty if it is the only one
    is_torch: bool = True  # whether it is a torch.utils.data.DataLoader. Without it, only the fields above are known
    is_iterator: bool = False  # whether it is exhausted after one pass, like enumerate(loader)
    within: str = ""  # class of another kind of loader that it is inside of; empty without one
    dataset: str = ""
    is_iterable: bool = False  # whether the dataset is a stream, of which each worker gets a copy
    # Whether the copies of a stream split its samples among them; None if its code does not show it
    splits: bool | None = None
    is_webdataset: bool = False  # whether the stream is webdataset's
    shards: int | None = None  # number of shards of a stream, for all ranks; None if unknown
    ranks: int = 1
    is_daemonic: bool = False  # whether this process may not start others
    open_files: tuple[str, ...] = ()  # what forked workers would share with this process: "Photos.file"
    keeps_position: bool = False  # whether it has a state_dict
    in_order: bool = True  # whether its batches come in the sampler's order
    own_iterator: bool = False  # whether its class has its own _get_iterator
    contents: int = 0  # a number that changes when attributes of the dataset do
    # Whether a sample is one row of tensors or arrays, so that a list of indices fetches a whole batch
    is_table: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleTimes:
    """The GPU's idle time between training steps and its time for the parts of a step, by its own clock."""

    samples: int  # the latest sampled gaps between two steps, each with the following step
    host_s: Mapping[str, float]  # host seconds in these gaps, by phase
    # The GPU's idle seconds in these gaps, by the host's phase; copies on the GPU count as host_to_device_copy.
    idle_s: Mapping[str, float]
    seen: Mapping[str, int]  # number of gaps in which each phase occurred
    steps_s: Sequence[Mapping[str, float]] = ()  # of each of these steps, by part, including the GPU's idle time
    # Time in collectives by step, for the last of these steps: waits for other ranks, and sending.
    rank_wait_s: Mapping[int, float] = field(default_factory=dict)
    # GPU work per step, by part, and after and before a step; parts with unknown work are left out.
    work_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A source line at which the training thread, or a worker of its loader, was sampled at random moments."""

    phase: str  # the phase at that moment, as in `phase_s`; `"worker"` for a worker that was loading
    file: str  # path of the file, relative to the current folder if inside it, or to the package installation folder
    line: int  # line number in the file
    function: str  # function that contains the line
    samples: int  # number of samples at this line


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedSteps:
    """A few steps in which every wait of the host for the GPU was recorded."""

    steps: int
    operations: float  # number per step that allocate GPU memory, as most operations do
    syncs: tuple[SourceLine, ...] = ()  # lines at which it waited, most frequent first; samples are waits


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompiled:
    """A function that ``torch.compile`` compiled again during training."""

    file: str = ""  # path of its file, as in SourceLine
    line: int = 0  # first line, or the line after a graph break
    function: str = ""
    count: int = 0  # number of compilations after the first
    seconds: float = 0.0  # their duration
    reason: str = ""  # last condition of earlier compiled code that failed; empty if unknown, as before torch 2.7


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingFacts:
    """Observations of the loader's workers. Shares are of samples or of time."""

    storage_wait_share: float | None = None  # a worker waited for a disk (state D)
    ready_out_of_order_share: float | None = None  # of requested batches after a wait for one; mean over these waits
    long_waits: int = 0  # number of these waits
    ready_share: float | None = None  # a batch was ready right before a step requested one
    runnable_share: float | None = None  # a worker's main thread computed or waited for a core
    delayed_share: float | None = None  # a worker's main thread waited for a core
    runnable_threads: float | None = None  # of a worker: average number that computed or waited for a core
    worker_cores: float | None = None  # that a worker kept busy
    early_storage_bytes_per_batch: float | None = None  # read from storage, not the page cache, in the first third
    late_storage_bytes_per_batch: float | None = None  # the same in the last third of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreUser:
    """A program that used this job's cores while its training thread waited for one."""

    user: str  # its owner; empty for child processes of this job
    name: str
    cores: float  # that all processes of this name, or all children, kept busy during that time


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreFacts:
    """The use of the cores that this job may run on."""

    wait_share: float | None  # of steady steps: the training thread was runnable but had no core
    others_cores: float  # cores kept busy by other programs
    affinity_cores: int  # cores that this process may run on
    machine_cores: int  # cores of the machine
    runnable_threads: float | None = None  # this job's average number of threads that ran or waited for a core
    torch_threads: int = 1  # of the training process, within one operator
    other: CoreUser | None = None  # the largest other program
    children: CoreUser | None = None  # all descendants of the training process that are not workers of a loader


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """A step of one rank: its own work and its wait for other ranks."""

    rank: int  # global rank
    node: int  # number of its node
    own_step_s: float  # mean time of its own work per step: the sum of `phase_s`
    # Parts of that time by phase. `data_loading`, `host_to_device_copy`, `forward`, `backward` and `optimizer` are
    # means over steady steps. With a GPU, the last three are GPU times of sampled steps, without the longest 10%.
    # Others are means over all steps. Excludes the Trainer's own work, and time that may be waiting for other ranks.
    phase_s: Mapping[str, float] = field(default_factory=dict)
    # Mean time in collectives per step: waits for other ranks, and sending. On a GPU, it is GPU time in sampled steps.
    # `None` if unknown, as with strategies other than DDP.
    wait_s: float | None = None
    # The part of it in which other ranks had not arrived yet: the time beyond that of the rank with the shortest time
    # in the same step. `None` on the CPU, or if unknown.
    others_late_s: float | None = None
    lines: tuple[SourceLine, ...] = ()  # its source lines, if it is the slowest rank
    gpu: int | None = None  # device index of its GPU on the node; `None` without a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowSteps:
    """Steps that took more than twice the median, with most of the extra time in the same phase."""

    phase: str
    count: int
    seconds: float  # their wall time, including pauses
    steps: tuple[int, ...]  # the last 64, in order
    batch_items: float | None = None  # median number of elements in the first tensor of their batches


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The step times after the warm-up, without validation, checkpoints, and starting epochs."""

    count: int
    seconds: float
    p50_s: float  # percentiles of the latest 8,192 steps
    p95_s: float
    max_s: float
    slow: tuple[SlowSteps, ...] = ()  # by phase; their times include pauses
    batch_items: float | None = None  # as in SlowSteps, for the other steps


# What may change along with the step time: elements in the first tensor of a batch, the part of the highest SM clock
# that heat or the power limit takes, and the memory of the training process.
Quantity = Literal["batch_items", "lost_clock_percent", "resident_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """The measurements of a fit up to some moment."""

    wall_s: float
    steps: int
    phase_s: Mapping[str, float]  # adds up to wall_s
    blocks: Sequence[StepBlock]  # the steady steps
    host: HostBudget
    epochs: int = 1  # number started
    validations: int = 0  # number started
    checkpoints: int = 0  # number of steps after which a Trainer has written any
    validation_batches: int = 0
    validation_start_s: float = 0.0  # of their loaders: creating the iterators, and starting workers
    validation_wait_s: float = 0.0  # for their batches
    validation_loaders: tuple[LoaderSettings, ...] = ()  # torch's
    validation_facts: tuple[LoaderFacts, ...] = ()  # of those without workers, before the first batch
    step_times: StepTimes | None = None
    on_gpu: bool = False
    utilization_percent: float | None = None  # mean over the trainer's GPUs, outside validation
    own_utilization_percent: float | None = None  # of this rank's GPU; None: the same
    validation_utilization_percent: float | None = None
    loader: LoaderSettings | None = None  # None for anything but a torch.utils.data.DataLoader
    # Of the same loader, also of one that is not torch's: when training began, and now.
    loader_began: LoaderFacts = LoaderFacts()
    loader_now: LoaderFacts = LoaderFacts()
    loader_wait_share: float = 1.0  # of the wait for data: among several loaders, it is the one waited for most
    worker_cpu_s_per_batch: float | None = None
    searched: LoaderResult | None = None  # of a search for its settings
    batch_bytes: int | None = None
    loading: LoadingFacts = LoadingFacts()
    storage: str = ""  # of the dataset, as in dataset.storage_of; empty if unknown
    checkpoint_storage: str = ""
    cores: CoreFacts | None = None
    # Mean of the GPUs that train, over the run outside validation.
    gpu: GpuWindow = field(default_factory=GpuWindow)
    gpu_idle: IdleTimes | None = None
    memory: RankMemory | None = None
    growth: Sequence[MemoryGrowth] = ()
    watched: WatchedSteps | None = None
    recompiled: tuple[Recompiled, ...] | None = None  # most time first; None without torch.compile
    lines: tuple[SourceLine, ...] = ()  # most frequent first
    ranks: tuple[RankStep, ...] = ()  # empty with one rank
    dataset_growth: Sequence[GrownAttribute] = ()  # of the training loader's dataset
    spans: Sequence[PhaseSpan] = ()
    readings: Mapping[Quantity, Sequence[float]] = field(default_factory=dict)  # since the warm-up, at even intervals
    precision: str | None = None  # the Trainer's, as "32-true"
    matmul_precision: str | None = None
    log_every_n_steps: int = 50
    accumulate_grad_batches: int = 1
    epoch_steps: int | None = None  # in a whole epoch
    largest_batch_size: int | None = None  # in samples, that fits on the GPU of every rank
    has_trainer: bool = True  # advice may then recommend Trainer options
    stage: Stage = "fit"  # in the others, a step is one batch, without backward
    settings: Mapping[str, Any] = field(default_factory=dict)  # the Trainer's
    unseen: tuple[str, ...] = ()  # what could not be measured

    @property
    def activity(self) -> str:
        """What the run does, in a word."""
        return ACTIVITIES[self.stage]

    @property
    def step_s(self) -> float:
        """Wall time of training per step."""
        return self.wall_s / self.steps

    @property
    def step_p50_s(self) -> float | None:
        """Median time of a step after the warm-up, without pauses."""
        return None if self.step_times is None else self.step_times.p50_s

    @property
    def step_p95_s(self) -> float | None:
        """95th percentile of step times after the warm-up, without pauses."""
        return None if self.step_times is None else self.step_times.p95_s
