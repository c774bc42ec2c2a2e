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
from lightning.pytorch.callbacks import LambdaCallback
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

    def fail(*args: Any) -> None:
        raise forged

    with pytest.raises(Boom):
        train(note, LambdaCallback(**{hook: fail}))
    found = told(note)
    assert found["EVENT"] == "error"
    assert found["OUTCOME"] == rf"stopped by Odd\x1b[2J\nOutcome at step {step}"
    assert Path(found["REPORT"]).is_file() == (step > 0)


def test_a_stall_is_told_while_it_lasts(note: Path) -> None:
    found: dict[str, str] = {}

    def wait(trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            found.update(told(note))

    callbacks = [GPUUtilizationMonitor(stall_after_s=1), LambdaCallback(on_train_batch_end=wait)]
    with pytest.warns(StalledTrainingWarning):
        quiet_trainer(note, callbacks=callbacks).fit(Model(), loader(Samples(5)))
    (stall,) = load_report(note).stalls
    assert found["EVENT"] == "stall"
    assert re.fullmatch(r"Training has made no progress for .* s, in LambdaCallback at step 3\.", found["OUTCOME"])
    assert (found["WHY"], found["NEXT"]) == (stall.why, stall.next_step)
    assert Path(found["REPORT"]).exists()


def loop() -> None:
    network = Network()
    with watch() as run:
        for batch in run.batches(loader(Samples(5))):
            network.step(batch)


def train_and_tell(folder: Path, rank: int, command: str, **options: Any) -> None:
    os.chdir(folder)
    os.environ[f"{OWN}_NOTIFY"] = command
    train(folder, **options)


def test_one_rank_tells_for_all(tmp_path: Path) -> None:
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "num_sanity_val_steps": 0}
    ended = run_ranks(tmp_path, train_and_tell, options={"command": 'echo "$RANK" >> ranks', **options})
    assert [one.returncode for one in ended] == [0, 0], ended
    assert wait_for(tmp_path / "ranks").read_text() == "0\n"


def test_a_command_that_hangs_delays_nothing(tmp_path: Path) -> None:
    command = "echo $$ > part && mv part pid && exec sleep 1000"
    (ended,) = run_ranks(tmp_path, train_and_tell, ranks=1, options={"command": command})
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
