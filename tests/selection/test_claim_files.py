"""The claims folder on file systems of every kind: full ones, private mounts, and one that is exchanged."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import Driver, gpu
from launched_jobs import live_claims, take

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.selection.claims import directory

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")


@needs_root
@pytest.mark.parametrize("inodes", [1, 2], ids=["no-socket", "no-record"])
def test_a_full_file_system_costs_the_claim_and_nothing_else(driver: Driver, path: Path, inodes: int) -> None:
    driver.gpus = [gpu()]
    path.mkdir()
    code = f"""
import os
from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.errors import ClaimsError
os.environ["LIGHTNING_GPU_TOOLS_CLAIMS_DIR"] = {str(path)!r}
print(*select_gpus().uuids)
try:
    select_gpus(exclusive=True)
except ClaimsError as error:
    print(error)
print(os.listdir({str(path)!r}))
"""
    answer = on_mount_of_its_own(path, f"mode=1777,nr_inodes={inodes}", code)
    picked, refused, left = answer.stdout.splitlines()
    assert (picked, left) == (driver.gpus[0].uuid, "[]")
    assert "(No space left on device). Put it on a local file system with free space. Or set LIGHTNING_GPU" in refused
    assert "The GPUs of this job are not claimed." in answer.stderr


def on_mount_of_its_own(path: Path, options: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where a new file system is mounted at ``path``, for that process only."""
    mount = f'mount -t tmpfs -o {options} tmpfs {path} || exit 77; exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, sys.executable, code]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode == 77 or "unshare" in answer.stderr:
        pytest.skip(f"no mount of its own is to be had here: {answer.stderr}")
    return answer


def test_a_folder_exchanged_before_it_is_locked_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_lock = fcntl.flock

    def exchange_and_take_lock(descriptor: int, operation: int) -> None:
        if not path.with_name("old").exists():
            path.rename(path.with_name("old"))
        take_lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", exchange_and_take_lock)
    take(path)
    assert live_claims(path) == [("whole", 1)]
    assert list(path.with_name("old").iterdir()) == []


@pytest.fixture
def default(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default folder of claims, on a machine with two GPUs."""
    driver.gpus = [gpu(), gpu()]
    for name in ("LIGHTNING_GPU_TOOLS_CLAIMS_DIR", "LIGHTNING_GPU_TOOLS_JOB"):
        monkeypatch.delenv(name, raising=False)
    folder = Path(directory())
    folder.mkdir(mode=0o1777, exist_ok=True)
    return folder


PICKS = """
import subprocess, sys
pick = "import sys; from lightning_gpu_tools import select_gpus; select_gpus(min_free=int(sys.argv[1]) or None)"
for min_free in ("0", "1", "1"):
    subprocess.run([sys.executable, "-c", pick, min_free], check=True)
    print("picked", file=sys.stderr)
"""


@needs_root
def test_a_private_folder_is_named_once_if_it_matters(default: Path) -> None:
    answer = on_mount_of_its_own(default, "mode=1777", PICKS)
    warning = f"The claims folder {default} is on a mount that only this job sees"
    assert answer.returncode == 0
    assert [warning in said for said in answer.stderr.split("picked\n")] == [False, True, False, False]


@needs_root
@pytest.mark.follows("LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all jobs of this server share")
def test_a_shared_folder_instead_of_the_private_one_ends_the_warning(
    driver: Driver, default: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from lightning_gpu_tools import select_gpus\nprint(*select_gpus(exclusive=True).uuids)"
    said = on_mount_of_its_own(default, "mode=1777", code).stderr
    variable = re.search(r"Set (\w+) to a folder that all jobs of this server share", said)[1]
    shared = tmp_path / "shared"
    monkeypatch.setenv(variable, str(shared))
    with select_gpus(exclusive=True) as outside:
        inside = on_mount_of_its_own(default, "mode=1777", code)
    assert (inside.stdout, inside.stderr) == (f"{driver.gpus[0].uuid}\n", "")
    assert outside.uuids == (driver.gpus[1].uuid,)
