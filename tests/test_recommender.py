"""The estimator: scikit-learn's protocol, tables in and out, answers, folders."""

from __future__ import annotations

import pickle
from pathlib import Path

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


def test_evaluate_equals_a_count_by_hand(fitted: tc.Recommender) -> None:
    first = fitted.recommend(["u1", "u2"], k=4)
    hit = first.filter(pl.col("user") == "u1")["item"][1]
    holdout = pl.DataFrame({"user": ["u1", "u2", "stranger"], "item": [hit, "nothing", "i1"]})
    scores = fitted.evaluate(holdout, k=4)
    assert scores["users"] == 2
    assert scores["hr@4"] == pytest.approx(0.5)
    assert scores["ndcg@4"] == pytest.approx(0.5 / np.log2(3))


def test_an_explanation_is_what_the_score_loses(fitted: tc.Recommender) -> None:
    run = fitted.fitted_run
    explained = fitted.explain("u1", "i4", k=20)
    assert set(explained["basis"]) == {"left out"}
    models = run._load_models()
    recency = float(models.server.heads["recency"][0])
    if recency == 0:  # then a score is a plain sum over the items
        total = sum(explained["effect"].to_list())
        assert total == pytest.approx(run.scores("u1", ["i4"])["score"][0], rel=1e-4, abs=1e-5)
    strongest = explained["item"][0]
    assert strongest in set(CLICKS.filter(pl.col("user") == "u1")["item"])


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


def test_a_run_is_copied_to_other_processes_as_its_folder(fitted: tc.Recommender) -> None:
    run = fitted.fitted_run
    copy = pickle.loads(pickle.dumps(run))  # noqa: S301
    assert copy.folder == run.folder
    assert copy.recommend("u1", k=3).equals(run.recommend("u1", k=3))


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(TacitaError, match="cannot be learned from"):
        tc.Recommender().fit(7)
