"""What people share and what stays with them (sharing spec H.A), in the lab, on nodes, and on a stream of blocks."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.contracts import assert_same_numbers, federate_parts, run_blocks, write_and_read
from helpers.loopback_site import are_close, close_nodes, home_node, make_site, rows_of_blocks, run_lab, site_config
from helpers.oracle import catalogue, federate, make_backbone, make_block, make_stream, started
from helpers.shared_records import share_items
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Ints, Keys, Ragged, ServerState, SharedRecord
from tacita.federation.clients import build_user_view
from tacita.federation.requests import compute_shared_record_after, handle_requests
from tacita.federation.rounds import (
    Progress,
    begin_block,
    end_block,
    make_initial_progress,
    run_block,
    run_remaining_blocks,
    run_round,
)
from tacita.federation.scoring import DeviceScorer
from tacita.methods import resolve_config
from tacita.methods.sharing.sharing import SHARE_ALL, SHARE_NONE, SHARE_SOME, Sharing
from tacita.research.bench.shared_graph import NaiveSharing, bench_sharing
from tacita.round.part import RunContext
from tacita.round.plan import Federation
from tacita.round.request import Request, RequestBatch
from tacita.round.task import prepare_cohort
from tacita.round.unlearning_report import PartReports, UnlearningReport
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.controls import _evaluate_control, make_popular_scorer


def people(n: int = 100, n_items: int = 50, least: int = 2, most: int = 21) -> BlockStream:
    """Users with up to 20 training items, and items of their own to validate and test."""
    rng = np.random.default_rng(5)
    own_values = [rng.permutation(n_items)[: rng.integers(least, most) + 2].tolist() for _ in range(n)]
    return make_stream(
        make_block(
            0, n_items, [m[:-2] for m in own_values], [m[-2:-1] for m in own_values], [m[-1:] for m in own_values]
        )
    )


def sharing(
    stream: BlockStream, backbone: str = "ego", options: dict[str, Any] | None = None, **train: Any
) -> Federation:
    fed = federate(stream, make_backbone(backbone), **train)
    part = Sharing(Sharing.Config(**options or {}), RunContext(fed.backbone, fed.draws, fed.config.train))
    return replace(fed, parts=(part,))


def lists(progress: Progress, name: str) -> Ragged:
    return progress.clients.read_list(f"parts/sharing/{name}", np.arange(progress.clients.n_users))


def groups(progress: Progress) -> Any:
    return progress.clients.parts["sharing"]["group"]


def learned_from(fed: Federation, progress: Progress) -> Any:
    """What a round would learn from, everybody taking part."""
    block = fed.stream.blocks[progress.server.block]
    users = np.arange(block.n_users)
    down = fed.broadcast_serving(progress.server)
    view = build_user_view(progress.clients, progress.server, block, users, fed.stream.user_keys, down)
    return prepare_cohort(fed.preparing_parts, view).view


def sets(some: Ragged) -> list[set[int]]:
    return [set(some.row(r).tolist()) for r in range(len(some))]


# H.A 5: the split


def test_shared_and_private_items_partition_the_training_items() -> None:
    fed = sharing(people())
    progress = started(fed)
    shared, stays = sets(lists(progress, "shared")), sets(learned_from(fed, progress).train)
    for own, inputs, local in zip(sets(fed.stream.blocks[0].train), shared, stays, strict=True):
        assert inputs | local == own
        assert not inputs & local
    held_out = [a | b for a, b in zip(sets(fed.stream.blocks[0].valid), sets(fed.stream.blocks[0].test))]
    assert not any(arguments & out for arguments, out in zip(shared, held_out))


def test_sharing_groups_are_1_2_7_and_partial_sharers_share_some() -> None:
    fed = sharing(people(103))
    progress = started(fed)
    assert np.bincount(groups(progress)).tolist() == [0, 72, 21, 10]
    own, shared = fed.stream.blocks[0].train.counts(), lists(progress, "shared").counts()
    group = groups(progress)
    assert (shared[group == SHARE_ALL] == own[group == SHARE_ALL]).all()
    assert not shared[group == SHARE_NONE].any()
    want = np.clip(np.ceil(0.3 * own - 1e-9), 1, own - 1)
    assert (shared[group == SHARE_SOME] == want[group == SHARE_SOME]).all()
    assert {1, 2, 6} <= set(shared[group == SHARE_SOME].tolist())


@pytest.mark.parametrize(("own", "shares"), [(1, 0), (2, 1), (3, 1), (4, 2), (10, 3), (11, 4)])
def test_a_share_of_some_by_hand(own: int, shares: int) -> None:
    fed = sharing(make_stream(make_block(0, 12, [list(range(own))])), options={"groups": [0, 1, 0]})
    assert lists(started(fed), "shared").counts().tolist() == [shares]


def test_the_same_seed_gives_the_same_split_and_another_seed_another() -> None:
    stream = people()
    first, same, other = (started(sharing(stream, seed=seed)).server.shared for seed in (3, 3, 4))
    for field in fields(SharedRecord):
        assert np.array_equal(getattr(first, field.name), getattr(same, field.name))
    assert {*zip(first.sender, first.item)} != {*zip(other.sender, other.item)}


def test_partial_sharers_choose_items_uniformly() -> None:
    """2,000 people with the same ten items share three each; a count of 600 has a deviation of 20."""
    fed = sharing(make_stream(make_block(0, 10, [list(range(10))] * 2000)), options={"groups": [0, 1, 0]})
    counts = np.bincount(started(fed).server.shared.item, minlength=10)
    assert counts.sum() == 6000
    assert np.abs(counts - 600).max() < 100


def test_shared_record_holds_items_and_times() -> None:
    fed = sharing(people())
    block = fed.stream.blocks[0]
    train = replace(block.train, values={"time": np.linspace(5.0, 9.0, len(block.train.ids))})
    fed = replace(fed, stream=replace(fed.stream, blocks=(replace(block, train=train),)))
    progress = started(fed)
    inputs = progress.server.shared
    assert sets(inputs.take_sender_lists(fed.stream.user_keys)) == sets(lists(progress, "shared"))
    assert set(inputs.time) == {9.0}  # after the last of what it is about
    assert progress.best_server.shared is inputs


# What the server sees


def walk(value: Any) -> list[Any]:
    """All arrays that can be reached from a value."""
    if isinstance(value, np.ndarray):
        return [value]
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    result = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [array for entry in result for array in walk(entry)]


def test_private_items_never_reach_the_server() -> None:
    """Whole numbers are in `given` alone, and none of its pairs is one of those that stay."""
    fed = sharing(people(), local_epochs=2)
    progress = started(fed)
    local = learned_from(fed, progress).train
    stay = {*zip(fed.stream.user_keys[local.rows()].tolist(), local.ids.tolist())}
    for _ in range(2):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        inputs = progress.server.shared
        assert not stay & {*zip(inputs.sender.tolist(), inputs.item.tolist())}
        rest = walk(replace(progress.server, shared=SharedRecord()))
        assert rest
        assert not any(array.dtype.kind in "iu" and array.size for array in rest)
        assert not any(np.shares_memory(array, local.ids) for array in walk(progress.server))


class Listens(Sharing):
    """Whatever server hooks of sharing are handed."""

    heard: list[RequestBatch] = []

    def on_server(self, server: ServerState, requests: RequestBatch, ask: Any, play: Any) -> Any:
        self.heard.append(requests)
        return super().on_server(server, requests, ask, play)


def test_share_request_holds_only_shared_items() -> None:
    fed = federate(people(), make_backbone("ego"), Listens)
    Listens.heard.clear()
    progress = started(fed)
    (request,) = Listens.heard
    assert request.kind == "share"
    assert not request.items.values
    assert sets(request.items) == [entry for entry in sets(lists(progress, "shared")) if entry]


# What devices learn from and score with


def test_a_shared_item_is_no_negative_unless_it_is_said() -> None:
    stream = people()
    fed, loose = sharing(stream), sharing(stream, options={"exclude": "local"})
    view, other = learned_from(fed, started(fed)), learned_from(loose, started(loose))
    assert sets(view.exclude) == sets(stream.blocks[0].train)
    assert sets(other.exclude) == sets(other.train) == sets(view.train)


@pytest.mark.parametrize("aggregation", ["mean", "weighted", "per-row", "fixed"])
@pytest.mark.parametrize("backbone", ["mf", "ego"])
def test_user_who_shares_everything_does_not_train(backbone: str, aggregation: str) -> None:
    """H.A 4: the same round without them, whatever the denominator."""
    fixed = {"denominator": 40.0} if aggregation == "fixed" else {}
    fed = sharing(people(), backbone, aggregation=aggregation, **fixed)
    progress, without = started(fed), started(fed)
    silent = groups(progress) == SHARE_ALL
    private = progress.clients.private[silent].copy()
    after, report = run_round(fed, progress.server, progress.devices)
    other, _ = run_round(fed, without.server, without.devices, fed.stream.user_keys[~silent])
    assert np.array_equal(after.items, other.items)
    assert not np.array_equal(after.items, without.server.items)
    assert np.array_equal(progress.clients.private[silent], private)
    assert report.clients == 100


def test_device_scores_with_its_whole_history() -> None:
    fed = sharing(people(30))
    progress = started(fed)
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    block, users = fed.stream.blocks[0], np.arange(30, dtype=np.int32)
    scorer = DeviceScorer(
        fed,
        progress.server,
        progress.clients,
        block,
        fed.stream.user_keys,
        fed.broadcast_serving(progress.server),
        "test",
    )
    result, table, silent = scorer(users), progress.server.items, np.flatnonzero(groups(progress) == SHARE_ALL)
    assert len(silent) == 3
    for u in silent:
        progress.clients.private[u] = table[block.train.row(u)].mean(0)
    np.testing.assert_allclose(result, catalogue(fed.backbone, progress, block), atol=1e-6)
    u = silent[0]
    p, rows = progress.clients.private[u], table[block.train.row(u)]
    by_hand = 0.5 * p + 0.5 * rows.sum(0) / np.sqrt(len(rows))
    cosines = table @ by_hand / np.linalg.norm(table, axis=1) / np.linalg.norm(by_hand)
    outside = np.setdiff1d(np.arange(50), block.train.row(u))
    np.testing.assert_allclose(result[u][outside], cosines[outside], atol=1e-5)


def test_without_sharers_it_is_plain_federation() -> None:
    """H.A 6."""
    stream = people(40)
    plain, nobody = federate(stream, make_backbone("ego"), rounds=3), sharing(stream, options={"groups": [0, 0, 1]})
    nobody = replace(nobody, config=plain.config)
    entry, other = run_blocks(plain), run_blocks(nobody)
    assert len(other.server.shared) == 0
    assert np.array_equal(entry.server.items, other.server.items)
    assert np.array_equal(entry.clients.private, other.clients.private)
    assert entry.results == other.results


# Requests


def ask(fed: Federation, progress: Progress, kind: Any, user: int, items: list[int]) -> PartReports:
    return handle_requests(
        fed, progress, Request(kind, int(fed.stream.user_keys[user]), np.array(items, np.int32), 7.0)
    )


TINY = make_stream(make_block(0, 8, [[0, 1, 2, 3], [4, 5, 6], [0, 4]]))


def tiny(**options: Any) -> tuple[Federation, Progress]:
    fed = sharing(TINY, options={"groups": [0, 0, 1], **options})
    return fed, started(fed)


@pytest.mark.parametrize(("mode", "remainder"), [("delete", {2, 3}), ("to_local", {0, 2, 3})])
def test_unshared_items_are_dropped_or_trained_on(mode: str, remainder: set[int]) -> None:
    fed, progress = tiny(unshare=mode)
    assert ask(fed, progress, "share", 0, [0, 1]) == {"sharing": UnlearningReport(details={"people": 1, "items": 2})}
    assert sets(learned_from(fed, progress).train)[0] == {2, 3}
    ask(fed, progress, "unshare", 0, [0])
    assert sets(learned_from(fed, progress).train) == [remainder, {4, 5, 6}, {0, 4}]
    assert progress.server.shared.item.tolist() == [1]
    before = lists(progress, "shared"), lists(progress, "gone"), progress.server
    ask(fed, progress, "unshare", 0, [0])  # again
    ask(fed, progress, "unshare", 0, [2])  # which was never shared
    assert sets(lists(progress, "shared")) == sets(before[0])
    assert sets(lists(progress, "gone")) == sets(before[1])
    assert progress.server.items is before[2].items
    assert progress.server.shared.item.tolist() == [1]


def test_forgotten_items_are_neither_trained_on_nor_read() -> None:
    fed, progress = tiny()
    ask(fed, progress, "share", 0, [0])
    ask(fed, progress, "forget", 0, [0, 2])
    assert sets(learned_from(fed, progress).train)[0] == {1, 3}
    view = build_user_view(
        progress.clients,
        progress.server,
        TINY.blocks[0],
        np.arange(3),
        TINY.user_keys,
        fed.broadcast_serving(progress.server),
    )
    served = fed.parts[0].serve(view, "test").view
    assert served is not None
    assert sets(served.train) == [{1, 3}, {4, 5, 6}, {0, 4}]
    assert len(progress.server.shared) == 0
    ask(fed, progress, "leave", 1, [])
    assert sets(learned_from(fed, progress).train) == [{1, 3}, set(), {0, 4}]


def test_rollback_to_the_best_round_restores_no_withdrawn_items() -> None:
    fed, progress = tiny()
    ask(fed, progress, "share", 0, [0, 1])
    ask(fed, progress, "unshare", 0, [0])
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    end_block(fed, progress)  # its best round is the first, before anybody had asked
    assert sets(lists(progress, "shared"))[0] == {1}
    assert sets(lists(progress, "gone"))[0] == {0}
    assert progress.server.shared.item.tolist() == [1]


def test_many_requests_at_once_are_the_same_requests_one_by_one() -> None:
    stream = people(60)
    fed = sharing(stream, options={"groups": [0, 0, 1]})
    together, alone = started(fed), started(fed)
    chosen = stream.blocks[0].train.take(np.arange(5, 50))
    request_batch = RequestBatch("share", stream.user_keys[5:50], Ragged(chosen.ptr, chosen.ids), 3.0)
    some = request_batch.take(np.arange(0, 40, 2))
    back = replace(some, kind="unshare", items=some.items.filter_entries(np.arange(len(some.items.ids)) % 3 > 0))
    for batch in (request_batch, back):
        handle_requests(fed, together, batch)
        for row, sender in enumerate(batch.senders):
            handle_requests(fed, alone, Request(batch.kind, int(sender), batch.items.row(row), batch.time))
    assert_same_numbers(together, alone)
    for name in ("shared", "gone"):
        assert sets(lists(together, name)) == sets(lists(alone, name))
    for field in fields(SharedRecord):
        assert np.array_equal(getattr(together.server.shared, field.name), getattr(alone.server.shared, field.name))


def random_given(rng: np.random.Generator) -> tuple[SharedRecord, Keys]:
    keys = rng.integers(1, 2**63, 6).astype(np.uint64)
    shared_record = SharedRecord()
    for _ in range(4):
        shared_record = share_items(shared_record, int(rng.choice(keys)), rng.integers(0, 9, 4), 1.0)
    return shared_record, keys


@pytest.mark.parametrize("seed", range(5))
def test_the_record_after_many_requests_is_a_set_of_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs, keys = random_given(rng)
    pairs = {*zip(inputs.sender.tolist(), inputs.item.tolist())}
    assert len(pairs) == len(inputs)
    request = Ragged.from_lists([rng.integers(0, 9, 3).tolist() for _ in range(4)])
    wanted = {(int(keys[r]), int(i)) for r, i in zip(request.rows(), request.ids)}
    more = compute_shared_record_after(inputs, RequestBatch("share", keys[:4], request, 2.0))
    less = compute_shared_record_after(inputs, RequestBatch("forget", keys[:4], request))
    remainder = compute_shared_record_after(inputs, RequestBatch("leave", keys[:4], Ragged.empty(4)))
    assert [*zip(more.sender.tolist(), more.item.tolist())][: len(inputs)] == [*zip(inputs.sender, inputs.item)]
    for result, want in ((more, pairs | wanted), (less, pairs - wanted)):
        assert len(result) == len(want)
        assert {*zip(result.sender.tolist(), result.item.tolist())} == want
    assert set(remainder.sender.tolist()) <= set(keys[4:].tolist())


def test_sharing_choices_of_many_users_are_fast() -> None:
    """2,000 people who share, in one view and one request; a Python loop over them takes longer."""
    fed = sharing(people(2000, 500, 100, 150), options={"groups": [1, 1, 0]})
    started(fed)
    began = time.process_time()  # others may be at work on this machine
    progress = started(fed)
    assert time.process_time() - began < 1.0
    assert len(np.unique(progress.server.shared.sender)) == 2000


def test_silos_and_groups_of_nobody_are_refused() -> None:
    with pytest.raises(TacitaError, match=r"train\.silos"):
        sharing(TINY, silos=2).parts[0].check(8)
    with pytest.raises(TacitaError, match="groups"):
        sharing(TINY, options={"groups": [0, 0, 0]}).parts[0].check(8)


# H.A 4: aggregation


def by_hand(fed: Federation, progress: Progress) -> tuple[Any, Any]:
    """Each client's change of the table and what it learned from."""
    before, moved = progress.server.items, []
    for key in fed.stream.user_keys:
        entry = started(fed)
        alone = replace(fed, config=fed.config.model_copy(update={"train": MEAN(fed)}))
        after, _ = run_round(alone, entry.server, entry.devices, np.array([key]))
        moved.append(after.items.astype(np.float64) - before)
    return np.array(moved), fed.stream.blocks[0].train.counts().astype(np.float64)


