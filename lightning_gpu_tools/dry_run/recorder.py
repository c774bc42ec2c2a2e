"""The recorder of a dry run, in a process of the command: it counts steps with hooks, and reads torch's allocator.

It ends the process after the requested steps. Speed does not matter here, and no time is measured.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import gc
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_gpu_tools.advice.batch_size import largest_batch
from lightning_gpu_tools.dry_run.result import PLAN, RECORD, Moment, ProcessRecord
from lightning_gpu_tools.loaders.settings import batch_shape
from lightning_gpu_tools.memory.blocks import (
    MemoryRecorder,
    by_line,
    events_with_growth,
    find_peak,
    live_blocks,
    parts_at,
    phase_of,
    recorded_events,
    segments,
    with_phases,
)
from lightning_gpu_tools.memory.counters import read_memory
from lightning_gpu_tools.memory.holdings import fixed_sizes, plain_tensors, workspace_sizes
from lightning_gpu_tools.memory.readings import Block, MemoryLine, Segment, StepMemory
from lightning_gpu_tools.patches import frames_kept
from lightning_gpu_tools.trainer.import_hooks import when_imported
from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.source_lines import line_in, stack_of
from lightning_gpu_tools.units import printable

_TIMEOUT_RANKS_S = 60.0  # our default, for the other ranks to complete the same step
_CUDNN_MODULES = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.RNNBase)
_REPLAYED_STEPS = 2  # the step that creates the optimizer's states, and the first step that starts with them


class Recorder:
    """A recorder of this process. If it fails, it ends the process, because training would not stop otherwise."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        # The number of steps after which the process ends, and the memory for torch on the target GPU.
        self._max_steps, self._room_bytes = json.loads((self._folder / PLAN).read_text())
        self._pid = os.getpid()
        self._memory = MemoryRecorder()
        self._gpus: dict[int, _Gpu] = {}
        self._counts: Counter[torch.optim.Optimizer] = Counter()  # of their steps
        self._in_step = self._is_mixed = False
        self._record = ProcessRecord(torch=os.path.dirname(os.path.abspath(torch.__file__)))

    def start(self) -> None:
        """Register torch's hooks, and start a thread that ends this process with the dry run."""
        threading.Thread(target=self._end_with_the_dry_run, daemon=True).start()
        register_optimizer_step_post_hook(self._guarded(self._after_optimizer))
        register_module_forward_pre_hook(self._guarded(self._before_forward))
        compat.call_once_cuda_starts(self._guarded(self._cuda_starts))
        atexit.register(self._guarded(self._at_exit))
        when_imported("", self._bound_generation, ("transformers.generation.utils",))

    def _bound_generation(self, transformers: ModuleType) -> None:
        """Make ``generate`` end at its maximum length. By itself it asks the GPU, which computes nothing."""
        at_length = transformers.MaxLengthCriteria.__call__
        has_ended = False

        @functools.wraps(at_length)
        def compare(criterion: Any, tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
            nonlocal has_ended
            has_ended = tokens.shape[1] >= criterion.max_length
            return at_length(criterion, tokens, *args, **options)

        def has_unfinished(*_: Any, **__: Any) -> bool:
            nonlocal has_ended
            self._record.generates = True
            ended, has_ended = has_ended, False
            return not ended

        transformers.MaxLengthCriteria.__call__ = compare
        transformers.GenerationMixin._has_unfinished_sequences = has_unfinished

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if os.getpid() != self._pid:  # a DataLoader worker
                return
            try:
                hook(*args)
            except Exception as error:  # noqa: BLE001 - after any error, there is no result
                self._record.error = _in_words(error)
                self._write("broken")
                os._exit(1)

        return call

    def _end_with_the_dry_run(self) -> None:
        with open(self._folder / PLAN) as plan:
            fcntl.flock(plan, fcntl.LOCK_SH)  # blocks until the dry run ends, even if it is killed
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def _cuda_starts(self) -> None:
        if torch.cuda.get_allocator_backend() != "native":
            raise NotImplementedError("backend:cudaMallocAsync is not simulated; unset it in PYTORCH_CUDA_ALLOC_CONF.")
        self._memory.start("all")
        attach = compat.find(compat.OUT_OF_MEMORY_OBSERVER)
        if attach is not None:
            attach(self._out_of_memory)

    def _out_of_memory(self, gpu: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
        with contextlib.suppress(Exception):  # an error here would replace torch's
            stack = stack_of(traceback.walk_stack(sys._getframe()))[1:]
            with frames_kept():
                training = sys._current_frames()[threading.main_thread().ident or 0]
                seen = line_in(stack) or line_in(stack_of(traceback.walk_stack(training)))
            self._record.failures += 1
            self._record.failure = Moment(self._step, phase_of(stack) if self._step else "", *(seen or ())[:3])
            self._record.requested_bytes = requested_bytes
            self._write("running")

    @property
    def _step(self) -> int:
        """The current step, or between steps the next one; 0 before the first."""
        return self._record.steps + 1 if self._in_step or self._record.steps else 0

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._in_step or not _uses_cuda():
            return
        trains = torch.is_grad_enabled()
        self._record.has_validated |= not trains and not module.training
        batch = next((tensor for tensor in plain_tensors(inputs) if tensor.is_cuda and tensor.dim()), None)
        if batch is None or not (trains or not self._gpus):
            return
        self._read(is_step=False)
        if trains:
            self._in_step = True
            shape = batch_shape(inputs)
            self._record.batch_size = shape[0] if shape else None
            self._is_mixed |= torch.is_autocast_enabled("cuda")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._counts[optimizer] += 1
        if self._counts[optimizer] <= self._record.steps:  # another optimizer in the same step
            return
        self._record.steps += 1
        if _uses_cuda():
            self._read(is_step=self._in_step)
        self._in_step = False
        if self._record.steps < self._max_steps:
            return
        if _uses_cuda():
            torch.cuda.synchronize()
        self._write("complete")
        give_up_s = time.monotonic() + _TIMEOUT_RANKS_S
        complete = RECORD.format("complete-*")
        while len([*self._folder.glob(complete)]) < self._record.world_size and time.monotonic() < give_up_s:
            time.sleep(0.05)
        for child in multiprocessing.active_children():  # DataLoader workers
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed
                stream.flush()
        os._exit(0)

    def _at_exit(self) -> None:
        if _uses_cuda():
            with contextlib.suppress(RuntimeError):  # CUDA itself may have failed
                self._read(is_step=False)
        error = getattr(sys, "last_value", None)  # set by Python if an error ends the main thread
        self._record.error = "" if error is None else _in_words(error)
        self._write("ended")

    def _read(self, *, is_step: bool) -> None:
        """Read the memory of all GPUs, and its changes since the last reading."""
        modules = [module for module in gc.get_objects() if issubclass(type(module), torch.nn.Module)]
        weights = [weight for module in modules for weight in module.parameters(recurse=False)]
        weights += [weight for one in self._counts for group in one.param_groups for weight in group["params"]]
        names = _names(
            parameters=weights,
            gradients=[weight.grad for weight in weights if weight.grad is not None],
            optimizer_states=[[*one.state.values()] for one in self._counts],
            buffers=[[*module.buffers(recurse=False)] for module in modules],
        )
        self._record.has_convolutions = any(isinstance(module, _CUDNN_MODULES) for module in modules)
        for index in range(torch.cuda.device_count()):
            reading = read_memory(torch.device("cuda", index))
            if reading is not None and reading.peak_reserved_bytes:
                gpu = self._gpus.setdefault(index, _Gpu(torch.device("cuda", index)))
                gpu.read(self._record.steps if is_step else self._step, names)
                if is_step and len(gpu.steps) < _REPLAYED_STEPS:
                    gpu.keep_step(self._record.steps, self._record.batch_size or 1, weights, self._is_mixed)
                elif not is_step:
                    gpu.begin_step()
        self._memory.stop()
        self._memory.start("all")

    def _write(self, outcome: Literal["complete", "ended", "running", "broken"]) -> None:
        record = self._record
        record.outcome = outcome
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            record.world_size = torch.distributed.get_world_size()
        record.uses_gpu = _uses_cuda()
        # The number of masks whose elements the simulated GPUs have counted.
        record.masks = ctypes.c_long.in_dll(ctypes.CDLL(None), "simulated_cuda_masks").value > 0
        if self._gpus and outcome in ("complete", "ended"):
            gpu = max(self._gpus.values(), key=lambda gpu: gpu.peak_bytes)
            reading = read_memory(gpu.gpu)
            assert reading is not None
            if record.batch_size and outcome == "complete" and len(gpu.steps) == _REPLAYED_STEPS and gpu.is_complete:
                record.largest_batch = largest_batch(gpu.recorded(), self._room_bytes)
            parts = dict(gpu.parts)
            parts["activations"] = max(
                0, reading.peak_allocated_bytes - sum(parts.values()) + parts.get("activations", 0)
            )
            record.parts_bytes = {name: size for name, size in parts.items() if size}
            record.peak, record.lines, record.retries = gpu.peak, gpu.lines, reading.retries
            record.peak_allocated_bytes = reading.peak_allocated_bytes
            record.peak_reserved_bytes = reading.peak_reserved_bytes
        file = self._folder / RECORD.format(f"complete-{self._pid}" if outcome == "complete" else self._pid)
        written = file.with_suffix(".new")
        written.write_text(json.dumps(dataclasses.asdict(record)))
        written.replace(file)


@dataclass
class _Gpu:
    """The recorded memory of one GPU."""

    gpu: torch.device
    peak_bytes: int = 0
    peak: Moment | None = None
    parts: Counter[str] = field(default_factory=Counter)
    lines: tuple[MemoryLine, ...] = ()
    steps: list[StepMemory] = field(default_factory=list)
    is_complete: bool = True  # no event of these steps is missing
    _segments: tuple[Segment, ...] = ()  # at the beginning of the first step
    _unnamed: dict[int, int] = field(default_factory=dict)  # address -> size of unknown blocks in these segments
    _between: list[Block] = field(default_factory=list)  # events between the previous step and this one
    # From the last reading:
    _names: dict[int, str] = field(default_factory=dict)
    _live: dict[int, Block] = field(default_factory=dict)
    _events: list[Block] = field(default_factory=list)
    _is_whole: bool = True
    _allocations: int = 0

    def read(self, step: int, names: dict[int, str]) -> None:
        """Read the events since the last reading, in this step."""
        reading = read_memory(self.gpu)
        assert reading is not None
        self._events = [event._replace(phase=phase_of(event.stack)) for event in recorded_events(self.gpu)]
        allocated = sum(event.size > 0 for event in self._events)
        self._is_whole = allocated == reading.allocations - self._allocations
        self._allocations = reading.allocations
        found = find_peak(self._live, self._events if self._is_whole else ())
        if found.size > self.peak_bytes:
            last = found.reached_by
            seen = None if last is None else line_in(last.stack)
            phase = last.phase if last is not None and step else ""  # there are no phases before training
            self.peak_bytes = found.size
            self.peak = Moment(step, phase, *(seen or ())[:3])
            self.parts = parts_at(found, self._names, names, workspace_sizes(self.gpu))
            self.lines = by_line(found.blocks.values())
        self._live = {block.address: block for block in live_blocks(self.gpu)}
        self._names = names

    def begin_step(self) -> None:
        """Record the state at the beginning of a step, from the last reading."""
        self.is_complete &= self._is_whole or not self.steps
        if self.steps:
            self._between = self._events
        else:
            self._segments = segments(self.gpu)
            self._unnamed = {address: self._live[address].size for address in self._live.keys() - self._names.keys()}

    def recorded(self) -> tuple[StepMemory, ...]:
        """Return the steps for a replay. The first one also allocates its batch: unknown blocks that it later frees."""
        freed = {event.address for step in self.steps for event in step.events if event.size < 0}
        batch = {address: size for address, size in self._unnamed.items() if address in freed}
        first, *others = self.steps
        events = (*(Block(address, size, grows=True) for address, size in batch.items()), *first.events)
        kept = []
        for segment in self._segments:
            blocks = tuple(block._replace(is_free=block.is_free or block.address in batch) for block in segment)
            # A segment that holds only the batch would not exist before it.
            if blocks == segment or not all(block.is_free for block in blocks):
                kept.append(blocks)
        return (dataclasses.replace(first, segments=tuple(kept), events=events), *others)

    def keep_step(self, step: int, batch_size: int, weights: Iterable[torch.Tensor], is_mixed: bool) -> None:
        """Keep the events of a step, from the last reading, together with those before it, for a replay."""
        self.is_complete &= self._is_whole
        events = [*self._between, *self._events]
        weights = {id(weight): weight for weight in weights}.values()
        found = events_with_growth(with_phases(events), weights, is_mixed=is_mixed, fixed=fixed_sizes(self.gpu))
        self.steps.append(StepMemory(step=step, batch_shape=(batch_size,), events=found))


def _names(**parts: object) -> dict[int, str]:
    """Return address -> part for the GPU tensors in the given parts; the first part counts."""
    return {
        tensor.untyped_storage().data_ptr(): name
        for name, tensors in reversed(parts.items())
        for tensor in plain_tensors(tensors)
        if tensor.is_cuda
    }


def _in_words(error: BaseException) -> str:
    return printable(" ".join(f"{type(error).__name__}: {error}".split()), 300)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
