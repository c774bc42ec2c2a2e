"""Contents of any type, depth and size: every operation works on them or says what is wrong, and never asks for more
memory than the file justifies."""

import cProfile
import pickle
import pstats
import re
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import safetensors
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_gpu_tools import PortableCheckpointIO, load_from_checkpoint, load_weights
from lightning_gpu_tools.cli import main
from lightning_gpu_tools.errors import CheckpointError


class Lit(LightningModule):
    def __init__(self, width: int = 4, **options: Any) -> None:
        super().__init__()
        self.strict_loading = False
        self.net = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def validation_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.norm(self.net(batch)).sum()  # type: ignore[no-any-return]


def trainer(folder: Path) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        plugins=[PortableCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def convert(target: str, *options: str) -> Callable[[str, Path], object]:
    return lambda path, folder: main(["checkpoint", "convert", path, str(folder / target), "--force", *options])


def validate(path: str, folder: Path) -> None:
    trainer(folder).validate(Lit(), DataLoader(torch.ones(2, 4), 2), ckpt_path=path, verbose=False)


OPERATIONS: dict[str, Callable[[str, Path], object]] = {
    "load": lambda path, _: load_weights(Lit(), path, strict=False),
    "class": lambda path, _: load_from_checkpoint(Lit, path, strict=False),
    "plugin": lambda path, _: PortableCheckpointIO().load_checkpoint(path),
    "trainer": validate,
    "inspect": lambda path, _: main(["checkpoint", "inspect", path]),
    "json": lambda path, _: main(["checkpoint", "inspect", path, "--json"]),
    "verify": lambda path, _: main(["checkpoint", "verify", path]),
    "convert": convert("target.pt"),
    "half": convert("target.pt", "--dtype", "bfloat16"),
    "safetensors": convert("target.safetensors"),
    "diff": lambda path, _: main(["checkpoint", "diff", path, path]),
}
ALL = frozenset(OPERATIONS)
LIGHTNING = frozenset({"class", "trainer"})
READ_WHOLE = frozenset({"class", "plugin", "trainer", "convert", "half"})  # the others leave the rest unread
LOADS = frozenset({"load", "class", "trainer"})


def refusals(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Do everything with a file; return what refused it, with the message. Any other error comes out."""
    messages = {}
    for name, operation in OPERATIONS.items():
        try:
            code = operation(str(path), folder)
            error = capsys.readouterr().err
            if isinstance(code, int) and code:
                assert error.startswith("lightning-gpu-tools: "), error
                messages[name] = error
        except CheckpointError as refusal:  # noqa: PERF203 - a dozen
            messages[name] = str(refusal)
    return messages


def lightning_checkpoint(**entries: Any) -> dict[str, Any]:
    loop = {"state_dict": {}, "epoch_loop.state_dict": {}}
    return {
        "pytorch-lightning_version": "2.6.0",
        "epoch": 1,
        "global_step": 2,
        "state_dict": Lit().state_dict(),
        "loops": {f"{name}_loop": loop for name in ("fit", "validate", "test", "predict")},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "hyper_parameters": {"width": 4},
        "hparams_name": "options",
        "lightning_gpu_tools": {"version": 1, "wrappers": {"net": "DataParallel"}, "torch": "2.13.0"},
        **entries,
    }


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


def with_versions(versions: Any) -> OrderedDict[str, Any]:
    weights = OrderedDict(WEIGHTS)
    weights._metadata = versions  # type: ignore[attr-defined]
    return weights


def in_itself() -> dict[str, Any]:
    content: dict[str, Any] = {}
    content["a"] = [content]
    return content


def doubled(times: int) -> list[Any]:
    content: list[Any] = [0]
    for _ in range(times):
        content = [content, content]
    return content


WEIGHTS = Lit().state_dict()
VERSION = "pytorch-lightning_version"
# Content, what the error says, and which operations refuse it; all others work.
ODD: dict[str, tuple[Any, str, frozenset[str]]] = {
    "10,000 levels": ({"state_dict": WEIGHTS, "a": nested(10_000)}, "nests its contents too deeply", READ_WHOLE),
    "150 levels": ({"state_dict": WEIGHTS, "a": nested(150)}, "", frozenset()),
    "dictionary in itself": (lightning_checkpoint(a=in_itself()), "or endlessly", READ_WHOLE),
    "one list in 2 ** 100 places": (lightning_checkpoint(a=doubled(100)), "", frozenset()),
    "the same as an extra state": (
        {**WEIGHTS, "x_extra_state": doubled(100)},
        "safetensors cannot store",
        {"safetensors"},
    ),
    "100,000 dots": ({**WEIGHTS, "a." * 100_000: torch.ones(2)}, "has an invalid key for a weight: the text", ALL),
    "number among keys": (
        lightning_checkpoint(state_dict={**WEIGHTS, 3: torch.ones(2)}),
        "has an invalid key for a weight: the value 3",
        ALL,
    ),
    "list of versions": (with_versions([1]), "invalid _metadata", ALL),
    "version in words": (with_versions({"norm": {"version": "two"}}), "invalid _metadata", ALL),
    "no version": (
        lightning_checkpoint(**{VERSION: None}),
        "claims to be from Lightning.*Invalid version: None",
        LIGHTNING,
    ),
    "odd version": (
        lightning_checkpoint(**{VERSION: "two"}),
        "claims to be from Lightning.*Invalid version: 'two'",
        LIGHTNING,
    ),
    "long version": (lightning_checkpoint(**{VERSION: "9" * 5000}), r"99…99.*\(ValueError", LIGHTNING),
    "old version": (lightning_checkpoint(**{VERSION: "1.5.0"}), "cannot be migrated .*KeyError", LIGHTNING),
    "list of hyperparameters": (
        lightning_checkpoint(hyper_parameters=[4]),
        "a list .* for hyperparam",
        {"class"},
    ),
    "number as hyperparameters": (
        lightning_checkpoint(hyper_parameters=4),
        "value 4 for hyperparam",
        {"class"},
    ),
    "numbered hyperparameters": (lightning_checkpoint(hyper_parameters={1: 4}), "string keys", {"class"}),
    "self as a hyperparameter": (lightning_checkpoint(hyper_parameters={"self": 4}), "", frozenset()),
    "list of callbacks": (lightning_checkpoint(callbacks=[1]), "callbacks of .* cannot be loaded", {"trainer"}),
    "no loop for this": (lightning_checkpoint(loops={}), "loops of .*: KeyError: 'validate_loop'", {"trainer"}),
    "number as averaged weights": (lightning_checkpoint(current_model_state=4), "", frozenset()),
    "optimizers that validation does not read": (lightning_checkpoint(optimizer_states=4), "", frozenset()),
    "number as the average's state": (lightning_checkpoint(averaging_state=4), "", frozenset()),
    "odd manifest": (lightning_checkpoint(lightning_gpu_tools={"wrappers": [4], "devices": 4}), "", frozenset()),
    "list as a manifest": (lightning_checkpoint(lightning_gpu_tools=[4]), "", frozenset()),
    "600 digits": (lightning_checkpoint(epoch=10**600, global_step=-(10**600)), "", frozenset()),
    "text for weights": (
        {**WEIGHTS, "net.bias": "text"},
        "a str instead of|safetensors cannot store",
        LOADS | {"safetensors"},
    ),
    "half a surrogate": ({**WEIGHTS, "\ud800": torch.ones(2)}, "valid UTF-8 names", {"safetensors"}),
    "name of the format": ({**WEIGHTS, "__metadata__": torch.ones(2)}, "other than __metadata__", {"safetensors"}),
    "empty names": ({**WEIGHTS, "": torch.ones(2), "a..": torch.ones(2), "..a": torch.ones(2)}, "", frozenset()),
    "one name twice": (
        {**WEIGHTS, "": torch.ones(2), "_orig_mod.": torch.ones(2)},
        'odd.ckpt: "" and "_orig_mod." would both become the same key',
        {"convert", "half", "safetensors"},
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_contents_work_or_are_refused_in_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message, refusing = ODD[name]
    path = save(content, tmp_path / "odd.ckpt")
    refused = refusals(path, tmp_path, capsys)
    assert all(re.search(message, text) for text in refused.values()), refused
    assert set(refused) == refusing, refused


ODD_TENSORS = {
    "stride 0": lambda: torch.zeros(1).expand(1 << 18, 1 << 18),
    "stride 1": lambda: torch.zeros(1 << 19).as_strided((1 << 18, 1 << 18), (1, 1)),
    "sparse": lambda: torch.sparse_coo_tensor([[0], [0]], [1.0], (1 << 18, 1 << 18)),
    "no numbers": lambda: torch.empty(1 << 18, 1 << 18, device="meta"),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_256_gib_in_a_small_file_are_never_allocated(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save({**WEIGHTS, "mask": ODD_TENSORS[kind]()}, tmp_path / "odd.ckpt")
    # More than this machine has: who asked for it would get a RuntimeError or be killed.
    refused = refusals(path, tmp_path, capsys)
    if kind == "no numbers":
        assert set(refused) - {"diff"} == {"convert", "half", "safetensors"}
        assert "has no numbers for mask: it was saved from the meta device" in refused["convert"]
    elif kind.startswith("stride"):
        assert set(refused) == {"half", "safetensors", "diff"}
        for message in refused.values():
            assert re.search(
                r'odd.ckpt stores "mask" of shape \(262144, 262144\) in far fewer numbers',
                message,
            )
    else:
        assert set(refused) - {"diff"} == {"safetensors"}
        assert "safetensors cannot store mask" in refused["safetensors"]
    assert not list(tmp_path.glob("*.safetensors"))


def test_an_expanded_mask_of_moderate_size_is_converted_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save({**WEIGHTS, "mask": torch.full((1,), 2.0).expand(500, 500)}, tmp_path / "odd.ckpt")
    assert not refusals(path, tmp_path, capsys)
    assert torch.equal(torch.load(tmp_path / "target.pt")["mask"], torch.full((500, 500), 2.0))


def test_errors_of_the_users_own_code_pass_unchanged(tmp_path: Path) -> None:
    class Failing(Lit):
        def __init__(self, width: int = 4, where: str = "") -> None:
            super().__init__()
            self.where = where
            if where == "constructor":
                raise TypeError("mine")

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.where == "hook":
                raise KeyError("mine")

    path = str(save(lightning_checkpoint(hparams_name=None), tmp_path / "fine.ckpt"))
    for where, kind in {"constructor": TypeError, "hook": KeyError}.items():
        with pytest.raises(kind, match="mine"):
            load_from_checkpoint(Failing, path, where=where)
    with pytest.raises(KeyError, match="mine"):
        trainer(tmp_path).validate(Failing(where="hook"), DataLoader(torch.ones(2, 4), 2), ckpt_path=path)


def test_other_hyperparameters_replace_broken_ones(tmp_path: Path) -> None:
    path = save(lightning_checkpoint(hyper_parameters=[4], hparams_name=None), tmp_path / "odd.ckpt")
    (tmp_path / "hparams.yaml").write_text("width: 4")
    load_from_checkpoint(Lit, path, hparams_file=tmp_path / "hparams.yaml")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(torch.ones(2)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2),
    max_leaves=4,
)


@given(entry=st.sampled_from([*lightning_checkpoint(), "hparams_type", "current_model_state"]), value=plain)
def test_any_plain_data_in_any_entry_is_loaded_or_refused(
    entry: str, value: Any, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    torch.save(lightning_checkpoint(**{entry: value}), folder / "odd.ckpt")
    refusals(folder / "odd.ckpt", folder, capsys)


SHAPES_OF_NAMES: dict[str, Callable[[int], str]] = {
    "flat": lambda i: f"weight{i}",
    "blocks": lambda i: f"model.layers.{i // 10}.module._orig_mod.block{i % 10}.weight",
    "deep": lambda i: ".".join(["a"] * 100) + f".{i}.w",
}


@pytest.mark.parametrize("shape", SHAPES_OF_NAMES)
def test_twice_the_keys_take_twice_the_calls(shape: str, tmp_path: Path) -> None:
    counts: dict[str, list[int]] = {}
    for number in (600, 1200):
        names = [SHAPES_OF_NAMES[shape](i) for i in range(number)]
        places = {
            name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)
        }
        path = f"{tmp_path}/{number}.safetensors"
        Path(path).write_bytes(safetensors(places, bytes(4 * number)))
        model = nn.Module()
        for i in range(number):
            model.register_parameter(f"weight{i}", nn.Parameter(torch.ones(1)))
        source, target = f"{tmp_path}/{number}.pt", f"{tmp_path}/target"
        torch.save({name: torch.ones(1) for name in names}, source)
        commands: dict[str, list[str]] = {
            "inspect": ["inspect", path],
            "verify": ["verify", path],
            "convert": ["convert", path, f"{target}.pt", "--force"],
            "safetensors": ["convert", path, f"{target}.safetensors", "--force"],
            "torch file": ["convert", source, f"{target}.pt", "--force"],
            "diff": ["diff", source, path],
        }
        operations: dict[str, Callable[[], object]] = {
            **{name: lambda command=command: main(["checkpoint", *command]) for name, command in commands.items()},
            "load": lambda model=model, path=path: load_weights(model, path) if shape == "flat" else None,
            "torch": lambda source=source, target=target: torch.save(torch.load(source), f"{target}.pt"),
        }
        for name, operation in operations.items():
            operation()  # what is imported on first use does not count
            with cProfile.Profile() as profile:
                operation()
            counts.setdefault(name, []).append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    for name, (once, twice) in counts.items():
        assert twice < 2.3 * once, name
    assert counts["convert"][1] < counts["torch"][1]
    assert counts["torch file"][1] < 1.2 * counts["torch"][1]
