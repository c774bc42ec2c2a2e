"""The house rules of imports, executed by reading every import of the package: see CONTRIBUTING.md."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_gpu_tools

PACKAGE = Path(lightning_gpu_tools.__file__).parent
NAME = PACKAGE.name

# From the bottom up. A module imports from the layers below its own and from its own folder; no module is its own
# ancestor. A new module must be given its place here.
FACTS = {"errors", "gpu_readings", "quantities", "readings"}
DECISIONS = {
    "advice.batch_memory",
    "advice.data_loading",
    "advice.diagnosis",
    "advice.findings",
    "advice.gpu_limits",
    "advice.host_work",
    "advice.inside_step",
    "advice.loader_plan",
    "advice.loader_search",
    "advice.loader_trials",
    "advice.ranks",
    "advice.run_measurements",
    "advice.words",
    "checkpoints.content",
    "checkpoints.envelope",
    "checkpoints.key_groups",
    "checkpoints.key_renaming",
    "checkpoints.key_tree",
    "checkpoints.pickle_structure",
    "checkpoints.rename_plan",
    "checkpoints.unsafe_globals",
    "monitoring.gpu_gaps",
    "monitoring.gpu_sharing",
    "monitoring.gpu_window",
    "monitoring.memory_growth",
    "monitoring.trace_reading",
    "monitoring.utilization",
    "selection.explanations",
    "selection.gpu_sets",
    "selection.ranking",
    "selection.visibility",
}
EDGES = {
    "checkpoints.atomic_file",
    "checkpoints.formats",
    "checkpoints.structure",
    "checkpoints.summary",
    "checkpoints.zip_records",
    "environment",
    "host",
    "monitoring.gpu_metrics",
    "monitoring.sampler",
    "monitoring.phases",
    "monitoring.stopwatch",
    "nvml",
    "reports.comparison",
    "reports.loader_summary",
    "reports.confirmation",
    "reports.plot",
    "reports.report",
    "reports.text",
    "reports.typed_json",
    "selection.affinity",
    "selection.claim_files",
    "selection.claims",
    "selection.cuda",
    "selection.mounts",
    "selection.picking",
    "selection.placement",
}
ADAPTERS = {
    "accelerator",
    "callbacks.gpu_utilization_advisor",
    "callbacks.gpu_utilization_monitor",
    "callbacks.never_stop_training",
    "callbacks.num_workers_finder",
    "checkpoint_io",
    "checkpoints.compare",
    "checkpoints.convert",
    "checkpoints.hyperparameters",
    "checkpoints.model_keys",
    "checkpoints.state_dicts",
    "checkpoints.torch_files",
    "demo",
    "loaders.contents",
    "loaders.dataset_copies",
    "loaders.index_source",
    "loaders.inner_loader",
    "loaders.presentation",
    "loaders.random_state",
    "loaders.ranks",
    "loaders.settings",
    "loaders.standalone",
    "loaders.switch",
    "loaders.tuning",
    "loaders.validation",
    "loaders.worker_probe",
    "monitoring.device_facts",
    "monitoring.gpu_timeline",
    "monitoring.fit_watch",
    "monitoring.gpu_watch",
    "monitoring.measurements",
    "monitoring.memory_history",
    "monitoring.rank_exchange",
    "monitoring.run_recorder",
    "monitoring.step_clock",
    "monitoring.step_profiler",
    "monitoring.timed_actions",
    "monitoring.worker_watch",
    "monitoring.wrappers",
    "strategies",
    "weights",
}
ENTRIES = {"", "__main__", "cli", "entry_point", "zero_code"}
LAYERS = [FACTS, DECISIONS, EDGES, ADAPTERS, ENTRIES]
# Who may import whom within a layer, besides those of the same folder.
NEIGHBOURS = {
    "errors": {"quantities"},
    "readings": {"gpu_readings"},
    "callbacks.gpu_utilization_advisor": {"monitoring"},
    "callbacks.gpu_utilization_monitor": {"monitoring"},
    "callbacks.num_workers_finder": {"loaders", "monitoring"},
    "checkpoint_io": {"checkpoints"},
    "loaders.ranks": {"monitoring"},
    "loaders.tuning": {"monitoring"},
    "demo": {"callbacks"},
    "monitoring.gpu_gaps": {"advice.run_measurements"},
    "monitoring.gpu_metrics": {"reports"},
    "monitoring.measurements": {"loaders.settings"},
    "monitoring.sampler": {"nvml"},
    "monitoring.trace_reading": {"advice.run_measurements"},
    "reports.report": {"monitoring.stopwatch"},
    "selection.affinity": {"nvml"},
    "selection.picking": {"nvml"},
    "strategies": {"accelerator"},
    "weights": {"checkpoints"},
}

# Each outside thing has one home, so that nothing heavy is imported where it is not needed.
HOMES = {
    "pynvml": {"nvml"},
    "fcntl": {"selection.claim_files", "checkpoints.atomic_file"},
    "matplotlib": {"reports.plot"},
    "rich": {"cli", "loaders.presentation"},
    "torch": ADAPTERS | {"cli"},
    "lightning": ADAPTERS | {"entry_point", "zero_code"},
}
# What a decision must not look at: its arguments are all it knows.
OUTSIDE_WORLD = {"logging", "os", "pathlib", "psutil", "socket", "subprocess", "tempfile", "threading", "time"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        dotted = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield dotted.removesuffix("__init__").rstrip(".") if dotted != "__init__" else "", path


MODULES = dict(modules())


def place(module: str) -> str:
    """Return the entry of the layers that a module belongs to: its own or its folder's."""
    known = set().union(*LAYERS)
    return module if module in known else module.partition(".")[0]


