"""One public class for all of Lightning's packages.

Lightning exists twice, as ``lightning`` and as ``pytorch_lightning`` with ``lightning_fabric``, each with a Trainer and
a Fabric. These four families have the same code in different classes, and a Trainer takes callbacks, plugins and
strategies of its own family only. None of them is imported here before the program imports it.

1. :func:`~lightning_gpu_tools.trainer.import_hooks.when_imported` acts as soon as a module of a family is imported.
2. :func:`adopt` then gives our class the family's class as a base, so a callback is a real ``Callback`` everywhere.
3. :class:`CheckpointIO` is an abstract base class, so registering is enough.
4. :class:`FamilyStrategy` can serve one family only, because its methods check for models of that family. Once a
   Trainer or a Fabric takes it, its method resolution order leaves out the other families.
5. Code that gets a Trainer, a model or a callback finds the family through that object: :func:`family_of`,
   :func:`base_of`, :func:`lookup`.

The annotations in this file are not postponed: LightningCLI would import ``lightning`` to evaluate them.
"""

import functools
import importlib
import pkgutil
from abc import ABCMeta
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_gpu_tools.trainer.import_hooks import FABRICS, FAMILIES, TRAINERS, when_imported


def family_of(thing: object) -> str | None:
    """Return the family of an object or a class; ``None`` if it has none."""
    cls = thing if isinstance(thing, type) else type(thing)
    return next(filter(None, map(_home, cls.__mro__)), None)


def base_of(thing: object, name: str) -> type | None:
    """Return the class of this name, in any family, that ``thing`` is an instance of; else ``None``."""
    return next((one for one in type(thing).__mro__ if one.__name__ == name and _home(one)), None)


def bases_of(cls: type) -> list[type]:
    """Return Lightning's classes among the bases of one of our classes, at most one per family."""
    found = {family: one for one in reversed(cls.__mro__) if (family := _home(one))}
    return list(found.values())


def is_lightnings(*definitions: Any) -> bool:
    """Return whether all these classes or methods are Lightning's, not a user's."""
    return all(one.__module__.startswith(("lightning.", "pytorch_lightning.")) for one in definitions)


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


class Root:
    """The first base of classes that adopt others: it must stay, and must not be ``object``."""


def adopt(cls: type, part: str, name: str, families: tuple[str, ...] = FAMILIES) -> None:
    """Add a class of each family to the bases of a :class:`Root`, once its module is imported."""

    def add(module: ModuleType) -> None:
        own = [base for base in cls.__bases__ if not _home(base)]
        theirs = {*filter(_home, cls.__bases__), getattr(module, name)}
        cls.__bases__ = (*own, *sorted(theirs, key=lambda base: FAMILIES.index(str(_home(base)))))

    when_imported(part, add, families)


if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as CheckpointIO
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch.accelerators import CUDAAccelerator as CUDAAccelerator
    from lightning.pytorch.loggers import Logger as Logger
    from lightning.pytorch.strategies import Strategy as _Strategy
else:
    # Only for annotations.
    LightningModule = Logger = Trainer = Any
    _Strategy = Root

    class Callback(Root):
        """The ``Callback`` of every family."""

    class CUDAAccelerator(Root, metaclass=ABCMeta):
        """The ``CUDAAccelerator`` of every family."""

    class CheckpointIO(metaclass=ABCMeta):  # noqa: B024 - only for isinstance, nothing to inherit
        """The abstract base of the ``CheckpointIO`` of every family."""

    adopt(Callback, "callbacks.callback", "Callback", TRAINERS)
    adopt(CUDAAccelerator, "accelerators.cuda", "CUDAAccelerator")
    when_imported("plugins.io.checkpoint_io", lambda module: CheckpointIO.register(module.CheckpointIO), FABRICS)


class _OfOneFamily(ABCMeta):
    """A metaclass that keeps classes with a ``_family`` from inheriting from any other."""

    def mro(cls) -> list[type]:
        order = super().mro()
        family = vars(cls).get("_family")
        return order if family is None else [one for one in order if _home(one) in (None, family)]


