"""The Python interface: tables in and out, one batched call for everybody, people the run never saw, plain words."""

from __future__ import annotations

import ast
import doctest
import json
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import tacita
import tacita as tc
from tacita.cli import main, result_tables
from tacita.core.draws import derive_keys
from tacita.core.errors import DiskFull
from tacita.core.python_messages import replace_options_with_keywords, translate_errors
from tacita.core.types import Block, Broadcast, Ragged
from tacita.data.frames import convert_to_frame_or_none, to_raw_ids
from tacita.federation.clients import build_user_view, empty_device_state, grow_devices_for_block
from tacita.learn.training import train_cohort
from tacita.report.pages import write_report
from tacita.round.task import CohortTask
from tacita.runs import assembly, loaded_run, serving
from tacita.runs.fold_in import freeze_shared, score_newcomers
from tacita.runs.forgetting.certificate import Certificate
from tacita.runs.run_folder import read_lists

SMALL = "synthetic:users=60,items=40,per_user=12"
ONE_BLOCK: dict[str, Any] = {"split": {"kind": "random"}, "evaluate": {"controls": False}}
QUICK: dict[str, Any] = {"train": {"rounds": 2}, "split": {"n_blocks": 2}, "evaluate": {"controls": False}}
KNOWN: dict[str, Any] = {"name": "tally", "recency": 0.0}  # one round in a block: validation has nothing to choose


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tally(tmp_path_factory: pytest.TempPathFactory) -> tc.Run:
    return tc.train(SMALL, backbone="tally", out=tmp_path_factory.mktemp("tally") / "example", **ONE_BLOCK)


@pytest.fixture(scope="module")
def mf(tmp_path_factory: pytest.TempPathFactory) -> tc.Run:
    many = {"name": "mf", "lr": 2.0, "init_std": 0.1}
    settings: dict[str, Any] = {**ONE_BLOCK, "train": {"rounds": 30}}
    data = "synthetic:users=200,items=60,per_user=15,groups=4"
    return tc.train(data, backbone=many, out=tmp_path_factory.mktemp("mf") / "run", **settings)


# Documents


def test_the_interface_is_what_the_package_says_and_the_page_lists() -> None:
    page = (Path(tacita.__file__).parents[1] / "docs/python.md").read_text(encoding="utf-8")
    for name in tc.__all__:
        assert getattr(tc, name) is not None
        assert f"`{name}" in page or f"`tc.{name}" in page, name
    public = [name for name in vars(tc.Run) if not name.startswith("_")]
    for name in public:
        assert f"`run.{name}" in page, name
    assert tc.Run.__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tc.__getattr__("nothing")


def test_every_example_of_the_docstrings_runs() -> None:
    """Those of the class first: they train what the others use."""
    shared: dict[str, Any] = {}
    ran = 0
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    kinds = [(tc.Run, "Run"), (tc, "tacita")]
    for place, name in kinds:
        result = finder.find(place, name, globs={})
        for entry in sorted(result, key=lambda test: test.name):
            if not entry.examples or (place is tc and entry.name.startswith("tacita.Run")):
                continue
            entry.globs = shared
            ran += runner.run(entry, clear_globs=False).attempted
            assert runner.failures == 0, entry.name
    assert ran > 20
    for name in ("recommend", "scores", "similar", "fold_in", "metrics", "users", "items", "notes"):
        assert ">>>" in (getattr(tc.Run, name).__doc__ or ""), name


def test_the_notebook_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(tacita.__file__).parents[1] / "docs/python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    world: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/python.md, block {number + 1}", "exec"), world)
    assert "ndcg@10" in capsys.readouterr().out


# Tables in


class Column:
    """A column as pandas has them."""

    def __init__(self, values: list[Any], kind: Any = None) -> None:
        self.values = np.array(values, kind)

    def to_numpy(self) -> Any:
        return self.values

    def isna(self) -> Column:
        gone = [value is None or value != value for value in self.values.tolist()]
        return Column(gone, bool)


class Pandas:
    """As much of a pandas frame as is looked at."""

    iloc = dtypes = None

    def __init__(self, columns: dict[str, Column], names: list[str] | None = None) -> None:
        self._columns, self.columns = columns, names or list(columns)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]


def clicks(n: int = 400) -> dict[str, list[Any]]:
    rng = np.random.default_rng(4)
    user, item = rng.integers(0, 20, n), rng.integers(0, 30, n)
    return {"who": [f"p{u}" for u in user], "what": [f"i{i}" for i in item], "time": list(range(1000, 1000 + n))}


def test_a_table_of_any_library_a_path_and_a_file_train_the_same_run() -> None:
    product = clicks()
    frame = pl.DataFrame(product)
    frame.write_csv("clicks.csv")
    pandas = Pandas(
        {
            "who": Column(product["who"], object),
            "what": Column(product["what"], object),
            "time": Column(product["time"]),
        }
    )
    sources = {"polars": frame, "lazy": frame.lazy(), "dict": product, "pandas": pandas, "path": Path("clicks.csv")}
    outcome = {}
    for name, source in sources.items():
        run = tc.train(source, columns={"user": "who", "item": "what"}, backbone=KNOWN, out=name, **QUICK)
        outcome[name] = run.result["blocks"], run.result["data"]["fingerprint"]
    assert all(entry == outcome["path"] for entry in outcome.values())


