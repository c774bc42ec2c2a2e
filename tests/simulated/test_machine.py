"""Devices, memory, time, graphs, the driver, NCCL and MIG of the simulated machine, under torch's own CUDA build."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched_jobs import free_port

from lightning_gpu_tools.simulated import Machine, SimulatedCudaError, build

MakeMachine = Callable[..., Machine]
Answer = Callable[..., Any]
GIB = 2**30


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SimulatedCudaError, match=r"is built without CUDA|gcc was not found"):
        build.libraries()
    with pytest.raises(ValueError, match="There is no GPU 'h1000'"):
        Machine(tmp_path, ["h1000"])
    assert not (tmp_path / "machine.conf").exists()


def test_the_command_line_runs_a_program_and_returns_its_code(make_machine: MakeMachine) -> None:
    make_machine()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lightning_gpu_tools.simulated", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    code = "from lightning_gpu_tools import list_gpus; print(*((gpu.index, gpu.name) for gpu in list_gpus()))"
    listed = run("--gpu", "t4", "-n", "3", "--", sys.executable, "-c", code)
    assert listed.stdout == "(0, 'Tesla T4') (1, 'Tesla T4') (2, 'Tesla T4')\n"
    assert run("--", "sh", "-c", "exit 7").returncode == 7
    assert run("-n", "17", "--", "true").returncode == 2
    assert "cannot be started" in run("--", "no-such-program").stderr


@pytest.mark.parametrize("expandable", ["False", "True"])
def test_memory_is_counted_by_all_who_ask(make_machine: MakeMachine, answer: Answer, expandable: str) -> None:
    machine = make_machine(["a100-40gb"])
    machine.occupy(0, 10 * GIB)
    seen = answer(
        machine,
        """
