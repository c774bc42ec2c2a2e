"""Measurements of runs, written by hand, with one known cause each: on a GPU, which none of them needs, or the CPU.

They test that the rules distinguish the causes, not that hardware behaves this way.
"""

import dataclasses
import sys
from typing import Any, NamedTuple

from harness import TESTS

sys.path.append(str(TESTS))

from cause_examples import TIME_EXAMPLES
from synthetic import HOPPER, NO_WORKERS, STEP, WAITS, contended, cpu_run, gpu_run, on_hopper, sampled_idle

from lightning_gpu_tools.training.phases import BACKWARD, FORWARD, OPTIMIZER, RANK_WAIT_IN_STEP
from lightning_gpu_tools.training.run_measurements import LoaderFacts, LoadingFacts, RunMeasurements, SourceLine


class Measured(NamedTuple):
    """Measurements, the expected answer, the first finding's expected share, and words that the advice must have."""

    known: str
    run: RunMeasurements
    share: float | None = None
    words: str = ""


def cold_cache() -> RunMeasurements:
    """Return a run that reads from storage in its first half, and from the page cache in its second half."""
    loading = LoadingFacts(early_storage_bytes_per_batch=8e6, late_storage_bytes_per_batch=1e5)
    run = gpu_run(WAITS, 25.0, loading=loading)
    phase_s = {**run.blocks[0].phase_s, "data_loading": 0.05}
    warm = [dataclasses.replace(one, phase_s=phase_s, wall_s=0.15) for one in run.blocks[:9]]
    return dataclasses.replace(run, blocks=[*run.blocks[:11], *warm])


def sick(cause: str, share: float | None = None, words: str = "", kind: str = "") -> Measured:
    """Return the example of a cause, with its expected answer."""
    return Measured(f"{cause} {kind}".strip(), TIME_EXAMPLES[cause].sick, share, words)


def _facts(**options: Any) -> dict[str, Any]:
    """Return the options of a run with these facts about its loader, from the beginning on."""
    facts = LoaderFacts(kind="torch.utils.data.dataloader.DataLoader", dataset="Photos", **options)
    return {"loader_began": facts, "loader_now": facts}


