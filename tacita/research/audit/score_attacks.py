"""What a curious server reads from uploaded scores: which of the told items a person liked (spec F.5, E.6).

auc: how often a liked item's score is above another's; needs no guess of how many are liked. threshold: every score of
at least alpha is called liked; of what was told, all but the swapped share where alpha is 0.5 or more. top guess: the
best fifth is called liked (without a defence as many as there are), and what is found is compared with everything the
person liked. order: items that rise from one upload to the next are called liked. Figures are means over clients; each
stands beside the same attack on scores shuffled within every upload, which tell nothing of single items.

Top guess and order are rebuilt from released code. What it ranks where two uploads have different items is not known;
by default we rank the items that are in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tacita.core.types import AnyArray, Bools, Doubles, Longs, Ragged
from tacita.methods.distillation.round_draws import RoundDraws, floor_share, rank_in_rows
from tacita.research.audit.tally_attacks import make_figure


@dataclass(frozen=True)
class GuessQuality:
    """How well each client's liked items were guessed; nan where there was nothing to find."""

    precision: Doubles
    recall: Doubles
    f1: Doubles

    def means(self) -> dict[str, float | None]:
        return {name: mean_of_known(getattr(self, name)) for name in ("precision", "recall", "f1")}


@dataclass(frozen=True)
class AttackOptions:
    alpha: float = 0.5  # what devices mixed in; the threshold
    share: float | None = 0.2  # of an upload that the top guess names; None: as many as the person liked


def mean_of_known(values: Doubles) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def deduplicate_items(upload: Ragged) -> Ragged:
    """Every told item once, with its highest score, by id."""
    rows, ids, score = upload.rows(), upload.ids, upload.values["score"]
    pair = rows.astype(np.int64) * (1 + int(ids.max(initial=0))) + ids
    if (np.diff(pair) > 0).all():  # as devices send it
        return upload
    order = np.lexsort((-score, pair))
    kept = order[np.diff(pair[order], prepend=-1) > 0]
    return Ragged.from_pairs(rows[kept], ids[kept], len(upload), {"score": score[kept]})


def shuffle_scores(upload: Ragged, dice: RoundDraws, purpose: str = "control") -> Ragged:
    """The control: each client's scores dealt anew among the items it told."""
    rows, score = upload.rows(), upload.values["score"]
    dealt = np.lexsort((dice.hash_entries(purpose, rows, rank_in_rows(rows)), rows))
    return Ragged(upload.ptr, upload.ids, {"score": score[dealt]})


def auc_per_client(upload: Ragged, positives: Ragged) -> Doubles:
    """Share of (liked, other) pairs of an upload in the right order, a tie half; nan where one kind is missing."""
    rows, score, n = upload.rows(), upload.values["score"], len(upload)
    liked = positives.holds(rows, upload.ids)
    order = np.lexsort((score, rows))
    r, s, y = rows[order], score[order], liked[order]
    others = np.concatenate([[0], np.cumsum(~y)])  # before each place, over all rows
    edge = np.flatnonzero(np.concatenate([[True], (np.diff(r) != 0) | (np.diff(s) != 0)])) if len(r) else r
    size = np.diff(np.append(edge, len(r)))
    low, high = np.repeat(others[edge], size), np.repeat(others[edge + size], size)
    below = (low + high) / 2 - others[upload.ptr[:-1]][r]
    won = np.bincount(r, weights=below * y, minlength=n)
    n_liked = np.bincount(rows[liked], minlength=n)
    pairs = n_liked * (upload.counts() - n_liked)
    return np.where(pairs > 0, won / np.maximum(pairs, 1), np.nan)


def judge_guess(
    upload: Ragged, guessed: Bools, positives: Ragged, of: Literal["all", "upload"] = "all"
) -> GuessQuality:
    """Compare marked entries with what each client liked: `of` everything, or only what it told."""
    rows, n = upload.rows(), len(upload)
    liked = positives.holds(rows, upload.ids)
    hits, named = (np.bincount(rows[which], minlength=n) for which in (guessed & liked, guessed))
    there = positives.counts() if of == "all" else np.bincount(rows[liked], minlength=n)
    asked = (upload.counts() > 0) & (there > 0)
    precision, recall = hits / np.maximum(named, 1), hits / np.maximum(there, 1)
    both = precision + recall
    f1 = 2 * precision * recall / np.where(both > 0, both, 1)
    return GuessQuality(*(np.where(asked, one, np.nan) for one in (precision, recall, f1)))


