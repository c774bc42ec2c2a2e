"""What was measured of a run: plain data, the input of the diagnosis. ``None`` = not measured."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from lightning_gpu_tools.host import HostBudget
from lightning_gpu_tools.training import phases
from lightning_gpu_tools.training.memory_readings import RankMemory
from lightning_gpu_tools.training.stopwatch import PhaseSpan

# The phases that rules speak of.
DATA_LOADING, COPY = phases.DATA_LOADING, phases.HOST_TO_DEVICE_COPY
TRAINING_STEP, VALIDATION = phases.TRAINING_STEP, phases.VALIDATION

# Our defaults.
_MIN_SAMPLES = 5  # of a phase, to know the GPU's idle time in it; with fewer, all of it counts
_UNSETTLED = 1.10  # first blocks that are slower than the rest by this: monitoring tools let windows differ by 10 %
_MAX_UNSETTLED_SHARE = 0.25  # of all blocks


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Consecutive steady training steps, added up. A step lasts from the start of its fetch to that of the next one."""

    steps: int = 0
    wall_s: float = 0.0
    data_loading_s: float = 0.0
    data_loading_cpu_s: float = 0.0  # of the training thread while it waits for data; near zero where workers load
    cpu_s: float = 0.0  # of all threads of the training process outside of that wait; 0 if it was not measured
    host_to_device_copy_s: float = 0.0
    forward_s: float = 0.0  # in the model's training_step; with manual optimization without the next two
    backward_s: float = 0.0
    optimizer_s: float = 0.0  # with zeroing, scaling and clipping gradients
    paused_s: float = 0.0  # validation and checkpoints
    rank_wait_s: float = 0.0  # also within pauses
    core_wait_s: float = 0.0  # the training thread could run and had no core; 0 if it was not measured
    beside_s: float = 0.0  # callbacks, loggers, checkpoints and validation, without waiting for other ranks
    gpu_steps: int = 0  # sampled by the GPU's own times
    gpu_step_s: float = 0.0  # of these, in forward, backward and optimizer

    @property
    def step_s(self) -> float:
        """Mean time of a step, without pauses."""
        return (self.wall_s - self.paused_s) / self.steps

    def __add__(self, other: StepBlock) -> StepBlock:
        return StepBlock(*map(operator.add, _parts(self), _parts(other)))

    def __sub__(self, other: StepBlock) -> StepBlock:
        return StepBlock(*map(operator.sub, _parts(self), _parts(other)))


