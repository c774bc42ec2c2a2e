"""Real errors of torch's allocator: their explanation, the counters at that moment, and their way to the program."""

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import out_of_memory as runs
import pytest
import torch
from out_of_memory import CASES, Case, answer, judged, train_in_new_process
from rank_processes import start_ranks
from synthetic import STEP, an_error, gpu_run
from torch.utils.data import DataLoader
from trainings import Model, Samples, loader, quiet_trainer

from lightning_gpu_tools import GPUUtilizationAdvisor, GPUUtilizationMonitor, load_report, watch
from lightning_gpu_tools.advice.causes import MEMORY_CAUSES
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts
from lightning_gpu_tools.gpus import nvml
from lightning_gpu_tools.memory.readings import SETUP, MemoryHoldings
from lightning_gpu_tools.reports.report import Report

pytestmark = pytest.mark.usefixtures("two_gib")

MIB, GIB = 2**20, 2**30


def taken(size: float) -> torch.Tensor:
    """Return a tensor of so many GiB."""
    return torch.empty(int(size * GIB), dtype=torch.uint8, device="cuda")


WITH_BACKEND = [name for name, case in CASES.items() if "backend" in case.allocator]


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITH_BACKEND])
def test_what_filled_the_memory_is_named(name: str, tmp_path: Path) -> None:
    if CASES[name].ranks > torch.cuda.device_count():
        pytest.skip("needs a GPU for each rank")
    if CASES[name].known == "stray_contexts" and not nvml.pids_are_ours():
        pytest.skip("in a container nobody knows how much the other rank holds")
    said = judged(CASES[name], tmp_path)
    assert said["right"], "\n".join(map(str, said.items()))


def word(pattern: str, advice: str) -> str:
    """Return what advice has at this place."""
    found = re.search(pattern, advice)
    assert found is not None, advice
    return found[1]


def number(pattern: str, advice: str) -> int:
    return int(word(pattern, advice).replace(",", ""))


def smaller_batches(case: Case, advice: str) -> dict[str, Any]:
    accumulate = number(r"accumulate_grad_batches=(\d+) \(now \d+\)", advice)
    size = number(r"Set batch_size=(\d+) \(now \d+\)", advice)
    effective = case.batches().batches[4].shape[0] * case.options.get("accumulate_grad_batches", 1)
    assert size * accumulate == pytest.approx(effective, rel=0.01)
    options = {**case.options, "accumulate_grad_batches": accumulate}
    return {"batches": partial(runs.Batches, size), "options": options}


def smaller_validation_batches(case: Case, advice: str) -> dict[str, Any]:
    size = number(r"Set batch_size=(\d+) of the validation loader", advice)
    return {"validation": partial(runs.Batches, size, count=4)}


def other_precision(case: Case, advice: str) -> dict[str, Any]:
    return {"options": {"precision": word(r"precision='([\w-]+)'", advice)}}


def other_allocator(case: Case, advice: str) -> dict[str, Any]:
    return {"allocator": word(r"Set (PYTORCH\S+) in the environment", advice)}


