"""What the package imports is what its installation brings: core for the lab, extras for the rest."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.source_imports import MODULES, imported_names

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def stated(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(entry.name): entry for entry in map(Requirement, lines)}


CORE = stated(PROJECT["dependencies"])
ROOM_EXTRAS = {  # of the room that imports them
    "live": ["live"],
    "web": ["serve"],
    "models.side": ["text"],
    "privacy": ["secure"],
    "research.bench": ["peers"],
    "research.experiments": ["cluster"],
    "runs.trackers": ["tensorboard", "mlflow", "wandb"],
}
EXTRAS = {
    room: stated([line for extra in extras for line in PROJECT["optional-dependencies"][extra]])
    for room, extras in ROOM_EXTRAS.items()
}
MODULE_OF = {"Crypto": "pycryptodome", "mlflow": "mlflow-skinny"}
DECLARED = {"core": CORE, **EXTRAS}
PINNED = dict(
    (canonicalize_name(name), version)
    for name, version in re.findall(r"(?m)^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
)


def outside(source: str) -> set[str]:
    """The packages a source text imports that are neither Python's nor ours; most are named as their module."""
    roots = {dotted.split(".")[0] for dotted in imported_names(source)}
    return {canonicalize_name(MODULE_OF.get(entry, entry)) for entry in roots - sys.stdlib_module_names - {"tacita"}}


def extra_of(module: str) -> set[str]:
    """What may be there besides the core where a module is."""
    return {name for room, extra in EXTRAS.items() if module.startswith(f"{room}.") for name in extra}


def undeclared(module: str, source: str) -> set[str]:
    return outside(source) - CORE.keys() - extra_of(module)


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_imports_is_declared(module: str) -> None:
    assert undeclared(module, MODULES[module].read_text(encoding="utf-8")) == set()


def test_undeclared_import_is_detected() -> None:
    assert undeclared("cli", "import os\ndef late():\n    import click.core") == {"click"}
    assert undeclared("rounds", "from flwr.app import Message") == {"flwr"}
    assert undeclared("live.flower", "from flwr.app import Message\nimport tomli_w") == set()


def test_what_is_declared_is_imported() -> None:
    used = {name: outside(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    assert CORE.keys() - set().union(*used.values()) == set()
    for room, extra in EXTRAS.items():
        assert extra.keys() - set().union(*(v for name, v in used.items() if name.startswith(f"{room}."))) == set()


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, some in DECLARED.items() for name in some])
def test_the_version_that_is_tested_lies_in_the_declared_range(room: str, name: str) -> None:
    assert DECLARED[room][name].specifier.contains(PINNED[name])


def test_no_untried_torch_is_ever_fetched() -> None:
    major, minor, _ = PINNED["torch"].split(".")
    assert not CORE["torch"].specifier.contains(f"{major}.{int(minor) + 1}.0")
