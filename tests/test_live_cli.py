"""The operator's and owner's verbs, as people use and misuse them: one sentence, exit code 2, nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("cryptography", reason="keys are made with it; pip install tacita[live]")

from tacita import cli, doctor
from tacita.cli import server as cli_server
from tacita.core.errors import TacitaError
from tacita.data.columns import read_items_with_titles
from tacita.live.running import demo as live_demo
from tacita.live.running import server as live_server
from tacita.live.running.server import is_up, open_store
from tacita.live.server.store import STORE_FILE, ServerStore


def said(*words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as error:
        cli.main([str(word) for word in words])
    return int(error.value.code or 0), out.getvalue(), err.getvalue()


def refused(*words: object) -> str:
    """The one sentence of a command that cannot be done."""
    code, out, err = said(*words)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("tacita: ")
    assert err.count("\n") == 1, err
    assert err.rstrip().endswith((".", "?"))
    return err


def rows(folder: Path) -> dict[str, int]:
    """How many rows every table of a server's store has."""
    with open_store(folder) as store:
        tables = [name for (name,) in store._fetch_rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: store._fetch_rows(f"SELECT count(*) FROM {name}")[0][0] for name in tables}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server with a catalogue, and a node beside it that is not enrolled."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "items.csv").write_text("item,title\na,Apple\nb,Bread\nc,[bold]Corn\n")
    (folder / "mf.toml").write_text("[train]\nrounds = 2\n")
    assert said("server", "init", folder / "server", "--host", "127.0.0.1")[0] == 0
    assert said("server", "catalogue", "add", folder / "items.csv", "--folder", folder / "server")[0] == 0
    ca = folder / "server" / "ca.pem"
    assert said("node", "init", folder / "node", "--server", "127.0.0.1:9092", "--ca", ca)[0] == 0
    return folder


@pytest.fixture
def site(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "site")
    monkeypatch.chdir(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def up(site: Path) -> Iterator[Path]:
    """The site while some process serves it."""
    with live_server._hold_server_lock(site / "server"):
        yield site


@pytest.fixture
def enrolled(up: Path) -> Path:
    assert said("server", "enroll", "node/node.key.pub", "--name", "clinic")[0] == 0
    return up


# Making things


@pytest.mark.parametrize(
    "words",
    [
        ["server", "status"],
        ["server", "up"],
        ["server", "revoke", "a"],
        ["server", "next-block", "a"],
        ["server", "resume", "a"],
        ["server", "renew"],
        ["server", "catalogue", "add", "items.csv"],
        ["node", "run"],
        ["node", "status"],
        ["node", "recommend", "u"],
        ["node", "erase", "--all"],
    ],
)
def test_an_empty_folder_says_how_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = refused(*words)
    assert f"`tacita {words[0]} init {words[0]}`" in sentence
    assert "--folder" in sentence
    assert list(tmp_path.iterdir()) == []


def test_a_server_is_not_made_over_another_or_with_one_port(site: Path, tmp_path: Path) -> None:
    assert "server exists" in refused("server", "init")
    assert "each its own" in refused("server", "init", "other", "--port", 9000, "--link-port", 9000)
    assert "without scheme" in refused("server", "init", "other", "--name", "https://rec.example.org")
    assert not (site / "other").exists()


def test_a_node_takes_only_an_authority(site: Path) -> None:
    for wrong in ("server/server.pem", "items.csv", "missing.pem"):
        sentence = refused("node", "init", "other", "--server", "127.0.0.1:9092", "--ca", wrong)
        assert "ask the operator for the server's ca.pem" in sentence
    assert not (site / "other").exists()


@pytest.mark.parametrize("name", ["a/b", "../x", ".hidden", "", "two words", "[red]", "x" * 101])
def test_names_that_cannot_be_files_or_messages_are_refused(up: Path, name: str) -> None:
    before = rows(up / "server")
    assert "--name" in refused("server", "enroll", "node/node.key.pub", "--name", name)
    assert rows(up / "server") == before
    said("server", "enroll", "node/node.key.pub", "--name", "clinic")
    before = rows(up / "server")
    if name:  # without one the file's name is taken
        assert "--name" in refused("server", "train", "mf.toml", "--name", name)
    assert rows(up / "server") == before


# The catalogue


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("item,title\na,Apple\nb,Bread\n", [("a", "Apple"), ("b", "Bread")]),
        ("id;name\na;'A; B'\nb;\n", None),
        ('id;name\na;"A; B"\nb;\n', [("a", "A; B"), ("b", "")]),
        ("item|title\na|Apple\nb|Bread\n", [("a", "Apple"), ("b", "Bread")]),
        ("1::Apple\n2::Bread\n", [("1", "Apple"), ("2", "Bread")]),
        ("item\na\nb\na\n", [("a", ""), ("b", "")]),
        ("id\n7\n8\n", [("7", ""), ("8", "")]),
        ("a\nb\n\nc\n", [("a", ""), ("b", ""), ("c", "")]),
        ("sku,price\na,3\nb,4\n", [("a", ""), ("b", "")]),
        ("user,item,rating\nu,a,3\nu,b,4\nv,a,1\n", [("a", ""), ("b", "")]),
        ("item,title\n,none\na,x\na,y\n", [("a", "x")]),
        ("", None),
        ("  \n\n", None),
        ("item,title\n", None),
        ("item~title\na~b\n", None),
        ("code,label\na,b\n", None),
        ("item,title\na,b\nc\n", None),
    ],
)
def test_an_item_file_is_a_list_with_or_without_titles(
    tmp_path: Path, text: str, result: list[tuple[str, str]] | None
) -> None:
    path = tmp_path / "items.csv"
    path.write_text(text)
    if result is None:
        with pytest.raises(TacitaError, match=r"items.csv: .*; .*[.?]$"):
            read_items_with_titles(path)
        return
    items, guessed = read_items_with_titles(path)
    assert items == result
    assert guessed.startswith("items.csv: item=")
    assert ("no titles" in guessed) == (not any(title for _, title in result))