def test_a_table_of_the_real_pandas_trains_the_same_run() -> None:
    """The frame above is as much of pandas as we look at; this one is all of it, where it is installed."""
    pd = pytest.importorskip("pandas")
    product = clicks()
    frame = pd.DataFrame(product)
    categories = frame.assign(who=frame["who"].astype("category"), time=frame["time"].astype("Int64"))
    texts = frame.assign(who=frame["who"].astype("string"), what=frame["what"].astype(object))
    outcome = []
    for n, source in enumerate((pl.DataFrame(product), frame, categories, texts)):
        run = tc.train(source, columns={"user": "who", "item": "what"}, backbone=KNOWN, out=f"run{n}", **QUICK)
        outcome.append((run.result["blocks"], run.result["data"]["fingerprint"]))
    assert all(entry == outcome[0] for entry in outcome)
    users, items = run.users[:2], run.items[:4]
    for column in (pd.Series, pd.Index, pd.Categorical):
        assert_frame_equal(run.recommend(column(users), 3), run.recommend(users, 3))
        assert_frame_equal(run.fold_in(column(items), 3), run.fold_in(items, 3))
        assert_frame_equal(run.scores(users[0], column(items)), run.scores(users[0], items))
        assert_frame_equal(run.recommend(users, 3, exclude=column(items)), run.recommend(users, 3, exclude=items))
    numbers = frame.assign(what=frame["what"].str[1:].astype("Int64"))
    run = tc.train(numbers, columns={"user": "who", "item": "what"}, backbone=KNOWN, out="numbers", **QUICK)
    for kind in ("Int64", "int32", "float64"):  # ids come back as files have them
        assert_frame_equal(run.fold_in(pd.Series([3, 7], dtype=kind), 3), run.fold_in(["3", "7"], 3))
    gaps = convert_to_frame_or_none(
        pd.DataFrame(
            {
                "text": ["a", None],
                "number": [1.5, None],
                "day": pd.to_datetime(["2024-01-02", None]),
                "there": pd.to_datetime(["2024-01-02", None]).tz_localize("Europe/Paris"),
            }
        )
    )
    assert gaps is not None
    assert gaps.rows()[1] == (None, None, None, None)
    assert str(gaps["day"][0]) == "2024-01-02 00:00:00"
    assert gaps["there"].dt.epoch("s")[0] == gaps["day"].dt.epoch("s")[0] - 3600


def test_missing_values_and_kinds_of_pandas_columns_survive() -> None:
    days = np.array(["2024-01-02", "NaT"], "datetime64[s]")
    frame = convert_to_frame_or_none(
        Pandas(
            {
                "text": Column(["a", None], object),
                "number": Column([1.5, float("nan")]),
                "whole": Column([3, 4]),
                "day": Column(list(days), "datetime64[s]"),
            }
        )
    )
    assert frame is not None
    assert frame.rows()[1] == (None, None, 4, None)
    assert frame["whole"].dtype == pl.Int64
    assert str(frame["day"][0]) == "2024-01-02 00:00:00"
    with pytest.raises(tc.TacitaError, match="two columns are called 'a'"):
        convert_to_frame_or_none(Pandas({"a": Column([1])}, ["a", "a"]))
    with pytest.raises(tc.TacitaError, match="the table cannot be read"):
        convert_to_frame_or_none({"a": [1, 2], "b": [1]})
    assert convert_to_frame_or_none(7) is None


def test_a_run_on_a_table_goes_on_only_with_the_table() -> None:
    frame = pl.DataFrame(clicks())
    say = {"columns": {"user": "who", "item": "what"}, **QUICK}
    run = tc.train(frame, out="mine", **say)
    (run.folder / "result.json").unlink()  # as if it had been killed
    with pytest.raises(
        tc.TacitaError, match=r"not kept; give it again in Python, as in tacita.train\(table, out='mine',"
    ):
        tc.train(out="mine", resume=True)
    with pytest.raises(tc.TacitaError, match="other data than"):
        tc.train(frame.head(399), out="mine", resume=True)
    assert tc.train(frame, out="mine", resume=True).result == run.result
    assert tc.train(frame, out="mine", resume=True).result == run.result  # finished: nothing is left to do
    with pytest.raises(tc.TacitaError, match="is finished, and learned from other data than this table"):
        tc.train(frame.head(399), out="mine", resume=True)
    with pytest.raises(tc.TacitaError, match="leave out all others"):
        tc.train(frame, out="mine", resume=True, seed=3)
    with pytest.raises(tc.TacitaError, match="leave out all others"):
        tc.train(frame, out="mine", resume=True, evaluate={"k": [3]})
    assert run.folder == Path("mine")
    assert tc.train(frame, **say).folder == Path("runs/table-mf-fedavg-1")


