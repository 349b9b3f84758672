"""What a device makes of its predictions before it tells them (spec E.3 step 4; PTF-FedRec: F.2 steps 3 and 4).

FedKDRec samples a random share of the items it has predictions for, mixes hard labels into them and swaps some high
values with low ones. Equation 4: alpha 1 is hard labels only; the paper's text on alpha says the reverse. With alpha
of 0.5 or more a threshold reads every label that was not swapped, see `audit.scores`. PTF-FedRec samples positives and
negatives apart, mixes nothing and swaps the most confident values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tacita.core.flat_indices import expand_spans
from tacita.core.types import Bools, Floats, Longs, Ragged
from tacita.methods.distillation.round_draws import RoundDraws, floor_share, rank_in_rows


@dataclass(frozen=True)
class Swap:
    share: float = 0.1  # of the positives told (lambda)
    least: int = 1  # pairs, where there is one to swap; 0: share 0 swaps nothing
    select: Literal["random", "top"] = "random"  # top: highest values on both sides, as PTF-FedRec does


@dataclass(frozen=True)
class Disguise:
    """FedKDRec's three steps."""

    beta: tuple[float, float] | None = (0.3, 0.7)  # bounds of the share that is told; None: all of it
    alpha: float = 0.5  # weight of the hard label; 0: predictions as they are
    swap: Swap | None = field(default_factory=Swap)  # None: no swap


@dataclass(frozen=True)
class PtfDisguise:
    """PTF-FedRec's steps."""

    positives: tuple[float, float] | None = (0.1, 1.0)  # bounds of the share that is told (b); None: tell everything
    negatives: tuple[float, float] = (1.0, 4.0)  # bounds of how many for each positive told (g)
    replace: bool = False  # the released code draws negatives with replacement
    swap: Swap | None = field(default_factory=lambda: Swap(select="top"))


def drop_own(received: Ragged, own: Ragged) -> Ragged:
    """What was received, without items of the device's own set: `own` its private set, in PTF-FedRec its positives."""
    rows = received.rows()
    keep = ~own.holds(rows, received.ids)
    columns = {name: column[keep] for name, column in received.values.items()}
    return Ragged.from_pairs(rows[keep], received.ids[keep], len(received), columns)


def pool_items(own: Ragged, received: Ragged) -> Ragged:
    """Every item a device may tell of, once, by id: so that the order of an upload says nothing of labels.

    `own` has columns label (0 or 1) and prediction, `received` prediction; an item in both is the device's own. In the
    result a received item has label nan.
    """
    rows = np.concatenate([own.rows(), received.rows()]).astype(np.int64)
    ids = np.concatenate([own.ids, received.ids])
    missing = np.full(len(received.ids), np.nan, np.float32)
    label, predicted = (
        np.concatenate([read_column(own, name), missing if name == "label" else read_column(received, name)])
        for name in ("label", "prediction")
    )
    _, first = np.unique(rows * (1 + int(ids.max(initial=0))) + ids, return_index=True)
    columns = {"label": label[first], "prediction": predicted[first]}
    return Ragged.from_pairs(rows[first], ids[first], len(own), columns)


def read_column(lists: Ragged, name: str) -> Floats:
    """A column, which lists without entries need not have."""
    return lists.values[name].astype(np.float32) if len(lists.ids) else np.zeros(0, np.float32)


def take_entries(pool: Ragged, entries: Longs) -> Ragged:
    """The given entries of a pool, in its order; repeats stay."""
    entries = np.sort(entries)
    columns = {name: values[entries] for name, values in pool.values.items()}
    return Ragged.from_pairs(pool.rows()[entries], pool.ids[entries], len(pool), columns)


def sample_pool(pool: Ragged, beta: tuple[float, float], dice: RoundDraws) -> Ragged:
    """A random share of each client's pool, at least one item where there is one."""
    rows, counts = pool.rows(), pool.counts()
    wanted = np.minimum(np.maximum(1, floor_share(dice.draw_between("beta", beta), counts)), counts)
    return take_entries(
        pool, np.flatnonzero(rank_in_rows(rows, dice.hash_entries("sample", rows, pool.ids)) < wanted[rows])
    )


