"""load_weights for models and files of other kinds: sharded, tied, on the meta device, without shape."""

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from torch import nn
from wrapped_models import TiedTransformer, compiled, contents, fill

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import CheckpointMismatchError


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


def three_to_two() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def full_weights(net: nn.Module, path: Path) -> Any:
    """Return the weights of a model as the refusal of its file advises to save them."""
    with pytest.raises(CheckpointMismatchError) as refusal:
        load_weights(three_to_two(), path)
    words = r"save the full weights from (\S+)\.(\w+) with (StateDictOptions.*?\))"
    module, function, options = re.search(words, str(refusal.value)).groups()  # type: ignore[union-attr]
    advised = importlib.import_module(module)
    return getattr(advised, function)(net, options=eval(options, vars(advised)))


@pytest.mark.follows("The checkpoint holds FSDP's flat parameters")
@pytest.mark.usefixtures("one_process_group")
@pytest.mark.filterwarnings("ignore")
def test_flat_parameters_are_saved_again_as_weights(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(three_to_two(), device_id=torch.device("cpu"), use_orig_params=False)
    with FullyShardedDataParallel.summon_full_params(sharded):
        fill(sharded, 1)
    torch.save({name: parameter.detach() for name, parameter in sharded.named_parameters()}, tmp_path / "a.pt")
    torch.save(full_weights(sharded, tmp_path / "a.pt"), tmp_path / "b.pt")
    load_weights(loaded := three_to_two(), tmp_path / "b.pt")
    fill(twin := three_to_two(), 1)
    assert contents(loaded) == contents(twin)


def save_parts(folder: Path, rank: int) -> None:
    """Save this rank's part of the weights in plain.pt, what its refusal advises, and a copy of them all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    net, whole = three_to_two(), torch.load(folder / "plain.pt")
    fully_shard(net, mesh=mesh)
    load_weights(net, folder / "plain.pt")
    torch.save(net.state_dict(), folder / f"{rank}.pt")
    full = full_weights(net, folder / f"{rank}.pt")
    copies = {key: DTensor.from_local(value, mesh, [Replicate()], run_check=False) for key, value in whole.items()}
    if rank == 0:
        torch.save(full, folder / "full.pt")
        torch.save(copies, folder / "copies.pt")
    torch.distributed.barrier()  # who ends first must not end the other's last exchange
    torch.distributed.destroy_process_group()


@pytest.mark.follows("It holds one part of a sharded checkpoint")
@needs_fsdp2
def test_one_part_of_sharded_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(three_to_two().state_dict(), tmp_path / "plain.pt")
    ended = run_ranks(tmp_path, save_parts)
    assert [rank.returncode for rank in ended] == [0, 0], [rank.stderr for rank in ended]
    words = r'0\.pt does not fit Sequential\. It holds one part of a sharded checkpoint: "0\.weight" is the part'
    with pytest.raises(CheckpointMismatchError, match=words):
        load_weights(three_to_two(), tmp_path / "0.pt")
    plain = torch.load(tmp_path / "plain.pt")
    for name in ("copies.pt", "full.pt"):
        load_weights(target := three_to_two(), tmp_path / name)
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
    load_weights(target, tmp_path / "a.pt")
    target.positions = None
    assert contents(target) == contents(source)
    assert target.head.weight is target.embed.weight
    (tmp_path / "a.pt").write_bytes(bytes((tmp_path / "a.pt").stat().st_size))
    assert contents(target) == contents(source)


@pytest.mark.parametrize("wrap", [lambda net: net, compiled, nn.DataParallel])
def test_statistics_that_a_norm_does_not_keep_are_left_out(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    old = {key: value for key, value in source.state_dict().items() if "tracked" not in key}  # as torch 0.3 saved it
    torch.save(old, tmp_path / "a.pt")
    target = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4))
    with pytest.raises(CheckpointMismatchError, match=r"not in the model: 1\.running_mean, 1\.running_var"):
        load_weights(wrap(target), tmp_path / "a.pt")
    report = load_weights(wrap(target), tmp_path / "a.pt", strict=False)
    assert report.unexpected == ("1.running_mean", "1.running_var")
    assert torch.equal(target[0].weight, source[0].weight)


def test_safetensors_load_also_without_a_list_of_tied_names(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    source, target = TiedTransformer(), TiedTransformer()
    save_model(source, str(tmp_path / "a.safetensors"))  # it stores only one of the two tied names
    load_weights(compiled(target), tmp_path / "a.safetensors")
    assert contents(target) == contents(source)
