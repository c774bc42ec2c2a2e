"""``lightning-gpu-tools explain`` for the causes of all registries."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from lightning_gpu_tools.cli.explain import GROUPS, Group

Call = Callable[..., "CompletedProcess[str]"]
Explain = Callable[..., str]


@pytest.fixture
def explain(call: Call) -> Explain:
    return lambda *arguments: call("explain", *arguments).stdout


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.folder)
def test_every_cause_is_explained_on_a_screen_or_two(group: Group, explain: Explain) -> None:
    for name, cause in group.causes.items():
        lines = explain(name).splitlines()
        assert [line for line in lines if line.startswith(f"{name}: ")]
        assert len(lines) <= 100, name
        assert max(len(line) for line in lines) <= 120, name
        shown = " ".join(" ".join(lines).split())
        assert all(variant.change in shown for variant in cause.variants), name


def test_constants_are_printed_as_the_file_has_them(explain: Explain) -> None:
    shown = explain("launch_bound")
    assert "\nTakes the GPU's idle time inside the step, by CUDA events and the driver's utilization, if no" in shown
    assert "\nConstants in its file:\n_MIN_SHARE = 0.15  # our default: even a well-fed GPU has some gaps\n" in shown
    assert "def find" not in shown
    assert shown.index("More: https://") < shown.index("Constants in its file:")


def test_a_kind_leads_to_its_cause(explain: Explain) -> None:
    assert explain("io_bound") == explain("data_loading")


def test_all_causes_are_listed_in_their_groups(explain: Explain) -> None:
    parts = explain().split("\n\n")
    for part, group in zip(parts, GROUPS, strict=False):
        for name in group.causes:
            assert f"\n  {name} " in part
    assert parts[-1] == "For details: lightning-gpu-tools explain CAUSE\n"


def test_an_unknown_cause_is_wrong_usage(call: Call) -> None:
    answer = call("explain", "\x1b[31mzzz")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert 'no cause is named "\\x1b[31mzzz". Run explain without an argument to list all causes.' in answer.stderr
