"""Forgetting by going over earlier rounds: fru, cufru, cfru, retrain, and the rounds that a request may play again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from helpers.oracle import cohort, make_block, make_stream, started
from helpers.replay_federation import (
    LISTS,
    N_ITEMS,
    forget_request,
    keys_of,
    leave_request,
    make_federation,
    play_rounds,
    stream_of_lists,
)
from tacita.core.errors import TacitaError
from tacita.core.types import Block, BlockStream, Ragged, RoundReplay, ServerState
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, begin_block, end_block, run_block, run_round
from tacita.learn.training.local_models import build_local_models
from tacita.live.wire import decode_question, encode_question
from tacita.messages import SparseRows, Total
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.cfru import match_requested_rows
from tacita.methods.sharing.cufru import blend_directions
from tacita.methods.sharing.negatives import draw_mixed_negatives
from tacita.round.capabilities import Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.question import Question
from tacita.round.request import RequestBatch
from tacita.round.task import prepare_cohort
from tacita.runs.storage import measure_storage

# Rounds once more


def test_question_names_the_replayed_round() -> None:
    assert decode_question("round") == Question("round")
    for replay in (RoundReplay(7, 0.1), RoundReplay(0), RoundReplay(123, 1e-05)):
        question = Question("round", replay=replay)
        assert decode_question(encode_question(question)) == question
    with pytest.raises(TacitaError, match="share of a round"):
        decode_question("round.again-3-2.0")


def test_question_survives_encoding() -> None:
    for question in (Question("statistic"), Question("stored-0-3", "fru"), Question("retraction", "statistic")):
        assert decode_question(encode_question(question)) == question
        numbered = question.with_number(7, 2) if question.owner else question
        assert decode_question(encode_question(numbered)) == numbered
    assert encode_question(Question("stored-0-3", "fru").with_number(7, 2)) == "fru/stored-0-3/7.2"
    assert encode_question(Question("round", replay=RoundReplay(3, 0.5))) == "round.again-3-0.5"


def test_replayed_round_repeats_its_draws() -> None:
    fed = make_federation(participation={"kind": "fraction", "rate": 0.5})
    progress, other = started(fed), started(fed)
    first = progress.server
    after, _ = run_round(fed, first, progress.devices)
    late = replace(other.server, round=9)
    chosen = other.devices.choose_clients(fed, first)
    repeat, report = run_round(fed, late, other.devices, chosen, RoundReplay(0))
    assert np.array_equal(repeat.items, after.items)
    assert repeat.round == 10
    assert report.clients == 3
    assert np.array_equal(progress.clients.private, other.clients.private)


@pytest.mark.parametrize(("share", "epochs", "steps"), [(1.0, 4, 5), (0.5, 2, 5), (0.1, 1, 2), (1e-6, 1, 1)])
def test_a_share_of_a_round_is_whole_epochs_or_a_few_steps_and_at_least_one(
    share: float, epochs: int, steps: int
) -> None:
    """Of somebody with four items and sixteen negatives, in batches of four."""
    fed = make_federation(local_epochs=4, batch_size=4)
    view = replace(cohort(fed, started(fed)), replay=RoundReplay(0, share))
    local = build_local_models(view, {}, fed.config.train, fed.draws)
    assert len(local.order) == epochs
    assert local.steps_per_epoch[[0, 3, 5]].tolist() == [steps] * 3
    for c in range(6):
        own_values = local.order[0, local.turn_ptr[c] : local.turn_ptr[c + 1]]
        assert ((own_values >= local.ptr[c]) & (own_values < local.ptr[c + 1])).all()


# What is written down


def test_a_log_holds_the_rows_that_moved_furthest() -> None:
    """H.C 2: at most ceil(alpha * touched) of a client."""
    fed = make_federation({"name": "fru", "keep": 0.5})
    progress = play_rounds(fed, 3)
    lists = progress.clients.read_part_lists(np.arange(6))["fru"]
    rounds, rows = lists["rounds"], lists["rows"]
    assert rounds.counts().tolist() == [3] * 6
    assert rows.counts().tolist() == [int(entry.sum()) for entry in np.split(rounds.values["count"], rounds.ptr[1:-1])]
    table = started(fed)
    view = cohort(fed, table)
    upload = fed.learner.answer(prepare_cohort(fed.preparing_parts, view), "round").upload
    sent = upload.values["rows"]
    assert isinstance(sent, SparseRows)
    state, weight = log.read_round(lists, (0, 0))
    assert weight.tolist() == [1.0] * 6
    for c in range(6):
        own_values, all_of = state.client == c, sent.client == c
        assert own_values.sum() == np.ceil(0.5 * all_of.sum())
        lengths = np.linalg.norm(sent.value[all_of], axis=1)
        smallest = np.linalg.norm(state.value[own_values], axis=1).min()
        assert smallest == np.sort(lengths)[-own_values.sum()]
    size = log.count_log_bytes(lists)
    assert size.tolist() == [int(n * (4 * 6 + 4) + 3 * (4 + 4 + 4 + 8)) for n in rows.counts()]


def test_mixed_negatives_are_near_and_never_owned() -> None:
    fed = make_federation()
    view = cohort(fed, started(fed))
    counts = np.array([5, 0, 3, 8, 1, 2])
    drawn = draw_mixed_negatives(view, counts, view.private, 0.2, np.uint64(5))
    assert len(drawn) == counts.sum()
    owner = np.repeat(np.arange(6), counts)
    assert not view.exclude.holds(owner, drawn).any()
    for u in range(6):
        free = np.setdiff1d(np.arange(N_ITEMS), LISTS[u])
        centre = view.items[LISTS[u]].mean(0)
        pool: set[int] = set()
        for vector in (centre, view.private[u]):
            distance = np.linalg.norm(view.items[free] - vector, axis=1)
            pool |= set(free[np.argsort(distance)[:3]].tolist())
        assert set(drawn[owner == u].tolist()) <= pool


# FRU


@pytest.mark.parametrize("backbone", ["mf", "ego"])
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"aggregation": "weighted", "local_epochs": 2},
        {"aggregation": "per-row", "participation": {"kind": "fraction", "rate": 0.5}},
        {"aggregation": "fixed", "denominator": 5.0},
    ],
    ids=lambda entry: entry.get("aggregation", "mean"),
)
def test_replay_without_leavers_reproduces_the_rounds(backbone: str, train: dict[str, Any]) -> None:
    """H.C 2: alpha = 1, lambda = 1 and nothing withdrawn reproduce the original trajectory."""
    fed = make_federation({"name": "fru", "keep": 1.0, "share": 1.0}, backbone=backbone, **train)
    progress = play_rounds(fed, 4)
    before, private = progress.server, progress.clients.private.copy()
    nothing = RequestBatch("unshare", keys_of(fed, 0), Ragged.from_lists([[0]]))  # nobody shared anything
    fru = handle_requests(fed, progress, nothing)["fru"]
    assert fru.rounds == 4
    np.testing.assert_allclose(progress.server.items, before.items, rtol=0, atol=1e-6)
    np.testing.assert_allclose(progress.clients.private, private, rtol=0, atol=1e-6)
    assert progress.server.round == 8
    assert fru.storage_server > progress.server.items.nbytes
    assert fru.storage_client > 0
    assert "stored" not in progress.server.parts["fru"]


def test_replay_keeps_update_lengths_and_renews_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """H.C 2: row by row in every round after the first, without those who left."""
    fed = make_federation({"name": "withdrawal"}, {"name": "fru", "keep": 1.0, "share": 0.3}, local_epochs=3)
    progress = play_rounds(fed, 3)
    tables: list[tuple[Any, Any, Any]] = []
    (fru,) = (part for part in fed.parts if part.name == "fru")
    decode = type(fru).decode

    def watched(self: Any, server: Any, total: Any) -> Any:
        out = decode(self, server, total)
        if "stored" in server.parts["fru"] and "rows" in total.sums:
            tables.append((server.parts["fru"], total, out))
        return out

    monkeypatch.setattr(type(fru), "decode", watched)
    message = handle_requests(fed, progress, leave_request(fed, 3))["fru"]
    assert message.rounds == 3
    assert [bool(stored_state["first"][0]) for stored_state, _, _ in tables] == [True, False, False]
    state, total, out = tables[0]
    np.testing.assert_allclose(out["rows"] / 5, state["stored"] / 5)
    for state, total, out in tables[1:]:
        old, new, result = state["stored"] / 5, total["rows"] / 5, out["rows"] / 5
        moving = np.linalg.norm(new, axis=1) > 1e-12
        np.testing.assert_allclose(np.linalg.norm(result, axis=1)[moving], np.linalg.norm(old, axis=1)[moving])
        assert not result[~moving].any()
        both = moving & (np.linalg.norm(old, axis=1) > 0)
        cosine = (result * new).sum(1)[both] / (np.linalg.norm(result, axis=1) * np.linalg.norm(new, axis=1))[both]
        np.testing.assert_allclose(cosine, 1.0)


def test_leavers_are_in_no_replayed_round_and_no_log() -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": "fru"})
    progress = play_rounds(fed, 3)
    first = progress.clients.parts["fru"]["start"][2].copy()
    handle_requests(fed, progress, leave_request(fed, 2, 5))
    assert not np.isin(keys_of(fed, 2, 5), progress.server.parts["fru"]["clients"]).any()
    lists = progress.clients.read_part_lists(np.arange(6))["fru"]
    assert lists["rows"].counts()[[2, 5]].tolist() == [0, 0]
    assert np.array_equal(progress.clients.private[2], first)
    twin = make_federation(
        {"name": "withdrawal"}, {"name": "fru"}, stream=stream_of_lists([*LISTS[:2], [9], *LISTS[3:5], [7]])
    )
    assert not np.array_equal(play_rounds(twin, 3).server.items, play_rounds(fed, 3).server.items)


def test_fru_with_full_replay_is_independent_of_forgotten_data() -> None:
    """All but the lengths come from rounds without them; with nobody else in common rows they do not matter at all."""
    other = [*LISTS[:3], [10, 11], *LISTS[4:]]
    ends = []
    for lists in (LISTS, other):
        fed = make_federation(
            {"name": "withdrawal"}, {"name": "fru", "keep": 1.0, "share": 1.0}, stream=stream_of_lists(lists)
        )
        progress = play_rounds(fed, 1)
        handle_requests(fed, progress, leave_request(fed, 3))
        ends.append(progress.server.items)
    assert np.array_equal(*ends)


# Retrain


@pytest.mark.parametrize("backbone", ["mf", "ego"])
@pytest.mark.parametrize("train", [{}, {"aggregation": "weighted"}, {"local_epochs": 2, "redraw": "epoch"}], ids=str)
def test_retraining_is_bit_for_bit_a_fresh_run_without_the_data(backbone: str, train: dict[str, Any]) -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": "retrain"}, backbone=backbone, **train)
    progress = play_rounds(fed, 3)
    retrain = handle_requests(fed, progress, leave_request(fed, 3))["retrain"]
    handle_requests(fed, progress, forget_request(fed, 0, 7, 1))
    assert retrain.exact
    assert retrain.rounds == 3
    remainder = [[0, 2], *LISTS[1:3], [], *LISTS[4:]]
    fresh = play_rounds(make_federation(backbone=backbone, stream=stream_of_lists(remainder), **train), 3)
    assert progress.server.round == 3
    assert np.array_equal(progress.server.items, fresh.server.items)
    stay = [0, 1, 2, 4, 5]
    assert np.array_equal(progress.clients.private[stay], fresh.clients.private[stay])
    for _ in range(2):  # and it goes on like one
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        fresh.server, _ = run_round(replace(fed, parts=()), fresh.server, fresh.devices)
    lone = make_federation(backbone=backbone, stream=stream_of_lists(remainder), **train)
    whole = play_rounds(lone, 5)
    assert np.array_equal(progress.server.items, whole.server.items)


def two_blocks(gone: bool) -> BlockStream:
    def block(index: int, lists: list[list[int]], known: int) -> Block:
        own_values = [[] if gone and u == 1 else entry for u, entry in enumerate(lists)]
        valid = [[(entry[0] + 5) % N_ITEMS] if entry else [] for entry in own_values]
        return make_block(index, N_ITEMS, own_values, valid, None, known)

    return make_stream(block(0, LISTS, 0), block(1, [*LISTS[3:], *LISTS[:3], [1, 2, 3]], 6))


def test_retraining_goes_through_all_blocks() -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": "retrain"}, stream=two_blocks(False), patience=9)
    progress = started(fed)
    run_block(fed, progress, lambda report, now: None)
    end_block(fed, progress)
    begin_block(fed, progress, 1)
    for _ in range(2):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    rounds = progress.server.parts["retrain"]["rounds"].tolist()
    handle_requests(fed, progress, leave_request(fed, 1))
    fresh = make_federation(stream=two_blocks(True))
    want = started(fresh)
    for block, n in enumerate(rounds):
        if block:
            want.devices.keep_best_round(want.server.round)
            want.best_server = want.server
            end_block(fresh, want)
            begin_block(fresh, want, block)
        for _ in range(n):
            want.server, _ = run_round(fresh, want.server, want.devices)
    assert np.array_equal(progress.server.items, want.server.items)
    assert progress.server.parts["retrain"]["rounds"].tolist() == rounds


def shared_by(progress: Progress) -> RequestBatch:
    """Whoever shared something takes all of it back."""
    inputs = progress.server.shared
    senders = np.unique(inputs.sender)[:2]
    return RequestBatch(
        "unshare", senders, Ragged(inputs.take_sender_lists(senders).ptr, inputs.take_sender_lists(senders).ids)
    )


SHARING = {"name": "sharing", "groups": [2, 2, 2], "partial": 0.5}


def test_sharing_choices_survive_retraining() -> None:
    """Taken back after three rounds or before the first: the same, and nobody is asked to choose again."""
    fed = make_federation(SHARING, {"name": "retrain"})
    late, early = play_rounds(fed, 3), started(fed)
    request = shared_by(early)
    assert len(request.items.ids) > 0
    handle_requests(fed, late, request)
    handle_requests(fed, early, request)
    for _ in range(3):
        early.server, _ = run_round(fed, early.server, early.devices)
    assert np.array_equal(late.server.items, early.server.items)
    assert np.array_equal(late.clients.private, early.clients.private)
    assert np.array_equal(late.server.shared.item, early.server.shared.item)
    assert not np.isin(request.senders, late.server.shared.sender).any()


@pytest.mark.parametrize("name", ["fru", "cufru", "cfru"])
def test_replay_methods_compose_with_sharing(name: str) -> None:
    fed = make_federation(SHARING, {"name": name})
    progress = play_rounds(fed, 3)
    before = progress.server.items
    message = handle_requests(fed, progress, shared_by(progress))[name]
    assert message.rounds == (0 if name == "cfru" else 3)
    someone = int(np.flatnonzero(progress.clients.parts["sharing"]["group"] == 1)[0])  # who shares nothing
    handle_requests(fed, progress, leave_request(fed, someone))
    assert np.isfinite(progress.server.items).all()
    assert not np.array_equal(progress.server.items, before)


class Grows(Part):
    """A server that learns from what it was given: every shared item's row grows."""

    name = "grows"

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        step = 0.1 * np.bincount(server.shared.item, minlength=len(server.items))[:, None]
        return server.with_items((server.items + step).astype(np.float32))


