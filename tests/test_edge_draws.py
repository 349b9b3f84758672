"""Draws of the server's steps belong to an edge or an item: a withdrawn edge leaves all others as they were."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.shared_records import random_record, random_table, record_of_edges
from tacita.core.types import Floats, Keys, SharedRecord
from tacita.kernels.edge_draws import draw_edge_negatives
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import (
    Batch,
    BatchSizes,
    GraphObjective,
    choose_shared_items,
    draw_batches,
    draw_negatives,
    refine_table,
)

N_ITEMS = 60
KEYS = np.arange(3, dtype=np.uint64)


def drop_sender(record: SharedRecord, sender: np.uint64) -> SharedRecord:
    stays = record.sender != sender
    return SharedRecord(record.sender[stays], record.item[stays], record.time[stays])


def list_pairs(graph: SharedGraph, batch: Batch) -> set[tuple[int, int, int]]:
    """(sender, item, negative) of every edge of a batch."""
    senders = graph.users[batch.user].tolist()
    return set(zip(senders, batch.liked.tolist(), batch.other.tolist(), strict=True))


def refine(record: SharedRecord, keys: Keys = KEYS) -> Floats:
    graph = SharedGraph.from_record(record, N_ITEMS)
    batches = draw_batches(graph, BatchSizes(600, 40), keys)
    table = random_table(N_ITEMS, seed=4)
    return refine_table(graph, table, batches, GraphObjective(lr=0.01)).table


def test_withdrawal_leaves_the_draws_of_other_edges() -> None:
    record = random_record(200, N_ITEMS)
    leaver = record.sender[5]
    remaining = drop_sender(record, leaver)
    graph = SharedGraph.from_record(record, N_ITEMS)
    graph_after = SharedGraph.from_record(remaining, N_ITEMS)
    sizes = BatchSizes(600, 40)
    before = list(draw_batches(graph, sizes, KEYS))
    after = list(draw_batches(graph_after, sizes, KEYS))
    assert len(before) == len(after) > 2
    for batch, batch_after in zip(before, after, strict=True):
        pairs = list_pairs(graph, batch)
        own = {pair for pair in pairs if pair[0] == int(leaver)}
        assert pairs - own == list_pairs(graph_after, batch_after)
        assert set(batch.items.tolist()) == set(batch_after.items.tolist())
    assert any(leaver in graph.users[batch.user] for batch in before)


def test_withdrawn_item_leaves_the_user_s_other_negatives() -> None:
    record = record_of_edges([(1, item) for item in range(10)])
    fewer = record_of_edges([(1, item) for item in range(9)])
    negatives = draw_negatives(SharedGraph.from_record(record, N_ITEMS), np.uint64(7))
    negatives_after = draw_negatives(SharedGraph.from_record(fewer, N_ITEMS), np.uint64(7))
    is_same = negatives[:9] == negatives_after
    assert is_same.sum() >= 8  # a draw that first met the withdrawn item takes it now
    assert (negatives >= 10).all()


def test_item_without_sharers_replaces_nobody_but_itself() -> None:
    record = record_of_edges([(1, item) for item in range(50)])
    fewer = record_of_edges([(1, item) for item in range(49)])
    chosen = set(choose_shared_items(SharedGraph.from_record(record, N_ITEMS), np.uint64(3), 20).tolist())
    chosen_after = set(choose_shared_items(SharedGraph.from_record(fewer, N_ITEMS), np.uint64(3), 20).tolist())
    assert len(chosen) == len(chosen_after) == 20
    assert len(chosen - chosen_after) <= 1


def test_withdrawal_of_one_moves_the_table_less_than_other_draws_do() -> None:
    record = random_record(200, N_ITEMS)
    table = refine(record)
    without = refine(drop_sender(record, record.sender[5]))
    redrawn = refine(record, KEYS + np.uint64(100))
    moved = np.linalg.norm(without - table)
    assert 0 < moved < 0.5 * np.linalg.norm(redrawn - table)


@pytest.mark.parametrize("n_owned", [10, 57, 59])
def test_negatives_are_uniform_over_what_the_user_did_not_share(n_owned: int) -> None:
    """By rejection, and from the list of what remains where that is short."""
    owned = np.arange(n_owned, dtype=np.int32)
    counts = np.zeros(N_ITEMS, np.int64)
    ends = np.array([0, n_owned])
    owner = np.array([11], np.uint64)
    n_keys = 6_000 // n_owned
    for key in range(n_keys):
        negatives = np.zeros(n_owned, np.int64)
        draw_edge_negatives(1, np.uint64(key), owner, ends, owned, N_ITEMS, negatives)
        counts += np.bincount(negatives, minlength=N_ITEMS)
    assert not counts[:n_owned].any()
    expected = counts.sum() / (N_ITEMS - n_owned)
    deviation = np.abs(counts[n_owned:] - expected)
    assert (deviation <= 5 * np.sqrt(expected)).all()


def test_threads_change_no_draw() -> None:
    graph = SharedGraph.from_record(random_record(50, N_ITEMS), N_ITEMS)
    drawn = []
    for n_threads in (1, 3):
        negatives = np.zeros(len(graph), np.int64)
        lists = graph.lists
        draw_edge_negatives(n_threads, np.uint64(1), graph.users, lists.ptr, lists.ids, N_ITEMS, negatives)
        drawn.append(negatives)
    assert np.array_equal(*drawn)
