"""A node keeps what it acknowledged, lets out only what it may, forgets to the last byte, and answers from memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tacita.cli import node as cli_node
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays, read_json
from tacita.live.engine import unix_socket
from tacita.live.node import store_file as node_file
from tacita.live.node import verbs
from tacita.live.node.answers import AnswerRecord, QuestionNumber, ReleaseRecord
from tacita.live.node.node import Node, NodeConfig
from tacita.live.node.serving import _UserHistories
from tacita.live.node.store import InteractionRows, NodeStore
from tacita.live.node.store_file import STORE_FILE
from tacita.live.running import node_client
from tacita.live.running.daemon import Daemon, run_daemon
from tacita.live.wire import UserRequest
from tacita.runs import assembly, training
from tacita.runs.run_folder import read_lists

CONFIG = {"name": "clinic", "server": "localhost:9092"}


def sentence(error: pytest.ExceptionInfo[TacitaError], *words: str) -> None:
    text = str(error.value)
    assert text.endswith((".", "?")), text
    assert "\n" not in text
    for word in words:
        assert word in text, text


def made(folder: Path, secret: str | None = None, **more: Any) -> Path:
    Node.create(folder, validate_model(NodeConfig, {**CONFIG, **more}, "the test"), secret=secret)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NodeStore]:
    with NodeStore.create(tmp_path / STORE_FILE) as opened:
        yield opened


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose sockets have short paths."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


def rows(*pairs: str, time: float | None = None) -> list[tuple[str, str, float | None, float | None]]:
    """'u1 i2' as interactions."""
    return [(*pair.split(), time, None) for pair in pairs]  # type: ignore[misc]


# The file


def test_a_store_has_a_secret_of_its_own_that_survives(tmp_path: Path) -> None:
    secrets = []
    for name in ("a", "b"):
        with NodeStore.create(tmp_path / name) as store:
            secrets.append(store.secret)
        with NodeStore.open(tmp_path / name) as store:
            assert store.secret == secrets[-1]
    assert len(set(secrets)) == 2
    assert all(len(bytes.fromhex(entry)) == 32 for entry in secrets)
    with NodeStore.create(tmp_path / "lab", "") as store:
        assert store.secret == ""


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    folder = made(tmp_path / "node")
    assert stat.S_IMODE((folder / STORE_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711


def test_acknowledged_writes_are_durable(store: NodeStore) -> None:
    request = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "secure_delete": 1}
    with store._read_connection() as db:
        assert {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in request} == request


def test_store_opens_for_one_process_only(store: NodeStore) -> None:
    with pytest.raises(TacitaError) as error:
        NodeStore.open(store.path)
    sentence(error, "another process")
    assert node_file.is_locked(store.path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TacitaError) as error:
        NodeStore.open(tmp_path / STORE_FILE)
    sentence(error, "tacita node init")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("format", "word"), [(node_file.FORMAT + 1, "newer"), (node_file.FORMAT - 1, "older")])
def test_a_file_of_another_format_is_left_alone(tmp_path: Path, format: int, word: str) -> None:
    path = tmp_path / STORE_FILE
    NodeStore.create(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'format'", (format,))
    before = path.read_bytes()
    with pytest.raises(TacitaError) as error:
        NodeStore.open(path)
    sentence(error, word, f"format {format}")
    assert path.read_bytes() == before


OLD = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE users (id INTEGER PRIMARY KEY AUTOINCREMENT, raw TEXT NOT NULL UNIQUE, level TEXT NOT NULL);
CREATE TABLE interactions (id INTEGER PRIMARY KEY AUTOINCREMENT, user INTEGER NOT NULL, item TEXT NOT NULL, time REAL,
    rating REAL, released INTEGER NOT NULL DEFAULT 0);
CREATE TABLE consent_events (id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL, user INTEGER, item TEXT, level TEXT);
CREATE TABLE requests (id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, payload TEXT NOT NULL, user INTEGER,
    created REAL NOT NULL, sent REAL);
CREATE TABLE ledger (id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL, run TEXT, block INTEGER, round INTEGER, kind TEXT,
    users INTEGER, bytes INTEGER, sees TEXT, epsilon REAL);
INSERT INTO meta VALUES ('format', 1), ('secret', 'x');
INSERT INTO users VALUES (1, 'ann', 'learn');
INSERT INTO interactions VALUES (1, 1, 'tea', 5.0, NULL, 0), (2, 1, 'milk', 6.0, NULL, 1);
INSERT INTO requests VALUES (1, 'forget', '{}', 1, 7.0, NULL);
"""


def test_a_file_of_the_first_format_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    path = tmp_path / STORE_FILE
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(OLD)
    before = path.read_bytes()
    with pytest.raises(TacitaError) as error:
        NodeStore.open(path)
    sentence(error, "older tacita (format 1", "`tacita node export` still writes out")
    lines = node_file.salvage_lines(path, tmp_path / "out.jsonl")
    documents = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == len(documents)
    assert [(entry["user"], entry["item"]) for entry in documents if entry["kind"] == "interaction"] == [
        ("ann", "tea"),
        ("ann", "milk"),
    ]
    assert path.read_bytes() == before


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _zero(content: bytes) -> bytes:
    return content[:8192] + bytes(len(content) - 8192)


