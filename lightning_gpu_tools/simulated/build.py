"""The libraries of the simulated machine, compiled on first use for the torch of this Python environment."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
RUNTIME = ["machine", "devices", "memory", "streams", "kernels", "computed", "blas", "nccl", "driver", "nothing"]
# Functions that torch may call, and all of the driver's, which Triton and others call. Functions missing in the source
# return "not supported".
_CALLED = re.compile(r"^(?:__)?(?:cuda|nccl|cublas)[A-Z]\w*$")
_OF_DRIVER = re.compile(r"\bcu[A-Z]\w*")
_NOT_SUPPORTED = {"cu": 801, "cuda": 801, "nccl": 5, "cublas": 0}  # cuBLAS: only matrix products take time


class SimulatedCudaError(RuntimeError):
    """The simulated machine cannot be built here. The message says what is missing and how to install it."""


def libraries() -> Path:
    """Return the folder of the libraries; compile them first if needed for this torch and these sources.

    They are in ``lightning-gpu-tools`` in the user's cache folder (``XDG_CACHE_HOME``, by default ``~/.cache``).

    Raises:
        SimulatedCudaError: torch's CUDA build, its headers, gcc, or nm are missing, or this is not Linux.
    """
    torch = torch_folder()
    headers = _headers(torch)
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise SimulatedCudaError(
                f"{tool} was not found. The simulated machine is compiled on first use. Install gcc and binutils, for "
                "example with `apt-get install gcc`."
            )
    sources = sorted(path for path in SOURCE.rglob("*") if path.is_file())
    key = hashlib.sha256((torch / "version.py").read_bytes())
    for path in sources:
        key.update(path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-gpu-tools"
    folder = cache / f"simulated-{key.hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Other processes may do the same: each compiles into its own folder, and the first result is used.
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as temporary:
            _compile(Path(temporary), torch, headers)
            if not folder.exists():
                Path(temporary).rename(folder)
    return folder


def torch_folder() -> Path:
    """Return the folder of torch in this Python environment; raise ``SimulatedCudaError`` if it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SimulatedCudaError("torch is not installed in this Python environment. Run `pip install torch`.")
    return Path(spec.origin).absolute().parent


def _headers(torch: Path) -> Path:
    """Return the folder of CUDA's headers."""
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        version = re.search(r"__version__ = '(.*)'", (torch / "version.py").read_text())
        raise SimulatedCudaError(
            f"torch {version[1] if version else ''} in {torch} is built without CUDA. On Linux, run "
            "`pip install --force-reinstall torch` with the default package index, in another environment if need be."
        )
    nvidia = torch.parent / "nvidia"
    for headers in (nvidia / "cuda_runtime" / "include", *sorted(nvidia.glob("cu[0-9]*/include"))):
        if (headers / "cuda_runtime_api.h").exists():
            return headers
    raise SimulatedCudaError(
        f"cuda_runtime_api.h was not found below {nvidia}. torch's wheels include it; otherwise run "
        "`pip install nvidia-cuda-runtime`."
    )


def _compile(folder: Path, torch: Path, headers: Path) -> None:
    options: list[str | Path] = ["gcc", "-O2", "-fPIC", "-w", f"-I{SOURCE}", f"-I{headers}", "-pthread"]
    objects = {name: folder / f"{name}.o" for name in RUNTIME}
    _run_all([[*options, "-c", "-o", path, SOURCE / f"{name}.c"] for name, path in objects.items()])
    (folder / "missing.c").write_text(_missing(list(objects.values()), torch, headers))
    runtime: list[str | Path] = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    nvml: list[str | Path] = ["-shared", "-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1"]
    _run_all(
        [
            [*options, *runtime, *objects.values(), folder / "missing.c", "-ldl"],
            [*options, *nvml, SOURCE / "nvml.c", SOURCE / "machine.c"],
        ]
    )
    for path in (*objects.values(), folder / "missing.c"):
        path.unlink()


def _missing(objects: list[Path], torch: Path, headers: Path) -> str:
    """Return C functions for what torch's libraries call, and for the driver's functions, that the objects lack.

    A missing function would be looked up in NVIDIA's own runtime, which finds no driver.
    """
    users = [*torch.glob("lib/lib*cuda*.so"), *torch.glob("lib/libtorch_python.so")]
    called = {name for name in _symbols("--dynamic", "--undefined-only", *users) if _CALLED.match(name)}
    called |= set(_OF_DRIVER.findall((headers / "cuda.h").read_text()))
    answers = (
        (name, re.sub("^_*|[A-Z].*", "", name)) for name in sorted(called - _symbols("--defined-only", *objects))
    )
    return "".join(f"int {name}() {{ return {_NOT_SUPPORTED[library]}; }}\n" for name, library in answers)


def _symbols(*arguments: str | Path) -> set[str]:
    listed = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in listed if line.strip() and not line.endswith(":")}


def _run_all(commands: list[list[str | Path]]) -> None:
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        if process.returncode:
            raise SimulatedCudaError(f"gcc could not compile the simulated machine:\n{error.strip()[-2000:]}")
