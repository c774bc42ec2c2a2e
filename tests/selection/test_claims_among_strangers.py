"""Limits of what other users, absurd files, and unusable folders can do to claims: be named, and no more."""

import importlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fake_driver import VARIABLE, Driver, gpu
from launched_jobs import claims_in, take
from rich.console import Console
from rich.table import Table
from slurm_cluster import wait_for

from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import ClaimsError
from lightning_gpu_tools.selection import claim_files
from lightning_gpu_tools.selection.claims import open_ledger, read_ledger

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
ALICE, BOB, CAROL = 4711, 4712, 4713
GOOD = {"uuids": ["GPU-a"], "kind": "memory", "memory_bytes": 1, "pid": 1, "hostname": "h", "job": "j"}

ASK = """
try:
    print(*select_gpus(exclusive=True).uuids)
except Exception as error:
    print(error)
"""
LOCK = """
import fcntl
fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH)
"""
TAKE = """
with open_ledger(path) as ledger:
    claim = ledger.take(["GPU-a"], "exclusive", group="g", job="j")
"""
STAY = """
print("there", flush=True)
signal.pause()
"""
WAITS = """
import time
now_s, sleep = os.stat(path).st_ctime, time.sleep
time.time, time.monotonic = lambda: now_s, lambda: 0.0
time.sleep = lambda seconds: print("waits", flush=True) or sleep(seconds)
"""
USERS = """
with read_ledger(path) as ledger:
    print(*(claim.user for claim in ledger.claims()))
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a short path that all users can reach, for the fake driver's files, too; pytest's own is for one user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture
def driver(driver: Driver, tmp_path: Path) -> Driver:
    """A machine with one idle GPU, GPU-a, unless a test gives it others."""
    (tmp_path / "nvidia_driver_calls.log").chmod(0o666)
    driver.gpus = [gpu(uuid="GPU-a")]
    return driver


@pytest.fixture
def path(path: Path) -> Path:
    """Return the claims folder as an administrator makes it."""
    path.mkdir()
    path.chmod(0o1777)
    return path


class Job:
    """Code that another user runs, in a fork: that user may not be able to read the files that Python imports."""

    def __init__(self, user_id: int, path: Path, code: str) -> None:
        self._streams = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(user_id, path, code))
        self._process.start()
        self.pid = self._process.pid

    def _run(self, user_id: int, path: Path, code: str) -> None:
        signal.alarm(60)
        os.dup2(self._streams[0].fileno(), 1)
        os.dup2(self._streams[1].fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        logging.root.handlers.clear()  # those of pytest
        for module in ("cli.gpus", "cli.pick", "cli.run", "selection.placement"):
            importlib.import_module(f"lightning_gpu_tools.{module}")
        with open(os.devnull, "w") as nowhere:
            Console(file=nowhere).print(Table("a [bold]title"))  # imports the rest of it
        os.environ.pop("LIGHTNING_GPU_TOOLS_CLAIMS_DIR", None)
        if VARIABLE in os.environ:
            select_gpus(claim=False)  # as well
        os.environ["LIGHTNING_GPU_TOOLS_CLAIMS_DIR"] = str(path)
        if user_id:
            os.setgroups([])
            os.setgid(user_id)
            os.setuid(user_id)
        if os.path.isdir(path) and os.access(path, os.X_OK):
            os.chdir(path)
        exec(code, {**globals(), "main": main, "path": str(path)})

    @property
    def stdout(self) -> str:
        return os.pread(self._streams[0].fileno(), 1 << 20, 0).decode()

    @property
    def stderr(self) -> str:
        return os.pread(self._streams[1].fileno(), 1 << 20, 0).decode()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self.wait()


def run_as(user_id: int, path: Path, code: str) -> Job:
    job = Job(user_id, path, code)
    job.wait()
    return job


@contextmanager
def staying(user_id: int, path: Path, code: str = TAKE) -> Iterator[Job]:
    """Run code as a user in a process that stays afterwards."""
    job = Job(user_id, path, code + STAY)
    try:
        wait_for(lambda: job.stdout.endswith("there\n"))
        yield job
    finally:
        job.kill()


def kinds(path: Path) -> list[str]:
    return [claim.kind for claim in claims_in(path)]


@contextmanager
def planted(path: Path, content: bytes, kind: str = "claim") -> Iterator[str]:
    """Make a live entry with a record that this package would not write."""
    name = f"{kind}-00000000deadbeef"
    (path / f"{name}.json").write_bytes(content)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / f"{name}.sock"))
        listener.listen()
        yield name


@needs_root
def test_users_see_each_others_claims_without_an_administrator(path: Path) -> None:
    path.rmdir()
    with staying(ALICE, path) as one, staying(BOB, path):
        assert run_as(CAROL, path, USERS).stdout == f"uid {ALICE} uid {BOB}\n"
        one.kill()
        # In a sticky folder this user cannot remove what the first one left, and need not.
        assert run_as(CAROL, path, USERS).stdout == f"uid {BOB}\n"


@needs_root
def test_a_folder_that_another_user_makes_is_waited_for(path: Path) -> None:
    path.chmod(0o755)  # made, and not yet opened to everybody
    job = Job(BOB, path, f"{WAITS}{TAKE}print('took')")
    wait_for(lambda: "waits\n" in job.stdout)
    path.chmod(0o1777)
    assert job.wait() == 0, job.stderr
    assert job.stdout.endswith("took\n")


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
    with staying(ALICE, path) as process:
        (record,) = path.glob("*.json")
        before = record.read_bytes()
        for attack in ATTACKS:
            subprocess.run(["sh", "-c", attack], cwd=path, user=BOB, group=BOB, extra_groups=[], timeout=60)
            assert record.read_bytes() == before, attack
            claims = [(claim.owner_id, claim.pid, claim.kind) for claim in claims_in(path)]
            assert claims == [(ALICE, process.pid, "exclusive")], attack


@needs_root
def test_no_other_user_can_keep_a_dead_claim_alive(path: Path) -> None:
    with staying(ALICE, path) as process:
        (record,) = path.glob("*.json")
        keep = f"""
