"""Lightning's own tests, with this package in every Trainer: do they end as they do without it?

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    pip install pytest pytest-timeout pytest-rerunfailures tensorboard pandas cloudpickle scikit-learn
    python benchmarks/lightning_tests.py pytorch-lightning [--only callbacks tuner] [--output results.json]

The tests run once unchanged, once with ``LIGHTNING_GPU_TOOLS=advise`` (the monitor and the advisor in every Trainer),
and once with PortableCheckpointIO as the plugin of every Trainer. A test with a different outcome runs again. After
each test, no thread or wrapper of this package may remain, and no callback may have turned itself off after an error.
Otherwise the exit code is 1, as it is if a difference has no entry in ``KNOWN``. Parts that do not run now stay in the
output file.
"""

import fnmatch
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

MODES = {"entry_point": {"LIGHTNING_GPU_TOOLS": "advise"}, "plugin": {"LIGHTNING_TESTS_PLUGIN": "1"}}
PARTS = ("tuner", "loops", "checkpointing", "callbacks", "core", "loggers", "trainer")
# For each mode, the reasons for different outcomes, and patterns of test names.
KNOWN: dict[str, dict[str, list[str]]] = {
    "entry_point": {
        "list the checkpoint folder, which also has the report's folder": [
            "test_checkpoint_connector.py::test_hpc_restore_attempt",
            "test_model_checkpoint.py::test_check_val_every_n_epochs_top_k_integration",
            "test_model_checkpoint.py::test_ckpt_every_n_train_steps",
            "test_model_checkpoint.py::test_ckpt_version_*",
            "test_model_checkpoint.py::test_current_score",
            "test_model_checkpoint.py::test_model_checkpoint_every_n_epochs*",
            "test_model_checkpoint.py::test_model_checkpoint_file_extension",
            "test_model_checkpoint.py::test_model_checkpoint_save_last*",
            "test_model_checkpoint.py::test_model_checkpoint_topk_*",
            "test_model_checkpoint.py::test_model_checkpoint_train_time_interval",
            "test_model_checkpoint.py::test_val_check_interval_checkpoint_files",
            "test_trainer_checkpoint.py::test_finetuning_with_ckpt_path",
        ],
        "compare everything that is logged, which includes the report's summary": [
            "test_all.py::test_loggers_fit_test_all*",
            "test_distributed_logging.py::test_logger_after_fit_predict_test_calls",
            "test_eval_loop_logging.py::test_eval_step_logging*",
            "test_eval_loop_logging.py::test_validation_step_log_with_tensorboard",
            "test_throughput_monitor.py::test_throughput_monitor_*",
            "test_train_loop_logging.py::test_log_on_train_start",
        ],
        "compare the list of callbacks": [
            "test_callback_connector.py::test_attach_model_callbacks",
            "test_callback_connector.py::test_checkpoint_callbacks_are_last",
        ],
    },
    "plugin": {
        "compare the list of callbacks, which includes the plugin's": [
            "test_callback_connector.py::test_attach_model_callbacks",
            "test_callback_connector.py::test_checkpoint_callbacks_are_last",
        ],
        "expects a KeyError for a weights-only checkpoint, for which the plugin has its own error": [
            "test_trainer.py::test_model_checkpoint_only_weights",
        ],
        "test another plugin (Lightning's or XLA's)": [
            "test_accelerator_connector.py::test_connector_with_tpu_accelerator_instance",
            "test_trainer_checkpoint.py::test_trainer_save_checkpoint_storage_options",
        ],
    },
}
_TIMEOUT_S = 300
_IGNORED = (
    "checkpointing/test_legacy_checkpoints.py",  # needs files outside the repository
    "callbacks/test_spike.py",  # takes minutes, because each of 32 tests starts processes
)


class Result(NamedTuple):
    """Outcome of a test."""

    outcome: str  # passed, failed, or skipped
    error: str = ""
    fits: int = 0  # calls of Trainer.fit
    faults: str = ""  # remains of this package, and callbacks that an error turned off


# This part runs inside pytest, as `-p lightning_tests`.

_fits = [0]
_turned_off: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    import lightning.pytorch as pl

    from lightning_gpu_tools.trainer.families import GuardedCallback

    run, turn_off = pl.Trainer._run, GuardedCallback.turn_off

    @functools.wraps(run)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _fits[0] += self.state.fn == "fit"
        return run(self, *args, **kwargs)

    def noted(self: Any, error: Exception) -> None:
        _turned_off.append(f"{type(self).__name__} was turned off by {error!r}")
        turn_off(self, error)

    pl.Trainer._run = counted  # type: ignore[method-assign]
    GuardedCallback.turn_off = noted  # type: ignore[method-assign]
    if os.environ.get("LIGHTNING_TESTS_PLUGIN"):
        _add_plugin(pl.Trainer)


