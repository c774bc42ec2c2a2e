"""What README.md and docs/ show and test_readme_and_examples.py does not run: its names, options and files exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from code_blocks import PAGES, ROOT, Block, code_blocks
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from real_names import VARIABLES, is_command, unknown_options, unknown_variables

from lightning_gpu_tools import GPUUtilizationAdvisor, NumWorkersFinder, PortableCheckpointIO
from lightning_gpu_tools.strategies import FreeMemoryDDPStrategy

BLOCKS = code_blocks()
OWN = "LIGHTNING_GPU_TOOLS"


def blocks_of(language: str) -> pytest.MarkDecorator:
    found = [one for one in BLOCKS if one.language == language and (one.needs or language != "python")]
    return pytest.mark.parametrize("block", found, ids=[one.place for one in found])


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "bash", "yaml", "text", ""}


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


def test_the_known_variables_of_the_package_are_those_that_it_reads() -> None:
    source = "".join(path.read_text() for path in (ROOT / "lightning_gpu_tools").rglob("*.py"))
    for name in VARIABLES:
        assert not name.startswith(OWN) or f'environ.get("{name}"' in source, name


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
