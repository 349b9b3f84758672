"""The operator's page and API: a password or a read-only token, orders, numbers of people and never a person."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from helpers.page_routes import every_route
from helpers.page_sites import ORIGIN, PASSWORD, SAME_ORIGIN, SPENT_SHARES, make_server, public_key_of

pytest.importorskip("fastapi", reason="the pages need tacita[live]")
pytest.importorskip("cryptography", reason="the server needs tacita[live]")

from starlette.testclient import TestClient

from tacita import __version__
from tacita.core.errors import TacitaError
from tacita.live.pages import tokens as tokens_module
from tacita.live.pages.operator_app import make_operator_app
from tacita.live.pages.operator_service import OperatorService
from tacita.live.pages.tokens import OperatorCredentials, Tokens
from tacita.live.running import orders
from tacita.live.running.server import find_stop_reason, open_store


@pytest.fixture(autouse=True)
def _cheap_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_COST", {"n": 2**4, "r": 8, "p": 1, "maxmem": 2**26})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_server(tmp_path)


def stranger(folder: Path, online: dict[int, str] | None = None) -> TestClient:
    app = make_operator_app(folder, Tokens(), lambda: online or {1: "online", 2: "offline"})
    return TestClient(app, base_url=ORIGIN, headers=SAME_ORIGIN)


@pytest.fixture
def operator(folder: Path) -> TestClient:
    client = stranger(folder)
    assert client.post("/login", data={"password": PASSWORD}, follow_redirects=False).status_code == 303
    return client


def test_a_password_is_kept_hashed_and_wrong_ones_are_slowed_down(folder: Path) -> None:
    path = folder / "operator.json"
    assert PASSWORD not in path.read_text()
    assert oct(os.stat(path).st_mode & 0o777) == "0o600"
    client = stranger(folder)
    for _ in range(5):
        assert client.post("/login", data={"password": "wrong"}).status_code == 401
    assert client.post("/login", data={"password": PASSWORD}).status_code == 429
    with pytest.raises(TacitaError, match="at least"):
        OperatorCredentials(folder).set_password("short")


def paths(folder: Path) -> list[tuple[str, str]]:
    return every_route(make_operator_app(folder, Tokens()))


OPEN = {"/htmx.js", "/style.css", "/login"}


def fill(path: str) -> str:
    return path.replace("{run}", "r").replace("{order}", "stop").replace("{name}", "north")


def test_nothing_is_answered_without_a_token_and_a_reader_changes_nothing(folder: Path) -> None:
    client, token = stranger(folder), OperatorCredentials(folder).make_reader_token()
    for method, path in paths(folder):
        if path in OPEN:
            continue
        assert client.request(method, fill(path), json={}).status_code == 401, path
        wrong = client.request(method, fill(path), json={}, headers={"authorization": "Bearer wrong"})
        assert wrong.status_code == 401, path
        answer = client.request(method, fill(path), json={}, headers={"authorization": f"Bearer {token}"})
        assert answer.status_code == (200 if method == "GET" else 403), (method, path, answer.text)
    OperatorCredentials(folder).make_reader_token()
    assert client.get("/v1/health", headers={"authorization": f"Bearer {token}"}).status_code == 401


def test_cross_site_and_other_names_are_refused(operator: TestClient, folder: Path) -> None:
    elsewhere = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    assert operator.post("/v1/runs/r/stop", headers=elsewhere).status_code == 403
    assert operator.get("/v1/runs", headers={"host": "evil.example"}).status_code == 421
    with open_store(folder) as store:
        assert not store.is_run_halted("r")


def test_operator_page_names_no_user(operator: TestClient) -> None:
    """A sender's made-up name and what was asked for are nowhere."""
    for path in ("/", "/v1/requests", "/v1/runs", "/v1/nodes", "/v1/runs/r/budgets", "/v1/metrics"):
        text = operator.get(path).text
        assert "123456789" not in text
        assert "sender" not in text
    requests = operator.get("/v1/requests").json()["requests"]
    assert [(entry["node"], entry["state"]) for entry in requests] == [("north", "heard")]


