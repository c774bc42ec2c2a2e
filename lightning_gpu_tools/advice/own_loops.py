"""What a diagnosis says of a loop without a Trainer, in the place of a Trainer's options and callbacks."""

from __future__ import annotations

import re
from dataclasses import replace

from lightning_gpu_tools.advice.findings import Diagnosis

_INSTEAD = {
    r"NumWorkersFinder\(\) finds and applies them": "find_loader_settings(loader, step_time_s=...) finds them",
    r"NumWorkersFinder\(\) measures it": "find_loader_settings(loader, step_time_s=...) measures it",
    r": Trainer\(log_every_n_steps=(\d+)\)": r": every \1 steps",
    r": Trainer\(log_every_n_steps=\.\.\.\)": "",
    r" \(ModelCheckpoint\(.*?\)\)": "",
    r" with AsyncCheckpointIO\(PortableCheckpointIO\(\)\)": "",
    r" \(Trainer\(val_check_interval=.*?\)\)": "",
    r" \(limit_val_batches=\.\.\.\)": "",
    r"Set Trainer\(accumulate_grad_batches=\.\.\.\)": "Accumulate gradients over several batches (no_sync)",
    r" \(Trainer\(accumulate_grad_batches=4\)\)": "",
    r" Pass the tensor itself to self\.log; .*?drawn\.": "",
    r"Trainer\(precision=": "Fabric(precision=",  # a loop without Fabric does not say its precision
    r"Profile the training step: Trainer\(.*?\)": "Profile some steps with torch.profiler",
    r"GPUUtilizationAdvisor\(profile=True\) profiles three steps, which": "torch.profiler, over three steps,",
    r"Make the transfer hooks cheaper \(.*?\), or do their work": "Make moving the batch cheaper, or do that work",
    r" of GPUUtilizationAdvisor": "",
    r"The callback ": "The phase ",
    r"(^|\. )code after": r"\1Code after",
}


def for_own_loop(diagnosis: Diagnosis) -> Diagnosis:
    """Return a diagnosis with advice that a loop without a Trainer can follow."""
    return replace(
        diagnosis,
        findings=tuple(replace(one, advice=_said(one.advice)) for one in diagnosis.findings),
        why=_said(diagnosis.why),
        next_step=_said(diagnosis.next_step),
    )


def _said(text: str) -> str:
    for of_trainer, of_loop in _INSTEAD.items():
        text = re.sub(of_trainer, of_loop, text)
    return text
