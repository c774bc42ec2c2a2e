"""A step reaches its report through the files that ARCHITECTURE.md names, and no others have to be read for that."""

import re
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from trainings import Model, Samples, loader, quiet_trainer

import lightning_gpu_tools
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor

PACKAGE = Path(lightning_gpu_tools.__file__).parent
MAX_FILES = 8


def test_a_step_reaches_its_report_through_the_files_of_the_architecture(tmp_path: Path, capsys: Any) -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("## A step\n")[2].partition("\n## ")[0]
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)[:MAX_FILES]
    calls: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_back is not None:
            calls.add((frame.f_back.f_code.co_filename, frame.f_code.co_filename))

    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor(min_seconds=0.1)]
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, max_steps=80)
    sys.setprofile(note)
    try:
        trainer.fit(Model(), loader(Samples(80, time.sleep, 0.004)))
    finally:
        sys.setprofile(None)
    assert "Verdict: " in capsys.readouterr().out
    paths = [str(PACKAGE / file) for file in files]
    for place, path in enumerate(paths[1:], start=1):
        assert any((path, other) in calls or (other, path) in calls for other in paths[:place]), path
