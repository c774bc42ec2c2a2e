"""Claims between real processes on real files: who holds one, what ends it, what memory its job uses, and where."""

import fcntl
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_driver import Driver, gpu
from launched_jobs import claims_in, live_claims, take

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.selection.claims import Ledger, directory, held_claims, keep_claims, open_ledger

HOLD = """
import os, sys
from lightning_gpu_tools.selection.claims import open_ledger
os.umask(0o077)
with open_ledger(sys.argv[1]) as ledger:
    claim = ledger.take(["GPU-a"], "memory", 5)
print(claim.job, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with a claim on GPU-a, until it is told to end or killed."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def holders(path: Path) -> list[int | None]:
    return [claim.pid for claim in claims_in(path)]


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_can_read_a_claim_until_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 120) / ("b" * 120)  # longer than the address of a socket can be
    with holder(path) as process:
        (claim,) = claims_in(path)
        assert (claim.pid, claim.uuids, claim.kind, claim.memory_bytes) == (process.pid, ("GPU-a",), "memory", 5)
        assert claim.owner_id == os.getuid()
        (record,) = path.glob("*.json")
        assert json.loads(record.read_text())["pid"] == process.pid
        assert claim.since_s == pytest.approx(record.stat().st_ctime)
        assert mode(path) == 0o1777  # although the process has a umask of 077
        assert {entry.suffix: mode(entry) for entry in path.iterdir()} == {".json": 0o1644, ".sock": 0o1666}
        process.kill()
        process.wait()
        assert holders(path) == []
        with open_ledger(str(path)):  # who comes to claim removes what is left of it
            assert list(path.iterdir()) == []


@pytest.mark.parametrize("by_child", [True, False])
def test_releasing_is_for_the_process_that_claimed(path: Path, by_child: bool) -> None:
    claim = take(path)
    end_read, end_write = os.pipe()
    child = os.fork()
    if child == 0:  # has all of the claim's descriptors
        if by_child:
            claim.release()
        os.close(end_write)
        os.read(end_read, 1)
        os._exit(0)
    if not by_child:
        claim.release()
    assert len(claims_in(path)) == by_child
    os.close(end_write)
    os.waitpid(child, 0)
    assert holders(path) == [os.getpid()] * by_child
    os.close(end_read)
    if by_child:
        claim.release()


@pytest.mark.parametrize(
    ("own", "theirs", "is_folder_gone"),
    [("exclusive", None, False), ("exclusive", "whole", True)],
)
def test_a_removed_claim_is_taken_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, own: str, theirs: str | None, is_folder_gone: bool
) -> None:
    mine = take(path, own)
    assert held_claims()
    assert keep_claims() == []
    path.rename(path.with_name("old")) if is_folder_gone else empty(path)
    if theirs:
        other = take(path, theirs)
    (event,) = keep_claims()
    assert event.startswith(f"The claim of this job on GPU-a was removed from {path}. ")
    assert ("Meanwhile " in event) is (own == "exclusive" and theirs is not None)
    assert keep_claims() == []
    assert [claim.kind for claim in claims_in(path) if claim.job == mine.job] == ["whole" if theirs else own]
    mine.release()
    if theirs:
        other.release()
    assert list(path.iterdir()) == []
    assert not held_claims()


def test_a_claim_that_cannot_be_made_again_is_named_once(path: Path) -> None:
    mine = take(path)
    empty(path)
    path.chmod(0o777)
    words = f"The claim of this job was removed and cannot be restored. The claims folder {path} cannot be used: "
    assert mine.keep().startswith(words)
    assert mine.keep() == ""
    path.chmod(0o1777)
    assert "this job has claimed it again" in mine.keep()


def test_a_claim_released_while_retaken_stays_released(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = take(path)
    put = Ledger.put

    def put_and_release(ledger: Ledger, kind: str, content: dict[str, Any]) -> Any:
        held = put(ledger, kind, content)
        mine.release()  # as another thread might at this moment
        return held

    monkeypatch.setattr(Ledger, "put", put_and_release)
    empty(path)
    mine.keep()
    assert list(path.iterdir()) == []


def test_a_released_claim_is_not_taken_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = take(path)
    if os.fork() == 0:  # a child does not hold it
        os._exit(int(bool(held_claims() or keep_claims())))
    assert os.wait()[1] == 0
    mine.release()
    assert mine.keep() == ""
    assert holders(path) == []


def test_memory_is_that_of_the_holder_and_its_children(path: Path) -> None:
    with holder(path) as process, subprocess.Popen(["sleep", "60"]) as sibling:
        take(path, "memory", 5)
        claims = claims_in(path, [process.pid, sibling.pid, 1])
        # The holder is a child of this process, so what it uses is this process's, too.
        assert {claim.pid: claim.process_ids for claim in claims} == {
            process.pid: {process.pid},
            os.getpid(): {process.pid, sibling.pid},
        }
        sibling.kill()


def test_a_reused_process_number_has_none_of_the_memory(path: Path) -> None:
    mine = take(path, "memory", 5)
    for changed in (False, True):
        assert claims_in(path, [os.getpid()])[0].process_ids == (set() if changed else {os.getpid()})
        (record,) = path.glob("*.json")
        record.write_text(json.dumps({**json.loads(record.read_text()), "started_ticks": 1}))
    mine.release()


# The claims folder on file systems of every kind: full ones, private mounts, and one that is exchanged


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")


@needs_root
def test_a_full_file_system_costs_the_claim_and_nothing_else(driver: Driver, path: Path) -> None:
    driver.gpus = [gpu()]
    path.mkdir()
    code = f"""
import os
from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.errors import ClaimsError
print(*select_gpus().uuids)
try:
    select_gpus(exclusive=True)
except ClaimsError as error:
    print(error)
print(os.listdir({str(path)!r}))
"""
    answer = on_mount_of_its_own(path, "mode=1777,nr_inodes=2", code)
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