def MEAN(fed: Federation) -> Any:
    return fed.config.train.model_copy(
        update={"aggregation": "mean", "weigh_by": "clients", "server_lr": 1.0, "denominator": None}
    )


@pytest.mark.parametrize(
    "how",
    [
        {"aggregation": "weighted"},
        {"aggregation": "weighted", "server_lr": 10.0},
        {"aggregation": "per-row", "weigh_by": "data"},
        {"aggregation": "per-row"},
        {"aggregation": "fixed", "weigh_by": "data", "denominator": 7.0},
        {"aggregation": "fixed", "denominator": 2.0},
    ],
    ids=str,
)
def test_how_changes_are_weighed(how: dict[str, Any]) -> None:
    fed = federate(TINY, make_backbone("ego"), **how)
    progress = started(fed)
    moved, n = by_hand(fed, progress)
    weight = n if fed.config.train.weighs_data else np.ones(3)
    total = (weight[:, None, None] * moved).sum(0)
    touched = (weight[:, None] * moved.any(2)).sum(0)
    per = {"weighted": n.sum(), "fixed": how.get("denominator"), "per-row": np.maximum(touched, 1e-9)[:, None]}
    want = progress.server.items + how.get("server_lr", 1.0) * total / per[how["aggregation"]]
    after, _ = run_round(fed, progress.server, progress.devices)
    np.testing.assert_allclose(after.items, want, atol=1e-6)


