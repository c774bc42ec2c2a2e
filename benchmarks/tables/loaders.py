"""Tables about data loading."""

from statistics import median

from .markdown import block, results, source, table

MAX_WIDTH = 1.25  # upper over lower end of a range: our goal


def loader_settings() -> str:
    found = results("loader_settings")

    def settings(choice: tuple[int, int | None], per_s: float) -> str:
        return f"{choice[0]}{f'x{choice[1]}' if choice[0] else ''}: {per_s:.0f}/s"

    rows = [
        (
            name
            + (f", {one['users_num_workers']} workers now" if one["users_num_workers"] and "now" not in name else ""),
            f"{one['users_batches_per_s']:.0f}/s",
            settings(one["choice"], one["choice_batches_per_s"]),
            settings(one["best_of_grid"], one["best_batches_per_s"]),
            f"{one['finder_s']:.1f} of {one['grid_s']:.0f} s",
        )
        for name, one in found["loaders"].items()
    ]
    before, after = (found["example"][when]["steps_per_s"] for when in ("before", "after"))
    return block(
        table(("loader", "before", "chosen (workers x prefetch)", "best of the grid", "time: finder, grid"), *rows),
        "Batches per second, compared with the best of an exhaustive grid. The training step sleeps. "
        "`examples/train.py`, which computes on the cores that its workers need, sped up from "
        f"{before:.1f} to {after:.1f} steps per second. " + source("loader_settings.py", "loader_settings"),
    )


def ceilings() -> str:
    """Return the predicted and the measured speedups of more workers."""
    found = results("ceilings")
    rows, verdicts = [], []
    for says, is_light in (("as on a GPU", True), ("that compute on the CPU", False)):
        pairs = {name: runs for name, runs in found["pairs"].items() if (name in found["as_on_a_gpu"]) is is_light}
        held = narrow = 0
        for name, runs in pairs.items():
            ranges = [one["predicted"] for one in runs]
            inside = sum(lower <= one["reached"] <= upper for one, (lower, _, upper) in zip(runs, ranges, strict=True))
            held, narrow = held + inside, narrow + (median(upper / lower for lower, _, upper in ranges) <= MAX_WIDTH)
            lower, expected, upper = (f"{median(ends):.2f}" for ends in zip(*ranges, strict=True))
            workers = ", ".join(sorted({str(one["num_workers"]) for one in runs}))
            reached = ", ".join(f"{one['reached']:.2f}x" for one in runs)
            rows.append((name, workers, f"{expected}x ({lower}x to {upper}x)", reached, f"{inside} of {len(runs)}"))
        verdicts.append(
            f"With steps {says}, the measured speedup was in the predicted range in {held} of "
            f"{sum(map(len, pairs.values()))} runs. The upper end of the range was at most {MAX_WIDTH:g} times the "
            f"lower end in {narrow} of {len(pairs)} pairs of loader and step."
        )
    return block(
        table(("run on the CPU", "workers", "predicted (median run)", "measured", "in range"), *rows),
        " ".join(verdicts) + " " + source("ceilings.py", "ceilings"),
    )


def loader_searches() -> str:
    rows = [
        (
            name,
            ", ".join(f"{workers}x{prefetch}" if workers else "0" for workers, prefetch in one["choices"]),
            ", ".join(
                f"{cell.removesuffix('xNone')}: {median(speeds):.0f}/s" for cell, speeds in one["batches_per_s"].items()
            ),
            f"{100 * one['slowest_choice']:.0f}%",
        )
        for name, one in results("loader_searches")["loaders"].items()
    ]
    return block(
        table(
            ("loader", "choices of five searches (workers x prefetch)", "batches/s", "slowest / fastest choice"), *rows
        ),
        source("loader_settings.py --searches 5", "loader_searches"),
    )
