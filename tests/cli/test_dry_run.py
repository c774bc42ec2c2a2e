"""``dry-run`` without simulated GPUs: what it refuses. What it does is in tests/simulated."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
import torch

Call = Callable[..., "CompletedProcess[str]"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--", "python", "train.py"], "--gpu"),
        (["--gpu", "h1000", "--", "python"], "There is no GPU 'h1000'. Choose one of b200, h200,"),
        (["--gpu", "A100", "--", "python"], "'A100' is a part of 2 names. Choose one of a100-80gb, a100-40gb."),
        (["--gpu", "t4"], "no command given: put it last, after --"),
        (["--gpu", "t4", "-n", "17", "--", "python"], "-n must be from 1 to 16, got 17"),
        (["--gpu", "t4", "--vary=--batch-size 4", "--", "python"], "--vary needs {} in place of the number"),
    ],
)
def test_wrong_usage(call: Call, arguments: list[str], complaint: str) -> None:
    answer = call("dry-run", *arguments)
    assert (answer.returncode, answer.stdout, complaint in answer.stderr) == (2, "", True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_torchs_cuda_build_it_names_what_installs_it(call: Call) -> None:
    answer = call("dry-run", "--gpu", "t4", "--", "python", "train.py")
    text = " ".join(answer.stdout.split())
    assert (answer.returncode, text.startswith("Unknown: torch ")) == (3, True)
    assert "is built without CUDA" in text
    assert "`pip install --force-reinstall torch`" in text
