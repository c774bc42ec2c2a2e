"""A training on the GPU that ends at a step and is resumed: its weights, and the GPU's random numbers."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_trainings import Kill, Unscheduled, plain, train


class Noisy(Unscheduled):
    """Draws on the GPU, too."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch + torch.rand(4, device=self.device))


def fit(folder: Path, seed: int, **options: Any) -> list[torch.Tensor]:
    """Return the weights, and the numbers that the GPU draws next."""
    torch.manual_seed(seed)
    model = Noisy(partial(plain, shuffle=True))
    options = {"deterministic": True, "limit_val_batches": 0, **options}
    train(folder, model, seed, accelerator="gpu", devices=1, **options)
    return [*model.state_dict().values(), torch.cuda.get_rng_state()]


@pytest.mark.follows("Trainer(deterministic=True) prevents that.")
def test_a_training_on_the_gpu_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with pytest.warns(UserWarning, match="Kernels on the GPU may round differently in each run"):
        fit(tmp_path / "other", 7, deterministic=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ExactResume")
        expected = fit(tmp_path / "whole", 7)
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path / "killed", 7, more=[Kill(7)])
    found = fit(tmp_path / "killed", 99, ckpt=tmp_path / "killed" / "step=7.ckpt")
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, expected, found))
