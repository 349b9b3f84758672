"""What FedShare is compared with: the server as a client, mended graphs, perturbed contributions (spec C.1-C.3, H.C)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle import federate, make_backbone, make_block, make_stream, no_total, started
from test_shared_graph import given_of, many_edges, table_of

from tacita.core.errors import TacitaError
from tacita.core.types import Floats, Given, ServerState, Stream
from tacita.federation.rounds import run_round
from tacita.methods import World, build_parts
from tacita.methods.sharing.server_client import ServerClient
from tacita.round.plan import Federation


def people(n: int = 40, n_items: int = 30) -> Stream:
    rng = np.random.default_rng(5)
    mine = [rng.permutation(n_items)[: rng.integers(3, 12)].tolist() for _ in range(n)]
    return make_stream(make_block(0, n_items, [m[:-2] for m in mine], [m[-2:-1] for m in mine], [m[-1:] for m in mine]))


def fed_with(*specs: dict[str, Any], stream: Stream | None = None, **train: Any) -> Federation:
    settings = {"objective": "bpr", "negatives": 1, "aggregation": "weighted", "optimiser": "lazy-adam"} | train
    fed = federate(stream or people(), make_backbone("ego", lr=0.05, item_lr_scale=1.0), **settings)
    parts = build_parts(list(specs), World(fed.backbone, fed.draws, fed.config.train))
    for part in parts:
        part.check(fed.stream.n_items)
    return replace(fed, parts=parts)


def after(fed: Federation, rounds: int = 3) -> ServerState:
    progress = started(fed)
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress.server


# the server as one client more (C.1)


def test_without_shared_edges_the_server_as_a_client_changes_no_bit() -> None:
    nobody = {"name": "sharing", "groups": [0, 0, 1]}
    plain, with_part = after(fed_with()), after(fed_with(nobody, {"name": "server-client"}))
    np.testing.assert_array_equal(plain.items, with_part.items)
    assert not np.array_equal(plain.items, after(fed_with({"name": "sharing"}, {"name": "server-client"})).items)


def server_part(aggregation: str = "weighted", **options: Any) -> ServerClient:
    train = {"aggregation": aggregation} | ({"denominator": 10.0} if aggregation == "fixed" else {})
    (part,) = fed_with({"name": "server-client", **options}, **train).parts
    assert isinstance(part, ServerClient)
    return part


def states(given: Given) -> tuple[ServerState, ServerState]:
    """What a round began with, and what clients of weight 12 made of it."""
    before = ServerState(table_of(14, 6), {}, given=given)
    return before, before.with_items(before.items + table_of(14, 6, seed=9) / 10)


def alone(part: ServerClient, before: ServerState) -> Floats:
    """The table where the server is the only client."""
    return part.server_step(before, before, replace(no_total(before), weight=0.0, n_clients=0)).items


def test_the_server_enters_the_mean_by_the_number_of_its_edges() -> None:
    before, server = states(many_edges(5, 14))
    part, edges = server_part(), len(before.given)
    total = replace(no_total(before, 3), weight=12.0)
    mine = alone(part, before)
    assert np.abs(mine - before.items).max() > 1e-3
    expected = (12 * server.items + edges * mine) / (12 + edges)
    made = part.server_step(before, server, total)
    np.testing.assert_allclose(made.items, expected, atol=1e-6)
    assert part.server_notes(made)["server_share"] == pytest.approx(edges / (12 + edges))


def test_its_share_of_the_mean_can_be_capped() -> None:
    before, server = states(many_edges(5, 14))
    total = replace(no_total(before, 3), weight=12.0)
    made = server_part(weight_cap=0.25).server_step(before, server, total)
    np.testing.assert_allclose(made.items, 0.75 * server.items + 0.25 * alone(server_part(), before), atol=1e-6)
    nothing_else = server_part(weight_cap=0.25).server_step(before, before, no_total(before))
    np.testing.assert_array_equal(nothing_else.items, before.items)


@pytest.mark.parametrize("aggregation", ["mean", "fixed", "per-row"])
def test_it_joins_every_kind_of_mean(aggregation: str) -> None:
    before, server = states(given_of([(1, 0), (1, 2), (2, 2), (2, 5)]))
    touched = np.zeros(14)
    touched[:4] = 3.0
    total = replace(no_total(before, 3), sums={"rows": np.zeros((14, 6)), "rows.touched": touched})
    mine, own = alone(server_part(), before), (server.items, before.items)
    part = server_part(aggregation, layers=3)
    made = part.server_step(before, server, total).items
    others = {"mean": 3.0, "fixed": 10.0, "per-row": touched[:, None]}[aggregation]
    expected = (others * own[0] + mine) / (others + 1.0)
    if aggregation == "per-row":
        moved = (mine != own[1]).any(1)
        expected = np.where(moved[:, None], expected, server.items)
        assert 0 < moved.sum() < 14
    np.testing.assert_allclose(made, expected, atol=1e-6)


def test_a_fixed_denominator_has_to_be_said_where_the_server_joins_the_sum() -> None:
    with pytest.raises(TacitaError, match="needs train.denominator"):
        fed_with({"name": "server-client"}, aggregation="fixed")


def test_layers_change_what_the_server_learns() -> None:
    before, _ = states(many_edges(5, 14))
    assert not np.array_equal(alone(server_part(layers=1), before), alone(server_part(layers=3), before))
