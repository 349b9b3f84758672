"""What the documents say is true: examples run, commands parse, links lead somewhere, rooms and hooks exist."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import tacita
from helpers import contracts
from helpers.examples import EXAMPLES, ROOT, load_example
from helpers.oracle import federate, make_backbone, make_block, make_stream, started
from helpers.source_imports import read_layers
from tacita.cli.entry import CallError, app
from tacita.core.config import RunConfig
from tacita.core.config_errors import list_keys
from tacita.core.errors import TacitaError
from tacita.federation.rounds import run_round
from tacita.methods import RunContext, build_parts, list_preset_names
from tacita.methods.catalogue import METHODS
from tacita.models import Backbone, find_backbone_class, list_backbones
from tacita.models import base as models_base
from tacita.round import registry
from tacita.round.part import ALL_HOOKS, CAPABILITIES, CORE_HOOKS
from tacita.runs.serving import Run

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DATA = os.environ.get("TACITA_DATA", "")
SMALL = "synthetic:users=300,items=120,per_user=20,seed=3"

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


# The examples


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples are registered while a test of this file runs, and nowhere else."""
    for module, name in ((registry, "_PARTS"), (registry, "_PRESETS"), (models_base, "_REGISTRY")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.chdir(tmp_path)
    for name in ("toy_method", "toy_backbone"):
        load_example(name)


def trained(name: str, **settings: Any) -> Run:
    """A small run whose answer is known: everybody likes one of eight groups of items."""
    quiet = {"controls": False} | settings.pop("evaluate", {})
    return tacita.train(data=SMALL, split={"kind": "random"}, evaluate=quiet, out=name, **settings)


@pytest.mark.parametrize("name", ["toy_method", "toy_backbone", "toy_budget", "toy_unlearning"])
def test_the_guide_quotes_the_example_as_it_is(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert f"```python\n{text}```\n" in GUIDE
    assert len(text.splitlines()) < 70


def test_the_guides_own_lines_train_the_toy_method(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = [entry for entry in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "import toy_method" in entry]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "toy_method", raising=False)
    exec(compile(lines, "CONTRIBUTING.md", "exec"), {})
    assert "ndcg@20" in capsys.readouterr().out
    del sys.modules["toy_method"]


def test_the_toy_method_is_plain_averaging_where_it_does_nothing() -> None:
    off = [{"name": "steady", "most": 1e9, "momentum": 0.0}]
    entry = trained("off", method="steady", parts=off, train={"rounds": 5})
    plain = trained("plain", train={"rounds": 5})
    assert entry.result["blocks"] == plain.result["blocks"]


def test_the_toy_method_carries_a_share_of_the_last_move_on() -> None:
    stream = make_stream(make_block(0, 8, [[0, 1, 2], [3, 4], [5, 6, 7, 0]]))
    plain = federate(stream, make_backbone("mf"))
    world = RunContext(plain.backbone, plain.draws, plain.config.train)
    (part,) = build_parts([{"name": "steady", "momentum": 0.5}], world)
    progress = started(plain)
    start = progress.server.with_part("steady", part.server_block_start(progress.server))
    first, _ = run_round(plain, start, progress.devices)
    once = part.server_step(start, first, None)  # type: ignore[arg-type]
    assert np.array_equal(once.items, first.items)
    twice = part.server_step(once, once.with_items(once.items + 1), None)  # type: ignore[arg-type]
    np.testing.assert_allclose(twice.items, first.items + 1 + 0.5 * (first.items - start.items), rtol=1e-6)


def test_the_toy_method_shortens_uploads_and_its_devices_remember() -> None:
    fed = contracts.federate_parts([{"name": "steady", "most": 1e-6, "momentum": 0.0}], patience=9)
    progress = started(fed)
    before = progress.server.items.copy()
    for _ in range(2):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    assert 0 < np.abs(progress.server.items - before).max() <= 2e-6
    assert progress.clients.parts["steady"]["shortened"].tolist() == [2] * 10


def test_the_toy_method_refuses_what_it_cannot_do_in_one_sentence() -> None:
    with pytest.raises(TacitaError, match=r"use train=\{\"server_lr\": 1.0\} or less"):
        trained("refused", method="steady", train={"rounds": 1, "server_lr": 2.0})


def test_the_toy_backbone_finds_more_than_what_is_popular() -> None:
    run = trained("toy", backbone="biased-mf", train={"rounds": 30}, evaluate={"controls": True})
    popular = run.result["controls"]["popular"]["mean"]["ndcg@20"]
    assert run.result["mean"]["ndcg@20"] > 2 * popular


@pytest.mark.parametrize("name", ["biased-mf"])
class TestToyBackbone(contracts.TrainedContract):
    def make(self, name: str) -> Backbone:
        cls = find_backbone_class(name)
        return cls(cls.Config(dim=6, lr=0.3, item_lr_scale=10.0, init_std=0.3))

    def make_learner(self, name: str) -> Backbone:
        return self.make(name)


@pytest.mark.parametrize("name", ["steady"])
class TestToyMethod(contracts.PartContract):
    pass


# Rooms and hooks


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the guide, without its head."""
    rows = [line for line in GUIDE.split(f"{heading}\n", 1)[1].splitlines() if line.startswith("|") or line[:1] == "#"]
    cells = []
    for line in rows:
        if line.startswith("#"):
            break
        cells.append([word.strip() for word in line.strip("|").split("|")])
    return cells[2:]


def test_the_guide_lists_the_rooms_there_are_lowest_first() -> None:
    reports = [re.sub("`", "", row[0]) for row in table_under("## The rooms")]
    assert reports == [room for room in read_layers("rooms") if not room.startswith("__")]
    picture = GUIDE.split("```\n", 2)[1]
    drawn = [word for word in re.findall(r"[a-z]+", picture) if word in reports]
    assert list(dict.fromkeys(reversed(drawn))) == reports
    inner = [room for room in read_layers("rooms-of-live") if " : " not in room]
    assert " ► ".join(reversed(inner)) in picture


def test_files_named_for_a_room_are_in_it() -> None:
    for room, _, files in table_under("## The rooms"):
        for name in re.findall(r"`([\w/]+\.py)`", files):
            folder = ROOT / "tacita" / room.strip("`")
            assert (folder / name).is_file() or folder.with_name(name).is_file(), f"{room}: {name}"


def test_the_guide_lists_every_hook_of_a_part_and_no_other() -> None:
    rows = table_under("### The hooks")
    start = rows.index(["class", "hooks", "who has it"])
    listed = [hook for row in rows[:start] for hook in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(CORE_HOOKS)
    by_class = {row[0].strip("`"): sorted(re.findall(r"`(\w+)`", row[1])) for row in rows[start + 2 :]}
    hooks = {cls.__name__: sorted(hook for hook in ALL_HOOKS if hook in vars(cls)) for cls in CAPABILITIES}
    assert by_class == hooks


def test_stations_of_a_round_exist() -> None:
    walk = GUIDE.split("## One round\n")[1].split("**The same live.**")
    files = [re.findall(r"^\d\. `(tacita/[\w/.]+)`(?:, `([\w.]+)`)?", line) for line in walk[0].splitlines()]
    steps = [file[0] for file in files if file]
    assert 6 <= len(steps) <= 10
    for path, name in steps:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name.rpartition('.')[2]}(" in text or not name, f"{path}: {name}"


# Links, paths, names


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        result = (path.parent / file).resolve() if file else path
        assert result.exists(), f"{path.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", result.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads], target


@every_document
def test_files_named_in_documents_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|toml|json|txt))`", text):
        assert any((base / name).exists() for base in (ROOT, ROOT / "tacita", *(ROOT / "tacita").iterdir())), name


def settings_in(text: str) -> Iterator[str]:
    for result in re.findall(r"`(?:--set )?((?:train|evaluate|split)\.[a-z_.0-9]+)", text):
        yield result.rstrip(".")


@every_document
def test_settings_named_in_documents_exist(path: Path) -> None:
    keys = list_keys(RunConfig)
    for name in settings_in(path.read_text(encoding="utf-8")):
        assert any(key == name or key.startswith(f"{name}.") for key in keys), f"{path.name}: {name}"


def test_the_readme_counts_models_and_methods() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    n_models = len([name for name in list_backbones() if name != "biased-mf"])
    n_methods = len([name for name in list_preset_names() if name in METHODS])
    assert f"| {n_models} models, {n_methods} methods |" in text
    assert f"# {n_methods} methods, baselines and ablations" in text
    assert len(text.splitlines()) <= 120


def run_readme() -> str:
    """What the README's Python prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue()


@pytest.mark.skipif(not (Path(DATA) / "ml-100k").is_dir(), reason="needs ml-100k in $TACITA_DATA")
def test_the_readme_prints_what_its_example_prints() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```\n\n```\n{run_readme()}```" in text


def test_the_page_of_methods_names_every_backbone_and_method() -> None:
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    matches = set(re.findall(r"`([\w-]+)`", text))
    assert {name for name in list_backbones() if name != "biased-mf"} - matches == set()
    assert {name for name in list_preset_names() if name != "steady"} - matches == set()


# Commands


def commands(path: Path) -> Iterator[tuple[str, bool]]:
    """Every call of tacita in a document, and whether it is whole: in a sentence it may only name its verb."""
    text = path.read_text(encoding="utf-8")
    for fence in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in fence.splitlines():
            if re.match(r"(\$ )?tacita [a-z-]", line):
                yield line.removeprefix("$ "), True
    bare = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from ((" ".join(entry.split()), False) for entry in re.findall(r"`(tacita [^`]+)`", bare))


def parse(line: str) -> None:
    """What the command line makes of a line, up to calling the verb; raises what a person would be told."""
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "..."]
    command: Any = typer.main.get_command(app)
    if words[0].startswith("--"):  # acts while it is being parsed: completion would be installed
        assert words[0] in [option for param in command.params for option in param.opts], line
        return
    context: Any = None
    while True:
        context = command.make_context(command.name or "tacita", list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        if not rest:
            return
        _, command, words = command.resolve_command(context, rest)


def test_a_wrong_command_does_not_parse() -> None:
    with pytest.raises(AssertionError):
        parse("tacita --install-complection")
    for wrong in ("tacita trian", "tacita train --round 3", "tacita node recommend 1 -k many", "tacita server enroll"):
        with pytest.raises(CallError):
            parse(wrong)
    parse("tacita train --rounds 3")


@every_document
def test_commands_shown_in_documents_parse(path: Path) -> None:
    shown = list(commands(path))
    telling = ("README.md", "live.md", "tally.md", "forgetting.md", "privacy.md")
    assert any(whole for _, whole in shown) or path.name not in telling
    assert shown or path.name != "performance.md"
    for line, whole in shown:
        try:
            parse(line)
        except CallError as error:
            if whole or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                pytest.fail(f"{path.name}: `{line}`: {error.format_message()}")


def test_python_shown_in_documents_compiles() -> None:
    for path in DOCUMENTS:
        for fence in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            compile(fence, str(path), "exec")
