"""Cost for rank 0 of a job with many ranks: the exchange between ranks, the diagnosis, and the report.

    python benchmarks/scale.py [--ranks 8 64 1024 8192] [--no-real] [--output benchmarks/results/scale.json]

There are eight ranks per node. All ranks but rank 0 are entries in a real TCPStore, written as ranks write them. The
store's server is another process, behind a relay that adds a network's round trip. Then 32 real ranks train a model of
ten parameters with gloo, on four torchrun nodes on this machine: without a slow rank, with one, and with a slow node.
"""

import contextlib
import io
import json
import queue
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import TESTS, free_port, load_average, make_parser, quiet_trainer, write_result
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

sys.path.append(str(TESTS))

from simulated_report import simulated_report
from synthetic import gpu_run

from lightning_gpu_tools import GPUUtilizationMonitor
from lightning_gpu_tools.advice.causes.time import straggler
from lightning_gpu_tools.gpus.metrics import METRICS, GpuSummary
from lightning_gpu_tools.reports.page import png_of
from lightning_gpu_tools.reports.report import load_report, to_json
from lightning_gpu_tools.reports.text import render_text
from lightning_gpu_tools.runs.ranks import steps_of
from lightning_gpu_tools.runs.run_report import describe
from lightning_gpu_tools.training.rank_exchange import TIMEOUT_S, Board, RankExchange, RankPlace

LOCAL_RANKS = 8
ROUND_TRIP_S = 0.3e-3
REPEATS = 5
SLOW_RANK, SLOW_NODE = 19, 2
# A script of its own, so that 32 ranks need not import this file's modules.
TRAIN = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
from lightning_gpu_tools import watch

