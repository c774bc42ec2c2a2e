"""One public class for all of Lightning's packages: whatever is unusual about that is in this file.

Lightning exists twice, as ``lightning`` and as ``pytorch_lightning`` with ``lightning_fabric``, each with a Trainer and
a Fabric. These four families have the same code and yet different classes: a Trainer takes callbacks, plugins and
strategies of its own family only. Here is how ``from lightning_gpu_tools import X`` serves all of them. No family is
imported unless the program itself has done so, because that takes seconds, and it may not even be installed.

1. :func:`when_imported`: as soon as a module of a family is imported, what is waiting for it is done. So the order of
   imports does not matter.
2. :func:`adopt`: our class gets the class of each family as a base as soon as there is one. A callback is then a real
   ``Callback`` for every Trainer. That is all that :class:`Callback` and :class:`CUDAAccelerator` need.
3. :class:`CheckpointIO` is an abstract base class, so registering is enough.
4. :class:`FamilyStrategy`: a strategy cannot serve two families at once, because its methods ask for a model of their
   own. It keeps its options until a Trainer or a Fabric takes it. Then it becomes an object of a class that leaves the
   other families out of its method resolution order.
5. Code that is given a Trainer, a model or a callback asks that object for its family and never compares it with an
   imported class: :func:`family_of`, :func:`base_of`, :func:`lookup`.

The annotations in this file are not postponed: LightningCLI would import ``lightning`` to evaluate them.
"""

import functools
import importlib
import pkgutil
import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

TRAINERS = ("lightning.pytorch", "pytorch_lightning")
FABRICS = ("lightning.fabric", "lightning_fabric")
_DISTRIBUTIONS = {
    "lightning.pytorch": "lightning",
    "lightning.fabric": "lightning",
    "pytorch_lightning": "pytorch_lightning",
    "lightning_fabric": "pytorch_lightning",
}
FAMILIES = TRAINERS + FABRICS


def family_of(thing: object) -> str | None:
    """Return the family of a Trainer, a model, a plugin or a class of these; ``None`` if it is of none."""
    cls = thing if isinstance(thing, type) else type(thing)
    return next(filter(None, map(_home, cls.__mro__)), None)


def base_of(thing: object, name: str) -> type | None:
    """Return Lightning's class of this name that a thing is an object of, of any family; ``None`` if it is not."""
    return next((one for one in type(thing).__mro__ if one.__name__ == name and _home(one)), None)


def bases_of(cls: type) -> list[type]:
    """Return Lightning's classes that a class of ours has adopted, one of each family that is imported."""
    found = {family: one for one in reversed(cls.__mro__) if (family := _home(one))}
    return list(found.values())


def lookup(thing: object, path: str) -> Any:
    """Return what the family of a thing has at a path like ``"core.saving:load_hparams_from_yaml"``."""
    return pkgutil.resolve_name(f"{family_of(thing)}.{path}")


def version_of(thing: object) -> tuple[str, str]:
    """Return the name and the version of the package that has a thing's family."""
    name = str(family_of(thing)).partition(".")[0]
    return name, importlib.import_module(name).__version__


def _home(cls: type) -> str | None:
    return next((family for family in FAMILIES if f"{cls.__module__}.".startswith(f"{family}.")), None)


class _Finder:
    """Asked for every module that is imported; changes nothing but for those that somebody waits for."""

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
    """Loads a module as its own loader does, and then does what waited for it."""

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
    """Call a function with a module of each family: at once where it is imported, else as soon as it is.

    Args:
        part: The module's name within its family: ``"strategies"``.
        act: Is called with the module. What it raises is a warning: the program may not even use this package.
        families: Those that have the module.
    """
    for family in families:
        name = f"{family}.{part}"
        module = sys.modules.get(name)
        if module is None:
            _finder.waiting.setdefault(name, []).append(act)
        else:
            _act(act, module)


