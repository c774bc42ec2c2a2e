"""Files that ``convert`` writes: torch reads back what was given, to the bit and without anything else."""

import errno
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import TENSORS
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpu_tools.checkpoints import weights_files
from lightning_gpu_tools.checkpoints.sources import verify_checkpoint
from lightning_gpu_tools.checkpoints.weights_files import write_content


def described(value: torch.Tensor) -> Any:
    return type(value), value.dtype, value.shape, value.requires_grad, value.tolist()


@given(
    weights=st.dictionaries(st.text(max_size=5), TENSORS, max_size=6),
    also=st.sets(st.sampled_from(["part", "column", "parameter", "view"])),
    versions=st.sampled_from([None, {}, {"": {"version": 1}, "a.b": {"version": 300}}, {"": {"note": torch.ones(1)}}]),
    private_name=st.booleans(),
)
def test_torch_loads_the_weights_that_were_written(
    weights: dict[str, torch.Tensor],
    also: set[str],
    versions: dict[str, Any] | None,
    private_name: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    content: OrderedDict[str, Any] = OrderedDict(weights)
    for key, value in weights.items():
        kinds = {
            "part": value[1:] if value.ndim else value,
            "column": value[..., :1] if value.ndim else value,
            "view": value.reshape(1, -1),
            "parameter": torch.nn.Parameter(value, value.is_floating_point()),
        }
        content.update({f"{key} {kind}": kinds[kind] for kind in also})
        content[f"{key} again"] = value
    if versions is not None:
        content._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    path = tmp_path_factory.getbasetemp() / "weights.pt"
    with pytest.MonkeyPatch.context() as patch:
        if not private_name:
            patch.setattr(weights_files, "_ARCHIVE", None)
        write_content(content, str(path))
    assert verify_checkpoint(str(path)).has_checksums
    for mapped in (True, False):
        loaded = torch.load(path, mmap=mapped, weights_only=True)
        assert type(loaded) is OrderedDict
        assert getattr(loaded, "_metadata", None) == versions
        assert [*map(described, loaded.values())] == [*map(described, content.values())]
        assert [*loaded] == [*content]
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in loaded.values())
        assert all(loaded[f"{key} again"].data_ptr() == loaded[key].data_ptr() for key in weights)


def test_a_full_disk_is_named_and_progress_counts_the_bytes(tmp_path: Path) -> None:
    weights = OrderedDict((str(i), torch.full((i,), float(i))) for i in range(2000))
    with pytest.raises(OSError, match="No space left") as caught:
        write_content(weights, "/dev/full")
    assert caught.value.errno == errno.ENOSPC
    seen: list[int] = []
    write_content(weights, str(tmp_path / "a.pt"), seen.append)
    assert sum(seen) == (tmp_path / "a.pt").stat().st_size
