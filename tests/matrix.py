"""Runs the whole suite with other versions of torch and Lightning, each pair in a virtual environment of its own.

    python tests/matrix.py                                    every pair below
    python tests/matrix.py 2.6.0 2.5.1 --python python3.12    one pair

All other packages are the newest that pip finds; options of pytest come from ``PYTEST_ADDOPTS``. A result is kept in
benchmarks/results/versions.json. A build for CUDA takes 6 GB of the disk while its tests run.
"""

from __future__ import annotations

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
# torch and Lightning: the oldest that are supported, the newest, and between them pairs of the same time.
PAIRS = [("2.6.0", "2.5.1"), ("2.8.0", "2.5.6"), ("2.10.0", "2.6.0"), ("2.13.0", "2.6.6"), ("2.15.0", "2.6.6")]
DESCRIBE = """
import json, torch
from benchmarks.machine import describe_machine
print(json.dumps({"machine": describe_machine(), "cuda": torch.version.cuda}))
"""


def run(torch: str, lightning: str, python: str, folder: Path) -> dict[str, Any]:
    """Install a pair of versions in a folder, unless they are there; run the suite and return how it went."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    executable = folder / "venv" / "bin" / "python"
    # An installed package has entry points, and PYTHONPATH could put another clone before it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    versions = [f"torch=={torch}", f"lightning=={lightning}", f"pytorch-lightning=={lightning}"]
    pip = [executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
    subprocess.run([*pip, *versions, "-e", f"{ROOT}[dev]"], check=True, env=environment)
    described = subprocess.check_output([executable, "-c", DESCRIBE], cwd=ROOT, env=environment)

    answers = folder / "junit.xml"
    begin_s = time.monotonic()
    pytest = [executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={answers}"]
    subprocess.run(pytest, cwd=ROOT, env=environment, check=False)
    seconds = time.monotonic() - begin_s

    cases = [*ElementTree.parse(answers).iter("testcase")]
    skips = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    failures = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        **json.loads(described),
        "passed": len(cases) - len(skips) - len(failures),
        "failed": len(failures),
        "skipped": len(skips),
        "seconds": round(seconds),
        "failures": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failures),
        "skipped_because": dict(Counter(one.get("message", "") for one in skips if one is not None)),
    }


def keep(result: dict[str, Any]) -> None:
    """Put a result in the place of an older one with the same versions."""
    kept = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []

    def versions(one: dict[str, Any]) -> list[list[int]]:
        texts = [one["machine"][name] for name in ("torch", "lightning", "python")]
        return [[int(part) for part in text.partition("+")[0].split(".")] for text in texts]

    runs = sorted([*(one for one in kept if versions(one) != versions(result)), result], key=versions)
    RESULTS.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def main() -> None:
    """Run one pair of versions, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of torch, and of both of Lightning's packages")
    parser.add_argument("--python", default=sys.executable, help="the interpreter; by default this one")
    parser.add_argument("--folder", type=Path, help="keep the environment here, and use what is here")
    arguments = parser.parse_args()
    if len(arguments.versions) not in (0, 2):
        parser.error("name a version of torch and one of Lightning, or none for every pair")
    for torch, lightning in [arguments.versions] if arguments.versions else PAIRS:
        with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
            keep(run(torch, lightning, arguments.python, arguments.folder or Path(folder)))


if __name__ == "__main__":
    main()
