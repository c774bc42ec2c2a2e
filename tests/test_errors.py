"""Errors travel between spawned ranks, so they survive pickling with their data."""

import inspect
import pickle

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


def test_not_enough_gpus_lists_each_reason_on_its_own_line() -> None:
    error = errors.NotEnoughGpusError("Asked for 2 GPUs.", 2, ["GPU 0: 4.0 GiB free.", "GPU 1: lost."])
    assert str(error).splitlines() == ["Asked for 2 GPUs.", "  GPU 0: 4.0 GiB free.", "  GPU 1: lost."]
    assert error.requested == 2
    assert error.rejected == ("GPU 0: 4.0 GiB free.", "GPU 1: lost.")
