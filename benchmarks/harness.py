"""Command lines, result files, and processes that the benchmarks share."""

import argparse
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import describe_machine

TESTS = Path(__file__).parents[1] / "tests"


def make_parser(doc: str | None, *, seconds: float | None = None, output: bool = True) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring; ``seconds`` is the default of ``--seconds``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="of each run (default: %(default)s)")
    if output:
        parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    return parser


def be_quiet() -> None:
    """Turn off warnings, Lightning's messages, and reports' pictures, which take longer than a short run."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.modules["matplotlib"] = None


def quiet_options(folder: str | Path) -> dict[str, Any]:
    """Return the options of a CPU Trainer that prints nothing and writes only below ``folder``."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }


def quiet_trainer(folder: str | Path, **options: Any) -> Any:
    """Return a Trainer with these options and without sanity checks, except for ``options``."""
    from lightning.pytorch import Trainer  # here, because some benchmarks must not import Lightning

    return Trainer(**{**quiet_options(folder), "num_sanity_val_steps": 0, **options})


def write_result(output: Path | None, benchmark: str, *packages: str, **result: Any) -> None:
    """Write a result to ``--output``, if given, with the machine and the versions of further packages."""
    if output is not None:
        content = {"benchmark": benchmark, "machine": describe_machine(*packages), **result}
        output.write_text(json.dumps(content, indent=1) + "\n")


def print_answer(row: Mapping[str, Any], *details: object) -> None:
    """Print the expected and the actual answer for one run, then details on lines of their own."""
    known = row["known"]
    expected = (" or ".join(known) if isinstance(known, tuple) else known) or "healthy"
    verdict = "right" if row["right"] else "WRONG"
    print(f"{verdict}  {row['training']}: expected {expected}, reported {row['said'] or 'healthy'}")
    for one in filter(None, details):
        print(f"       {one}", flush=True)


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return 0 if every answer is right."""
    return 0 if all(row["right"] for row in rows) else 1


def traceml() -> str | None:
    """Return TraceML's command, if this Python environment has it."""
    return shutil.which("traceml", path=str(Path(sys.executable).parent))


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def fake_gpus(gpus: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield the variables with which a process sees these GPUs of the tests' fake driver."""
    sys.path.append(str(TESTS))
    import fake_driver

    with tempfile.TemporaryDirectory() as folder:
        machine = fake_driver.Driver(Path(folder))
        machine.gpus = [fake_driver.gpu(**gpu) for gpu in gpus]
        yield machine.variables()
