"""A kernel whose threads never wait for a core: how long they do depends on what else runs on the machine."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def install(set_attribute: Callable[..., None], folder: Path) -> None:
    """Have this process read, for its threads, counters that have run and never waited."""
    opened, never_waited = os.open, folder / "schedstat"
    never_waited.write_text("1 0 1\n")

    def opening(path: Any, *how: Any, **more: Any) -> int:
        is_counter = isinstance(path, str) and path.startswith("/proc/self/task/") and path.endswith("/schedstat")
        return opened(never_waited if is_counter else path, *how, **more)

    set_attribute(os, "open", opening)