# Attributes that Trainer and Fabric read before they set any.
_READ_FIRST = ("_accelerator", "_precision_plugin", "_precision", "_checkpoint_io", "cluster_environment")


class FamilyStrategy(_Strategy, metaclass=_OfOneFamily):
    """A strategy that permanently joins the family of the Trainer or Fabric that takes it.

    Until then, it has only its options and the attributes of its own ``__init__``. It joins when its precision plugin
    is set: this happens early, and the plugin is always of that family, unlike the accelerator, which is set earlier.
    """

    _family: ClassVar[str | None] = None

    def __init__(self, **options: Any) -> None:
        self._refuse_unknown(options)
        self._options = options
        if self._family is not None:
            super().__init__(**options)

    def _refuse_unknown(self, options: dict[str, Any]) -> None:
        """Raise an error for an option that Lightning's strategies do not have."""

    @property
    def accelerator(self) -> Any:
        """The accelerator of the Trainer or Fabric."""
        return vars(self).get("_accelerator_in_use")

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        if self._family is not None:
            raise self._taken()
        self._accelerator_in_use = accelerator

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("precision_plugin", "precision") and value is not None and self._family is None:
            self._join(str(family_of(value)))
        super().__setattr__(name, value)

    def _join(self, family: str) -> None:
        options = self._options  # **self._options would mislead jsonargparse
        for name, part in options.items():
            _refuse_foreign(type(self).__name__, name, part, family)
        self.__class__ = own_class(type(self), _family=family)
        FamilyStrategy.__init__(self, **options)

    def _taken(self) -> TypeError:
        return TypeError(
            f"This {type(self).__name__} already belongs to another Trainer or Fabric, of {self._family}. Create a new "
            "strategy for each of them."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._family is None:  # Lightning's __setstate__ is for strategies that are in use
            return _not_taken, (type(self), vars(self))
        reduced: Any = super().__reduce_ex__(2)
        # pickle cannot find its class by name.
        return _unpickled, (type(self).__bases__[0], self._family), *reduced[2:]

    if not TYPE_CHECKING:  # type checkers know Lightning's attributes

        def __getattr__(self, name: str) -> Any:
            if self._family is None:
                if name in _READ_FIRST:
                    return vars(self).get("_options", {}).get(name.lstrip("_"))
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} has no attribute {name!r} before a Trainer or a Fabric has taken it")
            if name in ("_precision_plugin", "_precision"):  # the one of a Trainer's strategy, the other of a Fabric's
                raise self._taken()
            return super().__getattribute__(name)  # which raises its own error


@functools.cache
def own_class(front: type, **attributes: Any) -> Any:
    """Return a class that differs from ``front`` only in these attributes."""
    names = {"__module__": front.__module__, "__qualname__": front.__qualname__, "__doc__": front.__doc__}
    return type(front)(front.__name__, (front,), {**names, **attributes})


def _not_taken(cls: Any, attributes: dict[str, Any]) -> Any:
    strategy = cls.__new__(cls)
    vars(strategy).update(attributes)
    return strategy


def _unpickled(front: type, family: str) -> Any:
    importlib.import_module(f"{family}.strategies")
    cls = own_class(front, _family=family)
    return cls.__new__(cls)


def _refuse_foreign(taker: str, name: str, part: object, family: str) -> None:
    """Raise ``TypeError`` for a plugin of another package, which Lightning would replace silently."""
    theirs = {*map(_package, filter(None, map(_home, type(part).__mro__)))}
    if theirs and _package(family) not in theirs:
        raise TypeError(
            f"{taker}({name}=...) got a {type(part).__name__} of {family_of(part)}, which does not work with {family}. "
            f"Import it from {_package(family)}."
        )


def _package(family: str) -> str:
    return "lightning" if family.startswith("lightning.") else "pytorch_lightning"
