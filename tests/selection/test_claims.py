"""Claims between real processes on real files: who holds one, what ends it, and what others can do to it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.selection import claim_files, claim_files_windows, claims
from lightning_gpu_tools.selection.claims import directory, open_ledger

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")

HOLD = """
import os, sys
from pathlib import Path
from lightning_gpu_tools.selection import claims
from lightning_gpu_tools.selection.claims import open_ledger
if sys.argv[-1] == "as-on-windows":
    from lightning_gpu_tools.selection.claim_files_windows import locked_folder
    claims.locked_folder = locked_folder
    sys.argv.pop()
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
os.umask(0o077)
with open_ledger(Path(sys.argv[1])) as ledger:
    claim = ledger.take(["GPU-a"], "memory", 5)
print(claim.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another process with a claim on GPU-a, until it is told to end or killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *arguments], stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        process.kill()


def holders(path: Path) -> list[int]:
    with open_ledger(path, create=False) as ledger:
        return [claim.pid for claim in ledger.claims()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "claims"


def test_looking_creates_nothing(path: Path) -> None:
    assert holders(path) == []
    assert not path.exists()


def test_a_claim_says_who_holds_what_since_when(path: Path) -> None:
    with holder(path) as process, open_ledger(path) as ledger:
        (claim,) = ledger.claims()
        assert (claim.pid, claim.uuids, claim.kind, claim.memory_bytes) == (process.pid, ("GPU-a",), "memory", 5)
        assert claim.user == "root" if os.geteuid() == 0 else claim.user
        record = json.loads((path / f"{claim.job}.claim").read_text())
        assert record["pid"] == process.pid
        assert record["since_s"] == claim.since_s


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_claim_ends_with_its_process_however_that_ends(path: Path, kill: signal.Signals) -> None:
    with holder(path) as process:
        assert holders(path) == [process.pid]
        process.send_signal(kill)
        process.wait()
        assert holders(path) == []
        assert [entry.name for entry in path.iterdir()] == ["lock"]


def test_a_released_claim_is_gone_and_leaves_no_file(path: Path) -> None:
    with open_ledger(path) as ledger:
        claim = ledger.take(["GPU-a"], "whole")
    assert holders(path) == [os.getpid()]
    claim.release()
    assert [entry.name for entry in path.iterdir()] == ["lock"]


def test_a_forked_child_that_releases_does_not_release_for_its_parent(path: Path) -> None:
    with open_ledger(path) as ledger:
        claim = ledger.take(["GPU-a"], "whole")
    child = os.fork()
    if child == 0:
        claim.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert holders(path) == [os.getpid()]
    claim.release()


def test_a_claim_that_several_hold_lives_as_long_as_the_last(path: Path) -> None:
    with holder(path) as process:
        with open_ledger(path) as ledger:
            joined = ledger.join(ledger.claims()[0])
        process.kill()
        process.wait()
        assert len(holders(path)) == 1
        joined.release()
        assert holders(path) == []


def test_a_claim_whose_holder_is_gone_cannot_be_joined(path: Path) -> None:
    with holder(path) as process:
        with open_ledger(path) as ledger:
            (claim,) = ledger.claims()
        process.kill()
        process.wait()
    with open_ledger(path) as ledger:
        ledger.clean_up()
        with pytest.raises(ClaimsError, match="its holder has ended"):
            ledger.join(claim)


def test_everybody_can_use_folder_and_files_whatever_the_umask(path: Path) -> None:
    with holder(path):  # its umask is 077
        assert mode(path) == 0o1777
        assert {mode(entry) for entry in path.iterdir()} == {0o666}


def can_be_entered_by_all(path: Path) -> None:
    for parent in path.parents[:3]:
        parent.chmod(0o755)
    path.parent.chmod(0o777)


def users_seen_by(user_id: int, path: Path) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-c", LIST_AS, str(path), str(user_id)], capture_output=True, text=True, check=True
    )
    assert answer.stderr == ""
    return answer.stdout.splitlines()


