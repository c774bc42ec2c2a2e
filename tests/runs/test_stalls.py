"""Trainings that hang, as real processes, and the words on each while it hangs."""

import re
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Trainer
from rank_processes import start_ranks
from stall_cases import AT, HAS_RECORD, STALLS, Acting, Case, evaluation, fit

from lightning_gpu_tools import GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.advice.stalls import Stall
from lightning_gpu_tools.errors import ReportError, StalledTrainingWarning

pytestmark = pytest.mark.timeout(600)  # of the first test, which waits for all trainings
STALL_S = 6.0  # on a busy machine, a rank may be late by a third of it without being silent
BEFORE_TRAINING = "before training"
CASES = STALLS | {BEFORE_TRAINING: Case(evaluation, words="during setup at step 0.\nWorker 0 (PID ")}


def found(case: Case, folder: Path) -> Stall | str | None:
    """Return the words on a case so far: in its report, or on the terminal where it has none yet."""
    if case.cause is None:
        file = folder / "stderr0"
        text = file.read_text() if file.exists() else ""
        return text if case.words in text else None
    with suppress(ReportError):
        # On a busy machine, a training may also stall for a while.
        hanging = (one for one in load_report(folder).stalls if not one.is_over)
        return next((one for one in hanging if one.cause == case.cause), None)
    return None


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Stall | str | None, Path]]:
    """Words on each case; all of them hang at the same time, which costs nothing."""
    folders = {name: tmp_path_factory.mktemp("hangs") for name in CASES}
    started = []
    for name, case in CASES.items():
        started += start_ranks(folders[name], case.train, ranks=case.ranks, options={"stall_after_s": STALL_S})
    until_s = time.monotonic() + 300  # which is over as soon as all are named
    try:
        while time.monotonic() < until_s and not all(found(case, folders[name]) for name, case in CASES.items()):
            time.sleep(0.2)
    finally:
        for process in started:
            with suppress(psutil.NoSuchProcess):  # a rank ends by itself once another one is killed
                for worker in psutil.Process(process.pid).children(recursive=True):
                    worker.kill()  # one that hangs does not see that its parent has gone
            process.kill()
            process.join()
    return {name: (found(case, folders[name]), folders[name]) for name, case in CASES.items()}


@pytest.mark.parametrize("name", STALLS)
def test_what_hangs_is_named_while_it_hangs(name: str, said: dict[str, tuple[Stall, Path]]) -> None:
    case, (stall, folder) = STALLS[name], said[name]
    assert stall is not None, (folder / "stderr0").read_text()
    assert case.words in stall.why
    assert stall.rank == case.rank
    assert not stall.is_over
    assert stall.lasted_s >= STALL_S
    assert stall.next_step
    assert stall.stack
    assert len(stall.ranks) == (case.ranks if case.ranks > 1 else 0)
    texts = [(folder / f"stderr{rank}").read_text() for rank in range(case.ranks)]
    # One rank speaks for all.
    assert [stall.why in text for text in texts] == [True, *[False] * (case.ranks - 1)]
    assert "Training has made no progress for " in texts[0]
    assert "Stack of the training thread" in texts[0]
    assert stall.cause != "dataset" or stall.stack[-3].endswith(" in hang")
    assert name != "a rank that waits for data" or " in hang" in " ".join(stall.stack)  # of that rank


