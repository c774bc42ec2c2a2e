"""The ``checkpoint`` commands as a function."""

from collections.abc import Callable

import pytest

from lightning_gpu_tools.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["checkpoint", *arguments])
        return code, *capsys.readouterr()

    return call