_IN_GETITEM = (SourceLine(phase="data_loading", file="data.py", line=41, function="__getitem__", samples=200),)
_WAITS_FOR_RANKS = dataclasses.replace(sampled_idle(), steps_s=[{RANK_WAIT_IN_STEP: 0.020}])
_ON_STORAGE = LoadingFacts(storage_wait_share=0.6)
MEASURED = {
    ".item() in every step": sick("device_sync", 0.5, "train.py:42"),
    "many small kernels": sick("launch_bound", 0.6, "torch.compile"),
    "a model too small for a GPU": Measured(
        "launch_bound", gpu_run({"training_step": 1.5, "callback/A": 0.2, "logging/B": 0.2, "trainer": 0.7}, 12.0),
        words="too small for this GPU",
    ),
    "copies that nothing hides": sick("host_to_device_copy", 0.38),
    "copies behind GPU work": Measured(
        "healthy",
        gpu_run(
            {"host_to_device_copy": 19, "training_step": 1}, 99.0, gpu_idle=sampled_idle(host_to_device_copy=(19, 0.2))
        ),
    ),
    "large products, of which the driver's readings are late": Measured(  # 3.5 s on an H200
        "healthy",
        dataclasses.replace(
            gpu_run({"host_to_device_copy": 0.3, "data_loading": 14.0, "training_step": 32.1}, 50.5),
            gpu_idle=dataclasses.replace(
                sampled_idle(host_to_device_copy=(0.3, 0.2), data_loading=(14.0, 0.1)),
                work_s={FORWARD: 0.0132, BACKWARD: 0.0243, OPTIMIZER: 0.0017},
            ),
        ),
    ),
    "data that the GPU waits for": Measured(
        "data_loading too_few_workers",
        gpu_run(
            {"data_loading": 29, "training_step": 1}, 67.0, loader=NO_WORKERS,
            gpu_idle=sampled_idle(data_loading=(29, 10)),
        ),
        0.33, "num_workers=",
    ),
    "data loaded behind GPU work": Measured(
        "healthy",
        gpu_run({"data_loading": 10, "training_step": 10}, 99.0, gpu_idle=sampled_idle(data_loading=(10, 0.1))),
    ),
    "a slow callback behind a sync": Measured(
        "callback Spending",
        gpu_run(
            {"callback/Spending": 15, "training_step": 21}, 58.0,
            gpu_idle=sampled_idle(**{"callback/Spending": (15, 15)}),
        ),
        15 / 36,
    ),
    "a host slower than its kernels": Measured("unexplained training_step", gpu_run({"training_step": 30}, 33.0)),
    "host work in the step": sick("host_work", 0.6, "train.py:57 in augment"),
    "a small batch": sick("small_batch", 0.70, "batch_size=256 (now 32"),
    "fp32 next to idle tensor cores": sick("low_precision", words="bf16-mixed"),
    "communication that nothing hides": Measured(
        "communication",
        gpu_run(STEP, 95.0, **on_hopper(sm_active_percent=25.0), gpu_idle=_WAITS_FOR_RANKS), 0.4,
    ),
    "a slow rank under a busy GPU": sick("straggler", 0.4, "All ranks wait for rank 3 (node 1)", "forward"),
    "heat": sick("thermal_throttling", 0.18, "Heat"),
    "a low power limit": sick("power_cap", words="sudo nvidia-smi -pl 700"),
    "the power limit at full load": Measured("healthy", TIME_EXAMPLES["power_cap"].healthy),
    "too many threads": sick("cpu_contention", 0.4, "num_workers=1 (now 4)", "own_threads"),
    "two of 64 cores by SLURM": Measured(
        "cpu_contention own_threads", contended(machine_cores=64, runnable_threads=16.0), 0.4, "sbatch --cpus-per-task",
    ),
    "threads that hardly wait for a core": Measured("healthy", TIME_EXAMPLES["cpu_contention"].healthy),
    "someone else's job": sick("shared_gpu", 0.4, "FreeMemoryCUDAAccelerator(exclusive=True)"),
    "slow storage": Measured(
        "data_loading io_bound", gpu_run(WAITS, 25.0, loading=_ON_STORAGE, worker_cpu_s_per_batch=0.02), 0.75,
        "waiting for storage in 60%",
    ),
    "a busy GPU": Measured("healthy", gpu_run({"data_loading": 30, "training_step": 20}, 93.0, gpu=HOPPER)),
    "a GPU that reports nothing": Measured("unknown", gpu_run(STEP, None)),
    "a checkpoint too rare to be sampled": Measured(
        "checkpoint",
        gpu_run({"checkpoint": 30, "training_step": 70}, 60.0, gpu_idle=sampled_idle(training_step=(0.0, 0.0))), 0.3,
    ),
    "a stream that does not split": Measured(
        "data_loading too_few_workers", cpu_run(WAITS, **_facts(is_iterable=True, splits=False)), 0.75,
        "split what `__iter__` reads by torch.utils.data.get_worker_info()",
    ),
    "a dataset with an open file": Measured(
        "data_loading too_few_workers", cpu_run(WAITS, **_facts(open_files=("Photos.file",))), 0.75,
        "`Photos.file` is open, and forked workers would share it. Open it in the worker",
    ),
    "fewer shards than workers": Measured(
        "data_loading too_few_workers", cpu_run(WAITS, **_facts(is_iterable=True, splits=True, shards=2)), 0.75,
        "the dataset has 2 shards",
    ),
    "samples that take no longer than to call for them": Measured(
        "data_loading cpu_bound",
        cpu_run(
            WAITS, load_cpu_ms=29, loader=dataclasses.replace(NO_WORKERS, batch_size=4096), lines=_IN_GETITEM,
            **_facts(),
        ),
        0.75, "`__getitems__(self, indices)`",
    ),
    "a cold page cache": Measured("data_loading cold_cache", cold_cache(), words="Later epochs need no change"),
}  # fmt: skip