class Samples(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(SLOWER_S)
        return torch.ones(9)

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
slow = {int(rank) for rank in sys.argv[2:]}
SLOWER_S = 0.1 if torch.distributed.get_rank() in slow else 0.0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(9, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
with watch(folder=sys.argv[1], min_steps=20) as run:
    for step, batch in enumerate(run.batches(DataLoader(Samples()))):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 160:
            break
torch.distributed.destroy_process_group()
"""


def serve() -> None:
    """Run as the server of a store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    threading.Event().wait()


def relay(port: int) -> None:
    """Forward connections to a port, and delay each direction by half a round trip."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        here = listener.accept()[0]
        there = socket.create_connection(("127.0.0.1", port))
        for source, target in ((here, there), (there, here)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            later: queue.Queue[tuple[float, bytes]] = queue.Queue()
            threading.Thread(target=_take, args=(source, later), daemon=True).start()
            threading.Thread(target=_give, args=(target, later), daemon=True).start()


def _take(source: socket.socket, later: queue.Queue[tuple[float, bytes]]) -> None:
    data = b"-"
    while data:
        data = source.recv(1 << 18)
        later.put((time.perf_counter() + ROUND_TRIP_S / 2, data))


def _give(target: socket.socket, later: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due_s, data = later.get()
        while time.perf_counter() < due_s:  # a sleep takes twice as long
            pass
        if not data:
            target.shutdown(socket.SHUT_WR)
            return
        target.sendall(data)


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[int]:
    """Run this program in another process, and yield the port on which it listens."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=-1, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def timed_s(function: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def facts_of(place: RankPlace, chance: random.Random) -> dict[str, Any]:
    """Return the entry of a rank, as long as in a job on GPUs. Rank 9 is slow."""
    phases = ("data_loading", "host_to_device_copy", "forward", "backward", "optimizer", "callback/EarlyStopping")
    phase_s = {phase: round(0.01 + 0.001 * chance.random(), 9) for phase in phases}
    facts: dict[str, Any] = {
        "pid": 100_000 + place.rank,
        "own_step": {
            "rank": place.rank,
            "node": place.node,
            "own_step_s": sum(phase_s.values()) + 0.02 * (place.rank == 9),
            "phase_s": phase_s,
            "wait_s": None,
            "gpu": place.local_rank,
        },
        "largest_batch_size": 496,
    }
    if place.local_rank == 0:
        gpus = range(place.local_ranks)
        names = [metric.logged for metric in METRICS if metric.meaning]
        numbers = {name: chance.random() * 100 for name in GpuSummary.__dataclass_fields__ if name.endswith("percent")}
        facts["troubles"] = []
        facts["gpus"] = [
            asdict(
                GpuSummary(index=i, uuid=f"GPU-{place.node:08x}-1111-2222-3333-{i:012x}", node=place.node, **numbers)
            )
            for i in gpus
        ]
        facts["metrics"] = {f"node{place.node}/gpu/{i}/{name}": 100 * chance.random() for i in gpus for name in names}
    return facts


class Job:
    """A job with rank 0 in this process, and its other ranks as entries in a store."""

    def __init__(self, ranks: int, direct: TCPStore, far: TCPStore, name: str) -> None:
        self.places = [RankPlace(i, ranks, i % LOCAL_RANKS, i // LOCAL_RANKS, LOCAL_RANKS) for i in range(ranks)]
        self.exchange = RankExchange(f"{name}/measured", self.places[0], far)
        self.board = Board(f"{name}/read", self.places[0], far)
        self._chance = random.Random(0)
        self._boards = {
            which: [Board(f"{name}/{which}", place, direct) for place in self.places[1:]]
            for which in ("measured", "read")
        }

    def fill(self, which: str, **more: Any) -> None:
        """Post the entries of all other ranks."""
        for board, place in zip(self._boards[which], self.places[1:], strict=True):
            board.post(**more, **facts_of(place, self._chance))


def measure(ranks: int, direct: TCPStore, far: TCPStore) -> dict[str, Any]:
    """Return the costs of a job of this size for rank 0."""
    job = Job(ranks, direct, far, f"{ranks} ranks")
    walls_s, cpus_s = [], []
    for _ in range(REPEATS):
        job.fill("read")
        began_s = time.thread_time()
        walls_s.append(timed_s(job.board.read_all))
        cpus_s.append(time.thread_time() - began_s)
    assert len(job.board.entries) == ranks - 1
    one_by_one_s = timed_s(lambda: [read_alone(job.board, far, rank) for rank in range(1, ranks)])
    own = facts_of(job.places[0], random.Random(0))
    job.fill("measured")
    publishing_s = [timed_s(lambda: job.exchange.publish(**own)) for _ in range(50)]
    while len(job.exchange.entries()) < ranks:  # the thread is still gathering
        job.exchange.publish()
        time.sleep(0.2)
    entries = job.exchange.entries()
    listing_s = median(timed_s(lambda: steps_of(entries)) for _ in range(REPEATS))
    run = gpu_run({"training_step": 100}, 99.0, ranks=steps_of(entries))
    judging_s = median(timed_s(lambda: list(straggler.find(run))) for _ in range(REPEATS))
    found = next(straggler.find(run), None)
    assert ranks < 10 or (found is not None and found.evidence["who"] == "rank 9"), found
    job.fill("measured", is_last=True)
    end_s = timed_s(lambda: job.exchange.finish(TIMEOUT_S))
    alone = Job(ranks, direct, far, f"{ranks} ranks, all others dead")
    alone.exchange.publish(**own)
    alone_s = timed_s(lambda: alone.exchange.finish(TIMEOUT_S))
    assert len(alone.exchange.entries()) == 1
    return {
        "ranks": ranks,
        "nodes": ranks // LOCAL_RANKS,
        "publish_s": median(publishing_s),
        "gather_s": median(walls_s),
        "gather_cpu_s": median(cpus_s),
        "one_by_one_s": one_by_one_s,
        "list_s": listing_s,
        "judge_s": judging_s,
        "end_s": end_s,
        "end_dead_s": {"all others": alone_s},
        **of_running_report([entry for entry in entries if entry["rank"]]),
        **of_report(ranks),
    }


def read_alone(board: Board, store: TCPStore, rank: int) -> None:
    """Read a single entry with two requests, for comparison: does it exist, and what is it?"""
    key = f"{board._name}/{rank}"
    if store.check([key]):
        json.loads(store.get(key))


class AskForReports(Callback):
    """A callback that times the running report on rank 0, after the entries of other ranks have arrived."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = entries
        self.monitor = GPUUtilizationMonitor()
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        session, reporter = self.monitor._session, self.monitor._reporter
        if trainer.global_step != 150 or session is None or reporter is None or reporter._measured is None:
            return
        recorder = session.begin()
        recorder.ranks.exchange._board.entries |= {entry["rank"]: entry for entry in self.entries}
        recorder.ranks._receive(recorder.ranks.exchange.entries())
        report_file = Path(reporter._file.path)
        recorder.cores.read_ahead()  # as the background thread does before
        took_s, pauses_s, cpus_s = [], [], []
        for _ in range(REPEATS):
            before = report_file.stat().st_mtime_ns
            began_cpu_s = session.background.cpu_s
            took_s.append(timed_s(reporter._measure))
            pause_s, seen_s = 0.0, time.perf_counter()
            while report_file.stat().st_mtime_ns == before:  # computes, and records the longest interruption
                now_s = time.perf_counter()
                pause_s, seen_s = max(pause_s, now_s - seen_s), now_s
            pauses_s.append(pause_s)
            time.sleep(0.05)
            cpus_s.append(session.background.cpu_s - began_cpu_s)
        self.found = {
            "running_report_s": median(took_s),
            "running_report_pause_s": median(pauses_s),
            "running_report_thread_cpu_s": median(cpus_s),
            "running_report_all_here_s": timed_s(lambda: describe(session)),
        }


def of_running_report(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the time that the running report takes in the training thread and in the writing thread."""
    asked = AskForReports(entries)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = quiet_trainer(folder, max_steps=151, callbacks=[asked.monitor, asked])
        trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 200)))
    return asked.found


def of_report(ranks: int) -> dict[str, Any]:
    """Return the time and size of a report with one GPU per rank."""
    report = simulated_report(nodes=ranks // LOCAL_RANKS, gpus=LOCAL_RANKS)
    return {
        "text_s": timed_s(lambda: render_text(report)),
        "text_lines": render_text(report).count("\n") + 1,
        "json_s": timed_s(lambda: to_json(report)),
        "json_bytes": len(to_json(report)),
        "picture_s": timed_s(lambda: png_of(report)),
        "picture_bytes": len(png_of(report)),
    }


def train(slow: Sequence[int], *, nodes: int = 4) -> dict[str, Any]:
    """Train with real ranks, and return the report's answer."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(TRAIN)
        options = [f"--nnodes={nodes}", f"--nproc-per-node={LOCAL_RANKS}", f"--master-port={free_port()}"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "--master-addr=127.0.0.1"]
        began_s = time.perf_counter()
        agents = [
            subprocess.Popen(
                [*command, f"--node-rank={node}", str(script), folder, *map(str, slow)], stdout=-1, stderr=-1, text=True
            )
            for node in range(nodes)
        ]
        texts = [agent.communicate() for agent in agents]
        assert not any(agent.returncode for agent in agents), texts[0][1][-3000:]
        report = load_report(folder)
        stragglers = [one for one in report.diagnosis.findings if one.cause == "straggler"]
        return {
            "slow": list(slow),
            "reports": sum(out.count("Verdict:") for out, _ in texts),
            "ranks": [one.rank for one in report.ranks],
            "named": stragglers[0].evidence["who"] if stragglers else None,
            "why": report.diagnosis.why,
            "next_step": report.diagnosis.next_step,
            "late": [line for _, err in texts for line in re.findall(r"Ranks? .* did not report.*", err)],
            "seconds": round(time.perf_counter() - began_s, 1),
        }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve()
    if sys.argv[1:2] == ["--relay"]:
        return relay(int(sys.argv[2]))
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 8192], help="sizes of the job")
    parser.add_argument("--no-real", action="store_true", help="skip the 32 real ranks")
    args = parser.parse_args()
    found: dict[str, Any] = {"load_average_before": load_average(), "sizes": []}
    with child("--serve") as port, child("--relay", str(port)) as far_port:
        direct, far = client(port), client(far_port)
        found["round_trip_s"] = median(timed_s(lambda: far.check(["nothing"])) for _ in range(500))
        for ranks in args.ranks:
            found["sizes"].append(measure(ranks, direct, far))
            print(json.dumps(found["sizes"][-1]), flush=True)
    if not args.no_real:
        node = range(SLOW_NODE * LOCAL_RANKS, (SLOW_NODE + 1) * LOCAL_RANKS)
        found["real"] = [train(slow) for slow in ((), (SLOW_RANK,), node)]
        print(json.dumps(found["real"], indent=1))
    write_result(args.output, "scale", **found)
    return None


if __name__ == "__main__":
    main()