import fcntl
fcntl.flock(os.open({str(record)!r}, os.O_RDONLY), fcntl.LOCK_SH)
probe = socket.socket(socket.AF_UNIX)
probe.connect({record.with_suffix(".sock").name!r})
"""
        with staying(BOB, path, keep):
            assert kinds(path) == ["exclusive"]
            process.kill()
            assert kinds(path) == []
            # The owner of the folder could remove the dead socket: one of somebody else's in its place is not it.
            record.with_suffix(".sock").unlink()
            listen = f"s = socket.socket(socket.AF_UNIX); s.bind({record.with_suffix('.sock').name!r}); s.listen()"
            with staying(BOB, path, listen):
                assert kinds(path) == []


@needs_root
def test_a_claim_with_anothers_job_name_is_not_trusted(driver: Driver, path: Path) -> None:
    # Bob has read the names of Alice's job and group, and writes them into a claim of his own.
    ask = """
os.environ["LIGHTNING_GPU_TOOLS_JOB"] = "j"
from lightning_gpu_tools.selection.picking import Attempt, pick
from lightning_gpu_tools.selection.ranking import Request
try:
    print(pick(Request(group="g"), Attempt.choose).uuids)
except Exception as error:
    print(error)
"""
    with staying(BOB, path):
        assert f"claimed exclusively by uid {BOB}" in run_as(ALICE, path, ask).stdout
        assert run_as(BOB, path, ask).stdout == "('GPU-a',)\n"


@needs_root
@pytest.mark.follows("or an administrator can open it: chmod {reason} {file}")
@pytest.mark.parametrize(("ending", "remedy"), [("sock", "chmod 1666"), ("json", "chmod 1644")])
def test_a_claim_closed_to_others_counts_and_is_named(driver: Driver, path: Path, ending: str, remedy: str) -> None:
    driver.gpus = [gpu(memory_free="30GiB"), gpu(memory_free="40GiB")]
    free, taken = (str(one.uuid) for one in driver.gpus)
    close = f"""
for name in os.listdir("."):
    if name.endswith({ending!r}):
        os.chmod(name, 0o600)
