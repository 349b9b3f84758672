"""The person's page and API: exact reasons, nothing without a token, nothing of others, nothing from other sites."""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.loopback_site import Site, close_nodes, make_site, play_blocks, site_config
from helpers.node_accounts import dpps_config as budget_config
from helpers.page_routes import every_route
from helpers.page_sites import ORIGIN, SAME_ORIGIN, play_two_blocks, user_ids

pytest.importorskip("fastapi", reason="the pages need tacita[live]")

from starlette.testclient import TestClient

from tacita.core.config import validate_model
from tacita.core.errors import TacitaError
from tacita.live.formatting import format_odds
from tacita.live.node import explanations, user_queries, verbs
from tacita.live.node.node import Node, NodeConfig
from tacita.live.node.user_queries import ItemQuery
from tacita.live.pages.person_app import make_node_app
from tacita.live.pages.rendering import render
from tacita.live.pages.tokens import Principal, Tokens
from tacita.live.wire import RequestOutcome


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    two_blocks = play_two_blocks(tmp_path_factory.mktemp("site"))
    yield two_blocks
    close_nodes(two_blocks)


@pytest.fixture
def node(site: Site) -> Node:
    return site.transport.members[1]


def browser(node: Node, user: str | None, tokens: Tokens | None = None) -> TestClient:
    """Somebody who opened their link; None: somebody without one."""
    tokens = tokens or Tokens()
    client = TestClient(make_node_app(node, tokens), base_url=ORIGIN, raise_server_exceptions=True)
    if user is not None:
        entered = client.get(f"/enter/{tokens.make_link(Principal('person', user))}")
        assert entered.status_code == 200
    client.headers.update(SAME_ORIGIN)
    return client


# What is said


def test_the_terms_of_a_recommendation_add_up_to_its_score(node: Node) -> None:
    for user in user_ids(node)[:5]:
        for entry in node.recommend(user, 5):
            why = explanations.explain_item(node.snapshot, user, entry["item"])
            assert why["kind"] == "exact"
            total = sum(term["term"] for term in why["terms"]) + why["rest"]
            assert total == pytest.approx(entry["score"], abs=1e-5)
            own = set(node.store.read_history([node.store.find_user(user)]).item)
            assert {term["item"] for term in why["terms"]} <= own


def test_explanation_mentions_recency_only_where_it_applies(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    user = user_ids(node)[0]
    item = node.recommend(user, 1)[0]["item"]
    heads = node.snapshot.scorer.server.heads
    for recency in (0.0, 5.0):
        monkeypatch.setitem(heads, "recency", np.full_like(heads["recency"], recency))
        why = explanations.explain_item(node.snapshot, user, item)
        assert why["kind"] == "exact"
        assert ("Newer items count more" in why["said"]) == (recency > 0)


def test_a_preview_is_what_a_node_without_the_item_recommends(site: Site, node: Node, tmp_path: Path) -> None:
    user = user_ids(node)[0]
    first = node.recommend(user, 5)[0]["item"]
    gone = explanations.explain_item(node.snapshot, user, first)["terms"][0]["item"]
    report = explanations.preview_removal(node.snapshot, user, first, gone, k=5)
    row = node.snapshot.find_user_row(user)
    scorer = node.snapshot.scorer
    place = [raw for raw, _ in node.snapshot.items].index(gone)
    view = scorer.build_scoring_view(np.array([row], np.int32))
    latest = scorer.plan.backbone.select_latest_items(view)  # type: ignore[attr-defined]
    assert report["can"]
    assert gone not in [entry["item"] for entry in report["after"]]
    if place in latest.ids:
        assert [entry["score"] for entry in report["after"]] != [entry["score"] for entry in report["before"]]


def test_model_without_exact_explanation_says_so(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config("fedavg"))
    play_blocks(site)
    node = site.transport.members[1]
    node.refresh_snapshot()
    user = user_ids(node)[0]
    entry = node.recommend(user, 1)[0]["item"]
    explanation = explanations.explain_item(node.snapshot, user, entry)
    assert explanation["kind"] == "alike"
    assert "cannot be taken apart" in explanation["said"]
    own = node.store.read_history([node.store.find_user(user)]).item[0]
    assert not explanations.preview_removal(node.snapshot, user, entry, own)["can"]
    assert "Nothing can be taken back from r: that run was" in browser(node, user).get("/").text
    for member in site.transport.members.values():
        member.close()


# Choices


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Node]:
    config = validate_model(NodeConfig, {"name": "n", "server": "localhost:1"}, "the test")
    Node.create(tmp_path / "n", config)
    with Node.open(tmp_path / "n") as node:
        node.store.add_interactions([("ann", f"i{n}", float(n), None) for n in range(40)] + [("bob", "i1", 1.0, None)])
        yield node


