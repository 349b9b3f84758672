"""The estimator: scikit-learn's protocol, tables in and out, answers, folders."""

from __future__ import annotations

import errno
import pickle
import re
import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import tacita as tc
from tacita.core.errors import TacitaError
from tacita.runs.run_folder import read_lists

EVALUATE = {"k": [5], "select_by": "ndcg@5", "controls": False}


def make_clicks(n_users: int = 40, seed: int = 3) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(n_users):
        group = user % 2
        liked = rng.choice(np.arange(group, 24, 2), 9, replace=False)
        rows += [(f"u{user}", f"i{item}", place) for place, item in enumerate(liked)]
    users, items, times = zip(*rows, strict=True)
    return pl.DataFrame({"user": users, "item": items, "timestamp": times})


CLICKS = make_clicks()


@pytest.fixture(scope="module")
def fitted() -> tc.Recommender:
    return tc.Recommender(backbone="tally", seed=2, evaluate=EVALUATE).fit(CLICKS)


def test_parameters_are_set_read_and_cloned() -> None:
    sklearn = pytest.importorskip("sklearn.base")
    model = tc.Recommender(backbone="tally", seed=4, evaluate=EVALUATE)
    assert model.get_params()["seed"] == 4
    model.set_params(seed=5, train={"rounds": 3})
    assert model.get_params()["train"] == {"rounds": 3}
    copy = sklearn.clone(model)
    assert copy.get_params() == model.get_params()
    assert copy is not model


ARRAYS = "it fits an array of numbers; a recommender learns from a table of users and items"
CHECKS: dict[str, str] = {
    "check_estimator_cloneable": "",
    "check_estimator_tags_renamed": "",
    "check_valid_tag_types": "",
    "check_estimator_repr": "",
    "check_do_not_raise_errors_in_init_or_set_params": "",
    "check_mixin_order": "",
    "check_parameters_default_constructible": "",
    "check_get_params_invariance": "",
    "check_set_params": "",
    "check_no_attributes_set_in_init": "settings of a config file are keywords, and are kept together in `settings`",
    "check_estimators_unfitted": "every mistake is a TacitaError; scikit-learn and its exceptions may not be installed",
    "check_array_api_input": "no arrays of other libraries are taken",
    "check_estimator_sparse_tag": "no sparse matrices are taken",
    "check_estimator_sparse_array": "no sparse matrices are taken",
    "check_estimator_sparse_matrix": "no sparse matrices are taken",
    "check_estimators_empty_data_messages": "every mistake is a TacitaError, not a ValueError",
    "check_estimators_nan_inf": "missing values of tables are refused in words: tests/test_missing_values.py",
    "check_fit_score_takes_y": ARRAYS,
    "check_estimators_overwrite_params": ARRAYS,
    "check_dont_overwrite_parameters": ARRAYS,
    "check_estimators_fit_returns_self": ARRAYS,
    "check_readonly_memmap_input": ARRAYS,
    "check_n_features_in_after_fitting": ARRAYS,
    "check_positive_only_tag_during_fit": ARRAYS,
    "check_estimators_dtypes": ARRAYS,
    "check_complex_data": ARRAYS,
    "check_dtype_object": ARRAYS,
    "check_pipeline_consistency": ARRAYS,
    "check_estimators_pickle": ARRAYS,
    "check_f_contiguous_array_estimator": ARRAYS,
    "check_methods_sample_order_invariance": ARRAYS,
    "check_methods_subset_invariance": ARRAYS,
    "check_fit2d_1sample": ARRAYS,
    "check_fit2d_1feature": ARRAYS,
    "check_dict_unchanged": ARRAYS,
    "check_fit_idempotent": ARRAYS,
    "check_fit_check_is_fitted": ARRAYS,
    "check_n_features_in": ARRAYS,
    "check_fit1d": ARRAYS,
    "check_fit2d_predict1d": ARRAYS,
}
"""Checks of scikit-learn 1.9 -> why one does not apply; no reason: it applies. Tables get those of arrays below."""


