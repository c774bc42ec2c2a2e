"""The notebook, run from top to bottom as Jupyter would."""

import os
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs Jupyter")
nbclient = pytest.importorskip("nbclient", reason="needs Jupyter")
pytest.importorskip("ipykernel", reason="needs Jupyter")
pytest.importorskip("bokeh", reason="needs the extra plot")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


def test_the_notebook_runs_and_shows_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "lightning-gpu-tools"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lightning_gpu_tools "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]  # it is kept without
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = "".join(output.get("text", "") for output in outputs)
    assert shown.count("Verdict: ") == 2
    assert "Set DataLoader(..., num_workers=" in re.sub(r"\s+", " ", shown)
    assert "faster (95 % interval" in shown
    (page,) = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "&lt;!DOCTYPE html&gt;" in page