def test_columns_of_an_item_file_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("code,label\na,b\n")
    assert read_items_with_titles(path, {"item": "code", "title": "label"})[0] == [("a", "b")]
    assert read_items_with_titles(path, {"item": "label"})[0] == [("b", "")]
    for wrong in ({"item": "cod"}, {"user": "code"}, {"item": "3"}):
        with pytest.raises(TacitaError):
            read_items_with_titles(path, wrong)
    pl.DataFrame({"sku": [1, 2], "title": ["x", None]}).write_parquet(tmp_path / "items.parquet")
    assert read_items_with_titles(tmp_path / "items.parquet")[0] == [("1", "x"), ("2", "")]


def test_a_bad_item_file_leaves_the_catalogue_alone(site: Path) -> None:
    before = rows(site / "server")
    (site / "rubbish").write_bytes(bytes(range(256)) * 20)
    for wrong in ("missing.csv", ".", "rubbish"):
        refused("server", "catalogue", "add", wrong)
    assert rows(site / "server") == before
    (site / "more.txt").write_text("c\nd\n")
    code, out, err = said("server", "catalogue", "add", "more.txt")
    assert (code, out) == (0, "1 new item; the catalogue has 4.\n")
    assert "no titles" in err


# The wrong order


def test_train_names_the_next_missing_step(site: Path) -> None:
    assert said("server", "init", "bare")[0] == 0
    assert "catalogue add" in refused("server", "train", "mf.toml", "--folder", "bare")
    assert "no node is enrolled" in refused("server", "train", "mf.toml")
    assert said("server", "enroll", "node/node.key.pub", "--name", "clinic")[0] == 0
    assert "`tacita server up" in refused("server", "train", "mf.toml")
    assert "no run 'mf'" in refused("server", "next-block", "mf")
    assert "no run 'mf'" in refused("server", "resume", "mf")
    assert rows(site / "server")["runs"] == rows(site / "bare")["runs"] == 0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[train]\nsilos = 3\n", "silos"),
        ("[train]\nroundz = 3\n", "did you mean 'train.rounds'?"),
        ("method = 'fedavgg'\n", "did you mean 'fedavg'?"),
        ("parts = [{name = 'nope'}]\n", "unknown part"),
        ("[backbone]\nname = 'nope'\n", "unknown backbone"),
        ("seed =\n", "TOML"),
    ],
)
def test_settings_that_cannot_be_followed_make_no_run(enrolled: Path, text: str, word: str) -> None:
    (enrolled / "bad.toml").write_text(text)
    assert word in refused("server", "train", "bad.toml")
    assert rows(enrolled / "server")["runs"] == 0


