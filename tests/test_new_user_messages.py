"""What somebody meets who is new here: data that can hardly be tested, words nearly right, folders that are no runs."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import tacita
from tacita.cli import main
from tacita.core.config import RunConfig, SplitConfig
from tacita.core.errors import TacitaError
from tacita.data.sources import load_interactions
from tacita.data.splits import split
from tacita.runs.controls import MOST_LINEAR_ITEMS

SMALL = "synthetic:users=60,items=40,per_user=12"


def call(*arguments: str, code: int = 0) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as error:
        main(list(arguments))
    assert (error.value.code or 0) == code, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def given(name: str, tested: tuple[bool, ...]) -> str:
    """A published split of ten people; test rows only in the blocks marked in `tested`."""
    rows = ["user,item,block,part"]
    for block, has_test in enumerate(tested):
        for user in range(10):
            parts = ["train"] * 4 + ["valid", "test" if has_test else "train"]
            rows += [f"u{user},i{(user * 3 + block * 5 + n) % 20},{block},{part}" for n, part in enumerate(parts)]
    Path(name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return name


FEW = ("--rounds", "2", "--set", "evaluate.k=[5]", "--set", "evaluate.select_by=ndcg@5")


# Blocks in which nobody is tested


def test_a_block_without_tests_is_a_dash_and_counts_nowhere() -> None:
    out, _ = call("train", "--data", given("x.csv", (True, False, True, True)), *FEW, "--out", "run")
    assert "Nobody could be tested in block 1" in out
    assert "mean 1" not in out
    rows = [line for line in out.splitlines() if line.startswith("│ fedavg")]
    assert rows
    assert all(re.split("[│┃]", row)[3].strip() == "–" and row.count("–") == 1 for row in rows)
    result = json.loads(Path("run/result.json").read_text())
    last = result["blocks"][-1]["on_blocks"]
    assert result["continual"]["ra"] == pytest.approx((last[0] + last[2] + last[3]) / 3)
    diagonal = [block["on_blocks"][-1] for block in result["blocks"]]
    assert result["continual"]["la"] == pytest.approx((diagonal[0] + diagonal[2] + diagonal[3]) / 3)
    page = Path("run/report.html").read_text()
    assert "mean of blocks 1–3 without 1" in page
    assert "mean 1–" not in page


def test_run_without_test_users_gets_no_good_verdict() -> None:
    out, err = call("train", "--data", given("x.csv", (False, False)), *FEW, "--out", "run")
    assert "Nobody could be tested in block 0, 1" in out
    assert "0.0000" not in out
    page = Path("run/report.html").read_text()
    for candidate in (err, page):
        assert "No control is better" not in candidate
        assert "nobody was tested" in candidate
    assert json.loads(Path("run/result.json").read_text())["continual"] == {"la": None, "ra": None, "hm": None}


# Words nearly right


@pytest.mark.parametrize(
    ("given_as", "remedy"),
    [
        ({"train.rounds": 2}, 'train={"rounds": ...}'),
        ({"train": {"participation.rate": 0.5}}, 'train={"participation": {"rate": ...}}'),
        ({"train.participaton.rate": 0.5}, 'train={"participation": {"rate": ...}}'),
        ({"backbone.lr": 0.1}, 'backbone={"lr": ...}'),
    ],
    ids=str,
)
def test_dotted_key_in_a_config_explains_toml_tables(given_as: dict[str, Any], remedy: str) -> None:
    with pytest.raises(TacitaError, match=re.escape(f"in Python write {remedy}, in TOML [")):
        tacita.train(**given_as)


@pytest.mark.parametrize("verb", [["train"], ["data", "describe"]], ids=" ".join)
def test_help_shows_every_role_of_columns(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    message = " ".join(re.sub("[│|]", " ", call(*verb, "--help")[0]).split())
    assert "user=NAME,item=NAME; also rating, time, title, block, part." in message
    assert verb != ["train"] or "(default: ml-100k)" in message


def test_a_role_named_twice_is_refused() -> None:
    message = call("data", "describe", given("x.csv", (True,)), "--columns", "user=user,user=item", code=2)[1]
    assert message == "tacita: --columns names the user twice, as 'user' and as 'item'; choose one.\n"


def test_a_date_format_without_a_column_left_for_it() -> None:
    message = call("data", "describe", given("x.csv", (True,)), "--date-format", "%Y", code=2)[1]
    assert "one of" not in message
    assert message.endswith("every column has another use: leave out --date-format.\n")


# What is said of a run


def test_resuming_a_finished_run_says_nothing_remains() -> None:
    call("train", "--data", SMALL, "--rounds", "2", "--out", "run")
    for more in ([], ["--no-controls"]):
        _, err = call("train", "--out", "run", "--resume", *more)
        assert "run was finished before: nothing was left to do.\n" in err
    assert call("train", "--out", "run", "--resume", "--quiet")[1] == ""


def test_tally_says_that_train_rounds_does_not_apply() -> None:
    message = "backbone 'tally' has its own rounds: train.rounds (--rounds) is not used.\n"
    for rounds in ("3", ""):
        flags = ["--rounds", rounds] if rounds else []
        _, err = call("train", "--data", SMALL, "--backbone", "tally", *flags, "--no-controls", "--out", f"run{rounds}")
        assert (message in err) == bool(rounds)


def test_a_method_that_takes_its_rounds_says_nothing_of_them() -> None:
    ask = ["train", "--data", SMALL, "--method", "fedkdrec", "--rounds", "2", "--no-controls", "--out", "run"]
    _, err = call(*ask)
    assert "is not used" not in err
    assert max(block["rounds"] for block in json.loads(Path("run/result.json").read_text())["blocks"]) == 2


@pytest.mark.parametrize("method", ["f3crec", "kd", "reg", "spp", "rlp2", "fedavg"])
def test_parts_that_need_an_earlier_block_say_so_where_there_is_one_block(method: str) -> None:
    """And what is said is true: every number is that of plain averaging."""
    small = ("train", "--data", SMALL, *FEW, "--no-controls")
    shorter = ["--set", "replay.top_n=20"] if method in ("f3crec", "kd") else []
    for name, more in ((method, shorter), ("ft", [])):
        _, err = call(*small, "--set", "split.kind=random", *more, "--method", name, "--out", name)
        assert ("this data has one: they change nothing." in err) == (name not in ("ft", "fedavg"))
    entry, plain = (json.loads(Path(name, "result.json").read_text())["blocks"] for name in (method, "ft"))
    assert entry == plain
    if method == "f3crec":
        assert "continual parts" not in call(*small, *shorter, "--method", method, "--out", "stream")[1]


@pytest.mark.parametrize(
    "verb",
    [["tune", "--backbone", "tally"], ["tune", "--method", "ft", "--trials", "1"], ["audit", "tally", "--brief"]],
    ids=" ".join,
)
def test_tune_and_audit_list_the_columns_they_read(verb: list[str]) -> None:
    rng = random.Random(5)
    rows = [f"u{rng.randrange(20)},i{rng.randrange(30)},{1000 + n}" for n in range(400)]
    Path("x.csv").write_text("\n".join(["user,item,timestamp", *rows]) + "\n", encoding="utf-8")
    out, err = call(*verb, "--data", "x.csv")
    read = "x.csv: comma-separated with a header; user=user, item=item, timestamp=timestamp."
    assert err.count(read) == 1
    assert read not in out
    assert "filtering: 400 rows" in err
    assert "x.csv" not in call(*verb, "--data", "x.csv", "--quiet")[1]


# What a file repeats, and what the default costs


def write_repeats(n_whole: int) -> None:
    rng = random.Random(5)
    pairs = rng.sample([(user, item) for user in range(20) for item in range(30)], 400)
    rows = [f"u{user},i{item},{1000 + n}" for n, (user, item) in enumerate(pairs)]
    user, item = pairs[0]
    rows += [*rows[:n_whole], *([f"u{user},i{item},9000"] if n_whole else [])]
    Path("x.csv").write_text("\n".join(["user,item,timestamp", *rows]) + "\n", encoding="utf-8")


def test_repeated_rows_are_counted_and_said_to_be_repeated() -> None:
    write_repeats(3)
    _, err = call("train", "--data", "x.csv", "--backbone", "tally", "--no-controls", "--out", "run")
    assert "repeated rows: 3 rows of 404 repeat a whole row of the file; 1 row with a user and item again" in err
    write_repeats(0)
    _, err = call("train", "--data", "x.csv", "--backbone", "tally", "--no-controls", "--out", "once")
    assert "repeated rows" not in err


def test_the_default_says_what_it_takes_and_how_to_choose_otherwise() -> None:
    write_repeats(0)
    _, err = call("train", "--data", "x.csv", "--no-controls", "--out", "run")
    assert re.search(r"Model: .* It takes .*[\d.]+ k?B from each client, once in a block\.", err)
    assert "Choose otherwise with `--backbone tally` (or another model) or `--method fedavg`" in err


# Reports


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    tacita.train(SMALL, backbone="tally", out=folder, quiet=True)
    return folder


@pytest.mark.parametrize(
    ("ending", "begins"),
    [
        (".html", b"<!doctype html>"),
        (".pdf", b"%PDF-"),
        (".svg", b"<?xml"),
        (".png", b"\x89PNG"),
        (".csv", b"name,method,"),
        (".tex", b"%"),
        (".md", b"| run | seeds |"),
    ],
)
def test_the_ending_says_what_a_report_is(small_run: Path, ending: str, begins: bytes) -> None:
    _, err = call("report", str(small_run), "--out", f"x{ending}")
    assert f"wrote x{ending}" in err
    content = Path(f"x{ending}").read_bytes()
    assert content.lower().startswith(begins.lower()), content[:40]
    call("report", str(small_run), "--out", f"again{ending}")
    assert Path(f"again{ending}").read_bytes() == content


@pytest.mark.parametrize("name", ["x.docx", "x", "x.xlsx"])
def test_another_ending_is_refused_in_one_sentence(small_run: Path, name: str) -> None:
    _, err = call("report", str(small_run), "--out", name, code=2)
    assert err.count("\n") == 1
    assert f"--out {name}: the ending says what is written; choose .html, .pdf, .svg or .png" in err
    assert not Path(name).exists()


def test_trials_of_tally_are_not_said_to_rise(small_run: Path) -> None:
    page = (small_run / "report.html").read_text()
    assert "a setting that was tried on the same sums" in page
    assert "should rise" not in page
    tacita.train(SMALL, method="fedavg", train={"rounds": 2}, out="rounds", quiet=True)
    page = Path("rounds/report.html").read_text()
    assert "the line should rise within a block" in page


# What the documents say


def test_the_page_of_data_says_what_happens_to_published_splits_and_controls() -> None:
    message = " ".join((Path(tacita.__file__).parents[1] / "docs/data.md").read_text(encoding="utf-8").split())
    assert f"above {MOST_LINEAR_ITEMS:,} items" in message
    assert f"without `--data` it takes `{RunConfig().data}`" in message
    assert "used as it is" not in message
    rows = [f"u{user},i{n},{'test' if n == 20 else 'train'}" for user in range(9) for n in range(21)]
    Path("x.csv").write_text("\n".join(["user,item,part", *rows, "u0,i0,train"]) + "\n", encoding="utf-8")
    block = split(load_interactions("x.csv"), SplitConfig(kind="given")).blocks[0]
    assert (block.train.counts().tolist(), block.valid.counts().tolist()) == ([18] * 9, [2] * 9)
    assert "a random tenth of each user's training rows" in message
    assert "a user's repeated item counts once in a block" in message