@pytest.mark.parametrize(
    "command", ["forget --run mine --user p1 --all", "audit tally --run mine", "audit forget mine"]
)
def test_what_reads_the_data_again_asks_for_a_file_of_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To resume would forget nothing."""
    tc.train(clicks(), out="mine", columns={"user": "who", "item": "what"}, backbone=KNOWN, **QUICK)
    with pytest.raises(SystemExit) as error:
        main(command.split())
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert "write the table to a file and train a run on that" in message
    assert "resume" not in message


# What is said of a run


def test_notes_name_skipped_columns_and_releases_as_keywords() -> None:
    result = clicks()
    rated = {**result, "rating": [1 + n % 5 for n in range(400)]}
    user_item = {"user": "who", "item": "what"}
    run = tc.train(
        rated, columns=user_item, backbone=KNOWN, out="mine", **{**QUICK, "split": {"k_core": 11, "n_blocks": 2}}
    )
    notes = run.notes
    assert any('split={"min_rating": 4} keeps only rows' in note for note in notes)
    assert any(note.startswith("filtering: 400 rows, 20 users and 30 items became") for note in notes)
    assert "Privacy: no epsilon. Nothing that this run releases has noise with a budget." in notes
    assert "what tally releases gives people away: `tacita audit tally --run mine` shows it." in notes
    assert repr(run).endswith("no epsilon: what it releases gives people away)")
    assert str(run).splitlines() == [repr(run), *(f"- {note}" for note in notes)]
    assert tc.load("mine").notes == notes
    few = [{"name": "replay", "top_n": 30}]
    plain = tc.train(SMALL, out="mf", method="f3crec", parts=few, **{**ONE_BLOCK, "train": {"rounds": 1}})
    assert repr(plain).endswith("items, no epsilon)")
    assert any("act from the second block on" in note for note in plain.notes)
    assert not any("gives people away" in note for note in plain.notes)
    private = tc.train(SMALL, backbone="tally", out="private", privacy={"epsilon": 2}, **ONE_BLOCK)
    assert repr(private).endswith("privacy: see notes)")
    assert any(note.startswith("Privacy: epsilon 2 at delta") for note in private.notes)
    assert "no epsilon" not in str(private)
    assert "gives people away" not in str(private)


def test_notes_of_a_column_that_was_not_used_name_the_keyword() -> None:
    result = clicks()
    frame = {
        "user": result["who"],
        "item": result["what"],
        "bought": [f"{1 + n % 28}/{1 + n % 12}/2024" for n in range(400)],
    }
    run = tc.train(frame, backbone=KNOWN, out="mine", **ONE_BLOCK)
    (note,) = [entry for entry in run.notes if "holds dates" in entry]
    assert 'was not used; columns={"time": "bought"} date_format="%d/%m/%Y" uses it.' in note


def test_order_without_times_says_that_it_is_the_order_of_rows() -> None:
    result = clicks()
    rows = {"user": result["who"], "item": result["what"]}
    model: dict[str, Any] = {"name": "tally-order"}
    runs = {
        "untimed": tc.train(rows, backbone=model, out="untimed", **ONE_BLOCK),
        "timed": tc.train({**rows, "time": result["time"]}, backbone=model, out="timed", **ONE_BLOCK),
        "unordered": tc.train(rows, backbone="tally", out="unordered", **ONE_BLOCK),
    }
    messages = [name for name, run in runs.items() if assembly.NO_TIMES in run.notes]
    assert messages == ["untimed"]
    turned = {name: values[::-1] for name, values in rows.items()}
    other = tc.train(turned, backbone=model, out="turned", **ONE_BLOCK)  # the note is so: rows the other way round
    history = ["i1", "i2", "i3"]
    straight, back = (run.fold_in(history, 20).sort("item")["score"].to_numpy() for run in (runs["untimed"], other))
    assert abs(straight - back).max() > 1e-3


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            pl.DataFrame({"a": [1], "b": [2]}),
            r'the table: no user and no item.*columns=\{"user": \.\.\., "item": \.\.\.\}',
        ),
        (pl.DataFrame({"user": [1, None], "item": [1, 2]}), "the table: row 2 has no user id"),
        (pl.DataFrame({"user": [], "item": []}), "the table has no rows"),
        (pl.DataFrame({"user": [[1]], "item": [2]}), "column 'user' is of type"),
        (3.5, "data of type float cannot be read"),
        ("nowhere.csv", "neither a file nor a named dataset"),
    ],
)
def test_data_errors_name_python_keywords(inputs: Any, words: str) -> None:
    with pytest.raises(tc.TacitaError, match=words) as error:
        tc.train(inputs)
    assert "--" not in str(error.value)
    assert not Path("runs").exists()


# Tables out


def test_recommend_is_what_each_persons_own_list_is(tally: tc.Run, mf: tc.Run) -> None:
    for run in (tally, mf):
        recommendations = run.recommend(k=7)
        assert recommendations["user"].unique(maintain_order=True).to_list() == run.users
        for user in run.users[::17]:
            alone = recommendations.filter(pl.col("user") == user)
            assert_frame_equal(run.recommend(user, 7), alone)
            report = serving.recommend(run.folder, [user], 7)[user]
            assert alone["item"].to_list() == [entry["item"] for entry in report]
            assert alone["score"].to_list() == [entry["score"] for entry in report]
        assert recommendations.schema["rank"] == pl.Int64
        assert recommendations["title"].null_count() == recommendations.height


def test_recommend_is_independent_of_chunking(mf: tc.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mf.recommend(k=5)
    monkeypatch.setattr(loaded_run, "MAX_SCORES", 7 * len(mf.items))
    assert_frame_equal(mf.recommend(k=5), whole)


def test_recommend_takes_ids_in_every_form(tally: tc.Run) -> None:
    some = ["u3", "u1"]
    expected = tally.recommend(some, 2)
    assert expected["user"].to_list() == ["u3", "u3", "u1", "u1"]
    for form in (tuple(some), np.array(some), pl.Series(some), iter(some)):
        assert_frame_equal(tally.recommend(form, 2), expected)
    assert tally.recommend([], 2).is_empty()
    assert to_raw_ids(7) == to_raw_ids([7.0]) == to_raw_ids(np.array([7])) == ["7"]
    assert to_raw_ids(2.5) == ["2.5"]


def test_seen_exclude_and_include(tally: tc.Run) -> None:
    lists = read_lists(tally._load_models().saved.client_arrays, "history")
    known = {tally.items[i] for i in lists.row(tally.users.index("u1"))}
    everything = tally.recommend("u1", 40, seen=True)
    assert set(everything["item"]) == set(tally.items)
    new = tally.recommend("u1", 40)
    assert set(new["item"]) == set(tally.items) - known
    assert_frame_equal(new.drop("rank"), everything.filter(~pl.col("item").is_in(list(known))).drop("rank"))
    first, second = new["item"][:2].to_list()
    assert tally.recommend("u1", 40, exclude=[first])["item"][0] == second
    among = tally.recommend("u1", 10, include=[second, first, *known])
    assert among["item"].to_list() == [first, second]
    assert_frame_equal(tally.recommend("u1", 40, exclude=["nope", first]), tally.recommend("u1", 40, exclude=[first]))
    assert_frame_equal(tally.recommend("u1", 10, include=["nope", second, first]), among)
    with pytest.raises(tc.TacitaError, match=r"items 'nope', 'never' are not in .* have ids such as 'i"):
        tally.recommend("u1", include=["nope", "never", "nope"])
    with pytest.raises(tc.TacitaError, match="to choose from is empty"):
        tally.recommend("u1", include=[])
    with pytest.raises(tc.TacitaError, match="user 'nobody' is not in"):
        tally.recommend("nobody")
    with pytest.raises(tc.TacitaError, match="users 'a', 'b', 'c', 'd', 'e' and 2 more are not in"):
        tally.recommend(["u1", *"abcdefg"])


def test_items_that_a_run_does_not_know_are_left_out_of_a_history_with_a_warning(tally: tc.Run) -> None:
    known = tally.fold_in(["i3", "i4"], 5)
    with pytest.warns(UserWarning, match="1 of 3 items of the history left out: 'gone' not in .*example") as caught:
        assert_frame_equal(tally.fold_in(["i3", "gone", "i4", "gone"], 5), known)
    assert [entry.filename for entry in caught] == [__file__]  # where it was called
    with pytest.warns(UserWarning, match="4 of 5 items .*: 'a', 'b', 'c' and 1 more not in"):
        tally.fold_in(["a", "b", "c", "d", "i3"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tally.fold_in(["i3", "i4"], exclude=["gone"], include=["i5", "gone"])
        with pytest.raises(tc.TacitaError, match="items 'a', 'b' are not in"):
            tally.fold_in(["a", "b"])


def test_filtered_items_are_said_to_be_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    result = clicks()
    rows = {"user": [*result["who"], "p1"], "item": [*result["what"], "rare"]}
    run = tc.train(rows, backbone=KNOWN, out="mine", **{**ONE_BLOCK, "split": {"kind": "random", "k_core": 3}})
    filtered = r"its filters \(split=\{\"k_core\": 3\}\) leave out items that few people have"
    with pytest.raises(tc.TacitaError, match=f"item 'rare' is not in mine; .*{filtered}"):
        run.similar("rare")
    with pytest.warns(UserWarning, match=filtered):
        run.fold_in(["i1", "rare"])
    for history, code in (("i1,rare", 0), ("rare", 2)):
        with pytest.raises(SystemExit) as error:
            main(["recommend", "--run", "mine", "--history", history, "-k", "3", "--exclude", "rare"])
        assert (error.value.code or 0) == code
        captured = capsys.readouterr()
        assert "'rare'" in captured.err
        assert "leave out items that few people have" in captured.err
        assert "rare" not in captured.out


def test_a_table_with_a_column_of_users_or_items_will_do(tally: tc.Run) -> None:
    frame = pl.DataFrame({"user": ["u1", " u2 "], "item": ["i3", "i4"], "k": [1, 2]})
    pandas = Pandas({"user": Column(["u1", "u2"], object), "item": Column(["i3", "i4"], object)})
    for inputs in (frame, frame.lazy(), frame.to_dict(as_series=False), pandas, frame["user"]):
        assert_frame_equal(tally.recommend(inputs, 3), tally.recommend(["u1", "u2"], 3))
    assert_frame_equal(tally.fold_in(frame, 3), tally.fold_in(["i3", "i4"], 3))
    assert_frame_equal(tally.scores("u1 ", frame), tally.scores("u1", ["i3", "i4"]))
    with pytest.raises(tc.TacitaError, match="a table of users needs a column 'user'; rename one") as error:
        tally.recommend(frame.drop("user"))
    with pytest.raises(tc.TacitaError, match="a user is named by a text or a whole number, not by a list") as other:
        tally.recommend([["u1"]])
    assert "\n" not in f"{error.value}{other.value}"


def test_scores_are_those_that_recommendations_are_made_of(mf: tc.Run) -> None:
    best = mf.recommend("u1", 5)
    assert mf.scores("u1", best["item"])["score"].to_list() == best["score"].to_list()
    assert mf.scores("u1")["item"].to_list() == mf.items
    with pytest.raises(tc.TacitaError, match="one user is asked for, not 2"):
        mf.scores(["u1", "u2"])  # type: ignore[arg-type]


def test_a_folder_that_changes_is_read_again(tally: tc.Run) -> None:
    shutil.copytree(tally.folder, "copy")
    run = tc.load("copy")
    before = run.recommend("u1", 3)
    assert run._load_models() is run._load_models()
    other = tc.train(SMALL, backbone={**KNOWN, "ridge": 5.0}, out="other", **ONE_BLOCK)
    shutil.rmtree("copy")
    other.folder.rename("copy")
    assert run.recommend("u1", 3)["score"].to_list() != before["score"].to_list()
    shutil.rmtree("copy")
    with pytest.raises(tc.TacitaError, match="no run folder copy"):
        run.recommend("u1", 3)


def test_metrics_are_a_table_of_the_run_and_its_controls(mf: tc.Run) -> None:
    run = tc.train(SMALL, out="controls", train={"rounds": 1}, split={"n_blocks": 2})
    outcome = run.metrics()
    assert outcome["scorer"].unique(maintain_order=True).to_list()[0] == "fedavg"
    assert "most popular" in outcome["scorer"].to_list()
    mean = outcome.filter((pl.col("scorer") == "fedavg") & pl.col("block").is_null())
    assert mean["ndcg@20"].item() == run.result["mean"]["ndcg@20"]
    blocks = outcome.filter((pl.col("scorer") == "fedavg") & pl.col("block").is_not_null())
    assert blocks["ndcg@20"].to_list() == [block["ndcg@20"] for block in run.result["blocks"]]
    assert mf.metrics()["scorer"].unique().to_list() == ["fedavg"]


# Items that are alike


def test_similar_items_of_tally_are_the_column_of_its_matrix(tally: tc.Run) -> None:
    heads = tally._load_models().server.heads
    from tacita.models.tally.weights import unpack_dense_weights

    item = tally.items[3]
    column = unpack_dense_weights(heads)[:, 3]
    similar_items = tally.similar(item, 5)
    best = np.argsort(-column, kind="stable")[:5]
    assert similar_items["item"].to_list() == [tally.items[i] for i in best]
    np.testing.assert_allclose(similar_items["score"].to_numpy(), column[best])
    assert item not in tally.similar(item, 39)["item"].to_list()


def test_tally_through_few_inputs_has_similar_items_too() -> None:
    model = {**KNOWN, "most_inputs": 15}
    run = tc.train(SMALL, backbone=model, out="few", **ONE_BLOCK)
    inputs = {run.items[i] for i in run._load_models().server.heads["inputs"]}
    for item in run.items[:20]:
        assert set(run.similar(item, 30)["item"]) <= inputs


def test_similar_items_of_rows_are_cosines_and_find_the_group(mf: tc.Run) -> None:
    rows = mf._load_models().server.items.astype(np.float64)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    like = unit @ unit[0]
    similar_items = mf.similar(mf.items[0], 6)
    assert similar_items["item"].to_list() == [mf.items[i] for i in np.argsort(-like)[1:7]]
    np.testing.assert_allclose(similar_items["score"].to_numpy(), np.sort(like)[::-1][1:7], rtol=1e-5)
    with pytest.raises(tc.TacitaError, match="item 'x' is not in"):
        mf.similar("x")
    with pytest.raises(tc.TacitaError, match="cannot find 60 similar items; choose from 1 to the 59"):
        mf.similar(mf.items[0], 60)


# People whom the run never saw


def trained_on(run: tc.Run, user: str) -> list[str]:
    lists = read_lists(run._load_models().saved.client_arrays, "current")
    return [run.items[i] for i in lists.row(run.users.index(user))]


def test_tally_fold_in_equals_serving_a_known_user(tally: tc.Run) -> None:
    for user in tally.users[:10]:
        history = trained_on(tally, user)
        result = tally.fold_in(history, 40, seen=True)
        own = tally.scores(user, result["item"])
        assert result["score"].to_list() == own["score"].to_list()
    assert set(tally.fold_in(history, 40)["item"]).isdisjoint(history)
    assert_frame_equal(tally.fold_in([*history, history[0]], 5), tally.fold_in(history, 5))


def test_fold_in_trains_only_the_private_vector(mf: tc.Run) -> None:
    """People of the run have known groups: a stranger with one's history is served from the same group."""
    before = mf._load_models().server.items.copy()
    overlap, chance = [], []
    for user, other in zip(mf.users[:20], mf.users[20:40], strict=True):
        history = trained_on(mf, user)
        item = set(mf.fold_in(history, 10, seen=True)["item"])
        overlap.append(len(item & set(mf.recommend(user, 10, seen=True)["item"])))
        chance.append(len(item & set(mf.recommend(other, 10, seen=True)["item"])))
    assert np.mean(overlap) > 7
    assert np.mean(overlap) > 2 * np.mean(chance)
    assert np.array_equal(mf._load_models().server.items, before)
    assert_frame_equal(mf.fold_in(history, 5), mf.fold_in(history, 5))
    with pytest.raises(tc.TacitaError, match="the history is empty"):
        mf.fold_in([])
    with pytest.raises(tc.TacitaError, match="item 'x' is not in"):
        mf.fold_in(["x"])


