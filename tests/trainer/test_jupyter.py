"""Trainings in a real Jupyter kernel, with each of Lightning's progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_gpu_tools import load_report

manager = pytest.importorskip("jupyter_client.manager", reason="needs ipykernel")
pytest.importorskip("ipykernel", reason="needs ipykernel")

CELL = """
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor
bars = {bars}
Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=bool(bars),
    default_root_dir={folder!r}, callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor(), *bars],
).fit(BoringModel())
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Any]:
    kernel, client = manager.start_new_kernel(startup_timeout=120)
    yield client
    client.stop_channels()
    kernel.shutdown_kernel(now=True)


def run_cell(notebook: Any, code: str) -> str:
    """Run a cell and return what it shows."""
    shown: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        content = message["content"]
        shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

    reply = notebook.execute_interactive(code, output_hook=hook, timeout=120)["content"]
    assert reply["status"] == "ok", reply
    return "".join(shown)


@pytest.mark.parametrize("bars", ["[callbacks.RichProgressBar()]", "[]"])
def test_the_report_is_shown_and_written_under_every_progress_bar(notebook: Any, tmp_path: Path, bars: str) -> None:
    output = run_cell(notebook, CELL.format(bars=bars, folder=str(tmp_path)))
    assert [path.name for path in (tmp_path / "gpu_report").iterdir()] == ["gpu_report.json"]
    assert load_report(tmp_path).steps == 64
    assert output.count("Verdict: ") == 1
    assert f"Report: {tmp_path}" in output.replace("\n", " ").replace("  ", " ")
    assert "error" not in output