def test_rounds_budgets_nodes_and_alerts(operator: TestClient) -> None:
    rounds = operator.get("/v1/runs/r/rounds").json()["rounds"]
    assert [(entry["asked"], entry["answered"], entry["refused"], entry["clients"]) for entry in rounds] == [
        (2, 1, 1, 30)
    ]
    budgets = operator.get("/v1/runs/r/budgets").json()
    assert budgets["spread"] == [{"releases": 1, "people at most": 30, "nodes": 1}]
    assert {entry["spent"]: entry["people at least"] for entry in budgets["spent"]} == SPENT_SHARES
    nodes = {node["name"]: node for node in operator.get("/v1/nodes").json()["nodes"]}
    assert nodes["south"]["last error"].startswith("fewer people")
    assert nodes["north"]["last answer"] is not None
    kinds = {alert["kind"] for alert in operator.get("/v1/alerts").json()["alerts"]}
    assert {"silent", "refused", "quality"} <= kinds
    page = operator.get("/").text
    assert "&lt;b&gt;min" in page
    assert "0.2500" in page
    for name, score in (("random", "0.0625"), ("most popular", "0.3750"), ("each node alone", "0.1250")):
        assert f'<th scope="row">{name}</th><td>{score}</td>' in page
    assert '<th scope="row">Up to a half</th><td>40</td>' in page
    assert "no epsilon covers these numbers" in page
    assert "below most popular: ndcg@20 0.2500 in block 0, most popular 0.3750." in page
    assert 'tacita_quality{run="r",block="0",model="run",metric="ndcg@20"} 0.25' in operator.get("/v1/metrics").text
    assert operator.get("/v1/runs/none/rounds").status_code == 400


def test_node_versions_and_clocks_are_shown_and_wrong_ones_flagged(operator: TestClient, folder: Path) -> None:
    def kinds() -> set[str]:
        return {alert["kind"] for alert in operator.get("/v1/alerts").json()["alerts"]}

    note = {"version": __version__, "clock": 0.4, "time": time.time()}
    with open_store(folder) as store:
        store.store_node_notes({1: note, 2: note})
        assert not kinds() & {"clock", "version"}
        store.store_node_notes({2: {"version": "<b>9", "clock": -95.0, "time": time.time()}})
    assert {"clock", "version"} <= kinds()
    nodes = {node["name"]: node for node in operator.get("/v1/nodes").json()["nodes"]}
    assert (nodes["north"]["version"], nodes["north"]["clock"]) == (__version__, 0.4)
    text = operator.get("/").text
    assert "clock right" in text
    assert "clock 1 minute behind" in text
    assert "&lt;b&gt;9" in text


def test_run_waiting_for_nodes_is_shown(operator: TestClient, folder: Path) -> None:
    with open_store(folder) as store:
        store.log_event("r", {"event": "waiting", "kind": "statistic", "answered": 1, "needed": 2})
    alerts = {alert["kind"]: alert["said"] for alert in operator.get("/v1/alerts").json()["alerts"]}
    assert "1 of the 2 nodes" in alerts["quorum"]


def test_operator_orders_are_carried_out(operator: TestClient, folder: Path, tmp_path: Path) -> None:
    assert operator.post("/v1/runs/r/stop").status_code == 200
    with open_store(folder) as store:
        assert find_stop_reason(store, "r") == "the operator stopped it."
    alerts = {alert["kind"]: alert["said"] for alert in operator.get("/v1/alerts").json()["alerts"]}
    assert alerts["stopped"] == "Run 'r' stopped: the operator stopped it."
    assert "not up" in operator.post("/v1/runs/r/resume").json()["error"]
    key = public_key_of(tmp_path, "east")
    done = operator.post("/do/enroll", data={"name": "east", "public_key": key}, headers={"hx-request": "true"})
    assert "SHA256:" in done.text
    response = operator.post("/v1/nodes", json={"name": "east", "public_key": "no key"})
    assert response.status_code == 400
    assert operator.post("/v1/nodes/east/revoke").json() == {"name": "east"}
    document = operator.post("/v1/catalogue", json={"items": [{"item": "new", "title": "New"}]}).json()
    assert document == {"new": 1, "catalogue": 11}
    assert operator.post("/v1/catalogue", json={"items": [{"item": "a\x1b"}]}).status_code == 400
    wrong = operator.post("/v1/runs", json={"run": "x", "settings": "[backbone]\nnam = 'tally'"})
    assert wrong.status_code == 400


def test_page_refreshes_in_fragments(operator: TestClient, folder: Path) -> None:
    """Each piece has its place on the page; a run that began elsewhere makes the page anew."""
    whole, beat = operator.get("/").text, operator.get("/part/runs", params={"known": "1"}).text
    pieces = re.findall(r'id="([a-z0-9-]+)"[^>]* hx-swap-oob="true"', beat)
    assert pieces == ["alerts", "run-head-1", "run-rounds-1", "run-budgets-1"]
    assert all(whole.count(f'id="{entry}"') == 1 for entry in (*pieces, "pulse"))
    assert "hx-swap-oob" not in whole
    assert "<details" not in beat
    assert operator.get("/part/runs", params={"known": "0"}).headers["hx-refresh"] == "true"


