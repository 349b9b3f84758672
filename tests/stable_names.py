"""Strings that numbers depend on. `python tests/stable_names.py --write` notes purposes of draws and keys of cells.

A purpose is one part of the key of a draw, and a cell of a table is found by a hash of its settings and of the names of
changes of code. A renamed one changes numbers, or loses cells that took hours, without any other test failing.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import tacita
from tacita.research.experiments.code_changes import load_code_changes
from tacita.research.experiments.experiment_spec import list_cells, list_experiments, load_experiment

FOLDER = Path(__file__).parent / "stable"
PURPOSES = FOLDER / "purposes.json"
CELL_KEYS = FOLDER / "cell_keys.json"
CODE_CHANGES = FOLDER / "code_changes.json"
PACKAGE = Path(tacita.__file__).parent
DRAWING = {"public", "private", "secret_key"}  # methods of `Draws`
STREAMS = {"NoiseStream", "open_noise_stream"}  # made of draws, or of a part that has them, and a purpose


def purpose_pattern(node: ast.expr) -> str | None:
    """The text of a purpose, with {} for what is filled in; None: it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def find_purposes(source: str) -> Iterator[str]:
    """Purposes that a source text draws for."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        pattern = None
        if isinstance(node.func, ast.Attribute) and node.func.attr in DRAWING:
            pattern = purpose_pattern(node.args[0])
        elif _called_name(node.func) in STREAMS and len(node.args) > 1:
            pattern = purpose_pattern(node.args[1])
        if pattern is not None:
            yield pattern


def _called_name(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def package_purposes() -> list[str]:
    sources = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    return sorted({purpose for source in sources for purpose in find_purposes(source)})


def planned_cell_keys() -> dict[str, list[str]]:
    """Experiment -> the keys of all its cells by their settings alone, as the package brings them."""
    keys = {}
    for name in list_experiments():
        experiment, settings = load_experiment(name)
        cells = list_cells(experiment, settings, experiment.datasets, experiment.backbones, experiment.seeds)
        keys[name] = sorted({cell.settings_key for cell in cells})
    return keys


def write_code_changes() -> None:
    names = [change.name for change in load_code_changes()]
    CODE_CHANGES.write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__" and "--write" in sys.argv:
    PURPOSES.write_text(json.dumps(package_purposes(), indent=1) + "\n")
    CELL_KEYS.write_text(json.dumps(planned_cell_keys(), indent=0) + "\n")
    write_code_changes()