def _act(act: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, the import and the training of others go on
        only_warn(f"lightning_gpu_tools cannot be used with this {module.__name__}: {error!r}.")


def only_warn(message: str) -> None:
    """Warn, whatever the filters are: none makes it an error of a program that may not even use this package."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(message, stacklevel=4)


class Root:
    """First base of what adopts others: Python adds bases to a class only if the first one stays, and is not object."""


def adopt(cls: type, part: str, name: str, families: tuple[str, ...] = FAMILIES) -> None:
    """Give a class the class of this name of every family as a base, now or when the family is imported.

    Args:
        cls: A subclass of :class:`Root`.
        part: The module that has the base.
        name: The base's name.
        families: Those that have it; their order is that of the bases.
    """

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
    # For annotations: they stand for the classes of whichever family.
    LightningModule = Logger = Trainer = Any
    _Strategy = Root

    class Callback(Root):
        """The ``Callback`` of every family."""

    class CUDAAccelerator(Root, metaclass=ABCMeta):
        """The ``CUDAAccelerator`` of every family."""

    class CheckpointIO(metaclass=ABCMeta):  # noqa: B024 - nothing is to be inherited, only asked for
        """What the ``CheckpointIO`` of every family is."""

    adopt(Callback, "callbacks.callback", "Callback", TRAINERS)
    adopt(CUDAAccelerator, "accelerators.cuda", "CUDAAccelerator")
    when_imported("plugins.io.checkpoint_io", lambda module: CheckpointIO.register(module.CheckpointIO), FABRICS)


class _OfOneFamily(ABCMeta):
    """Makes classes of which those for one family inherit from no other."""

    def mro(cls) -> list[type]:
        order = super().mro()
        family = vars(cls).get("_family")
        return order if family is None else [one for one in order if _home(one) in (None, family)]


# What Trainer and Fabric read of a strategy before they set anything.
_READ_FIRST = ("_accelerator", "_precision_plugin", "_precision", "_checkpoint_io", "cluster_environment")


class FamilyStrategy(_Strategy, metaclass=_OfOneFamily):
    """A strategy that joins a family when a Trainer or a Fabric takes it; then it is one of that family's own.

    Before, it has its options and what the ``__init__`` of its class has set, but nothing that Lightning's has.

    It joins when it is given its precision plugin. Trainer and Fabric set one early, and always one of their own
    family; the accelerator, which comes before, may be of any. It never leaves: a second Trainer is refused.

    Args:
        **options: Those of Lightning's strategy.
    """

    _family: ClassVar[str | None] = None

    def __init__(self, **options: Any) -> None:
        self._refuse_unknown(options)
        self._options = options
        if self._family is not None:
            super().__init__(**options)

    def _refuse_unknown(self, options: dict[str, Any]) -> None:
        """Raise an error for an option that none of :func:`bases_of` this strategy's class has."""

    @property
    def accelerator(self) -> Any:
        """What the Trainer or Fabric that takes the strategy has set."""
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
        options = self._options
        for name, part in options.items():
            _refuse_foreign(type(self).__name__, name, part, family)
        self.__class__ = _class_for(type(self), family)
        FamilyStrategy.__init__(self, **options)

    def _taken(self) -> TypeError:
        return TypeError(
            f"This {type(self).__name__} belongs to another Trainer or Fabric, of {self._family}. Make a new one for "
            "each of them."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._family is None:  # without __setstate__, which is that of a strategy that is in use
            return _not_taken, (type(self), vars(self))
        reduced: Any = super().__reduce_ex__(2)
        # Its own class has no name by which it could be found.
        return _unpickled, (type(self).__bases__[0], self._family), *reduced[2:]

    if not TYPE_CHECKING:  # a type checker is to know Lightning's attributes and no others

        def __getattr__(self, name: str) -> Any:
            if self._family is None:
                if name in _READ_FIRST:
                    return vars(self).get("_options", {}).get(name.lstrip("_"))
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} has no attribute {name!r} before a Trainer or a Fabric has taken it")
            if name in ("_precision_plugin", "_precision"):  # the one of a Trainer's strategy, the other of a Fabric's
                raise self._taken()
            return super().__getattribute__(name)  # which raises an error of its own


@functools.cache
def _class_for(front: type, family: str) -> type:
    names = {"__module__": front.__module__, "__qualname__": front.__qualname__, "__doc__": front.__doc__}
    return type(front)(front.__name__, (front,), {**names, "_family": family})


def _not_taken(cls: Any, attributes: dict[str, Any]) -> Any:
    strategy = cls.__new__(cls)
    vars(strategy).update(attributes)
    return strategy


def _unpickled(front: type, family: str) -> Any:
    importlib.import_module(f"{family}.strategies")
    cls: Any = _class_for(front, family)
    return cls.__new__(cls)


def _refuse_foreign(taker: str, name: str, part: object, family: str) -> None:
    """Raise an error for a plugin of the other package: Trainer and Fabric would replace it without a word."""
    theirs = {_DISTRIBUTIONS[home] for home in map(_home, type(part).__mro__) if home}
    if theirs and _DISTRIBUTIONS[family] not in theirs:
        raise TypeError(
            f"{taker}({name}=...) has a {type(part).__name__} of {family_of(part)}, which {family} does not take. "
            f"Import it from {_DISTRIBUTIONS[family]}."
        )