"""
    ask = "main(['pick'])\nmain(['pick', '-n', '2', '--exclusive'])\nmain(['gpus', '--json'])"
    with staying(ALICE, path, TAKE.replace("GPU-a", taken) + close):
        answer = run_as(BOB, path, ask)
        subprocess.run(re.search("or an administrator can open it: (chmod .*)", answer.stderr)[1].split(), check=True)
        said = run_as(BOB, path, ask)
    assert "closed to other users" not in said.stderr
    assert f"claimed exclusively by uid {ALICE} (pid " in said.stderr
    assert answer.stdout.splitlines()[0] == free
    assert f"{taken[:12]}…): claimed exclusively by uid {ALICE}" in answer.stderr
    assert "closed to other users, so its GPUs count as claimed" in answer.stderr
    assert answer.stderr.count(f"uid {ALICE} or an administrator can open it: {remedy} {path}/claim-") == 1
    listed = json.loads(answer.stdout.splitlines()[-1])
    assert [[claim["user"] for claim in one["claims"]] for one in listed] == [[], [f"uid {ALICE}"]]


@needs_root
def test_no_other_users_files_make_root_remove_a_claim(path: Path) -> None:
    with staying(ALICE, path) as process:
        (record,) = path.glob("*.json")
        name = record.stem
        own = [f"{name}-GPU-{number:08x}.json" for number in range(5)] + [f".{name}.json"]
        strange = [*(f"{name}.{letter}aa" for letter in "abcdefghijkl"), f"{name}.sock.json", f"..{name}.json"]
        plant = f"for name in {own + strange}: open(name, 'w').close()"
        assert run_as(BOB, path, plant).wait() == 0
        for user in (0, ALICE, CAROL):
            assert run_as(user, path, "with open_ledger(path): pass").wait() == 0
            assert kinds(path) == ["exclusive"]
        assert not {*own} & {*os.listdir(path)}  # root has removed what is dead
        assert {*strange} < {*os.listdir(path)}
        process.kill()
        run_as(0, path, "with open_ledger(path): pass")
        assert {*os.listdir(path)} == {*strange}


# What this process mounts from now on, no other one sees.
UNSHARE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):  # CLONE_NEWNS; MS_REC | MS_PRIVATE
    os._exit(77)
"""
MOUNT = f"""{UNSHARE}
listener = socket.socket(socket.AF_UNIX)
listener.bind("claim-00000000deadbeef.sock")
listener.listen()
ways = []
for file in ("claim-00000000deadbeef.json", "claim-00000000deadbeee.sock", "wait-00000000deadbeef.json"):
    os.mkdir(file)
    ways.append(os.open("/dev/fuse", os.O_RDWR))  # nobody answers there
    options = f"fd={{ways[-1]}},rootmode=40000,user_id={BOB},group_id={BOB},allow_other"
    if libc.mount(b"x", f"{{path}}/{{file}}".encode(), b"fuse", 0, options.encode()):
        os._exit(77)
"""


@needs_root
def test_a_file_that_cannot_be_asked_stops_nobody(driver: Driver, path: Path) -> None:
    become = f"\nos.setgid({ALICE}), os.setuid({ALICE})\n"
    commands = "main(['pick', '--wait', '1m']); main(['gpus']); main(['run', '--wait', '1m', '--', 'echo', 'ran'])"
    answer = run_as(0, path, MOUNT + become + commands)
    if answer.wait() == 77 or not os.path.exists("/dev/fuse"):
        pytest.skip("no file system of a user's can be mounted here")
    lines = answer.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("GPU-a", "ran"), answer.stderr
    (named,) = [line for line in answer.stderr.splitlines() if "cannot be read" in line]
    assert named.endswith(f"(and 2 more of uid {BOB})")
    assert f"deadbeef.json of uid {BOB} cannot be read and is ignored: another file system is mounted on it" in named


