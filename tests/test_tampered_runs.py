"""Run folders whose text files somebody changed: every verb says one sentence, and nothing is half done."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tacita as tc
from tacita.cli import main

SMALL = "synthetic:users=60,items=40,per_user=12"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    settings: dict[str, Any] = {"evaluate": {"controls": False}, "split": {"n_blocks": 2}}
    return tc.train(SMALL, backbone="tally", privacy={"epsilon": 2.0}, out=out, **settings).folder


def put(*way: Any) -> Callable[[Any], None]:
    """A change: the last is put where the others lead."""
    *steps, last, value = way

    def change(found: Any) -> None:
        for step in steps:
            found = found[step]
        found[last] = value

    return change


FORGED = [
    ("ids.json", put("users", 3, 5)),
    ("ids.json", put("users", 3, None)),
    ("ids.json", put("users", 3, "u1")),
    ("ids.json", put("users", ["u1"])),
    ("ids.json", put("items", 0, float("nan"))),
    ("ids.json", put("items", [])),
    ("ids.json", put("titles", {"i1": 7})),
    ("ids.json", put("titles", "i1")),
    ("result.json", put("blocks", "none")),
    ("result.json", put("blocks", [])),
    ("result.json", put("blocks", -1, "none")),
    ("result.json", put("blocks", -1, "promises", "none")),
    ("result.json", put("blocks", -1, "promises", {"tally": 3})),
    ("result.json", put("blocks", -1, "promises", {"tally": {"epsilon_planned": None}})),
    ("result.json", put("blocks", -1, "best_round", float("nan"))),
    ("result.json", put("blocks", -1, "users", "many")),
    ("result.json", put("blocks", -1, "on_blocks", 1)),
    ("result.json", put("blocks", -1, "ndcg@20", "best")),
    ("result.json", put("mean", "ndcg@20", [])),
    ("result.json", put("data", "everything")),
    ("result.json", put("privacy", "all of it")),
    ("result.json", put("privacy", "epsilon", 3)),
    ("result.json", put("requests", "two")),
    ("result.json", put("controls", {"popular": 3})),
]


@pytest.mark.parametrize(("name", "change"), FORGED, ids=range(len(FORGED)))
def test_a_forged_file_is_refused_in_one_sentence(
    made: Path, tmp_path: Path, name: str, change: Callable[[Any], None]
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for verb in (["recommend", "--user", "u2", "--run"], ["forget", "--user", "u2", "--all", "--run"]):
        err = io.StringIO()
        with (
            contextlib.redirect_stderr(err),
            contextlib.redirect_stdout(io.StringIO()),
            pytest.raises(SystemExit) as error,
        ):
            main([*verb, str(folder)])
        assert error.value.code == 2, err.getvalue()
        assert f"{name} is damaged" in " ".join(err.getvalue().split())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
