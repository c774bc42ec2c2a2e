"""Accuracy of sampled source lines, and the cost of a sample.

    python benchmarks/source_lines.py [--seconds 60] [--output results.json]

A plain loop under watch() does five kinds of work in each step, each on a line of its own, and times them. They take
some milliseconds at a time in the first run, and about one in the second. The package samples the loop as it does every
run, but for the whole run. A third run with Python's default switch interval of 5 ms shows why the package shortens it.
The cost is the CPU time of the sampling thread.
"""

import contextlib
import io
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import load_average, make_parser, write_result

from lightning_gpu_tools import load_report, watch
from lightning_gpu_tools.training import line_sampler

LONG, SHORT = 5, 1  # amount of work at a time
SQUARES = {LONG: torch.randn(700, 700), SHORT: torch.randn(400, 400)}
DATA = {much: list(range(30_000 * much)) for much in (LONG, SHORT)}


def pure_python(much: int) -> Any:
    return sum([i * i for i in DATA[much]])


def in_torch(much: int) -> Any:
    return SQUARES[much] @ SQUARES[much]


def c_that_calls_python(much: int) -> Any:
    return sorted(DATA[much], key=lambda value: -value)


def asleep(much: int) -> Any:
    return time.sleep(0.002 * much)


def c_that_keeps_the_lock(much: int) -> Any:
    return bytes(3_000_000 * much).count(b"x")


WORK: tuple[Callable[[int], Any], ...] = (pure_python, in_torch, c_that_calls_python, asleep, c_that_keeps_the_lock)


def measure(seconds: float, switch_s: float, much: int) -> dict[str, Any]:
    """Return each kind of work's share of the time and of the samples, and the cost of a sample."""
    line_sampler.WINDOW_SAMPLES, line_sampler.SWITCH_S = 10**9, switch_s
    truth: Counter[str] = Counter()
    sampler: Any = None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with watch(folder=folder) as run:
            ends_s = time.perf_counter() + seconds
            for step, _ in enumerate(run.batches(iter(int, 1))):
                for do in WORK:
                    began_s = time.perf_counter()
                    do(much)
                    if step > 20:  # the package's warm-up
                        truth[do.__name__] += time.perf_counter() - began_s
                if time.perf_counter() > ends_s:
                    break
            sampler = run._session.recorder.lines
            cpu_s = sampler.cpu_s
        lines = load_report(folder).lines
    # By line, because a lambda is another function on the same line.
    of_line = {do.__code__.co_firstlineno + 1: do.__name__ for do in WORK}
    seen: Counter[str] = Counter()
    for one in lines:
        seen[of_line.get(one.line, "elsewhere") if Path(one.file).name == Path(__file__).name else "elsewhere"] += (
            one.samples
        )
    return {
        "samples": seen.total(),
        "true_percent": {name: 100 * spent_s / truth.total() for name, spent_s in truth.items()},
        "seen_percent": {name: 100 * seen[name] / seen.total() for name in [*truth, "elsewhere"]},
        "us_per_sample": 1e6 * cpu_s / seen.total(),
    }


def main() -> None:
    args = make_parser(__doc__, seconds=60.0).parse_args()
    load = load_average()
    torch.set_num_threads(1)
    ours_s, pythons_s = line_sampler.SWITCH_S, sys.getswitchinterval()
    runs = {
        "milliseconds at a time": measure(args.seconds, ours_s, LONG),
        "one millisecond at a time": measure(args.seconds, ours_s, SHORT),
        "milliseconds at a time, with Python's switch interval": measure(args.seconds, pythons_s, LONG),
    }
    for name, found in runs.items():
        print(f"{name}: {found['samples']} samples, {found['us_per_sample']:.0f} us of CPU time each")
        for work, percent in found["true_percent"].items():
            print(f"  {work:24} true {percent:5.1f}%  sampled {found['seen_percent'][work]:5.1f}%")
    write_result(args.output, "source_lines", load_average_before=load, seconds=args.seconds, runs=runs)


if __name__ == "__main__":
    main()
