"""Plans on names and shapes alone, then the same law on real modules in random nestings."""

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from lightning_gpu_tools.checkpoints.key_groups import group_keys, list_groups
from lightning_gpu_tools.checkpoints.key_renaming import ModelKeys, plan_renaming
from lightning_gpu_tools.checkpoints.model_keys import read_model, shape_of
from lightning_gpu_tools.checkpoints.rename_plan import RenamePlan, clean_names
from lightning_gpu_tools.errors import AmbiguousCheckpointError, CheckpointMismatchError, KeyCollisionError

W, B = (4, 3), (4,)


def model(*keys: str, **known: object) -> ModelKeys:
    return ModelKeys(shapes=dict.fromkeys(keys, W), **known)  # type: ignore[arg-type]


def keys(*names: str) -> dict[str, tuple[int, ...] | None]:
    return dict.fromkeys(names, W)


@pytest.mark.parametrize(
    ("checkpoint", "names"),
    [
        pytest.param("module.a.w", "a.w", id="leading module"),
        pytest.param("_orig_mod.a.w", "a.w", id="compiled"),
        pytest.param("module.module.a.w", "a.w", id="twice"),
        pytest.param("_orig_mod.module.a.w", "a.w", id="compiled DataParallel"),
        pytest.param("module._orig_mod.a.w", "a.w", id="DataParallel of compiled"),
        pytest.param("a.module.w", "a.w", id="in the middle"),
        pytest.param("a._fsdp_wrapped_module._checkpoint_wrapped_module.w", "a.w", id="FSDP and checkpointing"),
        pytest.param("_forward_module.a.w", "a.w", id="Fabric and DeepSpeed"),
        pytest.param("model.a.w", "a.w", id="root dropped"),
        pytest.param("module.model._orig_mod.a.w", "a.w", id="root dropped between wrappers"),
        pytest.param("w", "net.w", id="root added"),
        pytest.param("module.w", "net.w", id="root added, wrapper removed"),
        pytest.param("a.w", "_orig_mod.a.w", id="compiled, added"),
        pytest.param("_forward_module.a.w", "a._orig_mod.w", id="one private name for another"),
    ],
)
def test_one_key_finds_its_place(checkpoint: str, names: str) -> None:
    assert plan_renaming(keys(checkpoint), model(names)).renames == {checkpoint: names}


@pytest.mark.parametrize("wrappers", [frozenset({"net"}), frozenset({"", "module.net"})], ids=["inner", "nested"])
def test_wrapper_names_are_added_where_the_model_has_wrappers(wrappers: frozenset[str]) -> None:
    live = "net.module.w" if len(wrappers) == 1 else "module.net.module.w"
    for checkpoint in ("net.w", "module.net.w", "net._orig_mod.w", live):
        assert plan_renaming(keys(checkpoint), model(live, wrappers=wrappers)).renames == {checkpoint: live}


def test_what_fits_is_never_touched() -> None:
    names = ("module.w", "module.module.w", "_orig_mod.w", "n_averaged")
    plan = plan_renaming(keys(*names), model(*names))
    assert plan.renames == {name: name for name in names}
    assert not plan.changes_names


def test_a_child_that_is_called_module_stays() -> None:
    legit = model("module.w", "head.w")
    assert plan_renaming(keys("module.w", "head.w"), legit).renames["module.w"] == "module.w"
    # DataParallel around it adds one more, and that one goes.
    wrapped = plan_renaming(keys("module.module.w", "module.head.w"), legit)
    assert wrapped.renames == {"module.module.w": "module.w", "module.head.w": "head.w"}
    # Also where it is the only child, which looks like a wrapper.
    assert plan_renaming(keys("module.module.w"), model("module.w")).renames == {"module.module.w": "module.w"}
    assert plan_renaming(keys("module.w"), model("module.w")).renames == {"module.w": "module.w"}


def test_two_keys_for_one_place_are_refused_and_named() -> None:
    with pytest.raises(KeyCollisionError, match=r'"w" and "module\.w" would both become "w"'):
        plan_renaming({"w": (2,), "module.w": (3,)}, ModelKeys(shapes={"w": (2,)}))
    with pytest.raises(KeyCollisionError, match=r"a\._orig_mod\.w.*a\.w"):
        plan_renaming(keys("a.w", "a._orig_mod.w"), model("net.a.w"))
    with pytest.raises(KeyCollisionError, match=r"_orig_mod\.w"):
        clean_names(["w", "_orig_mod.w"])


