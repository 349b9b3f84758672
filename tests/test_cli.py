"""Every verb as people use it: what it prints, and one plain sentence with exit code 2 for every way to be wrong."""

from __future__ import annotations

import contextlib
import errno
import gzip
import html
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup, TyperOption

import tacita
from helpers.command_line import (
    SMALL_DATA,
    CommandOutput,
    _isolated_folder,  # noqa: F401  (a fixture that every test here uses)
    assert_one_sentence,
    assert_refused,
    call,
    hash_folder,
)
from tacita.cli import app, console, entry, time_left
from tacita.cli.options import merge_settings
from tacita.core import files
from tacita.core.errors import TacitaError
from tacita.kernels.threads import max_threads
from tacita.research.experiments.tuning import build_tuning_config
from tacita.runs import serving

REAL = os.environ.get("TACITA_DATA", "")
FAST = ("--rounds", "3", "--set", "evaluate.controls=false", "--quiet")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with controls; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tacita.train(data=SMALL_DATA, train={"rounds": 3}, out=folder)
    return folder


@pytest.fixture
def copied(finished: Path) -> Path:
    return Path(shutil.copytree(finished, "run"))


Row = tuple[Any, ...]
HEAD = ("user", "item", "rating", "timestamp")


def rows_of(n: int = 400, users: int = 20, items: int = 30) -> list[Row]:
    rng = random.Random(5)
    return [(f"u{rng.randrange(users)}", f"i{rng.randrange(items)}", rng.randrange(1, 6), 1000 + t) for t in range(n)]


def write(name: str, rows: list[Row], head: tuple[str, ...] = HEAD, separator: str = ",") -> str:
    lines = [separator.join(map(str, row)) for row in [head, *rows]]
    Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name


# Help


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            yield from leaves(below, (*path, name))


COMMANDS = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_renders_in_80_columns_with_examples(path: tuple[str, ...]) -> None:
    output = call(*path, "--help")
    assert (output.code, output.err) == (0, "")
    assert max(len(line.rstrip()) for line in output.out.splitlines()) <= 80
    assert "`" not in output.out
    examples = re.findall(r"`(tacita[^`]*)`", COMMANDS[path].callback.__doc__ or "") if COMMANDS[path].callback else []
    flat = " ".join(output.out.split())
    for example in examples:
        assert " ".join(example.split()) in flat
    if not isinstance(COMMANDS[path], TyperGroup):
        assert examples, "every verb shows an example"


