"""The user's own command that is told when a run ends, fails or stalls."""

import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Callback, Trainer
from own_loops import Network
from rank_processes import run_ranks
from real_names import TOLD
from trainings import Boom, Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.errors import StalledTrainingWarning

OWN = "LIGHTNING_GPU_TOOLS"
NOTE = "env -0 > note.part && mv note.part note"
RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"


def ask(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv(f"{OWN}_NOTIFY", command)


def wait_for(file: Path) -> Path:
    until_s = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until_s, f"nothing has written {file}"
        time.sleep(0.01)
    return file


def told(folder: Path) -> dict[str, str]:
    """Wait for the command, and return what it was told."""
    variables = dict(one.split("=", 1) for one in wait_for(folder / "note").read_text().split("\0") if one)
    return {name: variables[f"{OWN}_{name}"] for name in TOLD}


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the command write what it is told to a file of this folder."""
    ask(monkeypatch, tmp_path, NOTE)
    return tmp_path


def train(folder: Path, *others: Callback, model: Model | None = None, **options: Any) -> None:
    quiet_trainer(folder, callbacks=[GPUUtilizationMonitor(), *others], **options).fit(
        model or Model(), loader(Samples(5)), loader(Samples(1))
    )


def test_the_end_of_a_run_is_told(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/ada/train.py", "--lr", "0.1"])
    train(note)
    report = load_report(note)
    assert told(note) == {
        "EVENT": "end",
        "OUTCOME": "completed",
        "VERDICT": report.diagnosis.verdict,
        "WHY": report.diagnosis.why,
        "NEXT": report.diagnosis.next_step,
        "REPORT": str(note / "gpu_report" / "gpu_report.json"),
        "HOST": os.uname().nodename,
        "SCRIPT": "train.py",
    }


@pytest.mark.parametrize(("hook", "step"), [("on_train_batch_end", 1), ("on_fit_start", 0)])
def test_an_error_is_told_without_raw_text(note: Path, hook: str, step: int) -> None:
    forged = type("Odd\x1b[2J\nOutcome", (Boom,), {})

    class Fails(Callback):
        def fail(self, *args: Any) -> None:
            raise forged

    setattr(Fails, hook, Fails.fail)
    with pytest.raises(Boom):
        train(note, Fails())
    found = told(note)
    assert found["EVENT"] == "error"
    assert found["OUTCOME"] == rf"stopped by Odd\x1b[2J\nOutcome at step {step}"
    assert Path(found["REPORT"]).is_file() == (step > 0)


def test_a_stall_is_told_while_it_lasts(note: Path) -> None:
    class Waits(Callback):
        found: dict[str, str]

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                self.found = told(note)

    waits = Waits()
    monitor = GPUUtilizationMonitor(stall_after_s=1)
    with pytest.warns(StalledTrainingWarning):
        quiet_trainer(note, callbacks=[monitor, waits]).fit(Model(), loader(Samples(5)))
    (stall,) = load_report(note).stalls
    assert waits.found["EVENT"] == "stall"
    assert re.fullmatch(r"Training has made no progress for .* s, in Waits at step 3\.", waits.found["OUTCOME"])
    assert (waits.found["WHY"], waits.found["NEXT"]) == (stall.why, stall.next_step)
    assert Path(waits.found["REPORT"]).exists()


def loop(*, fails: bool = False) -> None:
    network = Network()
    with watch() as run:
        for batch in run.batches(loader(Samples(5))):
            network.step(batch)
            if fails:
                raise Boom


def train_ranks(folder: Path, rank: int) -> None:
    os.chdir(folder)
    os.environ[f"{OWN}_NOTIFY"] = 'echo "$RANK" >> ranks'
    train(folder, accelerator="cpu", devices=2, strategy="ddp", num_sanity_val_steps=0)


def test_one_rank_tells_for_all(tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, train_ranks)
    assert [one.returncode for one in ended] == [0, 0], ended
    assert wait_for(tmp_path / "ranks").read_text() == "0\n"


def train_and_hang(folder: Path, rank: int) -> None:
    os.chdir(folder)
    os.environ[f"{OWN}_NOTIFY"] = "echo $$ > part && mv part pid && exec sleep 1000"
    train(folder)


def test_a_command_that_hangs_delays_nothing(tmp_path: Path) -> None:
    (ended,) = run_ranks(tmp_path, train_and_hang, ranks=1)
    assert ended.returncode == 0, ended.stderr
    pid = int(wait_for(tmp_path / "pid").read_text())
    hanging = psutil.Process(pid)  # the program has ended, and did not wait
    try:
        assert hanging.cmdline() == ["sleep", "1000"]
        assert os.getsid(pid) not in (os.getsid(0), 0)  # Ctrl-C and a closed terminal do not reach it
        assert not [file for file in hanging.open_files() if "notify.log" not in file.path]
    finally:
        os.kill(pid, signal.SIGKILL)


def test_nothing_runs_where_the_package_is_off_or_writes_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, tmp_path, "echo run >> notes")
    quiet_trainer(tmp_path, callbacks=[GPUUtilizationMonitor(report=False), GPUUtilizationAdvisor()]).fit(
        Model(), loader(Samples(5))
    )
    monkeypatch.setenv(f"{OWN}_DISABLE", "1")
    train(tmp_path)
    loop()
    monkeypatch.delenv(f"{OWN}_DISABLE")
    loop()  # the only one that tells anybody
    assert wait_for(tmp_path / "notes").read_text() == "run\n"


COMMANDS = re.findall(rf"^export {OWN}_NOTIFY='(.*?)'$", RECIPES.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_the_recipes_send_what_they_promise(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) >= 3
    (tmp_path / "bin").mkdir()
    for name in ("mail", "curl", "notify-send"):
        script = 'printf "%s\\n" "$(basename "$0")" "$@" > part; cat >> part; mv part sent'
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    if command.startswith("jq") and shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    ask(monkeypatch, tmp_path, command)
    train(tmp_path)
    sent = wait_for(tmp_path / "sent").read_text()
    assert sent.splitlines()[0] in ("mail", "curl", "notify-send")
    assert "completed" in sent
    assert load_report(tmp_path).diagnosis.why in sent
