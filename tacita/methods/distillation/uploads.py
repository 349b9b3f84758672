"""What a device makes of its predictions before it uploads them (spec E.3 step 4; PTF-FedRec: F.2 steps 3 and 4).

FedKDRec samples a random share of the items it has predictions for, mixes hard labels into them and swaps some high
values with low ones. Equation 4: alpha 1 is hard labels only; the paper's text on alpha says the reverse. With alpha
of 0.5 or more a threshold reads every label that was not swapped, see `audit.scores`. PTF-FedRec samples positives and
negatives apart, mixes nothing and swaps the most confident values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tacita.core.flat_indices import compute_offsets, expand_spans
from tacita.core.types import AnyArray, Bools, Floats, Longs, Ragged
from tacita.methods.distillation.round_draws import RoundDraws, floor_share, rank_in_rows


@dataclass(frozen=True)
class Swap:
    share: float = 0.1  # of the positives in an upload (lambda)
    least: int = 1  # pairs, where there is one to swap; 0: share 0 swaps nothing
    select: Literal["random", "top"] = "random"  # top: highest values on both sides, as PTF-FedRec does


@dataclass(frozen=True)
class Disguise:
    """FedKDRec's three steps."""

    beta: tuple[float, float] | None = (0.3, 0.7)  # bounds of the share that is uploaded; None: all of it
    alpha: float = 0.5  # weight of the hard label; 0: predictions as they are
    swap: Swap | None = field(default_factory=Swap)  # None: no swap


@dataclass(frozen=True)
class PtfDisguise:
    """PTF-FedRec's steps."""

    positives: tuple[float, float] | None = (0.1, 1.0)  # bounds of the share that is uploaded (b); None: everything
    negatives: tuple[float, float] = (1.0, 4.0)  # bounds of how many for each of these (g)
    replace: bool = False  # the released code draws negatives with replacement
    swap: Swap | None = field(default_factory=lambda: Swap(select="top"))


def drop_own_items(received: Ragged, own: Ragged) -> Ragged:
    """What was received, without items of the device's own set: `own` its private set, in PTF-FedRec its positives."""
    rows = received.rows()
    is_own = own.holds(rows, received.ids)
    is_new = ~is_own
    columns = {}
    for name, column in received.values.items():
        columns[name] = column[is_new]
    new_rows = rows[is_new]
    new_ids = received.ids[is_new]
    n_clients = len(received)
    return Ragged.from_pairs(new_rows, new_ids, n_clients, columns)


def keep_first_items(received: Ragged, n_items: Longs) -> Ragged:
    """The first items of each list, so many of them.

    PTF-FedRec's code cuts on the server, at the number of the client's positives. A server does not know that number,
    so the device cuts.
    """
    counts = np.minimum(received.counts(), n_items)
    starts = received.ptr[:-1]
    entries = expand_spans(starts, counts)
    columns = {}
    for name, column in received.values.items():
        columns[name] = column[entries]
    return Ragged(compute_offsets(counts), received.ids[entries], columns)


def pool_items(own: Ragged, received: Ragged) -> Ragged:
    """Every item a device may upload, once, by id: so that the order of an upload says nothing of labels.

    `own` has columns label (0 or 1) and prediction, `received` prediction; an item in both is the device's own. In the
    result a received item has label nan.
    """
    own_rows = own.rows()
    received_rows = received.rows()
    all_rows = np.concatenate([own_rows, received_rows])
    rows = all_rows.astype(np.int64)
    ids = np.concatenate([own.ids, received.ids])
    n_received = len(received.ids)
    no_label = np.full(n_received, np.nan, np.float32)
    own_label = read_column_or_empty(own, "label")
    label = np.concatenate([own_label, no_label])
    own_prediction = read_column_or_empty(own, "prediction")
    received_prediction = read_column_or_empty(received, "prediction")
    prediction = np.concatenate([own_prediction, received_prediction])
    largest = int(ids.max(initial=0))
    width = 1 + largest
    codes = rows * width + ids
    _, first = np.unique(codes, return_index=True)
    columns = {"label": label[first], "prediction": prediction[first]}
    first_rows = rows[first]
    first_ids = ids[first]
    n_clients = len(own)
    return Ragged.from_pairs(first_rows, first_ids, n_clients, columns)


def read_column_or_empty(lists: Ragged, name: str) -> Floats:
    """A column, which lists without entries need not have."""
    if not len(lists.ids):
        return np.zeros(0, np.float32)
    return lists.values[name].astype(np.float32)


def take_pool_entries(pool: Ragged, entries: Longs) -> Ragged:
    """Some entries of a pool, in its order; repeats stay."""
    entries = np.sort(entries)
    columns = {}
    for name, values in pool.values.items():
        columns[name] = values[entries]
    rows = pool.rows()[entries]
    ids = pool.ids[entries]
    n_clients = len(pool)
    return Ragged.from_pairs(rows, ids, n_clients, columns)


def sample_pool(pool: Ragged, beta: tuple[float, float], draws: RoundDraws) -> Ragged:
    """A random share of each client's pool, at least one item where there is one."""
    rows = pool.rows()
    n_sampled = _draw_share_sizes("beta", beta, pool.counts(), draws)
    order = draws.hash_entries("sample", rows, pool.ids)
    rank = rank_in_rows(rows, order)
    is_sampled = rank < n_sampled[rows]
    return take_pool_entries(pool, np.flatnonzero(is_sampled))


def _draw_share_sizes(purpose: str, span: tuple[float, float], counts: Longs, draws: RoundDraws) -> Longs:
    """A random share of each count, at least 1 where there is something."""
    share = draws.draw_between(purpose, span)
    size = np.maximum(1, floor_share(share, counts))
    return np.minimum(size, counts)


