"""What advice says to do, as code that a test can run."""

import re
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from trainings import quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, load_report
from lightning_gpu_tools.types import Finding


def diagnosed(folder: Path, model: LightningModule, loaders: Any, **options: Any) -> Finding:
    """Train, and return the finding on waiting for data from the report."""
    advisor = GPUUtilizationAdvisor(min_steps=10, min_seconds=0)
    quiet_trainer(folder, callbacks=[advisor], **options).fit(model, loaders)
    return next(one for one in load_report(folder).diagnosis.findings if one.cause == "data_loading")


def settings_in(text: str) -> dict[str, Any]:
    """Return the arguments in ``DataLoader(..., num_workers=4, persistent_workers=True)``."""
    found = re.search(r"DataLoader\(\.\.\., ([^)]*)\)", text)
    assert found is not None, text
    return dict(eval(f"dict({found[1]})"))


def code_in(text: str, pattern: str) -> str:
    """Return the part of a text that matches a pattern, or its first group."""
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1] if found.groups() else found[0]
