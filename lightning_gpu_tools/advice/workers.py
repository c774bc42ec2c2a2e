"""Workers of a DataLoader: whether it may have more, what to change first, and why they ended training. Pure."""

import math
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpu_tools.training.run_measurements import LoaderFacts
from lightning_gpu_tools.units import plural, printable

_MAX_NAMED = 3  # our default
_BY_INFO = "torch.utils.data.get_worker_info(): files[info.id::info.num_workers], or all if info is None."
# How a stream gets a part for each worker.
_SPLIT = f"If two workers yield each sample twice, split what `__iter__` reads by {_BY_INFO}"
_SPLIT_WEBDATASET = "Add webdataset.split_by_worker to its pipeline, after the list of shards."
OPEN_IN_WORKER = "Open it in the worker, when it loads its first sample. Load no sample before the workers start."


def obstacles(facts: LoaderFacts) -> str:
    """Return why a loader may have no more workers as it is, and what to change, in sentences; empty if it may."""
    found = []
    if not facts.is_torch:
        return ""
    if facts.is_daemonic:
        found.append(
            "This process is daemonic and may not start workers. Start it with "
            "multiprocessing.Process(daemon=False), or with concurrent.futures.ProcessPoolExecutor()."
        )
    if facts.open_files:
        verb = "is" if len(facts.open_files) == 1 else "are"
        found.append(f"{named(facts.open_files)} {verb} open, and forked workers would share it. {OPEN_IN_WORKER}")
    if facts.is_iterable and not facts.splits:
        split = _SPLIT_WEBDATASET if facts.is_webdataset else _SPLIT
        found.append(
            f"{_code(facts.dataset)} is iterable, and does not split its samples by worker, as far as its code shows. "
            f"{split}"
        )
    return " ".join(found)