def mix_labels(label: Floats, prediction: Floats, alpha: float) -> Floats:
    """alpha * label + (1 - alpha) * prediction; the prediction where there is no label."""
    blend = alpha * label.astype(np.float64) + (1 - alpha) * prediction.astype(np.float64)
    return np.where(np.isnan(label), prediction, blend).astype(np.float32)


def swap_scores(upload: Ragged, score: Floats, low: Bools, how: Swap, dice: RoundDraws) -> Floats:
    """Scores after some items with label 1 exchanged theirs, pair by pair, with some of the items marked `low`."""
    rows, n = upload.rows(), len(upload)
    high = upload.values["label"] == 1
    n_high, n_low = (np.bincount(rows[side], minlength=n) for side in (high, low))
    pairs = np.minimum(np.maximum(how.least, floor_share(how.share, n_high)), np.minimum(n_high, n_low))
    partners = []
    for name, side in (("swap-high", high), ("swap-low", low)):
        at = np.flatnonzero(side)
        first = -score[at] if how.select == "top" else dice.hash_entries(name, rows[at], upload.ids[at])
        place = rank_in_rows(rows[at], first, upload.ids[at])
        kept = place < pairs[rows[at]]
        partners.append(at[kept][np.lexsort((place[kept], rows[at][kept]))])
    out = score.copy()
    out[partners[0]], out[partners[1]] = score[partners[1]], score[partners[0]]
    return out


def disguise_predictions(own: Ragged, received: Ragged, how: Disguise, dice: RoundDraws) -> Ragged:
    """What each device tells: items by id, with the column score."""
    pool = pool_items(own, received)
    told = pool if how.beta is None else sample_pool(pool, how.beta, dice)
    label = told.values["label"]
    score = mix_labels(label, told.values["prediction"], how.alpha)
    if how.swap is not None:
        score = swap_scores(told, score, label == 0, how.swap, dice)
    return Ragged(told.ptr, told.ids, {"score": score})


def sample_ptf(pool: Ragged, how: PtfDisguise, dice: RoundDraws) -> Ragged:
    """A random share of the positives, and for each of them some of the other items."""
    if how.positives is None:
        return pool
    rows, n = pool.rows(), len(pool)
    high = np.flatnonzero(pool.values["label"] == 1)
    rest = np.flatnonzero(pool.values["label"] != 1)
    n_high, n_rest = (np.bincount(rows[side], minlength=n) for side in (high, rest))
    told = np.minimum(np.maximum(1, floor_share(dice.draw_between("positives", how.positives), n_high)), n_high)
    picked = high[
        rank_in_rows(rows[high], dice.hash_entries("positive", rows[high], pool.ids[high])) < told[rows[high]]
    ]
    # who has no positive tells one other item all the same: an empty upload would say so
    wanted = np.maximum(1, floor_share(dice.draw_between("negatives", how.negatives), told)) * (n_rest > 0)
    if how.replace:
        owner = np.repeat(np.arange(n), wanted)
        start = np.searchsorted(rows[rest], owner)
        turn = expand_spans(np.zeros(n, np.int64), wanted)
        return take_entries(
            pool, np.concatenate([picked, rest[start + dice.draw_indices("other", owner, turn, n_rest[owner])]])
        )
    others = rest[rank_in_rows(rows[rest], dice.hash_entries("other", rows[rest], pool.ids[rest])) < wanted[rows[rest]]]
    return take_entries(pool, np.concatenate([picked, others]))


def disguise_ptf(own: Ragged, received: Ragged, how: PtfDisguise, dice: RoundDraws) -> Ragged:
    """What each device tells in PTF-FedRec: items by id, with the column score."""
    told = sample_ptf(pool_items(own, received), how, dice)
    score = told.values["prediction"]
    if how.swap is not None:
        score = swap_scores(told, score, told.values["label"] != 1, how.swap, dice)
    return Ragged(told.ptr, told.ids, {"score": score})