def test_fold_in_vector_equals_logistic_regression_on_fixed_rows(mf: tc.Run) -> None:
    """One round by hand: p moves against the mean gradient of its samples, which fit into one batch."""
    models = mf._load_models()
    backbone = models.plan.backbone
    still = freeze_shared(backbone)
    assert still.list_learning_rates(60)["rows"] == 0
    assert still.list_learning_rates(60)["p"] == backbone.list_learning_rates(60)["p"] > 0
    assert backbone.list_learning_rates(60)["rows"] > 0
    devices, keys = empty_device_state(backbone), derive_keys(["somebody"])
    grow_devices_for_block(devices, models.plan, keys)
    entry, none = Ragged.from_lists([[0, 1, 2]]), Ragged.empty(1)
    block = Block(0, 1, 60, entry, none, none, np.ones(1, bool), 3)
    view = build_user_view(devices, models.server, block, np.zeros(1), keys, Broadcast())
    trained = train_cohort(CohortTask(view), still, (), models.plan.config.train, models.plan.draws).local
    rows, label, start = models.server.items[trained.item], trained.label, view.private[0]
    assert label.sum() == 3
    assert len(label) == 15
    slope = (1 / (1 + np.exp(-rows @ start)) - label) @ rows / len(label)
    np.testing.assert_allclose(
        trained.private[0], start - backbone.list_learning_rates(60)["p"] * slope, rtol=1e-4, atol=1e-6
    )
    assert not trained.rows.any()  # how they moved


