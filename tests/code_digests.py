"""Digests of the code that makes numbers: `python tests/code_digests.py` lists the modules that changed.

Cells of tables outlive the code that made them unless somebody says that it changed. So each module has a digest of
what it does: without comments, docstrings, type hints, texts of errors and the names of local variables.
Where a digest is another one, either

- the same bits come out (`python tests/frozen.py --save FILE` before, `--against FILE` after): `--write` renews it; or
- other numbers come out: `--raise NAME "why" --part PART --backbone BACKBONE` does so too, and adds a change to
  code_changes.toml, so that the cells of these parts or backbones count as not run. More to narrow it down with:
  `--kind once`, `--where prediction-transfer.server_loss=sum`. All cells: `--every-cell`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

import stable_names
import tacita
from tacita.core.config import validate_model
from tacita.methods import list_part_names
from tacita.models import list_backbones
from tacita.research.experiments.code_changes import FILE, CodeChange, load_code_changes

DIGESTS = Path(__file__).parent / "stable" / "code_digests.toml"
PACKAGE = Path(tacita.__file__).parent
COUNTED = (
    "core/config.py",
    "core/device_lists.py",
    "core/draws.py",
    "core/flat_indices.py",
    "core/ragged.py",
    "core/sparse.py",
    "core/types.py",
    "data/*.py",
    "data/shards/*.py",
    "federation/*.py",
    "kernels/*.py",
    "learn/**/*.py",
    "messages/*.py",
    "methods/*/*.py",
    "metrics.py",
    "models/**/*.py",
    "privacy/*.py",
    "research/experiments/analyses.py",
    "research/experiments/cells.py",
    "research/experiments/choice_measures.py",
    "research/experiments/planted_items.py",
    "research/experiments/shared_base.py",
    "research/experiments/single_block.py",
    "research/experiments/withdrawals.py",
    "round/*.py",
    "runs/assembly.py",
    "runs/calibration.py",
    "runs/central_training.py",
    "runs/controls.py",
    "runs/forgetting/*.py",
    "runs/item_rows.py",
    "runs/loaded_run.py",
    "runs/noise_secret.py",
    "runs/silos.py",
    "runs/storage.py",
)
UNCOUNTED = {
    "core": "codecs, files and errors: they keep or refuse numbers",
    "federation.ranks": "cells run in one process",
    "methods.catalogue": "words on methods",
    "report": "pages of finished cells",
    "research.experiments": "which cells there are, and where they run; their settings are in their keys",
    "runs.file_schemas": "types alone",
    "runs.run_folder": "files of finished runs",
    "runs.server_view": "what a server holds, for audits",
}
"""Modules that cells import, and which make none of their numbers: room or module, and why."""
LEFT_OUT = {"__init__.py", "presets.py"}  # settings are in a cell's key already
TEXTS = {"description"}  # what an option's help says


def list_counted_modules() -> dict[str, Path]:
    """Module, without the package's name -> its file."""
    modules = {}
    for pattern in COUNTED:
        for path in PACKAGE.glob(pattern):
            if path.name not in LEFT_OUT:
                name = path.relative_to(PACKAGE).with_suffix("").as_posix()
                modules[name.replace("/", ".")] = path
    return dict(sorted(modules.items()))


