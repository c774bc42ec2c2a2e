"""load_weights and load_from_checkpoint on real files, real architectures and real wrappers."""

import copy
import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch import __version__ as lightning_version
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools import (
    AmbiguousCheckpointError,
    BrokenCheckpointError,
    CheckpointMismatchError,
    UnsafeCheckpointError,
    load_from_checkpoint,
    load_weights,
)
from lightning_gpu_tools.checkpoints.torch_files import write_checkpoint


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.downsample = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))


def resnet() -> nn.Module:
    """As timm names its parts."""
    net = nn.Sequential()
    net.conv1, net.bn1 = nn.Conv2d(3, 4, 7, bias=False), nn.BatchNorm2d(4)
    for stage in range(1, 4):
        net.add_module(f"layer{stage}", nn.Sequential(*(ResidualBlock(4) for _ in range(2))))
    net.fc = nn.Linear(4, 10)
    return net


class TiedTransformer(nn.Module):
    """Embedding and output share one matrix, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


def quantized() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.SyncBatchNorm(3), nn.LSTM(3, 4))


def recurrent_with_module_child() -> nn.Module:
    return nn.ModuleDict({"module": nn.GRU(3, 4), "head": nn.ModuleList([nn.Linear(4, 1), nn.PReLU()])})


ARCHITECTURES = [resnet, TiedTransformer, quantized, normed, recurrent_with_module_child]


class System(nn.Module):
    """A net as the attribute of a larger thing, as in a LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.model = net


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "compile(DataParallel)": lambda net: compiled(nn.DataParallel(net)),
    "DataParallel(compile(DataParallel))": lambda net: nn.DataParallel(compiled(nn.DataParallel(net))),
    "AveragedModel": AveragedModel,
    "AveragedModel(DataParallel)": lambda net: AveragedModel(nn.DataParallel(net)),
    "System": System,
    "compile(System(DataParallel))": lambda net: compiled(System(nn.DataParallel(net))),
    "DataParallel(System(compile))": lambda net: nn.DataParallel(System(compiled(net))),
}


def fill(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.dtype.is_floating_point:
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator))


def contents(net: nn.Module) -> list[Any]:
    tensors = [t.tolist() for name, t in (*net.named_parameters(), *net.named_buffers()) if "n_averaged" not in name]
    packed = [
        m.weight().dequantize().tolist()
        for m in net.modules()
        if "quantized" in type(m).__module__ and hasattr(m, "weight")
    ]
    return tensors + packed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_wrapping_of_a_real_architecture_loads_into_any_other(
    architecture: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source_net, target_net = architecture(), architecture()
    if architecture is quantized:
        WRAPPERS = {name: wrap for name, wrap in WRAPPINGS.items() if "Averaged" not in name}
    else:
        WRAPPERS = WRAPPINGS
        fill(source_net, 1)
        fill(target_net, 2)
    expected = contents(source_net)
    for saved_as, wrap_source in WRAPPERS.items():
        torch.save(wrap_source(copy.deepcopy(source_net)).state_dict(), tmp_path / "a.pt")
        for loaded_as, wrap_target in WRAPPERS.items():
            target = wrap_target(copy.deepcopy(target_net))
            report = load_weights(target, tmp_path / "a.pt")
            assert contents(target) == expected, (saved_as, loaded_as, str(report))


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    net = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    torch.save({"state_dict": net.state_dict(), "epoch": 1}, tmp_path / "last.ckpt")
    report = load_weights(nn.Sequential(nn.Linear(2, 2)), tmp_path / "last.ckpt")
    assert str(report) == 'last.ckpt: loaded 2 weights; removed "module." from 2 keys'
    assert report.entry == "state_dict"
    assert report.loaded == ("0.weight", "0.bias")
    assert report.renamed == {"module.0.weight": "0.weight", "module.0.bias": "0.bias"}
    averaged = load_weights(AveragedModel(net), tmp_path / "last.ckpt")
    assert str(averaged) == 'last.ckpt: loaded 2 weights; added "module." to 2 keys; kept: n_averaged'
    again = load_weights(net, tmp_path / "last.ckpt")
    assert str(again) == "last.ckpt: loaded 2 weights"
    assert again.renamed == {}


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)).state_dict(), tmp_path / "a.pt")
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(CheckpointMismatchError, match=r"a\.pt does not fit Sequential\. 2 of the model's 4 keys fit"):
        load_weights(target, tmp_path / "a.pt")
    assert all(torch.equal(before[key], value) for key, value in target.state_dict().items())
    report = load_weights(target, tmp_path / "a.pt", strict=False)
    assert report.mismatched == (("1.weight", (3, 2), (4, 2)), ("1.bias", (3,), (4,)))
    assert not torch.equal(before["0.weight"], target[0].weight)
    assert torch.equal(before["1.weight"], target[1].weight)
    assert "other shape: 1.weight, 1.bias" in str(report)


