"""The advisor in real trainings on the CPU, where the loader, a callback or nothing is slow."""

import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report
from lightning_gpu_tools.errors import LowGPUUtilizationWarning

STEPS = 90


class SlowCallback(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.004)


def test_a_slow_dataset_is_warned_about_once_with_settings(tmp_path: Path) -> None:
    advisor = GPUUtilizationAdvisor(min_seconds=0.1)
    with pytest.warns(LowGPUUtilizationWarning) as warned:
        quiet_trainer(tmp_path, callbacks=[advisor], max_epochs=2).fit(
            Model(), loader(Samples(STEPS, time.sleep, 0.004))
        )
    assert advisor.diagnosis is not None
    assert advisor.diagnosis.verdict == "low"
    finding = advisor.diagnosis.findings[0]
    assert finding.cause == "data_loading"
    assert finding.evidence["kind"] == "too_few_workers"
    assert 0.2 < finding.share < 1  # with free cores, 0.8
    assert 1.05 < finding.ceiling <= 1 / (1 - finding.share)
    assert finding.evidence["wait_ms_per_step"] >= 4
    (one,) = [one for one in warned if one.category is LowGPUUtilizationWarning]
    shown = warnings.formatwarning(one.message, one.category, one.filename, one.lineno)
    assert re.fullmatch(
        r"lightning_gpu_tools:1: (LowGPUUtilizationWarning: )?Waiting for data takes \d+% of the wall time\. "
        r"Set DataLoader\(\.\.\., num_workers=\d, prefetch_factor=2, persistent_workers=True\) \(now 0, .*\)\.\n",
        shown,
    )


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_slow_callback_is_named_wherever_it_comes(tmp_path: Path, slow_first: bool) -> None:
    advisor, slow = GPUUtilizationAdvisor(min_seconds=0.1), SlowCallback()
    callbacks = [slow, advisor] if slow_first else [advisor, slow]
    with pytest.warns(LowGPUUtilizationWarning, match="SlowCallback takes"):
        quiet_trainer(tmp_path, callbacks=callbacks, max_epochs=2).fit(Model(), loader(Samples(STEPS)))
    assert advisor.diagnosis is not None
    assert [finding.cause for finding in advisor.diagnosis.findings][:1] == ["callback"]
    assert advisor.diagnosis.findings[0].evidence["name"] == "SlowCallback"


def test_the_diagnosis_can_be_asked_for_during_training(tmp_path: Path) -> None:
    seen = []

    class Ask(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            seen.append(advisor.diagnosis)

    advisor = GPUUtilizationAdvisor()
    assert advisor.diagnosis is None
    quiet_trainer(tmp_path, callbacks=[Ask(), advisor]).fit(Model(), loader(Samples(5)))
    assert [diagnosis.verdict for diagnosis in seen if diagnosis] == ["too_short"] * 5
    assert advisor.diagnosis is not None
    assert "needs at least 50 steps and 5 s" in advisor.diagnosis.why


def test_an_advisor_alone_brings_a_monitor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(trainer: Trainer) -> list[str]:
        # A plugin of an earlier test, which jsonargparse may keep, adds its callback to any Trainer.
        found = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
        return [name for name in found if name != "PortableCheckpointHooks"]

    other = Callback()
    for given, expected in (
        ([GPUUtilizationAdvisor(), other], ["GPUUtilizationAdvisor", "GPUUtilizationMonitor", "Callback"]),
        ([other, GPUUtilizationMonitor(), GPUUtilizationAdvisor()], None),
    ):
        folder = tmp_path / str(len(given))
        trainer = quiet_trainer(folder, callbacks=given)
        before = names(trainer)
        for epochs in (1, 2):  # the second fit has what the first has added
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(Model(), loader(Samples(5)))
            assert names(trainer) == (expected or before)
            assert load_report(folder).outcome == "completed"
            assert capsys.readouterr().out.count("Verdict:") == 1
