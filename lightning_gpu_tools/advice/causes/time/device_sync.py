"""device_sync: the host waits for the GPU inside the step, and then the GPU waits for the host.

A few steps run under torch.cuda.set_sync_debug_mode, which reports the lines that wait. Calls of
torch.cuda.synchronize() are counted as well. The time that a step would take without these waits limits the gain.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, in_words
from lightning_gpu_tools.advice.lost_time import MIN_SHARE, idle_in_step, lost_time, syncs_in_step
from lightning_gpu_tools.training.run_measurements import TRAINING_STEP, RunMeasurements

_MAX_LINES = 3  # our default: lines in the advice
_LOG_WITHOUT_SYNC = " Pass the tensor itself to self.log; prog_bar=True syncs each time the bar is drawn."


def find(run: RunMeasurements) -> Findings:
    share, _, _ = idle_in_step(run)
    if run.watched is None or share < MIN_SHARE:
        return
    syncs = syncs_in_step(run)
    per_step = sum(sync.samples for sync in syncs) / run.watched.steps
    lines = ", ".join(in_words(sync.file, sync.line, sync.function) for sync in syncs[:_MAX_LINES])
    advice = (
        f"The host waits for the GPU {per_step:.3g}x per step, at {lines}. Remove .item(), .cpu(), float(), print, "
        "nonzero and synchronize() there, or call them every 50 steps."
        f"{_LOG_WITHOUT_SYNC if run.has_trainer else ''}"
    )
    begins = f"Waiting for GPU results inside the {run.activity} step takes"
    yield lost_time(run, share, begins, advice, phase=TRAINING_STEP, evidence={"source_lines": lines})


CAUSE = Cause(
    says="Waiting for GPU results inside the training step, with the source line",
    change="remove `.item()`, `print(tensor)`, `.cpu()`, `torch.cuda.synchronize()` there",
    find=find,
    verified_on="hardware",
)