def test_wrong_arguments_of_train_make_no_run(enrolled: Path) -> None:
    assert "enrol more" in refused("server", "train", "mf.toml", "--quorum", 5)
    assert "neither 'all' nor" in refused("server", "train", "mf.toml", "--quorum", "most")
    assert "is a directory" in refused("server", "train", "server")
    assert "missing.toml" in refused("server", "train", "missing.toml")
    assert rows(enrolled / "server")["runs"] == 0


def test_a_block_is_opened_when_the_one_before_is_done(enrolled: Path) -> None:
    (enrolled / "up.toml").write_text("data = 'ml-100k'\n[train]\nrounds = 2\n")
    code, _, err = said("server", "train", "up.toml", "--detach")  # named as the lock of the server is
    assert code == 0
    assert "'data' in up.toml is not used" in err
    assert "`tacita server resume up`" in refused("server", "next-block", "up")
    assert "choose another --name" in refused("server", "train", "up.toml")
    assert rows(enrolled / "server")["block_items"] == 1


def test_a_run_that_stopped_says_why_and_how_to_go_on(enrolled: Path) -> None:
    assert said("server", "train", "mf.toml", "--detach")[0] == 0
    with open_store(enrolled / "server") as store:
        store.log_event("mf", {"event": "stopped", "said": "no space left."})
    code, out, _ = said("server", "status")
    assert code == 0
    assert "stopped: no space left." in out
    with pytest.raises(TacitaError, match=r"no space left; `tacita server resume mf` tries again\.$"):
        cli_server.watch(enrolled / "server", "mf", quiet=True)
    assert said("server", "resume", "mf", "--detach")[0] == 0
    with pytest.raises(TacitaError, match="did not end"):
        cli_server.watch(enrolled / "server", "mf", quiet=True, most=0.5)


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("every node refused; one said: too few.", "tacita server resume mf"),
        ("too few; `tacita server resume`.", "resume`."),
    ],
)
def test_the_remedy_fits_the_reason(enrolled: Path, why: str, remedy: str) -> None:
    assert said("server", "train", "mf.toml", "--detach")[0] == 0
    with open_store(enrolled / "server") as store:
        store.log_event("mf", {"event": "stopped", "said": why})
    with pytest.raises(TacitaError) as error:
        cli_server.watch(enrolled / "server", "mf", quiet=True)
    assert remedy in str(error.value)
    assert "tries again" not in str(error.value)


def test_ctrl_c_leaves_the_run_to_the_server(enrolled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_server, "watch", interrupted)
    code, out, err = said("server", "train", "mf.toml")
    assert (code, out) == (130, "")
    assert err == "Run 'mf' goes on in the server; `tacita server resume mf` watches it again.\n"