@needs_root
@pytest.mark.parametrize("first", ["0", "4711"], ids=["root-first", "user-first"])
def test_users_see_each_others_claims_whoever_came_first(path: Path, first: str) -> None:
    can_be_entered_by_all(path)
    name = "root" if first == "0" else "uid 4711"
    with holder(path, first) as one, holder(path, "4712"):
        assert users_seen_by(4713, path) == [name, "uid 4712"]
        one.kill()
        one.wait()
        # In a sticky folder this user cannot remove what the first one left, and need not.
        assert users_seen_by(4713, path) == ["uid 4712"]


LIST_AS = """
import os, sys
from pathlib import Path
from lightning_gpu_tools.selection.claims import open_ledger
os.setuid(int(sys.argv[2]))
with open_ledger(Path(sys.argv[1]), create=False) as ledger:
    for claim in ledger.claims():
        print(claim.user)
"""


GOOD = {"uuids": ["GPU-a"], "kind": "memory", "memory_bytes": 1, "pid": 1, "hostname": "h", "since_s": 1.0}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param(json.dumps(GOOD)[:60], id="torn"),
        pytest.param("\udcff\udcfe", id="not-utf-8"),
        pytest.param("null", id="null"),
        pytest.param("[]", id="list"),
        pytest.param('"text"', id="text"),
        pytest.param("{}", id="no-fields"),
        pytest.param("[" * 50_000, id="nested-too-deep"),
        *(
            pytest.param(json.dumps({**GOOD, field: value}), id=f"{field}-{value!s:.9}")
            for field, value in [
                ("uuids", "GPU-a"),
                ("uuids", [1]),
                ("kind", "mine"),
                ("memory_bytes", -1),
                ("memory_bytes", None),
                ("memory_bytes", 10**400),
                ("pid", "x"),
                ("pid", math.inf),
                ("since_s", math.nan),
                ("since_s", 10**400),
                ("group", 1),
            ]
        ),
    ],
)
def test_a_record_that_makes_no_sense_is_named_and_ignored(
    path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_ledger(path) as ledger:
        mine = ledger.take(["GPU-a"], "whole")
    bad = path / "00000000deadbeef.claim"
    bad.write_bytes(content.encode(errors="surrogateescape"))
    with bad.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert holders(path) == [os.getpid()]
    assert "00000000deadbeef.claim cannot be read and is ignored" in caplog.text
    mine.release()


def test_a_record_of_a_newer_version_is_understood(path: Path) -> None:
    path.mkdir()
    (path / "lock").touch()
    new = path / "00000000deadbeef.claim"
    new.write_text(json.dumps({**GOOD, "schema_version": 9, "hostname": "\x1b[2Jevil", "colour": "blue"}))
    with new.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with open_ledger(path) as ledger:
            (claim,) = ledger.claims()
    assert claim.pid == 1
    assert claim.hostname == "?[2Jevil"


@pytest.mark.parametrize(
    ("pid", "namespace", "told"),
    [(None, None, True), (1, None, True), (None, "pid:[1]", False)],
    ids=["holder", "joined", "number-in-another-container"],
)
def test_memory_is_told_of_processes_that_hold_the_claim_here(
    path: Path, pid: int | None, namespace: str | None, told: bool
) -> None:
    record = {**GOOD, "pid": pid or os.getpid(), "pid_namespace": namespace or os.readlink("/proc/self/ns/pid")}
    path.mkdir()
    (path / "lock").touch()
    claim = path / "00000000deadbeef.claim"
    claim.write_text(json.dumps(record))
    with claim.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with open_ledger(path) as ledger:
            assert ledger.claims([os.getpid()])[0].process_ids == (frozenset({os.getpid()}) if told else frozenset())


JOIN = """
import sys
from lightning_gpu_tools.selection.claims import open_ledger
with open_ledger(sys.argv[1]) as ledger:
    joined = ledger.join(ledger.claims()[0])
print("joined", flush=True)
sys.stdin.read()
"""


def test_memory_in_use_is_told_by_all_who_hold_the_claim_also_when_its_maker_has_ended(path: Path) -> None:
    def told() -> frozenset[int]:
        with open_ledger(path) as ledger:
            return ledger.claims([maker.pid, sibling.pid, os.getpid()])[0].process_ids

    with (
        holder(path) as maker,
        subprocess.Popen([sys.executable, "-c", JOIN, str(path)], stdin=-1, stdout=-1, text=True) as sibling,
    ):
        assert sibling.stdout is not None
        assert sibling.stdout.readline() == "joined\n"
        assert told() == {maker.pid, sibling.pid}
        maker.kill()
        maker.wait()
        assert told() == {sibling.pid}
        sibling.kill()


def test_files_that_are_not_ours_are_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "README").write_text("hello")
    with open_ledger(path) as ledger:
        ledger.clean_up()
    assert (path / "README").exists()


