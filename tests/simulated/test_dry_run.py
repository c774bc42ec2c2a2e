"""``dry-run`` as a program: unmodified trainings on simulated GPUs, under torch's own CUDA build."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from lightning_gpu_tools.simulated import Machine

GIB = 2**30
LOOP = """
import sys, torch
from torch import nn
width, batch = 4096, int(sys.argv[1])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)
    def forward(self, inputs):
        return self.layer(inputs).sigmoid()
net = torch.compile(Net().cuda())
optimizer = torch.optim.Adam(net.parameters())
for step in range(100):
    loss = net(torch.empty(batch, width, device="cuda")).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item(), flush=True)
"""


class Ended(NamedTuple):
    code: int
    found: dict[str, Any]
    errors: str


DryRun = Callable[..., Ended]


@pytest.fixture
def dry_run(make_machine: Callable[..., Machine], tmp_path: Path) -> DryRun:
    """``dry_run(code, "4", options=["--steps", "2"])``: a dry run of a script with these arguments."""
    make_machine()  # or the test is skipped

    def run(code: str, *arguments: str, options: list[str], program: Sequence[str] = (sys.executable,)) -> Ended:
        (tmp_path / "train.py").write_text(code)
        command = [sys.executable, "-m", "lightning_gpu_tools", "dry-run", "--format", "json", *options, "--"]
        ended = subprocess.run(
            [*command, *program, "train.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert not [*tmp_path.glob("lightning-gpu-tools-*")], ended.stderr
        return Ended(ended.returncode, json.loads(ended.stdout or "{}"), ended.stderr)

    return run


def test_a_plain_loop_that_fits(dry_run: DryRun) -> None:
    code, found, errors = dry_run(LOOP, "65536", options=["--gpu", "a100-40gb"])
    assert code == 0, errors
    assert "step 1" in errors  # with --format json, its output goes where it does not disturb
    assert "step 2" not in errors
    weights, batch = 4096 * 4096 * 4, 65536 * 4096 * 4
    parts = found["parts_bytes"]
    assert parts["parameters"] == weights
    assert parts["optimizer_states"] == 2 * weights
    assert "gradient_buckets" not in parts
    # The batch, what the layer returns, and its sigmoid.
    assert parts["activations"] + parts.get("other_tensors", 0) == pytest.approx(3 * batch, rel=0.02)
    assert parts["gradients"] == weights
    assert found["needed_bytes"] == sum(parts.values())
    assert found["peak"] == [2, "forward", "train.py", 10, "forward"]
    lines = {(one[3], one[4]): one[0] for one in found["lines"] if one[2] == "forward"}
    assert lines["train.py", 10] == 2 * batch
    assert found["fits_on"]["a100-80gb"] == "yes"
    assert "No validation ran, so its peak is unknown." in found["unknown"]


def test_a_plain_loop_that_does_not_fit(dry_run: DryRun) -> None:
    code, found, errors = dry_run(LOOP, "400000", options=["--gpu", "t4"])
    assert code == 1, errors
    assert "OutOfMemoryError" in errors
    assert "failed in forward of step 1, at train.py:10 in forward." in found["reason"]
    assert found["needed_bytes"] > 3 * 400000 * 4096 * 4
    assert found["fits_on"]["h100-80gb"] == "perhaps"  # of another compute capability


def test_the_largest_batch_by_trials_of_a_shell_script(dry_run: DryRun, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f'{sys.executable} "$1" "${{@: -1}}"')  # the last argument
    options = ["--gpu", "t4", "--vary", "{}"]
    code, found, errors = dry_run(LOOP, "65536", options=options, program=["bash", "run.sh"])
    assert code == 0, errors
    fits = [int(number) for number, does in found["trials"].items() if does]
    too_large = [int(number) for number, does in found["trials"].items() if not does]
    assert 0 < max(fits) < min(too_large) <= 1.06 * max(fits)
    assert found["largest_batch"] == pytest.approx(max(fits), rel=0.06)


LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)
    def training_step(self, batch, batch_idx):
        return self.layer(batch.repeat(1, 8)).sum()
    def validation_step(self, batch, batch_idx):
        self.layer(batch.repeat(1, 8))
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
if __name__ == "__main__":
    data = DataLoader(torch.zeros(64, 128), batch_size=8, num_workers=1)
    trainer = Trainer(accelerator="gpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), data, data)
"""


def test_a_trainer_on_two_gpus(dry_run: DryRun) -> None:
    code, found, errors = dry_run(LIGHTNING, options=["--gpu", "t4", "-n", "2"])
    assert code == 0, errors
    assert found["batch_size"] == 8
    assert any("NCCL" in one for one in found["unknown"])  # two ranks
    assert found["parts_bytes"]["parameters"] == 1025 * 1024 * 4
    assert "gradient_buckets" in found["parts_bytes"]
    assert not any("validation" in one for one in found["unknown"])