def guess_by_threshold(
    upload: Ragged, positives: Ragged, alpha: float, of: Literal["all", "upload"] = "upload"
) -> GuessQuality:
    told = deduplicate_items(upload)
    return judge_guess(told, told.values["score"] >= np.float32(alpha), positives, of)


def guess_by_top(upload: Ragged, positives: Ragged, dice: RoundDraws, share: float | None = 0.2) -> GuessQuality:
    """Call the best `share` of each upload liked, at least one item; None: as many as the client liked."""
    told = deduplicate_items(upload)
    rows = told.rows()
    named = positives.counts() if share is None else np.maximum(1, floor_share(share, told.counts()))
    return judge_guess(told, rank_by_score(told, dice) < named[rows], positives)


def rank_by_score(upload: Ragged, dice: RoundDraws) -> Longs:
    """Place of every entry by score; ties by a hash, so that equal scores are guessed as by chance."""
    rows = upload.rows()
    return rank_in_rows(rows, -upload.values["score"], dice.hash_entries("ties", rows, upload.ids))


def guess_by_order(
    before: Ragged, upload: Ragged, positives: Ragged, dice: RoundDraws, among: Literal["both", "each"] = "both"
) -> GuessQuality:
    """Call items liked that rise from one upload to the next, the largest rises first, as many as the client liked.

    Ranks are `among` the items that both uploads have, or among all that each has.
    """
    earlier, later = deduplicate_items(before), deduplicate_items(upload)
    in_later, in_earlier = later.holds(earlier.rows(), earlier.ids), earlier.holds(later.rows(), later.ids)
    if among == "both":
        earlier, later = select_entries(earlier, in_later), select_entries(later, in_earlier)
        in_later, in_earlier = np.ones(len(earlier.ids), bool), np.ones(len(later.ids), bool)
    place = rank_by_score(later, dice)[in_earlier]
    rise = rank_by_score(earlier, dice)[in_later] - place
    shared = select_entries(later, in_earlier)
    rows = shared.rows()
    guessed = (rise > 0) & (rank_in_rows(rows, -rise, place) < positives.counts()[rows])
    return judge_guess(shared, guessed, positives)


def select_entries(upload: Ragged, mask: Bools) -> Ragged:
    """The marked entries."""
    return Ragged.from_pairs(
        upload.rows()[mask], upload.ids[mask], len(upload), {"score": upload.values["score"][mask]}
    )


def attack_scores(
    upload: Ragged, positives: Ragged, dice: RoundDraws, how: AttackOptions, before: Ragged | None = None
) -> dict[str, dict[str, Any]]:
    """Every attack on a round's uploads beside its control; `before`: each client's previous upload."""
    found = read_uploads(upload, positives, dice, how, before)
    earlier = None if before is None else shuffle_scores(before, dice, "control-before")
    control = read_uploads(shuffle_scores(upload, dice), positives, dice, how, earlier)
    return {
        name: make_figure(
            mean_of_known(values), mean_of_known(control[name]), count_known(values), count_known(control[name])
        )
        for name, values in found.items()
    }


def count_known(values: AnyArray) -> int:
    return int((~np.isnan(values)).sum())


def read_uploads(
    upload: Ragged, positives: Ragged, dice: RoundDraws, how: AttackOptions, before: Ragged | None
) -> dict[str, Doubles]:
    """What every attack gets of each client."""
    guesses = {
        "threshold": guess_by_threshold(upload, positives, how.alpha),
        "top": guess_by_top(upload, positives, dice, how.share),
    }
    if before is not None:
        guesses["order"] = guess_by_order(before, upload, positives, dice)
    out = {"auc": auc_per_client(deduplicate_items(upload), positives)}
    for name, guess in guesses.items():
        out |= {f"{name}_precision": guess.precision, f"{name}_recall": guess.recall, f"{name}_f1": guess.f1}
    return out
