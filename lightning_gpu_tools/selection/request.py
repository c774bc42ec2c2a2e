"""The options of a selection: declared, checked, and described once."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

from lightning_gpu_tools.units import parse_bytes, parse_duration

_Class = TypeVar("_Class", bound=type)

# For --help of the command line and of LightningCLI, and for help().
OPTIONS = {
    "min_free": "Memory that each GPU must have free, beyond what others have claimed. For example 8GiB or 500MB.",
    "max_utilization": "Highest utilization that each GPU may have, in percent.",
    "exclusive": "Take only GPUs that nobody else uses or has claimed, and let nobody else claim them.",
    "wait": "How long to wait for the GPUs, for example 90s, 10m or 2h. First come, first served.",
    "claim": "Claim the GPUs until the job ends. The claims of others count in any case.",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks for, as in :func:`lightning_gpu_tools.select_gpus`; ``ValueError`` if that is out of range."""

    count: int = 1
    _: KW_ONLY
    min_free: int | str | None = None
    max_utilization: float | None = None
    exclusive: bool = False
    wait: float | str | None = None
    claim: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ValueError(f"count must be an integer of at least 1, got {self.count!r}.")
        for name in ("exclusive", "claim"):
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        percent = self.max_utilization
        is_number = isinstance(percent, (int, float)) and not isinstance(percent, bool)
        if percent is not None and not (is_number and 0 <= percent <= 100):
            raise ValueError(f"max_utilization must be a percentage between 0 and 100, got {percent!r}.")
        _ = self.min_free_bytes, self.wait_s  # raise what is wrong with them

    @property
    def promises(self) -> bool:
        """Whether something is promised that rests on claims."""
        return self.exclusive or self.min_free is not None

    @property
    def min_free_bytes(self) -> int | None:
        """Effective free memory that each must have."""
        return None if self.min_free is None else parse_bytes(self.min_free, "min_free")

    @property
    def wait_s(self) -> float | None:
        """How long to wait; ``None``: not at all."""
        return None if self.wait is None else parse_duration(self.wait, "wait")


def documented(cls: _Class) -> _Class:
    """Add the options to the docstring of a class that takes them."""
    text = inspect.cleandoc(cls.__doc__ or "")
    if "Args:\n" not in text:
        text = text.replace("Raises:\n", "Args:\n\nRaises:\n")
    options = "".join(f"    {name}: {meaning}\n" for name, meaning in OPTIONS.items())
    cls.__doc__ = text.replace("Args:\n", f"Args:\n{options}")
    return cls
