"""Where the examples are, and how a test loads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import tacita

ROOT = Path(tacita.__file__).parents[1]
EXAMPLES = ROOT / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