@pytest.mark.parametrize("path", [p for p, c in COMMANDS.items() if not isinstance(c, TyperGroup)], ids=" ".join)
def test_examples_use_options_that_exist(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    for example in re.findall(r"`(tacita[^`]*)`", command.callback.__doc__ or ""):
        words = shlex.split(example)[1:]
        assert tuple(words[: len(path)]) == path
        command.make_context("tacita", words[len(path) :])


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    options = [p for p in COMMANDS[path].params if isinstance(p, TyperOption)]
    silent = [p.name for p in options if not p.help]
    assert silent == [] or path[:1] in (("reproduce",), ("tune",))


@pytest.mark.parametrize("arguments", [[], ["data"], ["bench"]], ids=str)
def test_a_command_alone_shows_its_help(arguments: list[str]) -> None:
    output = call(*arguments)
    assert any(head in output.out + output.err for head in ("Commands", "Train and recommend"))
    assert "Traceback" not in output.err


def test_help_names_the_models_and_methods_there_are() -> None:
    from tacita.methods import list_preset_names
    from tacita.models.base import list_backbones

    report = " ".join(call("train", "--help").out.split())
    assert all(name in report for name in list_backbones())
    named = re.search(r"fedavg, [a-z0-9, ]+", report)
    assert named is not None
    assert {n.strip() for n in named[0].split(",")} - {""} <= set(list_preset_names())


def test_version() -> None:
    assert call("--version") == CommandOutput(0, f"{tacita.__version__}\n", "")


HEAVY = ("numba", "torch", "polars", "scipy", "numpy", "matplotlib", "flwr", "optuna", "pydantic")


@pytest.mark.parametrize("words", [["--help"], ["server", "--help"], ["tune", "--help"], ["--version"]], ids=str)
def test_help_needs_none_of_the_heavy_libraries(words: list[str]) -> None:
    script = f"""
import sys
from tacita.cli import main
try:
    main({words!r})
finally:
    print([one for one in {HEAVY!r} if one in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_of_tally_and_a_node_do_without_torch(tmp_path: Path) -> None:
    """It takes two seconds to load, which every command of a node's owner would wait."""
    script = """
import sys
import tacita.live.node.question_handler, tacita.live.server.coordinator
from tacita.cli import main
try:
    main(["train", "--data", "synthetic:users=30,items=20,per_user=8", "--backbone", "tally", "--out", "run"])
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# Training


def test_train_writes_the_whole_folder_and_shows_the_controls() -> None:
    output = call("train", "--data", SMALL_DATA, "--rounds", "3", "--out", "runs/x")
    assert output.code == 0
    names = {"config.toml", "events.jsonl", "result.json", "server.safetensors", "clients.safetensors", "ids.json"}
    assert {path.name for path in Path("runs/x").iterdir()} == names | {"report.html"}
    for word in ("ndcg@20", "recall@20", "fedavg", "random", "most popular", "no federation", "centralised linear"):
        assert word in output.out
    assert "mean 1–3" in output.out
    assert "Report: runs/x/report.html" in output.err
    assert max(map(len, output.out.splitlines())) <= 80


def test_result_holds_what_was_promised(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert len(result["blocks"]) == 4
    for n, block in enumerate(result["blocks"]):
        assert block["block"] == n
        assert 0 <= block["ndcg@20"] <= 1
        assert 0 <= block["recall@20"] <= 1
        assert 1 <= block["best_round"] <= block["rounds"] <= 3
        assert block["new"]["users"] + block["returning"]["users"] == block["users"]
        assert {"ndcg@20", "recall@20"} <= block["new"].keys() & block["returning"].keys()
    later = [b["ndcg@20"] for b in result["blocks"][1:]]
    assert result["mean"]["ndcg@20"] == pytest.approx(sum(later) / 3)
    assert set(result["controls"]) == {"random", "popular", "alone", "linear"}
    for control in result["controls"].values():
        assert len(control["blocks"]) == 4
        assert set(control["mean"]) == set(result["mean"])
    assert result["bytes"]["up_per_client_and_round"] > 0
    assert result["bytes"]["down_per_client_and_round"] > 0
    assert result["data"]["users"] == 60
    assert "seconds" not in json.dumps(result)


def test_json_is_the_result_alone(finished: Path) -> None:
    output = call("train", "--data", SMALL_DATA, "--rounds", "3", "--out", "x", "--json")
    assert (output.code, output.err) == (0, "")
    assert json.loads(output.out) == json.loads((finished / "result.json").read_text())


def test_threads_and_chunk_change_no_byte(finished: Path) -> None:
    for threads, chunk in ((1, 64), (min(2, max_threads()), 1024)):
        more = ("--threads", str(threads), "--chunk", str(chunk), "--out", f"x{chunk}", "--quiet")
        assert call("train", "--data", SMALL_DATA, "--rounds", "3", *more).code == 0
        assert Path(f"x{chunk}/result.json").read_bytes() == (finished / "result.json").read_bytes()


def test_quiet_prints_only_the_result() -> None:
    output = call("train", "--data", SMALL_DATA, *FAST, "--out", "x")
    assert output.code == 0
    assert output.err == ""
    assert "fedavg" in output.out


def test_settings_come_from_the_file_then_flags_then_set() -> None:
    Path("c.toml").write_text(f'data = "{SMALL_DATA}"\nseed = 5\n[train]\nrounds = 9\nbatch_size = 7\nnegatives = 1\n')
    args = ("c.toml", "--rounds", "8", "--set", "train.rounds=2", "--set", "train.batch_size=6", "--quiet")
    assert call("train", *args, "--set", "evaluate.controls=false", "--set", "method=ft", "--out", "x").code == 0
    config = serving.open_run(Path("x")).config
    assert (config.seed, config.method, config.evaluate.controls) == (5, "ft", False)
    assert (config.train.rounds, config.train.batch_size, config.train.negatives) == (2, 6, 1)


def test_runs_without_a_name_get_a_new_folder_each() -> None:
    for _ in range(2):
        assert call("train", "--data", SMALL_DATA, *FAST).code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["synthetic-mf-fedavg-1", "synthetic-mf-fedavg-1-2"]


def test_many_blocks_become_rows_that_fit() -> None:
    data = "synthetic:users=60,items=40,per_user=25"  # enough for a test in each block
    output = call("train", "--data", data, "--rounds", "1", "--set", "split.n_blocks=9", "--out", "x")
    assert output.code == 0
    assert "mean 1–8" in output.out
    assert max(map(len, output.out.splitlines())) <= 80
    assert "…" not in output.out


CSVS: dict[str, Callable[[], str]] = {
    "text ids and titles": lambda: write(
        "t.csv",
        [(f"Zoë {a}", f"größe/{b}", c, d, f"[bold]{b}[/x]") for a, b, c, d in rows_of()],
        ("customer", "sku", "stars", "timestamp", "title"),
    ),
    "semicolons": lambda: write("s.csv", rows_of(), separator=";"),
    "no timestamps": lambda: write("n.csv", [r[:2] for r in rows_of()], HEAD[:2]),
    "brackets in the name": lambda: write("[x].csv", rows_of()),
}


@pytest.mark.parametrize("kind", CSVS)
def test_own_files_train_and_recommend(kind: str) -> None:
    source = CSVS[kind]()
    output = call("train", "--data", source, "--rounds", "2", "--out", "o[/x]")
    assert output.code == 0, output.err
    user = json.loads(Path("o[/x]/ids.json").read_text())["users"][0]
    report = call("recommend", "--run", "o[/x]", "--user", user, "-k", "3")
    assert report.code == 0, report.err
    assert user in report.out
    if "titles" in kind:
        assert "größe/" in report.out
        assert "[bold]" in report.out


def test_tiny_table_is_refused_with_a_remedy_that_works() -> None:
    source = write("five.csv", rows_of(5))
    assert_refused(f"train --method fedavg --data {source}", "5 interactions are too few", "split.n_blocks")
    args = ["train", "--data", source, "--rounds", "1", "--set", "split.n_blocks=1", "--out", "x"]
    assert_refused(args, "evaluate.k", "catalogue", "--set evaluate.k=[2] --set evaluate.select_by=ndcg@2")
    output = call(*args, "--set", "evaluate.k=[2]", "--set", "evaluate.select_by=ndcg@2")
    assert output.code == 0
    assert "Nobody could be tested in block 0" in output.out


# Bad data


def test_files_that_hold_no_table() -> None:
    Path("empty.csv").touch()
    write("header.csv", [])
    Path("binary.csv").write_bytes(random.Random(1).randbytes(3000))
    Path("half.csv.gz").write_bytes(gzip.compress(b"user,item\n" + b"1,2\n" * 5000)[:40])
    assert_refused("train --data missing.csv", "missing.csv", "neither a file nor a named dataset")
    assert_refused("train --data empty.csv", "empty.csv", "empty")
    assert_refused("train --data header.csv", "header.csv", "no rows")
    assert_refused("train --data binary.csv", "binary.csv", "binary")
    assert_refused("train --data half.csv.gz", "half.csv.gz", "damaged")
    assert_refused("train --data .", "folder")


BAD_ROWS: dict[str, tuple[list[Row], tuple[str, ...]]] = {
    "a word for a rating": ([("u1", "i1", "five", 3)], ("line 402", "five", "rating")),
    "nan for a time": ([("u1", "i1", 3, "nan")], ("line 402", "nan", "timestamp")),
    "no user": ([("", "i1", 3, 4)], ("line 402", "user")),
    "a field too many": ([("u1", "i1", 3, 4, 5)], ("line 402", "5 fields")),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_named(kind: str) -> None:
    rows, words = BAD_ROWS[kind]
    assert_refused(f"train --method fedavg --data {write('x.csv', rows_of() + rows)}", "x.csv", *words)


BAD_TABLES: dict[str, tuple[Callable[[Row], Row], tuple[str, ...]]] = {
    "every time the same": (lambda r: (*r[:3], 5), ("all timestamps", "the same", "split.kind = 'random'")),
    "every time nan": (lambda r: (*r[:3], "NaN"), ("line 2", "timestamp")),
    "one user": (lambda r: ("u", *r[1:]), ("1 user",)),
    "one item": (lambda r: (r[0], "i", *r[2:]), ("1 item",)),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_table_that_cannot_be_used(kind: str) -> None:
    change, words = BAD_TABLES[kind]
    assert_refused(f"train --method fedavg --data {write('x.csv', [change(r) for r in rows_of()])}", "x", *words)


def test_columns() -> None:
    write("x.csv", rows_of())
    write("abc.csv", [r[:3] for r in rows_of()], ("a", "b", "c"))
    assert_refused("train --data abc.csv", "abc.csv", "--columns user=...,item=...")
    assert_refused("train --data x.csv --columns user=usr", "no column 'usr'", "did you mean 'user'?")
    assert_refused("train --data x.csv --columns usr=user", "'usr'", "did you mean 'user'?")
    assert_refused("train --data x.csv --columns user", "--columns 'user' is not role=name")
    assert_refused(f"train --data {SMALL_DATA} --columns user=a", "--columns is for files")
    output = call("train", "--data", "abc.csv", "--columns", "user=a, item = b", *FAST, "--out", "o")
    assert output.code == 0


def test_names_and_specs() -> None:
    assert_refused("train --data ml-100j", "did you mean 'ml-100k'?")
    assert_refused("train --data ''", "neither a file nor a named dataset")
    assert_refused("train --data synthetic:user=3", "did you mean 'users'?")
    assert_refused("train --data synthetic:users=many", "users='many'")
    assert_refused("train --data ml-1m", "ml-1m was not found", "--data-dir")
    assert_refused("train --data ml-1m --data-dir nowhere", "--data-dir", "nowhere")
    assert_refused("data get ml-100", "did you mean 'ml-100k'?")


def test_damaged_checksum_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "ml-1m").mkdir(parents=True)
    (tmp_path / "data" / "ml-1m" / "interactions.csv.gz").write_bytes(gzip.compress(b"user,item\n1,2\n"))
    assert_refused(["train", "--data", "ml-1m", "--data-dir", str(tmp_path / "data")], "damaged", "SHA-256")
    monkeypatch.setenv("TACITA_DATA", str(tmp_path / "data"))
    assert_refused("data describe ml-1m", "damaged", "SHA-256")
    cached = tmp_path / "cache" / "ml-100k"
    cached.mkdir(parents=True)
    (cached / "ml-100k.inter").write_text("user_id:token\titem_id:token\n1\t2\n")
    (cached / "ml-100k.item").write_text("item_id:token\n2\n")
    (cached / "sha256.json").write_text(json.dumps({"ml-100k.inter": "0" * 64, "ml-100k.item": "0" * 64}))
    assert_refused("train --data ml-100k", "ml-100k.inter", "damaged", "tacita data get ml-100k")


# Bad settings


SETTINGS: list[tuple[str, tuple[str, ...]]] = [
    ("evaluate.k=[200]", ("evaluate.k = 200", "catalogue of 40 items")),
    ("evaluate.k=[0]", ("evaluate.k = 0",)),
    ("evaluate.k=[]", ("evaluate.k",)),
    ("evaluate.k=5", ("evaluate.k", "list")),
    ("evaluate.k=[5,", ("evaluate.k", "TOML")),
    ("evaluate.select_by=ndcg@200", ("evaluate.select_by", "catalogue of 40 items")),
    ("evaluate.select_by=ndgc@20", ("ndgc@20",)),
    ("evaluate.metrics=[]", ("evaluate.metrics",)),
    ('evaluate.metrics=["ndgc"]', ("evaluate.metrics", "ndgc", "ndcg")),
    ("evaluate.controls=maybe", ("evaluate.controls", "maybe")),
    ("evaluate.item_table=personal --set train.silos=3", ("evaluate.item_table", "train.silos")),
    ("train.rouns=3", ("unknown key 'train.rouns'", "did you mean 'train.rounds'?")),
    ("rounds=3", ("did you mean 'train.rounds'?",)),
    ("train.rounds=many", ("train.rounds", "many")),
    ("train.rounds=", ("train.rounds",)),
    ("train.rounds", ("is not key=value",)),
    ("=3", ("is not key=value",)),
    ("train..rounds=3", ("is not key=value",)),
    ("parts.fru.keep=0.3", ("by the part's name", "dpps.clip=1")),
    ("backbone.name=tally --set privacy.epsilon=4 --set backbone.min_item=9", ("backbone.min_item", "cuts nothing")),
    ("backbone.name=tally --set backbone.lift=2", ("'lift' in backbone 'tally' must be at most 1.0 or 'learn'",)),
    ("backbone.name=tally --set backbone.recency=new", ("'recency'", "must be a number or 'learn', not 'new'.")),
    ("backbone.name=tally --set backbone.lift=0.2", ("backbone.lift has no meaning", "backbone.solve = 'filter'")),
    ("train=3", ("'train'",)),
    ("data.x=3", ("data.x", "'data'")),
    ("train.batch_size=2.5", ("train.batch_size", "2.5")),
    ("train.stepper=fused --set train.optimiser=adam", ("fused", "train.stepper")),
    ("split.kind=blcks", ("split.kind", "blocks")),
    ("split.k_core=900", ("900-core", "split.k_core")),
    ("split.min_rating=3", ("no ratings", "split.min_rating")),
    ("split.base_share=1", ("split.base_share",)),
    ("split.n_blocks=900", ("too few", "split.n_blocks")),
    ("split.kind=given", ("ships no split",)),
    ("backbone.nam=mf", ("unknown key 'nam'", "backbone 'mf'")),
    ("backbone.name=nfc", ("unknown backbone 'nfc'", "did you mean 'ncf'?")),
    ("backbone.name=3", ("backbone.name",)),
    ("backbone.dimm=3", ("unknown key 'dimm'", "did you mean 'dim'?")),
    ("backbone.dim=wide", ("'dim'", "wide")),
    ("backbone=mf", ("backbone",)),
    ("method=f3rec", ("unknown method 'f3rec'", "did you mean 'f3crec'?")),
    ("parts=[{name='repaly'}]", ("unknown part 'repaly'", "did you mean 'replay'?")),
    ("parts=[{name='replay',topn=3}]", ("unknown key 'topn'", "did you mean 'top_n'?")),
    ("parts=[{name='replay',top_n=300}]", ("top_n", "40 items")),
    ("replay.topn=3", ("unknown key 'topn'", "did you mean 'top_n'?")),
    ("replay.top_n=300", ("top_n", "40 items")),
    ("parts=[{top_n=3}]", ("needs a 'name'",)),
    ("parts=[{name='replay'},{name='replay'}]", ("listed twice",)),
    ("seed=-1", ("seed", "-1")),
]


PREDICTIONS: list[tuple[str, tuple[str, ...]]] = [
    *((f"{name}={value}", (f"'{name}'", "prediction-transfer", value))
      for name in ("alpha", "beta_low", "beta_high", "swap") for value in ("-0.1", "1.1")),
    ("beta_low=0.8", ("beta_low = 0.8", "beta_high = 0.7")),
    ("most=0", ("'most'", "at least 1")),
    ("most=41", ("prediction-transfer.most = 41", "40 items")),
    ("server={name='neumv'}", ("unknown server model 'neumv'", "did you mean 'neumf'?")),
    ("server={name='tally'}", ("server model 'tally' cannot be taught", "neumf")),
    ("server={name=3}", ("server.name", "prediction-transfer")),
    ("server={lr=0.0}", ("'lr'", "server model 'neumf'")),
    ("server={layers=2}", ("unknown key 'layers'", "server model 'neumf'")),
]  # fmt: skip


@pytest.mark.parametrize(("option", "words"), PREDICTIONS, ids=[s for s, _ in PREDICTIONS])
def test_a_bad_option_of_prediction_transfer(option: str, words: tuple[str, ...]) -> None:
    part = f"parts=[{{name='prediction-transfer',{option}}}]"
    assert_refused(["train", "--data", SMALL_DATA, "--method", "fedkdrec", "--set", part], *words)


SENSELESS: list[tuple[str, tuple[str, ...]]] = [
    ("backbone.name=neumv", ("unknown backbone 'neumv'", "did you mean 'neumf'?")),
    ("backbone.name=tally", ("'tally'", "no predictions")),
    ("item_rows=side", ("says nothing of its items", "items.csv")),
    ("train.aggregator=ideal", ("train.aggregator = 'ideal'", "secure", "never summed")),
    ("train.aggregation=weighted", ("train.aggregation = 'weighted'", "never summed")),
    ("train.silos=3", ("train.silos", "one user each")),
    ("train.objective=bpr", ("train.objective = 'bpr'", "soft labels")),
    ("parts=[{name='temporal-mean'}]", ("'temporal-mean'", "'prediction-transfer' sends predictions", "leave it out")),
    ("parts=[{name='laplace-noise'}]", ("'laplace-noise'", "'prediction-transfer' sends predictions")),
    ("parts=[{name='replay'}]", ("'replay'", "'prediction-transfer' sends predictions")),
    ("train.moments=kept --set train.optimiser=adam --set train.weight_decay=0", ("train.moments", "'lazy-adam'")),
    ("method=fedmf-kd --set train.moments=kept", ("train.moments", "'fresh'")),
]


@pytest.mark.parametrize(("setting", "words"), SENSELESS, ids=[s for s, _ in SENSELESS])
def test_prediction_transfer_refuses_what_makes_no_sense_with_it(setting: str, words: tuple[str, ...]) -> None:
    sets = [part for element in ("method=fedkdrec", *setting.split(" --set ")) for part in ("--set", element)]
    assert_refused(["train", "--data", SMALL_DATA, *sets], *words)


@pytest.mark.parametrize(("setting", "words"), SETTINGS, ids=[s for s, _ in SETTINGS])
def test_a_bad_setting(setting: str, words: tuple[str, ...]) -> None:
    first, *more = setting.split(" --set ")
    sets = [part for candidate in (first, *more) for part in ("--set", candidate)]
    assert_refused(["train", "--data", SMALL_DATA, *sets], *words)


FLAGS: list[tuple[str, tuple[str, ...]]] = [
    ("--seed 1.5", ("--seed", "1.5")),
    ("--lr nan", ("lr",)),
    ("--lr inf", ("finite",)),
    ("--lr -1", ("lr", "-1")),
    ("--rounds 0", ("train.rounds", "0")),
    ("--threads 4096", ("--threads 4096",)),
    ("--threads -1", ("--threads -1",)),
    ("--chunk 0", ("--chunk 0",)),
    ("--dat x", ("no such option '--dat'", "'--data'")),
    ("--lr 1e30 --out o", ("diverged", "backbone.lr")),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS, ids=[f for f, _ in FLAGS])
def test_a_bad_flag(flags: str, words: tuple[str, ...]) -> None:
    assert_refused(["train", "--data", SMALL_DATA, *flags.split()], *words)


FILES: list[tuple[bytes, tuple[str, ...]]] = [
    (b"[train\n", ("c.toml", "not valid TOML", "line 1")),
    (b"\xff\xfe\x00", ("c.toml", "not valid TOML")),
    (b"[trian]\nrounds = 3\n", ("unknown key 'trian' in c.toml; did you mean 'train'?",)),
    (b"[train.participaton]\nrate = 0.5\n", ("did you mean 'train.participation'?",)),
    (b"'train.rounds' = 3\n", ("unknown key 'train.rounds'", "in TOML [train] and below it rounds = ...")),
    (b"[train]\nrouns = 3\n", ("unknown key 'train.rouns' in c.toml", "did you mean 'train.rounds'?")),
    (b"[train]\nrounds = 'many'\n", ("train.rounds", "c.toml", "many")),
    (b"train = 3\n", ("'train'", "c.toml")),
    (b"seed = true\n[evaluate]\nk = ['a']\n", ("c.toml",)),
    (b"[columns]\nuser = 3\n", ("columns.user", "c.toml")),
    (b"backbone = 'mf'\n", ("backbone", "c.toml")),
]


@pytest.mark.parametrize(("content", "words"), FILES, ids=[str(c) for c, _ in FILES])
def test_a_bad_config_file(content: bytes, words: tuple[str, ...]) -> None:
    Path("c.toml").write_bytes(content)
    assert_refused("train c.toml", *words)


def test_config_argument_that_is_no_file_is_refused() -> None:
    write("x.csv", rows_of())
    assert_refused("train none.toml", "no such config file: none.toml")
    assert_refused("train x.csv", "--data x.csv")
    assert_refused("train ml-100k", "--data ml-100k")


USAGE: list[tuple[str, tuple[str, ...]]] = [
    ("tran", ("no such command 'tran'", "did you mean 'train'?")),
    ("data lst", ("did you mean 'list'?",)),
    ("data get", ("missing argument 'NAME'", "tacita data get --help")),
    ("data import x.csv", ("--out",)),
    ("train a.toml b.toml", ("b.toml",)),
    ("recommend --user u1", ("--run",)),
    ("recommend --run x", ("--user",)),
    ("report", ("name one run folder",)),
    ("bench scale --users a", ("--users 'a'",)),
    ("bench scale --users 1", ("--users",)),
    ("bench rounds --repeats 0", ("--repeats",)),
    ("bench rounds --data nope", ("nope",)),
    ("bench rounds --against /nowhere", ("/nowhere", "checkout of tacita")),
    ("bench rounds --data synthetic --backbone nope", ("unknown backbone 'nope'",)),
    ("data describe nope", ("nope",)),
    ("doctor --data-dir nowhere", ("nowhere",)),
]


@pytest.mark.parametrize(("line", "words"), USAGE, ids=[u for u, _ in USAGE])
def test_a_wrong_command_line(line: str, words: tuple[str, ...]) -> None:
    assert_refused(line, *words)


@pytest.mark.parametrize(
    ("other_values", "inputs", "ours"),
    [
        ("No such option: --dat Did you mean --data?", None, "no such option '--dat'; did you mean --data?"),
        (
            "No such option: --dat (Possible options: --data, --set)",
            None,
            "no such option '--dat'; did you mean one of: '--data', '--set'?",
        ),
        ("Invalid value for '-k': 'a b' is not a valid integer.", None, "'a b' is not a valid integer; see `tacita"),
        (
            "Invalid value for '-k': Input should be a valid integer",
            "a b",
            "'a b' should be a valid integer; see `tacita",
        ),
    ],
)
def test_usage_errors_read_alike_across_typer_versions(
    other_values: str, inputs: str | None, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = SimpleNamespace(format_message=lambda: other_values, __cause__=None)
    if inputs is not None:
        error.__cause__ = SimpleNamespace(errors=lambda: [{"input": inputs}])
    assert entry._explain_usage(error) == 2
    message = capsys.readouterr().err
    assert_one_sentence(CommandOutput(2, "", message), ours)


# Run folders


def test_a_run_folder_that_exists(copied: Path) -> None:
    Path("file").touch()
    assert_refused(f"train --data {SMALL_DATA} --out run", "exists", "--resume")
    for name in ("file", "."):
        assert_refused(
            f"train --data {SMALL_DATA} --out {name}", f"{name} exists and holds no run; choose another --out."
        )
    assert_refused("demo --out run".replace("demo", f"train --data {SMALL_DATA}"), "run exists")


def test_output_folder_that_cannot_be_created_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").touch()
    assert_refused(f"train --data {SMALL_DATA} --out file/run", "cannot write file/run", "Not a directory")
    make = os.mkdir

    def read_only(path: Any, *more: Any, **named: Any) -> None:
        if "locked" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        make(path, *more, **named)

    monkeypatch.setattr(os, "mkdir", read_only)
    assert_refused(
        f"train --method fedavg --data {SMALL_DATA} --out locked/run",
        "cannot write locked/run",
        "Read-only file system",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(copied: Path) -> None:
    Path("locked").mkdir(mode=0o500)
    assert_refused(
        f"train --method fedavg --data {SMALL_DATA} --out locked/run", "cannot write locked/run", "Permission denied"
    )
    assert_refused("report run --out locked/x.html", "cannot write locked/x.html")


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_full_disk_leaves_whole_files_and_the_run_goes_on(
    finished: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The nth file to be synced does not fit: config, ids, server, clients, result, report."""
    count = 0

    def full(_: int) -> None:
        nonlocal count
        count += 1
        if count >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        output = call("train", "--data", SMALL_DATA, "--rounds", "3", "--out", "run")
    remedy = "try again" if nth <= 2 else "`tacita train --out run --resume` goes on"
    assert_one_sentence(output, "no space left to write", remedy)
    whole = ["config.toml", "ids.json", "server.safetensors", "clients.safetensors", "result.json", "report.html"]
    if nth <= 2:
        assert "--resume" not in output.err  # there is nothing to go on with
        assert list(Path.cwd().iterdir()) == []
        return
    assert {path.name for path in Path("run").iterdir()} == {"events.jsonl", *whole[: nth - 1]}
    assert call("train", "--out", "run", "--resume").code == 0
    assert Path("run/result.json").read_bytes() == (finished / "result.json").read_bytes()


def test_a_disk_that_fills_up_between_rounds(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = files.JsonLinesWriter.__init__

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            if self.tell() > 600:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data[:50])  # a disk may take a part of a line

    def small(self: files.JsonLinesWriter, path: Path) -> None:
        opened(self, path)
        self._file.close()
        self._file = Full(path, "ab")

    with monkeypatch.context() as patched:
        patched.setattr(files.JsonLinesWriter, "__init__", small)
        output = call("train", "--data", SMALL_DATA, "--rounds", "3", "--out", "run")
    assert_one_sentence(output, "no space left to write run/events.jsonl", "--resume")
    assert call("train", "--out", "run", "--resume").code == 0
    assert Path("run/result.json").read_bytes() == (finished / "result.json").read_bytes()
    assert len(Path("run/events.jsonl").read_text().splitlines()) == 12


def test_resume_with_wrong_options_is_refused(copied: Path) -> None:
    Path("empty").mkdir()
    Path("c.toml").touch()
    assert_refused("train --resume", "--resume needs --out")
    assert_refused("train --resume --out nowhere", "nowhere holds no run", "leave out --resume to start")
    assert_refused("train --resume --out empty", "empty holds no run", "leave out --resume and choose another --out")
    assert_refused("train --resume --out run --rounds 9", "run/config.toml")
    assert_refused("train --resume --out run --seed 9", "run/config.toml")
    assert_refused("train --resume --out run --set seed=9", "run/config.toml")
    assert_refused("train c.toml --resume --out run", "run/config.toml")
    with files.lock_folder(Path("run")):
        assert_refused("train --resume --out run", "another process is at work in run")


def test_resuming_a_finished_run_shows_it_again_and_mends_its_report(copied: Path, finished: Path) -> None:
    before = hash_folder(copied)
    assert call("train", "--resume", "--out", "run").code == 0
    assert hash_folder(copied) == before
    (copied / "report.html").unlink()
    (copied / "checkpoint.safetensors").touch()
    (copied / ".result.json.4242").touch()
    output = call("train", "--resume", "--out", "run", "--quiet")
    assert output.code == 0
    assert hash_folder(copied) == before


DAMAGE: list[tuple[str, str, Callable[[bytes], bytes | None], tuple[str, ...]]] = [
    ("server.safetensors", "recommend", lambda b: b[:100], ("server.safetensors", "damaged")),
    ("server.safetensors", "recommend", lambda b: b[:-8] + bytes(8), ("server.safetensors", "damaged", "checksum")),
    ("server.safetensors", "recommend", lambda b: b"", ("server.safetensors", "damaged")),
    ("server.safetensors", "recommend", lambda b: None, ("server.safetensors", "missing")),
    ("clients.safetensors", "recommend", lambda b: b[: len(b) // 2], ("clients.safetensors", "damaged")),
    ("clients.safetensors", "recommend", lambda b: None, ("clients.safetensors", "missing")),
    ("ids.json", "recommend", lambda b: b[:50], ("ids.json", "damaged")),
    ("ids.json", "recommend", lambda b: b"[]", ("ids.json", "damaged")),
    ("ids.json", "recommend", lambda b: None, ("ids.json", "missing")),
    ("result.json", "recommend", lambda b: b[:50], ("result.json", "damaged")),
    ("result.json", "recommend", lambda b: b"{}", ("result.json", "damaged")),
    ("result.json", "recommend", lambda b: b"\xff", ("result.json", "damaged")),
    ("result.json", "recommend", lambda b: None, ("not finished", "--resume")),
    ("result.json", "report", lambda b: b"{}", ("result.json", "damaged")),
    ("result.json", "report", lambda b: None, ("result.json",)),
    ("config.toml", "recommend", lambda b: b[:-3] + b"=", ("config.toml", "damaged")),
    ("config.toml", "recommend", lambda b: b[: len(b) // 2], ("config.toml", "damaged", "put it back")),
    ("config.toml", "recommend", lambda b: b"xyz = 1\n" + b, ("config.toml", "changed")),
    ("config.toml", "recommend", lambda b: b.replace(b"seed = 1\n", b"seed = 2\n", 1), ("config.toml", "changed")),
    ("config.toml", "recommend", lambda b: None, ("config.toml",)),
    ("config.toml", "report", lambda b: b[: len(b) // 2], ("config.toml", "damaged", "put it back")),
    ("config.toml", "report", lambda b: b.replace(b"seed = 1\n", b"seed = 2\n", 1), ("config.toml", "changed")),
    ("ids.json", "report", lambda b: b"[]", ("ids.json", "damaged")),
]


@pytest.mark.parametrize(("name", "verb", "change", "words"), DAMAGE, ids=[f"{d[1]} {d[0]}" for d in DAMAGE])
def test_damaged_files_of_a_run(
    copied: Path, name: str, verb: str, change: Callable[[bytes], bytes | None], words: tuple[str, ...]
) -> None:
    changed = change((copied / name).read_bytes())
    if changed is None:
        (copied / name).unlink()
    else:
        (copied / name).write_bytes(changed)
    assert_refused("recommend --run run --user u1" if verb == "recommend" else "report run --out r.html", *words)


def test_models_of_another_dataset_of_the_same_size(copied: Path) -> None:
    assert call("train", "--data", f"{SMALL_DATA},seed=9", *FAST, "--out", "other").code == 0
    for name in ("server.safetensors", "clients.safetensors"):
        content = (copied / name).read_bytes()
        shutil.copy(Path("other") / name, copied / name)
        assert_refused("recommend --run run --user u1", name, "another dataset")
        (copied / name).write_bytes(content)
    assert call("recommend", "--run", "run", "--user", "u1").code == 0


# Recommend and report


@pytest.mark.parametrize(("backbone", "read"), [("mf", None), ("tally", "known")])
def test_result_records_how_the_data_was_read(backbone: str, read: str | None) -> None:
    args = f"train --data {SMALL_DATA} --backbone {backbone} --rounds 1 --no-controls --set evaluate.read=known --out x"
    output = call(*args.split())
    assert output.code == 0, output
    assert (", tested with all that people did before the test" in " ".join(output.out.split())) == (read is not None)
    assert ("read 'known'" in html.unescape(Path("x/report.html").read_text())) == (read is not None)
    assert json.loads(Path("x/result.json").read_text())["read"] == read


def test_tally_replicates_differ_by_split_seed_not_run_seed(tmp_path: Path) -> None:
    """It draws nothing from the run's seed: other seeds are no second try, other splits are."""
    for name, seed, split in (("a", 1, 0), ("b", 2, 0), ("c", 3, 7)):
        settings = f"--seed {seed} --set split.seed={split} --set split.kind=random"
        controls = "" if name == "a" else "--no-controls"
        assert call(*f"train --data {SMALL_DATA} --backbone tally {settings} {controls} --out {name}".split()).code == 0
    output = call("report", "a", "b", "--latex", "same.tex")
    assert "these 2 runs are the same numbers: vary split.seed" in " ".join(output.err.split() + output.out.split())
    assert "pm" not in Path("same.tex").read_text()
    rows = json.loads(call("report", "a", "c", "--json").out)
    assert [(row["runs"], row["seeds"], row["splits"], row["note"]) for row in rows] == [(2, "1 3", "0 7", "")]
    assert rows[0]["ndcg@20 half-width 95"] > 0


def test_recommend_prints_a_table_and_json(finished: Path) -> None:
    output = call("recommend", "--run", str(finished), "--user", "u1", "--user", "u2", "-k", "3")
    assert (output.code, output.err) == (0, "")
    assert "for user u1" in output.out
    assert "for user u2" in output.out
    report = call("recommend", "--run", str(finished), "--user", "u1", "-k", "3", "--json")
    assert json.loads(report.out) == serving.recommend(finished, ["u1"], 3)


def test_recommend_says_when_there_are_fewer(finished: Path) -> None:
    output = call("recommend", "--run", str(finished), "--user", "u1", "-k", "40")
    assert output.code == 0
    assert re.search(r"Only \d+ items are left", output.err)
    assert call("recommend", "--run", str(finished), "--user", "u1", "-k", "40", "--seen").err == ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--user zzz", ("user 'zzz'", "60 users", "ids.json")),
        ("--user u1 --user zzz", ("user 'zzz'",)),
        ("--user u1 -k 0", ("0 items", "1 to the 40")),
        ("--user u1 -k -1", ("-1 items",)),
        ("--user u1 -k 41", ("41 items", "40")),
        ("--user u1 -k many", ("'-k'", "many")),
    ],
)
def test_recommend_refuses(finished: Path, more: str, words: tuple[str, ...]) -> None:
    assert_refused(["recommend", "--run", str(finished), *more.split()], *words)


def test_folders_that_are_no_runs() -> None:
    Path("empty").mkdir()
    assert_refused("recommend --run nowhere --user u1", "no run folder nowhere")
    assert_refused("recommend --run empty --user u1", "empty is not a run folder")
    assert_refused("report nowhere", "no run folder nowhere")
    assert_refused("report empty", "empty")


def test_report_of_two_runs(copied: Path, finished: Path) -> None:
    output = call("report", "run", str(finished), "--out", "both.html")
    assert (output.code, output.out, output.err) == (0, "", "wrote both.html\n")
    assert Path("both.html").read_text().startswith("<!doctype html>")
    assert_refused("report run --out none/x.html", "cannot write none/x.html", "no folder none")
    Path("folder.html").mkdir()
    assert_refused("report run --out folder.html", "cannot write folder.html")
    assert_refused("report run --out run", "the ending says what is written")


@pytest.mark.parametrize("fails", ["open", "write", "fsync", "replace"])
def test_a_full_disk_leaves_the_report_that_was_there(
    copied: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(io.BytesIO):
        write = full

    Path("x.html").write_text("the old one")
    with monkeypatch.context() as patched:
        if fails == "open":
            patched.setattr("builtins.open", lambda path, mode="r", *more: full() if "w" in mode else Full())
        elif fails == "write":
            patched.setattr(files, "open", lambda path, mode: Full(), raising=False)
        else:
            patched.setattr(os, fails, full)
        assert_refused("report run --out x.html", "no space left to write x.html; free some and try again.")
    assert Path("x.html").read_text() == "the old one"
    assert call("report", "run", "--out", "x.html").code == 0
    assert Path("x.html").read_text().startswith("<!doctype html>")


def test_a_report_never_takes_the_place_of_a_pipe(copied: Path) -> None:
    os.mkfifo("pipe.html")
    output = call("report", "run", "--out", "pipe.html")
    assert_one_sentence(output, "cannot write pipe.html: it is a pipe or device")
    assert Path("pipe.html").is_fifo()


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tacita", "data", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert_one_sentence(CommandOutput(done.returncode, "", done.stderr), "no space left to write the output")


# Data, bench, doctor


def test_data_list() -> None:
    output = call("data", "list")
    assert "amazon-industrial-scientific" in output.out
    assert max(map(len, output.out.splitlines())) <= 80
    assert set(json.loads(call("data", "list", "--json").out)["ml-100k"]) >= {"about", "terms", "origin"}


def test_data_describe_goes_to_standard_output() -> None:
    write("x.csv", [(*r[:3], 1_600_000_000 + r[3]) for r in rows_of()])
    output = call("data", "describe", "x.csv")
    assert output.code == 0
    liked, repeated = output.err.splitlines()
    assert repeated.startswith("repeated rows: ")
    assert (
        "every row counts as liked, whatever its rating (1 to 5); tacita train --set split.min_rating=4 keeps" in liked
    )
    assert "user=user, item=item, rating=rating, timestamp=timestamp." in output.out
    assert "rows: 400" in output.out
    assert "time range: 2020-09-13 12:43 to 2020-09-13 12:49" in output.out
    document = json.loads(call("data", "describe", "x.csv", "--json").out)
    assert (document["rows"], document["users"], document["items"]) == (400, 20, 30)
    assert document["dates"] == ["2020-09-13 12:43", "2020-09-13 12:49"]
    assert document["columns"] == {name: name for name in HEAD}
    assert document["unused columns"] == []
    assert "split.min_rating=4" in document["notes"][0]


def test_training_lists_used_skipped_and_unused_columns() -> None:
    rows = [(*r, f"{1 + n % 28:02}.09.2020") for n, r in enumerate(rows_of())]
    write("x.csv", [(u, i, r, d) for u, i, r, _, d in rows], ("user", "item", "rating", "day"))
    output = call("train", "--data", "x.csv", "--rounds", "1", "--out", "a", "--set", "split.k_core=10")
    assert output.code == 0
    lines = output.err.splitlines()
    assert lines[0] == "x.csv: comma-separated with a header; user=user, item=item, rating=rating; not used: 'day'."
    assert '--columns time=day --date-format "%d.%m.%Y" uses it.' in lines[1]
    assert lines[2].startswith("every row counts as liked, whatever its rating (1 to 5)")
    assert lines[3].startswith("repeated rows: ")
    assert lines[4].startswith("filtering: 400 rows, 20 users and 30 items became ")
    data = json.loads(Path("a/result.json").read_text())["data"]
    for step, word in zip(data["removed"], ("split.k_core", "split.repeats"), strict=True):
        assert word in step["reason"]
        assert step["reason"] in lines[4]
    assert data["removed"][0]["rows"][0] == 400
    assert data["removed"][0]["items"][1] == data["items"]
    assert "filtering" in Path("a/report.html").read_text()
    quiet = call("train", "--data", "x.csv", "--out", "b", *FAST)
    assert "liked" not in quiet.err


def test_date_and_decimal_formats_are_stored_with_the_run() -> None:
    rows = [(u, i, f"{r},5", f"{1 + n // 20:02}.09.2020") for n, (u, i, r, _) in enumerate(rows_of())]
    write("x.csv", rows, HEAD, ";")
    assert_refused("train --data x.csv --out a", "'01.09.2020'", '--date-format "%d.%m.%Y"')
    flags = ("--date-format", "%d.%m.%Y", "--decimal", ",")
    assert call("train", "--data", "x.csv", "--out", "a", *flags, *FAST).code == 0
    config = tomllib.loads(Path("a/config.toml").read_text())
    assert (config["date_format"], config["decimal"]) == ("%d.%m.%Y", ",")
    Path("a/result.json").unlink()
    assert call("train", "--out", "a", "--resume", "--quiet").code == 0
    document = json.loads(call("data", "describe", "x.csv", "--json", *flags).out)
    assert document["dates"] == ["2020-09-01 00:00", "2020-09-20 00:00"]
    assert call("data", "import", "x.csv", "--out", "y.csv", *flags).code == 0
    assert json.loads(call("data", "describe", "y.csv", "--json").out)["dates"] == document["dates"]
    assert_refused("data describe x.csv --decimal ;", "--decimal ';' is no decimal mark")


def test_data_import_is_read_back_as_it_was() -> None:
    write("x.csv", rows_of(), separator=";")
    assert call("data", "import", "x.csv", "--out", "y.csv").code == 0
    first, two = (json.loads(call("data", "describe", name, "--json").out) for name in ("x.csv", "y.csv"))
    differ = {key for key in first if first[key] != two[key]}
    assert differ <= {"name", "guessed"}
    assert_refused("data import x.csv --out y.csv", "y.csv exists")
    assert_refused("data import x.csv --out none/y.csv", "cannot write none/y.csv")


def test_data_get_finds_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data" / "lastfm-2k").mkdir(parents=True)
    write(str(tmp_path / "data" / "lastfm-2k" / "interactions.csv"), rows_of())
    output = call("data", "get", "lastfm-2k", "--data-dir", str(tmp_path / "data"))
    assert output.code == 0
    assert "lastfm-2k is ready in" in output.err


def test_bench_prints_figures_and_json() -> None:
    line = ["bench", "scale", "--users", "50,100", "--items", "30", "--participants", "10", "--repeats", "1"]
    output = call(*line)
    assert (output.code, output.err) == (0, "")
    assert "us_per_participant" in output.out
    assert [row["users"] for row in json.loads(call(*line, "--json").out)["rows"]] == [50, 100]
    document = json.loads(call("bench", "evaluate", "--data", SMALL_DATA, "--repeats", "1", "--json").out)
    assert document["users"] > 0


def test_bench_noise_requires_a_private_method() -> None:
    output = call("bench", "noise", "--data", SMALL_DATA, "--method", "fedavg")
    assert output.code == 2
    assert "use --method dpps or dp-fedavg" in output.err


@pytest.mark.parametrize("more", [[], ["--method", "dp-fedavg"], ["--backbone", "tally"]], ids=str)
def test_bench_compares_private_with_plain_rounds(more: list[str]) -> None:
    document = json.loads(call("bench", "noise", "--data", SMALL_DATA, "--repeats", "2", "--json", *more).out)
    assert document["people"] > 0
    assert len(document["plain_ms_all"]) == len(document["private_ms_all"]) == 2
    assert document["cpu_ratio"] == pytest.approx(document["private_cpu_ms"] / document["plain_cpu_ms"], rel=0.02)


def test_bench_takes_rounds_of_two_checkouts_in_turns(tmp_path: Path) -> None:
    this = str(Path(tacita.__file__).parents[1])
    document = json.loads(
        call(
            "bench", "rounds", "--data", SMALL_DATA, "--against", this, "--repeats", "1", "--threads", "1", "--json"
        ).out
    )
    assert document["same_numbers"]
    assert len(document["old_ms_all"]) == len(document["new_ms_all"]) == document["rounds"] == 10
    assert document["ratio"] == pytest.approx(document["new_ms"] / document["old_ms"], abs=0.01)
    (tmp_path / "tacita").mkdir()
    (tmp_path / "tacita" / "__init__.py").write_text("raise ValueError('too old')")
    output = call("bench", "rounds", "--data", SMALL_DATA, "--against", str(tmp_path))
    assert output.code == 2
    assert "cannot be timed: ValueError: too old" in " ".join(output.err.split())


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    output = call("doctor")
    assert (output.code, output.err) == (0, "")
    for word in ("python", "numba", "tomli-w", "compiled kernels", "tacita data get ml-100k"):
        assert word in output.out
    assert all(check["state"] in ("ok", "note") for check in json.loads(call("doctor", "--json").out))
    monkeypatch.setattr("tacita.doctor._list_required_packages", lambda: ["no-such-package"])
    output = call("doctor")
    assert output.code == 1
    assert "pip install no-such-package" in output.out


@pytest.mark.slow
@pytest.mark.skipif(not REAL or not (Path(REAL) / "ml-100k").is_dir(), reason="needs ml-100k in $TACITA_DATA")
def test_demo_runs_every_step() -> None:
    refuses_demo = call("demo", "--out", ".", "--data-dir", REAL)
    assert refuses_demo.code == 2
    assert refuses_demo.err == "tacita: . exists; choose another --out.\n"
    output = call("demo", "--out", "demo", "--data-dir", REAL)
    assert output.code == 0
    for word in ("ndcg@20: tally-order on ml-100k", "centralised linear", "F3CRec on MF", "no epsilon", "for user 196"):
        assert word in output.out
    assert "demo/report.html" in output.err
    assert output.err.splitlines()[-1].endswith("demo/demo.png")
    assert Path("demo/demo.png").read_bytes().startswith(b"\x89PNG")


# Progress


def test_progress_shows_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = partial(Console, file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(
        console, "Screen", lambda **named: terminal(**{k: v for k, v in named.items() if k != "stderr"})
    )
    monkeypatch.setattr(console, "Progress", partial(Progress, refresh_per_second=1000))
    assert call("train", "--data", SMALL_DATA, "--rounds", "20", "--out", "x").code == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"block \d/4 round \d+/20 .* rounds/s · ≤ \d:\d\d:\d\d left", shown)
    assert re.search(r"controls: .* \d:\d\d:\d\d left", shown)


def test_pace_measures_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 3.0, 3.0])
    monkeypatch.setattr(time_left, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pace = time_left.Pace()
    assert (pace.per_second, pace.format_remaining(10)) == (0.0, "")
    for done in (0, 2, 4, 6):
        pace.record(done)
    assert pace.per_second == 2.0
    assert pace.format_remaining(7200) == "1:00:00 left"


def test_progress_bar_is_silent_without_a_terminal() -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), console.show_progress("cells") as tell:
        tell(1, 3)
    assert err.getvalue() == ""


# As a program of its own


def program(*arguments: str, **named: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tacita", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **named)


def test_program_exits_with_code_2_on_errors() -> None:
    done = program("train", "--data", "missing.csv")
    out, err = done.communicate(timeout=60)
    assert_one_sentence(CommandOutput(done.returncode, out, err), "missing.csv")


def test_program_survives_a_closed_pipe() -> None:
    done = program("data", "list")
    assert done.stdout is not None
    done.stdout.close()
    assert done.wait(timeout=60) in (0, 1)
    assert done.stderr is not None
    assert "Error" not in done.stderr.read()
    done.stderr.close()


def test_ctrl_c_leaves_a_run_that_goes_on() -> None:
    done = program(
        "train", "--data", SMALL_DATA, "--rounds", "100000", "--set", "train.patience=100000", "--out", "run"
    )
    until = time.monotonic() + 300
    while not Path("run/events.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 130
    assert err.splitlines()[-1] == "tacita: stopped; a run that had begun goes on with --resume."
    assert_refused("recommend --run run --user u1", "not finished", "--resume")


def test_options_of_parts_are_set_by_the_name_of_the_part() -> None:
    sets = ["replay.top_n=3", "replay.eps=0.5", "train.rounds=2"]
    result = merge_settings(None, {"method": "f3crec"}, sets)
    assert result == {"method": "f3crec", "parts": [{"name": "replay", "top_n": 3, "eps": 0.5}], "train": {"rounds": 2}}


def test_paper_preset_is_refused_as_a_tuning_base() -> None:
    with pytest.raises(TacitaError, match="method 'fedkdrec' brings the settings of its paper along"):
        build_tuning_config(["ml-100k"], "mf", "fedkdrec", 1)
