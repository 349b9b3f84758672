"""What there is, found by name: methods, tables, methods of one's own."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tacita
from tacita.cli.entry import app
from tacita.cli.options import complete_backbone, complete_method
from tacita.core.errors import TacitaError
from tacita.methods import list_preset_names
from tacita.methods.catalogue import METHODS
from tacita.research.experiments.experiment_spec import list_experiments
from tacita.round import registry
from tacita.runs import extensions
from tacita.runs.method_reference import build_method_reference, list_methods, render_methods_page

EXAMPLES = Path(__file__).parents[1] / "examples"
OWN = """
from tacita.round.part import Part
from tacita.round.registry import register, register_preset

@register
class Quiet(Part):
    \"\"\"A part that changes nothing.\"\"\"
    name = "quiet-{name}"

register_preset("quiet-{name}", {{"name": "quiet-{name}"}})
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for name in ("_PARTS", "_PRESETS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_preset_is_described() -> None:
    shipped = {name for name in list_preset_names() if not name.startswith(("quiet-", "steady", "whisper", "amnesia"))}
    assert shipped == set(METHODS)


def test_methods_are_listed_with_family_paper_promise_and_cost() -> None:
    listed = json.loads(run("methods", "--json"))
    assert {method["name"] for method in listed} >= set(METHODS)
    dpps = json.loads(run("methods", "dpps", "--json"))
    assert dpps["budget"] == "an epsilon, counted by part 'dpps'"
    assert dpps["family"] == "personal"
    assert build_method_reference("fedavg").budget == "no epsilon"
    assert build_method_reference("fedpergnn").live == "lab only: it needs a third party"
    assert "200 rounds" in build_method_reference("fedshare").cost
    assert "f3crec" in run("methods")


def test_an_unknown_method_gets_one_sentence() -> None:
    with pytest.raises(TacitaError, match="f3crec"):
        build_method_reference("f3crek")


def test_tables_are_listed() -> None:
    titles = json.loads(run("reproduce", "--list", "--json"))
    assert set(titles) == set(list_experiments())
    assert all(titles.values())


def test_reproduce_without_a_table_says_how_to_list_them() -> None:
    result = CliRunner().invoke(app, ["reproduce"])
    assert isinstance(result.exception, TacitaError)
    assert "--list" in str(result.exception)


def test_a_method_of_a_file_is_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "own_quiet.py"
    file.write_text(OWN.format(name="file"))
    out = tmp_path / "run"
    data = "synthetic:users=40,items=30,per_user=8"
    run(
        "train",
        "--data",
        data,
        "--import",
        str(file),
        "--method",
        "quiet-file",
        "--rounds",
        "1",
        "--out",
        str(out),
        "--quiet",
    )
    assert json.loads((out / "result.json").read_text())["config"]["method"] == "quiet-file"
    method = json.loads(run("methods", "quiet-file", "--import", str(file), "--json"))
    assert method["about"] == "A part that changes nothing"


def test_the_example_of_the_guide_is_found_by_name(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "toy_method.py", tmp_path / "toy_method_copy.py")
    if "steady" not in list_preset_names():
        extensions.import_extension(str(tmp_path / "toy_method_copy.py"))
    assert "steady" in list_preset_names()


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(TacitaError, match="no such file"):
        extensions.import_extension(str(tmp_path / "missing.py"))
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(TacitaError, match="ZeroDivisionError"):
        extensions.import_extension(str(broken))


def test_packages_bring_methods_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "packaged_quiet.py").write_text(OWN.format(name="packaged"))
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("quiet", "packaged_quiet", extensions.GROUP)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [point] if group == extensions.GROUP else [])
    extensions.import_entry_points()
    assert "quiet-packaged" in list_preset_names()


def test_the_page_of_methods_is_what_the_registry_says() -> None:
    """`tacita methods --markdown` prints the tables of docs/methods.md."""
    methods = [method for method in list_methods() if method.name in METHODS]
    page = (Path(tacita.__file__).parents[1] / "docs/methods.md").read_text(encoding="utf-8")
    assert render_methods_page(methods) in page
    assert len(methods) == len(METHODS)
    assert "### Averages of updates" in run("methods", "--markdown")


def test_names_complete() -> None:
    assert complete_method("fedkd") == [name for name in list_preset_names() if name.startswith("fedkd")]
    assert "tally-order" in complete_backbone("tal")
    families = {method.family for method in list_methods()}
    assert {"average", "continual", "distillation", "personal", "sharing"} <= families
