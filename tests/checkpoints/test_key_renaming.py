"""Plans of renaming, on names and shapes alone; tests/checkpoints/test_weights.py has real modules."""

from typing import Any

import pytest

from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.checkpoints.key_tree import group_keys, list_groups
from lightning_gpu_tools.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    KeyCollisionError,
)

W, B = (4, 3), (4,)


def model(*keys: str, **known: object) -> ModelKeys:
    return ModelKeys(shapes=dict.fromkeys(keys, W), **known)  # type: ignore[arg-type]


def keys(*names: str) -> dict[str, tuple[int, ...] | None]:
    return dict.fromkeys(names, W)


FITS: dict[str, tuple[str, ModelKeys, str]] = {
    "leading module": ("module.a.w", model("a.w"), "a.w"),
    "DataParallel of compiled": ("module._orig_mod.a.w", model("a.w"), "a.w"),
    "FSDP and checkpointing": ("a._fsdp_wrapped_module._checkpoint_wrapped_module.w", model("a.w"), "a.w"),
    "root dropped": ("model.a.w", model("a.w"), "a.w"),
    "root added": ("w", model("net.w"), "net.w"),
    "two roots dropped": ("model.net.a.w", model("a.w"), "a.w"),
    "two roots added": ("w", model("model.net.w"), "model.net.w"),
    "Fabric and DeepSpeed": ("_forward_module.a.w", model("a.w"), "a.w"),
    "a child called module": ("module.w", model("module.w"), "module.w"),
    "no shape yet": ("module.w", ModelKeys(shapes={"w": None}), "w"),
    "another wrapper inside": ("net.w", model("net.module.w", wrappers=frozenset({"net"})), "net.module.w"),
    "another wrapper around": ("net.module.w", model("module.net.module.w", wrappers=frozenset({"", "module.net"})),
                               "module.net.module.w"),
    "and a wrapper around it": ("module.module.w", model("module.w"), "module.w"),
}  # fmt: skip


@pytest.mark.parametrize("what", FITS)
def test_one_key_finds_its_place(what: str) -> None:
    checkpoint, wanted, name = FITS[what]
    assert plan_renaming(keys(checkpoint), wanted).renames == {checkpoint: name}


TWO = keys("teacher.a.w", "teacher.b.w", "student.a.w", "student.b.w")
CHILDREN = keys("module.module.w", "module.head.w")
TIED_PLACES = model("a.w", "b.w", tied={"a.w": "a.w", "b.w": "a.w"})
COLLIDES, AMBIGUOUS, MISFIT = KeyCollisionError, AmbiguousCheckpointError, CheckpointMismatchError
REFUSED: dict[str, tuple[Any, ModelKeys, dict[str, Any], type[CheckpointError], str]] = {
    "wrapped and not": (keys("w", "module.w"), model("w"), {}, COLLIDES, r'"w" and "module\.w" would both become "w"'),
    "two sets": (TWO, model("a.w", "b.w"), {}, AMBIGUOUS, r'2 sets of .*"teacher\." and "student\.".*root="teacher\."'),
    "one is called module": (CHILDREN, model("w"), {}, AMBIGUOUS, r'2 sets of .*"module\." and "head\."'),
    "two places": (keys("w"), TIED_PLACES, {}, AMBIGUOUS, r'model has 2 attributes.*"a\." and "b\."'),
    "a set beside the weights": (keys("w", "t.w"), model("w"), {}, MISFIT, r"not in the model: t\.w"),
    "no such root": (keys("a.w", "b.w"), model("w"), {"root": "t."}, MISFIT, r"Neither the checkpoint \(a\., b\.\)"),
    "no root allowed": (keys("model.w"), model("w"), {"root": ""}, MISFIT, "0 of the model's 1"),
    "no counter": ({"a.w": W, "a.n_averaged": ()}, model("a.w"), {}, MISFIT, r"not in the model: a\.n_averaged"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_one_place_is_refused_in_words(what: str) -> None:
    checkpoint, wanted, options, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        plan_renaming(checkpoint, wanted, **options)


def test_weights_beside_a_dropped_root_are_listed() -> None:
    plan = plan_renaming(keys("model.w", "loss.weight", "metric.total"), model("w"))
    assert (plan.renames, plan.dropped_root) == ({"model.w": "w"}, "model.")
    assert plan.unused == ("loss.weight", "metric.total")


def test_misfits_are_refused_if_strict_and_listed_if_not() -> None:
    wanted = ModelKeys(shapes={"a.w": W, "a.b": B, "c.w": W})
    checkpoint = {"module.a.w": W, "module.a.b": (9,), "module.x.w": W}
    with pytest.raises(CheckpointMismatchError) as caught:
        plan_renaming(checkpoint, wanted)
    message = str(caught.value)
    assert '1 of the model\'s 3 keys fit (removed "module." from 1 key). Nothing was changed.' in message
    assert "not in the checkpoint: c.w" in message
    assert "not in the model: module.x.w" in message
    assert "module.a.b (9,) instead of (4,)" in message
    plan = plan_renaming(checkpoint, wanted, strict=False)
    assert (plan.renames, plan.clashes) == ({"module.a.w": "a.w"}, {"module.a.b": "a.b"})
    assert (plan.missing, plan.unexpected) == (("c.w",), ("module.x.w",))
    assert (caught.value.missing, caught.value.unexpected) == (plan.missing, plan.unexpected)


def test_one_element_becomes_a_scalar_as_in_torch() -> None:
    assert plan_renaming({"module.w": (1,)}, ModelKeys(shapes={"w": ()})).renames == {"module.w": "w"}


def test_keys_that_differ_in_numbers_share_a_line() -> None:
    names = [f"layers.{i}.attn.bias" for i in range(12)] + ["head.w"]
    assert group_keys(names) == ["layers.{0…11}.attn.bias", "head.w"]
    assert group_keys(["a.0.0.w", "a.0.1.w", "a.1.0.w"]) == ["a.{0…1}.{0…1}.w (3 keys)"]
    assert group_keys(["a.0.w", "a.2.w", "a.7.w"]) == ["a.{0…7}.w (3 keys)"]
    assert list_groups("abcdefgh") == "a, b, c, d, e, f, … and 2 more"


def test_a_checkpoint_that_fits_is_never_touched() -> None:
    names = ("module.a.w", "_orig_mod.b.w", "model.w")
    assert plan_renaming(keys(*names), model(*names)).describe() == ""
