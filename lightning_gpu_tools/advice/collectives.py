"""Names of the collectives in which ranks wait for each other, derived from their stacks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpu_tools.training.phases import RANK_WAIT, base_phase
from lightning_gpu_tools.training.stall_facts import Frame, users_frame

SAVE_CHECKPOINT = "saving a checkpoint"
SYNC_DIST = "self.log(..., sync_dist=True)"
COMPUTE_METRIC = "computing a metric"
SIGNAL_CHECK = "the check for signals"
END_OF_EPOCH = "the end of the epoch"
BACKWARD_SYNC = "backward"
FORWARD_SYNC = "DistributedDataParallel's forward"

# The files of torch's collectives.
_COLLECTIVE_FILES = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)
# Keyed by functions on the stack; the first match counts.
_COLLECTIVES = {
    ("save_checkpoint",): SAVE_CHECKPOINT,
    ("_sync_ddp_if_available", "_sync_ddp", "sync_ddp"): SYNC_DIST,
    ("gather_all_tensors",): COMPUTE_METRIC,
    ("_broadcast_sigterm_tensor", "_sigterm_notifier_fn"): SIGNAL_CHECK,
    ("on_train_epoch_end", "on_advance_end"): END_OF_EPOCH,
    ("_engine_run_backward",): BACKWARD_SYNC,
    ("_sync_buffers", "_pre_forward"): FORWARD_SYNC,
}


def collective_of(stack: Sequence[Frame], phase: str, ranks: int) -> str | None:
    """Return the name of the collective in which a rank waits for the others; ``None`` if it does not wait."""
    if ranks < 2:
        return None
    names = [frame.function for frame in stack]
    calls = [frame.function for frame in stack if frame.file.replace("\\", "/").endswith(_COLLECTIVE_FILES)]
    if not (base_phase(phase) == RANK_WAIT or calls or "_engine_run_backward" in names[-2:]):
        return None
    for functions, words in _COLLECTIVES.items():
        if any(name in functions for name in names):
            return words
    frame = users_frame(tuple(stack))
    innermost = next((name for name in reversed(calls) if name != "wrapper"), "a collective")
    return innermost + ("" if frame is None else f" in {frame.function}")
