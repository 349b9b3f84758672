"""The layering of the package: who may import whom, and which library lives where.

The contracts of pyproject.toml say most of it; what they cannot say is here.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import code_digests
from helpers.source_imports import MODULES, ROOT, imported_names, read_layers

TESTS = Path(__file__).parent

ROOMS = set(read_layers("rooms"))

PLANTED: dict[str, tuple[str, str]] = {
    "core/types.py": (
        "from tacita.kernels.hashing import mix_bits",
        "- tacita.core.types -> tacita.kernels.hashing",
    ),
    "models/base.py": (
        "import tacita.round.part",
        "- tacita.models.base -> tacita.round.part",
    ),
    "round/part.py": (
        "def late():\n    from tacita.federation.clients import grow_devices_for_block",
        "- tacita.round.part -> tacita.federation.clients",
    ),
    "federation/rounds.py": (
        "from tacita.runs import training",
        "- tacita.federation.rounds -> tacita.runs.training",
    ),
    "live/wire.py": (
        "from tacita.live.node.store import NodeStore",
        "- tacita.live.wire -> tacita.live.node.store",
    ),
    "live/node/question_handler.py": (
        "from tacita.live.server.remote_devices import RemoteDevices",
        "- tacita.live.node.question_handler -> tacita.live.server.remote_devices",
    ),
    "research/bench/harness.py": (
        "from tacita.research.audit import tally_attacks",
        "- tacita.research.bench.harness -> tacita.research.audit.tally_attacks",
    ),
    "core/codec.py": (
        "def late():\n    from tacita.core.files import read_arrays",
        "No cycles are allowed in tacita.core.",
    ),
    "federation/devices.py": (
        "def late():\n    import torch.nn as nn",
        "tacita.federation.devices -> torch",
    ),
    "data/sources.py": (
        "import numba",
        "tacita.data.sources -> numba",
    ),
    "attic.py": (
        '"""A module in no room."""',
        "- tacita.attic",
    ),
}
"""File of the package -> a wrong line that is added to it, and how the contracts report it."""


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Hold the package below a folder to the contracts of pyproject.toml."""
    script = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
    command = [sys.executable, "-P", "-c", script]
    environment = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "400", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_imports_keep_the_contracts() -> None:
    report = lint_imports(ROOT.parent)
    assert report.returncode == 0, report.stdout + report.stderr


@pytest.fixture(scope="module")
def planted_report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the contracts say of the package with every wrong line planted."""
    root = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT, root / "tacita", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT.parent / "pyproject.toml", root)
    for name, (line, _) in PLANTED.items():
        with open(root / "tacita" / name, "a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    report = lint_imports(root)
    assert report.returncode == 1, report.stdout + report.stderr
    return report.stdout


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_import_is_detected(planted_report: str, name: str) -> None:
    assert PLANTED[name][1] in planted_report, planted_report


def root_names(source: str) -> set[str]:
    """What a module takes from the package's root, which the contracts do not see."""
    names = {name.removeprefix("tacita.") for name in imported_names(source) if name.startswith("tacita.")}
    return {name for name in names if name.split(".")[0] not in ROOMS}


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith(("cli", "__"))])
def test_a_room_takes_only_the_version_from_the_root(module: str) -> None:
    assert root_names(MODULES[module].read_text(encoding="utf-8")) <= {"__version__"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import tacita\nprint(tacita.__version__)", {"__version__"}),
        ("from tacita import train", {"train"}),
        ("import tacita\ntacita.open_run(1)", {"open_run"}),
        ("from tacita.core import files", set()),
    ],
)
def test_names_of_the_root_are_detected(source: str, names: set[str]) -> None:
    assert root_names(source) == names


def test_the_root_holds_few_modules_and_none_is_long() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 6
    assert [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > 450] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_first_what_it_is_for(module: str) -> None:
    message = (ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    assert message.endswith("."), f"tacita/{module.replace('.', '/')} does not begin with a sentence"


def imported_test_files(source: str) -> list[str]:
    """Test files that a source text imports, by whatever path."""
    modules = [module for name in imported_names(source) for module in name.split(".")[:2]]
    return sorted({module for module in modules if module.startswith("test_")})


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.stem)
def test_no_file_imports_a_test_file(path: Path) -> None:
    assert imported_test_files(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("from test_tally import stream", ["test_tally"]),
        ("def late():\n    import tests.test_tally as tally", ["test_tally"]),
        ("from helpers.tally_runs import stream_of_lists", []),
    ],
)
def test_an_import_of_a_test_file_is_detected(line: str, modules: list[str]) -> None:
    assert imported_test_files(line) == modules


