"""Draw docs/before_and_after.png: GPU utilization on an H200 before and after following the advice.

    python benchmarks/before_and_after.py

Needs no GPU: it draws the two reports that benchmarks/following_advice.py left in benchmarks/results/h200/.
"""

from pathlib import Path

from matplotlib.figure import Figure

from lightning_gpu_tools import load_report

ROOT = Path(__file__).parents[1]
RUNS = {"following_advice_1": "the DataLoader's defaults", "following_advice_2": "the settings that the report advised"}


def main() -> None:
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, (name, settings) in zip(axes, RUNS.items(), strict=True):
        report = load_report(ROOT / "benchmarks" / "results" / "h200" / f"{name}.json")
        time_s, busy_percent = zip(*report.gpus[0].timelines["utilization_percent"].points(), strict=True)
        axis.fill_between(time_s, busy_percent, color="#0072B2", linewidth=0)
        axis.set_title(
            f"With {settings}: {report.samples_per_s:,.0f} images/s, "
            f"GPU {report.diagnosis.utilization_percent:.0f}% busy",
            loc="left",
            fontsize="medium",
        )
        axis.set_xlim(0, report.wall_s)
        axis.set_ylim(0, 100)
        axis.set_ylabel("GPU busy (%)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time since training started (s)")
    figure.savefig(ROOT / "docs" / "before_and_after.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    main()
