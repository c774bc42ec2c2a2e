"""The records of the processes of a dry run, and the result that is judged from them. Pure; sizes are in bytes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from lightning_gpu_tools.advice.findings import in_words, is_of_program
from lightning_gpu_tools.memory.readings import MemoryLine
from lightning_gpu_tools.reports.last_run import min_free_for
from lightning_gpu_tools.simulated import MODELS
from lightning_gpu_tools.units import format_bytes, plural

# The environment variable with the folder of the dry run, and file names in this folder.
VARIABLE = "LIGHTNING_GPU_TOOLS_DRY_RUN"
PLAN, RECORD = "plan.json", "record-{}.json"

SCHEMA_VERSION = 1
NCCL_BYTES = 700 * 2**20  # measured with more than two A100s: nccl issue 964
_PRECISION = 0.05  # our default, for a search for the largest batch
_MAX_TRIALS = 20  # our default

# Errors of Lightning, which lists the indices of the requested GPUs, and of CUDA.
_TOO_FEW_GPUS = re.compile(r"requested gpu: \[(?:\d+, )*(\d+)\]|invalid device ordinal")
_ABORTED = (-6, 134)  # exit codes of a process that SIGABRT ended, and of a shell that ran it

# Of the memory of a GPU. Trainings that ran on an RTX 3090 needed up to 96.5% of it here. Those that failed there but
# fit here needed more, or torch had to empty its cache (docs/published_numbers.md).
_CERTAIN_SHARE = 0.97
_FAR = 8  # our default: times the batch that ran, beyond which a prediction is doubtful

Verdict = Literal["fits", "perhaps", "does_not_fit", "cannot_be_told"]
EXIT_CODES: dict[Verdict, int] = {"fits": 0, "does_not_fit": 1, "perhaps": 3, "cannot_be_told": 3}


class Moment(NamedTuple):
    """A moment of a run at which memory was allocated."""

    step: int  # starting at 1; 0 = before the first step
    phase: str  # forward, backward, optimizer, or empty
    file: str = ""  # file of the user's innermost line; empty if unknown
    line: int = 0
    function: str = ""


@dataclass(kw_only=True, slots=True)
class ProcessRecord:
    """The record of a process that has imported torch."""

    torch: str  # folder of torch
    # After all requested steps; before that; if it may continue after an error; if the recording failed.
    outcome: Literal["complete", "ended", "running", "broken"] = "running"
    error: str = ""  # that ended the process: "KeyError: 'x'"; empty if there was none or it is unknown
    steps: int = 0  # completed optimizer steps
    world_size: int = 1
    uses_gpu: bool = False  # it started CUDA
    batch_size: int | None = None  # first dimension of the first tensor that the model received; of a list, its length
    peak_allocated_bytes: int = 0  # of tensors, on the GPU where this is highest
    peak_reserved_bytes: int = 0  # that torch took from the driver on that GPU
    retries: int = 0  # allocations there that only succeeded after torch had emptied its cache
    peak: Moment | None = None  # of the memory of tensors
    parts_bytes: Mapping[str, int] = field(default_factory=dict)  # at that time, as in the report's parts_bytes
    lines: tuple[MemoryLine, ...] = ()  # the ten that allocated the most of it, largest first
    failures: int = 0  # of torch's allocator
    failure: Moment | None = None  # the last one
    requested_bytes: int = 0  # size of the failed allocation
    largest_batch: int | None = None  # predicted, on the target GPU; None if unknown
    has_validated: bool = False  # a model in evaluation mode ran without gradients
    has_convolutions: bool = False  # or recurrent layers, which also use cuDNN on a GPU
    masks: bool = False  # sizes depended on masks, which select everything
    generates: bool = False  # a model generated tokens, up to its maximum length


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """The result of a dry run, as ``--format json`` prints it. All sizes are in bytes; ``None`` = unknown."""

    schema_version: int = SCHEMA_VERSION  # version of this format
    verdict: Verdict  # `fits`, `does_not_fit`, `perhaps` near the limit, or `cannot_be_told` if unknown
    reason: str  # the verdict in a sentence
    gpu: str  # name of the simulated GPU
    usable_bytes: int  # memory of a GPU that programs can use
    # Memory that the process with the highest peak needs on its GPU, including the CUDA context and, with several
    # ranks, NCCL's buffers.
    needed_bytes: int | None = None
    # Value for `--min-free`: 20% more than `needed_bytes`, limited to the memory of the GPU.
    min_free_bytes: int | None = None
    # First dimension of the first tensor that the model received; of a list of images, its length.
    batch_size: int | None = None
    peak: Moment | None = None  # time and place of the peak memory of tensors: step, phase, file, line, function
    # Uses of `needed_bytes`, by part as in `gpu_report.json`.
    parts_bytes: Mapping[str, int] = field(default_factory=dict)
    lines: tuple[MemoryLine, ...] = ()  # the ten lines that allocated the most of it
    largest_batch: int | None = None  # largest batch size that fits, predicted from the recorded allocations
    # With `--vary`: whether each number that was tried fits.
    trials: Mapping[int, bool] = field(default_factory=dict)
    # For each GPU model: `yes`, `no`, or `perhaps` near the limit and on GPUs of another compute capability, where
    # attention may need more memory.
    fits_on: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # sentences on what the dry run did not measure


class Judgment(NamedTuple):
    """The verdict on a trial, and the record that it is based on."""

    verdict: Verdict
    record: ProcessRecord | None = None
    why_not: str = ""  # the reason that the verdict is unknown


def usable_bytes(gpu: str) -> int:
    """Return the memory of a GPU model that programs can use."""
    return (MODELS[gpu].memory_mib - MODELS[gpu].reserved_mib) * 2**20


def context_bytes(gpu: str, ranks: int) -> int:
    """Return the memory that a rank takes on a GPU in addition to torch's allocator."""
    return MODELS[gpu].context_mib * 2**20 + (NCCL_BYTES if ranks > 1 else 0)


