"""Trainings that are killed at every file event of their checkpoints, judged by ckpt-chaos, a program of others.

    pip install --target FOLDER ckpt-chaos==0.1.8
    PYTHONPATH=FOLDER python benchmarks/crash_consistency.py [--only NAME] [--output FILE]

ckpt-chaos runs a command once, then once for each file event below its output folder, where it ends the process at the
event (``before``), with half of the file (``torn``), or with SIGTERM and SIGKILL 5 s later (``term``). Each time it
runs the same command again and compares the weights at the end with those of the first run, in the last bit. It calls
the outcome PASS, HARD_FAIL (the second run failed), SILENT_DIVERGENCE (other weights), or LOST_WORK (it began before
the newest checkpoint that was complete).

The training, of an epoch of 13 shuffled batches with dropout and augmentation, saves after steps 5 and 10, and goes on
from ``ckpt_path="last"``. It writes one file for each save. The folder for temporary files is on another file system
than the checkpoints, as on most servers.
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from harness import be_quiet, make_parser, quiet_trainer, write_result

KINDS = ("plain Lightning", "ExactResume, PortableCheckpointIO")
OTHER_FILE_SYSTEM = "/dev/shm"


def train(kind: str, folder: Path) -> None:
    """Train, from the last checkpoint if there is one, and write the weights beside the folder."""
    import torch
    from exact_resume import BATCH, Model, Photos
    from lightning.pytorch import Callback, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    class Said(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            print(f"resumed from step {trainer.global_step}", flush=True)

    be_quiet()
    callbacks: list[Any] = [Said(), ModelCheckpoint(folder, "last-{step}", every_n_train_steps=5, save_top_k=-1)]
    options: dict[str, Any] = {}
    if kind != KINDS[0]:
        from lightning_gpu_tools import ExactResume, PortableCheckpointIO

        callbacks.append(ExactResume())
        options["plugins"] = [PortableCheckpointIO()]
    seed_everything(7, verbose=False)
    model = Model()
    trainer = quiet_trainer(folder, enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(model, DataLoader(Photos(), batch_size=BATCH, shuffle=True), ckpt_path="last")
    torch.save([*model.state_dict().values()], f"{folder}.pt")


def judged(kind: str, folder: Path) -> list[dict[str, str]]:
    """Return each kill of this kind of training, and what ckpt-chaos calls its outcome."""
    from ckpt_chaos.byo import run_byo

    rows = run_byo(
        [sys.executable, __file__, "--train", kind, "--folder", "{out}"],
        None,
        folder,
        jobs=2,
        max_points=1000,
        result_file="{out}.pt",
        step_regex=r"resumed from step (\d+)",
        modes=("before", "torn", "term"),
        checkpoint_glob="{out}/last-step=*.ckpt",
        ignore_size=True,  # a checkpoint has the names of folders, which are not of one length
    )
    control, *kills = rows
    assert control.verdict == "PASS", control
    return [{"kill": row.label, "verdict": row.verdict} for row in kills]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=KINDS, help="judge only this kind of training")
    parser.add_argument("--train", choices=KINDS, help="train once, as ckpt-chaos does")
    parser.add_argument("--folder", type=Path, help="of the checkpoints of --train")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.folder)
        return
    os.environ["TMPDIR"] = OTHER_FILE_SYSTEM
    kills: dict[str, Any] = {}
    for kind in KINDS:
        if options.only not in (None, kind):
            continue
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            kills[kind] = judged(kind, Path(folder, "runs"))
        for row in kills[kind]:
            print(f"{row['verdict']}  {row['kill']}")
        print(f"{kind}: {dict(Counter(row['verdict'] for row in kills[kind]))}", flush=True)
    write_result(options.output, "crash_consistency", "ckpt-chaos", "lightning", kills=kills)


if __name__ == "__main__":
    main()
