"""Under a budget a file is read row by row: nobody's row decides how others' rows are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.data.frames import read_frame
from tacita.data.interaction_table import Interactions
from tacita.data.sources import load_interactions
from tacita.runs.assembly import Machine, assemble_federation, load_run_table

HEADER = b"user,item,rating,time\n"
ODD_ROWS = {
    "another encoding": b"odd,caf\xe9,4,100",
    "UTF-8": "odd,caf\u00e9,4,100".encode(),
    "an open quote": b'odd,"i1,4,100',
    "a closed quote": b'odd,"i,1",4,100',
    "few fields": b"odd,i1",
    "many fields": b"odd,i1,4,100,5,6",
    "other separators": b"odd;i1;4;100",
    "tabs": b"odd\ti1\t4\t100",
    "no item": b"odd,,4,100",
    "no user": b",i1,4,100",
    "a rating that is no number": b"odd,i1,good,100",
    "a decimal comma": b'odd,i1,"4,5",100',
    "no rating": b"odd,i1,,100",
    "an endless rating": b"odd,i1,inf,100",
    "a time with a fraction": b"odd,i1,4,100.5",
    "a date": b"odd,i1,4,2020-01-01",
    "an endless time": b"odd,i1,4,1e300",
    "no time": b"odd,i1,4,",
    "the header again": b"user,item,rating,time",
    "a null byte": b"odd,i\x001,4,100",
    "a carriage return": b"odd,i1,4,100\r",
    "a number as id": b"1.0,2.0,4,100",
    "blanks": b"   ",
    "an object": b'{"user": "odd"}',
}


def write_rows(path: Path, *odd_rows: bytes, at: int = 3, header: bytes = HEADER) -> Path:
    rows = [f"{number % 4},{number % 5},{1 + number % 5},{1000 + number}".encode() for number in range(20)]
    rows[at:at] = odd_rows
    path.write_bytes(header + b"\n".join(rows) + b"\n")
    return path


def read(path: Path, **hints: Any) -> Interactions:
    return load_interactions(str(path), row_by_row=True, **hints)


def rows_of_others(table: Interactions) -> list[tuple[object, ...]]:
    """The rows of the usual people, as raw ids and values."""
    columns = [table.rating, table.timestamp, table.split, table.block]
    rows = []
    for row in range(len(table.user)):
        user = table.user_ids[table.user[row]]
        values = [None if column is None else column[row].item() for column in columns]
        if user in ("0", "1", "2", "3"):
            rows.append((user, table.item_ids[table.item[row]], *values))
    return rows


@pytest.mark.parametrize("at", [0, 3, 20])
@pytest.mark.parametrize("kind", ODD_ROWS)
def test_an_odd_row_changes_nothing_of_others(kind: str, at: int, tmp_path: Path) -> None:
    clean = read(write_rows(tmp_path / "clean.csv"))
    odd = read(write_rows(tmp_path / "odd.csv", ODD_ROWS[kind], at=at))
    assert rows_of_others(odd) == rows_of_others(clean)
    assert len(rows_of_others(clean)) == 20
    assert (odd.notes, odd.time_unit, odd.columns, odd.unused) == (clean.notes, "s", clean.columns, clean.unused)
    assert odd.format_note.replace("odd", "clean") == clean.format_note


@pytest.mark.parametrize("kind", ["few fields", "a time with a fraction", "another encoding", "no item"])
def test_without_a_budget_one_row_decides_for_all(kind: str, tmp_path: Path) -> None:
    """The test above can fail: these rows change how others are read, or that they are read at all."""
    clean = load_interactions(str(write_rows(tmp_path / "clean.csv")))
    path = write_rows(tmp_path / "odd.csv", ODD_ROWS[kind], b"0,caf\xc3\xa9,4,5")
    try:
        odd = load_interactions(str(path))
    except TacitaError:
        return
    assert rows_of_others(odd)[:20] != rows_of_others(clean)


def test_a_clean_file_is_read_as_without_a_budget(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "clean.csv")
    plain = load_interactions(str(path))
    alone = read(path)
    assert alone.fingerprint == plain.fingerprint
    assert rows_of_others(alone) == rows_of_others(plain)


@pytest.mark.parametrize("separator", ["\t", ";", "|", "::", " "])
def test_the_header_says_how_rows_are_separated(separator: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "clean.csv")
    other = tmp_path / "other.csv"
    other.write_bytes(path.read_bytes().replace(b",", separator.encode()))
    assert read(other).fingerprint == read(path).fingerprint


def test_without_a_header_columns_are_numbers(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", header=b"")
    with pytest.raises(TacitaError, match="--columns user=1,item=2"):
        read(path)
    columns = {"user": "1", "item": "2", "rating": "3", "timestamp": "4"}
    assert read(path, columns=columns).fingerprint == read(write_rows(tmp_path / "clean.csv")).fingerprint


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", ODD_ROWS)
def test_without_a_header_an_odd_row_changes_nothing_of_others(kind: str, at: int, tmp_path: Path) -> None:
    columns = {"user": "1", "item": "2", "rating": "3", "timestamp": "4"}
    clean = read(write_rows(tmp_path / "clean.csv", header=b""), columns=columns)
    odd = read(write_rows(tmp_path / "odd.csv", ODD_ROWS[kind], at=at, header=b""), columns=columns)
    assert len(rows_of_others(clean)) == 20
    assert rows_of_others(odd) == rows_of_others(clean)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"user": "1", "item": "1"}, "two roles ask for one column"),
        ({"user": "0", "item": "2"}, "no column 0"),
        ({"user": "1", "item": "2", "block": "3"}, "blocks without parts"),
    ],
)
def test_wrong_numbers_of_columns_are_refused(columns: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(TacitaError, match=words):
        read(write_rows(tmp_path / "rows.csv", header=b""), columns=columns)


def test_columns_by_name_need_that_header(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", header=b"who,what,rating,time\n")
    with pytest.raises(TacitaError, match="names no columns"):
        read(path)
    assert len(rows_of_others(read(path, columns={"user": "who", "item": "what"}))) == 20


def test_dates_need_their_format(tmp_path: Path) -> None:
    path = tmp_path / "dates.csv"
    path.write_text("user,item,date\nu1,i1,31.01.2020\nu2,i2,01/02/2020\nu2,i1,2.2.2020\n")
    with pytest.raises(TacitaError, match="no row can be read by itself"):
        read(path)
    table = read(path, date_format="%d.%m.%Y")
    assert (len(table.user), table.time_unit) == (2, "us")


@pytest.mark.parametrize("part", ["train", "TEST", "other", ""])
@pytest.mark.parametrize("block", ["0", "7", "900", "x", ""])
def test_parts_and_blocks_of_a_row_are_its_own(part: str, block: str, tmp_path: Path) -> None:
    rows = [f"{number % 4},{number % 5},{['train', 'test'][number % 2]},{number % 3}" for number in range(20)]
    tables = []
    for odd_rows in ([], [f"odd,1,{part},{block}"]):
        path = tmp_path / "parts.csv"
        path.write_text("\n".join(["user,item,split,block", *rows, *odd_rows]) + "\n")
        tables.append(read(path))
    assert rows_of_others(tables[0]) == rows_of_others(tables[1])


@pytest.mark.parametrize("value", ["train", "north"])
def test_a_column_called_part_has_to_be_named(value: str, tmp_path: Path) -> None:
    path = tmp_path / "parts.csv"
    path.write_text(f"user,item,part\n0,1,south\n1,2,{value}\n")
    assert read(path).split is None
    with pytest.raises(TacitaError, match="no row can be read") if value == "north" else _nothing_raised():
        assert len(read(path, columns={"part": "part"}).user) == 1


class _nothing_raised:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("odd", [{"user": 7.5, "item": 1.0}, {"user": None, "item": 2.0}, {"user": 8.0, "item": None}])
def test_numbers_with_fractions_rename_nobody_else(odd: dict[str, float | None], tmp_path: Path) -> None:
    """One id with a fraction made 1 of all others 1.0, which no catalogue has."""
    rows: list[dict[str, float | None]] = [
        {"user": float(number % 4), "item": float(number % 5)} for number in range(8)
    ]
    path = tmp_path / "typed.parquet"
    clean = pl.DataFrame(rows)
    mixed = pl.DataFrame([odd, *rows])
    expected = rows_of_others(read_frame(clean, {}, None, None, row_by_row=True))
    assert len(expected) == 8
    assert rows_of_others(read_frame(mixed, {}, None, None, row_by_row=True)) == expected
    mixed.write_parquet(path)
    assert rows_of_others(read(path)) == expected


@pytest.mark.parametrize(
    "odd",
    [
        "nonsense",
        "[1, 2]",
        '{"user": 5.5, "item": {"a": 1}, "time": "x"}',
        '{"item": "1"}',
        r'{"user": "\ud800", "item": "1", "time": 3}',
    ],
)
def test_json_lines_are_read_one_by_one(odd: str, tmp_path: Path) -> None:
    rows = [json.dumps({"user": number % 4, "item": str(number % 5), "time": 9 + number}) for number in range(8)]
    columns = {"user": "user", "item": "item", "timestamp": "time"}
    tables = []
    for odd_rows in ([], [odd]):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join([*odd_rows, *rows]) + "\n")
        tables.append(read(path, columns=columns))
    assert rows_of_others(tables[0]) == rows_of_others(tables[1])
    assert len(tables[0].user) == 8
    with pytest.raises(TacitaError, match="--columns user"):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("method", ["tally", "dpps", "fedavg"])
def test_runs_under_a_budget_read_row_by_row(method: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "odd.csv", ODD_ROWS["few fields"])
    settings: dict[str, Any] = {"data": str(path), "catalogue": "from-data", "split": {"kind": "random"}}
    settings["evaluate"] = {"k": [2], "select_by": "ndcg@2"}
    if method == "tally":
        settings |= {"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0}}
    else:
        settings |= {"method": method}
    config = validate_model(RunConfig, settings, "a test")
    if method == "fedavg":
        with pytest.raises(TacitaError, match="2 fields instead of 4"):
            load_run_table(config, Machine(1))
        return
    federation = assemble_federation(config, Machine(1))
    assert sorted(federation.stream.user_ids) == ["0", "1", "2", "3"]
    assert "not counted" in " ".join(load_run_table(config, Machine(1)).table.notes)
