"""GPUs that the installed torch has no code for: found without importing torch, never picked, and explained."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_driver import Driver, gpu

from lightning_gpu_tools.gpus.readings import GpuReading
from lightning_gpu_tools.selection.ranking import TorchBuild

pytestmark = pytest.mark.usefixtures("claims_dir")
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
CU126 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


@pytest.fixture
def driver(driver: Driver) -> Driver:
    """A server whose best card is busy, with an idle GT 710 for its display, and an idle K80."""
    driver.gpus = [
        gpu(name="NVIDIA A100-PCIE-40GB", memory_total="40GiB", memory_free="30GiB", utilization=95),
        gpu(name="NVIDIA GeForce GT 710", memory_total="2GiB", compute_capability=(3, 5)),
        gpu(name="Tesla K80", memory_total="12GiB", compute_capability=(3, 7)),
    ]
    return driver


@pytest.fixture
def install_torch(tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a torch where child processes look first, which is enough of it for all but an import."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{driver.variables()['PYTHONPATH']}")

    def install(codes: str | None, cuda: str | None = "12.6", version: str = "2.6.0+cu126") -> None:
        folder = tmp_path / "site" / "torch"
        (folder / "lib").mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("raise AssertionError('torch was imported')")
        facts = f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
        (folder / "version.py").write_text(facts)
        (folder / "lib" / "libtorch_python.so").unlink(missing_ok=True)
        if codes is not None:
            content = b"\x7fELF\0sm_\0 sm_9\0" + bytes(5000) + codes.encode() + b"\0sm_size\0"
            (folder / "lib" / "libtorch_python.so").write_bytes(content)

    return install


def names(driver: Driver, answer: subprocess.CompletedProcess[str]) -> list[str]:
    by_uuid = {str(one.uuid): one.name for one in driver.gpus}
    return [by_uuid[uuid] for uuid in answer.stdout.strip().split(",") if uuid]


def test_a_card_without_code_is_never_picked(driver: Driver, run_cli: RunCli, install_torch: Any) -> None:
    install_torch(CU126)
    assert names(driver, run_cli("pick")) == ["NVIDIA A100-PCIE-40GB"]
    refused = run_cli("pick", "-n", "2")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "compute capability 3.7; the installed torch 2.6.0+cu126 has code for 5.0, 6.0, 7.0, 7.5," in refused.stderr
    waited = run_cli("pick", "--name", "K80", "--wait", "1h")
    assert "Waiting cannot help" in waited.stderr
    shown = " ".join(run_cli("gpus").stdout.split())
    assert shown.count("cannot be used: compute capability 3.") == 2


@pytest.mark.parametrize(("codes", "cuda"), [(CU126, None), ("", "12.6")], ids=["cpu-build", "unknown-library"])
def test_an_unknown_build_refuses_nothing_and_old_cards_come_last(
    driver: Driver, run_cli: RunCli, install_torch: Any, codes: str | None, cuda: str | None
) -> None:
    install_torch(codes, cuda)
    assert names(driver, run_cli("pick", "-n", "3")) == [driver.gpus[index].name for index in (0, 2, 1)]
    assert run_cli("gpus").stdout.count("picked last: its compute") == 2


# Sources: CUDA C++ programming guide, "Binary Compatibility", "PTX Compatibility", and "Feature Set Compiler Targets".
@pytest.mark.parametrize(
    ("codes", "runs", "does_not_run"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("sm_90 compute_90", [(9, 0), (10, 0), (12, 1)], [(8, 9)]),
        ("sm_90a", [(9, 0)], [(8, 0), (10, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(12, 0)]),
        ("compute_100f", [(10, 0), (10, 3)], [(12, 0)]),
    ],
)
def test_code_runs_where_cuda_promises_it(
    codes: str, runs: list[tuple[int, int]], does_not_run: list[tuple[int, int]]
) -> None:
    build = TorchBuild("2.9.0", tuple(codes.split()))
    assert [build.why_not(GpuReading(index=0, compute_capability=one)) for one in runs] == [None] * len(runs)
    assert None not in [build.why_not(GpuReading(index=0, compute_capability=one)) for one in does_not_run]
