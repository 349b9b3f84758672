"""What is understood of people's files, and what is said where something is not."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tacita.core.config import SplitConfig
from tacita.core.errors import TacitaError
from tacita.data.sources import describe_interactions, load_interactions, save_csv
from tacita.data.splits import split

SECOND = 1_600_003_298
DAYS = ("2020-09-13", "2020-09-14", "2020-09-12")


def put(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def csv(tmp_path: Path, *lines: str) -> str:
    return put(tmp_path / "mine.csv", "".join(line + "\n" for line in lines))


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(TacitaError) as caught:
        load_interactions(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parquet(tmp_path: Path, **columns: Any) -> str:
    pl.DataFrame({"user": ["a", "b", "a"], "item": ["x", "y", "z"], **columns}).write_parquet(tmp_path / "mine.parquet")
    return str(tmp_path / "mine.parquet")


# The time column


@pytest.mark.parametrize("name", ["day", "when", "moment"])
def test_a_column_of_dates_is_the_time_whatever_its_name(tmp_path: Path, name: str) -> None:
    source = csv(tmp_path, f"user,item,{name},colour", *(f"u{n},i{n},{day},red" for n, day in enumerate(DAYS)))
    table = load_interactions(source)
    assert table.timestamp is not None
    assert table.timestamp.argsort().tolist() == [2, 0, 1]
    assert table.columns == {"user": "user", "item": "item", "timestamp": name}
    assert table.unused == ("colour",)
    assert "not used: 'colour'" in table.format_note
    assert load_interactions(source, columns={"time": "-"}).timestamp is None


@pytest.mark.parametrize(
    "values",
    [
        [date(2020, 9, 13), date(2020, 9, 14), date(2020, 9, 12)],
        [datetime(2020, 9, 13, 1), datetime(2020, 9, 14, 2), datetime(2020, 9, 12, 3)],
        [SECOND, SECOND + 1, SECOND - 1],
        [str(SECOND * 1000), str(SECOND * 1000 + 1), str(SECOND * 1000 - 1)],
    ],
)
def test_a_parquet_time_is_found_by_its_type(tmp_path: Path, values: list[object]) -> None:
    table = load_interactions(parquet(tmp_path, at=values, tags=[["p"], ["q"], []]))
    assert table.timestamp is not None
    assert table.timestamp.argsort().tolist() == [2, 0, 1]
    assert table.unused == ("tags",)


@pytest.mark.parametrize("name", ["split", "part", "title", "rating"])
def test_a_column_of_a_type_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    source = parquet(tmp_path, **{name: [timedelta(days=1)] * 3})
    assert f"column '{name}' is of type Duration" in refusal(source)


def test_what_may_be_the_time_is_named_with_the_flag_that_uses_it(tmp_path: Path) -> None:
    both = load_interactions(
        csv(tmp_path, "user,item,made,seen", "a,x,2020-01-01,2020-01-02", "b,y,2020-01-03,2020-01-04")
    )
    assert both.timestamp is None
    assert both.notes == (
        "columns 'made' and 'seen' look like times and none was used; choose with --columns time=NAME.",
    )
    for head, value in (("day", "17"), ("code", str(SECOND)), ("release_date", "2020-01-01")):
        other = load_interactions(csv(tmp_path, f"user,item,{head}", f"a,x,{value}", f"b,y,{value}"))
        assert other.timestamp is None
        assert f"--columns time={head} uses it" in other.notes[0]
        assert load_interactions(str(tmp_path / "mine.csv"), columns={"time": head}).timestamp is not None
    plain = load_interactions(csv(tmp_path, "user,item,colour", "a,x,17", "b,y,18"))
    assert plain.notes == ()


def test_dates_that_are_not_understood_are_named_with_their_format(tmp_path: Path) -> None:
    source = csv(tmp_path, "user,item,day", "a,x,13.09.2020", "b,y,02.10.2020")
    assert load_interactions(source).notes == (
        "column 'day' holds dates such as '13.09.2020' and was not used; "
        '--columns time=day --date-format "%d.%m.%Y" uses it.',
    )
    american = load_interactions(csv(tmp_path, "user,item,day", "a,x,09/13/2020", "b,y,10/02/2020"))
    assert '--date-format "%m/%d/%Y"' in american.notes[0]


def test_a_column_that_could_be_ratings_is_named(tmp_path: Path) -> None:
    table = load_interactions(csv(tmp_path, "user,item,grade", "a,x,3", "b,y,4"))
    assert table.notes == ("column 'grade' could be ratings; --columns rating=grade uses it.",)


# Dates and decimals


def test_a_date_format_is_followed_and_its_misfits_are_named(tmp_path: Path) -> None:
    source = csv(tmp_path, "user,item,date", "a,x,13.09.2020", "b,y,02.10.2020")
    assert "line 2 has a timestamp that is neither a number nor a date: '13.09.2020'" in refusal(source)
    assert '--date-format "%d.%m.%Y"' in refusal(source)
    table = load_interactions(source, date_format="%d.%m.%Y")
    assert describe_interactions(table)["dates"] == ("2020-09-13 00:00", "2020-10-02 00:00")
    assert "line 2 has a timestamp that does not fit --date-format '%Y'" in refusal(source, date_format="%Y")
    packed = csv(tmp_path, "user,item,when", "a,x,20200913", "b,y,20201002")
    assert describe_interactions(load_interactions(packed, date_format="%Y%m%d"))["dates"] == (
        "2020-09-13 00:00",
        "2020-10-02 00:00",
    )
    assert "no time column to be read with --date-format" in refusal(
        csv(tmp_path, "user,item,z", "a,x,q"), date_format="%Y"
    )
    for source in ("ml-100k", "synthetic:users=9,items=9"):
        assert "--date-format is for files" in refusal(source, date_format="%Y")
        assert "--decimal is for files" in refusal(source, decimal=",")


def test_decimal_commas_are_read_where_they_are_plain_or_asked_for(tmp_path: Path) -> None:
    plain = load_interactions(csv(tmp_path, "user;item;rating", "a;x;1,5", "b;y;4"))
    assert plain.rating is not None
    assert plain.rating.tolist() == [1.5, 4.0]
    bare = load_interactions(put(tmp_path / "bare.csv", "a;x;1,5\nb;y;4,0\n"))
    assert bare.rating is not None
    assert bare.rating.tolist() == [1.5, 4.0]
    unclear = csv(tmp_path, "user;item;rating", "a;x;1,500", "b;y;2,25")
    assert "--decimal ," in refusal(unclear)
    request = load_interactions(unclear, decimal=",")
    assert request.rating is not None
    assert request.rating.tolist() == [1.5, 2.25]
    assert "no number: '3.5'" in refusal(csv(tmp_path, "user;item;rating", "a;x;3.5"), decimal=",")


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_times_are_shown_as_dates_in_any_unit(tmp_path: Path, unit: int) -> None:
    source = csv(tmp_path, "user,item,time", f"a,x,{SECOND * unit}", f"b,y,{(SECOND + 60) * unit}")
    assert describe_interactions(load_interactions(source))["dates"] == ("2020-09-13 13:21", "2020-09-13 13:22")


def test_typed_and_written_times_are_shown_as_dates(tmp_path: Path) -> None:
    at = datetime(1970, 1, 2, tzinfo=UTC)  # too early to tell a unit by its size
    for values in ([at.date()] * 3, [at] * 3):
        assert (
            describe_interactions(load_interactions(parquet(tmp_path, at=values)))["dates"] == ("1970-01-02 00:00",) * 2
        )
    for unit in ("ms", "us", "ns"):
        typed = pl.Series([at, at, at + timedelta(days=1)], dtype=pl.Datetime(unit))  # type: ignore[arg-type]
        assert describe_interactions(load_interactions(parquet(tmp_path, at=typed)))["dates"] == (
            "1970-01-02 00:00",
            "1970-01-03 00:00",
        )
    for values in (["1970-01-02", "1970-01-03"], ["7", "8"]):
        table = load_interactions(csv(tmp_path, "user,item,time", f"a,x,{values[0]}", f"b,y,{values[1]}"))
        assert describe_interactions(table)["dates"] == (
            ("1970-01-02 00:00", "1970-01-03 00:00") if "-" in values[0] else None
        )


# JSON lines and headers


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.ndjson", "mine.txt"])
def test_json_lines_are_read(tmp_path: Path, name: str) -> None:
    rows = [
        {"user": "a", "item": 7, "stars": 4, "at": "2020-09-13", "tags": ["x"]},
        {"item": 8, "user": "b", "stars": 3.5, "at": "2020-09-12", "extra": None},
    ]
    put(tmp_path / name, "\n\n".join(map(json.dumps, rows)) + "\n")
    table = load_interactions(str(tmp_path))  # the folder's only table
    assert (table.user_ids, table.item_ids) == (("a", "b"), ("7", "8"))
    assert table.rating is not None
    assert table.rating.tolist() == [4.0, 3.5]
    assert table.timestamp is not None
    assert table.timestamp[0] > table.timestamp[1]
    assert table.format_note.startswith(f"{name}: JSON lines; user=user, item=item")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"user": 1, "item": 2}\n\n{"user": 1,\n', "line 3 is not a JSON object"),
        ('{"user": 1, "item": 2}\n[1, 2]\n', "line 2 is not a JSON object"),
        ('[{"user": 1, "item": 2}]', "save it as JSON lines"),
        ('{"user": 1, "item": 2}\n\n{"user": 1}\n', "line 3 has no item id"),
        ('{"user": 1, "item": 2, "rating": "good"}\n', "line 1 has a rating that is no number"),
        ('{"user": 1, "item": {"id": 2}}\n', "column 'item' is of type Struct"),
        ('{"user": true, "item": 2}\n{"user": 1, "item": 2}\n', "of several types"),
        ('{"who": 1, "what": 2}\n', "no user and no item column found among 'who', 'what'"),
        ("{}\n", "no user and no item column"),
    ],
)
def test_bad_json_lines_get_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(put(tmp_path / "mine.jsonl", text))


def test_a_header_that_repeats_a_name_is_refused_until_somebody_says_which(tmp_path: Path) -> None:
    source = csv(tmp_path, "user,item,item,note,note", "a,x,y,1,2", "b,y,z,1,2")
    message = refusal(source)
    assert "the header names 'item' 2 times, as columns 2 and 3" in message
    assert "--columns item=2" in message
    assert load_interactions(source, columns={"item": "3"}).item_ids == ("y", "z")
    assert "'item' 2 times" in refusal(source, columns={"item": "item"})
    twice = refusal(csv(tmp_path, "user,item,user,item", "a,x,b,y"))
    assert "the header names 'user' 2 times, as columns 1 and 3" in twice


def test_a_header_in_the_middle_is_not_a_row(tmp_path: Path) -> None:
    source = csv(tmp_path, "user,item", "a,x", "b,y", "user, item", "c,z")
    assert "line 4 is the header again" in refusal(source)
    assert "line 3 is the header again" in refusal(csv(tmp_path, "user,item,note", "a,x,1", "user,item,other", "b,y,2"))
    assert load_interactions(csv(tmp_path, "user,item", "a,x", "user,y")).user_ids == ("a", "user")


def test_a_role_named_twice_is_refused(tmp_path: Path) -> None:
    source = csv(tmp_path, "user,item,a,b", "1,2,3,4")
    assert "--columns names the timestamp twice" in refusal(source, columns={"time": "a", "timestamp": "b"})


# Splits that a file brings along


def test_blocks_and_parts_of_a_file_are_read_by_name_or_as_asked(tmp_path: Path) -> None:
    rows = [f"u{n % 3},i{n},{n // 5},{('train', 'train', 'valid', 'test', 'train')[n % 5]}" for n in range(10)]
    for head, columns in (
        ("user,item,block,part", None),
        ("user,item,Block,split", None),
        ("user,item,step,role", {"block": "step", "part": "role"}),
    ):
        table = load_interactions(csv(tmp_path, head, *rows), columns=columns)
        stream = split(table, SplitConfig())
        assert [b.n_rows for b in stream.blocks] == [5, 5]
        assert [len(b.test.ids) for b in stream.blocks] == [1, 1]
    save_csv(table, tmp_path / "again.csv")
    assert load_interactions(str(tmp_path / "again.csv")).fingerprint == table.fingerprint
    without = load_interactions(
        csv(tmp_path, "user,item,split", *(r.replace(",0,", ",").replace(",1,", ",") for r in rows))
    )
    assert without.fingerprint != table.fingerprint


def test_other_columns_called_block_or_part_are_left_alone(tmp_path: Path) -> None:
    table = load_interactions(csv(tmp_path, "user,item,block,part", "a,x,north,wheel", "b,y,south,door"))
    assert table.split is None
    assert table.block is None
    assert set(table.unused) == {"block", "part"}
    odd = csv(tmp_path, "user,item,block,part", "a,x,0,train", "b,y,-1,test")
    assert "line 3 has a block that is not one of 0, 1, 2" in refusal(odd)
    later = csv(tmp_path, "user,item,part", "a,x,train", "b,y,later")
    assert "line 3 has a split that is not train, valid or test: 'later'" in refusal(later)
    assert "blocks without parts" in refusal(csv(tmp_path, "user,item,n", "a,x,0"), columns={"block": "n"})


# Ids that are none


def test_no_number_is_no_id(tmp_path: Path) -> None:
    pl.DataFrame({"user": [1.0, float("nan"), 2.0], "item": ["x", "y", "z"]}).write_parquet(tmp_path / "mine.parquet")
    assert "row 2" in refusal(str(tmp_path / "mine.parquet"))
    pl.DataFrame({"user": ["a", "b"], "item": [0.5, float("nan")]}).write_parquet(tmp_path / "mine.parquet")
    assert "an unusable item id" in refusal(str(tmp_path / "mine.parquet"))


def test_words_for_a_missing_id_are_ids_and_a_note_says_so(tmp_path: Path) -> None:
    table = load_interactions(csv(tmp_path, "user,item", "a,x", "NaN,y", "b,NULL", "NaN,x", "c,banana"))
    assert table.user_ids == ("a", "NaN", "b", "c")
    notes = " ".join(describe_interactions(table)["notes"])  # type: ignore[call-overload]
    assert "user id 'NaN' may stand for a missing one: its 2 rows count as one user" in notes
    assert "item id 'NULL'" in notes
    assert "banana" not in notes
