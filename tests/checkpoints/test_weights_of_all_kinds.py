"""load_weights for models and files of other kinds: sharded, tied, on the meta device, without shape, from a URL."""

import functools
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Exploit
from lightning.pytorch import LightningModule
from torch import nn
from wrapped_models import TiedTransformer, compiled, contents, fill

from lightning_gpu_tools import load_from_checkpoint, load_weights
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import CheckpointMismatchError, UnsafeCheckpointError


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.filterwarnings("ignore")
def test_fsdp_and_ddp_load_from_the_bare_net_and_back(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))

    def sharded(inner: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)

    bare = net()
    torch.save(bare.state_dict(), tmp_path / "bare.pt")
    for wrap in (
        nn.parallel.DistributedDataParallel,
        lambda inner: compiled(nn.parallel.DistributedDataParallel(inner)),
        lambda inner: nn.parallel.DistributedDataParallel(checkpoint_wrapper(inner)),
        sharded,
        lambda inner: compiled(sharded(checkpoint_wrapper(inner))),
    ):
        target = wrap(net())
        load_weights(target, tmp_path / "bare.pt")
        torch.save(target.state_dict(), tmp_path / "wrapped.pt")
        # The names that named_parameters() shows, which hooks hide from state_dict().
        live = {name: value.detach().clone() for name, value in target.named_parameters()}
        torch.save(live, tmp_path / "live.pt")
        for name in ("wrapped.pt", "live.pt"):
            back = net()
            load_weights(back, tmp_path / name)
            assert contents(back) == contents(bare)


needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on a CPU"
)


PROGRAM = """
import importlib, re, sys, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from lightning_gpu_tools import load_weights
from lightning_gpu_tools.errors import CheckpointMismatchError

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
net, back = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
mesh = init_device_mesh("cpu", (2,))
fully_shard(net, mesh=mesh)
load_weights(net, f"{folder}/plain.pt")
torch.save(net.state_dict(), f"{folder}/{rank}.pt")
whole = torch.load(f"{folder}/plain.pt")
try:
    load_weights(back, f"{folder}/{rank}.pt")
except CheckpointMismatchError as error:
    assert 'holds one part of a sharded checkpoint: "0.weight" is the part of rank' in str(error)
    advice = re.search(r"save the full weights from (\\S+)\\.(\\w+) with (StateDictOptions.*?\\))", str(error))
    advised = importlib.import_module(advice[1])
    full = getattr(advised, advice[2])(net, options=eval(advice[3], vars(advised)))
    if rank == 0:
        torch.save(full, f"{folder}/full.pt")
else:
    raise AssertionError("took a part for the whole")
copies = {key: DTensor.from_local(value, mesh, [Replicate()], run_check=False) for key, value in whole.items()}
if rank == 0:
    torch.save(copies, f"{folder}/copies.pt")
torch.distributed.barrier()
load_weights(back, f"{folder}/copies.pt")
torch.distributed.barrier()  # who ends first must not end the other's last exchange
torch.distributed.destroy_process_group()
"""


@pytest.mark.follows("It holds one part of a sharded checkpoint")
@needs_fsdp2
def test_one_part_of_sharded_weights_is_refused(
    run_python: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).state_dict(), tmp_path / "plain.pt")
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda rank: run_python("-c", PROGRAM, str(rank), str(tmp_path)), range(2)))
    assert [answer.returncode for answer in answers] == [0, 0], [answer.stderr for answer in answers]
    words = r'0\.pt does not fit Sequential\. It holds one part of a sharded checkpoint: "0\.weight"'
    with pytest.raises(CheckpointMismatchError, match=words):
        load_weights(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), tmp_path / "0.pt")
    plain = torch.load(tmp_path / "plain.pt")
    for name in ("copies.pt", "full.pt"):
        target = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        load_weights(target, tmp_path / name)
        assert all(torch.equal(value, plain[key]) for key, value in target.state_dict().items())
    converted = str(tmp_path / "a.safetensors")
    assert main(["checkpoint", "convert", str(tmp_path / "0.pt"), converted]) == 1
    assert "0.pt: It holds one part of a sharded checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(tmp_path / "copies.pt"), converted]) == 0


