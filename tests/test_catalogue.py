"""The list of items that a model is about is public: it is the same whoever has which of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.data.catalogue import read_catalogue
from tacita.runs import serving, training
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.run_folder import open_saved

HERE = Machine(threads=1)
BUDGET = {"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0}}
KINDS: dict[str, dict[str, Any]] = {
    "tally under a budget": BUDGET,
    "tally-order under a budget": {**BUDGET, "backbone": {"name": "tally-order"}},
    "dpps": {"method": "dpps"},
    "dp-fedavg": {
        "method": "dp-fedavg",
        "train": {
            "rounds": 2,
            "aggregation": "fixed",
            "participation": {"kind": "poisson", "rate": 0.5},
            "denominator": 12.0,
        },
    },
    "mf": {},
    "tally": {"backbone": {"name": "tally"}},
    "tally filter": {"backbone": {"name": "tally", "solve": "filter", "axes": 8}},
    "tally-order": {"backbone": {"name": "tally-order"}},
    "lightgcn": {"backbone": {"name": "ego"}, "split": {"kind": "random"}},
    "ncf": {"backbone": {"name": "ncf"}},
    "interest": {"backbone": {"name": "interest"}},
}


def config_of(data: Path, **settings: Any) -> RunConfig:
    values = {"data": str(data), "split": {"kind": "random"}, "train": {"rounds": 2}, **settings}
    values["evaluate"] = {"k": [5], "select_by": "ndcg@5"}
    return validate_model(RunConfig, values, "a test")


def write_rows(folder: Path, extra: list[str]) -> Path:
    """24 people with 60 items, and somebody else."""
    folder.mkdir(exist_ok=True)
    rows = [f"u{user},i{item},{item + user}" for user in range(24) for item in range(user % 4, 60, 4)]
    path = folder / "interactions.csv"
    path.write_text("\n".join(["user,item,timestamp", *rows, *extra]) + "\n")
    return path


def list_items(folder: Path, n: int) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "items.csv"
    lines = [f"i{number},Title {number}" for number in range(n)]
    path.write_text("\n".join(["item,title", *lines]) + "\n")
    return path


LONER = [f"u99,i{item},{item}" for item in range(60, 68)]  # alone has eight items


@pytest.mark.parametrize("kind", ["tally under a budget", "tally-order under a budget", "dpps", "dp-fedavg"])
def test_a_person_with_rare_items_does_not_change_the_shape_of_a_model(kind: str, tmp_path: Path) -> None:
    shapes = []
    for name, extra in (("without", []), ("beside", LONER)):
        folder = tmp_path / name
        data = write_rows(folder, extra)
        list_items(folder, 70)
        training.train(config_of(data, **KINDS[kind]), folder / "run", HERE)
        saved = open_saved(folder / "run")
        shapes.append({key: array.shape for key, array in saved.server_arrays.items()})
        assert len(saved.ids["items"]) == 70
        assert saved.ids["titles"]["i69"] == "Title 69"
    if kind.startswith("tally"):  # how many items terms are about follows from a noised number of people
        shapes = [{key: shape for key, shape in result.items() if key in ("items", "heads/known")} for result in shapes]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", ["tally under a budget", "dpps", "dp-fedavg"])
def test_a_budget_without_a_catalogue_is_refused_with_the_remedy(kind: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path, LONER)
    with pytest.raises(TacitaError, match="catalogue=from-data"):
        assemble_federation(config_of(data, **KINDS[kind]), HERE)
    federation = assemble_federation(config_of(data, catalogue="from-data", **KINDS[kind]), HERE)
    assert federation.stream.n_items == 68


def test_a_catalogue_of_ones_own_is_read_and_what_it_lacks_left_out(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", LONER)
    catalogue = list_items(tmp_path / "public", 64)
    federation = assemble_federation(config_of(data, catalogue=str(catalogue), **BUDGET), HERE)
    assert federation.stream.item_ids == tuple(f"i{number}" for number in range(64))
    assert [block.n_items for block in federation.stream.blocks] == [64]
    assert any("4 rows of other items are left out" in note for note in federation.stream.notes)


def test_a_list_of_ids_without_a_header_is_a_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(str(number) for number in range(5, 25)) + "\n")
    assert read_catalogue(path).item_ids == tuple(str(number) for number in range(5, 25))


def test_a_missing_catalogue_is_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path, [])
    with pytest.raises(TacitaError, match=r"nowhere\.csv"):
        assemble_federation(config_of(data, catalogue=str(tmp_path / "nowhere.csv")), HERE)


@pytest.mark.parametrize("kind", KINDS)
def test_items_that_nobody_has_break_nothing(kind: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", [])
    catalogue = list_items(tmp_path / "public", 70)
    config = config_of(data, catalogue=str(catalogue), **KINDS[kind])
    run = training.train(config, tmp_path / "run", HERE)
    controls = [control["mean"]["ndcg@5"] for control in run.result["controls"].values() if "mean" in control]
    assert len(controls) >= 2
    for value in (run.result["mean"]["ndcg@5"], *controls):
        assert np.isfinite(value)
        assert 0 <= value <= 1
    served = serving.recommend(tmp_path / "run", ["u1", "u2"], 5)
    for items in served.values():
        assert len(items) == 5
        assert np.isfinite([item["score"] for item in items]).all()


def test_synthetic_data_has_a_catalogue_under_a_budget() -> None:
    values = {"data": "synthetic:users=40,items=300,per_user=6", "split": {"kind": "random"}, **BUDGET}
    federation = assemble_federation(validate_model(RunConfig, values, "a test"), HERE)
    assert federation.stream.n_items == 300
    plain = assemble_federation(validate_model(RunConfig, {**values, "privacy": {}}, "a test"), HERE)
    assert plain.stream.n_items < 300
    assert plain.stream.fingerprint != federation.stream.fingerprint
