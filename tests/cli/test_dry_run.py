"""``dry-run`` without simulated GPUs: what it refuses. What it does is in tests/simulated."""

import pytest
import torch

from lightning_gpu_tools.cli import main


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
def test_wrong_usage(capfd: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["dry-run", *arguments])
    shown = capfd.readouterr()
    assert (shown.out, complaint in shown.err) == ("", True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_torchs_cuda_build_it_names_what_installs_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", "--gpu", "t4", "--", "python", "train.py"]) == 3
    text = " ".join(capfd.readouterr().out.split())
    assert text.startswith("Unknown: torch ")
    assert "is built without CUDA" in text
    assert "`pip install --force-reinstall torch`" in text