def test_batched_fold_in_equals_single_fold_in(mf: tc.Run) -> None:
    models = mf._load_models()
    several = Ragged.from_lists([[0, 1, 2], [5, 6], [9, 3, 4, 7]])
    together = score_newcomers(models, several, 4, np.arange(3, dtype=np.int32))
    for row in range(3):
        alone = Ragged.from_lists([several.row(row).tolist()])
        assert np.array_equal(score_newcomers(models, alone, 4, np.zeros(1, np.int32))[0], together[row])


KINDS: dict[str, dict[str, Any]] = {
    "ncf": {"backbone": "ncf"},
    "pfedrec": {"backbone": "pfedrec"},
    "f3crec": {"method": "f3crec", "parts": [{"name": "replay", "top_n": 30}]},
    "rlp2": {"method": "rlp2"},
    "own tables": {"backbone": "pfedrec", "evaluate": {"controls": False, "item_table": "personal"}},
    "silos": {"train": {"rounds": 1, "silos": 5}},
    "ego": {"backbone": {"name": "ego", "lr": 0.05, "item_lr_scale": 1.0}},
    "neumf": {"backbone": {"name": "neumf", "dim": 4}, "train": {"rounds": 1}},
    "shared layer": {"backbone": {"name": "ncf", "share_mlp": True}, "train": {"rounds": 1}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_supports_every_query(kind: str) -> None:
    run = tc.train(SMALL, out="run", **(QUICK | KINDS[kind]))
    assert run.recommend(k=3).height == 180
    assert run.similar(run.items[0], 3).height == 3
    assert run.fold_in(run.items[:4], 3).height == 3
    assert np.isfinite(run.fold_in(run.items[:4], 30)["score"].to_numpy()).all()


def test_fold_in_uses_the_labels_of_the_run() -> None:
    """FedRec takes what was drawn for a virtual rating, not for 0; where ratings count, a history says too little."""
    quick = {**QUICK, "method": "fedrec", "train": {"rounds": 3}}
    run = tc.train(SMALL, out="run", **quick, parts=[{"name": "virtual-ratings", "implicit": True}])
    result = run.fold_in(run.items[:4], 20, seen=True)["score"].to_numpy()
    models = run._load_models()
    part = next(entry for entry in models.plan.parts if entry.name == "virtual-ratings")
    request: list[int] = []
    label_samples = type(part).label_samples  # type: ignore[attr-defined]

    def note_round(self: Any, view: Any, own: Any) -> Any:
        request.append(view.round)
        return label_samples(self, view, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(part), "label_samples", note_round)
        assert (run.fold_in(run.items[:4], 20, seen=True)["score"].to_numpy() == result).all()
        assert request
        assert request == list(range(1, len(request) + 1))
        # as if drawn were not liked
        patch.setattr(type(part), "label_samples", lambda self, view, own: own.values["label"])
        assert (run.fold_in(run.items[:4], 20, seen=True)["score"].to_numpy() != result).any()
    rated = tc.train(SMALL, out="rated", **quick)
    with pytest.raises(tc.TacitaError, match="a history holds none"):
        rated.fold_in(rated.items[:4])


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"method": "fedshare", "split": {"kind": "random"}}, "sharing"),
        ({"method": "ptf-fedrec", "split": {"kind": "random"}}, "prediction-transfer"),
    ],
)
def test_models_that_need_more_than_a_history_refuse_fold_in(settings: dict[str, Any], part: str) -> None:
    run = tc.train(SMALL, out="run", **({**QUICK, "train": {"rounds": 1}} | settings))
    with pytest.raises(tc.TacitaError, match=f"nobody can be folded into a run with part '{part}'"):
        run.fold_in(run.items[:3])
    assert run.recommend(k=2).height == 120