@needs_root
@pytest.mark.follows("To prevent this, an administrator can run: chown root")
def test_an_owner_who_could_remove_claims_is_named_once(driver: Driver, path: Path) -> None:
    place = """
from lightning_gpu_tools.selection.placement import place
from lightning_gpu_tools.selection.ranking import Request
place(1, Request(), list)
"""
    os.chown(path, BOB, -1)
    assert "belongs to" not in run_as(BOB, path, "main(['gpus'])").stderr
    says = f"The claims folder {path} belongs to uid {BOB}, who can remove the claims of others. "
    for use in (place, "main(['gpus'])", "main(['pick'])", "main(['run', '--wait', '1m', '--', 'true'])"):
        answer = run_as(ALICE, path, use)
        assert answer.wait() == 0, answer.stderr
        assert answer.stderr.count(f"{says}To prevent this, an administrator can run: chown root {path}\n") == 1
    subprocess.run(re.search(r"an administrator can run: (.*)", answer.stderr)[1].split(), check=True)
    assert "belongs to" not in run_as(ALICE, path, "main(['gpus'])").stderr


@needs_root
def test_without_proc_no_claim_is_taken_for_dead(path: Path) -> None:
    hide = f"""{UNSHARE}
if libc.mount(b"none", b"/proc", b"tmpfs", 0, None):
    os._exit(77)
try:
    with open_ledger(path): pass
except Exception as error:
    print(type(error).__name__, error)
"""
    with staying(ALICE, path):
        answer = run_as(0, path, hide)
        if answer.wait() == 77:
            pytest.skip("nothing can be mounted here")
        assert answer.stdout.startswith(f"ClaimsError The claims folder {path} cannot be used: /proc is not mounted. ")
        assert kinds(path) == ["exclusive"]


def plant_a_record(path: Path) -> None:
    path.with_suffix(".json").mkdir()  # root may replace a file
    os.chown(path.with_suffix(".json"), BOB, BOB)


def swap_in_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent.parent / "victim")
    os.lchown(path, BOB, BOB)


@needs_root
@pytest.mark.parametrize(("attack", "attacks"), [(plant_a_record, 3), (swap_in_a_link, 1000)])
def test_who_takes_names_away_is_named_if_no_other_name_helps(
    path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Path], None], attacks: int
) -> None:
    victim = path.parent / "victim"
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(victim))
    victim.chmod(0o600)
    bind, turns = socket.socket.bind, iter(range(attacks))

    def bind_and_attack(listener: socket.socket, address: str) -> None:
        bind(listener, address)
        if next(turns, None) is not None:  # as soon as the name of a new entry can be seen
            attack(Path(os.path.realpath(address)))

    monkeypatch.setattr(socket.socket, "bind", bind_and_attack)
    if attacks == 3:
        claim = take(path)
        assert kinds(path) == ["whole"]
        claim.release()
    else:
        named = f"a process of uid {BOB} takes every file name that this claim tries. Ask uid {BOB} or an administrator"
        with pytest.raises(ClaimsError, match=named):
            take(path)
    assert {file.lstat().st_uid for file in path.iterdir()} == {BOB}
    assert victim.stat().st_mode & 0o7777 == 0o600


FLOOD = """
listener = socket.socket(socket.AF_UNIX)
listener.bind("claim-0000000000000000.sock")
os.chmod("claim-0000000000000000.sock", 0o666)
listener.listen()
for number in range(1000):
    name = f"claim-{number:016x}"
    if number:
        os.link("claim-0000000000000000.sock", name + ".sock")
    with open(name + ".json", "w") as file:
        json.dump({**GOOD, "kind": "exclusive", "uuids": UUIDS, "job": str(number)}, file)
"""


@needs_root
def test_a_flood_of_claims_is_folded_by_user(driver: Driver, path: Path) -> None:
    driver.gpus = [gpu() for _ in range(8)]
    uuids = [str(one.uuid) for one in driver.gpus]
    with (
        staying(CAROL, path, TAKE.replace("GPU-a", uuids[0])),
        staying(BOB, path, FLOOD.replace("UUIDS", str(uuids))),
    ):
        answer = run_as(ALICE, path, "main(['gpus'])\nmain(['pick'])")
    assert len(answer.stdout.splitlines()) <= 70  # at most three claims of a user on each GPU
    assert f"and 997 more of uid {BOB}" in " ".join(answer.stdout.split())
    assert f"uid {CAROL} (pid " in answer.stdout
    assert f"claimed exclusively by uid {BOB}, and 999 more of uid {BOB}" in answer.stderr
    assert len(answer.stderr) < 2000


