"""The order of the house: the imports that each room may have, of other rooms and of the world outside."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_gpu_tools

NAME = "lightning_gpu_tools"
PACKAGE = Path(lightning_gpu_tools.__file__).parent

ARCHITECTURE = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
# From top to bottom: a room imports those that stand below it, and itself.
ROOMS = ["__main__", *re.findall(r"^\| `(\w+)(?:\.py|/)` \|", ARCHITECTURE, re.MULTILINE)]
# Packages for some rooms alone; all others may be imported everywhere. Where there is a Trainer, Lightning is in use
# already, as one package or the other: an import would be the wrong one for half of the users.
HOMES: dict[str, set[str]] = {
    "lightning": {"trainer/demo"},
    "pytorch_lightning": set(),
    "lightning_fabric": set(),
    "lightning_utilities": {"trainer"},
    "pynvml": {"gpus/nvml"},
    "matplotlib": {"reports/page"},
    "torch": {"dry_run/recorder", "trainer", "runs", "loaders", "memory", "training", "checkpoints", "cli"},
}
# Decisions on data: they use nothing but the standard library, and nothing of it that asks the world outside.
PURE = [
    "advice/*",
    "advice/causes/*",
    "advice/causes/*/*",
    "memory/readings",
    "selection/ranking",
    "checkpoints/key_*",
    "checkpoints/inert_pickle",
    "dry_run/result",
]
OUTSIDE_WORLD = {"logging", "os", "psutil", "socket", "subprocess", "tempfile", "threading", "time"}

FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(path: Path, *, also_for_types: bool = False) -> list[str]:
    """Return the imports of a file as paths, also those inside functions, but by default none for types alone."""
    tree, found = ast.parse(path.read_text()), []
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING" and not also_for_types
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in typing_only:
            found += [alias.name.replace(".", "/") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            module = str(node.module).replace(".", "/")
            found += [f"{module}/{alias.name}" for alias in node.names]
    return found


def room(module: str) -> int:
    return ROOMS.index(module.partition("/")[0])


def test_the_architecture_is_what_it_says() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 60
    assert {*ROOMS} == {module.partition("/")[0] for module in FILES}
    named = set(re.findall(r"`(\w+/[\w/.]*)`", ARCHITECTURE.partition("`tests/` has the same folders")[2]))
    assert len(named) > 20
    for name in named:
        assert (PACKAGE / name).exists() or (PACKAGE.parent / name).exists(), name


@pytest.mark.parametrize("module", FILES)
def test_a_room_imports_what_stands_below_it(module: str) -> None:
    for imported in imports(FILES[module]):
        top, _, rest = imported.partition("/")
        homes = HOMES.get(top)
        assert homes is None or any(module.startswith(home) for home in homes), f"{module} imports {imported}"
        if top == NAME and module != "__init__" and imported != f"{NAME}/_on_first_use":
            assert room(rest) >= room(module), f"{module} imports {imported} from above"


@pytest.mark.parametrize("also_for_types", [False, True])
def test_no_files_import_one_another_in_a_circle(*, also_for_types: bool) -> None:
    # Facades import for types what imports them; the last one is the form of a format.
    facades = {"__init__", "types", "checkpoints/formats/__init__"} if also_for_types else set()
    graph = {}
    for module in FILES.keys() - facades:
        names = (
            Path(name).relative_to(NAME)
            for name in imports(FILES[module], also_for_types=also_for_types)
            if name.startswith(f"{NAME}/")
        )
        files = {file for name in names for file in (str(name), str(name.parent), f"{name}/__init__")}
        graph[module] = files & FILES.keys() - {module}
    TopologicalSorter(graph).prepare()  # which raises CycleError


@pytest.mark.parametrize("module", [module for module in FILES if any(Path(module).match(rule) for rule in PURE)])
def test_a_decision_knows_its_arguments_and_nothing_else(module: str) -> None:
    for top in {imported.partition("/")[0] for imported in imports(FILES[module])}:
        assert top == NAME or top in sys.stdlib_module_names - OUTSIDE_WORLD, f"{module} imports {top}"


def test_everything_but_the_demo_works_without_lightning(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    modules = [m for m in FILES if room(m) >= room("trainer") and m != "trainer/demo"]
    names = [f"{NAME}.{m.removesuffix('/__init__')}".replace("/", ".") for m in modules]
    families = {"lightning": None, "pytorch_lightning": None, "lightning_fabric": None}
    blocked = f"import importlib, sys; sys.modules.update({families})"
    loop = (
        f"from {NAME} import watch\n"
        "with watch(folder='.') as run:\n"
        "    for batch in run.batches([1, 2, 3]): pass\n"
        "print(run.diagnosis.verdict)"
    )
    child = run_python("-c", f"{blocked}\nfor name in {names}: importlib.import_module(name)\n{loop}", cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.endswith("too_short\n")


def test_importing_the_package_imports_nothing_but_five_small_files(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    # Without site, whose .pth files may have imported anything before. `os` is what Python itself starts with.
    code = f"import os, sys; before = {{*sys.modules}}; sys.path.insert(0, {str(PACKAGE.parent)!r}); import {NAME}"
    child = run_python("-S", "-c", f"{code}; print(*sorted({{*sys.modules}} - before))", env={"PYTHONPATH": None})
    assert child.returncode == 0, child.stderr
    ours = {f"{NAME}.{name}" for name in ("environment", "trainer", "trainer.entry_points", "trainer.import_hooks")}
    assert set(child.stdout.split()) == {"__future__", NAME, *ours}


def test_only_the_dry_run_knows_the_simulated_machine() -> None:
    """Programs are on it only if they were started on it."""
    users = {module for module in FILES for one in imports(FILES[module]) if one.startswith(f"{NAME}/simulated")}
    assert {module for module in users if room(module) < room("simulated")} == {
        *("cli/dry_run", "dry_run/launch", "dry_run/result")  # which start programs on it, and know its models
    }
