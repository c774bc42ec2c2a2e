"""Errors survive pickling with their data, because they pass between spawned ranks. Wrong arguments are named."""

import inspect
import math
import pickle
import re
import traceback
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trainings import Samples

import lightning_gpu_tools
from lightning_gpu_tools import errors

TEXT = "net.ckpt:\n  no weight for \x1b[2J\u202e"


@pytest.mark.parametrize(
    "error_type",
    [error for _, error in inspect.getmembers(errors, inspect.isclass) if issubclass(error, (Exception, Warning))],
)
def test_every_error_survives_pickling_and_controls_no_terminal(error_type: type[Exception]) -> None:
    arguments = (TEXT, 2, ["GPU 0: busy"]) if error_type is errors.NotEnoughGpusError else (TEXT,)
    error = error_type(*arguments)
    assert str(error) == "net.ckpt:\n  no weight for \\x1b[2J\\u202e"
    assert "\x1b" not in "".join(traceback.format_exception_only(error))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_type
    assert copy.args == error.args
    assert vars(copy) == vars(error)


MONITOR, ADVISOR, FIND = "GPUUtilizationMonitor", "GPUUtilizationAdvisor", "find_loader_settings"
NETWORK, LOADER = torch.nn.Linear(1, 1), DataLoader(Samples(5))
PERCENTAGE = "must be 0, or a percentage from 1 to 100, got"


@pytest.mark.parametrize(
    ("name", "given", "options", "message"),
    [
        (MONITOR, (), {"interval_s": 0}, "interval_s must be a positive number of seconds, got 0."),
        (MONITOR, (), {"devices": [0]}, 'devices must be "trainer" or "all", got [0].'),
        (MONITOR, (), {"report": "no"}, "report must be True or False, got 'no'."),
        (MONITOR, (), {"stall_after_s": "5m"}, "positive number of seconds, got '5m'."),
        (ADVISOR, (), {"min_utilization_percent": 0.8}, f"min_utilization_percent {PERCENTAGE} 0.8. For 80%, give 80."),
        (ADVISOR, (), {"min_steps": 1.5}, "min_steps must be an integer, got 1.5."),
        (ADVISOR, (), {"min_seconds": -1}, "min_seconds must not be negative, got -1."),
        ("NumWorkersFinder", (), {"budget_s": math.inf}, "budget_s must be a positive number of seconds, got inf."),
        ("PortableCheckpointIO", ("run",), {}, "inner must be a plugin that reads and writes checkpoints, got 'run'."),
        ("watch", ("run",), {}, "fabric must be a Fabric, got 'run'. To set the folder, use watch(folder=...)."),
        ("watch", (), {"folder": 3}, "folder must be text or a path or None, got 3."),
        (FIND, (LOADER, "0.1"), {}, "step_time_s must be a positive number of seconds, got '0.1'."),
        ("select_gpus", ("2",), {}, "count must be an integer of at least 1, got '2'."),
        ("load_report", (None,), {}, "path must be a path or a URL, got NoneType."),
        ("load_weights", (NETWORK, NETWORK.state_dict()), {}, "path must be a path or a URL, got OrderedDict."),
        ("load_weights", (NETWORK, "a.ckpt"), {"strict": "no"}, "strict must be True or False, got 'no'."),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(
    name: str, given: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{re.escape(message)}$"):
        getattr(lightning_gpu_tools, name)(*given, **options)
