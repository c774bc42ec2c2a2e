"""What a diagnosis advises, and what this says to do, as code that a test can run."""

import re
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from trainings import quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, load_report


def finding_on(diagnosed: Any, cause: str) -> Any:
    """Return the finding on a cause in the diagnosis of a report, an advisor or a watch; ``None`` if it has none."""
    return next((one for one in diagnosed.diagnosis.findings if one.cause == cause), None)


def advice_on(diagnosed: Any, cause: str) -> str:
    """Return the advice on a cause; empty if there is no finding."""
    finding = finding_on(diagnosed, cause)
    return finding.advice if finding else ""


def diagnosed(folder: Path, model: LightningModule, loaders: Any, **options: Any) -> Any:
    """Train, and return the finding on waiting for data from the report."""
    advisor = GPUUtilizationAdvisor(min_steps=10, min_seconds=0)
    quiet_trainer(folder, callbacks=[advisor], **options).fit(model, loaders)
    return finding_on(load_report(folder), "data_loading")


def code_in(text: str, pattern: str) -> str:
    """Return the part of a text that matches a pattern, or its first group."""
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1] if found.groups() else found[0]


def options_in(text: str, pattern: str) -> dict[str, Any]:
    """Return the options in the part of a text that a pattern finds, ``num_workers=4, persistent_workers=True``."""
    return dict(eval(f"dict({code_in(text, pattern)})"))


def settings_in(text: str) -> dict[str, Any]:
    """Return the arguments in ``DataLoader(..., num_workers=4, persistent_workers=True)``."""
    return options_in(text, r"DataLoader\(\.\.\., ([^)]*)\)")