def _add_plugin(trainer: Any) -> None:
    from lightning.fabric.plugins import CheckpointIO

    from lightning_gpu_tools import PortableCheckpointIO

    make = trainer.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, plugins: Any = None, **kwargs: Any) -> None:
        given = plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]
        if not any(isinstance(one, CheckpointIO) for one in given):
            plugins = [*given, PortableCheckpointIO()]
        make(self, *args, plugins=plugins, **kwargs)

    trainer.__init__ = made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _fits[0] = 0
    _turned_off.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    if call.when == "teardown":
        report.user_properties += [("fits", _fits[0]), ("faults", ", ".join(_turned_off + _left()))]
    return report


def _left() -> list[str]:
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    wrapped = [] if _MapDatasetFetcher.fetch.__module__.startswith("torch.") else ["_MapDatasetFetcher.fetch"]
    return [*wrapped, *(one.name for one in threading.enumerate() if "lightning-gpu-tools" in one.name)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    text = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or "")
    line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "error": text[:500]}
    with _results.open("a") as file:
        file.write(json.dumps({**line, **dict(report.user_properties)}) + "\n")


_results = Path(os.environ.get("LIGHTNING_TESTS_RESULTS", os.devnull))  # read now, because tests change the environment


# This part runs pytest.


def run_tests(checkout: Path, names: list[str], environment: dict[str, str]) -> dict[str, Result]:
    """Run tests in a new process, and return the outcome of each."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as results:
        paths = [str(Path(__file__).parent), str(checkout / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-p", "lightning_tests", "-q", "--timeout", str(_TIMEOUT_S)]
        command += ["-p", "no:cacheprovider", "--disable-pytest-warnings", "--tb=short"]
        command += ["--color=no", *(f"--ignore=tests/tests_pytorch/{name}" for name in _IGNORED)]
        own = {"LIGHTNING_TESTS_RESULTS": results.name, "PYTHONPATH": os.pathsep.join(paths)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_GPU_TOOLS")}
        subprocess.run([*command, *names], cwd=checkout, env={**kept, **environment, **own}, check=False)
        found: dict[str, Result] = {}
        for text in results:
            line = json.loads(text)
            test = line["test"]
            if line["when"] == "setup":  # perhaps of a rerun
                found.pop(test, None)
            before = found.get(test, Result("passed"))
            if line["outcome"] != "passed":
                before = before._replace(outcome=line["outcome"], error=line["error"])
            found[test] = before._replace(fits=line.get("fits", 0), faults=line.get("faults", ""))
        return found


def compare(checkout: Path, part: str, mode: str, plain: dict[str, Result]) -> dict[str, Any]:
    """Run a part's tests in one mode, and return the differences from ``plain``."""
    found = run_tests(checkout, [part], MODES[mode])
    differ = [test for test in {**plain, **found} if _end(found, test) != _end(plain, test)]
    if differ:  # perhaps a flaky test
        found.update(run_tests(checkout, differ, MODES[mode]))
        differ = [test for test in differ if _end(found, test) not in ("passed", _end(plain, test))]
    reasons = {test: _reason(mode, test) for test in differ}
    return {
        "trainings": sum(result.fits for result in found.values()),
        "as_without": len(found) - len(differ),
        "known_differences": {test: reason for test, reason in reasons.items() if reason},
        "unknown_differences": {
            test: f"{_end(plain, test)}, then {_end(found, test)}: {found[test].error if test in found else ''}"
            for test, reason in reasons.items()
            if not reason
        },
        "faults": {test: result.faults for test, result in found.items() if result.faults},
    }


def _end(results: dict[str, Result], test: str) -> str:
    return results[test].outcome if test in results else "lost"  # its process died


def _reason(mode: str, test: str) -> str | None:
    for reason, patterns in KNOWN[mode].items():
        if any(fnmatch.fnmatchcase(test, f"*{pattern}") for pattern in patterns):
            return reason
    return None


def main() -> int:
    from harness import make_parser, write_result

    parser = make_parser(__doc__)
    parser.add_argument("checkout", type=Path, help="checkout of pytorch-lightning, close to the installed version")
    parser.add_argument("--only", nargs="+", default=PARTS, help="only these folders or files of tests_pytorch")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    names = {part: f"tests/tests_pytorch/{part}" for part in args.only}
    if missing := [name for name in names.values() if not (checkout / name).exists()]:
        parser.error(f"{checkout} has no {', '.join(missing)}")
    parts: dict[str, Any] = {}
    if args.output and args.output.exists():
        parts = json.loads(args.output.read_text())["parts"]
    all_known = True
    for part, name in names.items():
        plain = run_tests(checkout, [name], {})
        parts[part] = {"without": dict(Counter(one.outcome for one in plain.values()))}
        for mode in MODES:
            parts[part][mode] = found = compare(checkout, name, mode, plain)
            all_known &= bool(plain) and not found["unknown_differences"] and not found["faults"]
        version = (checkout / "src" / "version.info").read_text().strip()
        write_result(args.output, "lightning_tests", tests_of=version, parts=parts)
        print(json.dumps(parts[part], indent=1), flush=True)
    return 0 if all_known else 1


if __name__ == "__main__":
    sys.exit(main())