def test_server_steps_are_undone_or_replayed() -> None:
    """cfru takes back an item's part of them; in the rounds that fru plays again they are made of what is left."""
    for name in ("cfru", "fru"):
        fed = make_federation(
            SHARING, {"name": name, "keep": 1.0} | ({"alpha": 0.0} if name == "cfru" else {"share": 1.0})
        )
        world = fed.parts[0].context
        fed = replace(fed, parts=(fed.parts[0], Grows(PartConfig(), world), fed.parts[1]))
        progress, never = play_rounds(fed, 3), started(fed)
        shared = shared_by(progress)
        handle_requests(fed, progress, shared)
        handle_requests(fed, never, shared)
        for _ in range(3):
            never.server, _ = run_round(fed, never.server, never.devices)
        if name == "cfru":  # devices had answered to another table: their steps stay
            gone = np.bincount(shared.items.ids, minlength=N_ITEMS)
            before = play_rounds(fed, 3).server.items
            np.testing.assert_allclose(progress.server.items, before - 0.3 * gone[:, None], atol=1e-5)
        else:  # only lengths are of before
            lost = np.linalg.norm(play_rounds(fed, 3).server.items - never.server.items)
            assert np.linalg.norm(progress.server.items - never.server.items) < 0.5 * lost


# CFRU


