"""What a job asks of its GPUs: the options of a selection, declared, checked, and described once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from lightning_gpu_tools.units import parse_bytes, parse_duration

_Class = TypeVar("_Class", bound=type)

# For ``--help`` of the command line and of LightningCLI, and for ``help()``.
OPTIONS = {
    "min_free": "Memory that each GPU must have free, beyond what others have claimed. For example 8GiB or 500MB.",
    "max_utilization": "Highest utilization that each GPU may have, in percent.",
    "exclusive": "Take only GPUs that nobody else uses or has claimed, and let nobody else claim them.",
    "wait": "How long to wait for the GPUs, for example 90s, 10m or 2h. First come, first served.",
    "claim": "Claim the GPUs until the job ends. The claims of others count in any case.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a job asks for.

    Attributes:
        count: How many GPUs.
        min_free_bytes: Effective free memory that each must have.
        max_utilization_percent: Highest utilization that each may have, 0 to 100.
        exclusive: Whether nobody else may be on them, now or, as far as they use this package, later.
        wait_s: How long to wait for them; ``None``: not at all.
        claim: Whether to claim them.

    Raises:
        ValueError: One of them is out of range.
    """

    count: int = 1
    min_free_bytes: int | None = None
    max_utilization_percent: float | None = None
    exclusive: bool = False
    wait_s: float | None = None
    claim: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ValueError(f"count must be an integer of at least 1, got {self.count!r}.")
        for name in ("exclusive", "claim"):
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        percent = self.max_utilization_percent
        is_number = isinstance(percent, (int, float)) and not isinstance(percent, bool)
        if percent is not None and not (is_number and 0 <= percent <= 100):
            raise ValueError(f"max_utilization must be a percentage between 0 and 100, got {percent!r}.")

    @classmethod
    def parse(
        cls,
        count: int = 1,
        *,
        min_free: int | str | None = None,
        max_utilization: float | None = None,
        exclusive: bool = False,
        wait: float | str | None = None,
        claim: bool = True,
    ) -> Request:
        """Check what the user typed; see :func:`lightning_gpu_tools.select_gpus`.

        Raises:
            ValueError: An option is out of range.
        """
        return cls(
            count=count,
            min_free_bytes=None if min_free is None else parse_bytes(min_free, "min_free"),
            max_utilization_percent=max_utilization,
            exclusive=exclusive,
            wait_s=None if wait is None else parse_duration(wait, "wait"),
            claim=claim,
        )


def documented(cls: _Class) -> _Class:
    """Add the options to the docstring of a class that takes them, for ``help()`` and for LightningCLI's ``--help``."""
    options = "    Args:\n" + "".join(f"        {name}: {text}\n" for name, text in OPTIONS.items())
    head, section, rest = (cls.__doc__ or "").partition("    Args:\n")
    if not section:
        head, section, rest = head.partition("    Raises:\n")
        options, rest = f"{options}\n", section + rest
    cls.__doc__ = f"{head}{options}{rest}"
    return cls
