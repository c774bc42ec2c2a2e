"""The code blocks of README.md and docs/, and the examples, run as a reader would."""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
from pathlib import Path

import torch
from code_blocks import ROOT, code_blocks
from fake_driver import Driver, gpu
from rank_processes import run_ranks

RUNNABLE = {block.place: block.text for block in code_blocks() if block.language == "python" and not block.needs}


def test_the_readme_has_a_runnable_block_for_every_part() -> None:
    shown = "".join(text for place, text in RUNNABLE.items() if place.startswith("README"))
    for name in (".apply()", "GPUUtilizationMonitor", "GPUUtilizationAdvisor", "NumWorkersFinder", "load_weights"):
        assert name in shown


EXAMPLES = {path.name: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}
PROGRAMS = RUNNABLE | EXAMPLES
OPTIONS = {"train.py": "--epochs 1 --batch-size 2 --num-workers 1 --devices 1 --min-free 500MB"}


def run_programs(folder: Path, rank: int, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    for name, program in PROGRAMS.items():
        print("---", name, file=sys.stderr)  # the last one is the one that failed
        (folder / name).mkdir()
        os.chdir(folder / name)
        sys.argv = [name, *OPTIONS.get(name, "").split()]
        before = dict(os.environ)
        with (folder / f"{name}.txt").open("w") as shown, contextlib.redirect_stdout(shown):
            exec(compile(program, name, "exec"), {"__name__": "__main__"})
        os.environ.clear()
        os.environ.update(before)


def test_blocks_and_examples_run(driver: Driver, claims_dir: Path, tmp_path: Path) -> None:
    """One process runs them all, each in a namespace of its own. The fake GPUs can be picked, but not computed on."""
    driver.gpus = [gpu(), gpu()]
    assert len(EXAMPLES) == 6
    environ = {"LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(claims_dir)}
    (result,) = run_ranks(tmp_path, run_programs, ranks=1, machines=[driver], options={"environ": environ})
    assert result.returncode == 0, result.stderr

    shown = (tmp_path / "load_checkpoint_anywhere.py.txt").read_text()
    for words in (
        'loaded 4 weights; removed "net." from 4 keys, added "_orig_mod." to 4 keys',
        'fit: "student" and "teacher"',
        "is cut short",
    ):
        assert words in shown
    assert list((tmp_path / "load_checkpoint_anywhere.py").iterdir()) == []

    shown = (tmp_path / "train.py.txt").read_text()
    assert "Verdict:" in shown
    assert re.search(r"loaded \d+ weights", shown)
    assert re.search(r"Accuracy on unseen crops: \d+\.\d%", shown)
    (report,) = (tmp_path / "train.py").rglob("gpu_report.json")
    data = json.loads(report.read_text())
    assert data["steps"] == 40
    assert data["settings"]["num_workers"] == 1
    assert list((tmp_path / "train.py").rglob("*.ckpt"))


def test_the_metrics_of_docs_and_docstring_are_the_logged_ones() -> None:
    from lightning_gpu_tools import GPUUtilizationMonitor
    from lightning_gpu_tools.gpus.metrics import GpuWindow, gpu_metrics
    from lightning_gpu_tools.gpus.readings import Sharing

    window = GpuWindow(**{field.name: 1 for field in dataclasses.fields(GpuWindow)})  # type: ignore[arg-type]
    logged = gpu_metrics(0, window, Sharing(*[1] * len(Sharing._fields)), energy_joules=1.0)
    docstring = str(inspect.getdoc(GPUUtilizationMonitor)).replace("``", "`")
    page = (ROOT / "docs" / "measurements.md").read_text().partition("| metric of each GPU")[2].partition("\n\n")[0]
    for text, cells in ((page, r"^\| (`.*?`) \|"), (docstring, r"^- ((?:`[^`]+`(?:, )?)+):")):
        listed = set()
        for name in re.findall(r"`(.*?)`", "".join(re.findall(cells, text, re.MULTILINE))):
            before, choices, after = re.fullmatch(r"([^{]*)(?:\{(.*?)\})?(.*)", name).groups()  # type: ignore[union-attr]
            listed |= {f"gpu/0/{before}{choice}{after}" for choice in (choices or "").split(",")}
        assert listed == set(logged)
