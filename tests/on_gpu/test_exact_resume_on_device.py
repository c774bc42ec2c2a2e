"""A training on the GPU that ends at a step and is resumed: its weights, which depend on the GPU's random numbers."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_trainings import Kill, Model, check, plain, train

ON_GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}


@pytest.mark.follows("Trainer(deterministic=True) prevents that.")
def test_a_training_on_the_gpu_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rounds = "Kernels on the GPU may round differently in each run"
    with pytest.warns(UserWarning, match=rounds), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "other", Model(plain), 7, more=[Kill(0)], **ON_GPU)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ExactResume")
        check(tmp_path, lambda: Model(partial(plain, shuffle=True)), [7], deterministic=True, **ON_GPU)
    torch.use_deterministic_algorithms(False)
