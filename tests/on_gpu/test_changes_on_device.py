"""What a run on a GPU changes in the process is in the table of docs/what_the_monitor_changes.md, and is put back."""

from pathlib import Path

import pytest
from process_changes import fit_changes, lightnings, table

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor

LOOKS_AT = range(20, 36)  # some of them are steps in which waits for the GPU are looked for


@pytest.mark.filterwarnings("ignore")
def test_every_change_on_a_gpu_is_in_the_table(tmp_path: Path) -> None:
    options = {"accelerator": "gpu", "looks_at": LOOKS_AT}
    of_lightning = lightnings(fit_changes(tmp_path, **options))
    ours = fit_changes(tmp_path, [GPUUtilizationMonitor(), GPUUtilizationAdvisor()], **options)
    assert ours.during - of_lightning - table().keys() == set()
    assert ours.after - of_lightning == set()
    on_a_gpu = table("On a GPU").keys() - {"torch.cuda.memory._record_memory_history"}  # not readable
    assert on_a_gpu - ours.during == set()
