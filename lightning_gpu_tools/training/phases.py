"""The phases of the training thread: one table for the clock, diagnoses, and reports."""

import functools
from typing import NamedTuple

DATA_LOADING = "data_loading"
HOST_TO_DEVICE_COPY = "host_to_device_copy"
TRAINING_STEP = "training_step"
FORWARD = "training_step/forward"
BACKWARD = "training_step/backward"
OPTIMIZER = "training_step/optimizer"
ZERO_GRAD = "training_step/zero_grad"
GRADIENT_CLIPPING = "training_step/gradient_clipping"
RANK_WAIT_IN_STEP = "training_step/waiting for other ranks"
GRADIENT_SCALER = "training_step/gradient_scaler"
VALIDATION = "validation"
CHECKPOINT = "checkpoint"
EPOCH_START = "epoch_start"
OUTSIDE_LOOP = "outside_loop"
GARBAGE_COLLECTION = "garbage_collection"
LOGGING = "logging"
SELF_LOG = "self.log"
CALLBACK = "callback"
MONITORING = "monitoring"
RANK_WAIT = "rank_wait"
TRAINER = "trainer"
UNEXPLAINED = "unexplained"
IN_WORKER = "worker"  # for source lines of a loader's worker, not for the clock


class Phase(NamedTuple):
    """An activity of the training thread."""

    name: str  # in phase_s; a slash may add the class of a callback or logger, or the part of a training step
    label: str  # in the text of the report
    color: str  # Okabe and Ito's palette, for all common color blindness, plus three grays and four dark colors
    is_pause: bool = False  # which is not part of a steady step
    has_trainer: bool | None = None  # whether only a run with, or only one without a Trainer has it; None: all have


# In the order in which the host passes through them from the end of one step to the end of the next.
PHASES = {
    phase.name: phase
    for phase in (
        Phase(CALLBACK, "callbacks and hooks", "#CC79A7"),
        Phase(LOGGING, "logging", "#F0E442"),
        Phase(CHECKPOINT, "writing checkpoints", "#0072B2", is_pause=True),
        Phase(VALIDATION, "validation", "#56B4E9", is_pause=True),
        Phase(OUTSIDE_LOOP, "outside of the loop", "#AA4499", is_pause=True, has_trainer=False),
        Phase(MONITORING, "this package", "#000000"),
        Phase(GARBAGE_COLLECTION, "garbage collection", "#999933"),
        Phase(TRAINER, "Trainer overhead", "#999999", has_trainer=True),
        Phase(RANK_WAIT, "waiting for other ranks", "#332288"),
        Phase(UNEXPLAINED, "unexplained", "#DDDDDD"),
        Phase(EPOCH_START, "starting epochs", "#882255", is_pause=True),
        Phase(DATA_LOADING, "waiting for data", "#D55E00"),
        Phase(HOST_TO_DEVICE_COPY, "moving the batch to the device", "#E69F00"),
        Phase(TRAINING_STEP, "training step", "#009E73"),
    )
}
_MAX_PHASES = 1000  # our default: user-defined names may contain numbers
PAUSES = tuple(phase.name for phase in PHASES.values() if phase.is_pause)


# The training thread calls these three often, so they are cached.


@functools.lru_cache(_MAX_PHASES)
def base_phase(phase: str) -> str:
    """Return a phase without the slash and the rest: ``"callback"`` for ``"callback/EarlyStopping"``."""
    return phase.partition("/")[0]


@functools.lru_cache(_MAX_PHASES)
def is_backward(phase: str) -> bool:
    """Return whether a part of a training step is backward: Lightning's, or ``"training_step/LitModel.backward"``."""
    return phase.startswith(TRAINING_STEP) and phase.endswith("backward")


@functools.lru_cache(_MAX_PHASES)
def is_outside_step(phase: str) -> bool:
    """Return whether a phase is a rank's own work outside its steps. ``self.log`` is not: it may wait for others."""
    return base_phase(phase) in (CALLBACK, LOGGING, CHECKPOINT, VALIDATION) and phase != f"{LOGGING}/{SELF_LOG}"


def rank_wait_in(phase: str) -> str:
    """Return the phase of waiting for other ranks within another phase."""
    base = base_phase(phase)
    return phase if base == RANK_WAIT else f"{RANK_WAIT}/{PHASES[base].label}"


# The parts of the time until the first step is done, in their order, and their labels in the report.
STARTUP_PARTS = {
    "own_code": "imports and own code",  # before the setup of the run; includes Lightning's prepare_data
    "setup": "setup",
    "sanity_check": "sanity check",
    "first_batch": "first batch",
    "compilation": "compiling",
    "first_step": "the step itself",
    "other": "other",
}