def certain_bytes(gpu: str) -> int:
    """Return the memory of a GPU model up to which a run certainly fits."""
    return int(_CERTAIN_SHARE * usable_bytes(gpu))


def judge(code: int, records: Sequence[ProcessRecord], torch: str, gpu: str | None) -> Judgment:
    """Return the verdict on a command that ended with this exit code.

    ``torch`` is the folder of the torch for which the simulated GPUs were made. The verdict is ``perhaps`` instead of
    ``fits`` if a real ``gpu`` may fail.
    """
    why_not = _why_not_recorded(code, records, torch)
    if why_not:
        return Judgment("cannot_be_told", why_not=why_not)
    if code in _ABORTED and all(record.outcome != "running" and not record.error for record in records):
        code = 0  # after its end: torch's threads may lose a race with Python's shutdown
    fullest = max(records, key=lambda record: (record.outcome == "complete", record.steps, record.peak_reserved_bytes))
    failed = max(records, key=lambda record: record.failures)
    error = next((record.error for record in records if record.error), "")
    is_complete = fullest.outcome == "complete"
    if is_complete and not fullest.uses_gpu:
        why_not = f"The command completed {plural(fullest.steps, 'training step')} without using a GPU."
    elif not is_complete and (code or error):
        if failed.failures or "out of memory" in error:
            return Judgment("does_not_fit", failed)
        remedy, too_few = "A real GPU may give the same error.", _TOO_FEW_GPUS.search(error)
        if too_few is not None:
            count = 2 if too_few[1] is None else int(too_few[1]) + 1
            remedy = f"Simulate as many GPUs as the command uses: add -n {count} to dry-run."
        why_not = f"The command ended with {error or _ending(code)} {_after(fullest.steps)}. {remedy}"
    elif not any(record.uses_gpu for record in records):
        why_not = "The command did not use a GPU."
    if why_not:
        return Judgment("cannot_be_told", why_not=why_not)
    if not is_complete:
        fullest = max(records, key=lambda record: (record.uses_gpu, record.peak_reserved_bytes))
    needed = fullest.peak_reserved_bytes + (context_bytes(gpu, fullest.world_size) if gpu else 0)
    is_near = gpu is not None and (fullest.retries or needed > certain_bytes(gpu))
    return Judgment("perhaps" if is_near else "fits", fullest)


def _why_not_recorded(code: int, records: Sequence[ProcessRecord], torch: str) -> str:
    """Return why there is no usable record; empty if there is one."""
    if not records and code:
        return f"The command ended with {_ending(code)} before it imported torch. See its output."
    if not records:
        return (
            "The command ended without importing torch. Python processes started with -S, -I or -E, or without "
            "PYTHONPATH, cannot be recorded."
        )
    for record in records:
        if record.outcome == "broken":
            return f"The recording of a process failed: {record.error}"
        if record.torch != torch:
            return (
                f"The command uses the torch in {record.torch}, but the simulated GPUs are made for the torch in "
                f"{torch}. Install lightning-gpu-tools in the command's Python environment, and run dry-run from there."
            )
    return ""


def _ending(code: int) -> str:
    if code == -9:
        return "SIGKILL, probably because this machine ran out of host memory"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _after(steps: int) -> str:
    return f"after training step {steps}" if steps else "before the end of its first training step"


def moment_in_words(moment: Moment) -> str:
    """Return a moment as ``"in backward of step 2, at model.py:41 in forward"``."""
    phase = f"{moment.phase} of " if moment.phase else ""
    when = f"in {phase}step {moment.step}" if moment.step else "before the first step"
    return f"{when}, at {in_words(*moment[2:])}" if is_of_program(moment.file) else when