def test_sharing_presets_and_switch(alone: Node) -> None:
    store = alone.store

    def part() -> int:
        return int(user_queries.summarise_user(store, "ann")["taking part"])

    assert (part(), user_queries.summarise_user(store, "ann")["mode"]) == (40, "everything")
    store.set_consent("ann", "i3", "keep")
    assert (part(), user_queries.summarise_user(store, "ann")["mode"]) == (39, "some")
    user_queries.apply_consent_preset(store, "ann", "some")
    store.add_interactions([("ann", "new", 99.0, None)])
    assert part() == 39
    user_queries.apply_consent_preset(store, "ann", "nothing")
    assert part() == 0
    assert store.count_learning_users() == 1  # bob
    user_queries.apply_consent_preset(store, "ann", "everything")
    assert (part(), user_queries.summarise_user(store, "ann")["items"]) == (41, 41)
    assert store.list_private_items(store.find_user("ann")) == set()


def test_statement_about_new_items_is_true(alone: Node) -> None:
    """Who switched one item off has not kept what is new at home: the page says so, and offers it."""
    client, stays = browser(alone, "ann"), "whatever is new stays on this device"
    client.put("/v1/me/items", json={"item": "i3", "takes_part": False})
    before = client.get("/").text
    alone.store.add_interactions([("ann", "new", 99.0, None)])
    assert user_queries.list_user_items(alone.store, "ann", ItemQuery(["new"], "part"))[0] == 1
    assert stays not in before
    assert "so does whatever is new" in before
    assert "Keep whatever is new on this device" in before
    after = client.post("/do/choice", data={"preset": "some"}, headers={"hx-request": "true"}).text
    alone.store.add_interactions([("ann", "newer", 100.0, None)])
    assert user_queries.list_user_items(alone.store, "ann", ItemQuery(["newer"], "kept"))[0] == 1
    assert stays in after
    assert "Keep whatever is new" not in after


def test_pause_blocks_uploads_and_keeps_choices(alone: Node) -> None:
    store = alone.store
    store.set_consent("ann", "i3", "keep")
    before = store.withdrawals
    user_queries.set_pause(store, "ann", True)
    assert store.withdrawals > before  # a sum that is being made is made anew
    assert store.assign_block("r", 0) == 1  # bob's
    assert user_queries.summarise_user(store, "ann")["taking part"] == 0
    user_queries.set_pause(store, "ann", False)
    assert user_queries.summarise_user(store, "ann")["taking part"] == 39
    user_queries.set_pause(store, "ann", True)
    store.erase_user("ann")
    assert (
        store.run_query(lambda db: db.execute("SELECT count(*) FROM meta WHERE key LIKE 'paused%'").fetchone()[0]) == 0
    )


def test_pages_of_items_are_newest_first_and_miss_none(alone: Node) -> None:
    observations: list[str] = []
    for offset in range(0, 60, 15):
        total, rows = user_queries.list_user_items(alone.store, "ann", ItemQuery(offset=offset, limit=15))
        assert total == 40
        observations += [row["item"] for row in rows]
    assert observations == [f"i{n}" for n in reversed(range(40))]
    alone.store.set_consent("ann", "i7", "keep")
    assert [r["item"] for r in user_queries.list_user_items(alone.store, "ann", ItemQuery(only="kept"))[1]] == ["i7"]
    assert user_queries.list_user_items(alone.store, "ann", ItemQuery(only="part"))[0] == 39


def test_the_first_view_of_a_long_history_is_quick(alone: Node) -> None:
    alone.store.add_interactions([("ann", f"item {n}", float(n), None) for n in range(100_000)])
    client = browser(alone, "ann")
    client.get("/")  # templates are compiled once
    began = time.process_time()
    response = client.get("/")
    spent = time.process_time() - began
    assert response.status_code == 200
    assert "100,040" in response.text
    assert spent < 1.0, spent


# Who gets in