# Runs beside each other


def test_runs_are_compared_and_taken_together_over_seeds(tally: tc.Run) -> None:
    runs = [tc.train(SMALL, seed=seed, out=f"s{seed}", **QUICK) for seed in (1, 2, 3)]
    other = tally
    each = tc.compare([*runs, str(other.folder)])
    assert each["run"].to_list() == ["s1", "s2", "s3", "example"]
    assert each["ndcg@20"].to_list()[:3] == [run.result["mean"]["ndcg@20"] for run in runs]
    assert each["protocol"].to_list() == [0, 0, 0, 1]  # another split
    together = tc.compare([*runs, other, runs[0]], over="seeds")
    assert together["runs"].to_list() == [3, 1]
    assert together["seeds"].to_list() == ["1 2 3", "1"]
    values = each["ndcg@20"].to_numpy()[:3]
    half = 4.302653 * values.std(ddof=1) / np.sqrt(3)  # t of two degrees of freedom
    assert together["ndcg@20"][0] == pytest.approx(values.mean())
    assert together["ndcg@20 half-width 95"][0] == pytest.approx(half, rel=1e-6)
    assert together["ndcg@20 half-width 95"][1] is None
    for wrong, words in (
        ([], "no run to compare"),
        (["nowhere"], r'no run folder nowhere; tacita.train\(out="nowhere"\)'),
    ):
        with pytest.raises(tc.TacitaError, match=words):
            tc.compare(wrong)
    with pytest.raises(tc.TacitaError, match="over = 'blocks' is unknown"):
        tc.compare(runs, over="blocks")


def test_tally_traffic_is_reported_per_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: dict[str, Any] = {"split": {"n_blocks": 2}, "evaluate": {"controls": False}}
    tries = tc.train(SMALL, backbone="tally", out="tries", **settings)
    knows = tc.train(SMALL, backbone=KNOWN, out="knows", **settings)
    assert [block["rounds"] for block in tries.result["blocks"]] == [5, 5]
    assert [block["rounds"] for block in knows.result["blocks"]] == [1, 1]
    lines = [json.loads(line) for line in (tries.folder / "events.jsonl").read_text().splitlines()]
    for way in ("up", "down"):
        sent = [line[f"bytes_{way}"] for line in lines]
        by_block = [sum(entry for entry, line in zip(sent, lines, strict=True) if line["block"] == n) for n in (0, 1)]
        report = tc.compare([tries, knows])[f"bytes {way}"].to_list()
        assert report[0] == pytest.approx(np.mean(by_block))
        assert report[0] == pytest.approx(report[1], rel=0.02)  # a score for each try is all that is sent beside it
    rows = tc.train(SMALL, out="rows", **QUICK)
    assert tc.compare([rows])["bytes up"][0] == rows.result["bytes"]["up_per_client_and_round"]
    per = {"tries": "per client and block", "rows": "per client and round"}
    for name, words in per.items():
        result_tables.show_verdict(tc.load(name))
        assert f"Sent {words}:" in capsys.readouterr().err
        page = Path(name, "report.html").read_text(encoding="utf-8")
        assert [element for element in per.values() if element in page] == [words]
    write_report([Path("tries"), Path("rows")], Path("both.html"))
    assert "bytes per client and round, or block where that is one exchange" in Path("both.html").read_text()


