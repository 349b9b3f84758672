"""Verbs that ask: recommend for everybody or a history, similar items, settings, tables and pictures for a paper."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import BaseModel

import tacita as tc
from helpers.command_line import (
    SMALL_DATA,
    _isolated_folder,  # noqa: F401  (a fixture that every test here uses)
    assert_refused,
    call,
)
from tacita.core.config import RunConfig
from tacita.core.config_errors import list_keys
from tacita.methods import find_part_class, list_part_names, list_preset_names
from tacita.models import find_backbone_class, list_backbones
from tacita.runs.served_models import serve_finished_run
from tacita.runs.settings_reference import find_settings, list_settings
from tacita.web.answers import ListOptions, RunAnswers


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three seeds of one recipe, and a run of another."""
    place = tmp_path_factory.mktemp("runs")
    quick: dict[str, Any] = {"train": {"rounds": 2}, "evaluate": {"controls": False}}
    folders = [tc.train(SMALL_DATA, seed=seed, out=place / f"seed-{seed}", **quick).folder for seed in (1, 2, 3)]
    return [*folders, tc.train(SMALL_DATA, backbone="tally", out=place / "tally", **quick).folder]


# Recommend, similar


def test_a_run_is_named_by_an_argument_or_by_an_option(runs: list[Path]) -> None:
    """recommend and forget say --run, so everybody tries it with the others, too."""
    run, item = str(runs[-1]), tc.load(runs[-1]).items[0]
    outputs = [call("similar", *words, "--json") for words in ((run, item), ("--run", run, item), (item, "--run", run))]
    assert len(json.loads(outputs[0].out)) > 0
    assert len({entry.out for entry in outputs}) == 1
    for words, message in {
        (): "name one run folder, as an argument or with --run",
        (run,): "name the item, too",
        ("--run", run, run, item): "the run is named twice",
        ("--run", run, item, item): "name one run folder",
    }.items():
        assert_refused(["similar", *words], message)
    outs = [call("ledger", *words).out for words in ((run,), ("--run", run))]
    assert outs[0] == outs[1] != ""
    pages = {"argument.html": [run], "option.html": ["--run", run]}
    for page, words in pages.items():
        assert call("report", *words, "--out", page).code == 0
    assert len({Path(page).read_bytes() for page in pages}) == 1
    assert_refused(["report"], "name one run folder or more")
    assert_refused(["ledger"], "name one run folder")


def hide_seconds(text: str) -> str:
    return re.sub(r'("[a-z_]*seconds[a-z_]*": )[-0-9.e]+', r"\1...", text)


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("recommend", "--user u1 --json"),
        ("explain", "--user u1 --item i3 --json"),
        ("ledger", "--json"),
        ("forget", "--user nobody --all"),
        ("share", "--user nobody --all"),
        ("unshare", "--user nobody --all"),
        ("audit tally", "--brief --set x=1"),
        ("audit order", "--set x=1"),
        ("audit scores", "--set x=1"),
        ("audit forget", "--requests 0.5 --json"),
    ],
)
def test_every_verb_takes_the_run_first_or_by_its_option(runs: list[Path], verb: str, more: str) -> None:
    """The answer is the same, and so is a refusal; a run that is named twice is refused."""
    run = str(runs[0])
    first = call(*verb.split(), run, *more.split())
    by_option = call(*verb.split(), "--run", run, *more.split())
    assert (first.code, hide_seconds(first.out), first.err) == (
        by_option.code,
        hide_seconds(by_option.out),
        by_option.err,
    )
    assert first.out or "named" not in first.err
    assert_refused([*verb.split(), run, "--run", run, *more.split()], f"the run is named twice, as {run}")
    assert call(*verb.split(), *more.split()).code == 2


def test_a_report_takes_its_runs_one_way(runs: list[Path]) -> None:
    assert_refused(["report", str(runs[0]), "--run", str(runs[1])], "runs are named twice")


# Reasons


