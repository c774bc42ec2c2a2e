"""checkpoint: training waits while checkpoints are written.

Times checkpoint callbacks and every save. On a GPU, only time during which the GPU was idle counts.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, sentence_of
from lightning_gpu_tools.advice.lost_time import lost_in, phases_of, times_rarer
from lightning_gpu_tools.training.phases import CHECKPOINT
from lightning_gpu_tools.training.run_measurements import RunMeasurements


def find(run: RunMeasurements) -> Findings:
    plugin = ": Trainer(plugins=[AsyncCheckpointIO(PortableCheckpointIO())])" if run.has_trainer else ""
    for phase in phases_of(run, CHECKPOINT):
        times, interval = times_rarer(run, phase), ""
        if run.checkpoints:
            steps = max(1, round(run.steps / run.checkpoints))
            interval = f": ModelCheckpoint(every_n_train_steps={times * steps})"
            if run.epoch_steps and steps >= run.epoch_steps:
                interval = f": ModelCheckpoint(every_n_epochs={times * round(steps / run.epoch_steps)})"
        advice = f"Save {times} times less often{interval}. Or save in the background{plugin}."
        advice += sentence_of(run.checkpoint_storage, "Their folder ")
        yield lost_in(run, phase, "Writing checkpoints takes", advice)


CAUSE = Cause(
    says="Writing checkpoints takes ...",
    change="save less often, by the factor in the advice; `AsyncCheckpointIO`; save to a local disk",
    find=find,
    ignores_min_cost=True,
    verified_on="cpu",
)
