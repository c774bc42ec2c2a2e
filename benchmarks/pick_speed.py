"""How long does it take to pick a GPU, and to import the package, from the start of the process to its end?

    python benchmarks/pick_speed.py [--gpus 8] [--repeat 15] [--real] [--output results.json]

`lightning-gpu-tools pick` beside a bare script that makes the same readings with nvidia-ml-py and prints the GPU with
the most free memory, and beside nvisel (nvitop) and gpu-gate where these are on the PATH. The processes take turns, so
that other load on the machine hits all alike. nvisel reads more than it needs, and says at length which functions the
fake driver lacks; that is in its time. Without --real the GPUs are those of the tests' fake driver, whose own
start is in every figure of a pick; "Python alone" has it, too. The import is measured without them, next to
`python -c pass`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_machine
from rich.console import Console
from rich.table import Table

BARE = """
import pynvml as n
n.nvmlInit()
free = {}
for i in range(n.nvmlDeviceGetCount()):
    gpu = n.nvmlDeviceGetHandleByIndex(i)
    uuid, _, _ = n.nvmlDeviceGetUUID(gpu), n.nvmlDeviceGetName(gpu), n.nvmlDeviceGetPciInfo(gpu)
    free[uuid] = n.nvmlDeviceGetMemoryInfo(gpu).free
    for reading in (
        lambda: n.nvmlDeviceGetSamples(gpu, n.NVML_GPU_UTILIZATION_SAMPLES, 0),
        lambda: n.nvmlDeviceGetComputeRunningProcesses(gpu),
        lambda: n.nvmlDeviceGetGraphicsRunningProcesses(gpu),
        lambda: n.nvmlDeviceGetComputeMode(gpu),
        lambda: n.nvmlDeviceGetMigMode(gpu),
    ):
        try:
            reading()
        except n.NVMLError:
            pass
print(max(free, key=free.get))
"""


IMPORTS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import lightning_gpu_tools": [sys.executable, "-c", "import lightning_gpu_tools"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the fake driver")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--real", action="store_true", help="ask the real driver of this machine")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(Path(folder, "claims")),
            "PYTHONPYCACHEPREFIX": str(Path(folder, "bytecode")),  # as an installed package has it
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if not options.real:
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
            import fake_driver

            machine = fake_driver.Driver(Path(folder))
            machine.gpus = [fake_driver.gpu(memory_free=f"{10 + i}GiB") for i in range(options.gpus)]
            environment.update(machine.variables())
        plain = {**os.environ, "PYTHONPYCACHEPREFIX": environment["PYTHONPYCACHEPREFIX"]}
        plain.pop("PYTHONDONTWRITEBYTECODE", None)
        runs = {name: (command, environment) for name, command in commands().items()}
        runs |= {name: (command, plain) for name, command in IMPORTS.items()}
        times_s = measure(runs, options.repeat)
    show(times_s)
    if options.output:
        result = {
            "machine": describe_machine(),
            "gpus": "real" if options.real else f"{options.gpus} fake",
            "median_s": {name: statistics.median(values) for name, values in times_s.items()},
            "all_s": times_s,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def commands() -> dict[str, list[str]]:
    installed = Path(sys.executable).with_name("lightning-gpu-tools")
    ours = [str(installed)] if installed.exists() else [sys.executable, "-m", "lightning_gpu_tools"]
    found = {
        "Python alone": [sys.executable, "-c", ""],
        "bare nvidia-ml-py": [sys.executable, "-c", BARE],
        "lightning-gpu-tools pick": [*ours, "pick"],
    }
    for name, arguments in {"nvisel": ["-n", "1"], "gpu-gate": ["wait"]}.items():
        if shutil.which(name):
            found[name] = [name, *arguments]
    return found


def measure(runs: dict[str, tuple[list[str], dict[str, str]]], repeat: int) -> dict[str, list[float]]:
    times_s: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, (command, environment) in runs.items():
            start = time.perf_counter()
            answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if answer.returncode != 0:
                raise SystemExit(f"{name} failed: {answer.stderr}")
            if turn:  # the first one fills the file cache
                times_s[name].append(time.perf_counter() - start)
    return times_s


def show(times_s: dict[str, list[float]]) -> None:
    table = Table("", "median", "fastest", "slowest", "against the bare script, or Python")
    for name, values in times_s.items():
        base_s = statistics.median(times_s["python -c pass" if name in IMPORTS else "bare nvidia-ml-py"])
        times = (f"{seconds * 1e3:.0f} ms" for seconds in (statistics.median(values), min(values), max(values)))
        table.add_row(name, *times, f"{statistics.median(values) / base_s:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
