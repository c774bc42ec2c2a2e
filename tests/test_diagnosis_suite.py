"""The cases of benchmarks/diagnosis_suite.py that take no time."""

from typing import get_args

import pytest
from diagnosis_suite import in_words
from gpu_cases import MEASURED
from toys import TOYS

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


def test_every_verdict_and_every_kind_of_waiting_for_data_has_a_case() -> None:
    known = {one.known for one in (*TOYS.values(), *MEASURED.values())}
    assert {*get_args(Verdict)} - {"low", "out_of_memory"} <= {one.split()[0] for one in known}
    assert len({one for one in known if one.startswith("data_loading ")}) == 6
