"""The README's blocks and the examples, run as a reader would run them."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from fake_driver import Driver, gpu

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Blocks under this comment need hardware.
RUNNABLE = re.findall(r"(?<!<!-- needs a GPU -->\n)^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)

Run = Callable[..., "CompletedProcess[str]"]


def test_the_readme_has_a_runnable_block_for_every_part() -> None:
    for name in ("select_gpus", "GPUUtilizationMonitor", "GPUUtilizationAdvisor", "NumWorkersFinder", "load_weights"):
        assert any(name in block for block in RUNNABLE), name


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: str(block).splitlines()[-1][:40])
@pytest.mark.usefixtures("claims_dir")
def test_a_block_of_the_readme_runs_as_it_stands(driver: Driver, run_python: Run, tmp_path: Path, block: str) -> None:
    driver.gpus = [gpu(), gpu()]
    result = run_python("-c", block, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_metrics_in_the_readme_are_the_ones_that_are_logged() -> None:
    from lightning_gpu_tools.gpus.metrics import GpuWindow, gpu_metrics
    from lightning_gpu_tools.gpus.sharing import Sharing

    def filled(kind: type[Any]) -> Any:
        return kind(**{field.name: 1 for field in dataclasses.fields(kind)})

    table = set()
    for cell in re.findall(r"^\| (`.*?`) \|", README, re.MULTILINE):
        for name in re.findall(r"`(.*?)`", cell):
            before, choices, after = re.fullmatch(r"([^{]*)(?:\{(.*?)\})?(.*)", name).groups()  # type: ignore[union-attr]
            table |= {f"{before}{choice}{after}" for choice in (choices or "").split(",")}
    logged = gpu_metrics(0, filled(GpuWindow), filled(Sharing), energy_joules=1.0)
    assert {f"gpu/0/{name}" for name in table} == set(logged)


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
@pytest.mark.usefixtures("claims_dir")
def test_every_example_runs(driver: Driver, run_python: Run, tmp_path: Path, example: str) -> None:
    """The fake driver's GPUs can be picked, but not computed on: the trainings are on the CPU."""
    driver.gpus = [gpu(), gpu()]
    options = ["--epochs", "1", "--batch-size", "2"] if example == "train.py" else []
    result = run_python(str(ROOT / "examples" / example), *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_main_example_trains_reports_and_loads_its_checkpoint(run_python: Run, tmp_path: Path) -> None:
    options = ["--epochs", "1", "--batch-size", "4", "--num-workers", "1", "--devices", "1", "--min-free", "500MB"]
    result = run_python(str(ROOT / "examples" / "train.py"), *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Verdict:" in result.stdout
    assert re.search(r"loaded \d+ weights", result.stdout)
    assert re.search(r"Accuracy on unseen crops: \d+\.\d%", result.stdout)
    (report,) = tmp_path.rglob("gpu_report.json")
    data = json.loads(report.read_text())
    assert data["steps"] == 40
    assert data["settings"]["num_workers"] == 1
    assert list(tmp_path.rglob("*.ckpt"))


def test_the_main_example_refuses_a_size_that_is_none(run_python: Run, tmp_path: Path) -> None:
    result = run_python(str(ROOT / "examples" / "train.py"), "--min-free", "8 bananas", cwd=tmp_path)
    assert result.returncode == 2
    assert "8 bananas" in result.stderr
    assert list(tmp_path.iterdir()) == []
