"""Source lines that a finding names, from synthetic samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.examples import LOADER, STEP, WAITS, cpu_run
from lightning_gpu_tools.advice.findings import top_line_sentence, top_source_lines
from lightning_gpu_tools.advice.lost_time import FIND_FUNCTION
from lightning_gpu_tools.training.phases import DATA_LOADING, IN_WORKER, OPTIMIZER
from lightning_gpu_tools.training.run_measurements import SourceLine


def seen(phase: str, samples: int, line: int = 41, **options: Any) -> SourceLine:
    return SourceLine(
        **{"phase": phase, "file": "data.py", "line": line, "function": "decode", "samples": samples, **options}
    )


def test_a_line_of_a_framework_is_no_advice() -> None:
    lines = [seen(OPTIMIZER, 30, file="lightning/pytorch/core/module.py")]
    assert top_line_sentence(lines, OPTIMIZER) == ""
    assert top_source_lines(lines, OPTIMIZER) == "lightning/pytorch/core/module.py:41 in decode (100%)"


def test_a_name_of_another_user_reaches_no_terminal_raw() -> None:
    assert "\x1b" not in str(
        top_source_lines([seen(DATA_LOADING, 30, file="a\x1b[2J.py", function="\x1b[1m")], DATA_LOADING)
    )


@pytest.mark.parametrize(
    ("phase", "phase_ms", "options", "cause"),
    [
        (DATA_LOADING, WAITS, {}, "data_loading"),
        (IN_WORKER, WAITS, {"loader": replace(LOADER, num_workers=1), "worker_cpu_s_per_batch": 0.04}, "data_loading"),
        ("callback/A", {"callback/A": 20, "training_step": 20}, {}, "callback"),
        ("unexplained", {"unexplained": 20, "training_step": 20}, {}, "unexplained"),
    ],
)
def test_a_finding_on_the_host_names_its_line(
    phase: str, phase_ms: Mapping[str, float], options: dict[str, Any], cause: str
) -> None:
    others = [seen("elsewhere", 1000, line=2), seen("callback/B", 1000, line=3)]
    diagnosis = diagnose(cpu_run(phase_ms, lines=(*others, seen(phase, 62), seen(phase, 38, line=57)), **options))
    first = diagnosis.findings[0]
    assert first.cause == cause
    assert first.evidence["source_lines"] == "data.py:41 in decode (62%), data.py:57 in decode (38%)"
    time = "the loader's time" if cause == "data_loading" else "this time"
    assert f"62% of {time} is at data.py:41 in decode." in first.advice
    assert first.advice in diagnosis.next_step


def test_a_line_that_is_known_need_not_be_looked_for() -> None:
    phase_ms = {**STEP, "unexplained": 14}
    unknown = diagnose(cpu_run(phase_ms)).findings[0]
    known = diagnose(cpu_run(phase_ms, lines=(seen("unexplained", 40),))).findings[0]
    assert FIND_FUNCTION in unknown.advice
    assert known.advice == "100% of this time is at data.py:41 in decode."
