"""Tables of README.md and docs/, generated from benchmarks/results/, docstrings, and command-line options.

    python -m benchmarks.tables

Each table is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Below measured figures are the command and
the machine that measured them. A test fails if a table differs from the output of this program.
"""

import functools
import re
from collections.abc import Callable

from lightning_gpu_tools.advice.causes import MEMORY_CAUSES, TIME_CAUSES
from lightning_gpu_tools.advice.findings import Diagnosis, Finding
from lightning_gpu_tools.advice.memory_account import MemoryAccount, OtherProcess
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.dry_run.result import DryRun
from lightning_gpu_tools.gpus.metrics import GpuSummary, Series
from lightning_gpu_tools.processes import ProcessId
from lightning_gpu_tools.reports.report import Report
from lightning_gpu_tools.training.run_measurements import LoaderResult, RankStep, SourceLine

from . import checkpoints, costs, fields, figures, gpus, loaders, on_hardware, projects, suites
from .markdown import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    **{
        one.__name__: one
        for one in (
            *(gpus.pick_speed, gpus.diagnosis_on_gpu, gpus.largest_batch, gpus.dry_run_peaks, gpus.dry_run_error),
            *(gpus.dry_run_batches, gpus.published_peaks),
            *(loaders.ceilings, loaders.loader_settings, loaders.loader_searches),
            *(suites.diagnosis, suites.versions, suites.lightning_tests, suites.stalls),
            *(costs.step_overhead, costs.source_lines, costs.scale),
            *(checkpoints.checkpoint_keys, checkpoints.checkpoint_io),
            *(checkpoints.exact_resume, checkpoints.crash_consistency),
            *(projects.real_projects,),
            *(
                fields.gpu_metrics,
                fields.phases,
                fields.memory_parts,
                fields.stall_causes,
                fields.options,
                fields.commands,
            ),
            *(
                on_hardware.h100_tests,
                on_hardware.h200_advice,
                on_hardware.h100_diagnosis,
                on_hardware.h100_largest_batch,
                on_hardware.h200_gpu_times,
                on_hardware.h200_peaks,
            ),
            figures.figures,
        )
    },
    "causes": functools.partial(fields.causes, TIME_CAUSES),
    "memory_causes": functools.partial(fields.causes, MEMORY_CAUSES),
    **{f"case_{name.replace('-', '_')}": functools.partial(projects.case, name) for name in projects.CASES},
    **{
        kind.__name__: functools.partial(fields.fields, kind)
        for kind in (
            *(Report, GpuSummary, Diagnosis, Finding, RankStep, SourceLine, MemoryAccount, OtherProcess),
            *(LoaderResult, ProcessId, Series, Stall, DryRun),
        )
    },
}


def filled(page: str) -> str:
    """Return a page with new tables."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", page)