def test_older_rounds_are_a_click_away(operator: TestClient, folder: Path) -> None:
    assert ">Older<" not in operator.get("/").text  # one round is all there is
    with open_store(folder) as store:
        for number in range(2, 21):
            sent = {"asked": 2, "clients": 30, "valid": None, "bytes_up": 1e6, "bytes_down": 3e6}
            store.log_event("r", {"event": "round", "block": 0, "round": number, **sent})
    first = operator.get("/").text
    assert "0 / 20<" in first
    assert "0 / 12<" not in first
    assert "3.0 MB" in first  # what went down
    assert "offset=8" in first
    second = operator.get("/part/rounds/r?offset=8").text
    assert all(f"0 / {number}<" in second for number in range(5, 13))
    assert "offset=16" in second
    assert ">Newer<" not in second  # the newest stand above, and renew themselves
    third = operator.get("/part/rounds/r?offset=16").text
    assert all(f"0 / {number}<" in third for number in range(1, 5))
    assert ">Older<" not in third
    assert "offset=8" in third
    assert operator.get("/part/rounds/nothing").status_code == 400
    for odd in ("-3", "x", "9" * 30):
        assert operator.get(f"/part/rounds/r?offset={odd}").status_code == 200


def test_page_forms_issue_orders(operator: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "is_up", lambda folder: True)

    def send(what: str, **fields: str) -> str:
        answer = operator.post(f"/do/{what}", data=fields, headers={"hx-request": "true"})
        assert answer.status_code == 200
        return answer.text

    text = send("begin", run="new", settings='[backbone]\nname = "tally"\n', quorum="1")
    assert "Run &#39;new&#39; has begun." in text
    assert "Stop new" in text
    assert "a quorum is" in send("begin", run="newer", quorum="most").lower()
    assert "Go on with new" in send("order", run="new", order="stop")
    assert "Stop new" in send("order", run="new", order="resume")
    assert "opens its next block" in send("order", run="r", order="next-block")
    assert "an order is one of" in send("order", run="r", order="explode").lower()
    assert "2 new items; the catalogue has 12." in send("publish", items="a, Alpha\nb\tBeta, two\n\n")
    with open_store(folder) as store:
        assert store.load_run("r").opened == 2
        assert store.load_run("new").opened == 1
        assert dict(store.read_catalogue())["b"] == "Beta, two"


def test_a_stopped_run_may_go_on_where_the_server_is_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.stop_run(folder, "r")
    monkeypatch.setattr(orders, "is_up", lambda folder: True)
    orders.resume_run(folder, "r")
    with open_store(folder) as store:
        assert find_stop_reason(store, "r") is None


def test_expiring_certificate_is_shown(folder: Path) -> None:
    from tacita.live.tls_certificates import renew_server_certificate

    assert "certificate" not in {alert["kind"] for alert in OperatorService(folder).list_alerts()["alerts"]}
    renew_server_certificate(folder, days=5)
    assert "certificate" in {alert["kind"] for alert in OperatorService(folder).list_alerts()["alerts"]}


def test_the_first_view_of_a_thousand_nodes_is_quick(operator: TestClient, folder: Path, tmp_path: Path) -> None:
    key = public_key_of(tmp_path, "many")
    with open_store(folder) as store, store._write_transaction() as db:
        many = ((f"node-{n}", f"{key}{n}", str(n + 10), 1.0) for n in range(1000))
        db.executemany("INSERT INTO nodes (name, public_key, number, enrolled) VALUES (?, ?, ?, ?)", many)
        answers = (("r", 0, k, "statistic", str(n + 10), "x", 5, 1.0) for n in range(1000) for k in range(1, 21))
        db.executemany("INSERT INTO accepted VALUES (?, ?, ?, ?, ?, ?, ?, ?)", answers)
        reports = ((f'{{"event": "refused", "node": "{n + 10}", "said": "no", "kind": "x"}}',) for n in range(1000))
        db.executemany("INSERT INTO events (run, time, event) VALUES ('r', 1.0, ?)", reports)
    operator.get("/")
    began = time.process_time()
    text = operator.get("/").text
    spent = time.process_time() - began
    assert "1,002 nodes" in text
    assert spent < 1.0, spent


def test_odd_calls_are_refused_with_a_sentence_before_and_after_the_login(folder: Path, operator: TestClient) -> None:
    nobody = stranger(folder)
    assert nobody.get("/login", headers={"origin": "http://[::1"}).status_code == 403
    assert nobody.get("/login", headers={"content-length": "9" * 5000}).status_code == 413
    many = nobody.post("/login", content=b"a=1&" * 60, headers={"content-type": "application/x-www-form-urlencoded"})
    assert (many.status_code, many.json()) == (400, {"error": "a form may have 50 fields."})
    endless = nobody.post("/login", content=(b"a" * 65536 for _ in range(20)), headers=SAME_ORIGIN)  # sent in chunks
    assert endless.status_code == 413
    assert "a body may have 1,048,576 bytes." in endless.text
    for settings in ("a = " + "[" * 5000 + "]" * 5000, "seed = " + "9" * 5000):
        response = operator.post("/v1/runs", json={"run": "x", "settings": settings})
        assert response.status_code == 400
        assert response.json()["error"].startswith("the settings are no TOML")