def test_reasons_stand_beside_recommendations(runs: list[Path]) -> None:
    run = tc.load(runs[3])
    lists = json.loads(call("recommend", str(runs[3]), "--user", "u1", "-k", "3", "--why", "--json").out)
    assert [entry["item"] for entry in lists["u1"]] == run.recommend("u1", 3)["item"].to_list()
    for entry in lists["u1"]:
        expected = run.explain("u1", entry["item"], 3)
        assert [reason["item"] for reason in entry["why"]["items"]] == expected["item"].to_list()
        assert entry["why"]["basis"] == "left out"
    output = call("recommend", str(runs[3]), "--user", "u1", "-k", "3", "--why")
    assert "because of" in output.out
    strongest = lists["u1"][0]["why"]["items"][0]
    assert strongest["effect"] > 0
    assert strongest["item"] in output.out
    for more in ("--all", "--history i3", "--user u1 --out x.csv"):
        assert_refused(["recommend", str(runs[3]), "--why", *more.split()], "--why goes with --user")


def test_the_only_item_of_a_block_is_the_reason(runs: list[Path]) -> None:
    """Without it a device would read earlier blocks, whose scores say nothing of it."""
    run = tc.load(runs[3])
    models = run._load_models()
    only_one = np.flatnonzero(models.scorer.block.train.counts() == 1)
    assert len(only_one)
    for number in only_one[:5].tolist():
        user = models.users[number]
        best = run.recommend(user, 1)
        reason = run.explain(user, best["item"][0], 1)
        assert reason["item"][0] == models.items[models.scorer.block.train.row(number)[0]]
        assert reason["effect"][0] == pytest.approx(best["score"][0], rel=1e-5)


def test_a_list_without_history_says_what_it_follows(runs: list[Path]) -> None:
    """The server of mf does not learn what is popular."""
    for folder, basis, message in (
        (runs[2], "catalogue", "first items of the catalogue, nothing is known of this person or of what is popular"),
        (runs[3], "popularity", "popular items, nothing is known of this person"),
    ):
        copy = shutil.copytree(folder, Path(f"left-{basis}"))
        assert call("forget", str(copy), "--user", "u1", "--all").code == 0
        run = tc.load(copy)
        table = run.recommend("u1", 3)
        assert set(table["basis"]) == {basis}
        assert (table["score"] > 0).all() == (basis == "popularity")
        output = call("recommend", str(copy), "--user", "u1", "-k", "3").out
        assert message in " ".join(output.split())
        assert ("popularity" in output) == (basis == "popularity")
        served = RunAnswers(serve_finished_run(copy)).recommend(["u1"], ListOptions(3))[0]
        assert served is not None
        assert served["basis"] == basis


def test_an_item_is_explained(runs: list[Path]) -> None:
    for folder in (runs[0], runs[3]):
        expected = tc.load(folder).explain("u1", "i3", 4)
        ask = ("explain", str(folder), "--user", "u1", "--item", "i3", "-k", "4")
        assert json.loads(call(*ask, "--json").out) == expected.to_dicts()
        output = call(*ask)
        assert "why item i3 for user u1" in output.out
        assert all(item in output.out for item in expected["item"])
        assert "no epsilon" in output.out
    assert call(*ask, "--out", "why.csv").code == 0
    assert pl.read_csv("why.csv")["item"].to_list() == expected["item"].to_list()
    run = str(runs[0])
    assert_refused(["explain", run, "--user", "u1"], "name both")
    assert_refused(["explain", run, "--user", "nobody", "--item", "i3"], "user 'nobody'")
    assert_refused(["explain", run, "--user", "u1", "--item", "nope"], "item 'nope'")


# Methods of one's own


OWN_METHOD = """
from typing import ClassVar
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset

class QuietConfig(PartConfig):
    loudness: float = 1.0

@register
class QuietPart(Part):
    name = "quiet-part"
    Config: ClassVar[type[PartConfig]] = QuietConfig

register_preset("quiet-method", {"name": "quiet-part"})
"""