def result(judgment: Judgment, gpu: str, steps: int, needs: ProcessRecord | None = None) -> DryRun:
    """Return the result of a trial on GPUs of this model.

    ``needs`` is the record of the same command on GPUs with more memory, if it did not fit.
    """
    verdict, record, why_not = judgment
    usable = usable_bytes(gpu)
    if record is None:
        return DryRun(verdict=verdict, reason=why_not, gpu=gpu, usable_bytes=usable)
    fits = verdict != "does_not_fit"
    without_needs = DryRun(
        verdict=verdict,
        reason=f"needs more than {_all_of(gpu)}.{_failed(record)}",
        gpu=gpu,
        usable_bytes=usable,
        batch_size=record.batch_size,
    )
    known = record if fits else needs
    if known is None:
        return without_needs
    context = context_bytes(gpu, known.world_size)
    without_cache, needed = known.peak_allocated_bytes + context, known.peak_reserved_bytes + context
    fits_on = dict.fromkeys(MODELS, "no")
    for model, facts in MODELS.items():
        if without_cache <= usable_bytes(model):
            is_alike = facts.capability == MODELS[gpu].capability
            fits_on[model] = "yes" if is_alike and needed <= certain_bytes(model) else "perhaps"
    peak = f" (peak {moment_in_words(known.peak)})" if known.peak and fits else ""
    doubt = "" if fits else _failed(record)
    if verdict == "perhaps":
        doubt = f" Above {100 * _CERTAIN_SHARE:.0f}% of it, a real GPU may run out of memory."
        if known.retries:
            doubt = " Torch had to empty its cache to make room, and a real GPU may then run out of memory."
    return replace(
        without_needs,
        reason=f"needs {format_bytes(needed)} of {_all_of(gpu)}{peak}.{doubt}",
        needed_bytes=needed,
        min_free_bytes=min_free_for(needed, usable if needed <= usable else 0),
        batch_size=known.batch_size,
        peak=known.peak,
        parts_bytes={**known.parts_bytes, "cache_reusable": max(0, needed - without_cache), "context": context},
        lines=known.lines,
        largest_batch=known.largest_batch,
        fits_on=fits_on,
        unknown=tuple(_limitations(known, steps)),
    )


def _all_of(gpu: str) -> str:
    name = MODELS[gpu].name
    return f"the {format_bytes(usable_bytes(gpu))} of {'an' if name.startswith('N') else 'a'} {name}"


def _failed(record: ProcessRecord) -> str:
    if record.failure is None:
        return " The failure was outside torch's allocator."
    return f" Allocating {format_bytes(record.requested_bytes)} more failed {moment_in_words(record.failure)}."


def _limitations(record: ProcessRecord, steps: int) -> list[str]:
    found = []
    if record.steps < steps:
        found.append(f"The command ended {_after(record.steps)}, so the peak of later steps is unknown.")
    if record.failures and record.outcome == "complete":
        found.append(f"The allocator failed {plural(record.failures, 'time')}, but training continued.")
    if record.steps and not record.has_validated:
        found.append("No validation ran, so its peak is unknown.")
    if record.has_convolutions:
        found.append("cuDNN is not simulated. On an H200, ResNet-50 needed up to 11% more memory with cuDNN.")
    if record.masks:
        found.append("A mask selects everything here, so the peak may be too high.")
    if record.generates:
        found.append("Generated text has the maximum length and arbitrary tokens.")
    if record.steps and record.batch_size is None:
        found.append("The model's inputs do not show the batch size, so no largest batch is predicted.")
    if record.batch_size and (record.largest_batch or 0) > _FAR * record.batch_size:
        found.append(f"The largest batch is more than {_FAR} times the one that ran. Check it with --vary.")
    if record.world_size > 1:
        found.append(f"NCCL's buffers are not simulated, but estimated as {format_bytes(NCCL_BYTES)} per GPU.")
    return [*found, "Kernels compute nothing, so losses and times are meaningless."]


def next_trial(tried: Mapping[int, bool], guess: int) -> int | None:
    """Return the next number to try in the search for the largest that fits; ``None`` at the end of the search.

    The search starts at a guess. Its steps grow, because a good guess is nearly right and a bad one may be far off.
    """
    if not tried:
        return max(1, guess)
    largest = max((number for number, fits in tried.items() if fits), default=0)
    too_large = min((number for number, fits in tried.items() if not fits), default=None)
    step = max(1, int(_PRECISION * (largest or too_large or 0)))
    if len(tried) >= _MAX_TRIALS or (too_large is not None and too_large - largest <= step):
        return None
    distance: int = step * 4 ** (len(tried) - 1)
    if too_large is None:
        return largest + distance
    return (largest + too_large) // 2 if largest else max(too_large - distance, too_large // 2)
