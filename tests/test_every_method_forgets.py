"""One door for every method: of each preset an item and a whole person are forgotten, with a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_door import assert_valid, items_of, shared_by

from tacita.lab import training
from tacita.lab.forgetting.door import grant
from tacita.lab.forgetting.wishes import Wish
from tacita.lab.run_folder import lists_of, open_saved
from tacita.methods import configured, preset_names, preset_parts

DATA = "synthetic:users=40,items=36,per_user=9,groups=3"
TRANSFER = [name for name in preset_names() if "prediction-transfer" in str(preset_parts(name))]
ROWS = {"backbone": {"name": "mf", "dim": 4, "lr": 0.5}}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"backbone": {"name": "mf", "dim": 4, "lr": 0.02, "item_lr_scale": 1.0}} for name in TRANSFER},
    "fedpergnn": {"backbone": {"name": "fedpergnn", "dim": 4, "lr": 0.02}},
    "fedncf-kd": {},
    "pdc-frs": {**ROWS, "parts": [{"name": "sharing", "after": 1}]},
    "cdcgnnfed": {**ROWS, "parts": [{"name": "graph-mending", "mend_every": 1}]},
    "retraction": {**ROWS, "train": {"rounds": 2, "aggregation": "fixed"}},
}


def trained(method: str, out: Path, **more: Any) -> Path:
    """A tiny run of a preset."""
    optimiser = {"optimiser": "lazy-adam"} if method in (*TRANSFER, "fedpergnn") else {}
    values: dict[str, Any] = {
        "data": DATA,
        "method": method,
        "train": {"rounds": 2, "participation": {"kind": "all"}, **optimiser},
        "split": {"kind": "random"},
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5", "every": 1},
        **OWN.get(method, ROWS),
        **more,
    }
    return training.train(configured(values, "the test"), out / method).folder


def forgotten(folder: Path, user: str, items: list[str] | None) -> dict[str, Any]:
    found = grant(folder, Wish("forget", {user: items}))
    assert found.certificate is not None, found.said
    assert_valid(found.certificate)
    assert found.certificate["purged"]["clean"] is True, found.certificate["purged"]
    return found.certificate


@pytest.mark.parametrize("method", preset_names())
def test_of_every_method_an_item_and_a_person_are_forgotten(method: str, tmp_path: Path) -> None:
    folder = trained(method, tmp_path)
    mine = items_of(folder, "u1")
    found = forgotten(folder, "u1", mine[:1])
    assert items_of(folder, "u1") == mine[1:]
    assert found["method"]["why"].endswith(".")
    able = {"fru", "cufru", "cfru", "retrain"} & {one["name"] for one in preset_parts(method)}
    if not able and not shared_by(folder, "u1"):
        assert found["method"]["name"] == "retrain"
        assert found["method"]["why"].endswith("so the run is trained again from its beginning without it.")
    found = forgotten(folder, "u2", None)
    assert items_of(folder, "u2") == []
    saved = open_saved(folder)
    assert not saved.held["private"][saved.numbers(["u2"])[0]].any()
    assert grant(folder, Wish("forget", {"u2": None})).certificate is None  # already forgotten
    left = lists_of(saved.held, "history")
    assert len(left.row(saved.numbers(["u3"])[0]))  # others keep theirs