def test_cfru_after_one_round_is_the_round_without_the_target() -> None:
    """H.C 3: alpha = 0, fixed denominator."""
    train = {"aggregation": "fixed", "denominator": 6.0}
    fed = make_federation({"name": "withdrawal"}, {"name": "cfru", "keep": 1.0, "alpha": 0.0}, **train)
    progress, other = play_rounds(fed, 1), started(fed)
    cfru = handle_requests(fed, progress, leave_request(fed, 3))["cfru"]
    without, _ = run_round(fed, other.server, other.devices, np.delete(fed.stream.user_keys[:6], 3))
    np.testing.assert_allclose(progress.server.items, without.items, atol=1e-7)
    assert cfru.clients_asked == cfru.rounds == 0
    assert not any(np.isin(keys_of(fed, 3), v).any() for k, v in progress.server.parts["cfru"].items() if "sender" in k)


def test_cfru_damps_by_what_the_others_weigh() -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": "cfru", "keep": 1.0, "alpha": 0.5, "theta": 0.7})
    progress = play_rounds(fed, 2)
    cfru, before = progress.server.parts["cfru"], progress.server.items.astype(np.float64)
    error = np.zeros_like(before)
    for at in ("0000-000000", "0000-000001"):
        error *= 1 - 0.5 * 5 / 6
        place = int(np.flatnonzero(cfru[f"{at}.sender"] == keys_of(fed, 3)[0])[0])
        ends = np.append(0, np.cumsum(cfru[f"{at}.count"]))
        own_values = slice(ends[place], ends[place + 1])
        error[cfru[f"{at}.item"][own_values]] -= cfru[f"{at}.row"][own_values] / 6
    handle_requests(fed, progress, leave_request(fed, 3))
    np.testing.assert_allclose(progress.server.items, before + 0.7 * error, atol=1e-6)