def test_watch_prints_once_what_a_round_waits_for(enrolled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    news = cli_server._EventPrinter(quiet=False)
    for _ in range(3):
        news.handle_event({"event": "waiting", "answered": 1, "needed": 2}, {})
        news.handle_event({"event": "refused", "node": 7, "said": "a sum over 3 people is not sent."}, {"7": "clinic"})
    assert news.note == "1 of 2 nodes answered"
    news.handle_event({"event": "round", "round": 3}, {})
    assert (news.rounds, news.note) == (3, "")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "'clinic' sends nothing: a sum over 3 people is not sent." in lines[1]


# The demo


def test_the_demo_takes_a_new_folder_and_leaves_none_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_demo, "find_spec", lambda name: object())
    with live_demo.make_demo_folder(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with live_demo.make_demo_folder(tmp_path / "kept") as folder:
        assert folder == tmp_path / "kept"
    assert folder.is_dir()
    assert "choose another --out" in refused("demo", "--live", "--out", tmp_path / "kept")
    monkeypatch.setattr(live_demo, "find_spec", lambda name: None)
    assert "pip install tacita[live]" in refused("demo", "--live", "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_demo_gives_everything_to_the_node_where_its_person_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(f"u{n % 5}", f"i{n}", n) for n in range(20)]
    (tmp_path / "all.csv").write_text("user,item,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    read = live_demo.load_interactions
    monkeypatch.setattr(live_demo, "load_interactions", lambda name, data_dir: read(str(tmp_path / "all.csv")))
    people = live_demo.write_demo_data(tmp_path, None)
    result = []
    ends = [int(share * 20) for share in live_demo.CUTS]
    for name, some in people.files.items():
        for block, path in enumerate(some):
            lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
            assert all(people.find_home_node(user) == name for user, _, _ in lines)
            assert all(sum(int(at) > end for end in ends) == block for _, _, at in lines)
            result += [(user, item, int(at)) for user, item, at in lines]
    assert sorted(result) == sorted(rows)
    assert {(user, item) for user, items in people.first_block_items.items() for item in items} == {
        (user, item) for user, item, at in rows if at <= ends[0]
    }
    with pytest.raises(TacitaError, match="user 'u9' is not in"):
        people.find_home_node("u9")


# Status


def test_status_prints_every_state(site: Path) -> None:
    assert "is not up; start it with `tacita server up" in said("server", "status")[1]
    assert "Nodes: none; `tacita server enroll" in said("server", "status")[1]
    said("server", "enroll", "node/node.key.pub", "--name", "clinic")
    assert "let in when the server is up" in said("server", "status")[1]
    assert said("server", "revoke", "clinic")[0] == 0
    assert "Node 'clinic': revoked" in said("server", "status")[1]
    assert "was revoked already" in refused("server", "revoke", "clinic")
    assert "needs a new key" in refused("server", "enroll", "node/node.key.pub", "--name", "again")
    document = json.loads(said("server", "status", "--json")[1])
    assert (document["up"], document["catalogue"], document["nodes"][0]["online"]) == (False, 3, None)


def test_server_refuses_root_by_default(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reaches Flower's port on loopback runs code as the server's user."""
    began: list[Path] = []
    monkeypatch.setattr(
        "tacita.live.running.server._hold_server_lock", lambda folder: began.append(folder) or contextlib.nullcontext()
    )
    monkeypatch.setattr("tacita.live.running.server.ServerStore", lambda path: fail_here())
    for user, words, starts in ((0, [], 0), (0, ["--insecure-run-as-root"], 1), (1000, [], 2)):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        why = refused("server", "up", *words)
        assert ("every account on this machine root" in why) == ("--insecure-run-as-root" in why) == (starts == 0)
        assert len(began) == starts


def fail_here() -> None:
    raise TacitaError("it got this far.")


def test_readers_of_a_folder_do_not_count_as_a_running_server(site: Path) -> None:
    folder = site / "server"
    assert not is_up(folder)
    assert not (folder / "up.lock").exists()  # looking writes nothing
    with live_server._hold_server_lock(folder):
        assert is_up(folder)
        assert (
            "up already" in refused("server", "up", "--insecure-run-as-root")
            if shutil.which("flower-superlink")
            else True
        )
    with open(folder / "up.lock", "rb") as other:
        live_server.fcntl.flock(other, live_server.fcntl.LOCK_SH)
        assert not is_up(folder)


def test_node_status_is_human_readable(site: Path) -> None:
    code, out, _ = said("node", "status")
    assert code == 0
    assert "running: no; `tacita node run --folder node` starts it" in out
    assert "catalogue: not here yet" in out
    assert "serving: no model yet" in out


def test_erasing_all_users_asks_for_confirmation(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "a.csv").write_text("user,item\nu,a\n")
    said("node", "import", "a.csv")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text: False)
    assert "nothing was erased" in refused("node", "erase", "--all")
    assert json.loads(said("node", "status", "--json")[1])["users"] == 1
    assert said("node", "erase", "--all", "--yes")[0] == 0
    assert json.loads(said("node", "status", "--json")[1])["users"] == 0


# The doctor


LIVE = {"cryptography": "44.0", "flwr": "1.41.0", "httpx": "0.28", "starlette": "0.40", "uvicorn": "0.30"}


def examined(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], apart: str | None = None) -> dict[str, str]:
    """What the doctor says of the live mode, where these packages are installed: name -> state: detail."""
    stated = ["numpy>=1.26", "flwr==1.41.0; extra == 'live'", 'pytest>=8; extra == "dev"']
    stated += [f"{name}>=0.1 ; extra == 'live'" for name in LIVE if name != "flwr"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: stated)
    monkeypatch.setattr(doctor, "_find_installed_version", installed.get)
    monkeypatch.setattr("tacita.live.processes.find_user_problem", lambda name: apart)
    return {entry["what"]: f"{entry['state']}: {entry['detail']}" for entry in doctor._check_live_packages()}


def test_doctor_accepts_a_lab_without_live(monkeypatch: pytest.MonkeyPatch) -> None:
    result = examined(monkeypatch, {"cryptography": "44.0"})
    assert list(result) == ["live mode"]
    assert result["live mode"].startswith("note: ")
    assert "pip install tacita[live]" in result["live mode"]


def test_the_doctor_holds_flower_to_the_version_that_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    result = examined(monkeypatch, LIVE)
    assert all(entry.startswith("ok: ") for entry in result.values()), result
    assert len(result) == len(LIVE) + 1
    result = examined(monkeypatch, LIVE | {"flwr": "1.42.0"})
    assert result["flwr (live)"] == "fails: 1.42.0, but tacita needs exactly 1.41.0; `pip install flwr==1.41.0`"
    result = examined(monkeypatch, {name: version for name, version in LIVE.items() if name != "uvicorn"})
    assert result["uvicorn (live)"].startswith("fails: ")


def test_doctor_detects_an_older_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    examined(monkeypatch, LIVE)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["numpy>=1.26"])
    assert [(entry["state"], "install it again" in entry["detail"]) for entry in doctor._check_live_packages()] == [
        ("note", True)
    ]


def test_doctor_notes_missing_process_separation(monkeypatch: pytest.MonkeyPatch) -> None:
    result = examined(monkeypatch, LIVE, "only root can; start the node as root.")
    assert result["node's connection"].startswith("note: ")
    assert "start the node as root." in result["node's connection"]


def test_the_doctor_tries_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor._check_locks()["state"] == "ok"
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    assert doctor._check_locks()["state"] == "note"
    assert "local disk" in doctor._check_locks()["detail"]

    def unsupported(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr("fcntl.flock", unsupported)
    assert doctor._check_locks()["state"] == "note"
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_never_loads_flower() -> None:
    script = (
        "import sys; from tacita.doctor import check_installation as check; check(None); print('flwr' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("INSERT INTO meta VALUES ('format', '2')", "older tacita (format 2"),
        ("INSERT INTO meta VALUES ('format', '99')", "newer tacita (format 99"),
        ("SELECT 1", "older tacita (no format that is known"),
        ("DROP TABLE meta", "older tacita (no format that is known"),
    ],
)
def test_store_of_another_version_is_refused_with_a_remedy(tmp_path: Path, result: str, words: str) -> None:
    path = tmp_path / STORE_FILE
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("CREATE TABLE requests (id INTEGER PRIMARY KEY, run TEXT, node TEXT, request TEXT, done REAL)")
        db.execute(result)
    before = path.read_bytes()
    with pytest.raises(TacitaError) as error:
        ServerStore(path)
    sentence = str(error.value)
    assert words in sentence
    assert "update tacita" in sentence or "`tacita server init`" in sentence
    assert sentence.count("\n") == 0
    assert path.read_bytes() == before
