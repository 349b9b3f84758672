"""Rows that lack a value: counted together, refused in one sentence, or left out where that is asked for."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import tacita as tc
from tacita.core.errors import TacitaError
from tacita.data.sources import load_interactions

HEADER = "user,item,rating,timestamp,comment\n"


def rows(n: int = 60) -> list[str]:
    return [f"u{k % 12},i{k % 17},{1 + k % 5},{1000 + k}," for k in range(n)]


def write(path: Path, extra: list[str]) -> str:
    path.write_text(HEADER + "\n".join([*rows(), *extra]) + "\n")
    return str(path)


FOUR_KINDS = [",i1,3,5,", "u1,,3,5,", "u1,i2,,5,", "u1,i3,3,NaN,", "u2,i3,NA,9,"]


def test_four_kinds_of_nulls_are_counted_in_one_message(tmp_path: Path) -> None:
    file = write(tmp_path / "clicks.csv", FOUR_KINDS)
    with pytest.raises(TacitaError) as refusal:
        load_interactions(file)
    text = str(refusal.value)
    for words in ("1 without user", "1 without item", "2 without rating", "1 without timestamp", "--drop-missing"):
        assert words in text
    for line in ("line 62", "line 63", "line 64", "line 65"):
        assert line in text


def test_rows_that_lack_a_value_are_dropped_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "clicks.csv", FOUR_KINDS)
    table = load_interactions(file, drop_missing=True)
    assert len(table.user) == len(rows())
    assert any("dropped 5 of 65 rows" in note for note in table.notes)


def test_dropped_rows_stand_in_the_result(tmp_path: Path) -> None:
    file = write(tmp_path / "clicks.csv", FOUR_KINDS)
    evaluate = {"k": [3], "select_by": "ndcg@3", "controls": False}
    run = tc.train(file, drop_missing=True, backbone="tally", out=tmp_path / "run", evaluate=evaluate, quiet=True)
    assert any("dropped 5 of 65 rows" in note for note in run.result["data"]["notes"])


def test_nulls_in_columns_that_are_not_read_do_not_matter(tmp_path: Path) -> None:
    assert len(load_interactions(write(tmp_path / "clicks.csv", [])).user) == len(rows())


def test_one_kind_names_its_row_and_counts_the_others(tmp_path: Path) -> None:
    file = write(tmp_path / "clicks.csv", [",i1,3,5,", ",i2,3,5,"])
    with pytest.raises(TacitaError, match=r"line 62 has no user id \(2 rows lack it\).*--drop-missing"):
        load_interactions(file)


def test_a_word_for_a_rating_is_not_dropped(tmp_path: Path) -> None:
    file = write(tmp_path / "clicks.csv", ["u1,i1,five,5,"])
    with pytest.raises(TacitaError, match="five"):
        load_interactions(file, drop_missing=True)


def test_a_table_in_memory_drops_them_too(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["a", None, "b", "b", "c", "a"] * 4, "item": ["x", "y", None, "z", "x", "y"] * 4})
    with pytest.raises(TacitaError, match=r"4 without user.*4 without item"):
        tc.train(frame, out=tmp_path / "refused", quiet=True)
    evaluate = {"k": [1], "select_by": "ndcg@1", "controls": False}
    run = tc.train(frame, drop_missing=True, backbone="tally", evaluate=evaluate, out=tmp_path / "run", quiet=True)
    assert sorted(run.users) == ["a", "b", "c"]


def test_a_file_of_nothing_but_gaps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gaps.csv"
    path.write_text("user,item\nu1,\n,i2\nu3,\n")
    with pytest.raises(TacitaError, match="every row lacks a value"):
        load_interactions(str(path), drop_missing=True)