def test_ranks_of_torchrun_of_which_one_has_too_little(dry_run: DryRun) -> None:
    code = """
import os, torch
from torch import nn
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(net.parameters())
for step in range(100):
    kept = torch.empty(rank * 20 * 2**30, dtype=torch.uint8, device="cuda")
    net(torch.zeros(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = dry_run(code, options=["--gpu", "t4", "-n", "2"], program=torchrun)
    assert ended.code == 1, ended.errors
    assert "failed before the first step, at train.py:10 in <module>." in ended.found["reason"]
    assert ended.found["needed_bytes"] > 20 * GIB


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import torch\ntorch.zeros(1, device='cuda')\nopen('no such file')", "FileNotFoundError"),
        (
            "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'\n"
            "import torch; torch.zeros(1, device='cuda')",
            "backend:cudaMallocAsync is not simulated",
        ),
        (
            LIGHTNING,
            "only has: [0] before the end of its first training step. Simulate as many GPUs as the command uses: add "
            "-n 2 to dry-run.",
        ),
    ],
)
def test_runs_that_show_nothing(dry_run: DryRun, code: str, reason: str) -> None:
    ended = dry_run(code, options=["--gpu", "t4"])
    assert ended.code == 3
    assert ended.found["verdict"] == "cannot_be_told"
    assert reason in ended.found["reason"]
    if "FileNotFoundError" in reason:
        assert "Traceback (most recent call last):\n  File " in ended.errors


def test_inference_and_the_users_own_sitecustomize(
    dry_run: DryRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.mine = 1024")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")]))
    code = """
import torch
net = torch.nn.Linear(mine, mine, device="cuda")
with torch.no_grad():
    net(torch.empty(2**20, mine, device="cuda"))
"""
    ended = dry_run(code, options=["--gpu", "t4"])
    assert ended.code == 0, ended.errors
    assert ended.found["parts_bytes"]["parameters"] == 1025 * 1024 * 4
    assert ended.found["parts_bytes"]["activations"] + ended.found["parts_bytes"]["other_tensors"] >= 8 * GIB
    assert "before the end of its first training step" in ended.found["unknown"][0]


def test_generation_ends_at_its_maximum_length(dry_run: DryRun) -> None:
    pytest.importorskip("transformers")
    code = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100)).cuda()
lengths = []
for _ in range(3):
    torch.randint(1, 2, (10_000,)).cuda()  # leaves numbers in the memory
    prompt = torch.ones(2, 4, dtype=torch.long, device="cuda")
    lengths.append(net.generate(prompt, max_length=25).shape[1])
    assert net.generate(prompt, max_new_tokens=9, num_beams=2).shape[1] <= 13
print("lengths", lengths)
"""
    ended = dry_run(code, options=["--gpu", "t4"])
    assert ended.code == 0, ended.errors
    assert "lengths [25, 25, 25]" in ended.errors
    assert "Generated text has the maximum length and arbitrary tokens." in ended.found["unknown"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_all_its_processes(make_machine: Callable[..., Machine], tmp_path: Path, how: int) -> None:
    make_machine()
    code = "import torch, time; torch.zeros(1, device='cuda'); print('here', flush=True); time.sleep(600)"
    inner = f'{sys.executable} -c "{code}"; true'
    command = [sys.executable, "-m", "lightning_gpu_tools", "dry-run", "--gpu", "t4", "--", "bash", "-c", inner]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "here\n"
        children = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(how)
        assert not psutil.wait_procs(children, timeout=30)[1]
    assert program.returncode == (130 if how == signal.SIGINT else -9)
    assert not [*tmp_path.glob("lightning-gpu-tools-*")]


# Peaks of real trainings on a simulated Tesla T4, within fixed bounds of those measured on a real one


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "dry_run_peaks.py"
MISSING = [name for name in ("transformers", "torchvision") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: run .ci/simulated_gpu, which installs them")
def test_peaks_of_real_networks_are_those_of_a_real_t4(
    make_machine: Callable[..., Machine], start: Callable[..., Any], tmp_path: Path
) -> None:
    output = tmp_path / "peaks.json"
    program = start(make_machine(["t4"]), BENCHMARK, "--output", str(output))
    _, errors = program.communicate(timeout=170)
    assert program.returncode == 0, errors
    found = json.loads(output.read_text())
    assert found["bounds"] == {"allocated": [-0.03, 0.08], "reserved": [-0.08, 0.12]}
    assert len(found["runs"]) == 8
    assert all(run["within"] for run in found["runs"]), [(run["model"], run["error"]) for run in found["runs"]]