def test_a_meta_model_gets_tensors_of_its_own(tmp_path: Path) -> None:
    source = TiedTransformer()
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "a.pt")
    with torch.device("meta"):
        target = TiedTransformer()
        target.register_buffer("positions", torch.ones(3), persistent=False)
    with pytest.warns(UserWarning, match="no values for positions, which are still on the meta device"):
        load_weights(target, tmp_path / "a.pt")
    target.positions = None
    assert contents(target) == contents(source)
    assert target.head.weight is target.embed.weight
    (tmp_path / "a.pt").write_bytes(bytes((tmp_path / "a.pt").stat().st_size))
    assert contents(target) == contents(source)


def test_only_what_is_on_the_meta_device_is_replaced(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch.save(source.state_dict(), tmp_path / "a.pt")
    target = nn.Sequential(nn.Linear(2, 2, device="meta", dtype=torch.bfloat16), nn.Linear(2, 2, dtype=torch.float64))
    kept = target[1].weight  # an optimizer may hold it
    load_weights(target, tmp_path / "a.pt")
    assert target[1].weight is kept
    assert [parameter.dtype for parameter in target.parameters()] == [torch.bfloat16] * 2 + [torch.float64] * 2
    assert torch.equal(target[0].weight, source[0].weight.bfloat16())


def translating(net: nn.Module) -> nn.Module:
    net.register_load_state_dict_pre_hook(lambda *_: None)
    return net


@pytest.mark.follows("create the model with ", "report the rest, use strict=False")
@pytest.mark.parametrize("prepare", [lambda net: net, translating, nn.DataParallel])
def test_statistics_that_a_norm_does_not_keep_are_left_out(
    prepare: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    def net(**options: Any) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, **options))

    source = net(track_running_stats=True)
    fill(source, 1)
    old = {key: value for key, value in source.state_dict().items() if "tracked" not in key}  # as torch 0.3 saved it
    torch.save(old, tmp_path / "a.pt")
    with pytest.raises(CheckpointMismatchError, match=r"not in the model: 1\.running_mean, 1\.running_var") as refusal:
        load_weights(prepare(net()), tmp_path / "a.pt")
    for advice, kept in (
        (r"use (strict=False)", ()),
        (r"create the model with (\w+=True)", ("1.num_batches_tracked",)),
    ):
        found = re.search(advice, str(refusal.value))
        assert found is not None
        options = eval(f"dict({found[1]})")
        target = net(**options) if kept else net()
        report = load_weights(prepare(target), tmp_path / "a.pt", strict=options.get("strict", True))
        assert torch.equal(target[0].weight, source[0].weight)
        assert report.unexpected == (() if kept else ("1.running_mean", "1.running_var"))
        assert len(report.kept) == len(kept)
    assert torch.equal(target[1].running_var, source[1].running_var)


def test_safetensors_load_also_without_a_list_of_tied_names(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    source, target = TiedTransformer(), TiedTransformer()
    save_model(source, str(tmp_path / "a.safetensors"))  # it stores only one of the two tied names
    load_weights(compiled(target), tmp_path / "a.safetensors")
    assert contents(target) == contents(source)


# -- URLs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A web server on this machine that serves ``tmp_path``."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_weights_from_a_url_are_only_weights(url: str, tmp_path: Path) -> None:
    source, target = nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "good.pt")
    load_weights(target, f"{url}/good.pt?X-Amz-Signature={'a' * 300}")  # longer than a name of a file can be
    assert torch.equal(target.weight, source.module.weight)
    torch.save({"state_dict": source.state_dict(), "x": Exploit(tmp_path / "it ran")}, tmp_path / "bad.pt")
    assert load_weights(target, f"{url}/bad.pt").unread == ("posix.mkdir",)
    with pytest.raises(UnsafeCheckpointError, match=rf"{url}/bad\.pt holds more than plain data"):
        load_from_checkpoint(LightningModule, f"{url}/bad.pt")
    assert not (tmp_path / "it ran").exists()
    with pytest.raises(FileNotFoundError, match=rf"Checkpoint file not found: {url}/gone\.pt"):
        load_weights(target, f"{url}/gone.pt")