class Resized(nn.Module):
    """Takes its positions from a file with more or fewer of them, as vision transformers do."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(positions, 2))
        self.register_load_state_dict_pre_hook(self.resize)

    @staticmethod
    def resize(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}pos" in state_dict:
            state_dict[f"{prefix}pos"] = state_dict[f"{prefix}pos"][:1].expand(module.pos.shape)


class Translating(nn.Module):
    """Parts whose hooks translate names and shapes; its head is of its own size."""

    def __init__(self, weight_norm: Callable[[nn.Module], nn.Module], positions: int, classes: int) -> None:
        super().__init__()
        self.conv, self.patches = weight_norm(nn.Conv1d(2, 2, 3)), nn.DataParallel(Resized(positions))
        self.out, self.head = nn.Linear(2, 2), weight_norm(nn.Linear(2, classes))


@pytest.mark.parametrize("strict", [True, False])
def test_what_the_models_hooks_translate_is_loaded_and_no_loss_in_the_report(strict: bool, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        source = Translating(nn.utils.weight_norm, 3, classes=4)
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "a.pt")
    target = Translating(parametrizations.weight_norm, 5, classes=4)
    report = load_weights(target, tmp_path / "a.pt", strict=strict)
    assert torch.allclose(target.conv.weight, source.conv.weight)
    assert torch.equal(target.patches.module.pos, source.patches.module.pos[:1].expand(5, 2))
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert report.loaded == tuple(target.state_dict())
    assert str(report) == 'a.pt: loaded 9 weights; removed "module." from 4 keys'


def test_another_shape_below_hooks_that_do_not_change_it_is_left_out_if_not_strict(tmp_path: Path) -> None:
    source = Translating(parametrizations.weight_norm, 3, classes=4)
    target = Translating(parametrizations.weight_norm, 3, classes=7)
    torch.save(source.state_dict(), tmp_path / "a.pt")
    before = target.head.weight.clone()
    report = load_weights(target, tmp_path / "a.pt", strict=False)
    assert torch.allclose(target.conv.weight, source.conv.weight)
    assert torch.equal(target.head.weight, before)
    own = ("head.bias", "head.parametrizations.weight.original0", "head.parametrizations.weight.original1")
    assert tuple(key for key, _, _ in report.mismatched) == own
    assert set(report.loaded) == target.state_dict().keys() - {*own}
    assert report.missing == ()
    with pytest.raises(CheckpointMismatchError, match=r"size mismatch for head(.|\n)*the model may be partly loaded"):
        load_weights(target, tmp_path / "a.pt")


KEYS = sorted(Translating(parametrizations.weight_norm, 3, classes=4).state_dict())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    absent=st.sets(st.sampled_from(KEYS), max_size=3),
    resized=st.sets(st.sampled_from(KEYS), max_size=3),
    foreign=st.sets(st.sampled_from(["x", "module.x", "conv.x", "module.conv.x", "head.x.y"])),
    wrapped=st.booleans(),
)
def test_the_report_of_a_partial_load_is_true(
    tmp_path_factory: pytest.TempPathFactory, absent: set[str], resized: set[str], foreign: set[str], wrapped: bool
) -> None:
    source, target = (Translating(parametrizations.weight_norm, positions, classes=4) for positions in (3, 5))
    fill(source, 1)
    fill(target, 2)
    before = copy.deepcopy(target.state_dict())
    stored = {key: value for key, value in source.state_dict().items() if key not in absent}
    stored |= {key: torch.ones(9, 9, 9) for key in resized if key in stored and "pos" not in key}
    prefix = "module." * wrapped
    path = tmp_path_factory.getbasetemp() / "partial.pt"
    torch.save({f"{prefix}{key}": value for key, value in stored.items()} | dict.fromkeys(foreign, torch.ones(1)), path)
    report = load_weights(target, path, strict=False)
    misfits = {key.removeprefix(prefix) for key, _, _ in report.mismatched}
    assert {*report.loaded, *report.missing, *misfits} == {*before}
    assert len(report.loaded) + len(report.missing) + len(misfits) == len(before)
    assert set(report.missing) == absent
    assert {*report.unexpected, *report.unused} == foreign
    for key, value in target.state_dict().items():
        if key in report.loaded:
            assert torch.equal(value, stored[key][:1].expand(value.shape) if key.endswith("pos") else stored[key])
        else:
            assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    "odd", [torch.eye(3).to_sparse(), 1.5, torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)]
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_torch_cannot_copy_is_refused_before_anything_is_copied(odd: Any, strict: bool, tmp_path: Path) -> None:
    source, target = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    torch.save({**source.state_dict(), "1.weight": odd}, tmp_path / "a.pt")
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(
        CheckpointMismatchError, match=r"cannot copy 1\.weight \(a .* instead of a strided tensor\). Nothing"
    ):
        load_weights(target, tmp_path / "a.pt", strict=strict)
    assert all(torch.equal(before[key], value) for key, value in target.state_dict().items())


def test_what_only_torch_finds_out_is_not_called_harmless(tmp_path: Path) -> None:
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    target.register_load_state_dict_pre_hook(lambda *_: None)  # it might have made up the missing one
    weights = target.state_dict()
    del weights["1.weight"]
    torch.save(weights, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointMismatchError, match=r"Missing.*1\.weight(.|\n)*the model may be partly loaded"
    ) as caught:
        load_weights(target, tmp_path / "a.pt")
    assert "Nothing was changed" not in str(caught.value)


def test_any_entry_can_be_asked_for_also_beside_a_state_dict(tmp_path: Path) -> None:
    one, two, target = (nn.Linear(2, 2) for _ in range(3))
    torch.save({"state_dict": one.state_dict(), "state_dict_ema": two.state_dict()}, tmp_path / "a.pt")
    for root, expected in ((None, one), ("state_dict_ema", two), ("state_dict", one)):
        load_weights(target, tmp_path / "a.pt", root=root)
        assert torch.equal(target.weight, expected.weight)
    assert torch.equal(load_from_checkpoint(Lit, tmp_path / "a.pt", root="state_dict_ema").net.weight, two.weight)


def test_two_sets_of_weights_need_a_word(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save({"model": one.state_dict(), "ema": two.state_dict(), "optimizer": {"state": {}, "param_groups": []}},
               tmp_path / "a.pt")  # fmt: skip
    with pytest.raises(AmbiguousCheckpointError, match=r'"model" and "ema".*root="model" or root="ema"'):
        load_weights(nn.Linear(2, 2), tmp_path / "a.pt")
    target = nn.Linear(2, 2)
    assert load_weights(target, tmp_path / "a.pt", root="ema").entry == "ema"
    assert torch.equal(target.weight, two.weight)
    torch.save({"state": {"model": {f"net.{k}": v for k, v in one.state_dict().items()}}}, tmp_path / "b.pt")
    assert load_weights(target, tmp_path / "b.pt").entry == "state.model"
    assert load_weights(target, tmp_path / "b.pt", root="state.model.net.").root == "net."
    assert torch.equal(target.weight, one.weight)


def test_what_holds_no_weights_says_what_it_holds(tmp_path: Path) -> None:
    for content, words in (([1, 2], "a list"), ({"epoch": 1, "lr": 2}, "a dictionary with epoch, lr"), (7, "a int")):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(BrokenCheckpointError, match=f"a.pt: it holds no weights but {words}"):
            load_weights(nn.Linear(2, 2), tmp_path / "a.pt")


def test_wrappers_of_packages_that_are_not_installed_are_known_by_name(tmp_path: Path) -> None:
    class DeepSpeedEngine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"
    source, target = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    torch.save(source.state_dict(), tmp_path / "a.pt")
    report = load_weights(DeepSpeedEngine(target), tmp_path / "a.pt")
    assert report.renamed == {"0.weight": "module.0.weight", "0.bias": "module.0.bias"}
    assert torch.equal(source[0].weight, target[0].weight)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.filterwarnings("ignore")
def test_what_fsdp_and_ddp_wrap_loads_into_the_bare_net_and_back(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("meta", [True, False])
def test_sharded_parameters_and_plain_files_load_into_each_other(meta: bool, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def partly_sharded() -> nn.Module:
        with torch.device("meta" if meta else "cpu"):
            net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(net[1], mesh=init_device_mesh("cpu", (1,)))
        return net

    source, sharded, again = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), partly_sharded(), partly_sharded()
    back = copy.deepcopy(source)
    fill(back, 1)
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    load_weights(sharded, tmp_path / "plain.pt")
    torch.save(nn.DataParallel(sharded).state_dict(), tmp_path / "sharded.pt")
    for target in (back, again):
        load_weights(target, tmp_path / "sharded.pt")
    assert contents(back) == contents(source)
    assert [p.full_tensor().tolist() for p in again[1].parameters()] == contents(source[1])
    assert torch.equal(again(torch.ones(1, 2)), source(torch.ones(1, 2)))


PROGRAM = """
import sys, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lightning_gpu_tools import load_weights

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
net, back = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
load_weights(net, f"{folder}/plain.pt")
torch.save(net.state_dict(), f"{folder}/{rank}.pt")
load_weights(back, f"{folder}/{rank}.pt")
whole = torch.load(f"{folder}/plain.pt")
assert all(torch.equal(value, whole[key]) for key, value in back.state_dict().items())
torch.distributed.destroy_process_group()
"""


def test_two_processes_load_their_parts_and_one_alone_is_told_that_it_has_one(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).state_dict(), tmp_path / "plain.pt")
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda rank: run_python("-c", PROGRAM, str(rank), str(tmp_path)), range(2)))
    assert [answer.returncode for answer in answers] == [0, 0], answers[0].stderr
    alone = "import sys, torch; from lightning_gpu_tools import load_weights\n"
    alone += "load_weights(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)), sys.argv[1])"
    answer = run_python("-c", alone, str(tmp_path / "0.pt"))
    assert "Torch cannot copy 0.weight (a part of a strided tensor instead of a strided tensor)" in answer.stderr


def test_tied_weights_load_from_a_file_that_has_one_of_them(tmp_path: Path) -> None:
    source, target = TiedTransformer(), TiedTransformer()
    weights = source.state_dict()
    del weights["head.weight"]
    torch.save(weights, tmp_path / "a.pt")
    load_weights(nn.DataParallel(target), tmp_path / "a.pt")
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert target.head.weight is target.embed.weight


def test_a_model_on_the_meta_device_takes_tensors_of_its_own(tmp_path: Path) -> None:
    source = TiedTransformer()
    torch.save(nn.DataParallel(source).state_dict(), tmp_path / "a.pt")
    with torch.device("meta"):
        target = TiedTransformer()
    load_weights(target, tmp_path / "a.pt")
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


def test_lazy_modules_get_their_shape_from_the_file(tmp_path: Path) -> None:
    source = nn.DataParallel(nn.Sequential(nn.Linear(3, 2)))
    torch.save(source.state_dict(), tmp_path / "a.pt")
    target = nn.Sequential(nn.LazyLinear(2))
    load_weights(target, tmp_path / "a.pt")
    assert torch.equal(target[0].weight, source.module[0].weight)


def test_files_from_before_batch_norm_counted_its_batches(tmp_path: Path) -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    fill(source, 1)
    old = {f"module.{key}": value for key, value in source.state_dict().items() if "tracked" not in key}
    torch.save(old, tmp_path / "a.pt")
    load_weights(target, tmp_path / "a.pt")
    assert torch.equal(target.running_var, source.running_var)
    # In a newer file the same is a fault.
    torch.save({**old, "module.x.num_batches_tracked": torch.tensor(1)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointMismatchError, match="not in the checkpoint: num_batches_tracked"):
        load_weights(target, tmp_path / "a.pt")


def test_old_names_that_a_module_translates_itself_still_load(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))
    torch.save(nn.DataParallel(old).state_dict(), tmp_path / "a.pt")
    target = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)))
    load_weights(target, tmp_path / "a.pt")
    assert torch.allclose(target[0].weight, old[0].weight)


def test_extra_state_and_metrics_keep_nothing_of_the_file(tmp_path: Path) -> None:
    from torchmetrics import CatMetric

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = CatMetric()
            self.metric.persistent(True)
            self.history = torch.zeros(3)

        def get_extra_state(self) -> dict[str, torch.Tensor]:
            return {"history": self.history}

        def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
            self.history = state["history"]

    source = Net()
    source.metric.update(torch.arange(4.0))
    source.history += 5
    path = tmp_path / "a.pt"
    torch.save(nn.DataParallel(source).state_dict(), path)
    target = Net()
    target.metric.update(torch.zeros(1))
    load_weights(target, path)
    path.write_bytes(bytes(path.stat().st_size))
    assert target.history.tolist() == [5, 5, 5]
    assert target.metric.compute().tolist() == [0, 1, 2, 3]


def test_safetensors_load_also_without_a_list_of_tied_names(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    source, target = TiedTransformer(), TiedTransformer()
    save_model(source, str(tmp_path / "a.safetensors"))  # it stores only one of the two tied names
    load_weights(compiled(target), tmp_path / "a.safetensors")
    assert contents(target) == contents(source)


def test_a_safetensors_name_on_a_torch_file_does_not_mislead(tmp_path: Path) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "a.pt")
    (tmp_path / "a.pt").rename(tmp_path / "a.safetensors")
    load_weights(target, tmp_path / "a.safetensors")
    assert torch.equal(source.weight, target.weight)


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


def test_a_signed_url_is_longer_than_a_file_name_may_be(url: str, tmp_path: Path) -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "a.pt")
    load_weights(target, f"{url}/a.pt?X-Amz-Signature={'a' * 300}")
    assert torch.equal(target.weight, source.weight)


def test_weights_from_a_url_are_only_weights(url: str, tmp_path: Path) -> None:
    class Exploit:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            import os

            return os.mkdir, (str(tmp_path / "it ran"),)

    source, target = nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    torch.save(source.state_dict(), tmp_path / "good.pt")
    load_weights(target, f"{url}/good.pt")
    assert torch.equal(target.weight, source.module.weight)
    torch.save({"state_dict": source.state_dict(), "x": Exploit()}, tmp_path / "bad.pt")
    for load in (load_weights, lambda model, path: load_from_checkpoint(Lit, path)):
        with pytest.raises(UnsafeCheckpointError, match=rf"{url}/bad\.pt holds more than plain data"):
            load(target, f"{url}/bad.pt")
    assert not (tmp_path / "it ran").exists()
    with pytest.raises(FileNotFoundError, match=rf"no checkpoint at {url}/gone\.pt"):
        load_weights(target, f"{url}/gone.pt")


# -- load_from_checkpoint ------------------------------------------------------------------------------------------


class Lit(LightningModule):
    def __init__(self, width: int = 2, wrap: str = "plain") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = WRAPPINGS[wrap](nn.Linear(width, width))
        self.trace: list[str] = []

    def configure_model(self) -> None:
        self.trace.append("configure_model")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trace.append(f"on_load_checkpoint {sorted(checkpoint['state_dict'])}")

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.trace.append("load_state_dict")
        return super().load_state_dict(*arguments, **options)


class OneArgument(LightningModule):
    def __init__(self, settings: dict[str, Any], other: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters(settings)
        self.settings, self.other = dict(settings), other
        self.net = nn.Linear(settings["width"], 1)


class AnyArguments(LightningModule):
    def __init__(self, width: int = 2, **rest: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rest = rest
        self.net = nn.Linear(width, 1)


def save_lit(model: LightningModule, path: Path) -> Path:
    checkpoint: dict[str, Any] = {
        "pytorch-lightning_version": lightning_version,
        "epoch": 0,
        "global_step": 0,
        "loops": {},
        "state_dict": model.state_dict(),
        "hyper_parameters": dict(model.hparams),
    }
    if model._hparams_name:
        checkpoint["hparams_name"] = model._hparams_name
    model.on_save_checkpoint(checkpoint)
    write_checkpoint(checkpoint, path)
    return path


def test_hyperparameters_and_hooks_are_lightnings(tmp_path: Path) -> None:
    path = save_lit(Lit(width=3), tmp_path / "a.ckpt")
    mine, theirs = load_from_checkpoint(Lit, path), Lit.load_from_checkpoint(path)
    assert mine.trace == theirs.trace
    assert dict(mine.hparams) == dict(theirs.hparams) == {"width": 3, "wrap": "plain"}
    assert torch.equal(mine.net.weight, theirs.net.weight)


@pytest.mark.parametrize("wrap", ["DataParallel", "compile", "compile(DataParallel)"])
def test_a_class_loads_what_another_wrapping_of_it_saved(wrap: str, tmp_path: Path) -> None:
    source = Lit(width=3, wrap=wrap)
    path = save_lit(source, tmp_path / "a.ckpt")
    plain = load_from_checkpoint(Lit, path, wrap="plain")
    assert torch.equal(plain.net.weight, next(source.parameters()))
    assert plain.trace[1] == "on_load_checkpoint ['net.bias', 'net.weight']"
    back = load_from_checkpoint(Lit, save_lit(plain, tmp_path / "b.ckpt"), wrap=wrap)
    assert torch.equal(next(back.parameters()), plain.net.weight)


def test_arguments_reach_the_class_as_in_lightning(tmp_path: Path) -> None:
    path = save_lit(OneArgument({"width": 3, "depth": 1}), tmp_path / "one.ckpt")
    for load in (functools.partial(load_from_checkpoint, OneArgument), OneArgument.load_from_checkpoint):
        model = load(path, depth=5, other=7)
        assert (model.settings["width"], model.settings["depth"], model.other) == (3, 5, 7)
    path = save_lit(AnyArguments(width=4, a=1), tmp_path / "any.ckpt")
    for load in (functools.partial(load_from_checkpoint, AnyArguments), AnyArguments.load_from_checkpoint):
        assert load(path, b=2).rest == {"a": 1, "b": 2}
    path = save_lit(Lit(width=3), tmp_path / "a.ckpt")
    (tmp_path / "h.yaml").write_text("width: 3\nwrap: DataParallel\n")
    assert isinstance(load_from_checkpoint(Lit, path, hparams_file=tmp_path / "h.yaml").net, nn.DataParallel)
    with pytest.raises(ValueError, match=r"must end in \.yaml, \.yml or \.csv, got '.*h\.toml'"):
        load_from_checkpoint(Lit, path, hparams_file=tmp_path / "h.toml")


def test_bare_weights_and_another_root_load_into_a_class(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "a.pt")
    assert torch.equal(load_from_checkpoint(Lit, tmp_path / "a.pt").net.weight, net.weight)
    torch.save({"teacher": net.state_dict(), "student": nn.Linear(2, 2).state_dict()}, tmp_path / "b.pt")
    assert torch.equal(load_from_checkpoint(Lit, tmp_path / "b.pt", root="teacher").net.weight, net.weight)
    with pytest.raises(AmbiguousCheckpointError):
        load_from_checkpoint(Lit, tmp_path / "b.pt")


def test_what_a_model_keeps_of_a_checkpoint_is_not_the_files(tmp_path: Path) -> None:
    class Weighted(LightningModule):
        def __init__(self, class_weights: torch.Tensor) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.class_weights = class_weights
            self.net = nn.Linear(2, 2)

    path = save_lit(Weighted(torch.tensor([1.0, 2.0])), tmp_path / "a.ckpt")
    model = load_from_checkpoint(Weighted, path)
    path.write_bytes(bytes(path.stat().st_size))
    assert model.class_weights.tolist() == [1, 2]


def test_a_hook_may_be_what_makes_the_weights_fit(tmp_path: Path) -> None:
    class Grows(Lit):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.extra = nn.Linear(*checkpoint["state_dict"]["extra.weight"].shape[::-1])

    source = Lit()
    source.extra = nn.Linear(5, 1)
    model = load_from_checkpoint(Grows, save_lit(source, tmp_path / "a.ckpt"))
    assert torch.equal(model.extra.weight, source.extra.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_a_hook_that_resizes_does_so_as_in_lightning(strict: bool, tmp_path: Path) -> None:
    class Grows(Lit):
        def __init__(self, width: int = 2) -> None:
            super().__init__(width)
            self.fixed = nn.Linear(1, 1)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for key, value in checkpoint["state_dict"].items():
                own = self.state_dict()[key].clone()
                own[tuple(slice(size) for size in value.shape)] = value
                checkpoint["state_dict"][key] = own

    path = save_lit(Grows(), tmp_path / "a.ckpt")
    torch.manual_seed(1)
    theirs = Grows.load_from_checkpoint(path, width=3, strict=strict)
    torch.manual_seed(1)
    mine = load_from_checkpoint(Grows, path, width=3, strict=strict)
    assert torch.equal(mine.net.weight, theirs.net.weight)


def test_weights_that_a_filtered_state_dict_hides_are_loaded_as_in_lightning(tmp_path: Path) -> None:
    class Filtered(Lit):
        strict_loading = False  # type: ignore[assignment]

        def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
            weights = super().state_dict(*arguments, **options)
            return {key: value for key, value in weights.items() if "weight" not in key}

    source = Lit()
    path = save_lit(source, tmp_path / "a.ckpt")
    assert torch.equal(load_from_checkpoint(Filtered, path).net.weight, source.net.weight)
    report = load_weights(Filtered(), path, strict=False)
    assert (set(report.loaded), report.missing, report.unexpected) == ({"net.bias", "net.weight"}, (), ())


def test_overrides_without_torchs_optional_arguments_work(tmp_path: Path) -> None:
    class Short(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = TiedTransformer()

        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return dict(super().state_dict())

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
            super().load_state_dict(state_dict, strict)

    source = Short()
    path = save_lit(source, tmp_path / "a.ckpt")
    assert contents(load_from_checkpoint(Short, path)) == contents(source)
    weights = source.state_dict()
    del weights["net.head.weight"]  # the tie shows although the override hands out copies of the parameters
    torch.save(weights, tmp_path / "a.pt")
    target = Short()
    assert "net.head.weight" in load_weights(target, tmp_path / "a.pt").loaded
    assert contents(target) == contents(source)


def test_a_module_without_parameters_is_built(tmp_path: Path) -> None:
    class Bare(LightningModule):
        def __init__(self, k: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    path = save_lit(Bare(5), tmp_path / "a.ckpt")
    assert load_from_checkpoint(Bare, path).hparams == Bare.load_from_checkpoint(path).hparams == {"k": 5}


class Config(dict):  # type: ignore[type-arg]
    """Stands for OmegaConf's DictConfig."""


