"""Advice for a Trainer names options of a Trainer, and advice for a loop what a loop can do."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from cause_examples import MEMORY_EXAMPLES, STALL_EXAMPLES, TIME_EXAMPLES
from gpu_cases import MEASURED
from real_names import unknown_names
from synthetic import COPIES, LOADER, STEP, WAITS, a_host, contended, cpu_run, gpu_run, ranks, run_of

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES, STALL_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.diagnosis import diagnose, explain_stall
from lightning_gpu_tools.advice.findings import Diagnosis
from lightning_gpu_tools.memory.readings import MemoryGrowth
from lightning_gpu_tools.training.phases import LOGGING, OUTSIDE_LOOP, PHASES, SELF_LOG, TRAINER, base_phase
from lightning_gpu_tools.training.run_measurements import CoreUser, LoadingFacts, RunMeasurements

OF_A_TRAINER = (
    r"Trainer|NumWorkersFinder|GPUUtilization|ModelCheckpoint|CheckpointIO|FreeMemoryCUDA|DDPStrategy|self\.log|"
    r"prog_bar|transfer_batch|batch_transfer|Lightning|"
    r"[Tt]he callback |The logger  |every_n_|accumulate_grad|val_check|limit_val|_interval|\"interval"
)
OF_A_LOOP = r"run\.phase|run\.batches|watch\(|find_loader_settings|Fabric|no_sync|select_gpus|\.to\(device\)|The phase"


def late_rank(phase: str) -> RunMeasurements:
    return gpu_run(STEP, 99.0, **ranks(*[{phase: 0.01}] * 3, {phase: 0.03}))


def uneven(phase: str, every: int, slow_s: float, **options: Any) -> RunMeasurements:
    slow = [number % every == 0 and number > 20 for number in range(1, 401)]
    return run_of([{"training_step": 0.02, **({phase: slow_s} if one else {})} for one in slow], **options)


LONG_PHASES = (
    *("callback", "callback/StepLR.step", "callback/LitModel.optimizer_step", "callback/a.log", "logging"),
    *("logging/self.log", "host_to_device_copy", "training_step", TRAINER, OUTSIDE_LOOP),
)
RUNS = [
    *(case.run for case in MEASURED.values()),
    *(examples.sick for examples in TIME_EXAMPLES.values()),
    *(cpu_run({phase: 20, "training_step/forward": 5}) for phase in LONG_PHASES),
    cpu_run(WAITS, loader=None),
    gpu_run(**COPIES, ranks=late_rank("forward").ranks),
    gpu_run(**COPIES, loader=dataclasses.replace(LOADER, pin_memory=False)),
    *map(late_rank, ("data_loading", "backward", "callback/A", "logging/A", "checkpoint", "validation", "epoch_start")),
    cpu_run(STEP, **ranks(*[{"data_loading": 0.01}] * 2, wait_s=0.02)),
    contended(others=1.0, other=CoreUser(user="eve", name="job", cores=1.0)),
    contended(machine_cores=64),
    contended(children=CoreUser(user="", name="ffmpeg", cores=1.0)),
    cpu_run(WAITS, host=a_host(2), loader=LOADER, loading=LoadingFacts(runnable_threads=2.0)),
    *(uneven(phase, 50, 1.0) for phase in ("training_step", "data_loading", "callback/A", "logging/A", "checkpoint")),
    uneven("training_step", 4, 0.05, accumulate_grad_batches=4),
    dataclasses.replace(cpu_run(STEP), blocks=[]),
]


DIAGNOSES = [
    *((run, {}) for run in RUNS),
    *((run, {"out_of_memory": error}) for examples in MEMORY_EXAMPLES.values() for run, error in examples),
    *(
        (gpu_run(STEP, 97.0, growth=[MemoryGrowth(whose=whose, bytes_per_s=1e6, grown_bytes=1e9)]), {})
        for whose in ("gpu", "process", "workers")
    ),
]


SHAPES = [
    text
    for known in (TIME_CAUSES, MEMORY_CAUSES, STALL_CAUSES)
    for cause in known.values()
    for variant in cause.variants
    for text in (variant.says, variant.change)
]


def texts(diagnosis: Diagnosis) -> list[str]:
    return [diagnosis.why, diagnosis.next_step, *(finding.advice for finding in diagnosis.findings)]


@pytest.mark.parametrize(
    ("has_trainer", "foreign"),
    [pytest.param(True, OF_A_LOOP, id="Trainer"), pytest.param(False, OF_A_TRAINER, id="loop")],
)
def test_advice_names_only_what_the_user_has(has_trainer: bool, foreign: str) -> None:
    impossible = {phase.name for phase in PHASES.values() if phase.has_trainer not in (None, has_trainer)}
    impossible |= set() if has_trainer else {f"{LOGGING}/{SELF_LOG}"}
    for run, more in DIAGNOSES:
        if impossible.isdisjoint(run.phase_s):
            for text in texts(diagnose(dataclasses.replace(run, has_trainer=has_trainer), **more)):
                word = re.search(foreign, text)
                assert word is None, f"only if run.has_trainer is {not has_trainer}, say {word[0]!r}: {text}"


def test_advice_on_a_stage_without_training_is_not_about_training() -> None:
    of_training = r"NumWorkersFinder|accumulate_grad|accumulate gradients|learning rate|max_steps|log_every_n_steps="
    possible = {"data_loading", "host_to_device_copy", "callback", "logging", "trainer", "garbage_collection"}
    for run, more in DIAGNOSES:
        if {*map(base_phase, run.phase_s)} <= {"training_step", *possible} and run.accumulate_grad_batches == 1:
            for stage in ("validate", "test", "predict"):
                for text in texts(diagnose(dataclasses.replace(run, stage=stage), **more)):
                    assert re.search(of_training, text) is None, text
                    assert "training step" not in text


def texts_of_stalls() -> Iterator[str]:
    for facts in itertools.chain.from_iterable(STALL_EXAMPLES.values()):
        found = explain_stall(facts)
        yield from (found.why, found.advice)


def test_variables_commands_classes_and_options_in_advice_exist() -> None:
    diagnoses = (
        diagnose(dataclasses.replace(run, has_trainer=has_trainer), **more)
        for run, more in DIAGNOSES
        for has_trainer in (True, False)
    )
    for text in {*SHAPES, *texts_of_stalls(), *(text for diagnosis in diagnoses for text in texts(diagnosis))}:
        assert unknown_names(text) == [], (
            f"{text!r} names what does not exist; if it does, add it to tests/real_names.py"
        )