def test_two_sets_of_weights_that_fit_are_an_error_that_names_both_and_the_way_out() -> None:
    both = keys("teacher.a.w", "teacher.b.w", "student.a.w", "student.b.w")
    plain = model("a.w", "b.w")
    with pytest.raises(AmbiguousCheckpointError, match=r'"teacher\." and "student\.".*root="teacher\."'):
        plan_renaming(both, plain)
    plan = plan_renaming(both, plain, root="student.")
    assert plan.renames == {"student.a.w": "a.w", "student.b.w": "b.w"}
    assert plan.unused == ("teacher.a.w", "teacher.b.w")
    assert plan_renaming(both, plain, root="teacher").renames["teacher.a.w"] == "a.w"


def test_two_names_of_the_same_tensors_are_not_two_sets_of_weights() -> None:
    # self.net = net; self.fast = torch.compile(net)
    same = {"net.w": 1, "fast._orig_mod.w": 1}
    assert plan_renaming(keys(*same), model("w"), same_tensor=lambda: same).renames == {"net.w": "w"}
    with pytest.raises(AmbiguousCheckpointError):
        plan_renaming(keys(*same), model("w"), same_tensor=lambda: {"net.w": 1, "fast._orig_mod.w": 2})


def test_two_places_in_the_model_are_ambiguous_too() -> None:
    with pytest.raises(AmbiguousCheckpointError, match=r'model has 2 places.*"a\." and "b\."'):
        plan_renaming(keys("w"), model("a.w", "b.w", tied={"a.w": "a.w", "b.w": "a.w"}))


def test_a_root_with_other_weights_beside_it_is_loaded_and_the_others_are_listed() -> None:
    plan = plan_renaming(keys("model.w", "loss.weight", "metric.total"), model("w"))
    assert plan.renames == {"model.w": "w"}
    assert plan.dropped_root == "model."
    assert plan.unused == ("loss.weight", "metric.total")


def test_weights_beside_a_full_set_of_the_same_names_are_not_preferred_to_it() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"not in the model: teacher\.w"):
        plan_renaming(keys("w", "teacher.w"), model("w"))


def test_an_unknown_root_is_refused_with_the_roots_that_there_are() -> None:
    with pytest.raises(CheckpointMismatchError, match=r'no "teacher\." in the checkpoint \(a\., b\.\)'):
        plan_renaming(keys("a.w", "b.w"), model("w"), root="teacher.")


def test_root_may_be_deeper_than_one_attribute_and_skip_wrappers() -> None:
    plan = plan_renaming(keys("module.system.model.w", "module.system.head.w"), model("w"), root="system.model.")
    assert plan.renames == {"module.system.model.w": "w"}


def test_an_empty_root_forbids_a_change_of_root() -> None:
    with pytest.raises(CheckpointMismatchError):
        plan_renaming(keys("model.w"), model("w"), root="")


def test_strict_refuses_what_is_missing_left_over_or_of_another_shape() -> None:
    wanted = ModelKeys(shapes={"a.w": W, "a.b": B, "c.w": W})
    with pytest.raises(CheckpointMismatchError) as caught:
        plan_renaming({"module.a.w": W, "module.a.b": (9,), "module.x.w": W}, wanted)
    message = str(caught.value)
    assert '1 of the model\'s 3 keys fit (removed "module." from 1 keys). Nothing was changed.' in message
    assert "not in the checkpoint: c.w" in message
    assert "not in the model: module.x.w" in message
    assert "module.a.b (9,) instead of (4,)" in message
    assert caught.value.missing == ("c.w",)
    assert caught.value.unexpected == ("module.x.w",)


def test_partial_loading_takes_what_fits_and_lists_the_rest() -> None:
    wanted = ModelKeys(shapes={"a.w": W, "a.b": B, "c.w": W})
    plan = plan_renaming({"module.a.w": W, "module.a.b": (9,), "module.x.w": W}, wanted, strict=False)
    assert plan.renames == {"module.a.w": "a.w"}
    assert plan.missing == ("c.w",)
    assert plan.unexpected == ("module.x.w",)
    assert plan.mismatched == (("module.a.b", (9,), B),)


def test_partial_loading_of_nothing_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="0 of the model's 1 keys"):
        plan_renaming(keys("encoder.k"), model("decoder.w"), strict=False)


def test_partial_loading_does_not_choose_between_two_roots() -> None:
    with pytest.raises(AmbiguousCheckpointError):
        plan_renaming(keys("s.a.w", "t.a.w"), model("a.w", "head.w"), strict=False)


def test_partial_loading_leaves_names_that_the_model_has_where_they_are() -> None:
    plan = plan_renaming(keys("module.a.w"), model("a.w", "module.a.w"), strict=False)
    assert plan.renames == {"module.a.w": "module.a.w"}