def test_cfru_takes_a_rows_own_denominator() -> None:
    """Where a row is divided by who touched it, so is what is taken back, and a row that nobody else touched rests."""
    train = {"aggregation": "per-row"}
    fed = make_federation({"name": "withdrawal"}, {"name": "cfru", "keep": 1.0, "alpha": 0.5}, **train)
    progress = play_rounds(fed, 2)
    cfru, before = progress.server.parts["cfru"], progress.server.items.astype(np.float64)
    error = np.zeros_like(before)
    for at in ("0000-000000", "0000-000001"):
        sender = np.repeat(cfru[f"{at}.sender"], cfru[f"{at}.count"])
        items, rows, own_values = cfru[f"{at}.item"], cfru[f"{at}.row"], sender == keys_of(fed, 3)[0]
        touched = np.bincount(items, minlength=N_ITEMS)
        np.testing.assert_allclose(cfru[f"{at}.by"][touched > 0], touched[touched > 0])
        own = np.bincount(items[own_values], minlength=N_ITEMS)
        error *= (1 - 0.5 * np.where(touched > 0, (touched - own) / np.maximum(touched, 1), 0))[:, None]
        error[items[own_values]] -= rows[own_values] / touched[items[own_values], None]
    handle_requests(fed, progress, leave_request(fed, 3))
    np.testing.assert_allclose(progress.server.items, before + error, atol=1e-6)


