"""Facts that up to 1,024 ranks, all in one process, exchange over torch's real stores alone."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, PrefixStore, TCPStore
from trainings import background_threads

from lightning_gpu_tools.training.rank_exchange import Board, RankExchange, RankPlace

LIMIT_S = 20.0  # of what takes milliseconds, on a machine that is busy


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in background_threads():
        thread.join(LIMIT_S)  # one that was late is left to end by itself
    assert background_threads() == []


def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: TCPStore) -> TCPStore:
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def places(*local_ranks: int) -> list[RankPlace]:
    """Return the places of a job with so many ranks on each of its nodes."""
    found: list[RankPlace] = []
    for node, count in enumerate(local_ranks):
        for local_rank in range(count):
            found.append(RankPlace(len(found), sum(local_ranks), local_rank, node, count))
    return found


class Counting:
    """A real store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self.store, name)(*args)

        return call


# The stores in which ranks of real jobs meet, by a folder.
STORES: dict[str, Callable[[Path], Any]] = {
    "tcp": lambda folder: server(),
    "prefix": lambda folder: PrefixStore("restart 1", PrefixStore("default_pg", server())),
    "file": lambda folder: FileStore(str(folder / "store"), -1),
}


def exchange_all(job: Sequence[RankPlace], store: Any) -> list[RankExchange]:
    """Return the exchanges of all ranks, which have published who they are."""
    found = [RankExchange("measured", place, store) for place in job]
    for rank, one in enumerate(found):
        one.publish(pid=1000 + rank)
    return found


@pytest.mark.parametrize(
    ("store", "local_ranks"),
    [("tcp", (3, 1, 2)), ("prefix", (2, 2)), ("file", (2, 2))],
)
def test_the_last_facts_of_every_rank_come_to_rank_zero(
    tmp_path: Path, store: str, local_ranks: tuple[int, ...]
) -> None:
    job = places(*local_ranks)
    exchanges = exchange_all(job, STORES[store](tmp_path))
    for one in exchanges:
        one.publish(step=7)
    assert [one.finish(LIMIT_S) for one in reversed(exchanges)] == [[]] * len(job)
    found = exchanges[0].entries()
    assert [entry["rank"] for entry in found] == [place.rank for place in job]
    assert [entry["node"] for entry in found] == [place.node for place in job]
    assert [(entry["pid"], entry["step"]) for entry in found] == [(1000 + place.rank, 7) for place in job]
    assert not any(one.faults for one in exchanges)


def test_ranks_that_never_come_cost_one_wait_together() -> None:
    store = server()
    first = RankExchange("measured", places(*[8] * 8)[0], store)
    first.publish(pid=1)
    assert first.finish(0.3) == [*range(1, 64)]
    assert [entry["rank"] for entry in first.entries()] == [0]


def test_rank_zero_reads_a_thousand_ranks_with_two_requests() -> None:
    store = server()
    counting = Counting(store)
    first, *others = (Board("measured", place, store if place.rank else counting) for place in places(*[8] * 128))
    for rank, board in enumerate(others, start=1):
        board.post(step=rank)
    counting.calls.clear()
    first.read_all()
    assert {rank: entry["step"] for rank, entry in first.entries.items()} == {rank: rank for rank in range(1, 1024)}
    assert counting.calls == {"check": 1, "multi_get": 1}


def test_entries_of_an_earlier_start_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    store = server()
    for restart in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        first, other = (Board("measured", place, store) for place in places(1, 1))
        first.read_all()
        assert first.entries == {}
        other.post(step=restart)
        first.read_all()
        assert first.entries[1]["step"] == restart


def test_whoever_publishes_does_not_wait_for_a_connection_in_use() -> None:
    store = server()
    shared = client(store)
    exchanges = [RankExchange("measured", place, shared) for place in places(2)]
    in_use, is_free = threading.Event(), threading.Event()

    def occupy() -> None:
        in_use.set()
        with pytest.raises(RuntimeError):
            shared.wait(["never"], timedelta(seconds=1.5))
        is_free.set()

    thread = threading.Thread(target=occupy)
    thread.start()
    in_use.wait()
    for step in range(100):
        exchanges[1].publish(step=step)
    assert not is_free.is_set()
    thread.join()
    assert exchanges[1].finish(LIMIT_S) == []
    assert exchanges[0].finish(LIMIT_S) == []
    assert exchanges[0].entries()[1]["step"] == 99


def test_a_lost_store_only_ends_the_exchange() -> None:
    host = server()
    exchanges = exchange_all(places(1, 1), client(host))
    del host  # the server ends with it
    for one in reversed(exchanges):
        one.publish(step=1)
    assert exchanges[1].finish(LIMIT_S) == []
    assert exchanges[0].finish(LIMIT_S) == [1]
    assert exchanges[0].ranks == 1
    assert exchanges[0].entries()[0]["step"] == 1
