"""``checkpoint diff`` tells weights apart, whatever their names and kinds."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Tied
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.checkpoints.torch_files import read_checkpoint

Run = Callable[..., tuple[int, str, str]]


def test_tensors_of_any_make_are_compared_and_converted_or_refused(tmp_path: Path, run: Run) -> None:
    path, target = str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors")
    conjugate = torch.tensor([1 + 2j]).conj()
    torch.save({"sparse": torch.eye(3).to_sparse(), "conjugate": conjugate}, path)
    assert run("diff", path, path)[0] == 0
    torch.save({"a": conjugate, "b": conjugate.conj()}, path)
    assert run("diff", path, path)[0] == 0
    assert run("convert", path, target)[0] == 0
    assert {key: value.tolist() for key, value in read_checkpoint(target).items()} == {"a": [1 - 2j], "b": [1 + 2j]}
    torch.save({"nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, path)
    assert run("diff", path, path)[0] == 0
    assert "holds plain tensors only, not nested" in run("convert", path, target, "--force")[2]


@given(data=st.data())
def test_diff_tells_any_two_values_apart(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    from lightning_gpu_tools.checkpoints.compare import compare

    def quantized(numbers: list[int]) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.tensor(numbers, dtype=torch.float32), 1.0, 0, torch.qint8)

    # Longer than what repr() prints of a tensor, and closer than what it prints of a number.
    spot = st.integers(0, 4095)
    tensor = st.one_of(
        st.builds(lambda at: torch.arange(4096) == at, spot),
        st.builds(lambda at: torch.tensor(1 + at * 1e-6, dtype=torch.float64), spot),
        st.builds(lambda at: torch.tensor(2**62 + at), spot),
        st.builds(lambda at: torch.eye(4096)[at].to_sparse(), spot),
        st.builds(lambda at: quantized([at % 100] * 2000), spot),
    )
    value = st.recursive(
        st.one_of(tensor, st.integers(), st.floats(), st.text(), st.booleans(), st.none()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
        max_leaves=4,
    )
    one, two = data.draw(value), data.draw(value)
    folder = tmp_path_factory.getbasetemp()
    for name, state in (("one", one), ("two", two)):
        torch.save(OrderedDict(w=torch.ones(1), _extra_state=state), folder / f"{name}.pt")
    assert compare(str(folder / "one.pt"), str(folder / "one.pt")).is_same
    assert compare(str(folder / "one.pt"), str(folder / "two.pt")).is_same == (canonical(one) == canonical(two))


def canonical(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.dequantize() if value.is_quantized else value.to_dense()
        return (str(value.dtype), tuple(value.shape), str(dense.tolist()))
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    return [*map(canonical, value)] if isinstance(value, list) else (type(value), repr(value))


def test_diff_sees_keys_shapes_dtypes_and_values(net: Tied, last: str, tmp_path: Path, run: Run) -> None:
    other = str(tmp_path / "other.pt")
    weights = net.state_dict()
    torch.save(weights, other)
    code, out, _ = run("diff", last, other)
    assert code == 0
    assert "13 weights are the same" in out
    assert 'names of the first: removed "_orig_mod." from 13 keys, removed "model."' in out
    weights = {key: value.clone() for key, value in weights.items()}
    weights["layers.0.weight"][1, 1] += 0.5
    weights["layers.1.weight"][0, 0] = float("nan")
    weights["layers.2.bias"] = torch.ones(7)
    weights["norm.weight"] = weights["norm.weight"].half()
    weights["extra"] = weights.pop("norm.bias")
    torch.save(weights, other)
    code, out, _ = run("diff", last, other)
    assert code == 1
    assert "only in the first: model.module._orig_mod.norm.bias" in out
    assert "only in the second: extra" in out
    found = json.loads(run("diff", last, other, "--json")[1])
    seen = {(d["key"], d["what"]): d for d in found["differences"]}
    assert seen["layers.0.weight", "values"]["largest"] == pytest.approx(0.5)
    assert seen["layers.0.weight", "values"]["share"] == 1 / 16
    assert seen["layers.1.weight", "values"]["largest"] is None
    assert seen["layers.2.bias", "shape"]["detail"] == "4 and 7"
    assert seen["norm.weight", "dtype"]["detail"] == "float32 and float16"
    assert len(seen) == 4
    assert found["same"] == 8


def test_diff_exits_3_where_there_is_nothing_to_compare(last: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty.ckpt").touch()
    code, out, err = run("diff", last, str(tmp_path / "empty.ckpt"))
    assert (code, out) == (3, "")
    assert "is empty" in err
    torch.save({"elsewhere": torch.ones(1)}, tmp_path / "other.pt")
    code, out, _ = run("diff", last, str(tmp_path / "other.pt"))
    assert code == 1
    assert "0 weights are the same" in out
