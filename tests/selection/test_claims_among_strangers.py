"""What other users, absurd files and unusable folders can do to claims: be named, and no more."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_driver import Driver, gpu

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.selection import claim_files
from lightning_gpu_tools.selection.claims import open_ledger, read_ledger, warn_once

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
ALICE, BOB, CAROL = 4711, 4712, 4713
GOOD = {"uuids": ["GPU-a"], "kind": "memory", "memory_bytes": 1, "pid": 1, "hostname": "h", "job": "j"}

AS = """
import os, sys
from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.selection import claim_files, claims
from lightning_gpu_tools.selection.claims import open_ledger, read_ledger
import fcntl, json, socket
# Another user may not be able to read the files that Python imports, so that has to be done before.
import argparse, ctypes.util, dataclasses, locale, logging, pynvml
import lightning_gpu_tools.selection.ranking
from lightning_gpu_tools.gpus.nvml import driver, probe
from lightning_gpu_tools.cli import gpus, pick, run
if "fake_driver" in sys.modules:
    select_gpus(claim=False)
path, user = sys.argv[1], int(sys.argv[2])
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
os.chdir(path) if os.path.isdir(path) and os.access(path, os.X_OK) else None
"""
TAKE = """
with open_ledger(path) as ledger:
    claim = ledger.take(["GPU-a"], "exclusive", group="g", job="j")
"""
STAY = """
print("there", flush=True)
sys.stdin.read()
"""
USERS = """
with read_ledger(path) as ledger:
    print(*(claim.user for claim in ledger.claims()))
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path that all users can get to, and the fake driver's files with it; pytest's own is for one user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where claims are going to live."""
    warn_once.cache_clear()
    return tmp_path / "claims"


def run_as(user_id: int, path: Path, code: str) -> subprocess.CompletedProcess[str]:
    for log in path.parent.glob("*.log"):  # of the calls of the fake driver
        log.chmod(0o666)
    command = [sys.executable, "-c", AS + code, str(path), str(user_id)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def staying(user_id: int, path: Path, code: str = TAKE) -> Iterator[subprocess.Popen[str]]:
    """A process of a user's that has done something and is still there."""
    command = [sys.executable, "-c", AS + code + STAY, str(path), str(user_id)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "there\n"
        yield process
        process.kill()


def kinds(path: Path) -> list[str]:
    with read_ledger(str(path)) as ledger:
        return [claim.kind for claim in ledger.claims()]


@contextmanager
def planted(path: Path, content: bytes, kind: str = "claim") -> Iterator[str]:
    """A live entry with a record that this package would not write."""
    path.mkdir(exist_ok=True)
    name = f"{kind}-00000000deadbeef"
    (path / f"{name}.json").write_bytes(content)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / f"{name}.sock"))
        listener.listen()
        yield name
    for ending in ("json", "sock"):
        (path / f"{name}.{ending}").unlink(missing_ok=True)


@needs_root
@pytest.mark.parametrize("first", [0, ALICE], ids=["root-first", "user-first"])
def test_users_see_each_others_claims_whoever_came_first(path: Path, first: int) -> None:
    name = "root" if first == 0 else f"uid {first}"
    with staying(first, path) as one, staying(BOB, path):
        assert run_as(CAROL, path, USERS).stdout == f"{name} uid {BOB}\n"
        one.kill()
        one.wait()
        # In a sticky folder this user cannot remove what the first one left, and need not.
        assert run_as(CAROL, path, USERS).stdout == f"uid {BOB}\n"


ATTACKS = [
    "echo '{}' > claim-*.json",
    "echo '{}' >> claim-*.json",
    "rm -f claim-*",
    "mv claim-*.json gone",
    "mv claim-*.sock gone",
    "chmod 666 claim-*.json",
    "ln -sf /dev/null claim-*.json",
    "ln claim-*.sock other.sock",
    "mv . elsewhere",
]


@needs_root
def test_no_other_user_can_change_or_end_a_claim(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)
    with staying(ALICE, path) as process:
        (record,) = path.glob("*.json")
        before = record.read_bytes()
        for attack in ATTACKS:
            subprocess.run(["sh", "-c", attack], cwd=path, user=BOB, group=BOB, extra_groups=[], timeout=60)
            assert record.read_bytes() == before, attack
            with read_ledger(str(path)) as ledger:
                claims = [(claim.owner_id, claim.pid, claim.kind) for claim in ledger.claims()]
            assert claims == [(ALICE, process.pid, "exclusive")], attack