def most_workers(facts: LoaderFacts) -> float:
    """Return the highest number of workers that is of use, once there are no obstacles; infinite without a limit."""
    if not facts.is_torch or not facts.is_iterable or facts.shards is None:
        return math.inf
    return max(1, facts.shards // facts.ranks)


def why_not_searched(facts: LoaderFacts) -> str | None:
    """Return why other settings of a loader cannot be tried, or would change what it yields; ``None`` if they can."""
    kind = printable(facts.kind.rpartition(".")[2])
    if not facts.is_torch:
        return f"it is a {printable(facts.kind)}, not a torch DataLoader"
    if facts.keeps_position:
        return f"a {kind} keeps its position (state_dict), which new workers would lose"
    if reasons := obstacles(facts):
        return reasons[:1].lower() + reasons[1:].rstrip(".")
    if facts.is_iterable:
        most = "" if facts.shards is None else f", to at most {most_workers(facts)}"
        return (
            f"its dataset is iterable ({printable(facts.dataset)}), so a change during training could repeat or lose "
            f"samples. Set num_workers yourself{most}"
        )
    if not facts.in_order:
        return "its batches come in the order in which workers finish them (in_order is False)"
    if facts.own_iterator:
        return f"{kind} has its own _get_iterator"
    return None


def why_not_switched(began: LoaderFacts, now: LoaderFacts) -> str | None:
    """Return why the settings cannot change in a run that started with one loader and now has the other."""
    if (why := why_not_searched(began)) is not None:
        return why
    if began.within:
        return f"it is inside a {printable(began.within)}, which is not a torch DataLoader"
    opened = [name for name in now.open_files if name not in began.open_files]
    if opened:
        verb = "was" if len(opened) == 1 else "were"
        return (
            f"{named(tuple(opened))} {verb} opened in this process, and forked workers would share it. Start with "
            "num_workers=1, so that only workers open it"
        )
    if now.contents == began.contents:
        return None
    return (
        "its dataset changes while it is used (a cache, or its own random generator), and the copies in the workers "
        "would change separately"
    )


def named(names: tuple[str, ...]) -> str:
    """Return what a dataset holds as text: ```Photos.file`` and ``Photos.index```."""
    shown = [_code(name) for name in names[:_MAX_NAMED]]
    if len(names) > _MAX_NAMED:
        shown.append(plural(len(names) - _MAX_NAMED, "other"))
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _code(name: str) -> str:
    return f"`{printable(name)}`"


# --- why training ended, if workers or the dataset are the reason ---------------------------------------------------


class Failure(NamedTuple):
    """The reason why training ended."""

    what: str  # a sentence without capital letter and period
    next_step: str

    def __str__(self) -> str:
        return f"{self.what[0].upper()}{self.what[1:]}. {self.next_step}"


# The note that a worker adds to an error of the dataset; see training.compat.
_INDEX = re.compile(r"At index (.{1,100}) of the dataset\.")
_IN_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.")
_NO_SPACE = re.compile(r"unable to (?:allocate|open|write) (?:to )?shared memory|No space left on device")

_MEMORY = (
    "Use fewer workers (num_workers), a smaller prefetch_factor, or smaller samples. Keep file names in arrays: each "
    "worker copies the Python objects that it reads."
)
SHARED_MEMORY = (
    "Start the container with --ipc=host or --shm-size=8g, use fewer workers (num_workers), or a smaller "
    "prefetch_factor."
)
# torch's own handler of this signal, in workers, replaces that of PYTHONFAULTHANDLER=1.
_CRASH = (
    "Check its last output on the terminal for the library. faulthandler.enable() in worker_init_fn prints its stack. "
    "Or set num_workers=0 and PYTHONFAULTHANDLER=1: the training process then crashes and prints its own."
)


def without_index(text: str) -> str:
    """Return the text of an error without the note of a worker."""
    return _INDEX.sub("", text)


def how_it_ended(exitcode: int, oom_kills: int = 0) -> Failure:
    """Return why a worker process exited, as the end of a sentence; ``oom_kills`` is the kernel's count then."""
    if exitcode >= 0:
        return Failure(f"exited with exit code {exitcode}", "Search the dataset for os._exit and sys.exit.")
    number = -exitcode
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if name == "SIGKILL" and oom_kills:
        return Failure("was killed by the kernel, because memory ran out", _MEMORY)
    if name in ("SIGKILL", "SIGTERM"):
        return Failure(
            f"was killed by {name}, but not by the kernel for lack of memory",
            "Find out who sent it: a scheduler with its own limit, a launcher, or a person.",
        )
    if name == "SIGBUS":
        return Failure("was killed by SIGBUS: most likely /dev/shm is full", SHARED_MEMORY)
    return Failure(f"crashed ({name}) in native code", _CRASH)


def failure_of_workers(exits: Sequence[tuple[int, int, int]], oom_kills: int) -> Failure | None:
    """Return the failure of training whose workers died; ``None`` if none did.

    Of each of them, ``exits`` has the number in the loader, the PID, and the exit code.
    """
    if not exits:
        return None
    # A signal to one worker makes torch end the others.
    number, pid, code = min(exits, key=lambda one: (one[2] >= 0, one[2] == -signal.SIGTERM, one[0]))
    how = how_it_ended(code, oom_kills)
    return how._replace(what=f"worker {number} of the DataLoader (PID {pid}) {how.what}")


def failure_of_dataset(text: str, index: str | None) -> Failure | None:
    """Return the dataset's failure from an error's text; ``index`` is the sample that the training process loaded."""
    caught, noted = _IN_WORKER.search(text), _INDEX.search(text)
    if caught is not None and _NO_SPACE.search(text):
        return Failure(
            f"worker {caught[2]} of the DataLoader could not write to /dev/shm, because it is full", SHARED_MEMORY
        )
    index = noted[1] if noted is not None else index
    if caught is None and index is None:
        return None
    where = "" if index is None else f" at index {printable(index)}"
    sample = "The error includes its traceback."
    if index is not None:
        sample = f"Load this sample alone: dataset[{printable(index)}]."
    if caught is None:
        return Failure(f"the dataset failed{where}", sample)
    return Failure(f"the dataset raised {caught[1]}{where} in worker {caught[2]}", sample)


def not_picklable(text: str) -> Failure:
    """Return the failure of workers that could not start."""
    return Failure(
        f"the DataLoader's workers could not be started: {printable(text, 200)}",
        "Define functions and classes of the dataset at module level, without lambdas, and open files in the worker. "
        'Or set multiprocessing_context="fork".',
    )
