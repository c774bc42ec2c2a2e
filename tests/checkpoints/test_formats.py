"""The registry of formats: each file of ``checkpoints/formats`` is in it, and recognizes its own files alone."""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_gpu_tools.checkpoints import formats

WEIGHTS = {"weight": torch.ones(2)}
# By module: a file of its format, or a name that only a folder of its format has.
FILES: dict[str, Any] = {
    "torch_zip": lambda path: torch.save(WEIGHTS, path),
    "torch_legacy": lambda path: torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False),
    "safetensors": lambda path: save_file(WEIGHTS, path),
}
FOLDERS = {
    "torch_distributed": "__0_0.distcp",
    "deepspeed": "mp_rank_00_model_states.pt",
    "shard_index": "model.safetensors.index.json",
}


def names(modules: Any) -> list[str]:
    return [module.__name__.rpartition(".")[2] for module in modules]


def test_each_module_is_registered_and_has_a_sample_here() -> None:
    modules = {module.name for module in iter_modules(formats.__path__)}
    registered = [*names(formats.file_formats()), *names(formats.folder_formats())]
    assert sorted(registered) == sorted(modules), "add it to _FILES or _FOLDERS of checkpoints/formats/__init__.py"
    assert {*FILES, *FOLDERS} == modules, "add a sample to this file"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognized_by_its_format_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    FILES[name](path)
    head = path.read_bytes()[:1024]
    assert names(form for form in formats.file_formats() if form.recognizes(head)) == [name]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_recognized_by_its_format_alone(name: str) -> None:
    assert names(form for form in formats.folder_formats() if form.FILES.fullmatch(FOLDERS[name])) == [name]
