"""The code blocks of README.md and docs/, and the examples: they run as a reader would run them.

Of blocks that cannot run here, the names, options and files exist.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fake_driver import Driver, gpu
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from rank_processes import run_ranks
from real_names import SET, VARIABLES, is_command, unknown_options, unknown_variables

from lightning_gpu_tools import GPUUtilizationAdvisor, NumWorkersFinder, PortableCheckpointIO
from lightning_gpu_tools.strategies import FreeMemoryDDPStrategy

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- needs (.*?) -->\n)?^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block; ``needs`` is from the comment above it, and names programs that a machine may lack."""

    place: str
    needs: str
    language: str
    text: str


def code_blocks() -> list[Block]:
    """Return the blocks of every page, each text once."""
    found: dict[str, Block] = {}
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            needs, language, block = match.groups(default="")
            place = f"{page.stem} line {text.count(chr(10), 0, match.start()) + 1}"
            found.setdefault(block, Block(place, needs, language, block))
    return [*found.values()]


BLOCKS = code_blocks()
OWN = "LIGHTNING_GPU_TOOLS"
RUNNABLE = {block.place: block.text for block in BLOCKS if block.language == "python" and not block.needs}


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


def test_the_notebook_runs_and_shows_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = (pytest.importorskip(name, reason="needs Jupyter") for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel", reason="needs Jupyter")
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # an environment that is not activated
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
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


# --- blocks that cannot run here


def blocks_of(language: str) -> pytest.MarkDecorator:
    found = [one for one in BLOCKS if one.language == language and (one.needs or language != "python")]
    return pytest.mark.parametrize("block", found, ids=[one.place for one in found])


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "bash", "diff", "yaml", "text", ""}


@blocks_of("python")
def test_names_and_options_of_blocks_that_cannot_run_here_exist(block: Block) -> None:
    known: dict[str, object] = {}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(str(node.module).partition(".")[0]):
            module = importlib.import_module(str(node.module))
            known |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
    assert known
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            assert not unknown_options(known[node.func.id], [str(one.arg) for one in node.keywords])


@blocks_of("bash")
def test_shell_blocks_are_valid_and_name_existing_files(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    for name in re.findall(r"(?:^| )((?:examples|benchmarks|tests)/\S+\.py)", block.text, re.MULTILINE):
        assert (ROOT / name).exists(), name


COMMANDS = sorted(
    {
        command.strip()
        for text in [block.text for block in BLOCKS if block.language == "bash"]
        + [inline for page in PAGES for inline in re.findall(r"`([^`\n]+)`", page.read_text())]
        for command in re.findall(r"lightning-gpu-tools ([a-z][^|>)&#\n]*)", text)
        if not re.search(r"\.\.\.|\[|CMD|checkpoint$", command)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shown_is_accepted(command: str) -> None:
    assert is_command(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_variable_of_the_package_is_one_that_it_reads(page: Path) -> None:
    assert unknown_variables(page.read_text(), OWN) == []


def test_the_listed_variables_are_those_the_package_reads() -> None:
    source = "".join(path.read_text() for path in (ROOT / "lightning_gpu_tools").rglob("*.py"))
    for name in VARIABLES:
        is_set = name.removeprefix(f"{OWN}_") in SET
        assert not name.startswith(OWN) or (f'"{name}"' if is_set else f'environ.get("{name}"') in source, name


@pytest.mark.usefixtures("driver", "claims_dir")
@pytest.mark.filterwarnings("ignore:FreeMemoryDDPStrategy picks no GPU")
def test_the_configurations_build_what_they_name(tmp_path: Path) -> None:
    arguments = []
    for number, block in enumerate(one for one in BLOCKS if one.language == "yaml"):
        (tmp_path / f"{number}.yaml").write_text(block.text)
        arguments += ["--config", str(tmp_path / f"{number}.yaml")]
    options = ["--trainer.accelerator=cpu", *arguments]
    trainer: Trainer = LightningCLI(
        BoringModel, BoringDataModule, run=False, args=options, save_config_callback=None
    ).trainer
    assert isinstance(trainer.strategy, FreeMemoryDDPStrategy)
    assert isinstance(trainer.strategy.checkpoint_io, PortableCheckpointIO)
    built = {type(callback): callback for callback in trainer.callbacks}  # type: ignore[attr-defined]
    assert built[GPUUtilizationAdvisor].min_utilization_percent == 80
    assert NumWorkersFinder in built
