"""The README's code blocks and the examples, run as a reader would."""

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


@pytest.mark.usefixtures("claims_dir")
def test_readme_blocks_and_small_examples_run(driver: Driver, run_python: Run, tmp_path: Path) -> None:
    """One process runs them all, each in a namespace of its own. The fake GPUs can be picked, but not computed on."""
    driver.gpus = [gpu(), gpu()]
    examples = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "train.py"]
    assert len(examples) == 5
    (tmp_path / "programs.json").write_text(json.dumps([*RUNNABLE, *examples]))
    code = (
        "import json, sys\n"
        "for program in json.load(open('programs.json')):\n"
        "    print('---', program[:200], file=sys.stderr)\n"  # the last one is the one that failed
        "    exec(compile(program, 'program', 'exec'), {'__name__': '__main__'})"
    )
    result = run_python("-c", code, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr


def test_the_readmes_metrics_are_the_logged_ones() -> None:
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


@pytest.mark.usefixtures("claims_dir")
def test_the_main_example_trains_reports_and_loads(driver: Driver, run_python: Run, tmp_path: Path) -> None:
    driver.gpus = [gpu(), gpu()]
    options = ["--epochs", "1", "--batch-size", "2", "--num-workers", "1", "--devices", "1", "--min-free", "500MB"]
    example = str(ROOT / "examples" / "train.py")
    result = run_python(example, *options, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert "Verdict:" in result.stdout
    assert re.search(r"loaded \d+ weights", result.stdout)
    assert re.search(r"Accuracy on unseen crops: \d+\.\d%", result.stdout)
    (report,) = tmp_path.rglob("gpu_report.json")
    data = json.loads(report.read_text())
    assert data["steps"] == 40
    assert data["settings"]["num_workers"] == 1
    assert list(tmp_path.rglob("*.ckpt"))