def test_hyperparameters_come_back_in_the_class_that_they_had(tmp_path: Path) -> None:
    content = torch.load(save_lit(OneArgument({"width": 3}), tmp_path / "a.ckpt"))

    class Typed(OneArgument):
        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            self.kind = type(settings)

    for kind in (Config, "Namespace"):
        write_checkpoint({**content, "hparams_type": kind}, tmp_path / "b.ckpt")
        with torch.serialization.safe_globals([Config]):
            mine, theirs = (load(tmp_path / "b.ckpt") for load in (
                functools.partial(load_from_checkpoint, Typed), Typed.load_from_checkpoint))  # fmt: skip
        assert mine.kind is theirs.kind
        assert (mine.kind is Config) == (kind is Config)


def test_the_device_is_the_cpu_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:2")
        path = save_lit(Lit(), tmp_path / "a.ckpt")
    assert load_from_checkpoint(Lit, path).device.type == "cpu"
    assert load_from_checkpoint(Lit, path, map_location={"cuda:2": "cpu"}).device.type == "cpu"
    with pytest.raises(RuntimeError, match="CUDA"):  # the caller's wish, not the file's fault
        load_from_checkpoint(Lit, path, map_location="cuda:0")


def test_a_checkpoint_cannot_choose_what_builds_the_model(tmp_path: Path) -> None:
    source = Lit()
    path = save_lit(source, tmp_path / "a.ckpt")
    content = torch.load(path)
    for hparams, words in (
        ({"_instantiator": "os.system"}, "wants 'os.system' to build"),
        (
            {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": "subprocess.Popen"},
            "wants the class 'subprocess.Popen'",
        ),
    ):
        write_checkpoint({**content, "hyper_parameters": hparams}, path)
        with pytest.raises(UnsafeCheckpointError, match=words):
            load_from_checkpoint(Lit, path)


def test_what_the_command_line_of_lightning_saved_is_built_as_there(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    path = save_lit(Lit(), tmp_path / "a.ckpt")
    content = torch.load(path)
    content["hyper_parameters"] = {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "width": 2,
        "wrap": "DataParallel",
    }
    write_checkpoint(content, path)
    assert isinstance(load_from_checkpoint(Lit, path).net, nn.DataParallel)


def test_the_example_runs(run_python: Callable[..., Any], tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "load_checkpoint_anywhere.py"
    answer = run_python(str(example), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert 'loaded 4 weights; removed "net." from 4 keys, added "_orig_mod." to 4 keys' in answer.stdout
    assert 'fit: "student" and "teacher"' in answer.stdout
    assert "is cut short" in answer.stdout
    assert list(tmp_path.iterdir()) == []