@pytest.mark.parametrize("train", [{}, {"aggregation": "per-row"}])
def test_cfru_learns_as_without_it_and_nobody_leaving_changes_nothing(train: dict[str, Any]) -> None:
    """H.C 3: no targets, no change."""
    fed, bare = (
        make_federation({"name": "withdrawal"}, {"name": "cfru", "keep": 1.0}, **train),
        make_federation(**train),
    )
    progress, plain_run = play_rounds(fed, 3), play_rounds(bare, 3)
    assert np.array_equal(progress.server.items, plain_run.server.items)
    before = progress.server
    handle_requests(fed, progress, RequestBatch("forget", keys_of(fed, 3), Ragged.from_lists([[]])))
    assert progress.server.items is before.items
    handle_requests(fed, progress, forget_request(fed, 3, 4))
    moved = np.flatnonzero((progress.server.items != before.items).any(1))
    assert moved.tolist() == [4]


# CUFRU-like


@pytest.mark.parametrize("every", [1, 3])
def test_cufru_without_fresh_directions_restores_the_table(every: int) -> None:
    """kappa = 0, every row kept and nobody gone: the old steps once more, in entries of one round or of several."""
    fed = make_federation({"name": "withdrawal"}, {"name": "cufru", "every": every, "keep": 1.0, "fresh": 0.0})
    progress = play_rounds(fed, 4)
    before = progress.server.items
    cufru = handle_requests(fed, progress, RequestBatch("unshare", keys_of(fed, 0), Ragged.from_lists([[0]])))["cufru"]
    np.testing.assert_allclose(progress.server.items, before, atol=1e-6)
    assert cufru.rounds == 4 // every
    assert cufru.clients_asked == (4 // every) * 2  # a fifth of six, rounded up


def test_blended_step_keeps_its_length_and_averages_directions() -> None:
    old, new = np.array([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]]), np.array([[0.0, 9.0], [0.0, 0.0], [1.0, 1.0]])
    result = blend_directions(old, new, 0.5)
    np.testing.assert_allclose(result, [[2**0.5, 2**0.5], [0, 3], [0, 0]])
    np.testing.assert_allclose(blend_directions(old, new, 1.0)[0], [0, 2])