def test_a_link_opens_one_session_and_cookies_are_kept_from_scripts(node: Node) -> None:
    tokens = Tokens()
    client = TestClient(make_node_app(node, tokens), base_url=ORIGIN)
    link = f"/enter/{tokens.make_link(Principal('person', user_ids(node)[0]))}"
    answer = client.get(link)
    message = answer.headers["set-cookie"].lower()
    assert "httponly" in message
    assert "samesite=strict" in message
    assert client.get("/v1/me").json()["user"] == user_ids(node)[0]
    assert TestClient(make_node_app(node, tokens), base_url=ORIGIN).get(link).status_code == 401


def test_links_and_sessions_end() -> None:
    now = [0.0]
    tokens = Tokens(lambda: now[0])
    link = tokens.make_link(Principal("person", "ann"))
    now[0] = 601.0
    assert tokens.redeem_link(link) is None
    session = tokens.redeem_link(tokens.make_link(Principal("person", "ann")))
    assert session is not None
    assert tokens.find_principal(session) == Principal("person", "ann")
    now[0] += 13 * 3600
    assert tokens.find_principal(session) is None


def paths(node: Node) -> list[tuple[str, str]]:
    """Every route of the node's application, from the application itself."""
    return every_route(make_node_app(node, Tokens()))


OPEN = {"/htmx.js", "/style.css", "/enter/{link}"}


def test_nothing_is_answered_without_a_token(node: Node) -> None:
    client = browser(node, None)
    walked = 0
    for method, path in paths(node):
        if path in OPEN:
            continue
        answer = client.request(method, path.replace("{link}", "x"), json={})
        assert answer.status_code == 401, (method, path)
        assert "tacita node page" in answer.text
        if method == "GET" and not path.startswith("/v1"):
            assert "style.css" in answer.text  # a page like the others, which says what to do
        walked += 1
    assert walked >= 25


def test_nothing_of_another_person_is_reachable_with_any_token(node: Node) -> None:
    """Every route with every other token, with ids of the first person wherever something can be named."""
    first, *others = user_ids(node)[:4]
    own = node.store.read_history([node.store.find_user(first)]).item
    for other in others:
        client = browser(node, other)
        other_values = set(node.store.read_history([node.store.find_user(other)]).item)
        alien = next(item for item in own if item not in other_values)
        for method, path in paths(node):
            if path in OPEN or "erase" in path or "bye" in path:
                continue
            named = {"user": first, "item": alien, "without": alien, "takes_part": True, "kind": "forget"}
            answer = client.request(
                method, path, params={"user": first, "item": alien, "without": alien, "search": first}, json=named
            )
            assert answer.status_code < 500, (method, path)
            if "json" in answer.headers["content-type"]:
                assert f'"{first}"' not in answer.text, (method, path)
            assert f"<b>{first}</b>" not in answer.text, (method, path)
        listed = client.get("/v1/me/history", params={"limit": 200}).json()["items"]
        assert {entry["item"] for entry in listed} <= other_values
        assert client.put("/v1/me/items", json={"item": alien, "takes_part": False}).status_code == 400
        assert client.get("/v1/people").status_code == 403
        assert first not in client.get("/v1/me/export").text.replace(alien, "")


def test_a_page_never_takes_the_cookie_of_another_page(site: Site) -> None:
    """One browser, pages of two nodes and of a server on other ports: it sends all cookies to each of them."""
    first, second = site.transport.members[1], site.transport.members[2]
    second.config = second.config.model_copy(update={"name": first.config.name})  # the same name, too
    own_values, other_values = browser(first, user_ids(first)[0]), browser(second, user_ids(second)[0])
    (name, session), (other, stolen) = (
        next(iter(candidate.cookies.items())) for candidate in (own_values, other_values)
    )
    assert name != other
    for method, path in paths(first):
        if path in OPEN:
            continue
        for state in ({other: stolen}, {name: stolen}, {other: session}, {"tacita-operator": stolen}):
            stranger = TestClient(own_values.app, base_url=ORIGIN, headers=SAME_ORIGIN, cookies=state)
            assert stranger.request(method, path, json={}).status_code == 401, (method, path)
    own_values.cookies.update(other_values.cookies)
    assert own_values.get("/v1/me").json()["user"] == user_ids(first)[0]


