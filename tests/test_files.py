"""Real processes that are killed while they save, full disks and closed folders."""

import errno
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from lightning_gpu_tools.checkpoints.reading import read_checkpoint
from lightning_gpu_tools.checkpoints.writing import write_checkpoint
from lightning_gpu_tools.files import replacing, scratch_prefix, sweep

FORK = multiprocessing.get_context("fork")


def start(act: Callable[[Callable[[], object]], None]) -> tuple[BaseProcess, Event]:
    """Fork a process, which runs ``act(wait)``; return it when it waits, with the event that it waits for."""
    waits, go_on = FORK.Event(), FORK.Event()
    process = FORK.Process(target=act, args=(lambda: (waits.set(), go_on.wait(60)),))
    process.start()
    assert waits.wait(60)
    return process, go_on


def save_half(path: Path, wait: Callable[[], object]) -> None:
    with replacing(str(path)) as file:
        file.write(b"half of it")
        file.flush()
        wait()


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def parts(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.name.endswith(".part")]


def in_child(act: Callable[[], None]) -> BaseException | None:
    """Run ``act`` in a forked process and return what it raised."""
    raised = FORK.SimpleQueue()

    def run() -> None:
        try:
            act()
            raised.put(None)
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            raised.put(error)

    child = FORK.Process(target=run)
    child.start()
    answer: BaseException | None = raised.get()
    child.join()
    return answer


def test_a_save_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint({"w": torch.ones(3)}, path)
    big = {str(i): torch.full((4 << 20,), 2.0) for i in range(8)}
    for megabytes in (0, 60):
        child = FORK.Process(target=write_checkpoint, args=(big, path))
        child.start()
        while not any(part.stat().st_size >= megabytes << 20 for part in parts(tmp_path)):
            assert child.is_alive(), "the child was faster than the test"
        kill(child)
        assert len(parts(tmp_path)) == 1
        assert read_checkpoint(path, verify=True)["w"].tolist() == [1, 1, 1]
        sweep(str(tmp_path))
        assert parts(tmp_path) == []
    write_checkpoint(big, path)
    assert read_checkpoint(path, verify=True)["0"][0] == 2
    assert parts(tmp_path) == []


def test_saving_sweeps_what_only_dead_processes_left(tmp_path: Path) -> None:
    # On a shared file system another kernel's lock may be invisible here, so only the name can tell.
    of_another_machine = tmp_path / ".lightning-gpu-tools-0123456789ab-0123456789abcdef.part"
    of_another_machine.write_bytes(b"half")
    (dead, _), (living, go_on) = (start(partial(save_half, tmp_path / f"{name}.ckpt")) for name in ("dead", "living"))
    assert len(parts(tmp_path)) == 3
    kill(dead)
    write_checkpoint({}, tmp_path / "mine.ckpt")
    assert len(parts(tmp_path)) == 2
    go_on.set()
    living.join()
    assert living.exitcode == 0
    assert (tmp_path / "living.ckpt").read_bytes() == b"half of it"
    assert parts(tmp_path) == [of_another_machine]


def test_the_content_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))
        fsync(descriptor)

    def seen_replace(source: str, target: str) -> None:
        events.append(("replace", source, target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    path = tmp_path / "a.ckpt"
    write_checkpoint({"w": torch.ones(1000)}, path)
    (first, part, size), (second, source, target), (third, folder, _) = events
    assert (first, second, third) == ("fsync", "replace", "fsync")
    assert (part, size) == (source, path.stat().st_size)
    assert (target, folder) == (str(path), str(tmp_path))


def test_a_full_disk_is_reported_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_checkpoint({"v": 1}, path)

    big = torch.zeros(1 << 20)

    def save_with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        write_checkpoint({"v": big}, path)

    error = in_child(save_with_little_room)
    assert isinstance(error, OSError)
    assert error.errno == errno.EFBIG
    assert error.filename == str(path)
    assert "an older file at this path is unchanged" in str(error)
    assert read_checkpoint(path) == {"v": 1}
    assert parts(tmp_path) == []


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_checkpoint({}, os.devnull)
    assert Path(os.devnull).is_char_device()


def test_folders_are_made_and_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.ckpt"
    before = os.umask(0o027)
    try:
        write_checkpoint({}, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_replaced_and_what_it_pointed_to_stays(tmp_path: Path) -> None:
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    write_checkpoint({"v": "best"}, best)
    last.symlink_to(best)
    write_checkpoint({"v": "last"}, last)
    assert read_checkpoint(best) == {"v": "best"}
    assert read_checkpoint(last) == {"v": "last"}
    assert not last.is_symlink()


def test_saving_and_loading_need_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    weights = torch.nn.Linear(1 << 12, 1 << 13, bias=False).state_dict()  # 128 MiB

    def save_and_load() -> None:
        def grown_mb() -> float:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before

        write_checkpoint({"small": 1}, tmp_path / "small.ckpt")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        write_checkpoint(weights, tmp_path / "big.ckpt")
        assert grown_mb() < 40, f"saving took {grown_mb():.0f} MiB"
        mapped = read_checkpoint(tmp_path / "big.ckpt")
        assert grown_mb() < 40, f"reading took {grown_mb():.0f} MiB"
        assert mapped["weight"][5, 7].item() == weights["weight"][5, 7].item()

    error = in_child(save_and_load)
    assert error is None, error


def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make_folder(wait: Callable[[], object]) -> None:
        Path(tempfile.mkdtemp(prefix=scratch_prefix()), "lines").write_text("1")
        wait()

    process, _ = start(make_folder)
    (theirs,) = tmp_path.iterdir()
    own = tempfile.mkdtemp(prefix=scratch_prefix())
    another_container = tmp_path / theirs.name.replace(str(os.stat("/proc/self/ns/pid").st_ino), "1")
    another_container.mkdir()
    assert theirs.exists()
    kill(process)
    scratch_prefix()
    assert {*tmp_path.iterdir()} == {Path(own), another_container}