def test_cufru_queries_only_remaining_users_and_keeps_a_share_of_rows() -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": "cufru", "asked": 1.0})
    progress = play_rounds(fed, 3)
    before = progress.server.items
    private = progress.clients.private[3].copy()
    cufru = handle_requests(fed, progress, leave_request(fed, 3))["cufru"]
    assert cufru.clients_asked == 3 * 5
    assert not np.array_equal(progress.server.items, before)
    assert np.array_equal(progress.clients.private[3], private)
    state = progress.server.parts["cufru"]
    assert not np.isin(keys_of(fed, 3), state["clients"]).any()
    assert all(len(v) <= N_ITEMS // 2 for name, v in state.items() if name.endswith(".item"))


@pytest.mark.parametrize("name", ["fru", "cufru", "cfru", "retrain"])
def test_empty_request_changes_nothing_and_queries_nobody(name: str) -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": name})
    progress = play_rounds(fed, 2)
    before, private = progress.server, progress.clients.private.copy()
    message = handle_requests(fed, progress, RequestBatch("forget", keys_of(fed, 3), Ragged.from_lists([[]])))[name]
    assert progress.server.items is before.items
    assert progress.server.round == before.round
    assert message.clients_asked == 0
    assert np.array_equal(progress.clients.private, private)


# What is kept for it


def test_storage_is_counted_as_written() -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": "fru"})
    progress = play_rounds(fed, 3)
    storage = measure_storage("fru", progress.server, progress.clients)
    each = (
        log.count_log_bytes(progress.clients.read_part_lists(np.arange(6))["fru"]) + 4 * 6
    )  # and the vector it began with
    assert storage.device_max == each.max()
    assert storage.device_mean == pytest.approx(each.mean())
    assert storage.server == log.count_packed_bytes(progress.server.parts["fru"])
    fed = make_federation({"name": "withdrawal"}, {"name": "retrain"})
    nothing = measure_storage("retrain", play_rounds(fed, 3).server, progress.clients)
    assert (nothing.device_mean, nothing.device_max) == (0, 0)
    assert nothing.server < 200


# The order of parts


GRAPH = {"name": "shared-graph"}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([{"name": "fru"}, {"name": "proximal"}], "'fru' has to stand after 'proximal'"),
        ([{"name": "cfru"}, {"name": "proximal"}], "'cfru' has to stand after 'proximal'"),
        ([SHARING, {"name": "cfru"}, GRAPH], "'cfru' has to stand after 'shared-graph'"),
        ([SHARING, GRAPH, {"name": "cufru"}], "'cufru' has to stand before 'shared-graph'"),
        ([SHARING, {"name": "retraction"}, GRAPH], "'retraction' has to stand after 'shared-graph'"),
        ([{"name": "retraction"}, {"name": "proximal"}], "'retraction' has to stand after 'proximal'"),
        ([SHARING, GRAPH, {"name": "fru"}], ""),
        ([SHARING, {"name": "fru"}, GRAPH], ""),  # it only writes uploads down, and replays the server's steps
        ([SHARING, GRAPH, {"name": "cfru"}], ""),
        ([SHARING, {"name": "cufru"}, GRAPH], ""),
        ([SHARING, GRAPH, {"name": "retraction"}], ""),
        ([{"name": "withdrawal"}, {"name": "fru"}, {"name": "cfru"}], ""),  # two that write down disturb nobody
    ],
)
def test_part_order_that_hides_rounds_is_refused(specs: list[dict[str, Any]], message: str) -> None:
    fixed = {"aggregation": "fixed", "denominator": 6.0} if "retraction" in str(specs) else {}
    if not message:
        make_federation(*specs, **fixed)
        return
    with pytest.raises(TacitaError, match=message) as error:
        make_federation(*specs, **fixed)
    assert "list all parts in order" in str(error.value)


