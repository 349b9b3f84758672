"""The modules of the package and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tacita

ROOT = Path(tacita.__file__).parent
# Lowest first: a module imports only rooms that stand before its own, and nothing in a room comes round to itself.
ROOMS = (
    "core",
    "kernels",
    "privacy",
    "messages",
    "data",
    "models",
    "metrics",
    "round",
    "learn",
    "federation",
    "methods",
    "report",
    "runs",
    "live",
    "live.node",
    "live.server",
    "live.engine",
    "live.running",
    "live.pages",
    "research",
    "research.bench",
    "research.experiments",
    "research.audit",
    "doctor",
    "cli",
    "__init__",
    "__main__",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported_names(source: str) -> Iterator[str]:
    """Everything a module imports, anywhere in its text, as dotted names; of the package itself what is used."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name != "tacita")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tacita":
            yield f"tacita.{node.attr}"
