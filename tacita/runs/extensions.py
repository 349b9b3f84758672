"""Methods of others: files that are named, and packages that bring some along (entry points `tacita.parts`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

from tacita.core.errors import TacitaError

GROUP = "tacita.parts"


def import_extension(name: str) -> None:
    """Import a file `my_method.py`, or a module by its dotted name; what it registers can be named from then on."""
    path = Path(name)
    try:
        if path.suffix == ".py":
            _import_file(path)
        else:
            importlib.import_module(name)
    except TacitaError:
        raise
    except Exception as error:
        raise TacitaError(
            f"--import {name}: {type(error).__name__}: {error}; it must run when Python imports it."
        ) from None


def import_entry_points() -> None:
    """Import what installed packages name in the group `tacita.parts`."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            raise TacitaError(
                f"the installed extension '{point.name}' ({point.value}) cannot be imported: {error}."
            ) from None


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise TacitaError(f"--import {path}: there is no such file.")
    key = str(path.resolve())
    if key in _LOADED:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TacitaError(f"--import {path}: no Python module; name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    _LOADED.add(key)


_LOADED: set[str] = set()