# What the server hears


class Hears(Part, Unlearning):
    """Writes down what requests name when they reach the server."""

    name = "hears"
    heard: ClassVar[list[RequestBatch]] = []

    def on_server(self, server: ServerState, requests: RequestBatch, ask: Any, play: Any) -> None:
        self.heard.append(requests)


def test_server_receives_only_shared_items_of_a_request() -> None:
    """As from a node: of what is forgotten, the server is told what it was given and nothing else."""
    fed = make_federation(SHARING, {"name": "fru"})
    fed = replace(fed, parts=(*fed.parts, Hears(PartConfig(), fed.parts[0].context)))
    progress = play_rounds(fed, 2)
    Hears.heard.clear()
    lists = progress.server.shared.take_sender_lists(fed.stream.user_keys[:6])
    some = int(np.flatnonzero((lists.counts() > 0) & (lists.counts() < [len(entry) for entry in LISTS]))[0])
    none = int(np.flatnonzero(lists.counts() == 0)[0])
    request_batch = RequestBatch("forget", keys_of(fed, some, none), Ragged.from_lists([LISTS[some], LISTS[none]]))
    before = progress.server.items
    fru = handle_requests(fed, progress, request_batch)["fru"]
    (messages,) = Hears.heard
    assert set(messages.items.row(0).tolist()) == set(lists.row(some).tolist())
    assert len(messages.items.row(1)) == 0
    assert messages.senders.tolist() == request_batch.senders.tolist()
    assert fru.rounds == 2  # what was never shared is forgotten all the same
    assert not np.array_equal(progress.server.items, before)
    gone = progress.clients.read_list("parts/sharing/gone", np.array([some, none]))
    assert [set(gone.row(n).tolist()) for n in range(2)] == [set(LISTS[some]), set(LISTS[none])]


