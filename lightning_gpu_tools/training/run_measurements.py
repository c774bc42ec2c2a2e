"""What was measured of a run: plain data, the input of the diagnosis. ``None`` = not measured."""

from __future__ import annotations

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

# Our default: how long the GPU was idle in a phase is taken from the steps sampled by the GPU's own times once this
# many of them had the phase; before, all of it counts.
_MIN_SAMPLES = 5
# Our default: the first blocks count as warm-up while they are slower than the rest by this much; 10 % is how far
# monitoring tools let two windows of ten steps differ. At most a quarter of all blocks is left out by it.
_UNSETTLED = 1.10
_MAX_UNSETTLED_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlock:
    """Consecutive steady training steps, added up. A step lasts from the start of its fetch to the start of the next.

    Attributes:
        steps: How many steps.
        wall_s: Their wall time.
        data_loading_s: Part of it in which the training thread waited for a batch.
        data_loading_cpu_s: CPU time the training thread itself spent in that wait, as seen in every tenth step; near
            zero where worker processes load.
        cpu_s: CPU time of all threads of the training process outside of that wait; 0 if it was not measured.
        host_to_device_copy_s: Part of it spent handing the batch to the device.
        training_step_s: Part of it spent in forward, backward and optimizer, as the training thread sees it.
        forward_s: Part of that spent in the model's ``training_step``; with manual optimization without the next two.
        backward_s: Part of ``training_step_s`` spent in backward.
        optimizer_s: Part of ``training_step_s`` spent in the optimizer's step, with zeroing, scaling and clipping
            gradients.
        paused_s: Part of ``wall_s`` spent in validation and checkpoints.
        rank_wait_s: Part of ``wall_s``, also of ``paused_s``, spent waiting for other ranks.
        beside_s: Part of it spent in callbacks, loggers, checkpoints and validation, without waiting for other ranks.
        gpu_steps: How many steps were sampled by the GPU's own times.
        gpu_step_s: What the GPU spent on these in forward, backward and optimizer.
    """

    steps: int = 0
    wall_s: float = 0.0
    data_loading_s: float = 0.0
    data_loading_cpu_s: float = 0.0
    cpu_s: float = 0.0
    host_to_device_copy_s: float = 0.0
    training_step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    paused_s: float = 0.0
    rank_wait_s: float = 0.0
    beside_s: float = 0.0
    gpu_steps: int = 0
    gpu_step_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Mean time of a step, without pauses."""
        return (self.wall_s - self.paused_s) / self.steps

    def __add__(self, other: StepBlock) -> StepBlock:
        return StepBlock(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def __sub__(self, other: StepBlock) -> StepBlock:
        return StepBlock(**{name: getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """The settings of a ``torch.utils.data.DataLoader`` that decide how fast it delivers.

    Attributes:
        num_workers: Worker processes; 0 = the training process loads by itself.
        prefetch_factor: Batches each worker loads ahead; ``None`` without workers.
        persistent_workers: Whether the workers live on after an epoch.
        pin_memory: Whether batches are put into page-locked memory, from which a GPU can copy in the background.
        batch_size: Samples in a batch; ``None`` if the loader does not batch by itself.
    """

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuIdle:
    """When the GPU had nothing to do between two training steps, and how long it was in the parts of one.

    Sampled by the GPU's own times.

    Attributes:
        samples: How many gaps between two steps, and steps after them, were sampled.
        host_s: Seconds that the host spent in these gaps, by phase.
        idle_s: Seconds for which the GPU had run dry in them, by the phase that the host was in; what the GPU itself
            spent on copying the batch counts as ``host_to_device_copy``.
        seen: How many of these gaps each phase was part of.
        step_s: Seconds of these steps by the GPU's own times, by part of the training step. What the GPU had to wait
            for in a part belongs to it.
        last_steps: The same of each of the last of these steps.
    """

    samples: int
    host_s: Mapping[str, float]
    idle_s: Mapping[str, float]
    seen: Mapping[str, int]
    step_s: Mapping[str, float] = field(default_factory=dict)
    last_steps: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """What is known of the GPU beside its utilization; the mean, or with several GPUs that of the first.

    Attributes:
        name: Product name.
        compute_capability: For example (9, 0).
        memory_total_bytes: All memory of the GPU.
        own_memory_bytes: Memory of this job, with what torch's allocator does not know of.
        others_memory_bytes: Memory of other jobs.
        others_utilization_percent: How busy they kept the GPU.
        sm_active_percent: Share of the streaming multiprocessors that had work; Hopper and later.
        tensor_active_percent: Share of the time the tensor cores were busy; Hopper and later.
        thermal_throttled_percent: Share of the time in which heat held the clocks down.
        power_capped_percent: Share of the time in which the power limit did.
        held_clock_percent: Mean clock of the multiprocessors against the highest they have, while power or heat held it
            down.
    """

    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_total_bytes: int | None = None
    own_memory_bytes: int | None = None
    others_memory_bytes: int | None = None
    others_utilization_percent: float | None = None
    sm_active_percent: float | None = None
    tensor_active_percent: float | None = None
    thermal_throttled_percent: float | None = None
    power_capped_percent: float | None = None
    held_clock_percent: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledSteps:
    """A few steps under torch.profiler.

    Attributes:
        steps: How many.
        wall_s: Their wall time; the profiler slows them down.
        kernels_per_step: Kernels the GPU ran; 0 where no GPU was traced.
        kernel_median_us: Median length of a kernel in microseconds; ``None`` without kernels.
        syncs_per_step: How often the host waited for the GPU, or on a CPU asked a tensor for its value.
        sync_lines: Where in the source, ``file:line``, the most frequent first.
        pageable_copies_per_step: Copies between host and GPU out of or into memory that is not page-locked.
        idle_s: The GPU's idle time within the steps by what it waited for: ``sync`` (a host that had waited for the
            GPU to run dry), ``copy``, or ``launch`` (a host that is slower than the kernels).
        exposed_communication_s: Time in which the GPU did nothing but communicate with other GPUs.
    """

    steps: int
    wall_s: float
    kernels_per_step: float = 0.0
    kernel_median_us: float | None = None
    syncs_per_step: float = 0.0
    sync_lines: tuple[str, ...] = ()
    pageable_copies_per_step: float = 0.0
    idle_s: Mapping[str, float] = field(default_factory=dict)
    exposed_communication_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingFacts:
    """What the loader's workers were seen doing.

    Attributes:
        samples: How many times they were sampled.
        storage_wait_share: Share of the samples of a worker in which it was waiting for a disk (state D).
        ready_out_of_order_share: Of the batches ordered, the share that lay ready when the one that training waited for
            came at last, the mean over such waits.
        long_waits: How many such waits were sampled.
        ready_share: Share of the samples, each right before a step asked for its batch, in which one lay ready.
        runnable_share: Share of the time for which a worker computed, or wanted to and no core was free for it.
        delayed_share: Share of the time for which it wanted to and no core was free.
        early_storage_bytes_per_batch: Read from storage, not from the page cache, in the first third of the run.
        late_storage_bytes_per_batch: The same in its last third.
    """

    samples: int = 0
    storage_wait_share: float | None = None
    ready_out_of_order_share: float | None = None
    long_waits: int = 0
    ready_share: float | None = None
    runnable_share: float | None = None
    delayed_share: float | None = None
    early_storage_bytes_per_batch: float | None = None
    late_storage_bytes_per_batch: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """A step of one rank: its own work, and how long it waits for other ranks.

    Attributes:
        rank: Global rank.
        node: Number of its node.
        own_step_s: Mean time of its own work on a step: the sum of ``phase_s``.
        phase_s: The parts of it, by phase: of steady steps ``data_loading``, ``host_to_device_copy``, ``forward``,
            ``backward`` and ``optimizer``; of the rest the mean over all steps. What cannot be told apart from waiting
            for other ranks is left out, and so is the Trainer's own work. On a GPU, ``forward``, ``backward`` and
            ``optimizer`` are by its own clock.
        own_s_over_time: The mean in each of at most 16 consecutive parts of the steady steps.
        steps_over_time: How many steps each part has; 0 if there are none.
        wait_s: Mean time for which it waits for other ranks on a steady step; ``None`` on a GPU, which waits alone.
        gpu: Device index of its GPU on the node; ``None`` without one.
        throttled_percent: Share of the time in which power or heat held that GPU's clocks down; ``None`` if unknown.
        storage_wait_percent: Share of the time for which a worker of its loader waited for a disk; likewise.
    """

    rank: int
    node: int
    own_step_s: float
    phase_s: Mapping[str, float] = field(default_factory=dict)
    own_s_over_time: tuple[float, ...] = ()
    steps_over_time: int = 0
    wait_s: float | None = None
    gpu: int | None = None
    throttled_percent: float | None = None
    storage_wait_percent: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowSteps:
    """Steps that took more than twice the median, and the most of it beyond other steps in the same phase.

    Attributes:
        phase: The phase.
        count: How many steps.
        seconds: Their wall time, with pauses.
        excess_s: What the phase took in them beyond what it takes in as many other steps.
        steps: Numbers of the last 64 of them, in order.
        batch_items: Median size of the first tensor of their batches, in numbers; ``None`` if unknown.
    """

    phase: str
    count: int
    seconds: float
    excess_s: float
    steps: tuple[int, ...]
    batch_items: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """How long each step after the warm-up took, without validation, checkpoints and starting epochs.

    Attributes:
        count: How many steps.
        seconds: Their time.
        p50_s: Median.
        p95_s: 95th percentile.
        max_s: The longest.
        longest: Number of the longest.
        slow: Those that took more than twice the median, pauses included, by the phase that made them slow.
        batch_items: Median size of the first tensor of the other steps' batches, in numbers; ``None`` if unknown.
    """

    count: int
    seconds: float
    p50_s: float
    p95_s: float
    max_s: float
    longest: int
    slow: tuple[SlowSteps, ...] = ()
    batch_items: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """What was measured of a fit up to some moment.

    Attributes:
        wall_s: Wall time of training so far.
        steps: Training steps so far.
        epochs: Epochs begun so far.
        phase_s: Wall time by phase; the phases add up to ``wall_s``.
        blocks: The steady steps in blocks.
        step_times: How long each of them took; ``None`` without any.
        host: What the host grants the process.
        on_gpu: Whether the model trains on a GPU.
        utilization_percent: Mean utilization of the trainer's GPUs outside of validation; ``None`` if nothing reports
            it.
        validation_utilization_percent: The same in validation.
        loader: Settings of the training DataLoader; ``None`` if it is not a ``torch.utils.data.DataLoader``.
        worker_cpu_s_per_batch: CPU time of the loader's workers for one batch; ``None`` without workers.
        batch_bytes: Size of one batch; ``None`` if unknown.
        loading: What the loader's workers were seen doing.
        gpu: What else is known of the GPU.
        gpu_idle: When the GPU was idle between steps.
        memory: What was counted of this rank's GPU memory; ``None`` if it could not be, or on another device.
        profile: A few steps under torch.profiler.
        ranks: How fast each rank is; empty with one.
        spans: What the run was spent on, span by span.
        precision: The Trainer's, as ``"32-true"``.
        matmul_precision: ``torch.get_float32_matmul_precision()``.
        log_every_n_steps: The Trainer's.
        optimizers: The optimizers of a training on the CPU by class: ``torch``'s, ``fusible`` if it would gain from its
            fused kernel, or the program's ``own``. Empty on other devices, whose work the host does not see.
        accumulate_grad_batches: The Trainer's.
        epoch_steps: Steps of a whole epoch; ``None`` if unknown.
        left_on_cpu: What the model has on the CPU where nobody moves it: ``"LitModel.class_weights (a list of 3
            tensors)"``.
        largest_batch_size: The largest batch that fits the GPU of each rank, in samples; ``None`` if it is unknown.
        has_trainer: Whether a Trainer drives it, whose options can be advised.
    """

    wall_s: float
    steps: int
    phase_s: Mapping[str, float]
    blocks: Sequence[StepBlock]
    host: HostBudget
    epochs: int = 1
    step_times: StepTimes | None = None
    on_gpu: bool = False
    utilization_percent: float | None = None
    validation_utilization_percent: float | None = None
    loader: LoaderSettings | None = None
    worker_cpu_s_per_batch: float | None = None
    batch_bytes: int | None = None
    loading: LoadingFacts | None = None
    gpu: GpuFacts | None = None
    gpu_idle: GpuIdle | None = None
    memory: RankMemory | None = None
    profile: ProfiledSteps | None = None
    ranks: tuple[RankStep, ...] = ()
    spans: Sequence[PhaseSpan] = ()
    precision: str | None = None
    matmul_precision: str | None = None
    log_every_n_steps: int = 50
    optimizers: Mapping[str, Literal["torch", "fusible", "own"]] = field(default_factory=dict)
    accumulate_grad_batches: int = 1
    epoch_steps: int | None = None
    left_on_cpu: tuple[str, ...] = ()
    largest_batch_size: int | None = None
    has_trainer: bool = True

    @property
    def idle_share(self) -> float:
        """Fraction of the wall time for which the GPU was idle outside of validation; 1 if it is unknown."""
        if self.utilization_percent is None:
            return 1.0
        return (1 - self.utilization_percent / 100) * (1 - self.phase_s.get(VALIDATION, 0.0) / self.wall_s)

    @property
    def step_s(self) -> float:
        """Wall time of training for each step."""
        return self.wall_s / self.steps

    @property
    def steady_step_s(self) -> float | None:
        """Median time of a steady step; ``None`` without any."""
        return median(block.step_s for block in self.blocks) if self.blocks else None

    @property
    def step_p50_s(self) -> float | None:
        """Median time of a step after the warm-up, without pauses; ``None`` without any."""
        return None if self.step_times is None else self.step_times.p50_s

    @property
    def step_p95_s(self) -> float | None:
        """95th percentile of it."""
        return None if self.step_times is None else self.step_times.p95_s

    @property
    def busy_cores(self) -> float:
        """How many cores the training process keeps busy while it does not wait for data; 1 if it was not measured."""
        cpu_s = sum(block.cpu_s for block in self.blocks)
        working_s = sum(block.wall_s - block.data_loading_s for block in self.blocks)
        return cpu_s / working_s if cpu_s > 0 and working_s > 0 else 1.0

    def exposed(self, phase: str) -> float:
        """Return for which part of a phase the GPU was idle; 1 if that was not measured."""
        idle = self.gpu_idle
        if idle is None or idle.seen.get(phase, 0) < _MIN_SAMPLES or idle.host_s.get(phase, 0.0) <= 0:
            return 1.0
        return min(1.0, idle.idle_s.get(phase, 0.0) / idle.host_s[phase])

    def lost_share(self, phase: str) -> float:
        """Return the fraction of the wall time for which the GPU was idle in a phase, as far as was measured."""
        idle = self.gpu_idle
        if phase == COPY and idle is not None and idle.samples >= _MIN_SAMPLES:
            # The GPU copies while the host may be far ahead, so it is counted by steps, not by the host's time.
            return idle.idle_s.get(COPY, 0.0) / idle.samples * self.steps / self.wall_s
        return self.exposed(phase) * self.phase_s.get(phase, 0.0) / self.wall_s

    def idle_by_phase(self) -> dict[str, float]:
        """Return the fraction of the wall time for which the GPU was idle in each phase outside of the step."""
        outside = {phase for phase in self.phase_s if phases.base_phase(phase) not in (TRAINING_STEP, VALIDATION)}
        return {phase: share for phase in sorted({*outside, COPY}) if (share := self.lost_share(phase)) > 0}

    @property
    def idle_in_step_share(self) -> float | None:
        """Fraction of the wall time for which the GPU was idle inside the training step; ``None`` if it is unknown.

        It is what the phases outside of the step leave of the idle time. Where the GPU's own times were not measured
        the phases count in full, so that this is the least it can be.
        """
        if not self.on_gpu or self.utilization_percent is None:
            return None
        return max(0.0, self.idle_share - sum(self.idle_by_phase().values()))

    @property
    def idle_residual(self) -> float:
        """By how much the idle times of the phases exceed the idle time that the driver reports, of the wall time."""
        if self.gpu_idle is None or self.utilization_percent is None:
            return 0.0
        return max(0.0, sum(self.idle_by_phase().values()) - self.idle_share)


def settled(blocks: Sequence[StepBlock]) -> Sequence[StepBlock]:
    """Return the blocks without those at the beginning in which the training was still getting up to speed."""
    times = [block.step_s for block in blocks]
    first = 0
    while first + 1 <= _MAX_UNSETTLED_SHARE * len(blocks) and times[first] > _UNSETTLED * median(times[first + 1 :]):
        first += 1
    return blocks[first:]