def test_tied_weights_need_only_one_of_their_names() -> None:
    tied = model("embed.w", "head.w", "c.w", tied={"embed.w": "embed.w", "head.w": "embed.w"})
    for present, absent in (("embed.w", "head.w"), ("head.w", "embed.w")):
        plan = plan_renaming(keys(f"module.{present}", "module.c.w"), tied)
        assert plan.tied == {absent: f"module.{present}"}
        applied = plan.apply({f"module.{present}": 1, "module.c.w": 2})
        assert applied == {present: 1, "c.w": 2, absent: 1}


def test_parameters_without_a_shape_yet_take_any() -> None:
    lazy = ModelKeys(shapes={"w": None})
    assert plan_renaming({"module.w": (7, 7)}, lazy).renames == {"module.w": "w"}


def test_one_element_goes_into_none_as_torch_allows_for_old_files() -> None:
    assert plan_renaming({"module.w": (1,)}, ModelKeys(shapes={"w": ()})).renames == {"module.w": "w"}


def test_step_counters_of_wrappers_come_and_go_with_the_wrapper() -> None:
    averaged = ModelKeys(
        shapes={"n_averaged": (), "module.w": W}, wrappers=frozenset({""}), optional=frozenset({"n_averaged"})
    )
    stripped = plan_renaming({"n_averaged": (), "module.w": W}, model("w"))
    assert stripped.renames == {"module.w": "w"}
    assert stripped.unused == ("n_averaged",)
    added = plan_renaming(keys("w"), averaged)
    assert added.renames == {"w": "module.w"}
    assert added.kept == ("n_averaged",)
    both = plan_renaming({"n_averaged": (), "module._orig_mod.w": W}, averaged)
    assert both.renames == {"n_averaged": "n_averaged", "module._orig_mod.w": "module.w"}


def test_a_parameter_that_is_called_like_a_step_counter_is_no_counter() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"not in the model: a\.n_averaged"):
        plan_renaming({"a.w": W, "a.n_averaged": ()}, model("a.w"))


def test_modules_that_translate_their_own_keys_are_left_to_it() -> None:
    # Old weight_norm names into a parametrized module, below a wrapper that only the file knows.
    normed = ModelKeys(
        shapes={"c.parametrizations.w.original0": W, "c.parametrizations.w.original1": W, "c.bias": B, "d.w": W},
        self_loading=frozenset({"c"}),
    )
    old = {"module.c.w_g": W, "module.c.w_v": W, "module.c.bias": B, "module.d.w": W}
    plan = plan_renaming(old, normed)
    applied = plan.apply(dict.fromkeys(old, 0), keep=plan.unexpected)
    assert set(applied) == {"c.w_g", "c.w_v", "c.bias", "d.w"}
    with pytest.raises(CheckpointMismatchError):
        plan_renaming({**old, "module.e.w": W}, normed)


def test_applying_keeps_the_objects_their_order_and_the_metadata() -> None:
    weights: OrderedDict[str, object] = OrderedDict((name, object()) for name in ("module.a.w", "module.b.c.w"))
    weights._metadata = OrderedDict(  # type: ignore[attr-defined]
        [
            ("", {"of": "wrapper"}),
            ("module", {"of": "net"}),
            ("module.a", {"v": 2}),
            ("module.b", {}),
            ("module.b.c", {}),
        ]
    )
    before = list(weights.items())
    plan = plan_renaming(keys(*weights), model("a.w", "b.c.w"))
    applied = plan.apply(weights)
    assert list(applied) == ["a.w", "b.c.w"]
    assert all(new is old for new, (_, old) in zip(applied.values(), before, strict=True))
    assert applied._metadata == {"": {"of": "net"}, "a": {"v": 2}, "b": {}, "b.c": {}}  # type: ignore[attr-defined]
    assert list(weights.items()) == before


def test_metadata_of_modules_without_weights_follows_its_surroundings() -> None:
    plan = RenamePlan(renames={"net._orig_mod.0.w": "net.0.w"})
    rename = plan.rename_key()
    assert [rename(path) for path in ("", "net", "net._orig_mod", "net._orig_mod.1")] == ["", "net", "net", "net.1"]


def test_cleaning_needs_no_guess_where_the_wrappers_are_known() -> None:
    names = ["net.module.module.w", "net.module.head.w", "ema.n_averaged", "ema.module._orig_mod.w"]
    assert clean_names(names, {"net", "ema"}) == {
        "net.module.module.w": "net.module.w",
        "net.module.head.w": "net.head.w",
        "ema.n_averaged": "ema.n_averaged",
        "ema.module._orig_mod.w": "ema.w",
    }
    assert clean_names(["net.module.w"]) == {"net.module.w": "net.module.w"}