def layer(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if place(module) in names)


def imports(path: Path) -> Iterator[str]:
    """Return the dotted names that a file imports, also inside of functions; not those for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield dotted if dotted.removeprefix(f"{NAME}.") in MODULES else str(node.module)


def own_imports(module: str) -> set[str]:
    dotted = {name for name in imports(MODULES[module]) if name.split(".")[0] == NAME}
    return {name.removeprefix(NAME).removeprefix(".") for name in dotted} - {module}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_place(module: str) -> None:
    is_empty_folder = module in {"advice", "callbacks", "checkpoints", "loaders", "monitoring", "reports", "selection"}
    assert is_empty_folder or place(module) in set().union(*LAYERS)


@pytest.mark.parametrize("module", [m for m in MODULES if place(m) in set().union(*LAYERS)])
def test_imports_point_down_or_stay_in_the_folder(module: str) -> None:
    for imported in own_imports(module):
        folder = imported.partition(".")[0]
        allowed = (
            layer(imported) < layer(module)
            or layer(module) == len(LAYERS) - 1
            or module.partition(".")[0] == folder
            or bool({imported, folder} & NEIGHBOURS.get(module, set()))
        )
        assert allowed, f"{module} imports {imported}"


def test_nobody_imports_himself_in_a_circle() -> None:
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in finished:
            for imported in own_imports(module):
                if imported in MODULES:
                    visit(imported, (*path, module))
            finished.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_every_outside_thing_has_one_home(module: str) -> None:
    for imported in imports(MODULES[module]):
        homes = HOMES.get(imported.split(".")[0])
        assert homes is None or place(module) in homes, f"{module} imports {imported}"


@pytest.mark.parametrize("module", sorted(FACTS | DECISIONS))
def test_a_decision_knows_its_arguments_and_nothing_else(module: str) -> None:
    for imported in imports(MODULES[module]):
        top = imported.split(".")[0]
        assert top == NAME or top in sys.stdlib_module_names, f"{module} imports {imported}"
        assert top not in OUTSIDE_WORLD, f"{module} imports {imported}"
