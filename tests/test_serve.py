"""`tacita serve`: answers are those of Python, wrong calls one sentence, and nobody calls without the token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="`tacita serve` needs tacita[serve]")

from starlette.testclient import TestClient

import tacita as tc
from helpers.command_line import SMALL_DATA, assert_one_sentence, call
from tacita.core.errors import TacitaError
from tacita.runs import loaded_run, served_models, serving, training
from tacita.runs.assembly import ALL_CORES
from tacita.runs.default_model import resolve_model
from tacita.runs.served_models import ModelCache, serve_finished_run, serve_newest_block
from tacita.web import connections, guard, limits
from tacita.web.answers import ListOptions, RunAnswers
from tacita.web.api import make_serving_app
from tacita.web.http_server import HttpServer, check_address, is_loopback, read_token
from tacita.web.scoring_queue import ScoringQueue, count_calls_together

TOKEN = "0123456789abcdef-a-token"
QUICK: dict[str, Any] = {"train": {"rounds": 2}, "evaluate": {"controls": False}}


@pytest.fixture(scope="module")
def tally(tmp_path_factory: pytest.TempPathFactory) -> tc.Run:
    return tc.train(SMALL_DATA, backbone="tally", out=tmp_path_factory.mktemp("serve") / "tally", **QUICK)


@pytest.fixture(scope="module")
def mf(tmp_path_factory: pytest.TempPathFactory) -> tc.Run:
    return tc.train(SMALL_DATA, backbone="mf", out=tmp_path_factory.mktemp("serve") / "mf", **QUICK)


def make_app(run: tc.Run, token: str | None = None, local_only: bool = False) -> Any:
    return make_serving_app(RunAnswers(serve_finished_run(run.folder)), token, local_only)


@pytest.fixture(scope="module")
def client(tally: tc.Run) -> Iterator[TestClient]:
    with TestClient(make_app(tally)) as client:
        yield client


@pytest.fixture(scope="module")
def mf_client(mf: tc.Run) -> Iterator[TestClient]:
    with TestClient(make_app(mf)) as client:
        yield client


def plain(rows: Any) -> list[dict[str, Any]]:
    """Rows of a table without the columns that an answer says once."""
    return rows.drop("user", "basis", strict=False).to_dicts()


def assert_refused(response: Any, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    problem = response.json()
    assert list(problem) == ["error"]
    assert problem["error"].endswith(".")
    for word in words:
        assert word in problem["error"]
    for leak in ("Traceback", "pydantic", "object at", "/tmp"):
        assert leak not in problem["error"]


# Answers


def test_one_persons_list_is_that_of_python(client: TestClient, tally: tc.Run) -> None:
    answer = client.get("/v1/recommendations", params={"user": "u1", "k": 4}).json()
    assert answer["user"] == "u1"
    assert answer["basis"] == "history"
    assert answer["items"] == plain(tally.recommend("u1", 4))


def test_lists_are_cut_as_in_python(client: TestClient, tally: tc.Run) -> None:
    params = {"user": "u2", "k": 5, "seen": True, "exclude": ["i3", "nope"], "include": ["i3", "i4", "i5", "i6"]}
    answer = client.get("/v1/recommendations", params=params).json()
    expected = tally.recommend("u2", 5, seen=True, exclude=["i3", "nope"], include=["i3", "i4", "i5", "i6"])
    assert answer["items"] == plain(expected)
    body = {"users": ["u2"], **{name: value for name, value in params.items() if name != "user"}}
    batch = client.post("/v1/recommendations", json=body).json()
    assert batch["recommendations"][0]["items"] == answer["items"]


def test_a_batch_is_each_persons_own_list(client: TestClient, tally: tc.Run) -> None:
    users = tally.users[:20]
    answer = client.post("/v1/recommendations", json={"users": [*users, "nobody", users[0]], "k": 3}).json()
    assert [entry["user"] for entry in answer["recommendations"]] == users
    assert answer["unknown"] == ["nobody"]
    for entry in answer["recommendations"]:
        assert entry["items"] == plain(tally.recommend(entry["user"], 3))


def test_whole_numbers_are_ids(tmp_path: Path) -> None:
    rows = {"user": [1, 1, 1, 2, 2, 2] * 5, "item": list(range(10)) * 3}
    run = tc.train(rows, backbone="tally", out=tmp_path / "run", evaluate={"k": [3], "select_by": "ndcg@3"})
    with TestClient(make_app(run)) as client:
        answer = client.post("/v1/recommendations", json={"users": [1, "2"], "k": 3, "seen": True})
        assert [entry["user"] for entry in answer.json()["recommendations"]] == ["1", "2"]


def test_a_history_is_folded_in(client: TestClient, mf_client: TestClient, tally: tc.Run, mf: tc.Run) -> None:
    for caller, run in ((client, tally), (mf_client, mf)):
        answer = caller.post("/v1/fold-in", json={"history": ["i3", "gone", "i4"], "k": 4, "exclude": ["i7"]}).json()
        assert answer["items"] == plain(run.fold_in(["i3", "i4"], 4, exclude=["i7"]))
        assert answer["ignored"] == ["gone"]


def test_similar_items_and_reasons_are_those_of_python(client: TestClient, tally: tc.Run) -> None:
    similar = client.get("/v1/similar", params={"item": "i3", "k": 4}).json()
    assert similar["items"] == plain(tally.similar("i3", 4))
    reasons = client.get("/v1/explanation", params={"user": "u1", "item": "i4", "k": 3}).json()
    expected = tally.explain("u1", "i4", 3)
    assert [reason["item"] for reason in reasons["items"]] == expected["item"].to_list()
    assert [reason["effect"] for reason in reasons["items"]] == pytest.approx(expected["effect"].to_list())
    assert reasons["basis"] == "left out"
    best = client.get("/v1/recommendations", params={"user": "u1", "k": 2, "why": True}).json()["items"]
    for entry in best:
        alone = client.get("/v1/explanation", params={"user": "u1", "item": entry["item"], "k": 3}).json()
        assert entry["why"] == {"basis": alone["basis"], "items": alone["items"]}


def test_a_model_of_rows_says_that_items_are_alike(mf_client: TestClient) -> None:
    answer = mf_client.get("/v1/recommendations", params={"user": "u1", "k": 2, "why": True}).json()
    assert {entry["why"]["basis"] for entry in answer["items"]} == {"alike"}


def test_the_run_and_its_calls_are_described(client: TestClient, tally: tc.Run) -> None:
    described = client.get("/v1/run").json()
    assert (described["users"], described["items"]) == (len(tally.users), len(tally.items))
    assert "no epsilon" in described["privacy"]
    assert client.get("/health").json() == {"up": True, "version": tc.__version__}
    page = client.get("/docs").text
    for path in client.get("/openapi.json").json()["paths"]:
        assert f"{path}</code>" in page
    assert "<script" not in page
    assert "https://" not in page


# Wrong calls


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("/v1/recommendations?user=nobody", 404, ("user 'nobody' is not in this run", "POST /v1/fold-in")),
        (f"/v1/recommendations?user={'x' * 900}", 404, ("xxx...' is not",)),
        (f"/v1/recommendations?user={'x' * 1001}", 422, ("user: ",)),
        ("/v1/recommendations?user=%ff%00", 404, ("is not in this run",)),
        ("/v1/recommendations", 422, ("user: Field required",)),
        ("/v1/recommendations?user=u1&k=0", 422, ("k: ",)),
        ("/v1/recommendations?user=u1&k=1001", 422, ("k: ",)),
        ("/v1/recommendations?user=u1&k=41", 400, ("cannot recommend 41 items; choose from 1 to the 40",)),
        ("/v1/recommendations?user=u1&include=nope", 404, ("none of the items of `include`",)),
        ("/v1/similar?item=nope", 404, ("item 'nope' is not in this run",)),
        ("/v1/similar?item=i1&k=40", 400, ("choose from 1 to the 39",)),
        ("/v1/explanation?user=u1&item=nope", 404, ("item 'nope'",)),
        ("/v1/explanation?user=nobody&item=i1", 404, ("user 'nobody'",)),
        ("/v1/nothing", 404, ("no such call", "/docs")),
        ("/v1/fold-in", 405, ("another method",)),
    ],
)
def test_a_wrong_question_is_one_sentence(client: TestClient, query: str, status: int, words: tuple[str, ...]) -> None:
    assert_refused(client.get(query), status, *words)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("fold-in", '{"history": ["nope"]}', 404, ("knows no item of this history, such as 'nope'",)),
        ("fold-in", '{"history": []}', 422, ("history: ",)),
        ("fold-in", '{"history": ["i1"], "more": 1}', 422, ("more: ",)),
        ("fold-in", '{"history": [true]}', 422, ("history: ",)),
        ("fold-in", '{"history": ["\\ud800"]}', 422, ("history: ",)),
        ("fold-in", '{"history": ["i1"', 422, ("no JSON object",)),
        ("fold-in", "[1]", 422, ("no JSON object",)),
        ("fold-in", "", 422, ("no JSON object",)),
        ("recommendations", '{"users": ["nobody", "noone"]}', 404, ("user 'nobody'",)),
        ("recommendations", '{"users": ["u1"], "include": []}', 422, ("include: ",)),
    ],
)
def test_a_wrong_body_is_one_sentence(
    client: TestClient, path: str, body: str, status: int, words: tuple[str, ...]
) -> None:
    response = client.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"})
    assert_refused(response, status, *words)


def test_limits_hold(client: TestClient) -> None:
    too_many = [f"p{number}" for number in range(limits.MOST_USERS + 1)]
    assert_refused(client.post("/v1/recommendations", json={"users": too_many}), 422, "users: ")
    long_lists = {"users": too_many[:-1], "k": 51}
    assert_refused(client.post("/v1/recommendations", json=long_lists), 400, "51 items", "ask for fewer")
    history = {"history": ["i1"] * (limits.MOST_ITEMS + 1)}
    assert_refused(client.post("/v1/fold-in", json=history), 422, "history: ")
    body = b'{"history": ["' + b"x" * limits.MOST_BODY + b'"]}'
    assert_refused(client.post("/v1/fold-in", content=body), 413, "1,048,576 bytes")
    pieces = iter([body[:1000], body[1000:]])  # without a length in the header
    assert_refused(client.post("/v1/fold-in", content=pieces), 413, "1,048,576 bytes")
    assert_refused(client.post("/v1/fold-in", content=b"{}", headers={"content-length": "ten"}), 413, "bytes")


def test_calls_beyond_the_queue_are_turned_away(tally: tc.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacita.web.scoring_queue.MOST_WAITING", 0)
    with TestClient(make_app(tally)) as client:
        assert_refused(client.get("/v1/recommendations?user=u1"), 503, "try again")
        assert_refused(client.get("/v1/run"), 503, "try again")
        assert client.get("/health").status_code == 200


# Who may call


@pytest.fixture(scope="module")
def guarded(tally: tc.Run) -> Iterator[TestClient]:
    with TestClient(make_app(tally, TOKEN)) as client:
        yield client


@pytest.mark.parametrize(
    "credentials",
    [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN],
)
def test_a_call_without_the_token_is_refused(guarded: TestClient, credentials: str | None) -> None:
    headers = {} if credentials is None else {"authorization": credentials}
    for path in ("/v1/run", "/v1/recommendations?user=u1", "/v1/nothing"):
        response = guarded.get(path, headers=headers)
        assert_refused(response, 401, "Authorization: Bearer")
        assert TOKEN not in response.text
    assert guarded.get("/health", headers=headers).status_code == 200


def test_a_call_with_the_token_is_answered(guarded: TestClient) -> None:
    for scheme in ("Bearer", "bearer"):
        assert guarded.get("/v1/run", headers={"authorization": f"{scheme} {TOKEN}"}).status_code == 200
    twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")]
    assert_refused(guarded.get("/v1/run", headers=twice), 401)


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of one length are compared, whatever was sent."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(sent: bytes, expected: bytes) -> bool:
        compared.append((sent, expected))
        return sent == expected

    monkeypatch.setattr(guard.hmac, "compare_digest", compare)
    gate = guard.CallGuard(lambda scope, receive, send: None, TOKEN, False)  # type: ignore[arg-type, return-value]
    assert gate._admits_token([f"Bearer {TOKEN}"])
    assert not gate._admits_token(["Bearer short"])
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_without_a_token_only_names_of_this_machine_are_answered(tally: tc.Run) -> None:
    """A web site could point a name of its own to 127.0.0.1, and read on."""
    with TestClient(make_app(tally, local_only=True), base_url="http://127.0.0.1:8000") as client:
        for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000"):
            assert client.get("/v1/run", headers={"host": host}).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost:8000:1", ""):
            assert_refused(client.get("/v1/run", headers={"host": host}), 421, "names of this machine")


def test_another_address_needs_a_token() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.9.9.9")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        assert not is_loopback(host)
        with pytest.raises(TacitaError, match="--token-file FILE, or say --without-token"):
            check_address(host, has_token=False, allows_anybody=False)
        check_address(host, has_token=True, allows_anybody=False)
        check_address(host, has_token=False, allows_anybody=True)


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file, {}) == TOKEN
    assert read_token(None, {"TACITA_SERVE_TOKEN": TOKEN}) == TOKEN
    assert read_token(None, {}) is None
    for content in ("short", "with spaces in between them", ""):
        file.write_text(content)
        with pytest.raises(TacitaError, match="holds no token") as error:
            read_token(file, {})
        assert not content or content not in str(error.value)
        with pytest.raises(TacitaError, match=r"\$TACITA_SERVE_TOKEN holds no token"):
            read_token(None, {"TACITA_SERVE_TOKEN": content})
    with pytest.raises(TacitaError, match="cannot be read; make one"):
        read_token(tmp_path / "nowhere", {})


# The folder behind it


def test_what_is_forgotten_is_not_served_from_memory(tally: tc.Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tally.folder, tmp_path / "run"))
    run = tc.load(folder)
    with TestClient(make_app(run)) as client:
        before = client.get("/v1/recommendations?user=u1&seen=true&k=5").json()
        assert call("forget", "--run", str(folder), "--user", "u1", "--all").code == 0
        after = client.get("/v1/recommendations?user=u1&seen=true&k=5").json()
        assert before["basis"] == "history"
        assert after["basis"] == "popularity"
        assert after["items"] == plain(run.recommend("u1", 5, seen=True))


def forget_during_next_read(monkeypatch: pytest.MonkeyPatch, module: ModuleType, folder: Path, user: str) -> None:
    """Somebody is forgotten after the files were read and before the models are there."""
    plain_load = module.load_run
    waiting = [user]

    def load_run(path: Path) -> Any:
        loaded = plain_load(path)
        while waiting:
            assert call("forget", "--run", str(folder), "--user", waiting.pop(), "--all").code == 0
        return loaded

    monkeypatch.setattr(module, "load_run", load_run)


def test_who_is_forgotten_while_the_folder_is_read_is_not_served(
    tally: tc.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tally.folder, tmp_path / "run"))
    answers = RunAnswers(serve_finished_run(folder))
    forget_during_next_read(monkeypatch, served_models, folder, "u1")
    for _ in range(2):
        entry = answers.recommend(["u1"], ListOptions(5, include_seen=True))[0]
        assert entry is not None
        assert entry["basis"] == "popularity"
    run = tc.load(folder)
    forget_during_next_read(monkeypatch, serving, folder, "u2")
    for _ in range(2):
        assert set(run.recommend("u2", 5, seen=True)["basis"]) == {"popularity"}


def test_models_of_a_folder_that_changes_in_every_read_are_read_again_by_the_next_call() -> None:
    version = 0
    n_reads = 0

    def read_models() -> Any:
        nonlocal version, n_reads
        before = version
        version = min(version + 1, loaded_run.MOST_READS)  # somebody changes the folder before the read ends
        n_reads += 1
        return before

    models = ModelCache(read_models, lambda: (version,))
    assert models.load() == loaded_run.MOST_READS - 1
    assert n_reads == loaded_run.MOST_READS
    for _ in range(2):
        assert models.load() == loaded_run.MOST_READS
    assert n_reads == loaded_run.MOST_READS + 1


def test_a_checkpoint_that_goes_while_its_stamp_is_read_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends takes its checkpoint away at any moment."""
    checkpoint = tmp_path / training.CHECKPOINT
    checkpoint.write_bytes(b"x")
    models = serve_newest_block(tmp_path, ALL_CORES)
    plain_is_file = Path.is_file

    def is_file(path: Path) -> bool:
        exists = plain_is_file(path)
        if path == checkpoint:
            path.unlink(missing_ok=True)
        return exists

    monkeypatch.setattr(Path, "is_file", is_file)
    models._read_stamp()
    checkpoint.unlink(missing_ok=True)
    assert models._read_stamp() == ()


