"""Names that would control a terminal or forge lines: in every command, every error, and a training."""

import itertools
import json
import logging
import re
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from checkpoint_files import lightning_checkpoint, records_of, safetensors, text, zipped
from fake_driver import Driver, gpu
from lightning.pytorch import Callback
from sample_report import REPORT
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, PortableCheckpointIO
from lightning_gpu_tools.gpus.metrics import Series
from lightning_gpu_tools.gpus.nvml import read_gpus
from lightning_gpu_tools.reports.report import load_report, to_json
from lightning_gpu_tools.units import printable

STEERS = "$\\frac$```|[b]<i>\x1b[2J\x1b]0;x\x07\x9b31m\r\nFORGED\u2028FORGED\u202e"
EVIL = STEERS + 200_000 * "L" + "weight"

Call = Callable[..., "CompletedProcess[str]"]
pytestmark = pytest.mark.usefixtures("claims_dir")


def assert_harmless(*shown: str) -> None:
    """No control characters except line ends, no forged line, and no name of 200,000 letters in full."""
    for said in shown:
        assert {c for c in said if not (c.isprintable() or c == "\n")} == set()
        assert not re.search(r"^\s*FORGED", said, re.MULTILINE), said[:3000]
        assert 1500 * "L" not in said


def weights_named(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1, 4) for name in names}


