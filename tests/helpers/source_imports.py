"""The modules of the package and what they import."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import tacita

ROOT = Path(tacita.__file__).parent


def read_layers(contract_id: str) -> list[str]:
    """The layers of an import contract of pyproject.toml, lowest first."""
    with open(ROOT.parent / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["id"] == contract_id)
    return list(reversed(contract["layers"]))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported_names(source: str) -> Iterator[str]:
    """Everything a module imports, anywhere in its text, as dotted names; of the package itself what is used."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (entry.name for entry in node.names if entry.name != "tacita")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{entry.name}" for entry in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tacita":
            yield f"tacita.{node.attr}"