def test_a_folder_that_is_gone_is_no_fault_of_the_caller(tally: tc.Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tally.folder, tmp_path / "run"))
    with TestClient(make_app(tc.load(folder))) as client:
        assert client.get("/v1/run").status_code == 200
        shutil.rmtree(folder)
        assert_refused(client.get("/v1/recommendations?user=u1"), 503, "cannot be read")
        assert client.get("/health").status_code == 200


def test_the_newest_block_of_a_run_that_trains_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the second block leaves a checkpoint; it serves what the run has learned by then."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training, "CHECKPOINT_SHARE", 1e9)
    folder = tmp_path / "run"
    settings: dict[str, Any] = {"data": SMALL_DATA, "backbone": {"name": "mf"}, **QUICK}

    class Killed(BaseException):
        pass

    def stop_in_second_block(report: Any) -> None:
        if report.block == 1 and report.round == 2:
            raise Killed

    config, start = training_config(settings)
    watcher = training.TrainingCallbacks(on_round=stop_in_second_block)
    with pytest.raises(Killed):
        training.train(config, folder, ALL_CORES, watcher, start=start)
    with pytest.raises(TacitaError, match=r"not finished; `tacita serve .* --block` serves its newest block"):
        serve_finished_run(folder).load()
    models = serve_newest_block(folder, ALL_CORES)
    with TestClient(make_serving_app(RunAnswers(models))) as client:
        described = client.get("/v1/run").json()
        assert described["block"] == 1
        assert "still being trained" in described["privacy"]
        user = models.load().loaded.users[0]
        while_training = client.get("/v1/recommendations", params={"user": user, "k": 3}).json()
        assert len(while_training["items"]) == 3
        assert client.post("/v1/fold-in", json={"history": ["i3"], "k": 3}).status_code == 200
        training.resume(folder)
        described = client.get("/v1/run").json()
        assert described["block"] == 3
        answer = client.get("/v1/recommendations", params={"user": user, "k": 3}).json()
        assert answer["items"] == plain(tc.load(folder).recommend(user, 3))