def digest_source(source: str) -> str:
    """A digest of what a source text does."""
    tree = _Plain().visit(ast.parse(source))
    text = json.dumps(_encode(tree))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Plain(ast.NodeTransformer):
    """Takes out of a tree what numbers cannot depend on."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        self.generic_visit(node)
        _number_locals(node)
        return _without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        return _without_docstring(node)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.generic_visit(node)
        return _without_docstring(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise(exc=None, cause=None)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in TEXTS]
        return node


def _without_docstring(node: Any) -> Any:
    body = []
    for statement in node.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text:
            body.append(statement)
    node.body = body
    return node


def _number_locals(function: ast.FunctionDef) -> None:
    """Names that a function binds, by the order in which they first occur; callers by keyword still see their own."""
    kept = set()
    bound = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            kept.update(node.names)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    numbers: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.arg in bound - kept:
            node.arg = numbers.setdefault(node.arg, f"_{len(numbers)}")
        elif isinstance(node, ast.Name) and node.id in bound - kept:
            node.id = numbers.setdefault(node.id, f"_{len(numbers)}")


def _encode(value: Any) -> Any:
    """A tree as lists, alike for all versions of Python: empty fields are left out."""
    if isinstance(value, list):
        return [_encode(element) for element in value]
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = []
    for name, field in ast.iter_fields(value):
        if field not in (None, []) and name not in ("ctx", "kind"):
            fields.append([name, _encode(field)])
    return [type(value).__name__, fields]


def compute_digests() -> dict[str, str]:
    return {name: digest_source(path.read_text(encoding="utf-8")) for name, path in list_counted_modules().items()}


def read_digests() -> dict[str, str]:
    tables = tomllib.loads(DIGESTS.read_text(encoding="utf-8"))
    return {name: table["digest"] for name, table in tables.items()}


def list_changed_modules() -> list[str]:
    """Modules whose digest is another one than the noted, that are new, or that are gone."""
    noted = read_digests() if DIGESTS.exists() else {}
    current = compute_digests()
    names = sorted(noted.keys() | current.keys())
    return [name for name in names if noted.get(name) != current.get(name)]


def explain_changes(modules: list[str]) -> str:
    """What to do about modules that changed."""
    return (
        f"{', '.join(modules)} changed. If the same numbers come out (python tests/frozen.py --against FILE, with what "
        "--save FILE noted before), run `python tests/code_digests.py --write`; if others, "
        '`python tests/code_digests.py --raise NAME "why" --part PART --backbone BACKBONE`, so that cells run again.'
    )


def write_digests() -> None:
    """A table for each module: lines of different modules are never neighbours, so that they merge."""
    tables = [f'["{name}"]\ndigest = "{digest}"\n' for name, digest in compute_digests().items()]
    DIGESTS.write_text("\n".join(tables), encoding="utf-8")


def add_change(options: argparse.Namespace, modules: list[str]) -> None:
    name, why = options.raises
    values: dict[str, Any] = {
        "name": name,
        "modules": modules,
        "parts": options.part,
        "backbones": options.backbone,
        "kinds": options.kind,
        "where": dict(_iterate_conditions(options.where)),
        "why": why,
    }
    values = {key: value for key, value in values.items() if value}
    change = validate_model(CodeChange, values, "the change")
    check_change(change, options.every_cell)
    text = tomli_w.dumps({"change": [values]})
    with open(FILE, "a", encoding="utf-8") as out:
        out.write(f"\n{text}")
    load_code_changes.cache_clear()
    stable_names.write_code_changes()


def check_change(change: CodeChange, every_cell: bool) -> None:
    """Whether a change's name is new and its cells are known."""
    if change.name in {earlier.name for earlier in load_code_changes()}:
        sys.exit(f"there is a change '{change.name}' already; choose another name.")
    if not change.parts and not change.backbones and not change.where and not every_cell:
        sys.exit("say which cells have other numbers: --part, --backbone, --where, or --every-cell.")
    unknown = {*change.parts} - {*list_part_names()} | {*change.backbones} - {*list_backbones()}
    if unknown:
        sys.exit(f"no part or backbone is called {', '.join(sorted(unknown))}.")


def _iterate_conditions(words: list[str]) -> Iterator[tuple[str, Any]]:
    for word in words:
        key, _, text = word.partition("=")
        try:
            yield key, json.loads(text)
        except ValueError:
            yield key, text


def main() -> int:
    parser = argparse.ArgumentParser(description="Which modules changed that make the numbers of tables.")
    parser.add_argument("--write", action="store_true", help="renew the digests: the same numbers come out")
    parser.add_argument("--raise", dest="raises", nargs=2, metavar=("NAME", "WHY"), help="other numbers come out")
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--backbone", action="append", default=[])
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--where", action="append", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--every-cell", action="store_true")
    options = parser.parse_args()
    modules = list_changed_modules()
    if options.raises:
        add_change(options, modules)
    if options.raises or options.write:
        write_digests()
        print(f"renewed: {', '.join(modules) or 'nothing'}")
        return 0
    print(explain_changes(modules) if modules else "no module changed that makes numbers")
    return 1 if modules else 0


if __name__ == "__main__":
    sys.exit(main())
