"""The stack of a process, and the collectives that it has called, by the record of a real process group."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from lightning_gpu_tools.training import compat
from lightning_gpu_tools.training.stacks import WorkerStacks, called_collectives, write_stack_at_signal

distributed = torch.distributed
HAS_RECORD = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")


def call_some(folder: Path, rank: int) -> None:
    """Call collectives in two groups, the last one on rank 0 alone."""
    distributed.init_process_group("gloo")
    pair = distributed.new_group([0, 1], group_desc="pair")
    for _ in range(12):
        distributed.all_reduce(torch.ones(2, 3))
    distributed.broadcast(torch.ones(4, dtype=torch.int64), 0, group=pair)
    distributed.barrier()
    if rank == 0:
        distributed.all_reduce(torch.ones(7, dtype=torch.float16), async_op=True)
    while sum(not call.is_done for group in called_collectives() for call in group.calls) > (rank == 0):
        time.sleep(0.01)  # gloo's threads note the end of a call a little later
    (folder / f"calls{rank}").write_text(json.dumps(called_collectives()))
    store = compat.default_store()
    store.set(f"wrote {rank}", "")
    with suppress(RuntimeError):  # rank 0, which holds the store, may be gone
        store.wait([f"wrote {1 - rank}"])
    os._exit(0)


@pytest.mark.skipif(not HAS_RECORD, reason="this torch keeps no record of gloo's calls")
def test_the_calls_of_each_group_and_their_sizes(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, call_some)
    assert [result.returncode for result in results] == [0, 0], results
    waiting, behind = (json.loads((tmp_path / f"calls{rank}").read_text()) for rank in range(2))
    done = [[number, "all_reduce of 6 float32 numbers", True] for number in range(6, 13)]
    barrier = [13, "barrier", True]
    assert behind == [
        ["gloo 0", "", [*done, barrier]],
        ["gloo 1", "pair", [[1, "broadcast of 4 int64 numbers", True]]],
    ]
    last = [14, "all_reduce of 7 float16 numbers", False]
    assert waiting == [["gloo 0", "", [*done, barrier, last]], behind[1]]


def test_nccls_collectives_have_the_names_that_users_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {
        "_all_gather_base": "completed",
        "all_reduce_barrier": "completed",
        "_reduce_scatter_base": "started",
        "all_to_all": "scheduled",  # to which ranks may pass different sizes
    }
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "is_p2p": False,
            "retired": False,
            "input_dtypes": ["BFloat16"],
            "input_sizes": [[2], [3, 4]],
            "collective_seq_id": n,
            "profiling_name": f"nccl:{name}",
            "state": state,
        }
        for n, (name, state) in enumerate(calls.items(), 1)
    ]
    entries.append({**entries[0], "is_p2p": True, "profiling_name": "nccl:send 0->1"})
    record = json.dumps({"entries": entries}).encode()
    # Other tests of this process may have left calls of gloo.
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: b"{}", raising=False)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: record, raising=False)
    (group,) = called_collectives()
    assert group.group == "nccl 0"
    assert [tuple(call) for call in group.calls] == [
        (1, "all_gather_into_tensor of 14 bfloat16 numbers", True),
        (2, "barrier", True),
        (3, "reduce_scatter_tensor of 14 bfloat16 numbers", False),
        (4, "all_to_all", False),
    ]


@pytest.mark.parametrize("record", [None, b'{"entries": [{"is_p2p": false}]}'])
def test_without_a_record_of_this_form_there_are_no_calls(
    monkeypatch: pytest.MonkeyPatch, record: bytes | None
) -> None:
    for name in compat._COLLECTIVE_RECORDS:
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
        if record is not None:
            monkeypatch.setattr(torch._C._distributed_c10d, name, lambda: record, raising=False)
    assert called_collectives() == ()


# The stack of a process that waits


def hang(tell: int) -> None:
    os.write(tell, b"1")
    signal.pause()


@pytest.mark.parametrize("is_listening", [True, False])
def test_only_listening_processes_get_the_signal_for_stacks(is_listening: bool) -> None:
    stacks, (ready, tell) = WorkerStacks(), os.pipe()
    child = os.fork()
    if child == 0:
        if is_listening:
            write_stack_at_signal(stacks.path)
        hang(tell)
    os.read(ready, 1)
    try:
        functions = [frame.function for frame in stacks.ask(child)]
        assert functions[-1:] == ["hang"] * is_listening
        assert os.waitpid(child, os.WNOHANG)[0] == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        stacks.close()