@needs_root
@pytest.mark.follows("End that process")
def test_who_locks_the_folder_is_named_and_stops_only_promises(
    driver: Driver, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.gpus = [gpu(memory_free="40GiB"), gpu(memory_free="30GiB")]
    monkeypatch.setattr(claim_files, "TIMEOUT_LOCK_S", 0.1)
    select_gpus(min_free="25GiB")
    with staying(BOB, path, LOCK) as process:
        named = rf"of uid {BOB} \(pid {process.pid}\) has locked it for 0 s. End that process"
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


@needs_root
@pytest.mark.follows("Root can find it: fuser -v")
@pytest.mark.skipif(shutil.which("fuser") is None, reason="fuser is not installed")
def test_a_lock_that_was_left_to_a_child_is_found_as_advised(
    driver: Driver, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_files, "TIMEOUT_LOCK_S", 0.1)
    leave = f"{LOCK}child = os.fork()\nif child:\n    print(child, flush=True)\n    os._exit(0)\nsignal.pause()"
    child = int(run_as(BOB, path, leave).stdout)
    with pytest.raises(ClaimsError) as caught:
        select_gpus(exclusive=True)
    message = str(caught.value)
    assert "a process that cannot be identified has locked it for 0 s. Root can find it: " in message
    advised = re.search(r"Root can find it: (fuser -v \S+?)\. ", message)[1]
    found = subprocess.run(advised.split(), capture_output=True, text=True)
    assert str(child) in found.stdout.split()
    os.kill(child, 9)
    wait_for(lambda: not os.path.exists(f"/proc/{child}/fd/0"))
    assert select_gpus(exclusive=True).uuids == ("GPU-a",)


@needs_root
def test_another_users_lock_is_said_to_be_probable(driver: Driver, path: Path) -> None:
    with staying(BOB, path, LOCK) as process:
        said = run_as(ALICE, path, f"claim_files.TIMEOUT_LOCK_S = 0.1{ASK}").stdout
    probable = rf"probably \S+ of uid {BOB} \(pid {process.pid}\) or one of its children has locked it for 0 s\. "
    assert re.search(rf"{probable}Ask uid {BOB} or an administrator to end it\.", said)


@needs_root
def test_a_link_swapped_in_after_the_check_is_not_followed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as victim, planted(path, json.dumps(GOOD).encode()) as name:
        victim.bind(str(path.parent / "victim"))
        victim.listen()
        victim.setblocking(False)
        entry, connect = path / f"{name}.sock", socket.socket.connect
        entry.rename(path / "kept")

        def swap_and_connect(probe: socket.socket, address: str) -> None:
            entry.unlink()
            entry.symlink_to(path.parent / "victim")
            os.lchown(entry, 0, 0)
            connect(probe, address)

        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(entry))
        monkeypatch.setattr(socket.socket, "connect", swap_and_connect)
        assert kinds(path) == []
        assert entry.is_symlink()
        with pytest.raises(BlockingIOError):
            victim.accept()


DENY = f"""
import struct
entries = [(1, 6, -1), (2, 0, {BOB}), (4, 6, -1), (16, 6, -1), (32, 6, -1)]  # acl(5): BOB may do nothing
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
for name in os.listdir("."):
    try:
        os.setxattr(name, "system.posix_acl_access", acl, follow_symlinks=False)
    except OSError:
        os._exit(1)
"""


@needs_root
def test_a_closed_claim_ends_with_its_process(driver: Driver, path: Path) -> None:
    ask = "main(['pick'])"
    with staying(ALICE, path, TAKE + DENY) as holder:
        assert f"claimed exclusively by uid {ALICE}" in run_as(BOB, path, ask).stderr
        holder.kill()
        assert run_as(BOB, path, ask).stdout == "GPU-a\n"


