"""The cases of benchmarks/diagnosis_suite.py that take no time; every cause has one."""

from typing import get_args

import pytest
from diagnosis_suite import in_words
from gpu_cases import MEASURED
from out_of_memory import CASES
from toys import TOYS

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.diagnosis import diagnose
from lightning_gpu_tools.advice.findings import Verdict


@pytest.mark.parametrize("name", MEASURED)
def test_the_known_cause_is_named_first(name: str) -> None:
    known, run, share, words = MEASURED[name]
    diagnosis = diagnose(run)
    assert in_words(diagnosis) == known
    assert words in diagnosis.next_step
    if share is not None:
        assert diagnosis.findings[0].share == pytest.approx(share)


def test_every_cause_and_every_verdict_has_a_case() -> None:
    known = [toy.known for toy in TOYS.values()]
    known += [case.known for case in CASES.values() if case.known]
    known += [case.known for case in MEASURED.values()]
    missing = (
        {*TIME_CAUSES, *MEMORY_CAUSES, *get_args(Verdict)}
        - {"low", "out_of_memory"}
        - {one.split()[0] for one in known}
    )
    assert not missing, "add a case to benchmarks/gpu_cases.py, benchmarks/toys.py or benchmarks/out_of_memory.py"
    kinds = {one.split()[1] for one in known if one.startswith("data_loading ")}
    assert len(kinds) == 6