def is_verb(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function of the command line is a verb, registered wherever: typer reads its parameters."""
    messages = [ast.unparse(entry.annotation) for entry in (*node.args.args, *node.args.kwonlyargs) if entry.annotation]
    return any(
        entry == "RunArgument"
        or (entry.startswith("Annotated[") and ("typer.Option(" in entry or "typer.Arg" in entry))
        for entry in messages
    )


def test_functions_are_short_and_take_few_values() -> None:
    """Kernels take arrays one by one, and a verb of the command line one parameter per option."""
    wrong = []
    for module, path in MODULES.items():
        if module.startswith("kernels."):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = [entry.arg for entry in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            lines = (node.end_lineno or 0) - node.lineno + 1
            if module.startswith("cli.") and is_verb(node):
                continue
            if lines > 60 or len([n for n in names if n not in ("self", "cls")]) > 7:
                wrong.append(f"{module}.{node.name}: {lines} lines, {len(names)} values")
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "verb"),
    [
        ("def train(out: Annotated[Path, typer.Option(help='x')]): ...", True),
        ("def show(table: Annotated[str, typer.Argument()], as_json: AsJson = False): ...", True),
        ("def share(folder: RunArgument = None, user: User = None): ...", True),
        ("def _begin(out: Path, quiet: bool): ...", False),
        ("def tell(out: Annotated[Path, Strict()]): ...", False),
    ],
)
def test_a_verb_is_known_by_its_options(source: str, verb: bool) -> None:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert is_verb(node) == verb


def test_modules_can_be_the_first_to_be_imported() -> None:
    """A cycle that only works in the usual order shows when another module comes first.

    That there is none is read from the sources above, of all modules; here some are tried, because all take a minute.
    """
    names = [f"tacita.{m}" for m in MODULES if m not in ("__init__", "__main__")][::6]
    script = f"""
import functools, importlib, sys
from importlib.machinery import SourceFileLoader as Loader
read = functools.cache(lambda name, path, plain=Loader.get_code: plain(Loader(name, path), name))
Loader.get_code = lambda self, name: read(name, self.path)  # a module is run anew, and compiled once
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


def test_what_may_be_reordered_is_never_called_from_compiled_code() -> None:
    """Such a loop rounds otherwise when it is compiled with its caller than when it is loaded, already compiled."""
    compiled: dict[str, tuple[set[str], str]] = {}  # function -> what it calls, how it is compiled
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            how = [ast.unparse(entry) for entry in getattr(node, "decorator_list", []) if "njit" in ast.unparse(entry)]
            if isinstance(node, ast.FunctionDef) and how:
                calls = {
                    entry.func.id
                    for entry in ast.walk(node)
                    if isinstance(entry, ast.Call) and hasattr(entry.func, "id")
                }
                compiled[node.name] = (calls, how[0])
    loose = {name for name, (_, how) in compiled.items() if "fastmath" in how and "always" not in how}
    assert "run_ego_steps" in loose
    assert {name: calls & loose for name, (calls, _) in compiled.items() if calls & loose} == {}


def test_code_that_makes_numbers_is_the_digested_one() -> None:
    """Otherwise cells of tables outlive the code that made them, and nobody sees it."""
    changed = code_digests.list_changed_modules()
    assert not changed, code_digests.explain_changes(changed)


def test_every_module_that_cells_import_is_digested_or_named() -> None:
    script = "import sys, tacita.research.experiments.cells; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    imported = {name.removeprefix("tacita.") for name in output.split() if name.startswith("tacita.")}
    counted = code_digests.list_counted_modules()
    unnamed = []
    for module in imported - counted.keys():
        path = code_digests.PACKAGE / Path(*module.split("."))
        is_left_out = path.is_dir() or f"{path.name}.py" in code_digests.LEFT_OUT
        if not is_left_out and not any(f"{module}.".startswith(f"{name}.") for name in code_digests.UNCOUNTED):
            unnamed.append(module)
    assert unnamed == []
