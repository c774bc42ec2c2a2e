"""Third-party projects, trained with and without this package: are results equal, and does the advice speed them up?

    python benchmarks/real_projects.py                     # all projects; installs 10 GB
    python benchmarks/real_projects.py chemprop scvi-tools --rounds 5 --folder ~/projects --output results.json

Each project has its own virtual environment (torch of constraints.txt, the project, and this checkout).
`real_projects/train_<name>.py` trains it with the project's own API and with data that it generates or includes. Each
round trains it unchanged; with `LIGHTNING_GPU_TOOLS=advise`; with the callbacks, and with `NumWorkersFinder`, if the
project accepts callbacks; with the advised settings; and with the project's own switches.

Weights and random states must be bitwise equal. Settings with persistent workers are an exception, because torch then
draws the workers' seed once instead of in each epoch. The times of `Trainer.fit` are compared within a round. Finally,
checkpoints written without this package are loaded and resumed with it, and vice versa.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from harness import load_average, make_parser
from machine import describe_machine

REPOSITORY = Path(__file__).parents[1]
RUN_TRAINING = Path(__file__).with_suffix("") / "run_training.py"
TIMEOUT_S = 1800.0  # a run takes less than a minute on two idle cores


@dataclass(frozen=True)
class Project:
    """A third-party project.

    Attributes:
        module: Name of its script, without `train_`.
        requirement: Requirement for pip.
        callbacks: Whether it accepts callbacks.
        plugins: Whether it accepts plugins.
        resumes: Whether it can resume from a checkpoint of the Trainer.
        switches: The project's own settings that affect loading, as options of `train()`.
        workers: Whether it has a num_workers setting.
    """

    module: str
    requirement: str
    callbacks: bool = True
    plugins: bool = True
    resumes: bool = False
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    workers: bool = True


CHEMPROP = "chemprop==2.3.1"
PROJECTS = {
    "chemprop": Project("chemprop", CHEMPROP, resumes=True, switches={"dataset.cache = True": {"cache": True}}),
    "chemprop-train": Project("chemprop_cli", CHEMPROP, callbacks=False, plugins=False),
    "pytorch-forecasting": Project("pytorch_forecasting", "pytorch-forecasting==1.8.0", resumes=True),
    "darts": Project("darts", "darts[torch]==0.48.1", plugins=False),
    "scvi-tools": Project("scvi", "scvi-tools==1.4.2"),
    "gluonts": Project(
        "gluonts", "gluonts[torch]==0.17.0", switches={"cache_data=True": {"cache_data": True}}, workers=False
    ),
}


class FailedError(Exception):
    """A step of a project failed. The message names the step and the log."""


def execute(what: str, command: list[str], log: Path, variables: Mapping[str, str] = {}) -> None:
    """Run a command with its output in a file.

    Raises:
        FailedError: The command failed or timed out.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        try:
            subprocess.run(
                command,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                env={**os.environ, **variables},
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = f"exit code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else "timeout"
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise FailedError(f"{what} failed ({reason}). The end of {log}:\n{end}") from None


def install(project: Project, folder: Path) -> Path:
    """Return the Python of the project's environment, and install the environment first if necessary."""
    python, done = folder / "bin" / "python", folder / "installed.txt"
    if done.exists() and done.read_text() == project.requirement:
        return python
    pins = (REPOSITORY / "constraints.txt").read_text()
    torch = re.search(r"^torch==\S+", pins, re.MULTILINE)
    assert torch is not None
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch comes first, so that it alone decides between CPU and CUDA builds.
    for what, command in (
        ("Creating the environment", [sys.executable, "-m", "venv", str(folder)]),
        (f"Installing {torch[0]}", [*pip, torch[0]]),
        (f"Installing {project.requirement}", [*pip, torch[0], project.requirement]),
        ("Installing this package", [*pip, torch[0], "--editable", str(REPOSITORY)]),
    ):
        print(f"  {what} ...", flush=True)
        execute(what, command, folder.parent / f"install-{folder.name}.log")
    done.write_text(project.requirement)
    return python


class Runner:
    """Trains one project in its environment."""

    def __init__(self, project: Project, python: Path, folder: Path) -> None:
        self.project, self.python, self.folder = project, python, folder

    def train(
        self, name: str, *, parts: str = "", options: Mapping[str, Any] = {}, advise: bool = False
    ) -> dict[str, Any]:
        folder = self.folder / re.sub(r"\W+", "-", name)
        shutil.rmtree(folder, ignore_errors=True)
        load = load_average()
        arguments = ["--parts", parts, "--options", json.dumps(options)]
        print(f"  {name} ...", end=" ", flush=True)
        began_s = time.perf_counter()
        result = self._call(folder, arguments, {"LIGHTNING_GPU_TOOLS": "advise"} if advise else {})
        print(f"fit {result['fit_s']:.1f} s, in total {time.perf_counter() - began_s:.0f} s")
        report = max(folder.rglob("gpu_report.json"), key=lambda file: file.stat().st_mtime, default=None)
        if report is not None:
            result["report"] = summary(json.loads(report.read_text()))
        return {**result, "load_average_before": load}

    def load(self, checkpoint: str, name: str) -> dict[str, str]:
        return self._call(self.folder / f"load-{name}", ["--load", checkpoint], {})

    def _call(self, folder: Path, arguments: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
        command = [str(self.python), str(RUN_TRAINING), self.project.module, str(folder), *arguments]
        execute(f"The training {folder.name}", command, folder.with_suffix(".log"), variables)
        return json.loads((folder / "result.json").read_text())


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a gpu_report.json that the result needs."""
    diagnosis = report["diagnosis"]
    keys = ("cause", "share", "ceiling", "ceiling_lower", "basis", "advice", "evidence")
    return {
        "verdict": diagnosis["verdict"],
        "findings": [{key: finding.get(key) for key in keys} for finding in diagnosis["findings"]],
        "unexplained_share": report["phase_s"].get("unexplained", 0.0) / report["wall_s"],
        "wall_s": report["wall_s"],
        "steps": report["steps"],
        "search": report["loader"],
    }


def measure(runner: Runner, rounds: int) -> dict[str, Any]:
    project = runner.project
    variants: dict[str, dict[str, Any]] = {"as it is": {}, "zero-code": {"advise": True}}
    if project.callbacks:
        variants |= {"callbacks": {"parts": "callbacks"}, "finder": {"parts": "finder"}}
    variants |= {name: {"options": options} for name, options in project.switches.items()}
    runs: dict[str, list[dict[str, Any]]] = {}
    for turn in range(rounds):
        print(f" round {turn + 1} of {rounds}")
        for name, how in variants.items():
            runs.setdefault(name, []).append(runner.train(name, **how))
        if turn == 0 and project.workers:
            more = loader_variants(runs["callbacks" if project.callbacks else "zero-code"][0])
            runs |= {name: [runner.train(name, **how)] for name, how in more.items()}
            variants |= more
    return {"runs": runs, "checkpoints": exchange(runner, runs["as it is"][-1])}


def loader_variants(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the DataLoader settings to try: the advised ones, or without advice, one worker and one per core."""
    found = run["report"]["findings"] if "report" in run else []
    text = " ".join(finding["advice"] or "" for finding in found if finding["cause"] == "data_loading")
    # The advice has this form: "DataLoader(..., num_workers=2, prefetch_factor=2) (now 0, None)".
    code = next(iter(re.findall(r"DataLoader\(\.\.\., (.*?)\)", text)), "")
    advised = {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=(\w+)", code)}
    tries = [advised] if advised else [{"num_workers": count} for count in sorted({1, os.cpu_count() or 1})]
    kind = "advised" if advised else "not advised"
    return {
        f"{kind}: {', '.join(f'{key}={value}' for key, value in one.items())}": {"options": {"loader": one}}
        for one in tries
    }


def exchange(runner: Runner, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Load and resume the project's checkpoints with this package, and vice versa."""
    found: dict[str, Any] = {}

    def keep(name: str, action: Callable[[], Any]) -> None:
        try:
            found[name] = action()
        except FailedError as error:
            found[name] = str(error)

    def resumed(name: str, written: Mapping[str, Any], parts: str) -> str:
        options = {"resume": written["checkpoint"], "epochs": written["epochs"] + 1}
        return runner.train(name, parts=parts, options=options)["weights"]

    keep("load, written without", lambda: runner.load(plain["checkpoint"], "without"))
    if not runner.project.plugins:
        return found
    ours = runner.train("plugins", parts="plugins")
    keep("load, written with", lambda: runner.load(ours["checkpoint"], "with"))
    found["weights"] = {"without": plain["weights"], "with": ours["weights"]}
    if runner.project.resumes:
        keep("resume", lambda: resumed("resume", plain, ""))
        keep("resume with", lambda: resumed("resume with", plain, "plugins"))
        keep("resume, written with", lambda: resumed("resume, written with", ours, ""))
    return found


def show(result: Mapping[str, Any]) -> None:
    """Print times and states compared with the unchanged runs of the same rounds, then findings and checkpoints."""
    runs = result["runs"]
    plain = runs["as it is"]
    for name, found in runs.items():
        pairs = list(zip(found, plain[-len(found) :], strict=True))  # pairs of one round
        wall, cpu = (sorted(one[key] / other[key] - 1 for one, other in pairs) for key in ("fit_s", "cpu_s"))
        states = {(one["weights"], one["random_states"]) for one in (*found, *plain)}
        equal = "equal" if len(states) == 1 else "different"
        print(
            f"{name}: {median(one['fit_s'] for one in found):.1f} s, {median(wall):+.1%} ({wall[0]:+.1%} to "
            f"{wall[-1]:+.1%}), CPU time {median(cpu):+.1%}, weights and random states {equal}"
        )
        report = found[0].get("report", {"findings": []})
        for finding in report["findings"]:
            print(f"    {finding['cause']}: {finding['advice']}")
    print(json.dumps(result["checkpoints"], indent=1))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("projects", nargs="*", help=f"any of {', '.join(PROJECTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder to keep environments and runs (default: temporary)")
    args = parser.parse_args()
    names = args.projects or list(PROJECTS)
    if unknown := [name for name in names if name not in PROJECTS]:
        parser.error(f"unknown: {', '.join(unknown)}. Choose from {', '.join(PROJECTS)}.")

    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        failed = 0
        for name in names:
            print(f"== {name}")
            project = PROJECTS[name]
            try:
                python = install(project, folder / re.split(r"[=\[]", project.requirement)[0])
                result = measure(Runner(project, python, folder / "runs" / name), args.rounds)
            except FailedError as error:
                print(error)
                failed += 1
                continue
            show(result)
            if args.output:  # results of other projects stay in the file
                kept = json.loads(args.output.read_text()) if args.output.exists() else {"benchmark": "real_projects"}
                kept.setdefault("projects", {})[name] = {"machine": describe_machine(), **result}
                # Messages and checkpoints contain paths of this machine.
                text = json.dumps(kept, indent=1).replace(f"{folder}/", "").replace(f"{REPOSITORY}/", "")
                args.output.write_text(text + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
