"""Serving engines behind one streaming client: an adapter a file, found by its name (design §3, issue of engines)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from specbench.config import NATIVE
from specbench.engines.base import Engine
from specbench.errors import SpecbenchError


def engines() -> dict[str, Engine]:
    """Every adapter of this package by its name, e.g. `llama.cpp`."""
    found: dict[str, Engine] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, Engine) and cls.__module__ == module.__name__ and "name" in vars(cls):
                found[cls.name] = cls()
    return dict(sorted(found.items()))


def find_engine(name: str) -> Engine:
    """The adapter called `name`.

    Raises:
        SpecbenchError: there is none.
    """
    known = engines()
    if name not in known:
        raise SpecbenchError(f"unknown engine {name!r}", f"there are {', '.join([NATIVE, *known])}")
    return known[name]
