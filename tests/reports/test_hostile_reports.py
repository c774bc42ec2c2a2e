"""Files that are not reports, or forged ones: one sentence each, at once, and never a traceback."""

import contextlib
import copy
import functools
import json
import operator
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sample_report import REPORT

from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import ReportError
from lightning_gpu_tools.processes import ProcessId
from lightning_gpu_tools.reports.comparison import earlier_report
from lightning_gpu_tools.reports.report import SCHEMA_VERSION, ReportFile, from_json, load_report, to_json
from lightning_gpu_tools.training.run_measurements import (
    LoaderResult,
    LoaderSettings,
    LoaderTrial,
    PhaseSpan,
    RankStep,
    SourceLine,
)
from lightning_gpu_tools.units import printable_path

SETTINGS = LoaderSettings(
    num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False, batch_size=64
)
FULL = replace(
    REPORT,
    spans=(PhaseSpan(0.0, 1.5, {"training_step": 1.0, "validation": 0.5}, 20),),
    ranks=(RankStep(rank=0, node=0, own_step_s=0.01), RankStep(rank=1, node=0, own_step_s=0.02)),
    step_s_blocks=tuple(0.05 + i / 1e4 for i in range(8)),
    loader=LoaderResult(
        original=SETTINGS,
        settings=SETTINGS,
        applied=True,
        confirmed=True,
        reason="It is faster.",
        trials=(LoaderTrial(settings=SETTINGS, batch_s=0.1),),
        seconds=3.0,
        wait_share=0.1,
    ),
    diagnosis=replace(REPORT.diagnosis, gpu_idle_percent={"callback/Slow": 12.0}, utilization_percent=34.0),
    settings={**REPORT.settings, "gpu": ["NVIDIA H200"], "precision": "32-true"},
    unseen=("Loop.run",),
    lines=(SourceLine(phase="worker", file="data.py", line=41, function="decode", samples=620),),
    gpu_note="GPU 1 is not measured.",
    confirmation="num_workers 0 -> 4: 1.31x, confirmed.",
    process=ProcessId(kernel="0123456789ab", namespace="pid:[4026531836]", pid=812, started_ticks=123456),
)


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to each value in plain data, that of the data itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, item in inside for found in places(item, (*place, key)))]


DATA = json.loads(to_json(FULL))
texts = st.text(st.sampled_from("a|`$<\\*[\x1b\x9b\n\r\u2028\u202e\ud800"), max_size=30)
scalars = st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.integers(-2, 2) | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


def like(value: Any) -> st.SearchStrategy[Any]:
    """Return values of the same type, however odd."""
    if isinstance(value, dict):
        return st.dictionaries(texts, like(next(iter(value.values()), 0.5)), max_size=3)
    if isinstance(value, list):
        return st.lists(like(next(iter(value), "a")), max_size=9)
    kinds = {bool: st.booleans(), str: texts, int: st.integers(0, 2**64), float: st.floats(0, 2.0**64)}
    return kinds.get(type(value), st.none())


def at(place: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.getitem, place, DATA)


changed = st.sampled_from(places(DATA)[1:]).flatmap(lambda place: st.tuples(st.just(place), like(at(place)) | values))


@given(st.lists(changed, min_size=1, max_size=3), st.booleans(), st.sampled_from(["text", "markdown", "json"]))
@example([(("steps",), 10**300)], True, "text")
@example([(("settings", "world_size"), 0)], False, "text")
@example([(("wall_s",), 0), (("phase_s",), {})], True, "text")
@example([(("step_s_blocks", i), -0.05) for i in range(8)], True, "text")
@example([(("diagnosis", "findings", 0, "cause"), "checkpoint"), (("phase_s", "checkpoint"), 1e300)], False, "text")
def test_a_gate_never_takes_a_broken_report_for_a_slow_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[tuple[tuple[Any, ...], Any]],
    is_new: bool,
    form: str,
) -> None:
    changed, sound = tmp_path / "changed.json", tmp_path / "sound.json"
    changed.write_text(json.dumps(functools.reduce(put, changes, copy.deepcopy(DATA))))
    sound.write_text(to_json(FULL))
    new, old = (changed, sound) if is_new else (sound, changed)
    codes = [main(["report", str(changed), "--format", form])]
    codes.append(main(["report", str(new), "--against", str(old), "--max-slowdown", "5%", "--format", form]))
    shown = capsys.readouterr()
    try:
        load_report(changed)
    except ReportError:
        assert (codes, shown.out, shown.err.count("\n")) == ([1, 3], "", 2)
    else:
        assert codes[0] == 0
        assert codes[1] in (0, 1, 3)
        assert shown.err == ""
    assert all(line.isprintable() for line in (shown.out + shown.err).split("\n"))


def put(data: Any, change: tuple[tuple[Any, ...], Any]) -> Any:
    """Put a value in plain data, unless an earlier change removed its place."""
    (*way, last), value = change
    with contextlib.suppress(LookupError, TypeError):
        functools.reduce(operator.getitem, way, data)[last] = value
    return data


def test_a_full_report_is_read_back_unchanged() -> None:
    assert from_json(to_json(FULL)) == FULL
    summary = FULL.diagnosis.summary()
    assert json.loads(to_json(FULL)) == json.loads(
        json.dumps({"schema_version": SCHEMA_VERSION, "summary": summary, **asdict(FULL)})
    )


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("steps",), float("inf"), "`Infinity` is out of range"),
        (("step_s_blocks", 3), 0.0, "Expected `float` >= 1e-09 - at `$.step_s_blocks[3]`"),
        (("gpus", 0, "name"), 5, "Expected `str | null`, got `int` - at `$.gpus[0].name`"),
        (("gpus", 0), {}, "Object missing required field `index` - at `$.gpus[0]`"),
        (("diagnosis", "verdict"), "odd", "Invalid enum value 'odd' - at `$.diagnosis.verdict`"),
        (("schema_version",), 1, "has schema version 1, but this version of lightning_gpu_tools reads only 3. Read it"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(place: tuple[Any, ...], value: Any, says: str) -> None:
    with pytest.raises(ReportError) as caught:
        from_json(json.dumps(put(copy.deepcopy(DATA), (place, value))), "gpu_report.json")
    assert says in str(caught.value)
    assert str(caught.value).startswith("gpu_report.json ")


NOT_REPORTS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "huge": lambda path: os.truncate(os.open(path, os.O_RDWR | os.O_CREAT), 1 << 40),
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "truncated": lambda path: path.write_text(to_json(FULL)[:-40]),
}


@pytest.mark.timeout(30)  # a reader that waits for the pipe, or reads the device to its end, never returns
@pytest.mark.parametrize("kind", NOT_REPORTS)
def test_what_is_not_a_report_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = tmp_path / "x\r\nFORGED\x1b[2J\u202e"
    folder.mkdir()
    path = folder / "gpu_report.json"
    NOT_REPORTS[kind](path)
    with pytest.raises(ReportError) as caught:
        load_report(path)
    assert printable_path(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert earlier_report(folder) is None
    sound = str(ReportFile(tmp_path).save(FULL))
    for arguments in ([sound, "--against", str(path)], [str(path), "--against", sound]):
        assert main(["report", *arguments]) == 3
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err == f"lightning-gpu-tools: cannot compare: {caught.value}\n"