def test_an_owners_token_opens_no_persons_page(node: Node) -> None:
    """Every route: an owner gets nothing but the list and links."""
    tokens, walked = Tokens(), 0
    client = TestClient(make_node_app(node, tokens), base_url=ORIGIN, headers=SAME_ORIGIN)
    client.get(f"/enter/{tokens.make_link(Principal('owner'))}")
    own = {"/", "/part/people", "/do/link", "/v1/people", "/v1/people/links", "/v1/health", "/v1/openapi.json"}
    user = user_ids(node)[0]
    item = node.store.read_history([node.store.find_user(user)]).item[0]
    for method, path in paths(node):
        if path in OPEN | own or "bye" in path:
            continue
        named = {"user": user, "item": item, "without": item, "run": "r"}
        body = {"/v1/me/choice": {"preset": "nothing"}, "/v1/me/items": {"item": item, "takes_part": False}}
        body |= {"/v1/me/pause": {"paused": True}, "/v1/me/budget": {"epsilon": 1.0}, "/v1/me/erase": {"confirm": user}}
        body |= {"/v1/me/requests": {"kind": "forget", "items": [item]}}
        answer = client.request(method, path, params=named, json=body.get(path, named))
        assert answer.status_code == 403, (method, path, answer.text)
        walked += 1
    assert walked >= 22
    assert user_queries.summarise_user(node.store, user)["taking part"] > 0


def test_an_owner_sees_ids_and_hands_out_links_and_reads_no_history(node: Node) -> None:
    tokens = Tokens()
    client = TestClient(make_node_app(node, tokens), base_url=ORIGIN, headers=SAME_ORIGIN)
    client.get(f"/enter/{tokens.make_link(Principal('owner'))}")
    document = client.get("/v1/people").json()
    assert document["total"] == len(user_ids(node))
    assert set(document["people"][0]) == {"user", "rows"}
    assert client.get("/v1/me").status_code == 403
    link = client.post("/v1/people/links", json={"user": user_ids(node)[1]}).json()["link"]
    guest = TestClient(make_node_app(node, tokens), base_url=ORIGIN, headers=SAME_ORIGIN)
    guest.get(link.removeprefix(ORIGIN))
    assert guest.get("/v1/me").json()["user"] == user_ids(node)[1]
    assert "Make a link" in client.get("/").text


# Other sites


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example:8000"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": "null"}, 403),
    ],
    ids=str,
)
def test_cross_origin_reads_are_refused(node: Node, headers: dict[str, str], status: int) -> None:
    client = browser(node, user_ids(node)[0])
    del client.headers["origin"], client.headers["sec-fetch-site"]
    assert client.get("/v1/me", headers=headers).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": ORIGIN, "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    ],
    ids=str,
)
def test_cross_origin_writes_are_refused(node: Node, headers: dict[str, str]) -> None:
    user = user_ids(node)[0]
    client = browser(node, user)
    del client.headers["origin"], client.headers["sec-fetch-site"]
    for path in ("/v1/me/pause", "/do/pause"):
        method = "PUT" if path.startswith("/v1") else "POST"
        assert client.request(method, path, json={"paused": True}, headers=headers).status_code == 403
    assert not user_queries.summarise_user(node.store, user)["paused"]


