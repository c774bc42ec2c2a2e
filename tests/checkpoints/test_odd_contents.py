"""Contents of any type, depth and size: each operation works or says what is wrong, in memory that fits the file."""

import pickle
import re
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import lightning_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import nn

from lightning_gpu_tools import PortableCheckpointIO, load_from_checkpoint, load_weights
from lightning_gpu_tools.checkpoints import content
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import CheckpointError


class Lit(LightningModule):
    def __init__(self, width: int = 4, **options: Any) -> None:
        super().__init__()
        self.strict_loading = False
        self.net = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)


def convert(target: str, *options: str) -> Callable[[str, Path], object]:
    return lambda path, folder: main(["checkpoint", "convert", path, str(folder / target), "--force", *options])


OPERATIONS: dict[str, Callable[[str, Path], object]] = {
    "load": lambda path, _: load_weights(Lit(), path, strict=False),
    "class": lambda path, _: load_from_checkpoint(Lit, path, strict=False),
    "plugin": lambda path, _: PortableCheckpointIO().load_checkpoint(path),
    "inspect": lambda path, _: main(["checkpoint", "inspect", path]),
    "json": lambda path, _: main(["checkpoint", "inspect", path, "--json"]),
    "verify": lambda path, _: main(["checkpoint", "verify", path]),
    "convert": convert("target.pt"),
    "safetensors": convert("target.safetensors"),
}
NONE: frozenset[str] = frozenset()
ALL = frozenset(OPERATIONS)
READ_WHOLE = frozenset({"class", "plugin", "convert", "verify"})  # the others leave the rest unread
LOADS = frozenset({"load", "class", "verify"})


def refusals(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Do everything with a file; return what refused it, with the message. Any other error comes out."""
    messages = {}
    for name, operation in OPERATIONS.items():
        try:
            code = operation(str(path), folder)
        except CheckpointError as refusal:
            messages[name] = str(refusal)
            continue
        error = capsys.readouterr().err
        if isinstance(code, int) and code:
            assert error.startswith("lightning-gpu-tools: "), error
            messages[name] = error
    return messages


def odd_checkpoint(**entries: Any) -> dict[str, Any]:
    loop = {"state_dict": {}, "epoch_loop.state_dict": {}}
    return lightning_checkpoint(
        Lit().state_dict(),
        **{
            "loops": {f"{name}_loop": loop for name in ("fit", "validate", "test", "predict")},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
            "hparams_name": "options",
            **entries,
        },
    )


def nested(levels: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for _ in range(levels - 1):
        content = {"a": content}
    return content


def save(content: Any, path: Path) -> Path:
    """Save with the pickler in Python, in a thread with a stack for 10,000 levels."""
    pickler = types.ModuleType("deep_pickle")
    pickler.__dict__.update(pickle.__dict__, Pickler=pickle._Pickler)  # type: ignore[attr-defined]
    limit, stack = sys.getrecursionlimit(), threading.stack_size(1 << 30)
    sys.setrecursionlimit(2_000_000)
    thread = threading.Thread(target=torch.save, args=(content, path, pickler))
    thread.start()
    thread.join()
    sys.setrecursionlimit(limit)
    threading.stack_size(stack)
    return path


def in_itself() -> dict[str, Any]:
    content: dict[str, Any] = {}
    content["a"] = [content]
    return content


def module_in_itself() -> nn.Module:
    module = nn.Linear(2, 2)
    module._modules["again"] = module
    return module


def doubled(content: Any, times: int, container: Callable[[Any, Any], Any]) -> Any:
    for _ in range(times):
        content = container(content, content)
    return content


WEIGHTS = Lit().state_dict()
VERSION = "pytorch-lightning_version"
CLAIMS = "claims to be from Lightning.*Invalid version: "
ENDLESS = "too many parts, or endless recursion|holds more than plain data"
LARGE = 1 << 18, 1 << 18  # 256 GiB, more than this machine has: asking for it is an error, or the end of the process
# Content, what the error says, and which operations refuse it; all others work.
ODD: dict[str, tuple[Any, str, frozenset[str] | set[str]]] = {
    "10,000 levels": ({"state_dict": WEIGHTS, "a": nested(10_000)}, "nests its contents too deeply", READ_WHOLE),
    "dictionary in itself": (odd_checkpoint(a=in_itself()), "or endlessly", READ_WHOLE),
    "one list in 2 ** 100 places": (odd_checkpoint(a=doubled([0], 100, lambda *both: [*both])), "", NONE),
    "module in itself": ({"model": module_in_itself()}, ENDLESS, ALL),
    "module in 2 ** 30 places": ({"model": doubled(nn.Linear(2, 2), 30, nn.Sequential)}, ENDLESS, ALL),
    "100,000 dots": ({**WEIGHTS, "a." * 100_000: torch.ones(2)}, "has an invalid key for a weight: the text", ALL),
    "odd version": (
        odd_checkpoint(**{VERSION: "two"}),
        f"{CLAIMS}'two'|its pytorch-lightning_version is",
        {"class", "verify"},
    ),
    "old version": (odd_checkpoint(**{VERSION: "1.5.0"}), "cannot be migrated .*KeyError", {"class"}),
    "list of hyperparameters": (odd_checkpoint(hyper_parameters=[4]), "is a list|a list .* for", {"class", "verify"}),
    "text for weights": (
        {**WEIGHTS, "net.bias": "text"},
        'a str instead of|safetensors cannot store|the weight "net.bias" is the text "text"',
        LOADS | {"safetensors"},
    ),
    "name of the format": ({**WEIGHTS, "__metadata__": torch.ones(2)}, "other than __metadata__", {"safetensors"}),
    "stride 0": ({**WEIGHTS, "mask": torch.zeros(1).expand(LARGE)}, "cannot store mask", {"safetensors"}),
    "sparse": (
        {**WEIGHTS, "mask": torch.sparse_coo_tensor([[0], [0]], [1.0], LARGE)},
        "safetensors cannot store mask",
        {"safetensors"},
    ),
    "no numbers": (
        {**WEIGHTS, "mask": torch.empty(LARGE, device="meta")},
        "has no numbers for mask: it was saved from the meta device",
        {"verify", "convert", "safetensors"},
    ),
    "one name twice": (
        {**WEIGHTS, "": torch.ones(2), "_orig_mod.": torch.ones(2)},
        'odd.ckpt: "" and "_orig_mod." would both become the same key',
        {"convert", "safetensors"},
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_contents_work_or_are_refused_in_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_MAX_PARTS", 10_000)  # which are counted in a hundredth of the time
    odd, message, refusing = ODD[name]
    path = save(odd, tmp_path / "odd.ckpt")
    refused = refusals(path, tmp_path, capsys)
    assert all(re.search(message, text) for text in refused.values()), refused
    assert set(refused) == refusing, refused
    assert (tmp_path / "target.safetensors").exists() is ("safetensors" not in refused)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(torch.ones(2)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=12)
@given(entry=st.sampled_from([*odd_checkpoint(), "hparams_type", "current_model_state"]), value=plain)
def test_any_plain_data_in_any_entry_is_loaded_or_refused(
    entry: str, value: Any, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    torch.save(odd_checkpoint(**{entry: value}), folder / "odd.ckpt")
    refused = refusals(folder / "odd.ckpt", folder, capsys)
    if entry != "state_dict":  # which may be another model's
        assert "verify" in refused or not refused.keys() & {"load", "class", "plugin"}, refused
