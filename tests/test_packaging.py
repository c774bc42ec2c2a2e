"""The package as it is installed: the facade's cost, its names, the wheel, the entry points."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import lightning_gpu_tools

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "lightning", "pynvml", "rich", "numpy")

Run = Callable[..., "CompletedProcess[str]"]


def test_every_name_of_the_facade_is_there() -> None:
    for name in lightning_gpu_tools.__all__:
        assert getattr(lightning_gpu_tools, name) is not None
        assert name in dir(lightning_gpu_tools)
    with pytest.raises(AttributeError, match="has no attribute 'pick_gpus'"):
        _ = lightning_gpu_tools.pick_gpus  # type: ignore[attr-defined]


def test_importing_the_facade_is_quick_and_imports_nothing_heavy(run_python: Run) -> None:
    code = (
        "import sys, time; began = time.perf_counter(); import lightning_gpu_tools; ended = time.perf_counter()\n"
        f"print((ended - began) * 1000, *[name for name in {HEAVY} if name in sys.modules])"
    )
    took_ms = []
    for _ in range(5):
        milliseconds, *heavy = run_python("-c", code, check=True).stdout.split()
        assert heavy == []
        took_ms.append(float(milliseconds))
    assert min(took_ms) < 30


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["gpus", "--json"], ["pick", "-n", "1"], ["report", "nowhere"], ["checkpoint", "inspect", "nowhere"]],
)
def test_no_command_but_those_that_need_tensors_imports_torch(run_python: Run, arguments: list[str]) -> None:
    code = (
        "import sys\nfrom lightning_gpu_tools.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print('imported', *[name for name in ('torch', 'lightning') if name in sys.modules])"
    )
    result = run_python("-c", code)
    assert result.stdout.splitlines()[-1] == "imported", result.stderr


def test_lightning_finds_the_factory_of_callbacks_and_it_adds_none_unasked(run_python: Run) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "for e in entry_points(group='lightning.pytorch.callbacks_factory'):\n"
        "    if e.value.startswith('lightning_gpu_tools.'): print(e.value, e.load()())"
    )
    result = run_python("-c", code, check=True)
    assert result.stdout == "lightning_gpu_tools.trainer.entry_points:callbacks_factory []\n"


def test_the_wheel_installs_into_an_empty_environment_and_imports(tmp_path: Path) -> None:
    def run(*command: str | Path) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "lightning_gpu_tools/py.typed" in names
    assert not [name for name in names if name.startswith("tests")]
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    run(tmp_path / "empty/bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    version = run(tmp_path / "empty/bin/python", "-c", "import lightning_gpu_tools as t; print(t.__version__)")
    assert version.strip() == lightning_gpu_tools.__version__
    assert "pick" in run(tmp_path / "empty/bin/lightning-gpu-tools", "--help")