def contents() -> dict[str, Any]:
    """Checkpoints with such a name wherever their format has a name."""
    weights = OrderedDict([(f"{EVIL}.{i}.weight", torch.ones(2, 2)) for i in range(2)])
    fits = Model().state_dict()
    sound = {
        "state_dict": weights,
        "pytorch-lightning_version": "2.0.0",
        "epoch": 1,
        "hyper_parameters": {EVIL: EVIL},
        "callbacks": {EVIL: {}},
        "lightning_gpu_tools": {"wrappers": {EVIL: EVIL}, "devices": [EVIL], "torch": EVIL, "lightning": EVIL},
    }
    of_cli = {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": EVIL}
    return {
        "weights.pt": weights,
        "sound.ckpt": sound,
        "lightning.ckpt": {**sound, "pytorch-lightning_version": EVIL},
        "class.ckpt": {**sound, "state_dict": fits, "hyper_parameters": of_cli},
        "rooted.ckpt": lightning_checkpoint(weights_named(f"{EVIL}.layer.weight", f"{EVIL}.other")),
        "several.pt": {EVIL: weights, EVIL + "2": weights},
        "colliding.pt": weights_named(f"{STEERS}.weight", f"_orig_mod.{STEERS}.weight"),
        "no_weights.pt": {EVIL: 1},
        "fits\r\nFORGED.pt": fits,
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files with such a name wherever their format has a name."""
    folder = tmp_path_factory.mktemp("files") / "x\r\nFORGED\x1b[2J\u202e"
    folder.mkdir()
    for name, content in contents().items():
        torch.save(content, folder / name)
    plain = (folder / "weights.pt").read_bytes()
    for name, replace in {
        "unsafe.pt": lambda pickled: b"\x80\x04" + 2 * text(EVIL) + b"\x93)R.",  # calls something and does nothing else
        "device.pt": lambda pickled: pickled.replace(text("cpu"), text(EVIL)),
    }.items():
        records = [(one, replace(data) if one.endswith("data.pkl") else data) for one, data in records_of(plain)]
        (folder / name).write_bytes(zipped(records))
    metadata = {"format": EVIL, "tied": json.dumps({EVIL: EVIL}), "lightning_gpu_tools": json.dumps({"torch": EVIL})}
    weight = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    (folder / "weights.safetensors").write_bytes(safetensors({"__metadata__": metadata, EVIL: weight}, bytes(4)))
    for kind, inside in (("folder", f"a{STEERS}.ckpt"), ("sharded\r\nFORGED", ".metadata")):
        (folder / kind).mkdir()
        (folder / kind / inside).write_bytes(plain)
    paths = {path.name: str(path) for path in folder.iterdir()}
    paths["missing"] = str(folder / "folder" / "missing\r\nFORGED\x1b[2J.ckpt")
    return paths


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reports")
    (folder / "report.json").write_text(hostile_report())
    (folder / "good.json").write_text(to_json(REPORT))
    return {path.name: str(path) for path in folder.iterdir()}


def hostile_report() -> str:
    """A valid report with such a name wherever it has a string."""
    report = json.loads(to_json(REPORT))
    phases = {EVIL: 1.0, f"callback/{EVIL}": 2.0}
    report |= dict.fromkeys(("outcome", "started_at", "gpu_note", "confirmation"), EVIL)
    report |= {"phase_s": {**report["phase_s"], **phases}, "unseen": [EVIL], "spans": [[0.0, 1.0, phases, 20]]}
    report["settings"] = {EVIL: [EVIL], "gpu": [EVIL], "batch_size": EVIL, "model": EVIL}
    timelines = {EVIL: asdict(Series(0.0, 1.0, [1.0]))}
    report["gpus"][0] |= {"uuid": EVIL, "name": EVIL, "errors": [EVIL], "timelines": timelines}
    report["diagnosis"] |= {"why": EVIL, "next_step": EVIL, "gpu_idle_percent": phases}
    report["diagnosis"]["findings"][0] |= {"advice": EVIL, "evidence": {EVIL: EVIL, "name": EVIL}}
    report["loader"] = {"original": None, "settings": None, "reason": EVIL}
    return json.dumps(report)


COMMANDS = (
    ["inspect", "FILE"],
    ["verify", "FILE"],
    ["convert", "FILE", "TARGET.safetensors"],
    ["convert", "FILE", "TARGET.ckpt", "--entry", EVIL, "--add-root", EVIL],
)


def test_checkpoint_commands_print_hostile_names_harmlessly(files: dict[str, str], tmp_path: Path, call: Call) -> None:
    for number, (name, arguments) in enumerate(itertools.product(files, COMMANDS)):
        places = {**files, "FILE": files[name]}
        target = str(tmp_path / f"new{number}\r\nFORGED")
        words = [places.get(one) or one.replace("TARGET", target) for one in arguments]
        answer = call("checkpoint", *words)
        assert answer.stderr if answer.returncode else answer.stdout, (name, arguments)
        assert_harmless(answer.stdout, answer.stderr)


def test_json_is_ascii_with_whole_names(files: dict[str, str], reports: dict[str, str], call: Call) -> None:
    inspect = ["checkpoint", "inspect", files["lightning.ckpt"], "--json"]
    for command in (inspect, ["report", reports["report.json"], "--format", "json"]):
        shown = call(*command).stdout
        assert shown.isascii()
        assert {c for c in shown if not c.isprintable()} == {"\n"}
        assert json.dumps(EVIL)[1:-1] in json.dumps(json.loads(shown))


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_reports_show_hostile_names_harmlessly(reports: dict[str, str], call: Call, form: str) -> None:
    command = ["report", reports["report.json"], "--format", form]
    printed, compared = call(*command), call(*command, "--against", reports["good.json"])
    assert (printed.returncode, compared.returncode) == (0, 3)
    shown = printed.stdout
    assert_harmless(shown, compared.stdout)
    if form == "markdown":  # in a fence that is longer than any that the names hold
        assert shown.startswith("````text\n")
        assert (shown.endswith("\n````\n"), shown.count("````")) == (True, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        [EVIL],
        ["pick", "-n", EVIL],
        ["report", "a", "--max-slowdown", EVIL],
        ["report", EVIL],
        ["checkpoint", "convert", EVIL, EVIL],
    ],
    ids=len,
)
def test_hostile_arguments_are_repeated_harmlessly(call: Call, arguments: list[str]) -> None:
    answer = call(*arguments)
    assert (answer.returncode in (1, 2), answer.stdout) == (True, "")
    assert_harmless(answer.stderr)


NAME = STEERS + "L" * 20  # NVML has room for 96 bytes


def test_gpu_names_and_claims_are_shown_harmlessly(
    driver: Driver, claims_dir: Path, call: Call, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.gpus = [
        gpu(name=NAME, uuid="GPU-\x1b[2J\u202e"),
        gpu(name=NAME, errors={"nvmlDeviceGetMemoryInfo": "UNKNOWN"}),
    ]
    claims_dir.mkdir()
    monkeypatch.chdir(claims_dir)  # the address of a socket is short
    good = {"job": "j", "uuids": ["GPU-a"], "kind": "whole", "pid": 1, "hostname": NAME}
    listeners = []
    for name, record in (("claim-00000000deadbeef", good), ("claim-00000000deadbee0", {**good, "kind": STEERS})):
        (claims_dir / f"{name}.json").write_text(json.dumps(record))
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(f"{name}.sock")
        listeners[-1].listen()
    assert [reading.name for reading in read_gpus()] == [printable(NAME)] * 2
    answers = [call("gpus"), call("gpus", "--json"), call("pick", "-n", "5")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{STEERS}")
    answers.append(call("pick", "-n", "1"))
    for listener in listeners:
        listener.close()
    assert r"\x1b[2J" in answers[0].stdout
    assert "claim-00000000deadbee0.json" in caplog.text
    assert_harmless("".join(caplog.messages), *(text for one in answers for text in (one.stdout, one.stderr)))


def test_the_plugin_shows_hostile_names_harmlessly(
    files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    path = files["rooted.ckpt"]
    model = Model()
    model.strict_loading = False
    trainer = quiet_trainer(tmp_path, plugins=[PortableCheckpointIO()], logger=False)
    with caplog.at_level(logging.INFO):
        trainer.validate(model, loader(Samples(1)), ckpt_path=path)
    for said in (*caplog.messages, *(str(one.message) for one in recwarn)):
        assert_harmless(said.replace(path, "PATH"))  # Lightning names the path itself


class StopsTraining(Callback):
    """Takes a while after each step, and raises an error named like itself at the 50th."""

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.005)
        if args[-1] == 50:
            raise type(type(self).__name__, (RuntimeError,), {})


def test_a_training_shows_hostile_names_harmlessly(
    driver: Driver,
    reports: dict[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # tests/reports/ draws such names
    name = STEERS + "L" * 2000
    folder = tmp_path / "x\r\nFORGED\x1b[2J\u202e"
    own = folder / "gpu_report"
    own.mkdir(parents=True)
    driver.gpus = [gpu(name=NAME, xid_events=[(0.0, 79)]), gpu(name=NAME, lost=True)]
    stop = type(name, (StopsTraining,), {})()
    module = type(name, (Model,), {})()
    (own / "gpu_report.json").write_text(Path(reports["report.json"]).read_text())
    callbacks = [GPUUtilizationMonitor(devices="all"), GPUUtilizationAdvisor(min_steps=5, min_seconds=0.0), stop]
    trainer = quiet_trainer(folder, callbacks=callbacks, logger=False)
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError):
        trainer.fit(module, loader(Samples(60)))
    assert json.loads((own / "gpu_report.json").read_text())["outcome"].startswith(f"stopped by {name}")
    assert (own / "gpu_report.json").read_bytes().isascii()
    assert load_report(folder).settings["model"] == name
    shown = capfd.readouterr()
    assert r"\x1b[2J" in shown.out
    assert_harmless(*shown, *caplog.messages, *(str(one.message) for one in recwarn))
