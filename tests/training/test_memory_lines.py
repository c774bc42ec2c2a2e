"""Lines that hold GPU memory, by stacks and events as torch records them."""

from __future__ import annotations

import os
import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.training import memory_lines
from lightning_gpu_tools.training.memory_holdings import workspace_sizes
from lightning_gpu_tools.training.memory_lines import Block, by_line
from lightning_gpu_tools.training.memory_readings import MemoryLine
from lightning_gpu_tools.training.memory_trace import Allocated, Event, blocks_at_peak

PACKAGES = sysconfig.get_path("purelib")


def frame(path: str, line: int, name: str) -> dict[str, object]:
    return {"filename": path, "line": line, "name": name}


LINEAR = frame(f"{PACKAGES}/torch/nn/functional.py", 1, "linear")
FIT = frame(f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", 2, "fit")
OURS = frame(memory_lines.__file__, 3, "called")
NET = frame(os.path.join(os.getcwd(), "net.py"), 41, "forward")
IN_A_LIST = frame(os.path.join(os.getcwd(), "net.py"), 57, "<listcomp>")
SCRIPT = frame(os.path.join(os.getcwd(), "train.py"), 9, "<module>")


def test_memory_adds_up_by_the_programs_innermost_line() -> None:
    blocks = [
        Block(5, [LINEAR, NET, FIT, SCRIPT], "forward"),
        Block(6, [LINEAR, NET, OURS, FIT, SCRIPT], "forward"),
        Block(3, [LINEAR, IN_A_LIST, NET, FIT, SCRIPT], "forward"),
        Block(4, [], "backward"),
        Block(1, [LINEAR, FIT, SCRIPT], "optimizer"),
    ]
    assert by_line(blocks) == (
        MemoryLine(11, 2, "forward", "net.py", 41, "forward"),
        MemoryLine(4, 1, "backward"),
        MemoryLine(3, 1, "forward", "net.py", 57, "forward"),
        MemoryLine(1, 1, "optimizer"),  # torch's own lines are nobody's to change
    )


@st.composite
def records(draw: st.DrawFn) -> tuple[list[Event], Allocated]:
    """Return the events of a step, some of which free what was there before, and when its parts ended."""
    live: dict[int, int] = {address: draw(st.integers(1, 50)) for address in range(draw(st.integers(0, 3)))}
    events = []
    for address in range(10, 10 + draw(st.integers(0, 30))):
        if live and draw(st.booleans()):
            freed = draw(st.sampled_from(sorted(live)))
            events.append(Event(False, freed, live.pop(freed)))
        live[address] = draw(st.integers(1, 50))
        events.append(Event(True, address, live[address]))
    count = sum(event.is_allocated for event in events)
    ends = sorted(draw(st.lists(st.integers(0, count), min_size=2, max_size=2)))
    return events, Allocated(100, 100 + ends[0], 100 + ends[1], 100 + count)


@given(records())
def test_what_is_live_at_the_peak_is_what_was_allocated_up_to_then(record: tuple[list[Event], Allocated]) -> None:
    events, moments = record
    totals = [0]
    for event in events:
        totals.append(totals[-1] + (event.size if event.is_allocated else -event.size))
    blocks = blocks_at_peak(events, moments)
    place = totals.index(max(totals))
    freed = {event.address for event in events[:place] if not event.is_allocated}
    made = [event for event in events[:place] if event.is_allocated]
    assert [block.address for block in blocks] == [event.address for event in made if event.address not in freed]
    number = {event.address: i for i, event in enumerate(made, 1)}
    ends = {"forward": moments.before_backward, "backward": moments.after_backward, "optimizer": moments.end}
    for block in blocks:
        at = 100 + number[block.address]
        assert block.phase == next(phase for phase, end in ends.items() if at <= end)


@pytest.mark.parametrize(
    ("config", "capability", "mib"),
    [
        ("", (8, 9), {8.125}),
        ("", (9, 0), {8.125, 32}),
        (":4096:8", (8, 0), {32}),
    ],
)
def test_a_workspace_of_cublas_has_a_known_size(config: str, capability: tuple[int, int], mib: set[float]) -> None:
    assert {size / 2**20 for size in workspace_sizes(config, capability)} == mib