@needs_root
def test_a_pid_is_shown_only_if_it_is_that_process(path: Path) -> None:
    show = "with read_ledger(path) as ledger: print(*ledger.claims())"
    tamper = """
(name,) = (name for name in os.listdir(".") if name.endswith(".json"))
record = json.load(open(name))
os.unlink(name)
from lightning_gpu_tools.processes import process_id
other = process_id(OTHER)
open(name, "w").write(json.dumps({**record, "pid": other["pid"], "started_ticks": other["started_ticks"]}))
"""
    with staying(CAROL, path) as carol:
        assert run_as(ALICE, path, show).stdout == f"uid {CAROL} (pid {carol.pid})\n"
        carols = {*path.iterdir()}
        for file in carols:
            file.rename(path.parent / file.name)
        with staying(BOB, path, TAKE + tamper.replace("OTHER", str(carol.pid))):
            assert run_as(ALICE, path, show).stdout == f"uid {BOB}\n"


@needs_root
def test_at_most_three_users_are_named(driver: Driver, path: Path) -> None:
    good = {**GOOD, "kind": "exclusive"}
    with ExitStack() as listeners:
        for number in range(300):  # as with subordinate IDs, subuid(5)
            name = f"claim-{number:016x}"
            (path / f"{name}.json").write_text(json.dumps(good) if number % 2 else "{}")
            listener = listeners.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path / f"{name}.sock"))
            listener.listen()
            for ending in ("json", "sock"):
                os.chown(path / f"{name}.{ending}", 100_000 + number, -1)
                (path / f"{name}.{ending}").chmod(0o666)
        answer = run_as(ALICE, path, "main(['pick'])\nmain(['gpus'])")
    assert answer.wait() == 0
    assert len({*re.findall(r"uid 10\d+", answer.stderr)}) == 6  # three of each kind
    assert "More users have such files" in answer.stderr
    assert "and 147 more of 147 other users" in answer.stderr
    assert len({*re.findall(r"uid 10\d+", answer.stdout)}) == 3


@needs_root
@pytest.mark.follows("or an administrator can remove them", "find {} -mindepth 1 -user {} -delete")
def test_too_many_files_stop_only_promises_and_can_be_removed(driver: Driver, path: Path) -> None:
    flood = """
open("claim-0000000000000000.json", "w").close()
for number in range(1, 10_001):
    os.link("claim-0000000000000000.json", f"claim-{number:016x}.json")
"""
    ask = "main(['pick'])\nmain(['run', '--', 'echo', 'ran'])"
    promise = "main(['run', '--exclusive', '--', 'echo', 'promised'])"
    assert run_as(BOB, path, flood).wait() == 0
    answer = run_as(ALICE, path, ask)
    assert answer.stdout == "GPU-a\nran\n", answer.stderr
    refused = run_as(ALICE, path, promise)
    assert refused.stdout == ""
    reason = (
        f"it has more than 10,000 files, most of them of uid {BOB}. uid {BOB} or an administrator can remove them: "
    )
    advised = re.search(rf"{re.escape(reason)}(find .*? -delete)\. ", refused.stderr)[1]
    subprocess.run(advised, shell=True, check=True)
    assert run_as(ALICE, path, promise).stdout == "promised\n"


BAD_RECORDS = {
    "torn": json.dumps(GOOD)[:60],
    "nested-too-deep": "[" * 50_000,
    "pid-of-5000-digits": json.dumps({**GOOD, "pid": 0}).replace("0", "9" * 5000),
    "uuid-with-escapes": json.dumps({**GOOD, "uuids": ["GPU-\x1b[2J"]}),
    "kind": json.dumps({**GOOD, "kind": "mine"}),
    "too-much-memory": json.dumps({**GOOD, "memory_bytes": 10**400}),
    "huge": json.dumps(GOOD) + " " * claim_files.MAX_RECORD_BYTES,
}


