"""The installed package: the facade's names and cost, the entry point, the wheel."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

import lightning_gpu_tools
from lightning_gpu_tools import strategies, types

ROOT = Path(__file__).parent.parent

Run = Callable[..., "CompletedProcess[str]"]


@pytest.mark.parametrize("module", [lightning_gpu_tools, strategies, types])
def test_a_module_has_every_name_that_it_promises(module: ModuleType) -> None:
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'pick_gpus'"):
        _ = lightning_gpu_tools.pick_gpus  # type: ignore[attr-defined]


def test_facades_import_what_is_used(run_python: Run) -> None:
    code = """
import sys
def imported(*names): return [name for name in names if name in sys.modules]
import lightning_gpu_tools, lightning_gpu_tools.types, lightning_gpu_tools.errors
assert not imported("torch", "lightning", "pynvml", "rich", "numpy", "psutil", "msgspec"), sys.modules
lightning_gpu_tools.load_report, lightning_gpu_tools.types.Report, lightning_gpu_tools.types.LoaderSettings
assert not imported("torch", "lightning"), sys.modules
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_the_version_is_shown_and_cited(run_cli: Run) -> None:
    version = run_cli("--version").stdout.removeprefix("lightning-gpu-tools ").strip()
    assert version == lightning_gpu_tools.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_callbacks_factories_add_nothing_unasked(run_python: Run) -> None:
    groups = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
    program = (
        "from importlib.metadata import entry_points; "
        f"found = [entry_points(group=g + '.callbacks_factory', name='lightning_gpu_tools') for g in {groups}]; "
        "print([[one.load()() for one in factories] for factories in found])"
    )
    assert run_python("-c", program, env={"LIGHTNING_GPU_TOOLS": None}).stdout == "[[[]], [[]], [[]], [[]]]\n"


def test_the_wheel_is_complete_and_runs_without_other_packages(tmp_path: Path) -> None:
    def run(*command: str | Path, **options: str) -> str:
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=options or None)
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (scripts,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    links = re.findall(r"\]\(([^)\s]+)\)", metadata)  # of README, which a package index shows
    assert len(links) > 15
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "![GPU utilization on an H200, before and after following the report](https://raw." in metadata
    assert wheel.stat().st_size < 590_000  # source alone, 577 kB when this was written, 31 of them the simulated GPUs
    assert "lightning_gpu_tools/py.typed" in names
    assert "lightning_gpu_tools/simulated/source/crt/host_defines.h" in names  # the C sources, all of which it needs
    assert "lightning_gpu_tools/dry_run/startup/sitecustomize.py" in names
    assert not [name for name in names if name.startswith("tests")]
    assert "lightning-gpu-tools = lightning_gpu_tools.cli:script" in scripts
    code = (
        "from lightning_gpu_tools import __file__, __version__, cli; print(__file__, __version__); cli.main(['--help'])"
    )
    shown = run(sys.executable, "-S", "-c", code, PYTHONPATH=str(wheel))  # -S: without the packages installed here
    assert shown.startswith(f"{wheel}/lightning_gpu_tools/__init__.py {lightning_gpu_tools.__version__}\n")
    assert "pick" in shown