@pytest.mark.parametrize(("count", "limit_s"), [(10_000, 0.1), (100_000, 1.0)])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "model."])
def test_many_keys_are_planned_fast(count: int, limit_s: float, prefix: str) -> None:
    names = [
        f"layers.{layer}.{part}.{kind}"
        for layer in range(count // 8)
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ]
    shapes = dict.fromkeys(names, W)
    checkpoint = {prefix + name: W for name in names}
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = plan_renaming(checkpoint, ModelKeys(shapes=shapes))
        seconds.append(time.process_time() - start)
    assert len(plan.renames) == count
    assert min(seconds) < limit_s


def test_keys_that_differ_in_numbers_share_a_line() -> None:
    names = [f"layers.{i}.attn.bias" for i in range(12)] + ["head.w"]
    assert group_keys(names) == ["layers.{0…11}.attn.bias", "head.w"]
    assert group_keys(["a.0.0.w", "a.0.1.w", "a.1.0.w"]) == ["a.{0…1}.{0…1}.w (3 keys)"]
    assert group_keys(["a.0.w", "a.2.w", "a.7.w"]) == ["a.{0,2,7}.w"]
    assert list_groups("abc", limit=2) == "a, b, … and 1 more"


# -- real modules --------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Children by name, and sometimes a parameter and an extra state of its own."""

    def __init__(self, children: Mapping[str, nn.Module], own: bool) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        if own:
            self.scale = nn.Parameter(torch.zeros(2))
            self.note = "fresh"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": getattr(self, "note", "")}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def compiled(module: nn.Module) -> nn.Module:
    if hasattr(module, "get_compiler_config"):  # torch cannot compile a compiled module again
        return module
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [nn.DataParallel, compiled, AveragedModel, checkpoint_wrapper]

leaves = st.sampled_from([lambda: nn.Linear(2, 2), lambda: nn.BatchNorm1d(2), lambda: nn.Embedding(3, 2)]).map(
    lambda make: make()
)
nets = st.recursive(
    leaves,
    lambda inner: st.builds(
        Named,
        st.dictionaries(st.sampled_from(["module", "net", "model", "0", "head"]), inner, min_size=1, max_size=3),
        st.booleans(),
    ),
    max_leaves=6,
)
wrappings = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(WRAPPERS)), max_size=4)


def wrap(net: nn.Module, plan: list[tuple[int, Callable[[nn.Module], nn.Module]]]) -> nn.Module:
    """Put wrappers around modules of a net, by number; wrappers count as modules themselves."""
    for number, wrapper in plan:
        paths = [path for path, _ in net.named_modules()]
        path = paths[number % len(paths)]
        if not path:
            net = wrapper(net)
            continue
        parent, _, name = path.rpartition(".")
        owner = net.get_submodule(parent)
        owner._modules[name] = wrapper(net.get_submodule(path))
    return net


def fill(net: nn.Module) -> None:
    """Give every number a value that no other has."""
    count = 0
    for tensor in net.state_dict().values():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(torch.arange(count, count + tensor.numel()).view(tensor.shape))
            count += tensor.numel()
    for module in net.modules():
        if isinstance(module, Named):
            module.note = f"note {(count := count + 1)}"


def contents(net: nn.Module) -> list[object]:
    """Everything that is learned, in the order of the unwrapped net, without the wrappers' own counters."""
    tensors = [t for name, t in (*net.named_parameters(), *net.named_buffers()) if not name.endswith("n_averaged")]
    return [t.tolist() for t in tensors] + [m.note for m in net.modules() if isinstance(m, Named)]


@given(net=nets, saved_as=wrappings, loaded_as=wrappings)
def test_any_nesting_loads_into_any_other(
    net: nn.Module,
    saved_as: list[tuple[int, Callable[[nn.Module], nn.Module]]],
    loaded_as: list[tuple[int, Callable[[nn.Module], nn.Module]]],
) -> None:
    source = wrap(copy.deepcopy(net), saved_as)
    target = wrap(copy.deepcopy(net), loaded_as)
    fill(source)
    weights = source.state_dict()
    known, state = read_model(target, weights)
    plan = plan_renaming({key: shape_of(value) for key, value in weights.items()}, known)
    renamed = plan.apply(weights)
    assert all(any(new is old for old in weights.values()) for new in renamed.values())
    renamed.update((key, state[key]) for key in plan.kept)
    target.load_state_dict(renamed)
    assert contents(target) == contents(source)
    # And what a model has saved itself is never touched.
    own, _ = read_model(source, weights)
    untouched = plan_renaming({key: shape_of(value) for key, value in weights.items()}, own)
    assert not untouched.changes_names