@needs_root
def test_no_other_user_can_keep_a_dead_claim_alive(path: Path) -> None:
    with staying(ALICE, path) as process:
        (record,) = path.glob("*.json")
        keep = f"""
lock = os.open({str(record)!r}, os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_SH)
probe = socket.socket(socket.AF_UNIX)
probe.connect({record.with_suffix(".sock").name!r})
"""
        with staying(BOB, path, keep):
            assert kinds(path) == ["exclusive"]
            process.kill()
            process.wait()
            assert kinds(path) == []
            # The owner of the folder could remove the dead socket: one of somebody else's in its place is not it.
            record.with_suffix(".sock").unlink()
            listen = f"s = socket.socket(socket.AF_UNIX); s.bind({record.with_suffix('.sock').name!r}); s.listen()"
            with staying(BOB, path, listen):
                assert kinds(path) == []


@needs_root
def test_a_claim_with_anothers_job_name_is_not_trusted(
    driver: Driver, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bob has read the names of Alice's job and group, and writes them into a claim of his own.
    driver.gpus = [gpu()]
    ask = """
os.environ["LIGHTNING_GPU_TOOLS_JOB"] = "j"
os.environ["LIGHTNING_GPU_TOOLS_CLAIMS_DIR"] = path
from lightning_gpu_tools.selection.picking import Attempt, pick
from lightning_gpu_tools.selection.ranking import Request
try:
    print(pick(Request(), Attempt.choose, group="g").uuids)
except Exception as error:
    print(error)
"""
    take = TAKE.replace("GPU-a", driver.gpus[0].uuid)
    with staying(BOB, path, take):
        assert f"claimed exclusively by uid {BOB}" in run_as(ALICE, path, ask).stdout
        assert driver.gpus[0].uuid in run_as(BOB, path, ask).stdout


@needs_root
@pytest.mark.parametrize(
    ("mode", "asker", "counts"), [(0o066, ALICE, True), (0o600, BOB, False)], ids=["forbidden", "hidden-by-owner"]
)
def test_a_forbidden_socket_counts_unless_its_owner_hides_it(path: Path, mode: int, asker: int, counts: bool) -> None:
    hide = f"\nos.chmod(next(name for name in os.listdir(path) if name.endswith('.sock')), {mode})"
    path.mkdir()
    path.chmod(0o1777)
    with staying(ALICE, path, TAKE + hide):
        assert run_as(asker, path, USERS).stdout == (f"uid {ALICE}\n" if counts else "\n")


@needs_root
@pytest.mark.parametrize("operation", ["LOCK_SH", "LOCK_EX"])
def test_who_locks_the_folder_is_named_and_stops_only_promises(
    driver: Driver,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
) -> None:
    driver.gpus = [gpu(memory_free="40GiB"), gpu(memory_free="30GiB")]
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_CLAIMS_DIR", str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(claim_files, "TIMEOUT_LOCK_S", 0.1)
    mine = select_gpus(min_free="25GiB")
    with staying(BOB, path, f"fcntl.flock(os.open(path, os.O_RDONLY), fcntl.{operation})") as process:
        named = rf"python.* of uid {BOB} \(pid {process.pid}\) has locked it for 0 s. End that process"
        for promise in ({"exclusive": True}, {"min_free": "1GiB"}):
            with pytest.raises(ClaimsError, match=named):
                select_gpus(**promise)  # type: ignore[arg-type]
        # What others have claimed is known all the same.
        assert select_gpus(min_free="25GiB", claim=False).uuids == (driver.gpus[1].uuid,)
        assert not caplog.records
        assert select_gpus().uuids == (driver.gpus[1].uuid,)
        (said,) = caplog.messages
        assert f"uid {BOB}" in said
        assert said.endswith("The GPUs of this job are not claimed.")
        with pytest.raises(ClaimsError, match=named):
            select_gpus(exclusive=True, wait=0.3)
        threading.Timer(0.5, process.kill).start()
        assert select_gpus(exclusive=True, wait="1h").uuids == (driver.gpus[1].uuid,)
    mine.release()


BAD_RECORDS = [
    pytest.param(b"", id="empty"),
    pytest.param(json.dumps(GOOD)[:60].encode(), id="torn"),
    pytest.param(b"\xff\xfe", id="not-utf-8"),
    pytest.param(b"null", id="null"),
    pytest.param(b"[]", id="list"),
    pytest.param(b'"text"', id="text"),
    pytest.param(b"{}", id="no-fields"),
    pytest.param(b"[" * 50_000, id="nested-too-deep"),
    pytest.param(json.dumps({**GOOD, "pid": 0}).replace("0", "9" * 5000).encode(), id="pid-of-5000-digits"),
    *(
        pytest.param(json.dumps({**GOOD, field: value}).encode(), id=f"{field}-{value!s:.9}")
        for field, value in [
            ("uuids", "GPU-a"),
            ("uuids", [1]),
            ("uuids", ["GPU-\x1b[2J"]),
            ("uuids", ["GPU-a"] * 5000),
            ("kind", "mine"),
            ("kind", []),
            ("memory_bytes", -1),
            ("memory_bytes", None),
            ("memory_bytes", 10**400),
            ("memory_bytes", True),
            ("pid", "x"),
            ("pid", math.inf),
            ("pid", 10**4000),
            ("hostname", 1),
            ("hostname", "h" * 10_000),
            ("job", None),
            ("group", 1),
        ]
    ),
]


@pytest.mark.parametrize("content", BAD_RECORDS)
def test_an_absurd_claim_is_named_once_and_ignored(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with planted(path, content) as name:
        with open_ledger(str(path)) as ledger:
            mine = ledger.take(["GPU-a"], "whole")
        assert kinds(path) == kinds(path) == ["whole"]
        mine.release()
    assert [name in message and "cannot be read and is ignored" in message for message in caplog.messages] == [True]
    assert caplog.messages[0].isprintable()


@pytest.mark.parametrize("requested", [0, -1, 10**12, 1.5, "1", None])
def test_an_absurd_wish_holds_nobody_up(path: Path, requested: object, caplog: pytest.LogCaptureFixture) -> None:
    record = json.dumps({"uuids": ["GPU-a"], "requested": requested, "pid": 1, "number": 999999999999})
    with planted(path, record.encode(), "wait"), open_ledger(str(path)) as ledger:
        place = ledger.queue(["GPU-a"], 1)
    with read_ledger(str(path)) as ledger:
        assert [waiter.name for waiter in ledger.waiters] == [place.name]
    place.release()


@pytest.mark.parametrize("size", [claim_files.MAX_RECORD_BYTES + 1, 2**40])
def test_a_huge_record_is_not_read(path: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    with planted(path, b"") as name:
        os.truncate(path / f"{name}.json", size)
        assert kinds(path) == []
    assert f"it has {size} bytes, more than 65536" in caplog.text


def test_no_date_and_no_name_jumps_the_queue(path: Path) -> None:
    with open_ledger(str(path)) as ledger:
        place = ledger.queue(["GPU-a"], 1)
    record = json.dumps({"uuids": ["GPU-a"], "requested": 1, "pid": 1, "since_s": 0})
    clock_ns = os.stat(path / f"{place.name}.json").st_ctime_ns
    probe = path / "clock"
    probe.touch()
    while probe.stat().st_ctime_ns <= clock_ns:  # the kernel's clock for files goes in steps of milliseconds
        probe.touch()
    with planted(path, record.encode(), "wait") as name:
        os.utime(path / f"{name}.json", (0, 0))
        with read_ledger(str(path)) as ledger:
            assert [waiter.name for waiter in ledger.waiters] == [place.name, name]
    place.release()


def test_a_record_of_a_newer_version_is_understood(path: Path) -> None:
    record = json.dumps({**GOOD, "schema_version": 9, "hostname": "\x1b[2Jevil", "color": "blue"})
    with planted(path, record.encode()), read_ledger(str(path)) as ledger:
        (claim,) = ledger.claims()
    assert (claim.pid, claim.hostname) == (1, r"\x1b[2Jevil")


def test_the_records_read_of_one_user_are_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_files, "_MAX_RECORDS_PER_USER", 3)
    with open_ledger(str(path)) as ledger:
        held = [ledger.take([f"GPU-{index}"], "whole") for index in range(5)]
    assert len(kinds(path)) == 3
    for claim in held:
        claim.release()


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link to a file", "link to a claim", "pipe"])
def test_a_trap_instead_of_a_record_does_no_harm(path: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text(json.dumps(GOOD))
    with open_ledger(str(path)) as ledger:
        mine = ledger.take(["GPU-a"], "whole")
    with planted(path, b"") as name:
        trap = path / f"{name}.json"
        trap.unlink()
        if kind == "pipe":
            os.mkfifo(trap)
        elif kind == "folder":
            trap.mkdir()
        else:
            targets = {"link to a file": victim, "link to a claim": next(path.glob("*.json"), None)}
            trap.symlink_to(targets.get(kind) or tmp_path / "nothing")
        assert kinds(path) == ["whole"]
        trap.rmdir() if kind == "folder" else trap.unlink()
    mine.release()
    assert json.loads(victim.read_text()) == GOOD
    assert not (tmp_path / "nothing").exists()


def test_files_that_are_not_claims_are_left_alone(path: Path) -> None:
    path.mkdir()
    names = {"README", "claim.json", "claim-xyz.json", "claim-00000000deadbeef.json.bak", ".hidden"}
    for name in names:
        (path / name).write_text("hello")
    with open_ledger(str(path)) as ledger:
        assert ledger.claims() == ()
    assert {entry.name for entry in path.iterdir()} == names


def symlink(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def not_sticky(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def private(path: Path) -> None:
    path.mkdir(mode=0o700)


def below_a_file(path: Path) -> None:
    path.write_text("a file")


UNUSABLE = [
    pytest.param(symlink, "it is a symbolic link, which is not followed. Remove it", True, id="symlink"),
    pytest.param(below_a_file, "it is not a folder. Remove it", True, id="file"),
    pytest.param(not_sticky, "lets users remove the files of others. root, who owns it, or .* chmod 1777", True,
                 id="not-sticky"),
    pytest.param(private, "may not read it. root, who owns it, or an administrator can .*chmod 1777", True,
                 id="private"),
    pytest.param(lambda path: path.mkdir(mode=0o755), "may not create files in it. root, who owns it, .*chmod 1777",
                 False, id="read-only"),
]  # fmt: skip


@needs_root
@pytest.mark.parametrize(("make", "words", "are_unknown"), UNUSABLE)
def test_an_unusable_folder_stops_only_promises_and_names_the_remedy(
    driver: Driver, path: Path, make: Callable[[Path], None], words: str, are_unknown: bool
) -> None:
    driver.gpus = [gpu()]
    make(path)
    command = """
from lightning_gpu_tools import ClaimsError
from lightning_gpu_tools.cli import main
os.environ["LIGHTNING_GPU_TOOLS_CLAIMS_DIR"] = path
for options in ({"exclusive": True}, {"min_free": 1}):
    try:
        select_gpus(**options)
    except ClaimsError as error:
        print(error)
main(["gpus", "--json"])
main(["pick", "--exclusive"])
main(["run", "--", "echo", "ran"])
"""
    answer = run_as(ALICE, path, command)
    first, second, shown, picked, ran = answer.stdout.splitlines()
    for error in (first, second):
        assert re.search(f"The claims folder {path} cannot be used: .*{words}", error)
        assert "or set LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all users share." in error
        assert ("chmod" in error) == ("chmod" in words)
    (one,) = json.loads(shown)
    assert (one["claims"] is None, one["effective_free_bytes"] is None) == (are_unknown, are_unknown)
    assert (picked, ran) == (driver.gpus[0].uuid, "ran")
    assert answer.stderr.count("The GPUs of this job are not claimed.") == 1
    assert ("It is not known what" in answer.stderr) == are_unknown


def test_a_folder_that_cannot_be_created_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ClaimsError, match=r"file/claims cannot be used: it cannot be created .*mkdir -m 1777"),
        open_ledger(str(tmp_path / "file" / "claims")),
    ):
        pass