def with_model(words: str, model: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that checks that these words are advised, and makes another model."""

    def follow(case: Case, advice: str) -> dict[str, Any]:
        assert words in advice
        return {"model": partial(model, *args, **options)}

    return follow


def keeping(words: str, *kept: Any, **options: Any) -> Callable[..., dict[str, Any]]:
    return with_model(words, runs.Keeps, *kept, **options)


large = replace(
    CASES["a batch that fits in forward alone"],
    model=partial(runs.Layers, 12),
    batches=partial(runs.Batches, 200),
    allowed=9600,
)
read_on_cpu = partial(runs.LoadsACheckpoint, 8, map_location="cpu", mmap=True)
FOLLOWED: list[tuple[Case, Callable[[Case, str], dict[str, Any]]]] = [
    (CASES["a batch that fits in forward alone"], smaller_batches),
    (CASES["a validation batch too large"], smaller_validation_batches),
    (large, other_precision),
    (CASES["states too large"], with_model("Set AdamW(..., fused=True)", runs.Layers, 13, fused=True)),
    (CASES["memory in pieces"], other_allocator),
    (CASES["graphs kept"], keeping("loss.detach()", runs.mean_without_graph)),
    (CASES["outputs kept"], keeping("loss.item()", runs.as_a_number)),
    (CASES["a graph in validation"], keeping("Remove torch.enable_grad()", None, runs.mean_with_graph)),
    (CASES["a graph in validation"], keeping("metric.detach()", None, runs.mean_without_graph, with_graph=True)),
    (CASES["outputs kept in validation"], keeping("Reduce outputs to numbers", None, runs.as_a_number)),
    (CASES["outputs kept in validation"], keeping("to the CPU (.cpu())", None, runs.on_the_cpu)),
    (CASES["a checkpoint on the GPU"], with_model("torch.load(path, map_location='cpu', mmap=True)", read_on_cpu)),
    (CASES["a hook that takes too much"], with_model("Do it in parts", runs.AtEpochEnd, 16)),
    (
        CASES["a hook that takes too much"],
        with_model("and under torch.no_grad()", runs.AtEpochEnd, 3, with_graph=False),
    ),
]


@pytest.mark.follows(
    "Set batch_size={} (now {}), and {} to keep the effective batch size",
    "Set batch_size={}{} (now {})",
    "precision='bf16-mixed' (frees up to {})",
    "Set {}(..., fused=True): its step needs up to {} less",
    "losses and outputs in lists (keep loss.item() or loss.detach())",
    "validation, or detach what it keeps (metric.detach())",
    "move kept tensors to the CPU (.cpu())",
    "torch.load(path, map_location='cpu', mmap=True)",
    ", and under torch.no_grad()",
)
@pytest.mark.parametrize(
    ("case", "follow"), FOLLOWED, ids=[f"{number}-{follow.__name__}" for number, (_, follow) in enumerate(FOLLOWED)]
)
def test_a_training_fits_once_its_advice_is_followed(
    case: Case, follow: Callable[[Case, str], dict[str, Any]], tmp_path: Path
) -> None:
    for folder in ("as it is", "followed"):
        (tmp_path / folder).mkdir()
    said = judged(case, tmp_path / "as it is")
    assert said["said"] == case.known, said
    changes = follow(case, said["next"])
    healthy = replace(case, **{"known": "", "phase": "", "words": "", "line": "", **changes})
    after = judged(healthy, tmp_path / "followed")
    assert after["outcome"] == "completed", (said["next"], changes, after)


@pytest.mark.follows("precision='bf16-true', which needs half as much")
def test_a_model_that_is_too_large_fits_in_half_precision(tmp_path: Path) -> None:
    size = MemoryHoldings(parameters_bytes=8 * GIB, gradients_bytes=8 * GIB, optimizer_bytes=16 * GIB)
    error = an_error(phase=SETUP, model=size)
    (finding,) = MEMORY_CAUSES["model_too_large"].find(ErrorFacts(gpu_run(STEP, precision="32-true"), error))
    case = replace(CASES["all of it fits"], model=partial(runs.Layers, 14), validation=None)
    for folder, options in (("as it is", {}), ("followed", other_precision(case, finding.advice)["options"])):
        (tmp_path / folder).mkdir()
        after = judged(replace(case, options=options), tmp_path / folder)
        assert (after["outcome"] == "completed") == bool(options), after


@pytest.mark.skipif("SIMULATED_CUDA" in os.environ, reason="cudaMallocAsync is not simulated")
def test_the_drivers_allocator_is_read_where_it_counts(tmp_path: Path) -> None:
    cases = {tmp_path / name: CASES[name] for name in WITH_BACKEND}
    for folder in cases:
        folder.mkdir()
    train_in_new_process(cases)
    for folder, case in cases.items():
        said = answer(case, folder)
        assert said["right"], "\n".join(map(str, said.items()))
        report = load_report(folder)
        if case.known:  # read at that moment: torch frees the graph before the error comes
            sizes = [report.diagnosis.findings[0].evidence[f"{one}_bytes"] for one in ("allocated", "requested")]
            assert sum(sizes) > report.diagnosis.findings[0].evidence["allowed_bytes"]
        (account,) = report.memory
        parts = account.parts_bytes
        # What the case before it left may be freed before or after training begins.
        assert parts.get("other_tensors", 0) + parts.get("earlier_tensors", 0) > 0
        assert not account.peak_lines


def test_torchs_own_error_goes_on_after_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ask for 6 GiB beside 512 MiB, free all of it, and keep the error."""
    errors = []

    class Fails(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            held = taken(1 / 2)
            try:
                taken(6)
            except torch.OutOfMemoryError as error:
                del held
                torch.cuda.empty_cache()
                errors.append(error)
                raise

    advisor = GPUUtilizationAdvisor()
    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[advisor, GPUUtilizationMonitor()])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Fails(), loader(Samples(60)))
    assert [caught.value] == errors
    report = load_report(tmp_path)
    assert report.outcome == "out of memory in forward at step 0"
    assert advisor.diagnosis.verdict == report.diagnosis.verdict == "out_of_memory"
    assert report.diagnosis.findings[0].evidence["requested_bytes"] == 6 * GIB
    assert "Why:     Out of memory in forward at step 0: torch asked for 6.00 GiB" in capsys.readouterr().out