def test_a_symbolic_link_instead_of_the_folder_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClaimsError, match="symbolic link"), open_ledger(path):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_to_a_claim_elsewhere_is_no_claim(path: Path, tmp_path: Path) -> None:
    with holder(path) as process, holder(tmp_path / "elsewhere"):
        (elsewhere,) = (tmp_path / "elsewhere").glob("*.claim")
        (path / elsewhere.name).symlink_to(elsewhere)
        assert holders(path) == [process.pid]


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link to a file", "pipe"])
def test_a_trap_instead_of_the_lock_or_a_claim_does_no_harm(path: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with holder(path) as process:
        trap = path / "00000000deadbeef.claim"
        if kind == "pipe":
            os.mkfifo(trap)
        elif kind == "folder":
            trap.mkdir()
        else:
            trap.symlink_to(victim if kind == "link to a file" else tmp_path / "nothing")
        assert holders(path) == [process.pid]
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_a_link_instead_of_the_lock_is_refused(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    (path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ClaimsError, match="lock cannot be opened"), open_ledger(path):
        pass
    assert not (tmp_path / "victim").exists()


def test_a_folder_where_everybody_can_remove_files_is_refused(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(ClaimsError, match="lets users remove the files of others"), open_ledger(path):
        pass


@needs_root
def test_a_folder_that_this_user_cannot_write_to_is_refused(path: Path) -> None:
    path.mkdir(mode=0o755)
    can_be_entered_by_all(path)
    answer = subprocess.run(
        [sys.executable, "-c", HOLD, str(path), "4711"], capture_output=True, text=True, input="", check=False
    )
    assert answer.returncode == 1
    assert "ClaimsError" in answer.stderr
    assert "chmod 1777" in answer.stderr


def test_a_folder_that_cannot_be_created_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for locked_folder in (claim_files.locked_folder, claim_files_windows.locked_folder):
        with (
            pytest.raises(ClaimsError, match=r"file/claims, cannot be created: .*LIGHTNING_GPU_TOOLS_CLAIMS_DIR"),
            locked_folder(str(tmp_path / "file" / "claims"), create=True),
        ):
            pass


def test_a_lock_that_was_exchanged_meanwhile_excludes_nobody_and_is_not_used(path: Path) -> None:
    script = f"""
from lightning_gpu_tools.selection.claims import open_ledger
with open_ledger({str(path)!r}):
    print("in", flush=True)
"""
    with open_ledger(path):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=-1, text=True)
        while str(path / "lock") not in opened_by(child):
            assert child.poll() is None
        os.rename(path / "lock", path / "old")
        with open_ledger(path):  # on the new lock, so that the child must not come in now
            pass
        taken = (path / "lock").open()
        fcntl.flock(taken, fcntl.LOCK_EX)
    while str(path / "lock") not in opened_by(child):  # it has seen that its lock is the old one
        assert child.poll() is None
    taken.close()
    assert child.communicate()[0] == "in\n"
    assert child.returncode == 0


def opened_by(process: subprocess.Popen[str]) -> list[str]:
    folder = f"/proc/{process.pid}/fd"
    found = []
    for descriptor in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"{folder}/{descriptor}"))
    return found


def count_together(path: Path, import_own: str) -> int:
    """What four processes count up to that have the folder to themselves for each of 20 steps."""
    script = f"""
from pathlib import Path
{import_own}
counter = Path({str(path.parent / "counter")!r})
for _ in range(20):
    with own({str(path)!r}, create=True):
        value = int(counter.read_text())
        counter.write_text(str(value + 1))
"""
    (path.parent / "counter").write_text("0")
    children = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    return int((path.parent / "counter").read_text())


def test_only_one_at_a_time_has_the_ledger(path: Path) -> None:
    assert count_together(path, "from lightning_gpu_tools.selection.claim_files import locked_folder as own") == 80


