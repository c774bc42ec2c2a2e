"""Causes: of lost time, of full memory, and of stalls; here in the order in which they are judged, with the reasons.

Each has one file below this folder with everything about it. The report, ``lightning-gpu-tools explain``, the tables of
docs/ and the tests read them from here.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lightning_gpu_tools.advice.findings import Cause
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts
from lightning_gpu_tools.training.run_measurements import RunMeasurements
from lightning_gpu_tools.training.stall_facts import StallFacts

# All of these are judged, and those with the largest gain are reported. A cause comes after those that it depends on.
_TIME = (
    "shared_gpu",  # if other jobs compute, the GPU's utilization says nothing about this one
    "slowing_down",  # slow steps that grow have this reason
    "straggler",
    "communication",  # ranks that wait for a slow one do not wait for the network
    "small_batch",  # communication also keeps few multiprocessors busy
    "recompilation",
    "data_loading",
    "slow_steps",  # are explained by a straggler, recompilation, or data_loading
    "callback",
    "checkpoint",
    "cpu_contention",
    "device_sync",
    "epoch_start",
    "garbage_collection",
    "host_to_device_copy",
    "host_work",
    "launch_bound",
    "logging",
    "low_precision",
    "power_cap",
    "thermal_throttling",
    "validation",
    "unexplained",  # what has no other name
)
# The first one found is the verdict; the others are also reported. From certain to likely, because the sizes of later
# ones include what earlier ones have taken.
_MEMORY = (
    "loading_checkpoint",  # certain: memory ran out in that call
    "stray_contexts",  # certain: the driver lists them
    "spike",  # compares this step with others of the same run
    "leftover_process",
    "other_processes",  # without those left over
    "evaluation_graph",
    "memory_growth",  # without graphs kept in validation
    "fragmentation",
    "optimizer_too_large",
    "model_too_large",
    "batch_too_large",  # what remains if the model fits and nothing else has grown
    "unexplained",  # only if no other is found
)
# The first one found is the cause.
_STALLS = (
    "rank_behind",  # the others only wait for it
    "collective",  # all ranks wait
    "swap",  # slows everything down, so it comes before the processes
    "storage",  # a worker that waits for storage is not to blame
    "blocked_worker",
    "dataset",
    "code",  # anywhere else
)


def _causes(kind: str, names: Sequence[str]) -> dict[str, Any]:
    return {name: import_module(f"lightning_gpu_tools.advice.causes.{kind}.{name}").CAUSE for name in names}


TIME_CAUSES: dict[str, Cause[RunMeasurements]] = _causes("time", _TIME)
MEMORY_CAUSES: dict[str, Cause[ErrorFacts]] = _causes("memory", _MEMORY)
STALL_CAUSES: dict[str, Cause[StallFacts]] = _causes("stalls", _STALLS)