# Words

SENTENCES = {
    "x exists; go on with `tacita train --out runs/a --resume`, or choose another --out.": (
        'x exists; go on with tacita.train(out="runs/a", resume=True), or choose another out.'
    ),
    "try --set evaluate.k=[5] --set evaluate.select_by=ndcg@5.": 'try evaluate={"k": [5], "select_by": "ndcg@5"}.',
    "through fewer: --set backbone.most_inputs=20.": 'through fewer: backbone={"name": ..., "most_inputs": 20}.',
    "choose with --columns time=NAME.": 'choose with columns={"time": "NAME"}.',
    "say --decimal , if it has a decimal comma": 'say decimal="," if it has a decimal comma',
    '--columns time=day --date-format "%d.%m.%Y" uses it.': 'columns={"time": "day"} date_format="%d.%m.%Y" uses it.',
    "it has no times; use split.kind = 'random'.": 'it has no times; use split={"kind": "random"}.',
    "lower it or set split.n_blocks = 1.": 'lower it or set split={"n_blocks": 1}.',
    "use backbone.order_share = 0.5, or train.server_lr = 1.0 or less.": (
        'use backbone={"name": ..., "order_share": 0.5}, or train={"server_lr": 1.0} or less.'
    ),
    "the 10-core (split.k_core) took 3 rows; see train.rounds.": (
        "the 10-core (split.k_core) took 3 rows; see train.rounds."
    ),
    "train with --method fedshare": 'train with method="fedshare"',
    "a -- b and a--b stay": "a -- b and a--b stay",
    "no epsilon: `tacita audit tally --run x --brief` shows it; choose another --out.": (
        "no epsilon: `tacita audit tally --run x --brief` shows it; choose another out."
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_options_become_keywords(sentence: str) -> None:
    assert replace_options_with_keywords(sentence) == SENTENCES[sentence]


def sentences() -> Iterator[str]:
    """Every text of the package below the command line that names an option."""
    root = Path(tacita.__file__).parent
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] in ("cli", "live", "audit"):
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "--" in text else ():
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(getattr(entry, "value", "")) if isinstance(entry, ast.Constant) else "X"
                    for entry in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_no_sentence_speaks_of_an_option_to_python() -> None:
    """Whole commands of other verbs stay: they are for the command line."""
    naming = [re.sub("`tacita (?!train )[^`]*`", "", sentence) for sentence in sentences()]
    naming = [entry for entry in naming if re.search(r"(?<![\w-])--[a-z]", entry)]
    assert len(naming) > 20
    assert [entry for entry in naming if re.search(r"(?<![\w-])--[a-z]", replace_options_with_keywords(entry))] == []


def test_an_error_keeps_its_kind() -> None:
    with pytest.raises(DiskFull) as error, translate_errors():
        raise DiskFull("x")
    assert error.value.path == "x"


def test_python_errors_name_keywords(mf: tc.Run) -> None:
    with pytest.raises(tc.TacitaError, match=r'exists; go on with tacita.train\(out=".*", resume=True\)'):
        tc.train(SMALL, out=mf.folder)
    with pytest.raises(tc.TacitaError, match=r'try evaluate=\{"k": \[5\], "select_by": "ndcg@5"\}'):
        tc.train("synthetic:users=30,items=10,per_user=4", method="fedavg")
    with pytest.raises(tc.TacitaError, match="columns is for files"):
        tc.train(SMALL, columns={"user": "a"})
    with pytest.raises(tc.TacitaError, match=r"did you mean 'train\.rounds'"):
        tc.train(SMALL, train={"rouns": 1})


def test_devices_that_read_times_and_ratings_are_served_with_them() -> None:
    """Else what is recommended is not what was tested."""
    rng = np.random.default_rng(3)
    rows = [(f"u{u}", f"i{i}") for u in range(30) for i in rng.choice(20, 8, replace=False)]
    rated = {row: float(rng.integers(1, 6)) for row in rows}
    user, item = zip(*rows, strict=True)
    frame = {
        "user": user,
        "item": item,
        "rating": list(rated.values()),
        "timestamp": rng.permutation(10**6)[: len(rows)],
    }
    model: dict[str, Any] = {"name": "interest", "dim": 4, "tower": [8], "last": 6}
    run = tc.train(frame, backbone=model, out="read", train={"rounds": 1}, **ONE_BLOCK)
    models = loaded_run.load_run(run.folder)
    view = models.scorer.build_scoring_view(np.arange(len(models.users), dtype=np.int32))
    messages = [rated[models.users[u], models.items[i]] for u, i in zip(view.train.rows(), view.train.ids, strict=True)]
    assert view.train.values["rating"].tolist() == messages
    times = view.train.values["time"]
    assert (np.diff(times)[np.diff(view.train.rows()) == 0] > 0).all()


def test_wrong_argument_types_are_refused(tally: tc.Run) -> None:
    for k in (2.5, True, "5", None):
        for ask in (lambda k=k: tally.recommend("u3", k=k), lambda k=k: tally.similar("i3", k=k)):
            with pytest.raises(tc.TacitaError, match="is no whole number"):
                ask()
        with pytest.raises(tc.TacitaError, match="is no whole number"):
            tally.fold_in(["i3"], k=k)  # type: ignore[arg-type]
    assert tally.recommend("u3", k=np.int64(2)).height == 2  # type: ignore[arg-type]
    for wrong in (3, None, ["run"]):
        with pytest.raises(tc.TacitaError, match="a text or a path"):
            tc.load(wrong)  # type: ignore[arg-type]
        with pytest.raises(tc.TacitaError, match="a text or a path"):
            tc.compare([wrong])  # type: ignore[list-item]
    with pytest.raises(tc.TacitaError, match="out is named by its folder"):
        tc.train(SMALL, out=3)  # type: ignore[arg-type]
    with pytest.raises(tc.TacitaError, match="a text or a path"):
        tc.compare(3)  # type: ignore[arg-type]


def test_missing_ids_files_and_tables_are_refused(tally: tc.Run) -> None:
    for missing in (None, float("nan")):
        with pytest.raises(tc.TacitaError, match="a user is missing among those that are given"):
            tally.recommend(["u1", missing])
        with pytest.raises(tc.TacitaError, match="an item is missing among those that are given"):
            tally.fold_in(["i1", missing])
    assert tally.recommend("u1", k=3, exclude=None).equals(tally.recommend("u1", k=3))
    Path("notes.txt").write_text("x")
    with pytest.raises(tc.TacitaError, match=r"notes.txt is a file; name the folder of a run\."):
        tc.load("notes.txt")
    for wrong in ({"columns": ["user", "item"]}, {"split": "random"}, {"backbone": 3}):
        with pytest.raises(tc.TacitaError, match="in the settings must be a dict"):
            tc.train(SMALL, out="x", **wrong)
    with pytest.raises(tc.TacitaError, match="the run in out, which has to be given"):
        tc.train(SMALL, resume=True)


def test_solvers_stay_apart_when_seeds_are_averaged(tally: tc.Run) -> None:
    ways = [tc.train(SMALL, backbone={"name": "tally", "solve": way}, out=way) for way in ("ridge", "filter")]
    assert tc.compare(ways, over="seeds")["name"].to_list() == ["tally · ridge", "tally · filter"]


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tc.train(SMALL, out="nobody", **QUICK)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # a notebook
    tc.train(SMALL, out="silent", quiet=True, **QUICK)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tacita.cli.console.LINE_SECONDS", 0.01)
    tc.train(SMALL, out="shown", **QUICK)
    captured = capsys.readouterr()
    assert "round 2/2" in captured.err or "loading" in captured.err or "training" in captured.err
    assert captured.out == ""


def test_fold_in_uses_the_current_rounds_of_the_folder(mf: tc.Run, tmp_path: Path) -> None:
    """A run that forgot something by training again may have other best rounds than when it was opened."""
    folder = tmp_path / "run"
    shutil.copytree(mf.folder, folder)
    run, path = tc.load(folder), folder / "result.json"
    before = run.fold_in(["i3", "i4"], 5)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["blocks"][-1]["best_round"] = 1
    path.write_text(json.dumps(document), encoding="utf-8")
    after = run.fold_in(["i3", "i4"], 5)
    assert_frame_equal(after, tc.load(folder).fold_in(["i3", "i4"], 5))
    assert not after.equals(before)


# Requests


@pytest.fixture
def shared_run(tmp_path: Path) -> tc.Run:
    settings: dict[str, Any] = {"train": {"rounds": 2}, "evaluate": {"controls": False}, "split": {"kind": "random"}}
    return tc.train(SMALL, method="fedshare", backbone="lightgcn", out=tmp_path / "shared", **settings)


def test_forget_does_what_the_command_does(tally: tc.Run, tmp_path: Path) -> None:
    for name in ("python", "command"):
        shutil.copytree(tally.folder, tmp_path / name)
    run = tc.load(tmp_path / "python")
    history = run.explain("u1", "i3", 300)["item"].to_list()
    certificate = run.forget("u1", history[:2])
    assert certificate is not None
    assert isinstance(certificate, Certificate)
    assert certificate.request.scope == "items"
    assert certificate.request.n_items == 2
    with pytest.raises(SystemExit):
        main(["forget", str(tmp_path / "command"), "--user", "u1", "--items", ",".join(history[:2])])
    other = tc.load(tmp_path / "command")
    assert_frame_equal(run.recommend(k=5), other.recommend(k=5))
    assert not {*history[:2]} & set(run.explain("u1", "i3", 300)["item"])
    written = json.loads((run.folder / "forget-1.json").read_text())
    assert written == certificate.to_json()
    whole = run.forget(["u2", "u3"], verify=True)
    assert whole is not None
    assert whole.request.scope == "user"
    assert whole.verdict.startswith("pass")
    assert set(run.recommend(["u2", "u3"], 3)["basis"]) == {"popularity"}
    with pytest.warns(UserWarning, match="already forgotten"):
        assert run.forget("u2") is None


def test_forget_takes_a_table_of_pairs(tally: tc.Run, tmp_path: Path) -> None:
    run = tc.load(shutil.copytree(tally.folder, tmp_path / "copy"))
    pairs = {"user": ["u1", "u2"], "item": [run.explain(user, "i3", 1)["item"][0] for user in ("u1", "u2")]}
    certificate = run.forget(pairs)
    assert certificate is not None
    assert len(certificate.request.subjects) == 2
    for users, items, words in (
        (pairs, "i3", "leave out items"),
        (["u1", "u2"], ["i3"], "items are one user's"),
        ([], None, "nobody is named"),
        ("nobody", None, "user 'nobody' is not in"),
        ("u1", "nope", "item 'nope' is not in"),
    ):
        with pytest.raises(tc.TacitaError, match=words) as error:
            run.forget(users, items)
        assert "--" not in str(error.value)


def test_people_share_and_take_back(shared_run: tc.Run) -> None:
    with pytest.warns(UserWarning, match="shares nothing"):
        assert shared_run.unshare("u1") is None
    assert shared_run.share("u1") > 0
    with pytest.warns(UserWarning, match="already"):
        assert shared_run.share("u1") == 0
    certificate = shared_run.unshare("u1")
    assert isinstance(certificate, Certificate)
    assert certificate.request.scope == "shared_edges"
    with pytest.warns(UserWarning, match="taken back"):
        assert shared_run.unshare("u1") is None


def test_a_run_without_sharing_says_so(tally: tc.Run) -> None:
    with pytest.raises(tc.TacitaError, match="shar"):
        tally.share("u1")