def test_a_weighted_mean_of_tables_is_the_table_plus_the_weighted_mean_of_changes() -> None:
    fed = federate(TINY, make_backbone("ego"), aggregation="weighted")
    progress = started(fed)
    moved, n = by_hand(fed, progress)
    tables = progress.server.items + moved
    after, _ = run_round(fed, progress.server, progress.devices)
    np.testing.assert_allclose(after.items, np.einsum("u,uij->ij", n / n.sum(), tables), atol=1e-6)
    alone, _ = run_round(fed, started(fed).server, started(fed).devices, fed.stream.user_keys[1:2])
    np.testing.assert_allclose(alone.items, tables[1], atol=1e-6)  # one client: its table


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"aggregation": "mean", "weigh_by": "data"}, "is 'weighted'"),
        ({"aggregation": "fixed", "weigh_by": "data"}, r"train\.denominator"),
    ],
)
def test_senseless_weights_are_refused(train: dict[str, Any], message: str) -> None:
    with pytest.raises(TacitaError, match=message):
        federate(TINY, make_backbone("ego"), **train).learner.check()


# Resumed, on nodes, on a stream of blocks


def test_resumed_run_does_not_repeat_sharing(tmp_path: Path) -> None:
    fed = sharing(people(), rounds=4)
    whole, observations = run_blocks(fed), []

    def stop(report: Any, now: Progress) -> None:
        observations.append(report.round)
        if len(observations) == 2:
            raise InterruptedError

    progress = make_initial_progress(fed)
    with pytest.raises(InterruptedError):
        run_remaining_blocks(fed, progress, stop)
    restored = write_and_read(progress, tmp_path / "now.safetensors")
    begun = len(restored.server.shared)
    run_remaining_blocks(fed, restored, lambda report, now: None)
    assert len(restored.server.shared) == begun == len(whole.server.shared)
    assert_same_numbers(restored, whole)