def training_config(settings: dict[str, Any]) -> Any:
    return resolve_model(settings, "the settings", ALL_CORES, None, lambda text: None)


# Many at once, and a real server


def test_calls_that_wait_are_scored_together(tally: tc.Run) -> None:
    """While the thread is busy, calls gather; each gets its own list, and an error reaches all of them."""
    answers = RunAnswers(serve_finished_run(tally.folder))
    answers.load_models()
    sizes: list[int] = []
    plain_recommend = answers.recommend

    def recommend(users: Any, options: ListOptions) -> Any:
        sizes.append(len(users))
        return plain_recommend(users, options)

    answers.recommend = recommend  # type: ignore[method-assign]

    async def call_all() -> list[Any]:
        queue = ScoringQueue(answers)
        calls = [queue.recommend(user, ListOptions(3)) for user in tally.users[:30]]
        wrong = [queue.recommend(user, ListOptions(41)) for user in tally.users[:2]]
        results = await asyncio.gather(*calls, *wrong, return_exceptions=True)
        queue.close()
        return results

    results = asyncio.run(call_all())
    assert max(sizes) > 1
    assert sum(sizes) == 32
    for user, answer in zip(tally.users[:30], results, strict=False):
        assert answer["items"] == plain(tally.recommend(user, 3))
    assert all(isinstance(error, TacitaError) for error in results[30:])


