"""The planted bugs, one file per part of the product."""

from importlib import import_module
from pkgutil import iter_modules

from tests.mutations.planted import Planted

PLANTED: tuple[Planted, ...] = tuple(
    bug for part in iter_modules(__path__) for bug in import_module(f"{__name__}.{part.name}").BUGS
)
