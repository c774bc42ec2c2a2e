"""Run actions when a module is imported, such as a module of Lightning.

``import lightning_gpu_tools`` runs this file, so it imports nothing: importing `typing` alone takes as long as starting
Python without it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # true for type checkers, without an import of `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")
FAMILIES = TRAINERS + FABRICS


class _Finder:
    """A finder for the modules that actions wait for."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], object]]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.waiting:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """A loader that loads a module, then runs the actions that waited for it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for act in _finder.waiting.pop(module.__name__, ()):
            _act(act, module)


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def when_imported(part: str, act: Callable[[ModuleType], object], families: tuple[str, ...] = FAMILIES) -> None:
    """Call ``act`` on a module of each family, now or when it is imported; its exceptions become warnings.

    ``part`` is the name of the module within its family; empty for the family itself.
    """
    for family in families:
        name = f"{family}.{part}" if part else family
        module = sys.modules.get(name)
        if module is None:
            _finder.waiting.setdefault(name, []).append(act)
        else:
            _act(act, module)


def _act(act: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:  # noqa: BLE001 - the program may not even use this package
        only_warn(f"lightning_gpu_tools cannot be used with this {module.__name__}: {error!r}.")


def only_warn(message: str) -> None:
    """Warn regardless of filters: none hides the warning or turns it into an error of the program."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(message, stacklevel=4)