def test_an_error_that_the_program_survives_is_counted(tmp_path: Path) -> None:
    class Tries(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                with contextlib.suppress(torch.OutOfMemoryError):
                    taken(6)
            return super().training_step(batch, batch_idx)

    quiet_trainer(tmp_path, accelerator="gpu", callbacks=[GPUUtilizationMonitor()]).fit(Tries(), loader(Samples(60)))
    report = load_report(tmp_path)
    assert (report.outcome, report.allocator_failures) == ("completed", 1)


@pytest.mark.follows("call optimizer.step() after every {} batches, with the loss divided by {},")
def test_a_plain_loop_fits_with_the_batches_that_are_advised(tmp_path: Path) -> None:
    def train(batch_size: int, accumulate: int) -> Report:
        layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
        optimizer = torch.optim.SGD(layers.parameters(), lr=1e-6)
        with contextlib.suppress(torch.OutOfMemoryError), watch(folder=str(tmp_path)) as run:
            for number, batch in enumerate(run.batches(DataLoader(Samples(8 * 2**14), batch_size=batch_size))):
                wide = batch.cuda()[:, :1].expand(-1, 2048).contiguous()
                (layers(wide).square().mean() / accumulate).backward()
                if (number + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return load_report(tmp_path)

    torch.cuda.set_per_process_memory_fraction(GIB / torch.cuda.get_device_properties(0).total_memory)
    report = train(2**15, 1)
    assert report.diagnosis.verdict == "out_of_memory"
    advice = report.diagnosis.next_step
    size = number(r"Set batch_size=(\d+) \(now \d+\)", advice)
    assert train(size, number(r"call optimizer\.step\(\) after every (\d+) batches", advice)).outcome == "completed"


@pytest.mark.parametrize("place", ["batches", "phase"])
def test_validation_that_keeps_its_graph_is_told_from_steps(tmp_path: Path, place: str) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-6)

    def wide(batch: torch.Tensor, samples: int) -> torch.Tensor:
        return batch.cuda()[:1, :1].expand(samples, 1024).contiguous()

    def validate(batches: Any) -> float:
        losses = [layers(wide(batch, 2048)).square().mean() for batch in batches]
        return torch.stack(losses).mean().item()

    def train(gradients: Any) -> Report:
        held_out = loader(Samples(80))
        with contextlib.suppress(torch.OutOfMemoryError), watch(folder=str(tmp_path)) as run:
            for batch in run.batches(loader(Samples(10))):
                optimizer.zero_grad()
                layers(wide(batch, 64)).square().mean().backward()
                optimizer.step()
            with contextlib.nullcontext() if place == "batches" else run.phase("validation"), gradients:
                validate(held_out if place == "phase" else run.batches(held_out))
        return load_report(tmp_path)

    report = train(contextlib.nullcontext())
    assert report.outcome.startswith("out of memory in validation at step 1")
    first = report.diagnosis.findings[0]
    assert first.cause == "evaluation_graph"
    for where in ("asked_at", "source_lines"):
        assert " in validate" in str(first.evidence[where]), first.evidence
    assert first.advice.startswith("Put torch.no_grad() around validation")
    (account,) = report.memory
    assert account.parts_bytes["activations"] + account.parts_bytes.get("other_tensors", 0) > GIB
    assert train(torch.no_grad()).outcome == "completed"


def run_out_on_rank_1(folder: Path, rank: int) -> None:
    """Let rank 1 alone run out of memory; rank 0 waits for it in backward."""

    class Large(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3 and rank == 1:
                taken(2000)
            return super().training_step(batch, batch_idx)

    monitor = GPUUtilizationMonitor(stall_after_s=1.0)
    trainer = quiet_trainer(folder, accelerator="gpu", devices=2, strategy="ddp", callbacks=[monitor])
    with contextlib.suppress(torch.OutOfMemoryError):
        trainer.fit(Large(), loader(Samples(8)))
    os._exit(1)  # without waiting for rank 0, as after an error that nobody catches


def test_rank_0_names_the_rank_that_ran_out(tmp_path: Path, two_gpus: None) -> None:
    waiting, failed = start_ranks(tmp_path, run_out_on_rank_1)
    failed.join(60)
    assert "Why:  Rank 1: Out of memory in forward at step 3: torch asked for" in (tmp_path / "stdout1").read_text()
    told, deadline_s = tmp_path / "stderr0", time.monotonic() + 60
    while "Rank 1 stopped training" not in told.read_text() or not load_report(tmp_path).stalls:
        assert time.monotonic() < deadline_s, told.read_text()
        time.sleep(0.05)
    waiting.kill()  # as a launcher does
    waiting.join()
    (stall,) = load_report(tmp_path).stalls
    assert (stall.cause, stall.rank) == ("rank_behind", 1)
    assert "(out of memory in forward at step 3); rank 0 waits for it." in stall.why


def test_an_error_in_a_test_is_explained_with_advice(tmp_path: Path) -> None:
    class Evaluates(Model):
        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            taken(len(batch) / 4)

    trainer = quiet_trainer(tmp_path, accelerator="gpu", callbacks=[GPUUtilizationMonitor(), GPUUtilizationAdvisor()])
    with pytest.raises(torch.OutOfMemoryError):
        trainer.test(Evaluates(), loader(Samples(24), batch_size=12))
    report = load_report(tmp_path / "gpu_report" / "test")
    assert report.outcome == "out of memory in forward at step 0"
    assert report.diagnosis.verdict == "out_of_memory"
    first = report.diagnosis.findings[0]
    assert (first.cause, first.evidence["batch_size"]) == ("batch_too_large", 12)
    assert " in taken" in str(first.evidence["asked_at"])
    advice = report.diagnosis.next_step
    assert number(r"^Set batch_size=(\d+) \(now 12\)", advice) <= 8  # of 2 GiB
    assert not re.search("gradient|accumulate|optimizer|checkpointing", advice)
