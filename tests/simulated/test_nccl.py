"""NCCL between simulated GPUs, under torch's process groups, DDP, FSDP and Lightning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from lightning_gpu_tools.simulated import Machine

MakeMachine = Callable[..., Machine]
Ranks = Callable[..., list[Any]]
HERE = Path(__file__).parent
JOIN = """
import json, os, time, torch
import torch.distributed as dist
from datetime import timedelta
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=float(os.environ.get("LIMIT_S", 100))))
value = torch.zeros(1, device=device)
dist.all_reduce(value)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("joining", ["eager", "late"])
def test_collectives_move_what_they_say(make_machine: MakeMachine, answer_of_ranks: Ranks, joining: str) -> None:
    ranks = 3
    answers = answer_of_ranks(make_machine(["h100-80gb"] * ranks), ranks, HERE / "rank_collectives.py", joining)
    for rank, result in enumerate(answers):
        assert result["all_reduce"] == [6, 6]
        assert result["average"] == [2, 2]
        assert result["broadcast"] == [10]
        assert result["all_gather"] == [0, 1, 2]
        assert result["reduce_scatter"] == [3 * rank + 3]
        assert result["all_to_all"] == [rank, 10 + rank, 20 + rank]
        assert result["ring"] == [(rank - 1) % ranks]
        assert result["large"] == [0, 3, 3 * 2_999_999]
        assert result["objects"] == [2, "", "y", "yy"]
    assert answers[1]["received"]


def test_one_process_joins_eight_gpus(make_machine: MakeMachine, answer: Callable[..., Any]) -> None:
    sums, shape = answer(
        make_machine(["h100-80gb"] * 8),
        """
import json, torch
import torch.cuda.nccl as nccl
values = [torch.tensor([float(i)]).to(f"cuda:{i}") for i in range(8)]
nccl.all_reduce(values)
model = torch.nn.DataParallel(torch.nn.Linear(4, 2).cuda())
print(json.dumps([[value.item() for value in values], model(torch.ones(16, 4).cuda()).shape]))
""",
    )
    assert sums == [28.0] * 8
    assert shape == [16, 2]


def test_a_rank_that_waits_for_another_looks_busy(make_machine: MakeMachine, answer_of_ranks: Ranks) -> None:
    code = """
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(rank)
def meter():  # seconds, joules by the driver's counter
    (energy,) = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION])
    return time.monotonic(), energy.value.ullVal / 1000
begin_s = time.monotonic()
readings = [meter()]
if rank == 1:
    time.sleep(3)
dist.all_reduce(value)
queued_s, event = time.monotonic() - begin_s, torch.cuda.Event()
event.record()
if rank == 0:
    for _ in range(10):
        time.sleep(0.1)
        readings.append(meter())
busy, ready = torch.cuda.utilization(), event.query()
torch.cuda.synchronize()
waited_s = time.monotonic() - begin_s
time.sleep(0.2)
watts = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(readings, [*readings[1:], meter()])]
print(json.dumps([queued_s, busy, ready, waited_s, watts]))
dist.destroy_process_group()
"""
    (queued_s, busy, ready, waited_s, watts), _ = answer_of_ranks(make_machine(["h100-80gb"] * 2), 2, JOIN + code)
    assert queued_s < waited_s
    assert waited_s > 2
    assert busy == 100
    assert not ready
    *waiting, last = watts
    assert waiting == pytest.approx([700] * len(waiting), rel=0.1)  # busy all the time, so at the limit
    assert 0 < last < 770  # what it waited for is not counted twice


def test_a_rank_that_never_comes_is_ended_by_torchs_watchdog(
    make_machine: MakeMachine, start_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    code = """
if rank == 1:
    time.sleep(120)
dist.all_reduce(value)
torch.cuda.synchronize()
"""
    recorder = {"BUFFER_SIZE": "100", "DUMP_ON_TIMEOUT": "1", "DUMP_TEMP_FILE": str(tmp_path / "entries_of_rank_")}
    # The names of torch 2.9 and later, and those before.
    old_names = {"BUFFER_SIZE": "TRACE_BUFFER_SIZE", "DUMP_TEMP_FILE": "DEBUG_INFO_TEMP_FILE"}
    names = {f"TORCH_FR_{name}": value for name, value in recorder.items()}
    names |= {f"TORCH_NCCL_{old_names.get(name, name)}": value for name, value in recorder.items()}
    names["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    first, _ = start_ranks(make_machine(["h100-80gb"] * 2), 2, JOIN + code, LIMIT_S="4", **names)
    _, errors = first.communicate(timeout=150)
    assert first.returncode != 0
    assert re.search("Watchdog caught collective operation timeout|Operation timed out after", errors)
    assert list(tmp_path.glob("entries_of_rank_*"))


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 8), ("fsdp", 2), ("fsdp2", 2)])
def test_lightning_trains_on_several_gpus_as_it_starts_by_itself(
    make_machine: MakeMachine, start_ranks: Callable[..., list[Any]], strategy: str, ranks: int
) -> None:
    # The first rank forks the others, so that Lightning is imported once for all.
    machine, script = make_machine(["h100-80gb"] * ranks), HERE / "rank_lightning.py"
    (first,) = start_ranks(machine, 1, script, strategy, WORLD_SIZE=str(ranks))
    output, errors = first.communicate(timeout=150)
    assert first.returncode == 0, errors
    answers = sorted((json.loads(line) for line in output.splitlines() if line.startswith("[")), key=itemgetter(1))
    assert [one[:4] for one in answers] == [[3, rank, ranks, "of rank 0"] for rank in range(ranks)]
    assert all(one[4] == answers[0][4] for one in answers)