@pytest.mark.parametrize("content", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_an_absurd_claim_is_named_once_and_ignored(path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    with planted(path, content.encode()) as name:
        take(path)
        assert kinds(path) == kinds(path) == ["whole"]
    assert [name in message and "cannot be read and is ignored" in message for message in caplog.messages] == [True]
    assert caplog.messages[0].isprintable()


def test_an_absurd_wish_holds_nobody_up(path: Path) -> None:
    record = json.dumps({"uuids": ["GPU-a"], "requested": 0, "pid": 1})
    with planted(path, record.encode(), "wait"), open_ledger(str(path)) as ledger:
        place = ledger.queue(["GPU-a"], 1)
    with read_ledger(str(path)) as ledger:
        assert [waiter.name for waiter in ledger.waiters] == [place.name]


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


def test_a_record_of_a_newer_version_is_understood(path: Path) -> None:
    record = json.dumps({**GOOD, "schema_version": 9, "hostname": "\x1b[2Jevil", "color": "blue"})
    with planted(path, record.encode()):
        (claim,) = claims_in(path)
    assert (claim.pid, claim.hostname) == (None, r"\x1b[2Jevil")


def test_the_records_read_of_one_user_are_limited(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_files, "_MAX_RECORDS_PER_USER", 3)
    for _ in range(5):
        take(path)
    assert len(kinds(path)) == 3


@pytest.mark.parametrize("make", ["mkdir $0", "mkfifo $0", "ln -s ../victim $0"])
def test_a_trap_instead_of_a_record_does_no_harm(path: Path, make: str) -> None:
    victim = path.with_name("victim")
    victim.write_text(json.dumps(GOOD))
    take(path)
    with planted(path, b"") as name:
        subprocess.run(["sh", "-c", f"rm $0 && {make}", path / f"{name}.json"], check=True)
        assert kinds(path) == ["whole"]
    assert json.loads(victim.read_text()) == GOOD


# A shell command that makes the folder $0, the words of the refusal, and whether the claims of others are unknown then.
UNUSABLE = {
    "symlink": ("mkdir $0-2 && ln -s $0-2 $0", "it is a symbolic link, which is not followed. Remove it", True),
    "not-sticky": ("mkdir -m 777 $0", "lets users remove the files of others. Its owner root or .* chmod 1777", True),
    "private": ("mkdir -m 700 $0", "you may not read it. Its owner root or an administrator .*chmod 1777", True),
    "read-only": ("mkdir -m 755 $0", "you may not create files in it. Its owner root .*chmod 1777", False),
}


@needs_root
@pytest.mark.follows(
    "can open it to all users: chmod 1777",
    "LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all users share",
    "Remove it",
)
@pytest.mark.parametrize(("make", "words", "are_unknown"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_folder_stops_only_promises_and_names_the_remedy(
    driver: Driver, path: Path, make: str, words: str, are_unknown: bool
) -> None:
    path.rmdir()
    subprocess.run(["sh", "-c", make, path], check=True)
    command = """
from lightning_gpu_tools.errors import ClaimsError
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
        assert "Or set LIGHTNING_GPU_TOOLS_CLAIMS_DIR to a folder that all users share." in error
        assert ("chmod" in error) == ("chmod" in words)
    (one,) = json.loads(shown)
    assert (one["claims"] is None, one["effective_free_bytes"] is None) == (are_unknown, are_unknown)
    assert (picked, ran) == ("GPU-a", "ran")
    assert answer.stderr.count("The GPUs of this job are not claimed.") == 1
    assert ("The claims of other jobs are unknown." in answer.stderr) == are_unknown
    promise = "print(*select_gpus(exclusive=True).uuids)"
    variable = re.search("Or set (LIGHTNING_GPU_TOOLS_CLAIMS_DIR) to", first)[1]
    other = path.with_name("shared")
    other.mkdir()
    other.chmod(0o1777)
    assert run_as(ALICE, path, f"os.environ[{variable!r}] = {str(other)!r}\n{promise}").stdout == f"{picked}\n"
    if "Remove it" in first:
        path.unlink()
    else:
        subprocess.run(re.search(r"an administrator can open it to all users: (chmod \S+ \S+)\. ", first)[1].split())
    assert run_as(ALICE, path, promise).stdout == f"{picked}\n"


@needs_root
@pytest.mark.follows("An administrator can create it: mkdir -m 1777")
def test_a_folder_that_cannot_be_created_names_the_remedy(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o755)
    path = tmp_path / "closed" / "claims"
    said = run_as(ALICE, path, ASK).stdout
    assert "claims cannot be used: it cannot be created (Permission denied). " in said
    subprocess.run(re.search(r"An administrator can create it: (mkdir .*?)\. ", said)[1].split(), check=True)
    assert run_as(ALICE, path, ASK).stdout == "GPU-a\n"
