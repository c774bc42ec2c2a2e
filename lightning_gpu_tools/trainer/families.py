"""One public class for all of Lightning's packages, and a guard that keeps our errors from ending training.

Lightning exists twice, as ``lightning`` and as ``pytorch_lightning`` with ``lightning_fabric``, each with a Trainer and
a Fabric. These four families have the same code in different classes, and a Trainer takes callbacks, plugins and
strategies of its own family only. None of them is imported here before the program imports it.

- A callback or an accelerator gets the bases of all imported families when it is created (:func:`subclass`).
- A strategy can serve one family only, so it gets its base when a Trainer or a Fabric takes it. Until then, it is only
  registered with the abstract classes of all families.
- The checkpoint plugin is only registered.
- Code that gets a Trainer, a model or a callback finds the family through that object: :func:`family_of`,
  :func:`base_of`, :func:`lookup`.
"""

import functools
import importlib
import pkgutil
import sys
import traceback
import types
from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_gpu_tools.loaders.workers import is_of_dead_worker
from lightning_gpu_tools.trainer.import_hooks import FAMILIES, only_warn, when_imported
from lightning_gpu_tools.units import printable

_PACKAGE = __name__.partition(".")[0]


def family_of(thing: object) -> str | None:
    """Return the family of an object or a class; ``None`` if it has none."""
    cls = thing if isinstance(thing, type) else type(thing)
    return next(filter(None, map(_home, cls.__mro__)), None)


def base_of(thing: object, name: str) -> type | None:
    """Return the class of this name, in any family, that ``thing`` is an instance of; else ``None``."""
    return next((one for one in type(thing).__mro__ if one.__name__ == name and _home(one)), None)


def overrides(thing: object, base: str, method: str) -> bool:
    """Return whether ``thing`` overrides a method of Lightning's class ``base``."""
    own = getattr(thing, method, None)
    return getattr(own, "__func__", own) is not getattr(base_of(thing, base), method, None)


def lookup(thing: object, path: str) -> Any:
    """Return the object at a path in the family of ``thing``, such as ``"cli:instantiate_module"``."""
    return pkgutil.resolve_name(f"{family_of(thing)}.{path}")


def version_of(thing: object) -> tuple[str, str]:
    """Return the name and the version of the package of ``thing``."""
    name = str(family_of(thing)).partition(".")[0]
    return name, importlib.import_module(name).__version__


def _home(cls: type) -> str | None:
    return next((family for family in FAMILIES if f"{cls.__module__}.".startswith(f"{family}.")), None)


def imported(part: str, name: str) -> tuple[Any, ...]:
    """Return the class of this name of each family that the program has imported and that has this module."""
    modules = (sys.modules.get(f"{family}.{part}") for family in FAMILIES)
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


def subclass(front: type, *bases: type, **attributes: Any) -> Any:
    """Return a new subclass of one of our classes that also has these bases and attributes, under the same name."""
    names: dict[str, Any] = {name: getattr(front, name) for name in ("__module__", "__qualname__", "__doc__")}
    names.update(attributes, _front=front)
    return types.new_class(front.__name__, (front, *bases), exec_body=lambda body: body.update(names))


def front_of(cls: type) -> Any:
    """Return the class that pickle finds by name, of which ``cls`` may be a :func:`subclass`."""
    return vars(cls).get("_front", cls)


_subclass_once = functools.cache(subclass)


if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as CheckpointIO
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch.accelerators import CUDAAccelerator as CUDAAccelerator
    from lightning.pytorch.strategies import Strategy as Strategy