def mix_labels(label: Floats, prediction: Floats, alpha: float) -> Floats:
    """alpha * label + (1 - alpha) * prediction; the prediction where there is no label."""
    labels = label.astype(np.float64)
    hard = alpha * labels
    weight = 1 - alpha
    predictions = prediction.astype(np.float64)
    soft = weight * predictions
    has_label = ~np.isnan(label)
    blend = hard + soft
    mixed = np.where(has_label, blend, prediction)
    return mixed.astype(np.float32)


def swap_scores(upload: Ragged, score: Floats, low: Bools, how: Swap, draws: RoundDraws) -> Floats:
    """Scores after some items with label 1 exchanged theirs, pair by pair, with some of the items marked `low`."""
    rows = upload.rows()
    high = upload.values["label"] == 1
    high_rows = rows[high]
    n_high = np.bincount(high_rows, minlength=len(upload))
    low_rows = rows[low]
    n_low = np.bincount(low_rows, minlength=len(upload))
    share = floor_share(how.share, n_high)
    n_wanted = np.maximum(how.least, share)
    n_possible = np.minimum(n_high, n_low)
    n_pairs = np.minimum(n_wanted, n_possible)
    first = _choose_partners(upload, score, high, n_pairs, how, draws, "swap-high")
    second = _choose_partners(upload, score, low, n_pairs, how, draws, "swap-low")
    swapped = score.copy()
    swapped[first] = score[second]
    swapped[second] = score[first]
    return swapped


def _choose_partners(
    upload: Ragged, score: Floats, side: Bools, n_pairs: Longs, how: Swap, draws: RoundDraws, purpose: str
) -> Longs:
    """Entries of one side that take part in a swap, client by client, in the order of their pairs."""
    entries = np.flatnonzero(side)
    rows = upload.rows()[entries]
    ids = upload.ids[entries]
    order: AnyArray = -score[entries]
    if how.select == "random":
        order = draws.hash_entries(purpose, rows, ids)
    rank = rank_in_rows(rows, order, ids)
    is_chosen = rank < n_pairs[rows]
    chosen_rank = rank[is_chosen]
    chosen_rows = rows[is_chosen]
    by_pair = np.lexsort((chosen_rank, chosen_rows))
    return entries[is_chosen][by_pair]


def disguise_predictions(own: Ragged, received: Ragged, how: Disguise, draws: RoundDraws) -> Ragged:
    """What each device uploads: items by id, with the column score."""
    sample = pool_items(own, received)
    if how.beta is not None:
        sample = sample_pool(sample, how.beta, draws)
    label = sample.values["label"]
    prediction = sample.values["prediction"]
    score = mix_labels(label, prediction, how.alpha)
    if how.swap is not None:
        is_low = label == 0
        score = swap_scores(sample, score, is_low, how.swap, draws)
    return Ragged(sample.ptr, sample.ids, {"score": score})


def sample_ptf_pool(pool: Ragged, how: PtfDisguise, draws: RoundDraws) -> Ragged:
    """A random share of the positives, and for each of them some of the other items."""
    if how.positives is None:
        return pool
    rows = pool.rows()
    is_positive = pool.values["label"] == 1
    positives = np.flatnonzero(is_positive)
    others = np.flatnonzero(~is_positive)
    positive_rows = rows[positives]
    n_positives = np.bincount(positive_rows, minlength=len(pool))
    other_rows = rows[others]
    n_others = np.bincount(other_rows, minlength=len(pool))
    n_sampled = _draw_share_sizes("positives", how.positives, n_positives, draws)
    sampled = _sample_entries(pool, positives, n_sampled, "positive", draws)
    # who has no positive uploads one other item all the same: an empty upload would say so
    share = draws.draw_between("negatives", how.negatives)
    n_wanted = np.maximum(1, floor_share(share, n_sampled))
    n_negatives = n_wanted * (n_others > 0)
    if how.replace:
        negatives = _sample_with_replacement(pool, others, n_negatives, n_others, draws)
    else:
        negatives = _sample_entries(pool, others, n_negatives, "other", draws)
    entries = np.concatenate([sampled, negatives])
    return take_pool_entries(pool, entries)


def _sample_entries(pool: Ragged, entries: Longs, sizes: Longs, purpose: str, draws: RoundDraws) -> Longs:
    """Random entries of each client, so many of them, none twice."""
    rows = pool.rows()[entries]
    ids = pool.ids[entries]
    order = draws.hash_entries(purpose, rows, ids)
    rank = rank_in_rows(rows, order)
    is_sampled = rank < sizes[rows]
    return entries[is_sampled]


def _sample_with_replacement(pool: Ragged, entries: Longs, sizes: Longs, counts: Longs, draws: RoundDraws) -> Longs:
    """Random entries of each client, so many of them, some perhaps twice; `counts`: how many it has."""
    clients = np.arange(len(pool))
    owner = np.repeat(clients, sizes)
    rows = pool.rows()[entries]
    start = np.searchsorted(rows, owner)
    n_clients = len(pool)
    zeros = np.zeros(n_clients, np.int64)
    turn = expand_spans(zeros, sizes)
    n_choices = counts[owner]
    place = draws.draw_indices("other", owner, turn, n_choices)
    places = start + place
    return np.asarray(entries[places])


def disguise_ptf_predictions(own: Ragged, received: Ragged, how: PtfDisguise, draws: RoundDraws) -> Ragged:
    """What each device uploads in PTF-FedRec: items by id, with the column score."""
    pool = pool_items(own, received)
    sample = sample_ptf_pool(pool, how, draws)
    score = sample.values["prediction"]
    if how.swap is not None:
        is_low = sample.values["label"] != 1
        score = swap_scores(sample, score, is_low, how.swap, draws)
    return Ragged(sample.ptr, sample.ids, {"score": score})
