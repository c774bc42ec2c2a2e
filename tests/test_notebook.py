"""The notebook, run from top to bottom as Jupyter would."""

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


def test_the_notebook_runs_and_shows_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = (pytest.importorskip(name, reason="needs Jupyter") for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel", reason="needs Jupyter")
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # an environment that is not activated
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]  # it is kept without
    for cell in notebook.cells:  # to Jupyter, a command that fails is no error
        cell.source = cell.source.replace("16 * 250", "16 * 120")  # steps that are enough for a verdict
        cell.source = re.sub(r"^!.*$", r"\g<0>\nprint(f'Exit code: {_exit_code}')", cell.source, flags=re.MULTILINE)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = "".join(output.get("text", "") for output in outputs)
    assert shown.count("Verdict: ") == 2
    assert "Set DataLoader(..., num_workers=" in re.sub(r"\s+", " ", shown)
    assert re.search(r"^FASTER.* after num_workers 0 -> ", shown, re.MULTILINE | re.DOTALL)
    assert re.findall(r"Exit code: (\d+)", shown) == ["0", "0", "4"]  # the last lists the GPUs, and there is no driver
    (page,) = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "&lt;!DOCTYPE html&gt;" in page
