"""Commands as functions, and a checkpoint for them."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from checkpoint_files import Tied, lightning_checkpoint, wrapped

from lightning_gpu_tools.checkpoints.writing import write_checkpoint
from lightning_gpu_tools.cli import main


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., "CompletedProcess[str]"]:
    """``call("pick", "-n", "1")``: a command in this process, which saves the start of another one."""

    def run_here(*arguments: str) -> "CompletedProcess[str]":
        try:
            code = main([*arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return CompletedProcess(arguments, code, *capfd.readouterr())

    return run_here


@pytest.fixture
def run(call: Callable[..., "CompletedProcess[str]"]) -> Callable[..., tuple[int, str, str]]:
    def run_checkpoint(*arguments: object) -> tuple[int, str, str]:
        answer = call("checkpoint", *map(str, arguments))
        return answer.returncode, answer.stdout, answer.stderr

    return run_checkpoint


@pytest.fixture
def net() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def last(net: Tied, tmp_path: Path) -> str:
    write_checkpoint(lightning_checkpoint(wrapped(net)), tmp_path / "last.ckpt")
    return str(tmp_path / "last.ckpt")