def test_those_who_wait_are_in_the_order_in_which_they_came(path: Path) -> None:
    with open_ledger(path) as ledger:
        places = [ledger.queue(["GPU-a"], 1) for _ in range(3)]
        assert [waiter.name for waiter in ledger.waiters()] == [place.name for place in places]
    places[1].release()
    with open_ledger(path) as ledger:
        places.append(ledger.queue(["GPU-b"], 2))
        assert [waiter.name for waiter in ledger.waiters()] == [places[i].name for i in (0, 2, 3)]
        assert ledger.waiters()[-1].uuids == ("GPU-b",)
    for i in (0, 2, 3):
        places[i].release()
    assert [entry.name for entry in path.iterdir()] == ["lock"]


@pytest.mark.skipif(not Path("/usr/bin/systemd-tmpfiles").exists(), reason="the cleaner of /tmp is not installed")
def test_the_cleaner_of_tmp_leaves_a_claim_of_a_long_job_alone(tmp_path: Path) -> None:
    path = tmp_path / "clean" / "claims"
    path.parent.mkdir()
    rules = tmp_path / "rules.conf"
    rules.write_text(f"d {path.parent} - - - 1us\n")
    with holder(path) as process:
        subprocess.run(["/usr/bin/systemd-tmpfiles", "--clean", str(rules)], check=True)
        assert holders(path) == [process.pid]
    subprocess.run(["/usr/bin/systemd-tmpfiles", "--clean", str(rules)], check=True)
    assert not path.exists()


def test_where_claims_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/home/alice/tmp")
    monkeypatch.delenv("LIGHTNING_GPU_TOOLS_CLAIMS_DIR", raising=False)
    assert directory() == "/tmp/lightning-gpu-tools"
    monkeypatch.setenv("LIGHTNING_GPU_TOOLS_CLAIMS_DIR", "/var/claims")
    assert directory() == "/var/claims"


def test_memory_in_use_is_told_by_the_holder_and_its_children(path: Path) -> None:
    with holder(path) as process, open_ledger(path) as ledger:
        grandchild = subprocess.Popen(["sleep", "60"])
        mine = ledger.take(["GPU-a"], "memory", 5)
        by_pid = {claim.pid: claim.process_ids for claim in ledger.claims([process.pid, grandchild.pid, 1])}
        assert by_pid[process.pid] == {process.pid}
        # The holder is a child of this process, so what it uses is this process's, too.
        assert by_pid[os.getpid()] == {process.pid, grandchild.pid}
        grandchild.kill()
        grandchild.wait()
    mine.release()


@pytest.fixture
def as_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of claims as Windows has them; filelock itself works alike on both."""
    monkeypatch.setattr(claims, "locked_folder", claim_files_windows.locked_folder)


@pytest.mark.usefixtures("as_on_windows")
def test_on_windows_a_claim_ends_with_its_process_and_leaves_no_file(path: Path) -> None:
    assert holders(path) == []
    with holder(path, "as-on-windows") as process:
        with open_ledger(path) as ledger:
            (claim,) = ledger.claims([process.pid])
            assert (claim.pid, claim.user, claim.memory_bytes) == (process.pid, claims.own_name(), 5)
            assert claim.process_ids == {process.pid}
            joined = ledger.join(claim)
        joined.release()  # which is not this process's to end
        assert holders(path) == [process.pid]
        process.kill()
        process.wait()
        assert holders(path) == []
    assert [entry.name for entry in path.iterdir() if entry.name != "lock"] == []


@pytest.mark.usefixtures("as_on_windows")
def test_on_windows_a_released_claim_and_a_place_in_the_queue_are_gone(path: Path) -> None:
    with open_ledger(path) as ledger:
        mine, place = ledger.take(["GPU-a"], "whole"), ledger.queue(["GPU-a"], 1)
        assert [waiter.name for waiter in ledger.waiters()] == [place.name]
        ledger.take(["GPU-b"], "whole")  # nobody keeps what it returns
    gc.collect()
    assert holders(path) == [os.getpid()] * 2
    mine.release()
    place.release()
    assert holders(path) == [os.getpid()]
    assert [entry.name for entry in path.glob("*.waiter*")] == []


def test_on_windows_only_one_at_a_time_has_the_ledger(path: Path) -> None:
    assert (
        count_together(path, "from lightning_gpu_tools.selection.claim_files_windows import locked_folder as own") == 80
    )
