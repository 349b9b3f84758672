"""Unlearning in which no device takes part: decoupled (exact) and delta-replay (spec H.D 1, 2)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.oracle import federate, make_backbone, make_block, make_stream, started
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Floats, Keys, Ragged, ServerState
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, begin_block, end_block, run_round
from tacita.methods import RunContext, build_parts
from tacita.methods.sharing.decoupled_learning import DecoupledLearning
from tacita.methods.sharing.delta_replay import DeltaReplay
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.sharing import Sharing
from tacita.round import registry
from tacita.round.broadcast import Audience
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch

N_ITEMS = 30
SHARING = {"name": "sharing", "groups": [1, 2, 1]}


def federation(*specs: dict[str, Any], blocks: int = 1, backbone: str = "ego", **train: Any) -> Federation:
    rng = np.random.default_rng(3)
    result = []
    for index in range(blocks):
        n_items = N_ITEMS + 5 * index
        own = [rng.choice(n_items, 10, replace=False).tolist() for _ in range(24)]
        lists = [o[:7] for o in own], [o[7:8] for o in own], [o[8:] for o in own]
        result.append(make_block(index, n_items, *lists, known=24 * (index > 0)))
    plain = {"objective": "bpr", "negatives": 1, "rounds": 40, **train}
    fed = federate(make_stream(*result), make_backbone(backbone), **plain)
    parts = build_parts(list(specs), RunContext(fed.backbone, fed.draws, fed.config.train))
    for part in parts:
        part.check(N_ITEMS)
    return replace(fed, parts=parts)


def decoupled(**options: Any) -> tuple[dict[str, Any], ...]:
    return {**SHARING, "exclude": "local"}, {"name": "decoupled", "steps": 4, "shards": 4, "sync_every": 2, **options}


def replaying(graph: dict[str, Any] | None = None, **options: Any) -> tuple[dict[str, Any], ...]:
    return SHARING, {"name": "delta-replay", **options}, {"name": "shared-graph", "edge_batch": 32, **(graph or {})}


def play(fed: Federation, progress: Progress, rounds: int) -> None:
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)


def some_sharers(server: ServerState, n: int) -> Keys:
    return np.unique(server.shared.sender)[:n]


def all_of(server: ServerState, senders: Keys, kind: Any = "unshare") -> RequestBatch:
    return RequestBatch(kind, senders, server.shared.take_sender_lists(senders))


def digest(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def served(fed: Federation, server: ServerState) -> Floats:
    part = fed.parts[1]
    assert isinstance(part, DecoupledLearning)
    table: Floats = part.broadcast(server, Audience("serving")).common["table"]
    return table


# decoupled


def trained_without(fed: Federation, gone: RequestBatch, rounds: int) -> Progress:
    """A run of its own, in which the people took everything back before anybody trained."""
    progress = started(fed)
    handle_requests(fed, progress, gone)
    play(fed, progress, rounds)
    return progress


@pytest.mark.parametrize("rounds", [2, 5])
def test_decoupled_forgets_exactly(rounds: int) -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    gone = all_of(progress.server, some_sharers(progress.server, 3))
    play(fed, progress, rounds)
    before = progress.server
    private = progress.clients.private.copy()
    message = handle_requests(fed, progress, gone)["decoupled"]
    repeat = trained_without(fed, gone, rounds)
    assert message.exact
    assert (message.rounds, message.clients_asked, progress.played) == (0, 0, 0)
    for name, array in repeat.server.parts["decoupled"].items():
        assert digest(array) == digest(progress.server.parts["decoupled"][name]), name
    assert digest(served(fed, progress.server)) == digest(served(fed, repeat.server))
    assert digest(progress.server.items) == digest(repeat.server.items)
    assert digest(private) == digest(progress.clients.private) == digest(repeat.clients.private)
    assert digest(served(fed, progress.server)) != digest(served(fed, before))


def test_training_after_unlearning_continues_as_the_run_without_the_data() -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    gone = all_of(progress.server, some_sharers(progress.server, 2))
    play(fed, progress, 3)
    handle_requests(fed, progress, gone)
    play(fed, progress, 3)
    repeat = trained_without(fed, gone, 6)
    assert digest(served(fed, progress.server)) == digest(served(fed, repeat.server))


def with_and_without(exclude: str, absent: bool) -> tuple[str, str, bool]:
    """Item 0 is shared by few people and drawn as a negative often: there are hardly any others.

    Two people share it and withdraw it in the end; or it is `absent` from their histories from the beginning.
    """
    own = [[0, 1 + u % 5, 1 + (u + 2) % 5] for u in range(8)]
    withdrawing, sharing = [0, 3], [1, 4, 5]
    lists = [entry[1:] if absent and u in withdrawing else entry for u, entry in enumerate(own)]
    specs = [{"name": "sharing", "groups": [0, 0, 1], "exclude": exclude}, decoupled()[1]]
    fed = federate(make_stream(make_block(0, 7, lists)), make_backbone("ego"), objective="bpr", negatives=2)
    fed = replace(fed, parts=build_parts(specs, RunContext(fed.backbone, fed.draws, fed.config.train)))
    progress, keys = started(fed), fed.stream.user_keys
    all_users = sharing if absent else [*sharing, *withdrawing]
    handle_requests(fed, progress, RequestBatch("share", keys[all_users], Ragged.from_lists([[0]] * len(all_users))))
    play(fed, progress, 4)
    exact = absent
    if not absent:
        gone = RequestBatch("unshare", keys[withdrawing], Ragged.from_lists([[0], [0]]))
        exact = handle_requests(fed, progress, gone)["decoupled"].exact
    return digest(progress.server.items), digest(served(fed, progress.server)), exact


def test_a_popular_negative_that_is_withdrawn_leaves_no_trace() -> None:
    first, other = (with_and_without("local", absent) for absent in (False, True))
    assert first == other
    assert first[2]


def test_excluding_shared_items_as_negatives_leaves_a_trace() -> None:
    first, other = (with_and_without("owned", absent) for absent in (False, True))
    assert first[0] != other[0]
    assert not first[2]


def test_shards_without_requests_keep_their_tables() -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    play(fed, progress, 2)
    part = fed.parts[1]
    assert isinstance(part, DecoupledLearning)
    asking = some_sharers(progress.server, 1)
    before = progress.server.parts["decoupled"]["residual"]
    message = handle_requests(fed, progress, all_of(progress.server, asking))["decoupled"]
    after = progress.server.parts["decoupled"]["residual"]
    (own_values,) = part.assign_shards(asking)
    for k in range(4):
        assert (digest(before[k]) == digest(after[k])) == (k != own_values)
    assert (message.details["shards"], message.details["of_shards"]) == (1, 4)


def test_devices_federate_as_if_nothing_were_shared_with_the_server() -> None:
    tables = []
    for specs in (decoupled(), decoupled()[:1]):
        fed = federation(*specs)
        progress = started(fed)
        play(fed, progress, 4)
        tables.append(progress.server.items)
    np.testing.assert_array_equal(*tables)


def test_shard_tables_are_weighted_by_item_membership() -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    play(fed, progress, 2)
    part, server = fed.parts[1], progress.server
    assert isinstance(part, DecoupledLearning)
    state = server.parts["decoupled"]
    shard = part.assign_shards(server.shared.sender)
    counts = np.array([np.bincount(server.shared.item[shard == k], minlength=N_ITEMS) for k in range(4)])
    weight = counts / np.maximum(1, counts.sum(0))
    np.testing.assert_allclose(state["added"], np.einsum("ki,kij->ij", weight, state["residual"]), atol=1e-6)
    assert np.abs(state["added"]).max() > 1e-3
    assert not state["added"][np.setdiff1d(np.arange(N_ITEMS), server.shared.item)].any()


def test_an_empty_request_and_one_before_any_sync_change_nothing() -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    early = handle_requests(fed, progress, all_of(progress.server, some_sharers(progress.server, 1)))["decoupled"]
    assert early.details["shards"] == 0
    play(fed, progress, 2)
    before = progress.server
    handle_requests(fed, progress, RequestBatch("unshare", some_sharers(before, 1), Ragged.empty(1)))
    assert progress.server.parts["decoupled"] is before.parts["decoupled"]


def test_all_users_can_withdraw_everything() -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    play(fed, progress, 2)
    handle_requests(fed, progress, all_of(progress.server, some_sharers(progress.server, 1000)))
    np.testing.assert_array_equal(served(fed, progress.server), progress.server.items)


@pytest.mark.parametrize("kind", ["leave", "forget"])
def test_items_also_learned_on_devices_are_not_certified_exact(kind: str) -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    play(fed, progress, 2)
    asking = some_sharers(progress.server, 1)
    items = Ragged.empty(1) if kind == "leave" else Ragged.from_lists([list(range(N_ITEMS))])
    assert not handle_requests(fed, progress, RequestBatch(kind, asking, items))["decoupled"].exact


class RenamedSharing(Sharing):
    name = "renamed-sharing"


@pytest.mark.parametrize(
    ("options", "exact"),
    [({}, True), ({"exclude": "owned"}, False), ({"unshare": "to_local"}, False), ({"still_learn": True}, False)],
    ids=["apart", "owned", "to_local", "still_learn"],
)
def test_exact_where_devices_learn_from_nothing_shared_whichever_part_keeps_it(
    options: dict[str, Any], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._PARTS, RenamedSharing.name, RenamedSharing)
    sharing, learning = decoupled()
    fed = federation({**sharing, **options, "name": RenamedSharing.name}, learning)
    progress = started(fed)
    play(fed, progress, 2)
    gone = all_of(progress.server, some_sharers(progress.server, 1))
    assert handle_requests(fed, progress, gone)["decoupled"].exact is exact


def test_nothing_is_exact_beside_a_part_whose_devices_learn_from_what_they_told() -> None:
    sharing, learning = decoupled()
    fed = federation({"name": "contribution"}, sharing, learning)
    progress = started(fed)
    play(fed, progress, 2)
    gone = RequestBatch("unshare", fed.stream.user_keys, Ragged.from_lists([list(range(N_ITEMS))] * 24))
    report = handle_requests(fed, progress, gone)["decoupled"]
    assert report.details["shards"] > 0
    assert report.exact is False


def test_late_sharing_is_not_certified_exact() -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    play(fed, progress, 2)
    asking = some_sharers(progress.server, 2)
    handle_requests(fed, progress, RequestBatch("share", asking[:1], Ragged.from_lists([[1, 2, 3]])))
    for key, exact in zip(asking, (False, True), strict=True):
        reports = handle_requests(fed, progress, all_of(progress.server, np.array([key])))
        assert reports["decoupled"].exact is exact


def test_decoupled_storage_is_what_is_written() -> None:
    fed = federation(*decoupled())
    progress = started(fed)
    play(fed, progress, 2)
    message = handle_requests(fed, progress, all_of(progress.server, some_sharers(progress.server, 1)))["decoupled"]
    assert message.storage_server == (4 + 1) * N_ITEMS * 6 * 4


def test_the_number_of_steps_does_not_depend_on_the_data() -> None:
    fed = federation(*decoupled(steps=7))
    part = fed.parts[1]
    assert isinstance(part, DecoupledLearning)
    for n in (1, 9):
        progress = started(fed)
        graph = SharedGraph.from_record(progress.server.shared, N_ITEMS)
        some = SharedGraph(graph.users[:n], graph.lists.take(np.arange(n)), N_ITEMS)
        assert len(list(part._draw_batches(some, np.uint64(0), np.uint64(1)))) == 7


# both over blocks


@pytest.mark.parametrize("specs", [decoupled(), replaying(segment=1)], ids=["decoupled", "delta-replay"])
def test_unlearning_works_over_blocks(specs: tuple[dict[str, Any], ...]) -> None:
    fed = federation(*specs, blocks=2)
    progress = started(fed)
    play(fed, progress, 3)
    end_block(fed, progress)
    begin_block(fed, progress, 1)
    play(fed, progress, 3)
    handle_requests(fed, progress, all_of(progress.server, some_sharers(progress.server, 2)))
    assert np.isfinite(progress.server.items).all()
    play(fed, progress, 1)


# delta-replay


def replayed(fed: Federation, server: ServerState) -> Floats:
    part = fed.parts[1]
    assert isinstance(part, DeltaReplay)
    return part.replay_recorded_moves(server).items


@pytest.mark.parametrize("graph", [{}, {"user_start": "learned"}], ids=str)
def test_replay_without_removals_reproduces_the_run(graph: dict[str, Any]) -> None:
    fed = federation(*replaying(graph, segment=1, precision="fp32"))
    progress = started(fed)
    play(fed, progress, 5)
    assert np.abs(progress.server.items - progress.server.parts["delta-replay"]["start"]).max() > 0.01
    np.testing.assert_array_equal(replayed(fed, progress.server), progress.server.items)


def test_half_precision_is_near() -> None:
    fed = federation(*replaying(segment=1))
    progress = started(fed)
    play(fed, progress, 6)
    np.testing.assert_allclose(replayed(fed, progress.server), progress.server.items, atol=1e-3)


@pytest.mark.parametrize("rounds", [4, 5])
def test_segments_come_near_as_well(rounds: int) -> None:
    fed = federation(*replaying(segment=2, precision="fp32"))
    progress = started(fed)
    play(fed, progress, rounds)
    assert len(progress.server.parts["delta-replay"]["moves"]) == 2
    far = np.abs(progress.server.items - progress.server.parts["delta-replay"]["start"]).max()
    assert np.abs(replayed(fed, progress.server) - progress.server.items).max() < 0.1 * far


def test_replay_reproduces_the_run_over_blocks() -> None:
    fed = federation(*replaying(segment=1, precision="fp32"), blocks=2)
    progress = started(fed)
    inputs = progress.server.shared
    progress.server = replace(progress.server, shared=replace(inputs, time=np.full(len(inputs), 1.0)))
    play(fed, progress, 3)
    key = np.setdiff1d(fed.stream.user_keys, inputs.sender)[:1]
    handle_requests(fed, progress, RequestBatch("share", key, Ragged.from_lists([[0, 1, 2]]), time=2.0))
    play(fed, progress, 2)
    np.testing.assert_array_equal(replayed(fed, progress.server), progress.server.items)


def test_unlearning_queries_no_device_and_uses_no_withdrawn_edge() -> None:
    fed = federation(*replaying(segment=1, precision="fp32"))
    progress = started(fed)
    play(fed, progress, 5)
    log: Arrays = progress.server.parts["delta-replay"]
    asking = some_sharers(progress.server, 4)
    expected = replace(
        progress.server,
        shared=progress.server.shared.without_lists(asking, progress.server.shared.take_sender_lists(asking)),
    )
    message = handle_requests(fed, progress, all_of(progress.server, asking))["delta-replay"]
    np.testing.assert_array_equal(progress.server.items, replayed(fed, expected))
    assert (message.exact, message.clients_asked, progress.played) == (False, 0, 0)
    assert message.storage_server == sum(entry.nbytes for entry in log.values())
    repeat = progress.server
    handle_requests(fed, progress, RequestBatch("unshare", asking, Ragged.empty(len(asking))))
    assert progress.server.items is repeat.items


def retrained(fed: Federation, gone: RequestBatch, rounds: int) -> Floats:
    return trained_without(fed, gone, rounds).server.items


def test_replaying_is_nearer_to_retraining_than_doing_nothing() -> None:
    fed = federation(*replaying({"lr": 0.03}, segment=1, precision="fp32"))
    progress = started(fed)
    gone = all_of(progress.server, some_sharers(progress.server, 6))
    play(fed, progress, 10)
    before, wanted = progress.server.items, retrained(fed, gone, 10)
    handle_requests(fed, progress, gone)
    far, near = (float(np.linalg.norm(entry - wanted)) for entry in (before, progress.server.items))
    assert near < 0.6 * far


def test_the_correction_without_anything_removed_changes_nothing_and_else_something() -> None:
    tables = []
    for correction in (0.0, 0.2):
        fed = federation(*replaying(segment=1, precision="fp32", correction=correction))
        progress = started(fed)
        play(fed, progress, 5)
        handle_requests(fed, progress, all_of(progress.server, some_sharers(progress.server, 4)))
        tables.append(progress.server.items)
    assert np.abs(tables[0] - tables[1]).max() > 1e-6
    part = fed.parts[1]
    assert isinstance(part, DeltaReplay)
    nothing = type(progress.server.shared)()
    same = part.replay_recorded_moves(progress.server, nothing).items
    np.testing.assert_allclose(same, replayed(federation(*replaying(segment=1)), progress.server), atol=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("rounds", [5, 6])
def test_replayed_run_replaces_the_log(rounds: int, precision: str) -> None:
    """B.3: corrected moves take the place of those that had seen what was withdrawn; nobody repeats the old ones."""
    fed = federation(*replaying(segment=2, precision=precision, correction=0.2))
    progress = started(fed)
    play(fed, progress, rounds)
    old = progress.server.parts["delta-replay"]
    first = all_of(progress.server, some_sharers(progress.server, 4))
    message = handle_requests(fed, progress, first)["delta-replay"]
    new = progress.server.parts["delta-replay"]
    assert "delta_log" in message.purged
    assert "had seen the data" in message.residual_risk
    assert new["moves"].dtype == old["moves"].dtype
    assert new["moves"].shape == old["moves"].shape
    assert all((now != was).any() for now, was in zip(new["moves"][1:], old["moves"][1:], strict=True))
    assert (new["open"] != old["open"]).any() or rounds % 2 == 0
    np.testing.assert_array_equal(replayed(fed, progress.server), progress.server.items)  # what is there comes out
    second = all_of(progress.server, some_sharers(progress.server, 2))
    handle_requests(fed, progress, second)
    np.testing.assert_array_equal(replayed(fed, progress.server), progress.server.items)


def test_replay_without_correction_keeps_the_moves() -> None:
    fed = federation(*replaying(segment=1, precision="fp32"))
    progress = started(fed)
    play(fed, progress, 3)
    old = progress.server.parts["delta-replay"]["moves"]
    message = handle_requests(fed, progress, all_of(progress.server, some_sharers(progress.server, 4)))["delta-replay"]
    np.testing.assert_array_equal(progress.server.parts["delta-replay"]["moves"], old)
    assert "delta_log" not in message.purged


@pytest.mark.parametrize(
    ("specs", "train", "why"),
    [
        ((*replaying()[2:], *replaying()[1:2]), {}, "has to stand before"),
        (replaying(), {"resume_from": "last"}, "goes over the best rounds"),
    ],
)
def test_settings_that_cannot_work_are_refused(specs: Any, train: dict[str, Any], why: str) -> None:
    with pytest.raises(TacitaError, match=why):
        federation(*specs, **train)