def test_every_answer_carries_the_policy_and_titles_are_texts(node: Node) -> None:
    client = browser(node, user_ids(node)[0])
    item = node.recommend(user_ids(node)[0], 1)[0]["item"]
    for path in ("/", f"/part/why?item={item}", "/part/history", "/part/held", "/v1/me", "/htmx.js", "/enter/no"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        if "html" in answer.headers["content-type"]:
            assert "<script>alert" not in answer.text
            assert not re.search(r"\son\w+=|style=\"|<script>|https?://(?!127)", answer.text), path
    assert "&lt;script&gt;alert" in client.get("/").text


# Deciding


def test_switches_forms_and_erasing(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config("tally"))
    play_blocks(site)
    node = site.transport.members[1]
    node.refresh_snapshot()
    user, other = user_ids(node)[:2]
    client = browser(node, user)
    item = node.store.read_history([node.store.find_user(user)]).item[0]
    assert client.post("/do/switch", data={"item": item}, headers={"hx-request": "true"}).status_code == 200
    assert node.store.list_private_items(node.store.find_user(user)) == {item}
    moved = client.post("/do/switch", data={"item": item, "takes_part": "on"}, follow_redirects=False)
    assert moved.status_code == 303  # without scripts
    assert node.store.list_private_items(node.store.find_user(user)) == set()
    assert client.put("/v1/me/choice", json={"preset": "nothing"}).json()["taking part"] == 0
    client.post("/do/choice", data={"preset": "everything"})
    response = client.post("/do/ask", data={"kind": "forget", "item": item}, headers={"hx-request": "true"})
    assert "waits here for the next message" in response.text
    assert client.get("/v1/me/requests").json()["requests"][0]["state"].startswith("queued")
    repeat = client.post("/v1/me/requests", json={"kind": "forget", "items": [item]})
    assert repeat.status_code == 400
    assert "already" in repeat.json()["error"]
    assert "asked back" in client.get("/", params={"search": item}).text
    assert "taken back" not in client.get("/part/history", params={"search": item}).text  # not before it is done
    assert browser(node, other).get("/v1/me/requests").json()["requests"] == []
    assert f'"item": "{item}"' in client.get("/v1/me/export").text
    assert client.post("/v1/me/erase", json={"confirm": "somebody"}).status_code == 400
    assert client.post("/v1/me/erase", json={"confirm": user}).json()["users"] == 1
    assert client.get("/v1/me").status_code == 401
    with pytest.raises(TacitaError):
        node.store.find_user(user)
    for member in site.transport.members.values():
        member.close()


def test_a_person_declares_a_budget_and_sees_what_releases_cost(tmp_path: Path) -> None:
    site = make_site(tmp_path, budget_config())
    play_blocks(site)
    node = site.transport.members[1]
    user, other = user_ids(node)[:2]
    client = browser(node, user)
    document = client.get("/v1/me/budget").json()
    assert document["declared"] is None
    cost = document["runs"][0]["events"]["dpps: upload"]
    assert cost["times"] > 0
    assert cost["epsilon"] == pytest.approx(document["runs"][0]["spent"])
    charged = client.get("/v1/me/costs", params={"run": "r", "limit": 200}).json()
    assert charged["total"] == len(charged["costs"]) == cost["times"]
    assert sum(entry["epsilon"] for entry in charged["costs"]) == pytest.approx(document["runs"][0]["spent"])
    other_values = browser(node, other).get("/v1/me/costs", params={"run": "r"}).json()
    assert other_values["costs"][0]["spent"] == pytest.approx(
        browser(node, other).get("/v1/me/budget").json()["runs"][0]["spent"]
    )
    latest = client.get("/v1/me/releases").json()["releases"]
    assert {entry["cost said"].split(" 0")[0] for entry in latest} == {"cost you"}
    text = client.get("/part/budget").text
    assert "<meter" in text
    assert f"cost you <b>{charged['costs'][0]['epsilon']:.3g}</b>" in text
    assert f"<b>{document['runs'][0]['left']:.3g}</b> left" in text
    assert document["runs"][0]["units"] == ["person"]
    assert (
        f"right at most <b>{format_odds(document['runs'][0]['spent'], document['runs'][0]['delta'])}</b> times in 100"
        in text
    )
    mixed = {
        **document["runs"][0],
        "units": ["interaction", "person"],
        "costs": charged,
    }  # no bound about a whole person
    assert "is right at most <b>" not in render("person_budget.html", budget={"declared": None, "runs": [mixed]})
    assert text.count("cost you <b>") == min(6, charged["total"])
    assert "round 1<" in client.get("/part/costs", params={"run": "r", "offset": str(charged["total"] - 1)}).text
    assert "Dpps: upload" in text
    assert client.put("/v1/me/budget", json={"epsilon": 0.25}).json()["declared"] == 0.25
    done = client.post("/do/budget", data={"epsilon": "0,75"}, headers={"hx-request": "true"}).text
    assert 'value="0.75"' in done
    for wrong in ("", "much", "-1", "nan", "1e9", "9" * 50):
        response = client.post("/do/budget", data={"epsilon": wrong}, headers={"hx-request": "true"})
        assert (response.status_code, 'class="note"' in response.text) == (200, True), wrong
    assert client.get("/v1/me/budget").json()["declared"] == 0.75
    assert browser(node, other).get("/v1/me/budget").json()["declared"] is None
    close_nodes(site)


def test_epsilon_is_explained_as_guessing_odds() -> None:
    """(e^epsilon + delta) / (1 + e^epsilon), which no reader of it exceeds; never rounded down."""
    messages = {epsilon: format_odds(epsilon) for epsilon in (-1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 1e6)}
    assert list(messages.values()) == ["50", "50", "63", "74", "89", "99", "100", "100"]
    assert all(float(report) >= 100 / (1 + math.exp(-max(0.0, epsilon))) for epsilon, report in messages.items())
    assert (format_odds(0.0, 1e-5), format_odds(0.0, 0.5), format_odds(3.0, 1.0)) == (
        "51",
        "75",
        "100",
    )  # delta is what is added to it


def test_page_withdraws_everything(tmp_path: Path) -> None:
    """Five people leave; the page says how far that is, and then that the server certified it."""
    site = make_site(tmp_path, site_config("tally"))
    play_blocks(site)
    node = site.transport.members[1]
    node.refresh_snapshot()
    clients = [browser(node, user) for user in user_ids(node)[:5]]
    assert "Take back everything" in clients[0].get("/").text
    assert "not made to forget" not in clients[0].get("/").text
    for client in clients:
        request = client.post("/do/ask", data={"kind": "leave"}, headers={"hx-request": "true"}).text
        assert "Leave, and take everything back" in request
        assert "waits here for the next message" in request
    assert "Take back everything" not in clients[0].get("/").text  # it is asked for once
    node.store.add_interactions([(raw, "i1", 1e9 + n, None) for n, raw in enumerate(user_ids(node)[5:])])
    site.next_block()
    report = clients[0].get("/v1/me/requests").json()["requests"][0]
    assert report["done"], report["state"]
    assert report["certificate"]["verdict"]
    assert "It has certified that you left r, with everything." in clients[0].get("/part/held").text
    close_nodes(site)


def test_refused_leave_request_can_be_repeated(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config("tally"))
    play_blocks(site)
    node = site.transport.members[1]
    node.refresh_snapshot()
    client = browser(node, user_ids(node)[0])
    client.post("/do/ask", data={"kind": "leave"}, headers={"hx-request": "true"})
    (entry,) = node.store.list_requests("r")
    assert "Take back everything" not in client.get("/").text
    with contextlib.closing(sqlite3.connect(node.store.path)) as db, db:
        db.execute("UPDATE requests SET sent = 1.0")  # as if an answer had carried it
    node.store.record_outcomes("r", [RequestOutcome(id=entry.id, state="refused", said="not now.")])
    assert "Take back everything" in client.get("/").text
    client.post("/do/ask", data={"kind": "leave"}, headers={"hx-request": "true"})
    assert [request.phase for request in node.store.list_requests("r")] == ["refused", "queued"]
    close_nodes(site)


def test_a_certificate_stands_first_on_the_page(tmp_path: Path) -> None:
    """Five people take six items back; the next block carries it, and the page shows the server's certificate."""
    from helpers.loopback_site import rows_of_blocks
    from tacita.runs.assembly import Machine, assemble_federation

    site = make_site(tmp_path, site_config("tally"))
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids))
    blocks = rows_of_blocks(site.config)
    site.collect(blocks[0])
    site.next_block()
    node = site.transport.members[1]
    node.refresh_snapshot()
    clients = [browser(node, user) for user in user_ids(node)[:5]]
    for client in clients:  # some of their items only validate: of six one at least was told
        items = [i["item"] for i in client.get("/v1/me/history").json()["items"] if i["left in a sum"]][:6]
        assert client.post("/v1/me/requests", json={"kind": "forget", "items": items}).status_code == 200
    site.collect(blocks[1])
    site.next_block()
    text, document = clients[0].get("/").text, clients[0].get("/v1/me/held").json()
    assert document["items in sums"] > 0
    assert (
        "It has certified since that 6 items of yours are taken out of its record and its model (r)."
        in document["said"]
    )
    assert not any("certified" in line for line in browser(node, user_ids(node)[5]).get("/v1/me/held").json()["said"])
    assert "<b>Certificate</b>" in text
    assert "Taken out of the record and the model" in text
    assert "· taken back" in text
    assert text.index("Certificate") < text.index("items of yours") < text.index("For you, and why")
    assert clients[0].get("/v1/me").json()["taking part"] < clients[0].get("/v1/me").json()["items"]
    for member in site.transport.members.values():
        member.close()


def test_reused_id_after_erasure_is_a_new_user(node: Node) -> None:
    node.store.add_interactions([("anna", "b1", 1.0, None)])
    tokens = Tokens()
    client, waiting = (
        browser(node, "anna", tokens),
        tokens.make_link(Principal("person", "anna", node.store.find_user("anna"))),
    )
    assert client.get("/v1/me").status_code == 200
    verbs.perform_verb(node, "erase", {"user": "anna"})  # by the command line, which knows no sessions
    assert client.get("/v1/me").status_code == 401
    node.store.add_interactions([("anna", "b2", 2.0, None)])
    assert client.get("/v1/me/history").status_code == 401
    assert client.get(f"/enter/{waiting}").status_code == 401
    assert browser(node, "anna", tokens).get("/v1/me/history").status_code == 200
    verbs.perform_verb(node, "erase", {"user": "anna"})
