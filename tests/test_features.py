"""What sources say of their items: genres, years and words from the files that people and publishers have."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from tacita.core.config import SplitConfig
from tacita.core.errors import TacitaError
from tacita.data.features import ItemFeature, load_item_features, load_stream_features
from tacita.data.sources import load_interactions
from tacita.data.splits import split

TOY = ItemFeature(("Animation", "Children's", "Comedy"), 1995, "Toy Story")
DATA = Path(os.environ.get("TACITA_DATA", ""))
needs_ml100k = pytest.mark.skipif(not (DATA / "ml-100k").is_dir(), reason="needs TACITA_DATA with ml-100k")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def u_item_line(item: int, title: str, date: str, *genres: int) -> str:
    flags = ["1" if n in genres else "0" for n in range(19)]
    return "|".join([str(item), title, date, "", "http://x", *flags]) + "\n"


@pytest.mark.parametrize(
    ("main", "side_output", "text"),
    [
        ("interactions.csv", "items.csv", "item,title,genres\n1,Toy Story (1995),Animation|Children's|Comedy\n"),
        ("ratings.dat", "movies.dat", "1::Toy Story (1995)::Animation|Children's|Comedy\n2::Heat (1995)::Action\n"),
        ("ratings.csv", "movies.csv", "movieId,title,genres\n1,Toy Story (1995),Animation|Children's|Comedy\n"),
        ("u.data", "u.item", u_item_line(1, "Toy Story (1995)", "01-Jan-1995", 3, 4, 5) + u_item_line(2, "?", "")),
        (
            "ml.inter",
            "ml.item",
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
            "1\tToy Story\t1995\tAnimation Children's Comedy\n",
        ),
    ],
)
def test_item_files_of_publishers_are_understood(tmp_path: Path, main: str, side_output: str, text: str) -> None:
    write(tmp_path / main, "1\t1\t5\t10\n")
    write(tmp_path / side_output, text)
    item_features = load_item_features(str(tmp_path / main), ["1", "9"])
    assert item_features is not None
    assert item_features.by_item == {"1": TOY}
    assert side_output in item_features.columns_note


def test_a_table_of_your_own_may_say_it_itself_row_by_row(tmp_path: Path) -> None:
    rows = "user,item,genre,year\nu,a,rock; pop,1999\nv,a,other,2001\nv,b,,\nw,c,jazz,\n"
    item_features = load_item_features(str(write(tmp_path / "plays.csv", rows)), ["a", "b", "c"])
    assert item_features is not None
    assert item_features.by_item == {"a": ItemFeature(("rock", "pop"), 1999), "c": ItemFeature(("jazz",))}


def test_lists_and_several_texts_are_read_from_json_and_parquet(tmp_path: Path) -> None:
    line = {
        "asin": "B1",
        "title": "Safety  gloves",
        "brand": "Acme",
        "description": ["Strong.", "Blue."],
        "categories": [["Industrial", "Gloves"], ["Safety", "Gloves"]],
    }
    expected = ItemFeature(("Industrial", "Gloves", "Safety"), None, "Safety gloves\nAcme\nStrong. Blue.")
    as_json = write(tmp_path / "meta.jsonl", json.dumps(line) + "\n")
    pl.DataFrame([line]).write_parquet(tmp_path / "meta.parquet")
    for path in (as_json, tmp_path / "meta.parquet"):
        item_features = load_item_features(str(path), ["B1"])
        assert item_features is not None
        assert item_features.by_item == {"B1": expected}


def test_columns_can_be_named_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "wares.csv", "sku,kind\n7,tools\n"))
    assert load_item_features(path, ["7"]) is None
    item_features = load_item_features(path, ["7"], columns={"genres": "kind"})
    assert item_features is not None
    assert item_features.by_item == {"7": ItemFeature(("tools",))}
    with pytest.raises(TacitaError, match=r"wares\.csv: no column 'kinds' to be the genres; did you mean 'kind'\?"):
        load_item_features(path, ["7"], columns={"genres": "kinds"})
    with pytest.raises(TacitaError, match="unknown column role 'genre'; did you mean 'genres'"):
        load_item_features(path, ["7"], columns={"genre": "kind"})


@pytest.mark.parametrize(
    ("title", "year", "text"),
    [
        ("Seven (Se7en) (1995)", 1995, "Seven (Se7en)"),
        ("2001: A Space Odyssey (1968)", 1968, "2001: A Space Odyssey"),
        ("Babylon 5", None, "Babylon 5"),
        ("Fawlty Towers (1975-1979)", 1975, "Fawlty Towers"),
        ("Part III (1995) (V)", 1995, "Part III (V)"),
    ],
)
def test_a_year_behind_the_title_is_a_year(tmp_path: Path, title: str, year: int | None, text: str) -> None:
    path = write(tmp_path / "items.csv", f'item,title\n1,"{title}"\n')
    item_features = load_item_features(str(path), ["1"])
    assert item_features is not None
    assert item_features.by_item == {"1": ItemFeature((), year, text)}


def test_a_source_that_says_nothing_gives_none_and_a_stream_of_it_a_sentence(tmp_path: Path) -> None:
    plain = "user,item,rating\n" + "".join(f"u{n % 5},i{n % 7},{1 + n % 5}\n" for n in range(35))
    path = write(tmp_path / "clicks.csv", plain)
    assert load_item_features(str(path), ["i1"]) is None
    assert load_item_features("synthetic:users=5,items=5", ["i1"]) is None
    with pytest.raises(TacitaError, match=r"dataset clicks says nothing of its items; put a file items\.csv"):
        load_stream_features(split(load_interactions(str(path)), SplitConfig(kind="random")))


def test_features_are_read_only_when_asked_for(tmp_path: Path) -> None:
    rows = "".join(f"u{n % 5},i{n % 7},{n}\n" for n in range(35))
    write(tmp_path / "interactions.csv", "user,item,timestamp\n" + rows)
    items = tmp_path / "items.csv"
    write(items, "item,genres\ni1,rock\n")
    stream = split(load_interactions(str(tmp_path / "interactions.csv")), SplitConfig(kind="random"))
    assert stream.items_from == items
    write(items, "item,genres\ni1,jazz\n")
    assert load_stream_features(stream).by_item == {"i1": ItemFeature(("jazz",))}


@needs_ml100k
def test_ml100k_has_eighteen_genres_and_a_year_for_all_but_the_unknown_movie() -> None:
    table = load_interactions("ml-100k")
    item_features = load_item_features("ml-100k", table.item_ids)
    assert item_features is not None
    assert item_features.by_item["1"] == TOY
    assert set(table.item_ids) - item_features.by_item.keys() == {"267"}
    assert all(entry.year and 1900 < entry.year < 1999 for entry in item_features.by_item.values())
    counts = Counter(genre for entry in item_features.by_item.values() for genre in entry.genres)
    assert len(counts) == 18
    assert counts["Drama"] == 725  # as the publisher's u.item counts them
    with gzip.open(DATA / "ml-100k" / "items.csv.gz", "rt", encoding="utf-8") as file:
        assert sum("Drama" in line.rpartition(",")[2] for line in file) == 725
