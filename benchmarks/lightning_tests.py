"""Lightning's own tests: do they end as without this package when every Trainer uses it?

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    pip install pytest pytest-xdist pytest-timeout pytest-rerunfailures tensorboard pandas cloudpickle scikit-learn
    python benchmarks/lightning_tests.py pytorch-lightning --only callbacks tuner [--output results.json]

The tests run once as they are, once with the entry point switched on (``LIGHTNING_GPU_TOOLS=advise``: every Trainer has
the monitor and the advisor), and once with PortableCheckpointIO as the plugin of every Trainer. A test that ends
differently runs once more in both ways. After each test nothing of this package may be left: no thread, and no wrapper
on a function of torch. The exit code is 1 if a difference has no entry in ``KNOWN``.
"""

from __future__ import annotations

import argparse
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
DEFAULT_PARTS = ("callbacks", "checkpointing", "core", "loops", "trainer", "tuner")
# Why a test ends differently; by mode, and by a pattern of its name.
KNOWN: dict[str, dict[str, str]] = {"entry_point": {}, "plugin": {}}
_TIMEOUT_S = 120
_LEGACY = "checkpointing/test_legacy_checkpoints.py"  # needs files that are not part of the repository


class Result(NamedTuple):
    """How a test ended."""

    outcome: str  # passed, failed or skipped
    error: str = ""  # its last line
    fits: int = 0  # trainings begun
    left: str = ""  # what of this package was still there afterwards


# The part that runs within pytest, as `-p lightning_tests`


def pytest_configure(config: pytest.Config) -> None:
    import lightning.pytorch as pl

    run = pl.Trainer._run

    @functools.wraps(run)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _fits[0] += self.state.fn == "fit"
        return run(self, *args, **kwargs)

    pl.Trainer._run = counted  # type: ignore[method-assign]
    if os.environ.get("LIGHTNING_TESTS_PLUGIN"):
        _add_plugin(pl.Trainer)


_fits = [0]


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
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    if call.when == "teardown":
        report.user_properties += [("fits", _fits[0]), ("left", _left())]
    return report


def _left() -> str:
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    threads = [one.name for one in threading.enumerate() if "lightning-gpu-tools" in one.name]
    wrapped = [] if _MapDatasetFetcher.fetch.__module__.startswith("torch.") else ["_MapDatasetFetcher.fetch"]
    return ", ".join(threads + wrapped)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = dict(report.user_properties)
    text = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or "")
    line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "error": text[:500], **properties}
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["LIGHTNING_TESTS_RESULTS"], "a") as file:
            file.write(json.dumps(line) + "\n")


# The part that runs pytest


def run_tests(checkout: Path, names: list[str], environment: dict[str, str], processes: int) -> dict[str, Result]:
    """Run tests in a process of their own, and return how each one ended."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as results:
        paths = [str(Path(__file__).parent), str(checkout / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-p", "lightning_tests", "-q", "--timeout", str(_TIMEOUT_S)]
        command += ["-p", "no:cacheprovider", "--disable-pytest-warnings", "--tb=short"]
        command += [f"--ignore=tests/tests_pytorch/{_LEGACY}", "--color=no"]
        command += ["-n", str(processes), "--dist=loadfile"] if processes > 1 else []
        own = {"LIGHTNING_TESTS_RESULTS": results.name, "PYTHONPATH": os.pathsep.join(paths)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_GPU_TOOLS")}
        subprocess.run([*command, *names], cwd=checkout, env={**kept, **environment, **own}, check=False)
        found: dict[str, Result] = {}
        for text in results:
            line = json.loads(text)
            before = found.get(line["test"], Result("passed"))
            if line["outcome"] != "passed":
                before = before._replace(outcome=line["outcome"], error=line["error"])
            found[line["test"]] = before._replace(fits=line.get("fits", 0), left=line.get("left", ""))
        return found


def differing(found: dict[str, Result], plain: dict[str, Result]) -> list[str]:
    """Return the tests that end in another way."""
    lost = Result("lost")
    return [test for test in {**plain, **found} if found.get(test, lost).outcome != plain.get(test, lost).outcome]


def compare(
    checkout: Path, names: list[str], mode: str, plain: dict[str, Result], processes: int
) -> tuple[dict[str, Any], bool]:
    """Run the tests in one way, and return what differs from ``plain`` and whether all of it is known."""
    found = run_tests(checkout, names, MODES[mode], processes)
    differ = differing(found, plain)
    if differ:  # perhaps by chance
        again = run_tests(checkout, differ, MODES[mode], 1)
        differ = differing(again, run_tests(checkout, differ, {}, 1))
        found.update(again)
    left = {test: result.left for test, result in found.items() if result.left}
    reasons = {test: _reason(mode, test) for test in differ}
    unknown = {test: found.get(test, Result("lost"))._asdict() for test, reason in reasons.items() if not reason}
    summary = {
        "outcomes": dict(Counter(result.outcome for result in found.values())),
        "trainings": sum(result.fits for result in found.values()),
        "as_without": len(found) - len(differ),
        "known_differences": {test: reason for test, reason in reasons.items() if reason},
        "unknown_differences": unknown,
        "left_behind": left,
    }
    return summary, not unknown and not left


def _reason(mode: str, test: str) -> str | None:
    return next((why for pattern, why in KNOWN[mode].items() if fnmatch.fnmatchcase(test, f"*{pattern}")), None)


def main() -> int:
    from machine import describe_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch-lightning, of about the version installed")
    parser.add_argument("--only", nargs="+", default=list(DEFAULT_PARTS), help="folders or files of tests_pytorch")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--processes", type=int, default=1, help="tests at the same time (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    names = [f"tests/tests_pytorch/{part}" for part in args.only]
    if missing := [name for name in names if not (checkout / name.partition("::")[0]).exists()]:
        parser.error(f"{checkout} has no {', '.join(missing)}")
    plain = run_tests(checkout, names, {}, args.processes)
    result: dict[str, Any] = {
        "benchmark": "lightning_tests",
        "machine": describe_machine(),
        "parts": args.only,
        "without": dict(Counter(one.outcome for one in plain.values())),
    }
    all_known = bool(plain)
    for mode in args.modes:
        result[mode], is_known = compare(checkout, names, mode, plain, args.processes)
        all_known &= is_known
        if args.output:
            args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if all_known else 1


if __name__ == "__main__":
    sys.exit(main())
