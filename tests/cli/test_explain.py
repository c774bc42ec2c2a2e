"""``lightning-gpu-tools explain`` for the causes of all registries."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_gpu_tools.advice import causes, memory_causes, stall_causes
from lightning_gpu_tools.cli import main

REGISTRIES = {
    causes: causes.CAUSES,
    memory_causes: memory_causes.MEMORY_CAUSES,
    stall_causes: stall_causes.STALL_CAUSES,
}
Explain = Callable[..., str]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    def run(*arguments: str) -> str:
        assert main(["explain", *arguments]) == 0
        return capsys.readouterr().out

    return run


def in_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def numbers_in(source: str) -> list[str]:
    """Return the names of the constants of a file that are thresholds, as a reader sees them."""
    of_text = "(?!.*# .*in the (?:report|advice))"
    return re.findall(rf"^_?([A-Z][A-Z_]+) = {of_text}\(?\d[\d.e, *()/-]*(?:  #.*)?$", source, re.MULTILINE)


@pytest.mark.parametrize("package", REGISTRIES, ids=lambda package: package.__name__.rpartition(".")[2])
def test_every_cause_is_explained_with_its_thresholds(package: Any, explain: Explain) -> None:
    for name, cause in REGISTRIES[package].items():
        text = explain(name)
        source = (Path(package.__path__[0]) / f"{name}.py").read_text()
        shown = in_one_line(text)
        meaning = source.removeprefix('"""').partition("\n")[0].removesuffix('"""').replace("``", "`")
        assert meaning in shown
        for shape in cause.shapes:
            assert re.sub(r"\[below\].*", "", shape.change) in shown, name
        for number in numbers_in(source):
            assert f" {number} = " in shown, f"{name}: {number}"
        assert re.search(r"How it is measured\n  \S", text), name
        assert "Verified " in shown
        assert "\nMore: https://" in text
        too_long = [line for line in text.splitlines() if len(line) > 100 and "https://" not in line]
        assert not too_long


def test_every_threshold_says_what_it_means(explain: Explain) -> None:
    entries = json.loads(explain("--format", "json"))
    assert [one["name"] for one in entries] == [name for known in REGISTRIES.values() for name in sorted(known)]
    for entry in entries:
        for threshold in entry["thresholds"] + entry["common_thresholds"]:
            assert threshold["about"] or threshold["meaning"], f"{entry['name']}: {threshold['name']}"


def test_thresholds_are_those_that_a_cause_uses(explain: Explain) -> None:
    def thresholds(name: str) -> dict[str, tuple[object, str, str]]:
        (entry,) = json.loads(explain(name, "--format", "json"))
        return {one["name"]: (one["value"], one["about"], one["meaning"]) for one in entry["thresholds"]}

    # In another file, where its function looks.
    value, about, meaning = thresholds("host_work")["SLOW_LAUNCH_S"]
    assert (value, about, meaning[:13]) == (1e-4, "Our defaults.", "per operation")
    assert thresholds("low_precision")["AMPERE"][0] == [8, 0]
    assert "MAX_LINES" not in thresholds("straggler")  # of the text alone
    assert "MAX_REASON" not in thresholds("recompilation")  # likewise
    assert thresholds("loading_checkpoint") == {}
    assert "Thresholds\n  none of its own\n" in explain("loading_checkpoint")


def test_it_says_which_causes_silence_others(explain: Explain) -> None:
    communication, _, stall = in_one_line(explain("communication")).partition(" communication: all ranks wait")
    assert (
        "It is not reported if straggler has a finding. If it has a finding, small_batch is not reported."
        in communication
    )
    assert "judged after blocked_worker and collective_mismatch, before gpu. Only the first cause" in stall
    assert "judged last, and only if no other cause applies" in explain("unexplained")
    assert "makes no run LOW" in explain("power_cap")
    assert "Requires: gpu.sm_active_percent." in explain("small_batch")


def test_links_and_emphasis_become_plain_text(explain: Explain) -> None:
    assert "/hanging_training/#a-worker-died" in explain("dead_worker")
    assert "[below]" not in explain("dead_worker")
    assert "Next has `DataLoader(" in explain("data_loading")


def test_a_kind_leads_to_its_cause(explain: Explain) -> None:
    assert explain("io_bound") == explain("data_loading")


def test_all_causes_are_listed_in_their_groups(explain: Explain) -> None:
    text = explain()
    groups = [in_one_line(part) for part in text.split("\n\n")]
    for group, known in zip(groups, REGISTRIES.values(), strict=False):
        for name in known:
            assert f" {name} " in group
    assert groups[-1] == "For details: lightning-gpu-tools explain CAUSE "


def test_an_unknown_cause_is_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    for name, says in (
        ("dataloading", 'no cause is named "dataloading". Did you mean data_loading? Run explain '),
        ("\x1b[31mzzz", 'no cause is named "\\x1b[31mzzz". Run explain without an argument to list all causes.'),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["explain", name])
        shown = capfd.readouterr()
        assert (shown.out, says in shown.err) == ("", True)