def test_every_verb_that_opens_a_run_takes_a_method_of_ones_own() -> None:
    """Each verb in a process of its own, where nothing else has imported the file."""
    Path("quiet.py").write_text(OWN_METHOD, encoding="utf-8")
    train = ["train", "--data", SMALL_DATA, "--method", "quiet-method", "--rounds", "1", "--no-controls"]
    verbs = [
        [*train, "--out", "run", "--quiet"],
        ["recommend", "run", "--user", "u1", "--why"],
        ["similar", "run", "i3"],
        ["explain", "run", "--user", "u1", "--item", "i3"],
        ["ledger", "run"],
        ["report", "run"],
        ["settings", "quiet-part"],
        ["forget", "run", "--user", "u1", "--all"],
    ]
    for words in verbs:
        command = [sys.executable, "-m", "tacita", *words]
        done = subprocess.run([*command, "--import", "quiet.py"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (words, done.stderr)
    without = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert without.returncode == 2
    assert "unknown method 'quiet-method'" in without.stderr


def test_recommendations_for_all_users_are_written_to_a_file(runs: list[Path]) -> None:
    whole = tc.load(runs[0]).recommend(k=4)
    for name, read in (("recs.parquet", pl.read_parquet), ("recs.csv", pl.read_csv)):
        output = call("recommend", "--run", str(runs[0]), "--all", "-k", "4", "--out", name)
        assert (output.code, output.out) == (0, "")
        assert output.err.splitlines()[0] == f"wrote 240 rows to {name}"
        assert "no epsilon" in output.err
        result = read(name)
        assert result["user"].to_list() == whole["user"].to_list()
        assert result["item"].to_list() == whole["item"].to_list()
        assert result["rank"].to_list() == [1, 2, 3, 4] * 60
    entry = ("--user", "u1", "--user", "u1", "-k", "4", "--out", "one.csv", "--json")
    report = call("recommend", "--run", str(runs[0]), *entry)
    assert json.loads(report.out) == whole.filter(pl.col("user") == "u1").to_dicts()


def test_recommend_accepts_a_history(runs: list[Path]) -> None:
    for folder in runs[2:]:
        expected = tc.load(folder).fold_in(["i3", "i4"], 5, exclude=["i7"])
        ask = ("recommend", "--run", str(folder), "--history", "i3, i4", "--exclude", "i7", "-k", "5")
        assert json.loads(call(*ask, "--json").out) == expected.to_dicts()
        output = call(*ask)
        assert output.code == 0
        assert all(item in output.out for item in expected["item"])


def test_similar_items_are_printed(runs: list[Path]) -> None:
    expected = tc.load(runs[3]).similar("i3", 4)
    output = call("similar", str(runs[3]), "i3", "-k", "4")
    assert output.code == 0
    assert "like item i3" in output.out
    assert all(item in output.out for item in expected["item"])
    assert json.loads(call("similar", str(runs[3]), "i3", "-k", "4", "--json").out) == expected.to_dicts()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", ("say for whom", "--all")),
        ("--all --user u1", ("say for whom", "not --user and --all together")),
        ("--all --out recs.xlsx", ("recs.xlsx", ".parquet or a .csv")),
        ("--history nope", ("item 'nope'", "40 items")),
        ("--history ,", ("the history is empty",)),
        ("--user u1 --include nope", ("item 'nope'",)),
        ("--all -k 41 --json", ("41 items",)),
        ("--all -k 30", ("1,800 rows", "--out recs.parquet")),
    ],
)
def test_recommend_refuses_unknown_users_and_bad_options(runs: list[Path], more: str, words: tuple[str, ...]) -> None:
    assert_refused(["recommend", "--run", str(runs[0]), *more.split()], *words)


def test_similar_refuses(runs: list[Path]) -> None:
    assert_refused(["similar", str(runs[0]), "nope"], "item 'nope'")
    assert_refused(["similar", str(runs[0]), "i1", "-k", "40"], "cannot find 40 similar items; choose from 1 to the 39")
    assert_refused(["similar", "nowhere", "i1"], "no run folder nowhere", "`tacita train --out nowhere`")
    assert_refused(["similar", str(runs[0]), "i1", "--out", "x.txt"], ".parquet or a .csv")


# Settings


def options(model: type[BaseModel]) -> int:
    return len(list_keys(model))


def test_every_setting_is_listed_with_what_it_does() -> None:
    every = list_settings()
    assert [element.key for element in every if element.owner == "run"] == list_keys(RunConfig)
    for name in list_backbones():
        assert sum(element.owner == f"backbone {name}" for element in every) == options(
            find_backbone_class(name).Config
        )
    for name in list_part_names():
        assert sum(element.owner == f"part {name}" for element in every) == options(find_part_class(name).Config)
    assert [(element.owner, element.key) for element in every if not element.about] == []
    for entry in every:
        if entry.owner == "run" and entry.default not in ("not set", "has to be given"):
            json.loads(entry.default)


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("train.rounds", ["train.rounds"]),
        ("hidden_items", ["evaluate.hidden_items"]),
        ("train.participation", ["train.participation.kind", "train.participation.rate"]),
        ("tally.ridge", ["backbone.ridge"]),
        ("laplace-noise", [f for f in find_part_class("laplace-noise").Config.model_fields]),
        ("fedavg", ["method"]),
    ],
)
def test_settings_search_matches_a_word(word: str, keys: list[str]) -> None:
    assert [setting.key for setting in find_settings(word)] == keys


