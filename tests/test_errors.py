"""Errors survive pickling with their data, because they pass between spawned ranks."""

import inspect
import pickle
import traceback

import pytest

from lightning_gpu_tools import errors


@pytest.mark.parametrize(
    "error_type",
    [error for _, error in inspect.getmembers(errors, inspect.isclass) if issubclass(error, (Exception, Warning))],
)
def test_every_error_survives_pickling(error_type: type[Exception]) -> None:
    arguments = ("what happened", 2, ["GPU 0: busy"]) if error_type is errors.NotEnoughGpusError else ("what happened",)
    error = error_type(*arguments)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_type
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_not_enough_gpus_has_a_reason_for_each() -> None:
    error = errors.NotEnoughGpusError("Asked for 2 GPUs.", 2, ["GPU 0: 4.0 GiB free.", "GPU 1: lost."])
    assert str(error) == "Asked for 2 GPUs."
    assert error.requested == 2
    assert error.rejected == ("GPU 0: 4.0 GiB free.", "GPU 1: lost.")


@pytest.mark.parametrize(
    "error_type", [errors.CheckpointMismatchError, errors.CheckpointNotFoundError, errors.ReportError]
)
def test_no_error_controls_a_terminal(error_type: type[Exception]) -> None:
    error = error_type("net.ckpt:\n  no weight for \x1b[2J\u202e")
    assert str(error) == "net.ckpt:\n  no weight for \\x1b[2J\\u202e"
    assert "\x1b" not in "".join(traceback.format_exception_only(error))


def test_no_warning_or_reason_controls_a_terminal() -> None:
    assert str(errors.LowGPUUtilizationWarning("\x1b[2J")) == r"\x1b[2J"
    assert str(errors.NotEnoughGpusError("None.\n  GPU 0: \x9b2J", 1)) == "None.\n  GPU 0: \\x9b2J"