def test_server_that_logs_updates_receives_the_items_to_remove() -> None:
    fed = make_federation({"name": "withdrawal"}, {"name": "cfru", "keep": 1.0})
    fed = replace(fed, parts=(*fed.parts, Hears(PartConfig(), fed.parts[0].context)))
    progress = play_rounds(fed, 2)
    Hears.heard.clear()
    handle_requests(fed, progress, RequestBatch("forget", keys_of(fed, 3), Ragged.from_lists([LISTS[3][:1]])))
    assert Hears.heard[0].items.ids.tolist() == LISTS[3][:1]


def test_cfru_ignores_items_without_updates() -> None:
    """Neither before the first round, nor of items that came later than what was sent, nor twice."""
    specs = {"name": "withdrawal"}, {"name": "cfru", "keep": 1.0}
    fed = make_federation(*specs, stream=stream_of_lists([*LISTS[:3], [0, 4], *LISTS[4:]]))
    fed = replace(fed, parts=(*fed.parts, Hears(PartConfig(), fed.parts[0].context)))
    for rounds, expected in ((0, []), (2, [0])):
        progress = play_rounds(fed, rounds)
        later = replace(fed, stream=stream_of_lists())  # 5 and 6 are new, and nothing was made of them yet
        Hears.heard.clear()
        handle_requests(later, progress, forget_request(later, 3, 0, 5))
        assert Hears.heard[0].items.ids.tolist() == expected
    report = progress.clients.read_list("parts/cfru/told", np.array([3]))
    assert report.ids.tolist() == [4]


def test_cfru_row_selection_matches_a_user_loop() -> None:
    rng = np.random.default_rng(4)
    for n_asking in (0, 1, 5):
        sender = rng.permutation(np.arange(3, 40, dtype=np.uint64))[:12]
        asking = rng.permutation(np.concatenate([sender[:3], np.array([1, 2, 90], np.uint64)]))[:n_asking]
        items = [rng.choice(20, 6, replace=False).tolist() for _ in asking]
        requests = RequestBatch("forget", asking, Ragged.from_lists(items))
        client, item = rng.integers(0, 12, 200), rng.integers(0, 20, 200).astype(np.int32)
        wanted = {int(entry): set(own) for entry, own in zip(asking, items, strict=True)}
        slow = [int(i) in wanted.get(int(sender[c]), set()) for c, i in zip(client, item, strict=True)]
        assert match_requested_rows(requests, sender, client, item).tolist() == slow


@pytest.mark.parametrize("exclude", ["owned", "local"])
def test_retraining_with_sharing_is_exact(exclude: str) -> None:
    """What was taken back may be drawn as something else that the person does not have."""
    specs = {"name": "sharing", "groups": [0, 0, 1], "exclude": exclude}, {"name": "retrain"}
    fed = make_federation(*specs)
    progress = play_rounds(fed, 3)
    handle_requests(fed, progress, forget_request(fed, 0, 7))
    never = play_rounds(make_federation(*specs, stream=stream_of_lists([[0, 1, 2], *LISTS[1:]])), 3)
    np.testing.assert_array_equal(progress.server.items, never.server.items)


@pytest.mark.parametrize("kind", ["leave", "forget", "unshare"])
def test_cfru_removes_the_servers_shared_items(kind: Literal["leave", "forget", "unshare"]) -> None:
    fed = make_federation({"name": "sharing", "groups": [1, 0, 0]}, {"name": "shared-graph"}, {"name": "cfru"})
    progress = started(fed)
    for _ in range(3):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    before, lists = progress.server.items.copy(), progress.server.shared.take_sender_lists(keys_of(fed, 3))
    assert len(lists.ids) > 0
    handle_requests(fed, progress, RequestBatch(kind, keys_of(fed, 3), Ragged.empty(1) if kind == "leave" else lists))
    assert np.abs(progress.server.items - before).max() > 1e-5
