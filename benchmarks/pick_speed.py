"""Time of a process that picks a GPU, and of one that imports the package, from start to end.

    python benchmarks/pick_speed.py [--gpus 8] [--repeat 15] [--real] [--output results.json]

`lightning-gpu-tools pick` is compared with a bare script that makes the same readings with nvidia-ml-py and prints the
GPU with the most free memory, and with nvisel (nvitop) and gpu-gate if they are on the PATH. The processes take turns,
so that other load on the machine affects all alike. nvisel reads more than it needs. Without --real, the GPUs are
simulated, by a driver that is written in C and answers at once: that needs torch's CUDA build, as in
.ci/simulated_gpu. Its startup is part of every time of a pick, and of "Python alone". The import is measured without
it, and compared with `python -c pass`.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import make_parser, write_result

from lightning_gpu_tools.simulated import Machine

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
            if turn:  # the first run fills the file cache
                times_s[name].append(time.perf_counter() - start)
    return times_s


def show(times_s: dict[str, list[float]]) -> None:
    for name, values in times_s.items():
        base = "python -c pass" if name in IMPORTS else "bare nvidia-ml-py"
        of_range = f"{1e3 * min(values):.0f} to {1e3 * max(values):.0f}"
        ratio = median(values) / median(times_s[base])
        print(f"{name:28} {1e3 * median(values):5.0f} ms ({of_range}), {ratio:.2f} times {base}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=8, help="number of simulated GPUs (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=15, help="number of runs of each command (default: %(default)s)")
    parser.add_argument("--real", action="store_true", help="use this machine's driver instead of the simulated one")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}  # an installed package has bytecode
        plain.pop("PYTHONDONTWRITEBYTECODE", None)
        machine = None if args.real else Machine(folder / "machine", ["h100-80gb"] * args.gpus)
        driver = plain if machine is None else machine.environment(plain)
        environment = {**driver, "LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(folder / "claims")}
        runs = {name: (command, environment) for name, command in commands().items()}
        runs |= {name: (command, plain) for name, command in IMPORTS.items()}
        times_s = measure(runs, args.repeat)
    show(times_s)
    medians_s = {name: median(values) for name, values in times_s.items()}
    gpu_kind = "real" if args.real else f"{args.gpus} simulated"
    write_result(args.output, "pick_speed", gpus=gpu_kind, median_s=medians_s, all_s=times_s)


if __name__ == "__main__":
    main()