class ArrayRecommender(tc.Recommender):
    """Says that it takes arrays, so that scikit-learn lists all of its checks."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags


def listed_checks() -> dict[str, Any]:
    from sklearn.utils.estimator_checks import estimator_checks_generator

    checks = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model, check in estimator_checks_generator(ArrayRecommender()):
            name = re.search(r"function (check_\w+)", str(check))
            assert name is not None
            checks[name[1]] = partial(check, model)
    return checks


def test_checks_of_scikit_learn_that_apply_pass() -> None:
    sklearn = pytest.importorskip("sklearn")
    checks = listed_checks()
    applying = [name for name, reason in CHECKS.items() if not reason]
    for name in applying:
        checks[name]()
    assert len(applying) == 9
    if sklearn.__version__.startswith("1.9."):
        assert checks.keys() == CHECKS.keys()


def test_scikit_learn_takes_it_as_an_estimator_of_tables() -> None:
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = checks.check_estimator(tc.Recommender())
    assert {result["status"] for result in results} == {"passed"}


def test_what_the_checks_of_arrays_ask_holds_for_tables(fitted: tc.Recommender) -> None:
    """Fit returns the model, changes no parameter and can be repeated; answers change nothing, whatever the order."""
    validation = pytest.importorskip("sklearn.utils.validation")
    model = tc.Recommender(backbone="tally", seed=2, evaluate=EVALUATE)
    parameters = dict(model.get_params())
    before = CLICKS.clone()
    assert model.fit(CLICKS) is model
    assert model.get_params() == parameters
    assert CLICKS.equals(before)
    assert model.n_features_in_ == CLICKS.width
    validation.check_is_fitted(model)
    attributes = dict(model.__dict__)
    rows = CLICKS.head(40)
    scores = model.predict(rows)
    assert model.__dict__ == attributes
    np.testing.assert_array_equal(model.predict(rows.reverse()), scores[::-1])
    np.testing.assert_array_equal(np.concatenate([model.predict(part) for part in rows.iter_slices(7)]), scores)
    np.testing.assert_array_equal(model.fit(CLICKS).predict(rows), scores)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(rows), scores)  # noqa: S301


def test_parameters_survive_without_scikit_learn() -> None:
    model = tc.Recommender(backbone="tally", seed=4)
    copy = tc.Recommender(**model.get_params())
    assert copy.get_params() == model.get_params()
    assert model.set_params(seed=9) is model
    assert "seed=9" in repr(model)


def test_constructing_checks_nothing_and_fitting_returns_itself(fitted: tc.Recommender) -> None:
    tc.Recommender(backbone="no such model")
    assert fitted.__sklearn_is_fitted__()
    assert not tc.Recommender().__sklearn_is_fitted__()


def test_nothing_is_answered_before_fitting() -> None:
    with pytest.raises(TacitaError, match=r"call fit\(table\) first"):
        tc.Recommender().recommend("u1")


def test_the_same_seed_gives_the_same_answers(fitted: tc.Recommender) -> None:
    again = tc.Recommender(backbone="tally", seed=2, evaluate=EVALUATE).fit(CLICKS)
    assert again.recommend(k=5).equals(fitted.recommend(k=5))


def test_polars_in_polars_out_and_pandas_in_pandas_out(fitted: tc.Recommender) -> None:
    assert isinstance(fitted.recommend("u1", k=3), pl.DataFrame)
    table = pd.DataFrame(CLICKS.to_dict(as_series=False))
    model = tc.Recommender(backbone="tally", seed=2, evaluate=EVALUATE).fit(table)
    answer = model.recommend(table["user"].head(3).unique(), k=3)
    assert isinstance(answer, pd.DataFrame)
    assert list(answer["item"]) == fitted.recommend(["u0"], k=3)["item"].to_list()


def test_predict_scores_rows_and_marks_unknown_ones(fitted: tc.Recommender) -> None:
    rows = pl.DataFrame({"user": ["u1", "u1", "nobody", "u2"], "item": ["i3", "i4", "i3", "nothing"]})
    scores = fitted.predict(rows)
    assert np.isnan(scores[2:]).all()
    expected = fitted.fitted_run.scores("u1", ["i3", "i4"])["score"].to_list()
    assert scores[:2].tolist() == expected


def test_tables_are_read_by_the_columns_that_were_learned_from() -> None:
    names = {"user": "customer", "item": "book"}
    renamed = CLICKS.rename({"user": "customer", "item": "book"})
    model = tc.Recommender(backbone="tally", seed=2, columns=names, evaluate=EVALUATE).fit(renamed)
    np.testing.assert_array_equal(model.predict(renamed.head(9)), model.predict(CLICKS.head(9)))
    assert model.evaluate(renamed, 4) == model.evaluate(CLICKS, 4)
    with pytest.raises(TacitaError, match="it has no 'book'"):
        model.predict(renamed.drop("book"))


def test_every_table_that_comes_out_is_of_pandas_where_pandas_went_in() -> None:
    table = pd.DataFrame(CLICKS.to_dict(as_series=False))
    model = tc.Recommender(backbone="tally", seed=2, evaluate=EVALUATE).fit(table)
    for answer in (model.recommend("u1", 2), model.explain("u1", "i4"), model.similar("i4", 3), model.recommend(k=2)):
        assert isinstance(answer, pd.DataFrame)
        assert len(answer) > 0
    assert model.predict(table.head(5)).shape == (5,)
    assert model.evaluate(table, 4)["users"] == table["user"].nunique()


def test_evaluate_equals_a_count_by_hand(fitted: tc.Recommender) -> None:
    first = fitted.recommend(["u1", "u2"], k=4)
    hit = first.filter(pl.col("user") == "u1")["item"][1]
    holdout = pl.DataFrame({"user": ["u1", "u2", "stranger"], "item": [hit, "nothing", "i1"]})
    scores = fitted.evaluate(holdout, k=4)
    assert scores["users"] == 2
    assert scores["hr@4"] == pytest.approx(0.5)
    assert scores["ndcg@4"] == pytest.approx(0.5 / np.log2(3))


@pytest.mark.parametrize("recency", [0.0, 40.0])  # a plain sum over the items, and one in which their order counts
def test_an_explanation_is_what_the_score_loses(recency: float) -> None:
    """Each effect is the score less that of a person who did the same, but for the item."""
    model = tc.Recommender({"name": "tally", "recency": recency}, seed=2, split={"kind": "random"}, evaluate=EVALUATE)
    run = model.fit(CLICKS).fitted_run
    scorer = run._load_models().scorer
    history = [run.items[number] for number in scorer.block.train.row(run.users.index("u1"))]
    item = next(item for item in ("i1", "i3", "i5", "i7", "i9", "i11") if item not in history)
    explained = model.explain("u1", item, k=20)
    assert set(explained["basis"]) == {"left out"}
    assert sorted(explained["item"]) == sorted(history)
    whole = run.scores("u1", [item])["score"][0]
    for own_item, effect in explained.select("item", "effect").iter_rows():
        others = [other for other in history if other != own_item]
        without = run.fold_in(others, k=1, include=[item], seen=True)["score"][0]
        assert effect == pytest.approx(whole - without, abs=1e-6)
    assert explained["effect"].is_sorted(descending=True)
    assert explained["effect"].n_unique() > 2
    assert explained["effect"].abs().max() > 1e-3


def test_an_explanation_reaches_items_of_earlier_blocks(tmp_path: Path) -> None:
    """A person who came back with nothing new still has reasons."""
    settings = {"split": {"kind": "blocks"}, "evaluate": EVALUATE}
    run = tc.train(CLICKS, backbone="tally", out=tmp_path / "blocks", quiet=True, **settings)
    models = run._load_models()
    past = read_lists(models.saved.client_arrays, "past")
    user = int(np.flatnonzero(past.counts())[0])
    explained = run.explain(run.users[user], "i4", k=300)
    own_items = {run.items[item] for item in past.row(user)}
    assert own_items <= set(explained["item"])
    assert len(set(explained["item"])) == explained.height
    assert explained["effect"].abs().max() > 0


def test_a_model_of_rows_says_that_items_are_only_alike(tmp_path: Path) -> None:
    settings = {"train": {"rounds": 2}, "evaluate": EVALUATE}
    run = tc.train(CLICKS, method="fedavg", out=tmp_path / "mf", quiet=True, **settings)
    assert set(run.explain("u1", "i4")["basis"]) == {"alike"}


def test_folders_are_saved_and_loaded(fitted: tc.Recommender, tmp_path: Path) -> None:
    folder = fitted.save(tmp_path / "saved")
    loaded = tc.Recommender.load(folder)
    assert loaded.recommend(k=5).equals(fitted.recommend(k=5))
    with pytest.raises(TacitaError, match="exists"):
        fitted.save(folder)


def test_a_loaded_recommender_has_the_settings_of_its_run(tmp_path: Path) -> None:
    """It reads the columns that were learned from, and learns again as the run did."""
    names = {"user": "customer", "item": "book"}
    renamed = CLICKS.rename(names)
    settings: dict[str, Any] = {"columns": names, "split": {"kind": "random", "seed": 5}, "evaluate": EVALUATE}
    model = tc.Recommender(method="fedavg", seed=2, train={"rounds": 2}, **settings).fit(renamed)
    loaded = tc.Recommender.load(model.save(tmp_path / "saved"))
    np.testing.assert_array_equal(loaded.predict(renamed), model.predict(renamed))
    assert loaded.evaluate(renamed, 4) == model.evaluate(renamed, 4)
    assert loaded.fit(renamed).fitted_run.config == model.fitted_run.config
    assert loaded.recommend(k=3).equals(model.recommend(k=3))


def test_a_folder_that_cannot_be_written_is_one_sentence(
    fitted: tc.Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TacitaError, match=r"cannot write .*file/run: .*\.$"):
        fitted.save(tmp_path / "file" / "run")

    def fill_disk(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", fill_disk)
    with pytest.raises(TacitaError, match=r"no space left to write .*run; free some"):
        fitted.save(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_whose_folder_is_gone_cannot_be_saved(tmp_path: Path) -> None:
    model = tc.Recommender("tally", out=tmp_path / "run", evaluate=EVALUATE).fit(CLICKS)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(TacitaError, match=r"no run folder .*run"):
        model.save(tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_copied_to_other_processes_as_its_folder(fitted: tc.Recommender) -> None:
    run = fitted.fitted_run
    copy = pickle.loads(pickle.dumps(run))  # noqa: S301
    assert copy.folder == run.folder
    assert copy.recommend("u1", k=3).equals(run.recommend("u1", k=3))


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(TacitaError, match="cannot be learned from"):
        tc.Recommender().fit(7)


def test_a_fit_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = tc.Recommender(backbone="tally", seed=2, evaluate=EVALUATE).fit(CLICKS)
    before = model.recommend(k=3)
    folders = list(tmp_path.iterdir())
    model.set_params(backbone="no such model")
    with pytest.raises(TacitaError, match="unknown backbone") as failure:
        model.fit(pd.DataFrame(CLICKS.to_dict(as_series=False)))
    assert list(tmp_path.iterdir()) == folders
    after = model.recommend(k=3)
    assert isinstance(after, pl.DataFrame)
    assert after.equals(before)
    assert failure.value.__traceback__ is not None  # what it holds would keep the new folder


def test_a_second_fit_needs_another_folder(tmp_path: Path) -> None:
    model = tc.Recommender("tally", seed=2, out=tmp_path / "first", evaluate=EVALUATE).fit(CLICKS)
    before = model.recommend(k=3)
    with pytest.raises(TacitaError, match=r"first exists; .* choose another out"):
        model.fit(CLICKS)
    assert before.equals(model.recommend(k=3))
    model.set_params(out=tmp_path / "second").fit(CLICKS)
    assert model.fitted_run.folder == tmp_path / "second"


@pytest.mark.parametrize(
    "ratings",
    [[1, 2], [3], [], 5, object(), [[4]] * CLICKS.height, [[1], [2, 3]], np.ones(CLICKS.height + 1)],
)
def test_ratings_that_do_not_fit_the_table_are_one_sentence(ratings: Any) -> None:
    with pytest.raises(TacitaError, match=r"^y is no list of 360 ratings, one for each row of the table; .*\.$"):
        tc.Recommender(backbone="tally", evaluate=EVALUATE).fit(CLICKS, ratings)


def test_ratings_are_learned_from() -> None:
    """Of people who rate half of their items low, only the other half counts."""
    ratings = [5 if place < 5 else 1 for place in CLICKS["timestamp"]]
    split = {"kind": "random", "min_rating": 4}
    model = tc.Recommender("tally", seed=2, split=split, evaluate=EVALUATE).fit(CLICKS, ratings)
    assert model.fitted_run._load_models().histories.counts().tolist() == [5] * 40
