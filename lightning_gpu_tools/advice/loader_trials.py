"""Trials of DataLoader settings, and what a search for settings returns."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_gpu_tools.advice.findings import Finding, ceiling
from lightning_gpu_tools.training.run_measurements import LoaderSettings

# Advice says so until a search has measured its settings.
BY_THE_FINDER = "NumWorkersFinder() finds and applies them."


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTrial:
    """Some batches loaded with one set of settings, each followed by a step."""

    settings: LoaderSettings
    batch_s: float | None = None  # mean time from batch to batch, the step included
    batches: int = 0  # measured, once the workers were in step
    seconds: float = 0.0  # of the trial, with the start of the workers
    wait_s: float = 0.0  # mean part of batch_s
    start_s: float | None = None  # until the first batch came; None without workers
    measured: bool = True  # without workers batch_s is known without a trial
    failed: str | None = None  # why the settings could not be tried

    @property
    def batches_per_s(self) -> float | None:
        """Speed of loader and step together; ``None`` if none was measured."""
        return 1 / self.batch_s if self.batch_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderResult:
    """What a search for the settings of a loader returns.

    Attributes:
        original: The settings that the loader had; ``None`` if it is not a torch DataLoader.
        settings: The settings found: the original ones where nothing is better, or nothing may be changed.
        reason: Why, with numbers.
        applied: Whether the settings found are in use.
        confirmed: Whether they were as good in their first hundred steps; ``None`` if they were not used so long.
        trials: What was tried, in order.
        seconds: How long the search took, and training stood still.
        wait_share: Part of the time that training waited for data, with ``settings`` if they were tried; ``None`` if
            unknown.
    """

    original: LoaderSettings | None
    settings: LoaderSettings | None
    reason: str
    applied: bool = False
    confirmed: bool | None = None
    trials: tuple[LoaderTrial, ...] = ()
    seconds: float = 0.0
    wait_share: float | None = None

    @property
    def users(self) -> LoaderSettings | None:
        """The settings that the loader had. Deprecated: this is ``original`` now."""
        warnings.warn("LoaderResult.users is deprecated, use LoaderResult.original.", DeprecationWarning, stacklevel=2)
        return self.original


def combined(trials: Iterable[LoaderTrial]) -> list[LoaderTrial]:
    """Return one trial for each set of settings that did not fail, in the order of their first trials.

    Settings that differ in ``persistent_workers`` and ``pin_memory`` alone are the same.
    """
    by_settings: dict[LoaderSettings, list[LoaderTrial]] = {}
    for trial in trials:
        if trial.batch_s is not None and trial.failed is None:
            by_settings.setdefault(_key(trial.settings), []).append(trial)
    return [_mean(same) for same in by_settings.values()]


def _key(settings: LoaderSettings) -> LoaderSettings:
    return replace(settings, persistent_workers=False, pin_memory=False)


def _mean(trials: list[LoaderTrial]) -> LoaderTrial:
    batches = sum(trial.batches for trial in trials)
    if len(trials) == 1 or not batches:
        return trials[0]
    return replace(
        trials[0],
        batch_s=sum((trial.batch_s or 0.0) * trial.batches for trial in trials) / batches,
        wait_s=sum(trial.wait_s * trial.batches for trial in trials) / batches,
        batches=batches,
        seconds=sum(trial.seconds for trial in trials),
    )


def trial_of(trials: Iterable[LoaderTrial], settings: LoaderSettings | None) -> LoaderTrial | None:
    """Return the trials of some settings as one; ``None`` if they were not tried or failed."""
    if settings is None:
        return None
    return next((one for one in combined(trials) if _key(one.settings) == _key(settings)), None)


def settings_line(now: LoaderSettings, wanted: LoaderSettings) -> str:
    """Return the settings to change and to keep: ``"num_workers=4 (now 0), keep pin_memory=True"``."""
    changes, kept = [], []
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"):
        new, old = getattr(wanted, name), getattr(now, name)
        if new != old:
            changes.append(f"{name}={new} (now {old})")
        else:
            kept.append(f"{name}={old}")
    return ", ".join(changes) + (", keep " if changes and kept else "") + ", ".join(kept)


def as_searched(finding: Finding, result: LoaderResult) -> Finding:
    """Return a finding of ``data_loading`` with what a search has measured instead of what was predicted."""
    before, after = trial_of(result.trials, result.original), trial_of(result.trials, result.settings)
    if before is None or after is None or not before.batch_s or not after.batch_s or result.original is None:
        return replace(finding, advice=finding.advice.replace(BY_THE_FINDER, result.reason))
    evidence = dict(finding.evidence)
    measured = f"NumWorkersFinder measured it: {result.reason}"
    if result.settings is not None and result.settings != result.original and not result.applied:
        evidence |= {"kind": "too_few_workers", "advised_num_workers": after.settings.num_workers}
        advice = f"In the DataLoader set {settings_line(result.original, result.settings)}. {measured}"
        bound = before.batch_s / after.batch_s
    elif finding.evidence.get("kind") in ("too_few_workers", "io_bound"):  # whose advice is another number of workers
        cpu_ms, wall_ms = (float(evidence.get(name, 0.0)) for name in ("load_cpu_ms_per_batch", "load_ms_per_batch"))
        evidence["kind"] = "cpu_bound" if cpu_ms >= wall_ms / 2 else "io_bound"
        advice = (
            f"{measured} To load faster, do less work per sample: cache what is "
            "computed each time, or store decoded or smaller samples."
        )
        bound = ceiling(finding.share)
    else:
        return finding
    lower = min(finding.ceiling_lower, bound)
    return replace(finding, evidence=evidence, advice=advice, ceiling=bound, ceiling_lower=lower)