# By what is advised: the case, how its training follows that, and the error with which it then ends, if with one.
FOLLOWED: dict[str, tuple[str, dict[str, Any], str]] = {
    "DataLoader(timeout=": ("a dataset that blocks in one worker", {"timeout": 1}, "timed out"),
    'multiprocessing_context="spawn"': (
        "workers dead-locked after fork",
        {"multiprocessing_context": "spawn", "num_workers": 1},  # each imports Lightning
        "",
    ),
    '"forkserver"': ("workers dead-locked after fork", {"multiprocessing_context": "forkserver", "num_workers": 1}, ""),
    "Let the error end the process": ("an error swallowed on one rank", {"swallow": False}, "corrupt sample"),
    "DistributedSampler(dataset, drop_last=True)": ("uneven numbers of batches", {"is_distributed": True}, ""),
    "Trainer(limit_train_batches=": ("uneven numbers of batches", {"limit_train_batches": AT}, ""),
    "no self.log(..., sync_dist=True)": ("sync_dist on one rank", {"ranks": (0, 1)}, ""),
    "trainer.save_checkpoint() or barrier": ("a checkpoint on one rank", {"ranks": (0, 1)}, ""),
}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int | None, str]]]:
    """How each rank of each training ended that follows the advice, and its messages; all ran at the same time."""
    started = {}
    for words, (name, options, _) in FOLLOWED.items():
        folder, case = tmp_path_factory.mktemp("followed"), STALLS[name]
        options = {"stall_after_s": None, **options}
        started[words] = folder, start_ranks(folder, case.train, ranks=case.ranks, options=options)
    ended = {}
    for words, (folder, processes) in started.items():
        for process in processes:
            process.join(150)
        texts = [(folder / f"stderr{rank}").read_text() for rank in range(len(processes))]
        ended[words] = [(process.exitcode, text) for process, text in zip(processes, texts, strict=True)]
    return ended


@pytest.mark.follows(
    "DataLoader(timeout=60) raises an error instead",
    'Set multiprocessing_context="spawn" or "forkserver"',
    "Let the error end the process",
    "Give every rank the same number of batches",
    "Make the same calls with the same sizes on every rank",
)
@pytest.mark.parametrize("words", FOLLOWED)
def test_a_training_that_follows_the_advice_ends(
    words: str, said: dict[str, tuple[Stall, Path]], followed: dict[str, list[tuple[int | None, str]]]
) -> None:
    name, _, error = FOLLOWED[words]
    assert words in said[name][0].next_step
    codes, texts = zip(*followed[words], strict=True)
    assert None not in codes, "it hangs"
    assert any(error in text for text in texts) if error else not any(codes), texts


@pytest.mark.skipif(not HAS_RECORD, reason="this torch keeps no record of gloo's calls")
def test_the_collective_is_named_that_a_rank_has_not_called(said: dict[str, tuple[Stall, Path]]) -> None:
    stall, _ = said["a rank that waits for data"]
    called = r" Collective no\. \d+: rank 0 called all_reduce of 5 float32 numbers; rank 1 did not call it\.$"
    assert re.search(called, stall.why)
    assert stall.ranks[0].endswith("waiting in all_reduce of 5 float32 numbers")


def test_a_sanity_check_that_hangs_is_named(said: dict[str, tuple[str, Path]]) -> None:
    assert said[BEFORE_TRAINING][0], (said[BEFORE_TRAINING][1] / "stderr0").read_text()


def test_a_training_that_goes_on_says_so(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")

        def stalls() -> list[str]:
            return [str(one.message) for one in warned if one.category is StalledTrainingWarning]

        def wait(trainer: Trainer) -> None:
            while trainer.global_step == AT and not stalls():
                time.sleep(0.01)

        fit(tmp_path, 0.3, Acting("on_train_batch_end", wait))
    assert re.search(r"in Acting at step 12\.\nThe training process .* in wait \(", stalls()[0])
    (stall,) = load_report(tmp_path).stalls
    assert stall.is_over
    assert stall.lasted_s >= 0.3
    assert stalls()[1:] == []


@pytest.mark.parametrize("stall_after_s", [0, -1.0, "never"])
def test_what_is_no_duration_is_refused(stall_after_s: Any) -> None:
    with pytest.raises(ValueError, match="stall_after_s must be"):
        GPUUtilizationMonitor(stall_after_s=stall_after_s)
    with pytest.raises(ValueError, match="stall_after_s must be"):
        watch(stall_after_s=stall_after_s)
