"""Memory that a stored error keeps in use is freed, at a prompt, in a notebook, and in an ``except`` block."""

import gc
import os
import sys
import traceback
import weakref
from code import InteractiveInterpreter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, free_memory


class Batch:
    """Something large that a function of the user has in a variable."""


class Failing:
    """A function that fails with a batch in a variable, and a reference that shows whether it is gone."""

    batch: weakref.ref[Batch]

    def __call__(self) -> None:
        batch = Batch()
        self.batch = weakref.ref(batch)
        raise KeyError("no such sample")


@pytest.fixture(autouse=True)
def _only_new_objects_are_searched() -> Iterator[None]:
    """Have the collector pass by what the other tests have made, which takes longer than all else here."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def failing() -> Failing:
    return Failing()


def at_prompt(code: str, **names: object) -> None:
    """Run code as Python's prompt does, which shows an error and stores it."""
    InteractiveInterpreter(names).runsource(code, symbol="exec")


@pytest.mark.parametrize(
    "code",
    ["failing()", "try: failing()\nexcept KeyError as error:\n  kept.append(error)\n  raise ValueError"],
)
def test_what_the_functions_of_a_failed_cell_hold_dies(failing: Failing, code: str) -> None:
    at_prompt(code, failing=failing, kept=[])
    error = type(sys.last_value).__name__
    gc.collect()
    assert failing.batch() is not None

    freed = free_memory()
    assert failing.batch() is None
    assert not {"last_type", "last_value", "last_traceback", "last_exc"} & vars(sys).keys()
    assert str(freed).splitlines() == ["Freed 0 B of GPU memory.", f"Released: the traceback of {error}."]


def test_without_an_error_nothing_is_released() -> None:
    had_ipython = "IPython" in sys.modules
    free_memory()
    assert "Released: nothing, because no error and no result was stored." in str(free_memory())
    assert ("IPython" in sys.modules) == had_ipython
    assert not torch.cuda.is_initialized()


def test_in_an_except_block_only_failed_frames_are_freed(failing: Failing) -> None:
    def train() -> tuple[Batch, BaseException]:
        mine = Batch()
        try:
            failing()
        except KeyError as error:
            assert free_memory().released == ("the traceback of KeyError",)
            assert failing.batch() is None
            return mine, error
        raise AssertionError

    mine, error = train()
    assert isinstance(mine, Batch)
    lines = "".join(traceback.format_tb(error.__traceback__))  # which still tells where
    assert 'raise KeyError("no such sample")' in lines


class Fails(Model):
    """Fails in a step, with a batch and what a layer made of it."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.layer(batch)
        if batch_idx == 3:
            self.hidden = weakref.ref(hidden)
            raise RuntimeError("out of memory")
        return hidden.square().mean()


def test_after_a_measured_fit_the_activations_are_gone(tmp_path: Path) -> None:
    callbacks = [GPUUtilizationMonitor(), GPUUtilizationAdvisor()]
    model, trainer = Fails(), quiet_trainer(tmp_path, callbacks=callbacks)
    at_prompt("trainer.fit(model, loader)", trainer=trainer, model=model, loader=loader(Samples(8)))
    assert model.hidden() is not None
    free_memory()
    assert model.hidden() is None


NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
names = shell.user_ns

def cell(code):
    return shell.run_cell(code, store_history=True).result

cell("import weakref; from lightning_gpu_tools import free_memory")
cell('''
class Batch: pass
class Failed(Exception): pass
mine = Batch()
def train(failure):
    global batch_ref, failure_ref
    batch = Batch()
    batch_ref, failure_ref = weakref.ref(batch), weakref.ref(failure)
    raise failure
''')
cell("Batch()")
cell("result_ref = weakref.ref(Out[3])")
cell("train(Failed())")
assert names["batch_ref"]() is not None and names["result_ref"]() is not None
cell("freed = free_memory(); alive = batch_ref(), failure_ref(), result_ref()")
assert names["freed"].released == ("the traceback of Failed", "Out")
assert names["alive"] == (None, None, None)
assert isinstance(names["mine"], names["Batch"])
cell("kept = Failed(); train(kept)")
assert cell("free_memory()").released == ("the traceback of Failed",)
assert names["batch_ref"]() is None
assert names["failure_ref"]() is names["kept"]
assert cell("1 + 1") == 2
shell.run_line_magic("debug", "")
"""


def in_notebook(folder: Path, rank: int) -> None:
    os.environ["IPYTHONDIR"] = str(folder)
    exec(NOTEBOOK, {"__name__": "__main__"})


def test_the_error_of_a_notebooks_cell_is_released(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    (ended,) = run_ranks(tmp_path, in_notebook, ranks=1)
    assert ended.returncode == 0, ended.stderr
    assert "\nReleased: the traceback of Failed.\n" in ended.stdout
    assert "nothing to debug" in ended.stderr