def test_sharing_and_unsharing_on_nodes_equals_the_lab(tmp_path: Path) -> None:
    """On nodes nobody chooses for people: the lab's groups are nobody, and both ask after the first round."""
    parts = [{"name": "sharing", "groups": [0, 0, 1]}]
    values = site_config("fedavg", 4).model_dump(mode="json") | {"parts": parts}
    config = validate_model(RunConfig, values, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble_federation(config, Machine())
    persons = [raw for raw in fed.stream.user_ids if home_node(raw) == 1][:2]
    rows = [fed.stream.user_ids.index(raw) for raw in persons]
    block = fed.stream.blocks[0]
    own: list[Ints] = [block.train.row(r) for r in rows]
    wanted = [("share", 0, own[0]), ("share", 1, own[1][:2]), ("unshare", 1, own[1][:1])]
    site.publish(list(fed.stream.item_ids[: block.n_items]))
    site.collect(rows_of_blocks(config)[0])
    node = site.transport.members[1]
    for kind, who, items in wanted:
        raw = [fed.stream.item_ids[i] for i in items]
        node.store.enqueue_request(kind, "r", raw, node.store.find_user(persons[who]))
    site.next_block()
    progress = make_initial_progress(fed)

    def after_the_first_round(report: Any, now: Progress) -> None:
        if report.round == 1:
            for kind, who, items in wanted:
                handle_requests(fed, now, Request(kind, int(fed.stream.user_keys[rows[who]]), items))  # type: ignore[arg-type]

    begin_block(fed, progress, 0)
    run_block(fed, progress, after_the_first_round)
    end_block(fed, progress)
    arrays = site.arrays()
    assert are_close(arrays["now/items"], progress.server.items)
    assert not are_close(run_lab(config).server.items[: block.n_items], progress.server.items, 1e-6)
    assert sorted(arrays["now/given/item"].tolist()) == sorted(progress.server.shared.item.tolist())
    assert len(progress.server.shared) == len(own[0]) + 1
    close_nodes(site)


def test_what_was_shared_in_an_earlier_block_stays_shared_beside_f3crec(tmp_path: Path) -> None:
    specs = [{"name": "sharing", "groups": [1, 1, 1]}, {"name": "replay"}, {"name": "temporal-mean"}]
    fed = federate_parts(specs)
    progress = started(fed)
    first = sets(lists(progress, "shared"))
    run_block(fed, progress, lambda report, now: None)
    end_block(fed, progress)
    group = groups(progress).copy()
    begin_block(fed, progress, 1)
    second = sets(lists(progress, "shared"))
    assert all(before <= after for before, after in zip(first, second))
    assert (groups(progress)[:10] == group).all()  # nobody is asked twice
    assert set(groups(progress)[10:]) <= {SHARE_NONE, SHARE_SOME, SHARE_ALL}
    local, own = sets(learned_from(fed, progress).train), sets(fed.stream.blocks[1].train)
    assert [a | (b & c) for a, b, c in zip(local, second, own)] == own
    assert not any(a & b for a, b in zip(local, second))
    assert sets(progress.server.shared.take_sender_lists(fed.stream.user_keys)) == second
    handle_requests(fed, progress, Request("unshare", int(fed.stream.user_keys[0]), np.arange(120, dtype=np.int32)))
    assert not sets(progress.server.shared.take_sender_lists(fed.stream.user_keys[:1]))[0]
    whole = run_blocks(federate_parts(specs))
    repeat = federate_parts(specs)
    restored = make_initial_progress(repeat)

    def stop(report: Any, now: Progress) -> None:
        if report.block == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run_remaining_blocks(repeat, restored, stop)
    restored = write_and_read(restored, tmp_path / "now.safetensors")
    run_remaining_blocks(federate_parts(specs), restored, lambda report, now: None)
    assert_same_numbers(restored, whole)


# H.A 9: how it is measured


def test_a_hit_is_any_hit_and_both_masks_are_reported_by_hand() -> None:
    """Item i has rank i + 1 for everybody; the first user knows items 0 and 1, so item 3 is second for it."""
    stream = make_stream(
        make_block(0, 6, [[0], [0], [5]], valid=[[1], [1], [4]], test=[[3, 4], [2], [0, 1, 2]]),
    )
    fed = federate(stream, make_backbone("mf"))
    how = {"k": [2], "metrics": ["hr", "ndcg"], "select_by": "ndcg@2", "unmasked": True}
    fed = replace(fed, config=validate_model(RunConfig, {"evaluate": how}, "the test"))
    scores = -np.arange(6, dtype=np.float32)

    def scorer(users: Ints) -> Any:
        return np.repeat(scores[None], len(users), axis=0)

    result = _evaluate_control(fed, stream.blocks[0], scorer)
    second, both = 1 / np.log2(3), 1 + 1 / np.log2(3)
    assert result["hr@2"] == 1.0  # places 2 and 3; 1; 1 to 3
    assert result["ndcg@2"] == pytest.approx((second / both + 1 + 1) / 3)
    assert result["unmasked hr@2"] == pytest.approx(1 / 3)  # 4 and 5; 3; 1 to 3
    assert result["unmasked ndcg@2"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("mask", ["block", "none"])
def test_run_reports_metrics_under_both_masks(mask: str) -> None:
    fed = sharing(people(40), rounds=2)
    how = {"k": [3], "metrics": ["hr", "ndcg"], "select_by": "ndcg@3", "unmasked": True, "mask": mask}
    config = validate_model(RunConfig, {"evaluate": how, "train": {"rounds": 2}, "seed": 3}, "the test")
    (block,) = run_blocks(replace(fed, config=config)).results
    bare = {name: block[f"unmasked {name}"] for name in ("hr@3", "ndcg@3")}
    assert block["hr@3"] > bare["hr@3"] if mask == "block" else block["hr@3"] == bare["hr@3"]
    if mask == "none":
        assert block["mask_block"]["hr@3"] > block["hr@3"]


@pytest.mark.skipif(not (Path(os.environ.get("TACITA_DATA", "")) / "ml-1m").is_dir(), reason="needs ML-1M")
def test_most_popular_on_ml_1m_matches_the_spec() -> None:
    """A.9 was measured on a file that lacks 1 % of the ratings, so that its users want a little less."""
    fed = assemble_federation(resolve_config({"data": "ml-1m", "method": "fedshare-local"}, "the test"), Machine())
    block = fed.stream.blocks[0]
    assert (fed.stream.n_users, fed.stream.n_items) == (6040, 3706)
    result = _evaluate_control(fed, block, make_popular_scorer(fed, block))
    for name, want, off in (("hr@20", 0.642, 0.015), ("ndcg@20", 0.130, 0.01)):
        assert result[name] == pytest.approx(want, abs=off)
    for name, want, off in (("hr@20", 0.530, 0.015), ("ndcg@20", 0.068, 0.01)):
        assert result[f"unmasked {name}"] == pytest.approx(want, abs=off)
    shared = len(started(fed).server.shared) / len(block.train.ids)
    assert shared == pytest.approx(0.16, abs=0.01)  # 0.1 + 0.2 * 0.3


def test_a_global_split_is_of_all_rows_and_one_of_users_gives_everybody_something_to_test() -> None:
    result = {}
    for kind in ("random", "global-random"):
        values = {"data": "synthetic:users=60,items=40,per_user=12", "split": {"kind": kind}}
        (block,) = assemble_federation(validate_model(RunConfig, values, "the test"), Machine()).stream.blocks
        result[kind] = [part.counts() for part in (block.train, block.valid, block.test)]
    assert (result["random"][2] > 0).all()
    assert len(set(result["global-random"][2])) > 1
    n = sum(part.sum() for part in result["global-random"])
    assert [part.sum() / n for part in result["global-random"]] == pytest.approx([0.8, 0.1, 0.1], abs=0.005)


# Its bench


def test_the_naive_loop_of_the_bench_learns_as_ours_does() -> None:
    """Same start, other draws: the mean cosine of people with their items rises as much in both."""
    train = {"local_epochs": 5, "objective": "bpr", "negatives": 1, "redraw": "epoch", "optimiser": "lazy-adam"}
    fed = sharing(people(60), **train, aggregation="weighted", batch_size=1000, l2=1e-4)
    fed = replace(fed, backbone=make_backbone("ego", lr=0.05, item_lr_scale=1.0))
    naive, progress = NaiveSharing(fed, None), started(fed)
    before = progress.server.items.copy()
    for _ in range(5):
        naive.run_round()
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    ours, other_values = progress.server.items - before, naive.items.numpy() - before
    assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(other_values), rel=0.1)
    assert (ours * other_values).sum() / np.linalg.norm(ours) / np.linalg.norm(other_values) > 0.9
    result = bench_sharing(fed, repeats=1)
    assert result["clients"] == 60
    assert min(result["fast_s"], result["naive_s"]) > 0
    with pytest.raises(TacitaError, match="backbone 'ego'"):
        bench_sharing(sharing(people(10), "mf"), repeats=1)


@pytest.mark.parametrize("remainder", [0, 1, 4], ids=["everything", "all-but-one", "most"])
def test_the_naive_loop_draws_for_who_has_nearly_everything(remainder: int) -> None:
    """Somebody with more than half of the catalogue, which one draw of twice as many does not get past."""
    values = {"data": "synthetic:users=40,items=30,per_user=8", "method": "fedshare", "evaluate": {"controls": False}}
    fed = assemble_federation(resolve_config(values, "the test"), Machine())
    block = fed.stream.blocks[0]
    lists = [np.arange(30 - remainder) if u == 0 else block.train.row(u) for u in range(40)]
    train = Ragged.from_lists([entry.tolist() for entry in lists])
    fed = replace(fed, stream=replace(fed.stream, blocks=(replace(block, train=train),)))
    naive = NaiveSharing(fed, next(part.config for part in fed.parts if part.name == "shared-graph"))
    drawn = (
        naive._draw_negatives(np.zeros(200, np.int64), np.arange(30 - remainder))
        if remainder
        else np.zeros(0, np.int64)
    )
    assert set(drawn.tolist()) == set(range(30 - remainder, 30) if remainder else ())
    naive.n_clients = 40
    before = naive.items.clone()
    naive.run_round()
    assert not torch.equal(naive.items, before)
    assert bool(torch.isfinite(naive.items).all())


def test_the_bench_says_nothing_but_its_figures() -> None:
    values = {"data": "synthetic:users=40,items=30,per_user=8", "method": "fedshare", "evaluate": {"controls": False}}
    fed = assemble_federation(resolve_config(values, "the test"), Machine())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bench_sharing(fed, 1)["shared"] > 0
