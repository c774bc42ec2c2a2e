"""Runs the whole suite with other versions of torch and Lightning, each pair in a virtual environment of its own.

    python tests/matrix.py                                      every line of MATRIX
    python tests/matrix.py 2.6.0 2.5.1 --python python3.10      one pair

The suite runs as README says, on all cores; what fails then runs again, one test after the other, because a busy
machine makes tests time out. All other packages are the newest that pip finds; options of pytest come from
``PYTEST_ADDOPTS``. Each result is kept in benchmarks/results/versions.json, and ``python -m benchmarks.tables`` writes
them into README. A build for CUDA takes 6 GB of the disk until its tests have run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
# torch, Lightning, Python: the oldest that are supported, the newest, and between them versions of the same time.
MATRIX = [
    ("2.6.0", "2.5.1", "python3.10"),
    ("2.8.0", "2.5.6", "python3.11"),
    ("2.10.0", "2.6.0", "python3.12"),
    ("2.13.0", "2.6.6", "python3.11"),
    ("2.15.0", "2.6.6", "python3.13"),
]
# The RichProgressBar of Lightning before 2.5.3 fails with Rich 14.1 and later (Lightning's pull request 21016).
OTHER_PACKAGES = {"2.5.1": ["rich<14.1"]}
DESCRIBE = """
import importlib.metadata, json, torch
from benchmarks.machine import describe_machine
rich = importlib.metadata.version("rich")
print(json.dumps({"machine": describe_machine(), "cuda": torch.version.cuda, "rich": rich}))
"""


def run(torch: str, lightning: str, python: str, folder: Path) -> dict[str, Any]:
    """Install a pair of versions in a folder; run the suite and return how it went."""
    print(f"torch {torch}, Lightning {lightning}, {python}: installing in {folder}", flush=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    executable = folder / "bin" / "python"
    # An installed package has entry points, and PYTHONPATH could put another clone before it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    versions = [f"torch=={torch}", f"lightning=={lightning}", f"pytorch-lightning=={lightning}"]
    versions += OTHER_PACKAGES.get(lightning, [])
    pip = [executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
    subprocess.run([*pip, *versions, "-e", f"{ROOT}[dev]"], check=True, env=environment)
    described = json.loads(subprocess.check_output([executable, "-c", DESCRIBE], cwd=ROOT, env=environment))

    def outcomes(*options: str) -> dict[str, tuple[str, str]]:
        """Return how each test ended, and why it was skipped."""
        file = folder / "junit.xml"
        pytest = [executable, "-m", "pytest", "-q", "-o", f"cache_dir={folder / 'cache'}", f"--junitxml={file}"]
        pytest += ["--ignore=tests/test_docs.py"]  # which compares README with the results that this script changes
        subprocess.run([*pytest, *options], cwd=ROOT, env=environment, check=False)
        cases = ElementTree.parse(file).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": outcome(case) for case in cases}

    begin_s = time.monotonic()
    first = outcomes("-n", "logical")
    seconds = time.monotonic() - begin_s
    failed = {name for name, (kind, _) in first.items() if kind == "failed"}
    second = outcomes("--last-failed") if failed else {}
    failed_again = {name for name in failed if second.get(name) != ("passed", "")}
    skipped = Counter(reason for kind, reason in first.values() if kind == "skipped")
    return {
        **described,
        "passed": len(first) - len(failed_again) - skipped.total(),
        "failed": len(failed_again),
        "skipped": skipped.total(),
        "seconds": round(seconds),
        "failures": sorted(failed_again),
        "passed_when_repeated": sorted(failed - failed_again),
        "skipped_because": dict(skipped),
    }


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    return ("passed", "") if skipped is None else ("skipped", skipped.get("message", ""))


def keep(result: dict[str, Any]) -> None:
    """Put a result in the place of an older one with the same versions."""
    kept = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []

    def versions(one: dict[str, Any]) -> list[list[int]]:
        texts = [one["machine"][name] for name in ("torch", "lightning", "python")]
        return [[int(part) for part in text.partition("+")[0].split(".")] for text in texts]

    runs = sorted([*(one for one in kept if versions(one) != versions(result)), result], key=versions)
    RESULTS.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    counts = ", ".join(f"{result[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"{counts} in {result['seconds']} s. Kept in {RESULTS}.", flush=True)


def main() -> int:
    """Run one pair of versions, or all of them; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of torch, and of both of Lightning's packages")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for one pair; by default this one")
    arguments = parser.parse_args()
    if len(arguments.versions) not in (0, 2):
        parser.error("name a version of torch and one of Lightning, or none for every pair")
    chosen = [(*arguments.versions, arguments.python)] if arguments.versions else MATRIX
    failed = 0
    for torch, lightning, python in chosen:
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            name = f"torch-{torch}-lightning-{lightning}-{Path(python).name}"
            result = run(torch, lightning, python, Path(folder) / name)
        keep(result)
        failed += result["failed"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
