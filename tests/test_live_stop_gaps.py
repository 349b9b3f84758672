"""What a node refuses until it has a whole policy of releases: free weights, large budgets, zero budgets, `nobody`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.hostile_server import HostileServer, begin_site, private_tally_config
from helpers.loopback_site import Site, close_nodes, rows_of_blocks, site_config
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.live import processes
from tacita.live.node import admission, verbs
from tacita.live.node.node import Node, NodeConfig
from tacita.live.running import daemon
from tacita.live.settings import adapt_participation, check_live_settings
from tacita.live.wire import decode_reply
from tacita.methods import resolve_config
from tacita.runs.assembly import Machine, assemble_federation

NODE = {"name": "n", "server": "localhost:1"}


def with_backbone(**settings: Any) -> RunConfig:
    """A plain tally with other settings."""
    config = site_config("tally")
    return config.model_copy(update={"backbone": {**config.backbone, **settings}})


# Weights that a server chooses


@pytest.mark.parametrize(
    ("name", "value"), [("length_power", 1.37), ("most_items", 7), ("decay", 0.123), ("length_power", 1e-9)]
)
def test_a_node_refuses_weights_that_a_server_chose(tmp_path: Path, name: str, value: float) -> None:
    site = begin_site(tmp_path, with_backbone(**{name: value}))
    server = HostileServer(site, "")
    reply = server.asks()
    assert (reply.head.verdict, reply.arrays) == ("refused", {})
    assert f"backbone.{name}" in reply.head.said
    assert server.node.store.list_releases() == []
    close_nodes(site)


def test_weights_of_our_own_runs_are_followed() -> None:
    for decay in (0.5, 0.7, 1.0):
        check_live_settings(with_backbone(decay=decay, length_power=0.0, most_items=0))
    order = site_config("tally-order")
    check_live_settings(order.model_copy(update={"backbone": {**order.backbone, "order_fold": 3.0}}))
    with pytest.raises(TacitaError, match=r"order_fold = 2\.9"):
        check_live_settings(order.model_copy(update={"backbone": {**order.backbone, "order_fold": 2.9}}))
    values = site_config("fedavg").model_dump(mode="json") | {"parts": [{"name": "interest", "kappa": 1.37}]}
    with pytest.raises(TacitaError, match=r"interest\.kappa"):
        check_live_settings(validate_model(RunConfig, values, "the test"))


def test_a_share_of_people_becomes_a_probability_only_where_the_method_chose_it() -> None:
    values: dict[str, Any] = {"method": "fedshare-local", "backbone": {"name": "mf"}}
    config = resolve_config(values, "the test")
    assert config.train.participation.kind == "fraction"
    check_live_settings(adapt_participation(config, values))
    assert adapt_participation(config, values).train.participation.rate == config.train.participation.rate
    asked = {**values, "train": {"participation": {"kind": "fraction", "rate": 0.5}}}
    with pytest.raises(TacitaError, match="use 'poisson'"):
        check_live_settings(adapt_participation(resolve_config(asked, "the test"), asked))


# Large budgets


def list_large_budgets() -> list[RunConfig]:
    """Runs that plan an epsilon above 8."""
    plain = site_config("fedavg").model_dump(mode="json")
    parts: list[dict[str, Any]] = [
        {"name": "dpps", "tiers": [0.5, 1.0, 1e5], "shares": [1, 1, 1]},
        {"name": "dp-fedavg", "epsilon": 8.1},
        {"name": "laplace-noise", "mode": "ldp", "epsilon": 1.0, "budget": 1e5},
    ]
    runs = [validate_model(RunConfig, plain | {"parts": [part]}, "the test") for part in parts]
    return [private_tally_config(8.1), *runs]


@pytest.mark.parametrize("config", list_large_budgets(), ids=["tally", "dpps", "dp-fedavg", "laplace"])
def test_a_node_refuses_a_large_epsilon_before_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig
) -> None:
    site = begin_site(tmp_path, private_tally_config(8.0))
    server = HostileServer(site, "")

    def build_nothing(config: RunConfig) -> Any:
        raise AssertionError("a plan was built")

    with monkeypatch.context() as patch:
        patch.setattr(admission, "build_plan", build_nothing)
        reply = server.asks(config=config.model_dump(mode="json"), run="other")
    assert reply.head.verdict == "refused"
    assert "max_epsilon" in reply.head.said
    assert server.asks().head.verdict == "ok"  # 8 is the default
    close_nodes(site)


def test_defaults_of_parts_count_as_planned(tmp_path: Path) -> None:
    values = site_config("fedavg").model_dump(mode="json") | {"parts": [{"name": "dpps"}]}
    assert max(admission.list_planned_epsilons(validate_model(RunConfig, values, "the test"))) == 5.0


# A budget of 0


def next_block(site: Site) -> None:
    site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
    site.collect(rows_of_blocks(site.config)[1])
    site.next_block()


@pytest.mark.parametrize("run", [None, "r"])
def test_who_declared_0_is_in_no_run(tmp_path: Path, run: str | None) -> None:
    """A run that counts nothing would take all of a person who wants to spend nothing."""
    site = begin_site(tmp_path, site_config("fedavg"))
    node = site.transport.members[1]
    user = node.store.list_users()[1][0]
    number = node.store.find_user(user)
    verbs.perform_verb(node, "budget", {"user": user, "epsilon": 0.0, "run": run})
    site.next_block()
    assert number not in node.store.read_block_rows("r", 0).user
    sums = [decode_reply(reply).head for sender, _, reply in site.transport.log if sender == 1]
    n_others = len(node.store.list_users()[0]) - 1
    assert {head.clients for head in sums if head.kind == "round"} == {n_others}
    node.store.assign_block("another", 0)
    assert (number in node.store.read_block_rows("another", 0).user) == (run == "r")
    verbs.perform_verb(node, "budget", {"user": user, "epsilon": 1.0})
    next_block(site)
    assert number in node.store.read_block_rows("r", 1).user
    close_nodes(site)


def test_who_declares_0_in_a_block_is_in_no_later_round(tmp_path: Path) -> None:
    site = begin_site(tmp_path, site_config("fedavg"))
    node: Node = site.transport.members[1]
    user = node.store.list_users()[1][0]
    n_rounds = 0

    def declare_after_first(number: int, body: bytes, answer: Any) -> bytes:
        nonlocal n_rounds
        reply = bytes(answer())
        if number == 1 and decode_reply(reply).head.kind == "round":
            n_rounds += 1
            if n_rounds == 1:
                verbs.perform_verb(node, "budget", {"user": user, "epsilon": 0.0})
        return reply

    site.transport.spoil = declare_after_first
    site.next_block()
    heads = [decode_reply(reply).head for sender, _, reply in site.transport.log if sender == 1]
    n_users = len(node.store.list_users()[0])
    assert [head.clients for head in heads if head.kind == "round"] == [n_users, n_users - 1, n_users - 1]
    close_nodes(site)


# The account of the connection


def test_a_connection_never_runs_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs as nobody could read the node's key and ask as the server."""
    with pytest.raises(TacitaError, match="an account of its own"):
        validate_model(NodeConfig, {**NODE, "run_as": "nobody"}, "node.toml")
    assert "for the node alone" in str(processes.find_user_problem("nobody"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    config = validate_model(NodeConfig, NODE, "node.toml")
    assert daemon._resolve_user(config).run_as in ("", processes.CONNECTION_ACCOUNT)
    monkeypatch.setattr(daemon, "find_user_problem", lambda name: None)
    assert daemon._resolve_user(config).run_as == processes.CONNECTION_ACCOUNT