def score_together(answers: RunAnswers, calls: list[tuple[str, ListOptions]]) -> tuple[list[Any], list[Any]]:
    """Answers to calls that wait together, and the batches that they were scored in: options and people."""
    batches: list[Any] = []
    plain_recommend = answers.recommend

    def recommend(users: Any, options: ListOptions) -> Any:
        batches.append((options, list(users)))
        return plain_recommend(users, options)

    answers.recommend = recommend  # type: ignore[method-assign]

    async def call_all() -> list[Any]:
        queue = ScoringQueue(answers)
        results = await asyncio.gather(*[queue.recommend(user, options) for user, options in calls])
        queue.close()
        return results

    return asyncio.run(call_all()), batches


def test_calls_that_take_long_let_others_in_between(tally: tc.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons of many people are several batches, and so are lists that are long together."""
    monkeypatch.setattr("tacita.web.scoring_queue.MOST_TOGETHER", 4)
    monkeypatch.setattr("tacita.web.scoring_queue.MOST_ROWS", 30)
    explained, short, long = ListOptions(3, why=True), ListOptions(3), ListOptions(10)
    calls = [(user, explained) for user in tally.users[:5]]
    calls += [(user, short) for user in tally.users[5:15]]
    calls += [(user, long) for user in tally.users[15:20]]
    results, batches = score_together(RunAnswers(serve_finished_run(tally.folder)), calls)
    sizes = [(options, len(users)) for options, users in batches]
    in_turn = [(explained, 1), (short, 4), (long, 3), (explained, 1), (short, 4), (long, 2), (explained, 1), (short, 2)]
    assert sizes == [*in_turn, (explained, 1), (explained, 1)]
    for (user, options), answer in zip(calls, results, strict=True):
        assert answer["user"] == user
        entries = [{name: entry[name] for name in entry if name != "why"} for entry in answer["items"]]
        assert entries == plain(tally.recommend(user, options.k))
        assert all(("why" in entry) == options.why for entry in answer["items"])


def test_a_batch_is_no_larger_than_one_call_may_be() -> None:
    assert count_calls_together(ListOptions(10)) == limits.MOST_TOGETHER < limits.MOST_WAITING
    assert count_calls_together(ListOptions(limits.MOST_K)) * limits.MOST_K <= limits.MOST_ROWS
    assert count_calls_together(ListOptions(1, why=True)) == 1


def fetch(url: str, token: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_server_on_loopback_answers_many_at_once_and_stops(tally: tc.Run) -> None:
    before = set(threading.enumerate())
    with HttpServer(make_app(tally, TOKEN)) as server:
        assert fetch(f"{server.url}/v1/run")[0] == 401

        def ask(user: str) -> Any:
            return fetch(f"{server.url}/v1/recommendations?user={user}&k=3", TOKEN)

        with ThreadPoolExecutor(8) as callers:
            replies = list(callers.map(ask, tally.users))
        for user, (status, answer) in zip(tally.users, replies, strict=True):
            assert status == 200
            assert answer["items"] == plain(tally.recommend(user, 3))
        taken = HttpServer(make_app(tally), port=server.port)
        with pytest.raises(TacitaError, match="choose another --host or --port"):
            taken.start()
    with pytest.raises(urllib.error.URLError):
        fetch(f"{server.url}/health")
    assert not set(threading.enumerate()) - before


def test_heads_of_calls_end(tally: tc.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without end was kept in memory, and callers who send none kept all connections, both without a token."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with HttpServer(make_app(tally, TOKEN)) as server:

        def connect(first: bytes) -> socket.socket:
            caller = socket.create_connection((server.host, server.port), timeout=30)
            caller.sendall(first)
            return caller

        with connect(b"GET /health HTTP/1.1\r\n") as endless, pytest.raises((ConnectionResetError, BrokenPipeError)):
            endless.sendall((b"X-A: " + b"a" * 20_000 + b"\r\n") * 500)
        for first in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: "):
            with connect(first) as silent:
                assert silent.recv(100) == b""
        with connect(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as caller:
            assert b" 200 " in caller.recv(1000)
            time.sleep(0.7)
            caller.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 200 " in caller.recv(1000)
            caller.sendall(b"GET /hea")
            assert caller.recv(100) == b""


@contextlib.contextmanager
def served(arguments: list[str], cwd: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself, and the address that it prints."""
    command = [sys.executable, "-m", "tacita", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **variables}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = ""
        while "Serving" not in line:
            line = process.stderr.readline()
            assert line, "the server ended"
        yield process, line.split(" at ")[1].split(",")[0]
    finally:
        process.kill()
        process.wait()


def test_the_command_serves_until_it_is_stopped(tally: tc.Run, tmp_path: Path) -> None:
    with served([str(tally.folder)], tmp_path, TACITA_SERVE_TOKEN=TOKEN) as (process, url):
        assert fetch(f"{url}/v1/run")[0] == 401
        assert fetch(f"{url}/v1/recommendations?user=u1&k=3", TOKEN)[1]["items"] == plain(tally.recommend("u1", 3))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Stopped" in err
    assert TOKEN not in out + err


def test_the_command_refuses_in_one_sentence(tally: tc.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TACITA_SERVE_TOKEN", raising=False)
    run = str(tally.folder)
    for arguments, words in {
        (): "name one run folder",
        ("nowhere",): "no run folder nowhere",
        (run, "--run", run): "named twice",
        (run, "--host", "0.0.0.0"): "--token-file FILE, or say --without-token",
        (run, "--token-file", str(tmp_path / "no")): "cannot be read",
        (run, "--host", "203.0.113.9", "--without-token"): "choose another --host or --port",
        (run, "--host", "a..b", "--without-token"): "no name of a host",
        (run, "--host", "a" * 64, "--without-token"): "choose another --host or --port",
    }.items():
        assert_one_sentence(call("serve", *arguments), words)
    monkeypatch.setattr("tacita.cli.serve.find_spec", lambda name: None)
    assert_one_sentence(call("serve", run), "pip install 'tacita[serve]'")


def test_the_bench_calls_a_real_server(tally: tc.Run) -> None:
    output = call("bench", "serve", str(tally.folder), "--seconds", "0.3", "--clients", "2", "--json")
    assert output.code == 0, output.err
    result = json.loads(output.out)
    assert [row["call"] for row in result["rows"]] == ["one person", "100 people", "history of 10", "similar items"]
    for row in result["rows"]:
        assert row["calls"] > 0
        assert row["failures"] == 0
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["most_ms"]
    assert_one_sentence(call("bench", "serve", "nowhere"), "no run folder nowhere")


# At random


def test_a_thousand_random_calls_are_never_the_servers_fault(tally: tc.Run) -> None:
    """By the API's own description, right calls and wrong ones; every answer conforms to it."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks

    conform = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(tally))
    n_calls = 0

    for result in schema.get_all_operations():
        operation = result.ok()
        takes_input = len(operation.body) or len(operation.query)
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if takes_input else [GenerationMode.POSITIVE]
        for mode in modes:

            @settings(
                max_examples=105,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def make_call(case: Any) -> None:
                nonlocal n_calls
                case.call_and_validate(checks=conform)
                n_calls += 1

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make_call()
    assert n_calls >= 1000