def test_settings_search_knows_every_part_preset_and_backbone() -> None:
    for name in (*list_backbones(), *list_part_names(), *list_preset_names()):
        if name in list_part_names() and not find_part_class(name).Config.model_fields:
            continue
        assert find_settings(name), name
    assert {setting.owner for setting in find_settings("f3crec")} >= {"part replay", "part temporal-mean"}
    assert {setting.key for setting in find_settings("backbone.dim")} == {"backbone.dim"}


def test_settings_suggests_the_nearest_name() -> None:
    output = call("settings", "train.rounds")
    assert (output.code, output.err) == (0, "")
    assert "train.rounds = 100" in output.out
    assert "most rounds in a block" in output.out
    document = json.loads(call("settings", "split.kind", "--json").out)
    assert document[0]["default"] == '"auto"'
    assert '"leave-one-out"' in document[0]["kind"]
    assert_refused("settings train.round", "unknown setting 'train.round'", "did you mean 'train.rounds'?")
    assert_refused("settings taly", "did you mean 'tally'?")
    assert "backbone tally" in call("settings").out


# Reports


def test_tables_and_pictures_for_a_paper(runs: list[Path]) -> None:
    names = ("--csv", "t.csv", "--svg", "t.svg", "--latex", "t.tex")
    output = call("report", *map(str, runs), *names)
    assert (output.code, output.err) == (0, "wrote t.csv\nwrote t.svg\nwrote t.tex\n")
    assert not Path("report.html").exists()
    first, second = csv.DictReader(Path("t.csv").read_text().splitlines())
    together = tc.compare(runs, over="seeds").to_dicts()
    assert (first["method"], first["runs"], first["seeds"]) == ("fedavg", "3", "1 2 3")
    assert float(first["ndcg@20"]) == together[0]["ndcg@20"]
    assert float(first["ndcg@20 half-width 95"]) == together[0]["ndcg@20 half-width 95"]
    assert (second["method"], second["ndcg@20 half-width 95"]) == ("tally", "")
    latex = Path("t.tex").read_text()
    assert latex.count(r"\\") == 3
    assert rf"{together[0]['ndcg@20']:.4f}" in latex
    assert rf" $\pm$ {together[0]['ndcg@20 half-width 95']:.4f}" in latex
    picture = Path("t.svg").read_text()
    assert "fedavg" in picture
    assert "tally" in picture
    assert json.loads(call("report", *map(str, runs), "--json").out) == together
    assert_refused(["report", str(runs[0]), "--svg", "x.png"], "--svg x.png", ".svg file")


def test_a_page_of_seeds_has_intervals(runs: list[Path]) -> None:
    assert call("report", *map(str, runs[:3]), "--out", "x.html").code == 0
    (row,) = tc.compare(runs[:3], over="seeds").to_dicts()
    assert f"{row['ndcg@20']:.4f} ± {row['ndcg@20 half-width 95']:.4f}" in Path("x.html").read_text()


def test_unknown_setting_without_near_name_lists_no_keys() -> None:
    assert_refused(["settings", "zzzz"], "unknown setting 'zzzz'", "`tacita settings` lists them all")
    with pytest.raises(
        tc.TacitaError, match=r"unknown key 'foo'.*known at the top: backbone, .*lists every key"
    ) as error:
        tc.train(foo=1)
    assert len(str(error.value)) < 300


def test_recommendations_of_one_user_equal_those_in_the_batch(runs: list[Path]) -> None:
    entry = json.loads(call("recommend", "--run", str(runs[0]), "--user", "u3", "-k", "4", "--json").out)["u3"]
    every = json.loads(call("recommend", "--run", str(runs[0]), "--all", "-k", "4", "--json").out)
    own_values = [
        {name: value for name, value in row.items() if name != "user"} for row in every if row["user"] == "u3"
    ]
    assert [list(row) for row in entry] == [list(row) for row in own_values]
    assert [(row["rank"], row["item"], row["title"]) for row in entry] == [
        (row["rank"], row["item"], row["title"]) for row in own_values
    ]