_parts = operator.attrgetter(*StepBlock.__dataclass_fields__)  # in C: the training thread adds blocks up


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """The settings of a ``torch.utils.data.DataLoader`` that decide how fast it delivers.

    Attributes:
        num_workers: Worker processes; 0 = the training process loads.
        prefetch_factor: Batches that each worker loads ahead; ``None`` without workers.
        persistent_workers: Whether workers outlive an epoch.
        pin_memory: Whether batches are put into page-locked memory, from which a GPU can copy in the background.
        batch_size: Samples in a batch; ``None`` if the loader does not batch.
    """

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuIdle:
    """When the GPU was idle between two training steps, and how long the parts of a step took, by its own times."""

    samples: int  # gaps between two steps, each with the step after it
    host_s: Mapping[str, float]  # seconds of the host in these gaps, by phase
    # Of which the GPU was idle, by the host's phase; copies on the GPU count as host_to_device_copy.
    idle_s: Mapping[str, float]
    seen: Mapping[str, int]  # in how many gaps each phase occurred
    step_s: Mapping[str, float] = field(default_factory=dict)  # by part of the step, with the GPU's idle time in it
    last_steps: Sequence[Mapping[str, float]] = ()  # the same of each of the last steps
    # What the GPU works per step, by part of it, and after and before a step; without the parts of which it is unknown.
    work_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """What is known of the GPU beside its utilization; the mean, or with several GPUs that of the first."""

    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_total_bytes: int | None = None
    own_memory_bytes: int | None = None  # of this job, with what torch's allocator does not count
    others_memory_bytes: int | None = None
    others_utilization_percent: float | None = None
    sm_active_percent: float | None = None  # share of the multiprocessors that had work; Hopper and later
    tensor_active_percent: float | None = None  # Hopper and later
    thermal_throttled_percent: float | None = None  # of the time
    power_capped_percent: float | None = None  # of the time
    held_clock_percent: float | None = None  # of the highest clock, while power or heat held it down


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLine:
    """A line of the program at which the training thread, or a worker of its loader, was seen at random moments.

    Attributes:
        phase: The phase at that moment, as in ``phase_s``; ``"worker"`` where a worker was seen loading; and once more
            ``"slow_step/<phase>"`` in a step that already took twice as long as most.
        file: Its file, relative to the current folder if it is below it, or to where packages are installed.
        line: Its number in the file.
        function: The function that it belongs to.
        samples: How often it was seen.
    """

    phase: str
    file: str
    line: int
    function: str
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedSteps:
    """A few steps in which each wait of the host for the GPU was noted."""

    steps: int
    operations: float  # per step that allocate memory of the GPU, which most do
    syncs: tuple[SourceLine, ...] = ()  # where it waited, most frequent first; samples are waits


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingFacts:
    """What the loader's workers were seen doing. Shares are of samples or of time."""

    samples: int = 0
    storage_wait_share: float | None = None  # a worker waited for a disk (state D)
    ready_out_of_order_share: float | None = None  # of the ordered batches, after a wait for one; mean over such waits
    long_waits: int = 0  # such waits
    ready_share: float | None = None  # a batch lay ready right before a step asked for one
    runnable_share: float | None = None  # a worker computed or had no core
    delayed_share: float | None = None  # it had no core
    early_storage_bytes_per_batch: float | None = None  # read past the page cache in the first third of the run
    late_storage_bytes_per_batch: float | None = None  # in the last third


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreUser:
    """A program that used this job's cores while its training thread waited for one.

    Attributes:
        user: Who runs it.
        name: Its name.
        cores: How many cores all its processes together kept busy meanwhile.
    """

    user: str
    name: str
    cores: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreFacts:
    """Who got the cores that this job may use."""

    wait_share: float | None  # of the steady steps: the training thread could run and had no core
    own_cores: float  # that this job kept busy
    others_cores: float  # that other programs kept busy
    runnable_threads: float | None = None  # of this job, on average: they ran or waited for a core
    machine_cores: int = 0  # of the machine; 0: unknown
    affinity_cores: int = 0  # on which this process may run
    throttled_share: float = 0.0  # of the periods of a cgroup's quota: it was used up
    pressure_share: float | None = None  # some thread of the machine waited for a core
    torch_threads: int = 1  # of the training process, for one operator
    niceness: int = 0  # from -20, first, to 19, last
    in_slurm: bool = False
    users: tuple[CoreUser, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """A step of one rank: its own work, and how long it waits for other ranks.

    Attributes:
        rank: Global rank.
        node: Number of its node.
        own_step_s: Mean time of its own work on a step: the sum of ``phase_s``.
        phase_s: Its parts by phase: of steady steps ``data_loading``, ``host_to_device_copy``, ``forward``,
            ``backward`` and ``optimizer``, the last three by the GPU's clock if there is one; of other phases the mean
            over all steps. Without the Trainer's own work, and what cannot be told apart from waiting for other ranks.
        own_s_over_time: The mean in each of at most 16 consecutive parts of the steady steps.
        steps_over_time: How many steps each part has; 0 if there are none.
        wait_s: Mean wait for other ranks on a steady step; ``None`` on a GPU, where the host does not see it.
        core_wait_s: Mean time of a steady step in which its training thread could run and had no core; 0 if unknown.
        gpu: Device index of its GPU on the node; ``None`` without one.
        throttled_percent: Share of the time in which power or heat held its clocks down; ``None`` if unknown.
        storage_wait_percent: Share of the time in which a worker of its loader waited for a disk; likewise.
    """

    rank: int
    node: int
    own_step_s: float
    phase_s: Mapping[str, float] = field(default_factory=dict)
    own_s_over_time: tuple[float, ...] = ()
    steps_over_time: int = 0
    wait_s: float | None = None
    core_wait_s: float = 0.0
    gpu: int | None = None
    throttled_percent: float | None = None
    storage_wait_percent: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowSteps:
    """Steps that took more than twice the median, most of it in the same phase."""

    phase: str
    count: int
    seconds: float  # their wall time, with pauses
    excess_s: float  # what the phase took in them beyond what it takes in other steps
    steps: tuple[int, ...]  # the last 64, in order
    batch_items: float | None = None  # median size of the first tensor of their batches, in numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """How long each step after the warm-up took, without validation, checkpoints and starting epochs."""

    count: int
    seconds: float
    p50_s: float
    p95_s: float
    max_s: float
    slow: tuple[SlowSteps, ...] = ()  # by phase; these count pauses
    batch_items: float | None = None  # as in SlowSteps, of the other steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """What was measured of a fit up to some moment."""

    wall_s: float
    steps: int
    phase_s: Mapping[str, float]  # adds up to wall_s
    blocks: Sequence[StepBlock]  # the steady steps
    host: HostBudget
    epochs: int = 1  # begun
    validations: int = 0  # begun
    step_times: StepTimes | None = None
    on_gpu: bool = False
    utilization_percent: float | None = None  # mean of the trainer's GPUs, outside of validation
    validation_utilization_percent: float | None = None
    loader: LoaderSettings | None = None  # None if it is not a torch.utils.data.DataLoader
    worker_cpu_s_per_batch: float | None = None
    batch_bytes: int | None = None
    loading: LoadingFacts | None = None
    cores: CoreFacts | None = None
    gpu: GpuFacts | None = None
    gpu_idle: GpuIdle | None = None
    memory: RankMemory | None = None
    watched: WatchedSteps | None = None
    lines: tuple[SourceLine, ...] = ()  # most frequent first
    ranks: tuple[RankStep, ...] = ()  # empty with one rank
    spans: Sequence[PhaseSpan] = ()
    precision: str | None = None  # the Trainer's, as "32-true"
    matmul_precision: str | None = None
    log_every_n_steps: int = 50
    # By class: torch's, one that would gain from its fused kernel, or the program's own. Empty unless on the CPU.
    optimizers: Mapping[str, Literal["torch", "fusible", "own"]] = field(default_factory=dict)
    accumulate_grad_batches: int = 1
    epoch_steps: int | None = None  # of a whole epoch
    left_on_cpu: tuple[str, ...] = ()  # "LitModel.class_weights (a list with 3 tensors)", see device_facts
    largest_batch_size: int | None = None  # that fits the GPU of each rank, in samples
    has_trainer: bool = True  # whose options can be advised

    @property
    def idle_share(self) -> float:
        """Fraction of the wall time in which the GPU was idle outside of validation; 1 if it is unknown."""
        if self.utilization_percent is None:
            return 1.0
        return (1 - self.utilization_percent / 100) * (1 - self.phase_s.get(VALIDATION, 0.0) / self.wall_s)

    @property
    def step_s(self) -> float:
        """Wall time of training for each step."""
        return self.wall_s / self.steps

    @property
    def steady_step_s(self) -> float | None:
        """Median over the steady steps."""
        return median(block.step_s for block in self.blocks) if self.blocks else None

    @property
    def step_p50_s(self) -> float | None:
        """Median time of a step after the warm-up, without pauses."""
        return None if self.step_times is None else self.step_times.p50_s

    @property
    def step_p95_s(self) -> float | None:
        """95th percentile of it."""
        return None if self.step_times is None else self.step_times.p95_s

    @property
    def busy_cores(self) -> float:
        """Cores that the training process keeps busy while it does not wait for data; 1 if it was not measured."""
        cpu_s = sum(block.cpu_s for block in self.blocks)
        working_s = sum(block.wall_s - block.data_loading_s for block in self.blocks)
        return cpu_s / working_s if cpu_s > 0 and working_s > 0 else 1.0

    def exposed(self, phase: str) -> float:
        """Return in which part of a phase the GPU was idle; 1 if that was not measured."""
        idle = self.gpu_idle
        if idle is None or idle.seen.get(phase, 0) < _MIN_SAMPLES or idle.host_s.get(phase, 0.0) <= 0:
            return 1.0
        return min(1.0, idle.idle_s.get(phase, 0.0) / idle.host_s[phase])

    def lost_share(self, phase: str) -> float:
        """Return the fraction of the wall time in which the GPU was idle in a phase."""
        idle = self.gpu_idle
        if phase == COPY and idle is not None and idle.samples >= _MIN_SAMPLES:
            # Counted by steps, not by the host's time: the host may be far ahead of the GPU's copies.
            return idle.idle_s.get(COPY, 0.0) / idle.samples * self.steps / self.wall_s
        return self.exposed(phase) * self.phase_s.get(phase, 0.0) / self.wall_s

    def idle_by_phase(self) -> dict[str, float]:
        """Return the same of each phase outside of the training step."""
        outside = {phase for phase in self.phase_s if phases.base_phase(phase) not in (TRAINING_STEP, VALIDATION)}
        return {phase: share for phase in sorted({*outside, COPY}) if (share := self.lost_share(phase)) > 0}

    @property
    def idle_in_step_share(self) -> float | None:
        """Fraction of the wall time in which the GPU was idle inside the training step.

        A lower bound where the GPU's own times were not measured: phases outside of the step count in full then.
        """
        if not self.on_gpu or self.utilization_percent is None:
            return None
        return max(0.0, self.idle_share - sum(self.idle_by_phase().values()))

    @property
    def idle_residual(self) -> float:
        """How far the idle times of phases exceed what the driver reports, as a fraction of the wall time."""
        if self.gpu_idle is None or self.utilization_percent is None:
            return 0.0
        return max(0.0, sum(self.idle_by_phase().values()) - self.idle_share)


def without_warm_up(blocks: Sequence[StepBlock]) -> Sequence[StepBlock]:
    """Return the blocks without the first ones, in which the training was still getting faster."""
    times = [block.step_s for block in blocks]
    first = 0
    while first + 1 <= _MAX_UNSETTLED_SHARE * len(blocks) and times[first] > _UNSETTLED * median(times[first + 1 :]):
        first += 1
    return blocks[first:]
