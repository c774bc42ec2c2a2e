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

FAMILIES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


class _Finder:
    """A finder for the modules that actions wait for. Once such a module has been loaded, the actions run."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], object]]] = {}
        self._is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.waiting or self._is_searching:
            return None
        import importlib.util

        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)  # by the other finders
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                for act in self.waiting.pop(module.__name__, ()):
                    _act(act, module)

            spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


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