import json, os, torch
from lightning_gpu_tools.gpus import nvml
def used(): return nvml.read_gpus()[0].memory_total_bytes - nvml.read_gpus()[0].memory_free_bytes
buffer = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
buffer[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
free, total = torch.cuda.mem_get_info()
(process,) = nvml.read_gpus()[0].processes
held = [process.pid == os.getpid(), process.memory_used_bytes, used(), total - free, buffer[:3].tolist()]
try:
    torch.empty(30 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    held.append(str(error)[:46])
del buffer
torch.cuda.empty_cache()
print(json.dumps([*held, used()]))
""",
        PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{expandable}",
    )
    ours, process_bytes, used, by_cuda, content, error, after = seen
    assert ours
    assert content == [1, 2, 3]
    context, reserved = 500 * 2**20, 600 * 2**20
    assert 0 <= process_bytes - (4 * GIB + context) < 64 * 2**20  # and the allocator's smallest segment
    assert used == process_bytes + 10 * GIB + reserved
    assert by_cuda == used - reserved
    assert error == "CUDA out of memory. Tried to allocate 30.00 Gi"
    assert after < 11.5 * GIB
    left = answer(machine, "from lightning_gpu_tools import list_gpus\nprint(list_gpus()[0].memory_free_bytes)")
    assert left == 40960 * 2**20 - 10 * GIB - reserved  # the process has ended


def test_torch_chooses_by_the_gpu_that_is_simulated(make_machine: MakeMachine, answer: Answer) -> None:
    code = """
import json, os, torch
from torch.nn.attention import SDPBackend
found = {}
for device in range(torch.cuda.device_count()):
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    attention = []
    for dtype in (torch.float16, torch.bfloat16):
        query = torch.zeros(2, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        backend = SDPBackend(torch._fused_sdp_choice(query, query, query, None, 0.0, True))
        attention.append(backend.name.partition("_")[0])
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        torch.cuda.synchronize()
    torch.rand(5000, device="cuda").sort()  # by code that is chosen by the GPU's architecture
    found[properties.name] = [
        torch.cuda.get_device_capability(), properties.multi_processor_count, round(properties.total_memory / 2**30, 1),
        torch.cuda.is_bf16_supported(), torch.cuda.is_bf16_supported(including_emulation=False), *attention,
    ]
print(json.dumps(found), flush=True)
os._exit(0)  # torch's thread of backward may end later, which aborts Python on a busy machine
"""
    machine = make_machine(["t4", "rtx-3090", "a100-40gb", "l4", "h100-80gb", "b200"])
    assert answer(machine, code) == {
        "Tesla T4": [[7, 5], 40, 14.6, True, False, "EFFICIENT", "MATH"],
        "NVIDIA GeForce RTX 3090": [[8, 6], 82, 23.7, True, True, "FLASH", "FLASH"],
        "NVIDIA A100-SXM4-40GB": [[8, 0], 108, 39.4, True, True, "FLASH", "FLASH"],
        "NVIDIA L4": [[8, 9], 58, 22.0, True, True, "FLASH", "FLASH"],  # torch has no code of its own for 8.9
        "NVIDIA H100 80GB HBM3": [[9, 0], 132, 79.2, True, True, "FLASH", "FLASH"],
        "NVIDIA B200": [[10, 0], 148, 178.4, True, True, "FLASH", "FLASH"],
    }


def test_what_decides_sizes_and_checks_is_not_what_the_memory_held(make_machine: MakeMachine, answer: Answer) -> None:
    code = """
import json, torch
def numbers(count):  # leaves some in the memory that is used next
    torch.randint(1, 2**31, (count,)).cuda()
    return torch.empty(count, device="cuda", dtype=torch.long)
seen = []
for count in (1000, 3_000_000):  # counted by one kernel, and by two
    mask = numbers(count) > 0
    seen.append([len(mask.nonzero()), len(numbers(count)[mask]), mask.any().item(), mask.all().item(),
                 torch.unique(numbers(count)).tolist(), len(torch.bincount(numbers(count), minlength=16))])
sizes = torch.tensor([3, 70, 5]).cuda()
print(json.dumps([*seen, sizes.max().item(), sizes.sum().item()]))
"""
    of_numbers = [False, True, [0, 1], 16]
    assert answer(make_machine(), code) == [[1000] * 2 + of_numbers, [3_000_000] * 2 + of_numbers, 70, 78]


def test_time_follows_streams_events_and_graphs(make_machine: MakeMachine, answer: Answer) -> None:
    sequential, parallel, product, replayed, refused, replays = answer(
        make_machine(),
        """
import json, torch
def timed(work):
    first, begin, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(200_000_000)  # in which the host queues all of it
    begin.record(); work(); last.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(last)
sleep = lambda: torch.cuda._sleep(50_000_000)
def side_by_side():
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other): sleep()
    sleep()
    torch.cuda.current_stream().wait_stream(other)
matrix = torch.rand(4096, 4096, device="cuda")
matrix @ matrix
torch.cuda.synchronize()
times = [timed(lambda: (sleep(), sleep())), timed(side_by_side), timed(lambda: matrix @ matrix)]
graph, value = torch.cuda.CUDAGraph(), torch.zeros(3, dtype=torch.long, device="cuda")
with torch.cuda.graph(graph):
    side_by_side()
    value += 1
times.append(timed(graph.replay))
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()): matrix.sum().item()
    times.append("")
except RuntimeError as error:
    times.append(str(error).splitlines()[0])
torch.cuda.synchronize()
print(json.dumps([*times, value.tolist()]))
""",
    )
    assert sequential == pytest.approx(100, abs=1)
    assert parallel == pytest.approx(50, abs=1)
    assert product == pytest.approx(2 * 4096**3 / 67e9, rel=0.02)  # at the data sheet's 67 TFLOP/s, in ms
    assert replayed == pytest.approx(100, abs=1)  # a graph's work runs one after the other
    assert "capturing" in refused or "capture" in refused
    assert replays == [1, 1, 1]


# NCCL, under torch's process groups


SCRIPT = Path(__file__).parent / "rank_collectives.py"


def test_collectives_move_what_they_say(make_machine: MakeMachine, start: Callable[..., subprocess.Popen[str]]) -> None:
    ranks = 3
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    machine = make_machine(["h100-80gb"] * ranks)
    programs = [start(machine, SCRIPT, RANK=str(rank), **job) for rank in range(ranks)]
    for rank, program in enumerate(programs):
        output, errors = program.communicate(timeout=150)
        assert program.returncode == 0, errors
        result = json.loads(output.splitlines()[-1])
        assert result["all_reduce"] == [6, 6]
        assert result["average"] == [2, 2]
        assert result["broadcast"] == [10]
        assert result["all_gather"] == [0, 1, 2]
        assert result["reduce_scatter"] == [3 * rank + 3]
        assert result["all_to_all"] == [rank, 10 + rank, 20 + rank]
        assert result["ring"] == [(rank - 1) % ranks]
        assert result["large"] == [0, 3, 3 * 2_999_999]
        assert result["objects"] == [2, "", "y", "yy"]
        assert result.get("received", rank != 1)


# MIG from the pick to the report


TRAIN = """
import json, os, sys
import lightning.pytorch, torch
sys.modules["matplotlib"] = None  # a report without a picture
from lightning_gpu_tools import FreeMemoryCUDAAccelerator, GPUUtilizationMonitor, list_gpus, load_report
from lightning_gpu_tools.selection import claims, cuda, placement

class LitModel(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

instances = [one.uuid for one in list_gpus()[0].mig_instances]
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(instances[1:])  # 1g would be first in this order, and 2g has more memory
started = []
place = placement.place
placement.place = lambda *options: (started.append(cuda.is_initialized()), place(*options))[1]
folder = os.environ["FOLDER"]
trainer = lightning.pytorch.Trainer(
    accelerator=FreeMemoryCUDAAccelerator(), devices=1, max_epochs=1, enable_progress_bar=False, logger=False,
    enable_checkpointing=False, default_root_dir=folder, callbacks=[GPUUtilizationMonitor(interval_s=0.05)])
trainer.fit(LitModel(), torch.utils.data.DataLoader([torch.zeros(1024)] * 200, batch_size=1))
assert started == [False], started  # although the mask names instances
assert os.environ["CUDA_VISIBLE_DEVICES"] == instances[1]
report = load_report(folder)
(gpu,), (account,) = report.gpus, report.memory
with claims.read_ledger(claims.directory()) as ledger:
    claimed = [list(claim.uuids) for claim in ledger.claims()]
print(json.dumps({
    "picked": instances[1], "uuid": gpu.uuid, "name": gpu.name, "account": account.uuid, "claimed": claimed,
    "contexts": [one.uuid for gpu in list_gpus() for one in gpu.mig_instances or [gpu] if one.processes],
    "total": gpu.memory_total_bytes, "mean": gpu.utilization_percent_mean, "unseen": report.unseen,
    "note": report.gpu_note}))
"""


def test_an_instance_is_picked_claimed_used_and_reported(
    make_machine: MakeMachine, answer: Answer, tmp_path: Path
) -> None:
    machine = make_machine(["h100-80gb", "h100-80gb"], mig={0: (3, 2, 1)})
    place = {"LIGHTNING_GPU_TOOLS_CLAIMS_DIR": str(tmp_path / "claims"), "FOLDER": str(tmp_path)}
    seen = answer(machine, TRAIN, **place)
    picked = seen["picked"]
    assert (seen["uuid"], seen["account"], seen["claimed"], seen["contexts"]) == (picked, picked, [[picked]], [picked])
    assert seen["name"] == "NVIDIA H100 80GB HBM3 MIG 2g.20gb"
    assert seen["total"] < 48 * 2**30
    assert seen["mean"] is not None
    assert seen["note"] is None
    assert not seen["unseen"]