else:
    LightningModule = Trainer = Any  # only for annotations
    Strategy = object

    class CheckpointIO(ABC):  # noqa: B024 - only for isinstance, nothing to inherit
        """The abstract base of the ``CheckpointIO`` of every family."""

    when_imported("plugins.io.checkpoint_io", lambda module: CheckpointIO.register(module.CheckpointIO))

    class Callback(*imported("callbacks.callback", "Callback")):
        """The ``Callback`` of both packages."""

        def __new__(cls, *args, **kwargs):
            """Return an object of a class that also has the base of a package imported after this one."""
            return super().__new__(_of_both(cls, _imported_or_error(cls, "callbacks.callback", "Callback")))

        def __init_subclass__(cls, **options):
            """Let the facade give a class of ours the bases of packages imported after it: LightningCLI wants them."""
            super().__init_subclass__(**options)
            if "_front" not in vars(cls) and cls.__module__.startswith(_PACKAGE):
                when_imported("callbacks.callback", functools.partial(_renew, cls))

        def __reduce_ex__(self, protocol):
            return _unpickled, (front_of(type(self)),), *super().__reduce_ex__(2)[2:]

    class CUDAAccelerator:
        """The ``CUDAAccelerator`` of every family."""

        def __new__(cls, *args, **kwargs):
            """Return an object with a class of its own, because Lightning calls methods of an accelerator's class."""
            accelerators = _imported_or_error(cls, "accelerators.cuda", "CUDAAccelerator")
            return super().__new__(subclass(cls, *accelerators))


def _of_both(cls: type, bases: tuple[type, ...]) -> Any:
    later = [base for base in bases if not issubclass(cls, base)]
    return _subclass_once(cls, *later) if later else cls


def _renew(cls: type, module: types.ModuleType) -> None:
    facade = vars(sys.modules[_PACKAGE])
    if cls.__name__ in facade["__all__"]:
        facade[cls.__name__] = _of_both(cls, imported("callbacks.callback", "Callback"))


def _unpickled(front: Any) -> Any:
    return front.__new__(front)


def _imported_or_error(cls: type, part: str, name: str) -> tuple[Any, ...]:
    found = imported(part, name)
    if not found:
        raise ImportError(f"Import lightning or pytorch_lightning before you create a {cls.__name__}.")
    return found


def warn_that_off(what: str, error: Exception) -> None:
    """Warn that ``what`` is off because of an error in it."""
    text = printable("".join(traceback.format_exception_only(error)).strip(), max_length=200)
    only_warn(f"{what}, because of an internal error: {text}")


class GuardedCallback(Callback):
    """A callback whose hooks turn their errors into warnings. While it is not on, only ``setup`` is called."""

    is_on = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, hook in list(vars(cls).items()):
            if callable(hook) and (name.startswith("on_") or name in ("setup", "teardown")):
                setattr(cls, name, _guarded(hook))

    def _give_up(self) -> None:
        """Do nothing more in this run."""

    yields = False  # does nothing if the user has a callback of the same class

    @classmethod
    def acting(cls, callbacks: Sequence[Any]) -> Any:
        """Return the callback of this class that acts: the user's first one, or else the first; ``None`` = none."""
        same = [one for one in callbacks if isinstance(one, front_of(cls))]
        return min(same, key=lambda one: one.yields, default=None)

    def is_superfluous(self, callbacks: Sequence[Any]) -> bool:
        """Return whether another callback of the same class acts, and warn if both are the user's."""
        if self not in callbacks or self.acting(callbacks) is self:
            return False
        if not self.yields:  # Lightning adds ours to the user's list, perhaps for an earlier Trainer as well
            name = type(self).__name__
            rank_zero_only(only_warn)(
                f"The Trainer has several callbacks of type {name}, and only the first is active. Remove the others."
            )
        return True

    def survives(self, error: Exception) -> bool:
        """Give up after an error in a hook, unless the error is training's own."""
        if is_of_dead_worker(error):  # raised anywhere in the main thread
            return False
        self.turn_off(error)
        return True

    def turn_off(self, error: Exception) -> None:
        """Give up after an error, and warn."""
        with suppress(Exception):  # may fail for the same reason
            self._give_up()
        rank_zero_only(warn_that_off)(f"{type(self).__name__} is off for the rest of this run, without a report", error)


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def guarded(self: GuardedCallback, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs) if self.is_on or hook.__name__ == "setup" else None
        except Exception as error:
            if not self.survives(error):
                raise
            return None

    return guarded