@pytest.mark.parametrize("harm", [_cut, _zero, lambda _: b"", lambda _: b"hello " * 999, lambda c: b"x" + c[1:]])
def test_a_damaged_file_is_named_and_never_touched(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    path = tmp_path / STORE_FILE
    with NodeStore.create(path) as store:
        store.add_interactions(rows(*(f"u{n} i{n}" for n in range(3000))))
    content = harm(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(TacitaError) as error:
        NodeStore.open(path)
    sentence(error, "damaged", "tacita node export")
    assert path.read_bytes() == content


def test_what_can_be_read_of_a_damaged_file_is_exported(tmp_path: Path) -> None:
    folder = made(tmp_path / "node")
    with Node.open(folder) as node:
        node.store.add_interactions(rows(*(f"u{n % 40} i{n}" for n in range(20_000)), time=1.0))
    path = folder / STORE_FILE
    content = bytearray(path.read_bytes())
    place = content.rindex(b"i10000")  # in the table, whose pages come after those of the index
    page = int.from_bytes(content[16:18], "big")
    start = place // page * page
    content[start : start + page] = os.urandom(page)
    path.write_bytes(content)
    result = node_client.ask_node(folder, "export", file=str(tmp_path / "out.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == result["lines"]
    kinds = [line["kind"] for line in lines]
    assert kinds.count("user") == 40
    assert 19_000 < kinds.count("interaction") < 20_000
    assert path.read_bytes() == bytes(content)


# Histories, consent, blocks


def test_repeated_import_adds_nothing(store: NodeStore) -> None:
    assert store.add_interactions([("u1", "a", 1.0, None), ("u1", "a", 2.0, 5.0), ("u2", "a", None, None)]) == (2, 3)
    assert store.add_interactions([("u1", "a", 2.0, 4.0), ("u2", "a", None, 1.0), ("u2", "a", None, None)]) == (0, 0)
    assert store.add_interactions([("u3", "b", None, None)]) == (1, 1)
    state = store.read_history()
    assert state.user.tolist() == [1, 1, 2, 3]
    assert state.item == ["a", "a", "a", "b"]
    np.testing.assert_array_equal(state.time, [1, 2, np.nan, np.nan])
    np.testing.assert_array_equal(state.rating, [np.nan, 5, np.nan, np.nan])
    assert store.read_history([1, 3]).user.tolist() == [1, 1, 3]


def test_a_block_is_closed_when_it_is_assigned(store: NodeStore) -> None:
    store.add_interactions(rows("u1 a", "u1 b", "u2 a"))
    assert store.assign_block("run", 0) == 3
    store.add_interactions(rows("u2 c"))
    assert store.assign_block("run", 0) == 0
    assert len(store.read_block_rows("run", 0)) == 3
    assert store.assign_block("run", 1) == 1
    assert store.read_block_rows("run", 1).item == ["c"]
    store.add_interactions(rows("u9 z"))
    assert store.assign_block("run", 0) == 0
    assert len(store.read_block_rows("run", 0)) == 3
    assert store.assign_block("other", 4) == 5
    assert store.read_history(run="run").block.tolist() == [0, 0, 0, 1, -1]


def test_private_rows_never_leave_but_serve_recommendations(store: NodeStore) -> None:
    store.add_interactions(rows("u1 a", "u1 b", "u2 a"))
    store.set_consent("u1", "a", "keep")
    assert store.assign_block("run", 0) == 2
    assert store.read_block_rows("run", 0).item == ["b", "a"]
    store.set_consent("u2", None, "keep")  # after it was assigned
    assert store.read_block_rows("run", 0).item == ["b"]
    store.set_consent("u2", "a", "learn")
    assert store.read_block_rows("run", 0).item == ["b", "a"]
    assert store.count_learning_users() == 2
    store.set_consent("u2", None, "keep")
    assert store.read_block_rows("run", 0).item == ["b"]
    store.set_consent("u1", None, "learn")  # does not take back what was said of one item
    assert store.assign_block("run", 1) == 0
    assert store.read_history([1, 2]).item == ["a", "b", "a"]
    with pytest.raises(TacitaError) as error:
        store.set_consent("u1", "a", "perhaps")
    sentence(error, "learn")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_row_is_in_one_block_and_excluded_while_private(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Against a plain model in dictionaries: imports, consent and blocks in any order."""
    users, items = st.sampled_from("uvw"), st.sampled_from("abc")
    step = st.one_of(
        st.tuples(st.just("add"), users, items, st.sampled_from([None, 1.0, 2.0])),
        st.tuples(st.just("item"), users, items, st.sampled_from(["learn", "keep"])),
        st.tuples(st.just("user"), users, st.sampled_from(["learn", "keep"])),
        st.tuples(st.just("assign"), st.integers(0, 3)),
    )
    state: dict[tuple[str, str, float | None], int] = {}
    general: dict[str, str] = {}
    single: dict[tuple[str, str], str] = {}
    latest = -1

    def may(key: tuple[str, str, float | None]) -> bool:
        return single.get(key[:2], general[key[0]]) == "learn"

    with NodeStore.create(tmp_path_factory.mktemp("s") / STORE_FILE) as store:
        for entry in data.draw(st.lists(step, max_size=25)):
            if entry[0] == "add":
                store.add_interactions([(entry[1], entry[2], entry[3], None)])
                state.setdefault(entry[1:], -1)
                general.setdefault(entry[1], "learn")
            elif entry[0] == "assign":
                expected = [key for key in state if state[key] < 0 and may(key)] if entry[1] > latest else []
                assert store.assign_block("run", entry[1]) == len(expected)
                state.update(dict.fromkeys(expected, entry[1]))
                latest = max(latest, entry[1])
            elif entry[1] in general:
                store.set_consent(entry[1], entry[2] if entry[0] == "item" else None, entry[-1])
                if entry[0] == "item":
                    single[entry[1], entry[2]] = entry[3]
                else:
                    general[entry[1]] = entry[2]
                    single = {k: v for k, v in single.items() if k[0] != entry[1] or v == "keep"}
        ids, raws = store.list_users()
        name = dict(zip(ids.tolist(), raws))
        for block in range(4):
            result = store.read_block_rows("run", block)
            reports = [
                (name[u], i, None if np.isnan(t) else t)
                for u, i, t in zip(result.user.tolist(), result.item, result.time)
            ]
            assert reports == [key for key in state if state[key] == block and may(key)]


# Rounds


def devices(n: int, value: float) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {"users": np.arange(1, n + 1), "private": np.full((n, 2), value, np.float32)}
    return {"round": value}, {**arrays, "parts/memory/item": np.arange(n * 3).reshape(n, 3)}


def test_a_round_is_one_transaction(store: NodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_interactions(rows("u1 a", "u2 b"))
    first = store.enqueue_request("unshare", "run", ["a"], 1)
    second = store.enqueue_request("forget", "run")
    model = ({"config": "{}"}, {"items": ("s1", np.ones((3, 2), np.float32)), "heads/w": ("s2", np.zeros(2))})
    release = ReleaseRecord(2, 50, "one sum over 2 people")
    store.commit_answer(
        QuestionNumber("run", 0, 1, "train"),
        AnswerRecord(
            "sha", b"reply", devices(2, 1), devices(2, 0), model, release, [UserRequest(id=first, kind="unshare")]
        ),
    )
    assert store.find_stored_reply(QuestionNumber("run", 0, 1, "train")) == ("sha", b"reply")
    assert store.find_stored_reply(QuestionNumber("run", 0, 1, "evaluate")) is None
    assert [request.id for request in store.list_requests("run") if request.sent is None] == [second]
    assert store.list_releases()[0]["epsilon"] == "no epsilon"
    kinds = [entry["kind"] for entry in store.list_releases()]

    def fails(*_: Any) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr("tacita.live.node.answers.put_model", fails)
    with pytest.raises(RuntimeError):
        store.commit_answer(
            QuestionNumber("run", 0, 2, "train"),
            AnswerRecord("x", b"y", devices(2, 2), None, model, release, [UserRequest(id=second, kind="forget")]),
        )
    now = store.load_devices("run")
    assert now is not None
    assert now[0] == {"round": 1}
    np.testing.assert_array_equal(now[1]["private"], np.ones((2, 2)))
    assert store.find_stored_reply(QuestionNumber("run", 0, 1, "train")) == ("sha", b"reply")
    assert [entry["kind"] for entry in store.list_releases()] == kinds == ["train", "request/unshare"]
    assert len([request for request in store.list_requests("run") if request.sent is None]) == 1


def test_replies_of_earlier_rounds_are_deleted(store: NodeStore) -> None:
    for block, round, kind in [(0, 1, "train"), (0, 1, "evaluate"), (0, 2, "train"), (1, 0, "train")]:
        store.commit_answer(QuestionNumber("run", block, round, kind), AnswerRecord("sha", b"r"))
        store.commit_answer(QuestionNumber("other", 0, 0, kind), AnswerRecord("sha", b"r"))
        if (block, round, kind) == (0, 1, "evaluate"):
            assert store.find_stored_reply(QuestionNumber("run", 0, 1, "train")) is not None
    assert store.find_stored_reply(QuestionNumber("run", 0, 2, "train")) is None
    assert store.find_stored_reply(QuestionNumber("run", 1, 0, "train")) == ("sha", b"r")
    assert store.find_stored_reply(QuestionNumber("other", 0, 0, "train")) == ("sha", b"r")


def test_only_changed_arrays_of_a_model_are_written(store: NodeStore) -> None:
    big = np.zeros((1000, 8), np.float32)
    store.commit_answer(
        QuestionNumber("run", 0, 0, "t"), AnswerRecord("", b"", model=({}, {"items": ("a", big), "old": ("b", big)}))
    )
    store.commit_answer(
        QuestionNumber("run", 0, 1, "t"),
        AnswerRecord("", b"", model=({"n": 1}, {"items": ("a", big + 1), "new": ("c", big)})),
    )
    result = store.load_model("run")
    assert result is not None
    note, arrays = result
    assert note == {"n": 1}
    assert arrays.keys() == {"items", "new"}
    assert not arrays["items"][1].any()  # the same digest: kept as it was
    assert store.load_model("other") is None
    assert store.find_latest_run() == "run"


def test_device_arrays_have_a_row_for_every_user(store: NodeStore) -> None:
    with pytest.raises(ValueError, match="one row"):
        store.commit_answer(
            QuestionNumber("run", 0, 0, "t"),
            AnswerRecord("", b"", now=({}, {"users": np.arange(3), "private": np.zeros((2, 4))})),
        )


def test_a_catalogue_only_grows_at_its_end(store: NodeStore) -> None:
    assert store.extend_catalogue([("a", "A"), ("b", "")])
    assert not store.extend_catalogue([("a", "A")])
    assert store.extend_catalogue([("a", "A"), ("b", "B"), ("c", "Ç")])
    with pytest.raises(TacitaError) as error:
        store.extend_catalogue([("b", ""), ("a", ""), ("c", ""), ("d", "")])
    sentence(error, "catalogue")
    assert store.read_catalogue() == [("a", "A"), ("b", "B"), ("c", "Ç")]


# Killed at any moment

IMPORTER = """
import sys
from pathlib import Path
from tacita.live.node.answers import AnswerRecord, QuestionNumber, ReleaseRecord
from tacita.live.node.store import NodeStore
import numpy as np
store = NodeStore.open(Path(sys.argv[1]))
at = len(store.list_releases())
while True:
    at += 1
    store.add_interactions([(f"u{n}", f"i{at}", float(at), None) for n in range(20)])
    ids, _ = store.list_users()
    arrays = {"users": ids, "private": np.full((len(ids), 64), at, np.float32)}
    model = ({}, {"items": (str(at), np.full((500, 64), at, np.float32))})
    answer = AnswerRecord(f"sha{at}", b"r" * at, ({"at": at}, arrays), None, model, ReleaseRecord(20, at, ""))
    store.commit_answer(QuestionNumber("run", 0, at, "train"), answer)
    print(at, flush=True)
"""


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / STORE_FILE
    NodeStore.create(path).close()
    rng = np.random.default_rng(1)
    reached = 0
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", IMPORTER, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        reached = int(child.stdout.readline())
        time.sleep(rng.uniform(0, 0.15))
        child.kill()
        word = child.stdout.read().split()
        child.wait()
        reached = int(word[-1]) if word else reached
        with NodeStore.open(path) as store:
            at = len(store.list_releases())
            assert at in (reached, reached + 1)  # one more may have been committed and not yet told
            state = store.read_history()
            assert len(state) in (20 * at, 20 * (at + 1))
            now, model = store.load_devices("run"), store.load_model("run")
            assert now is not None
            assert model is not None
            assert now[0]["at"] == at == now[1]["private"][0, 0] == model[1]["items"][1][0, 0]
            assert store.find_stored_reply(QuestionNumber("run", 0, at, "train")) == (f"sha{at}", b"r" * at)
            assert store.find_stored_reply(QuestionNumber("run", 0, at - 2, "train")) == (f"sha{at - 2}", b"")


# Taking everything back


def files_hold(folder: Path, *needles: str) -> set[str]:
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {needle for needle in needles if needle.encode() in content}


def test_erasing_leaves_no_byte(tmp_path: Path) -> None:
    folder = made(tmp_path / "node", secret="0" * 64)
    private = np.arange(8, dtype=np.float32).reshape(2, 4) + 0.123456
    with Node.open(folder) as node:
        node.store.add_interactions([(u, f"{u}-{i}", 1.0, None) for u in ("quetzal", "ordinary") for i in range(500)])
        node.set_consent("quetzal", "quetzal-3", "keep")
        node.store.enqueue_request("share", "run", ["quetzal-4"], 1)
        state = ({}, {"users": np.array([1, 2]), "private": private})
        node.store.commit_answer(
            QuestionNumber("run", 0, 0, "t"),
            AnswerRecord("", b"", now=state, best=state, release=ReleaseRecord(2, 3, "a sum")),
        )
        node.store.assign_block("run", 0)
        assert files_hold(folder, "quetzal") == {"quetzal"}
        assert node.erase_user("quetzal") == {"interactions": 500, "users": 1}
        assert files_hold(folder, "quetzal", "ordinary-7") == {"ordinary-7"}
        content = b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
        assert private[0].tobytes() not in content
        assert private[1].tobytes() in content
        for tag in ("now", "best"):
            retained_state = node.store.load_devices("run", tag)
            assert retained_state is not None
            assert retained_state[1]["users"].tolist() == [2]
        assert len(node.store.read_block_rows("run", 0)) == 500
        assert len(node.store.list_releases()) == 1
        node.store.add_interactions(rows("later x"))
        assert node.store.list_users()[0].tolist() == [2, 3]  # a number is never given twice
        assert node.erase_user(None) == {"interactions": 501, "users": 2}
        assert files_hold(folder, "ordinary") == set()
        assert node.store.load_devices("run") is None
        assert node.store.secret == "0" * 64
    assert files_hold(folder, "quetzal", "ordinary") == set()


def test_user_erased_during_a_round_stays_erased(store: NodeStore) -> None:
    store.add_interactions(rows("u1 a", "u2 a", "u3 a"))
    before = devices(3, 1)
    store.erase_user("u2")
    store.commit_answer(QuestionNumber("run", 0, 0, "train"), AnswerRecord("", b"", now=before, best=before))
    for tag in ("now", "best"):
        state = store.load_devices("run", tag)
        assert state is not None
        assert state[1]["users"].tolist() == [1, 3]
        assert state[1]["parts/memory/item"].tolist() == [[0, 1, 2], [6, 7, 8]]


def test_an_erasure_that_was_cut_short_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with NodeStore.create(tmp_path / STORE_FILE) as store:
        store.add_interactions(rows(*(f"quetzal quetzal{n}" for n in range(500)), "other x"))
        with monkeypatch.context() as patch:
            patch.setattr("tacita.live.node.store.scrub_deleted_bytes", lambda db: True)
            store.erase_user("quetzal")
        shutil.copytree(tmp_path, tmp_path / "copy", dirs_exist_ok=True)  # as a kill would have left it
    assert files_hold(tmp_path / "copy", "quetzal") == {"quetzal"}
    NodeStore.open(tmp_path / "copy" / STORE_FILE).close()
    assert files_hold(tmp_path / "copy", "quetzal", "other") == {"other"}


def test_an_export_has_everything_but_the_secret(tmp_path: Path) -> None:
    folder = made(tmp_path / "node")
    with Node.open(folder) as node:
        node.store.add_interactions([("u1", "a", 1.5, 4.0), ("ü2", "b", None, None)])
        node.set_consent("u1", "a", "keep")
        node.store.commit_answer(
            QuestionNumber("run", 0, 3, "train"), AnswerRecord("", b"", release=ReleaseRecord(2, 99, "one sum"))
        )
        secret = node.store.secret
        node.export_user_data(tmp_path / "all")
        node.export_user_data(tmp_path / "one", "ü2")
        with pytest.raises(TacitaError) as error:
            node.export_user_data(tmp_path / "all")
        sentence(error, "exists")
    lines = [json.loads(line) for line in (tmp_path / "all").read_text(encoding="utf-8").splitlines()]
    assert {"kind": "interaction", "user": "u1", "item": "a", "time": 1.5, "rating": 4.0} in lines
    assert [entry["level"] for entry in lines if entry["kind"] == "consent"] == ["keep"]
    assert [entry["people"] for entry in lines if entry["kind"] == "release"] == [2]
    assert secret not in (tmp_path / "all").read_text(encoding="utf-8")
    assert "u1" not in (tmp_path / "one").read_text(encoding="utf-8")
    assert stat.S_IMODE((tmp_path / "all").stat().st_mode) == 0o600


# The node


def test_a_config_of_another_version_or_with_a_wrong_key_gets_a_sentence(tmp_path: Path) -> None:
    folder = made(tmp_path / "node")
    text = (folder / "node.toml").read_text()
    for change, words in {
        text.replace("version = 1", "version = 2"): ("version 2", "newer"),
        text.replace("min_users = 20", "min_user = 20"): ("min_users",),
        text.replace("min_users = 20", "min_users = 0"): ("min_users", "at least 1"),
        text.replace("localhost:9092", "localhost"): ("'server'", "must be an address", "not 'localhost'"),
        "=": ("TOML",),
    }.items():
        assert change != text
        (folder / "node.toml").write_text(change)
        with pytest.raises(TacitaError) as error:
            Node.open(folder)
        sentence(error, *words)
    with pytest.raises(TacitaError) as error:
        made(folder)
    sentence(error, "exists")


def test_importing_a_file_counts_what_the_catalogue_lacks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,timestamp\nu1,a,1\nu1,b,2\nu2,zzz,3\n")
    with Node.open(made(tmp_path / "node")) as node:
        node.store.extend_catalogue([("a", "A"), ("b", "B")])
        first = node.import_file(str(tmp_path / "a.csv"))
        assert first["new interactions"] == 3
        assert first["new users"] == 2
        assert first["items not in the catalogue"] == 1
        repeat = node.import_file(str(tmp_path / "a.csv"))
        assert (repeat["new interactions"], repeat["new users"]) == (0, 0)
        with pytest.raises(TacitaError) as error:
            node.import_file(str(tmp_path / "b.csv"))
        sentence(error, "b.csv")


def test_status_states_what_the_server_sees(tmp_path: Path) -> None:
    folder = made(tmp_path / "node", min_users=3)
    with Node.open(folder) as node:
        assert "nobody" in node.describe_status()["server sees"]
        node.store.add_interactions(rows("u1 a", "u2 a"))
        assert "2 of the 3 people" in node.describe_status()["server sees"]
        assert "min_users" in (node.find_sum_refusal(2) or "")
        node.store.add_interactions(rows("u3 a"))
        assert "one sum over up to 3 people" in node.describe_status()["server sees"]
        assert node.find_sum_refusal(3) is None
        node.set_consent("u3", None, "keep")
        assert "2 of the 3 people" in node.describe_status()["server sees"]
    with Node.open(folder, insecure_single_user_uploads=True) as node:
        assert "can work out" in node.describe_status()["server sees"]
        assert node.find_sum_refusal(1) is None


def test_too_many_or_too_early_releases_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "node", min_users=1, max_releases_per_day=2, min_seconds_between_rounds=60.0)
    with Node.open(folder) as node:
        assert node.find_sum_refusal(5) is None
        node.store.commit_answer(
            QuestionNumber("run", 0, 0, "t"), AnswerRecord("", b"", release=ReleaseRecord(5, 1, ""))
        )
        assert "between answers" in (node.find_sum_refusal(5) or "")
        assert "between answers" in (node.find_sum_refusal(5, "t") or "")
        assert node.find_sum_refusal(5, "validate") is None
        node.store.commit_answer(
            QuestionNumber("run", 0, 1, "t"), AnswerRecord("", b"", release=ReleaseRecord(5, 1, ""))
        )
        assert "24 hours" in (node.find_sum_refusal(5) or "")


# Recommendations


@pytest.mark.parametrize("method", ["fedavg", "rlp2", "f3crec"])
def test_a_node_recommends_what_the_lab_would(tmp_path: Path, method: str) -> None:
    config = validate_model(
        RunConfig,
        {
            "data": "synthetic:users=40,items=30,per_user=8",
            "method": method,
            "train": {"rounds": 3},
            "split": {"n_blocks": 2},
            "evaluate": {"controls": False},
        },
        "the test",
    )
    run = training.train(config, tmp_path / "run")
    ids = read_json(run.folder / "ids.json")
    served, _ = read_arrays(run.folder / "server.safetensors")
    state, _ = read_arrays(run.folder / "clients.safetensors")
    with Node.open(made(tmp_path / "node")) as node:
        lists = read_lists(state, "history")
        node.store.add_interactions(
            [(ids["users"][u], ids["items"][i], None, None) for u, i in zip(lists.rows(), lists.ids)]
        )
        order, raws = node.store.list_users()
        number = [ids["users"].index(raw) for raw in raws]
        own = {k: v[number] for k, v in state.items() if k == "private" or k.startswith("parts/")}
        sent = {"items": ("", served["items"])}
        note = {"config": config.model_dump_json(), "block": 1, "round": 3}
        node.store.extend_catalogue([(item, f"the {item}") for item in ids["items"]])
        node.store.commit_answer(
            QuestionNumber("run", 1, 3, "t"),
            AnswerRecord("", b"", now=({}, {"users": order, **own}), model=(note, sent)),
        )
        node.store.add_interactions(rows("newcomer i1"))
        node.refresh_snapshot()
        for user in ids["users"][:10]:
            recommendations, expected = node.recommend(user, 5), run.recommend(user, 5).to_dicts()
            assert [entry["item"] for entry in recommendations] == [entry["item"] for entry in expected]
            assert [entry["score"] for entry in recommendations] == [entry["score"] for entry in expected]
            assert recommendations[0]["title"] == f"the {recommendations[0]['item']}"
        for user, word in (("newcomer", "next round"), ("nobody", "nothing of user")):
            with pytest.raises(TacitaError) as error:
                node.recommend(user)
            sentence(error, word)
        with pytest.raises(TacitaError) as error:
            node.recommend(ids["users"][0], 31)
        sentence(error, "31")
        node.store.add_interactions(
            [(ids["users"][0], result[0]["item"], None, None) for result in [node.recommend(ids["users"][0])]]
        )
        gone = node.recommend(ids["users"][0])[0]["item"]
        node.refresh_snapshot()
        assert gone not in [entry["item"] for entry in node.recommend(ids["users"][0])]


def test_a_model_that_reads_histories_serves_everybody(tmp_path: Path) -> None:
    config = RunConfig(backbone={"name": "tally"})
    backbone, _, draws = assembly.build_components(config)
    weights = np.zeros((4, 4), np.float32)
    weights[0] = [0, 1, 3, 2]
    heads = {**backbone.init_heads(draws), "weights": weights}
    with Node.open(made(tmp_path / "node")) as node:
        with pytest.raises(TacitaError) as error:
            node.recommend("u1")
        sentence(error, "first round")
        node.store.add_interactions(rows("u1 a", "u2 d", "u2 elsewhere"))
        node.store.extend_catalogue([(entry, "") for entry in "abcd"])
        note = {"config": config.model_dump_json(), "block": 0, "round": 1}
        sent = {"items": ("", np.zeros((4, backbone.item_width), np.float32))}
        sent |= {f"heads/{name}": ("", array) for name, array in heads.items()}
        node.store.commit_answer(QuestionNumber("run", 0, 1, "t"), AnswerRecord("", b"", model=(note, sent)))
        node.refresh_snapshot()
        assert [entry["item"] for entry in node.recommend("u1", 3)] == ["c", "d", "b"]
        assert "d" not in [entry["item"] for entry in node.recommend("u2", 4)]


def big_node(folder: Path, n_items: int = 100_000, n_users: int = 300) -> Path:
    """A node with a model of dimension 32 over a large catalogue."""
    rng = np.random.default_rng(1)
    made(folder)
    with NodeStore.open(folder / STORE_FILE) as store:
        observations = rng.integers(0, n_items, (n_users, 50))
        store.add_interactions([(f"u{u}", f"i{i}", None, None) for u in range(n_users) for i in observations[u]])
        store.extend_catalogue([(f"i{i}", f"title {i}") for i in range(n_items)])
        ids, _ = store.list_users()
        private = rng.normal(size=(n_users, assembly.build_components(RunConfig())[0].private_width)).astype(np.float32)
        note = {"config": RunConfig().model_dump_json(), "block": 0, "round": 1}
        items = rng.normal(size=(n_items, 32)).astype(np.float32)
        now = ({}, {"users": ids, "private": private})
        store.commit_answer(
            QuestionNumber("run", 0, 1, "t"), AnswerRecord("", b"", now=now, model=(note, {"items": ("", items)}))
        )
    return folder


def latency(ask: Callable[[str], object], n: int = 300) -> dict[str, float]:
    """Milliseconds of single questions, and those that the process was at work, asker and daemon together."""
    took, work = [], []
    for at in range(n):
        began, worked = time.perf_counter(), time.process_time()
        ask(f"u{at % 300}")
        took.append(1000 * (time.perf_counter() - began))
        work.append(1000 * (time.process_time() - worked))
    result = {"median": float(np.median(took)), "p99": float(np.percentile(took, 99)), "worst": max(took)}
    return result | {"work": float(np.median(work)), "work p99": float(np.percentile(work, 99))}


# The daemon


class Running:
    """A daemon in threads of this process, without Flower."""

    def __init__(self, folder: Path, handle: Callable[[Node, bytes], bytes] = lambda node, body: body[::-1]) -> None:
        self.folder = folder
        self.up = threading.Event()
        self.daemon: Daemon
        self.trouble: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(handle,))

    def _run(self, handle: Callable[[Node, bytes], bytes]) -> None:
        def ready(daemon: Daemon) -> None:
            self.daemon = daemon
            self.up.set()

        link = contextlib.nullcontext(SimpleNamespace(state="online", reason=""))
        try:
            run_daemon(self.folder, handle=handle, engine=lambda node, socket: link, ready=ready)
        except TacitaError as error:
            self.trouble.append(error)
            self.up.set()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self.up.wait(60)
        assert not self.trouble, self.trouble
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.stopping.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_the_owner_talks_to_the_daemon(short: Path) -> None:
    folder = made(short / "node")
    (short / "a.csv").write_text("user,item\nu1,a\nu1,b\nu2,zzz\n")
    assert node_client.ask_node(folder, "import", file=str(short / "a.csv"))["new interactions"] == 3
    with Running(folder) as running:
        for name in (node_client.SHIM_SOCKET, node_client.CONTROL_SOCKET):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert node_client.ask_node(folder, "import", file=str(short / "a.csv"))["new interactions"] == 0
        status = node_client.ask_node(folder, "status")
        assert status["running"] is True
        assert status["connection"] == "online"
        assert status["interactions"] == 3
        node_client.ask_node(folder, "consent", user="u1", item="a", level="keep")
        assert node_client.ask_node(folder, "status")["kept"] == 1
        assert node_client.ask_node(folder, "export", file=str(short / "out"))["lines"] == 6
        assert node_client.ask_node(folder, "erase", user="u2")["users"] == 1
        with pytest.raises(TacitaError) as error:
            node_client.ask_node(folder, "recommend", user="u1")
        sentence(error, "first round")
        with pytest.raises(TacitaError) as error:
            Node.open(folder)
        sentence(error, "another process")
        assert unix_socket.ask_socket(folder / node_client.SHIM_SOCKET, b"hello") == b"olleh"
        assert node_client.ask_daemon(folder, "stop") == "stopping"
        assert running.daemon.stopping.wait(60)
    assert node_client.ask_node(folder, "status")["interactions"] == 2
    assert not (folder / node_client.CONTROL_SOCKET).exists()


def test_daemon_survives_malformed_input(short: Path) -> None:
    questions = [
        b"",
        b"\x00\xff" * 50,
        b"[" * 100_000,
        b"null",
        b"[]",
        b'{"verb": 3}',
        b'{"verb": "recomend", "user": "x"}',
        b'{"verb": "recommend"}',
        b'{"verb": "recommend", "user": 7}',
        b'{"verb": "recommend", "user": "u", "k": 1e99}',
        b'{"verb": "recommend", "user": "\\ud800", "k": -1}',
        b'{"verb": "consent", "user": "u1", "level": "x"}',
        b'{"verb": "consent", "user": "\\ud800", "level": "keep"}',
        b'{"verb": "consent", "user": "u1", "item": "\\u0000", "level": "maybe"}',
        b'{"verb": "import", "file": "/", "columns": {"a": "b"}}',
        b'{"verb": "import", "file": "\\u0000"}',
        b'{"verb": "export", "file": "/nonexistent/x"}',
        b'{"verb": "export", "file": "\\u0000"}',
        b'{"verb": "erase"}',
        b'{"verb": "erase", "user": "nobody"}',
        b'{"verb": "erase", "user": "u1", "everybody": true}',
        b'{"verb": "status", "more": 1}',
    ]
    folder = made(short / "node")
    with Node.open(folder) as node:
        node.store.add_interactions(rows("u1 a"))
    with Running(folder):
        for question in questions:
            document = json.loads(unix_socket.ask_socket(folder / node_client.CONTROL_SOCKET, question, timeout=20))
            assert set(document) == {"error"}, (question, document)
            assert document["error"].endswith((".", "?")), document
            assert "\n" not in document["error"]
        with pytest.raises(TacitaError):
            unix_socket.ask_socket(folder / node_client.CONTROL_SOCKET, b"x" * (node_client.MOST_BYTES + 1))
        assert node_client.ask_node(folder, "status")["interactions"] == 1


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_gets_an_answer(value: Any) -> None:
    def do(verb: str, arguments: dict[str, Any]) -> Any:
        return verbs.perform_verb(None, verb, arguments)  # type: ignore[arg-type]  # no verb gets as far as the node

    for question in (
        value,
        {"verb": value},
        {"verb": "recommend", "user": value, "no": 1},
        {"verb": "erase", "user": 1},
    ):
        assert "error" in json.loads(verbs.answer_json_question(do, json.dumps(question).encode()))


def test_recommendations_do_not_wait_for_training(short: Path) -> None:
    folder = big_node(short / "node", n_items=2000)
    begun, go = threading.Event(), threading.Event()

    def handle(node: Node, body: bytes) -> bytes:
        begun.set()
        assert go.wait(60)
        return b"done"

    with Running(folder, handle):
        answer: list[bytes] = []
        asking = threading.Thread(
            target=lambda: answer.append(unix_socket.ask_socket(folder / node_client.SHIM_SOCKET, b"train"))
        )
        asking.start()
        assert begun.wait(60)
        assert len(node_client.ask_node(folder, "recommend", user="u1", k=10)) == 10
        assert not answer
        go.set()
        asking.join(60)
        assert answer == [b"done"]


def test_a_request_that_fails_is_dropped_and_the_next_one_works(short: Path) -> None:
    def handle(node: Node, body: bytes) -> bytes:
        if body == b"bad":
            raise TacitaError("no such request.")
        return b"good"

    folder = made(short / "node")
    with Running(folder, handle):
        with pytest.raises(TacitaError):
            unix_socket.ask_socket(folder / node_client.SHIM_SOCKET, b"bad")
        assert unix_socket.ask_socket(folder / node_client.SHIM_SOCKET, b"fine") == b"good"


def test_ten_of_a_hundred_thousand_items_come_quickly(short: Path) -> None:
    """The goal is a p99 under 20 ms on an idle machine; the bounds here are of work, for one that is shared."""
    folder = big_node(short / "node")
    with Running(folder):
        result = latency(lambda user: node_client.ask_daemon(folder, "recommend", user=user, k=10))
    print(result)
    assert result["work"] < 20
    assert result["work p99"] < 200
    assert result["median"] < 500  # nobody waits for a clock


SERVER = """
import contextlib, logging, sys
from pathlib import Path
from types import SimpleNamespace
from tacita.live.running.daemon import run_daemon
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
link = contextlib.nullcontext(SimpleNamespace(state="online", reason=""))
run_daemon(Path(sys.argv[1]), handle=lambda node, body: body, engine=lambda node, socket: link,
           ready=lambda daemon: print("ready", flush=True))
"""


def daemon_process(folder: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line == "ready\n":
            return child
    raise AssertionError("the daemon did not come up")


def test_a_killed_daemon_leaves_a_node_that_opens(short: Path) -> None:
    folder = made(short / "node")
    (short / "a.csv").write_text("user,item\n" + "".join(f"u{n % 7},i{n}\n" for n in range(500)))
    child = daemon_process(folder)
    assert node_client.ask_node(folder, "import", file=str(short / "a.csv"))["new interactions"] == 500
    child.kill()
    child.wait()
    assert (folder / node_client.CONTROL_SOCKET).exists()  # left behind, and no obstacle
    assert node_client.ask_node(folder, "status")["interactions"] == 500
    child = daemon_process(folder)
    assert node_client.ask_node(folder, "status")["running"] is True
    child.send_signal(signal.SIGTERM)
    rest = child.communicate(timeout=30)[0]
    assert child.returncode == 0
    assert "stopped" in rest
    assert "u1" not in rest


# The command line


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli_node.app, list(arguments))
    if isinstance(result.exception, TacitaError):
        return 2, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_verbs_work_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="keys are made with it")
    from tacita.live.tls_certificates import make_ca

    monkeypatch.chdir(tmp_path)
    make_ca(tmp_path)
    (tmp_path / "a.csv").write_text("user,item\nu1,a\nu1,b\nu2,c\n")
    assert said("status")[0] == 2
    code, text = said("init", "node", "--server", "localhost:9092", "--ca", "ca.pem", "--json")
    assert code == 0
    assert Path(json.loads(text)["public key"]).read_text().startswith("ecdsa-sha2-nistp384")
    assert stat.S_IMODE((tmp_path / "node" / "node.key").stat().st_mode) == 0o600
    assert said("init", "node", "--server", "localhost:9092", "--ca", "ca.pem")[0] == 2
    assert said("init", "other", "--server", "localhost", "--ca", "ca.pem")[0] == 2
    assert said("init", "other", "--server", "localhost:1", "--ca", "a.csv")[0] == 2
    assert not (tmp_path / "other").exists()
    assert json.loads(said("import", "a.csv", "--json")[1])["new interactions"] == 3
    assert said("import", "missing.csv")[0] == 2
    assert said("consent", "u1", "a", "keep")[0] == 0
    assert said("consent", "u1", "sometimes")[0] == 2
    assert json.loads(said("status", "--json")[1])["kept"] == 1
    assert "min_users" in said("status")[1]
    assert said("recommend", "u1") == (
        2,
        "the server has not sent a model yet; recommendations begin after the node's first round.",
    )
    assert said("export", "out.jsonl")[0] == 0
    assert said("erase")[0] == 2
    assert said("erase", "u1")[0] == 0
    assert said("erase", "--all")[0] == 0
    assert json.loads(said("status", "--json")[1])["users"] == 0


if __name__ == "__main__":  # the benchmark: recommendations of an idle daemon
    with tempfile.TemporaryDirectory() as where, Running(big_node(Path(where) / "node")) as up:
        print("in process", latency(lambda user: up.daemon.node.recommend(user, 10), 2000))
        print("by socket ", latency(lambda user: node_client.ask_daemon(up.folder, "recommend", user=user, k=10), 2000))


def test_served_lists_have_the_times_and_ratings_that_all_of_them_have() -> None:
    """A model that reads them was trained with them."""
    none = float("nan")
    rows = InteractionRows(
        np.array([7, 7, 9, 7]),
        ["a", "b", "a", "c"],
        np.array([5.0, 3.0, 4.0, 6.0]),
        np.array([1, 2, none, 4]),
        np.zeros(4),
    )
    lists = _UserHistories(rows, np.array([7, 9]), {"a": 0, "b": 1, "c": 2})
    whole, some = lists.select_entries(np.ones(4, bool)), lists.select_entries(rows.user == 7)
    assert whole.ids.tolist() == [1, 0, 2, 0]
    assert whole.values.keys() == {"time"}
    assert whole.values["time"].tolist() == [3, 5, 6, 4]
    assert some.values["rating"].tolist() == [2, 1, 4]
