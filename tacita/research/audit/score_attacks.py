"""What a curious server reads from uploaded scores: which of the uploaded items a person liked (spec F.5, E.6).

auc: how often a liked item's score is above another's; it needs no guess of how many are liked. threshold: every score
of at least alpha is called liked; where alpha is 0.5 or more, that reads all of an upload but the swapped share. top
guess: the best fifth is called liked (without a defence as many as there are), and compared with everything the person
liked. order: items that rise from one upload to the next are called liked. Figures are means over clients. The control
of each is the same attack on scores shuffled within every upload, which tell nothing of single items.

Top guess and order are rebuilt from released code. It is not known what that code ranks where two uploads have
different items; by default we rank the items that are in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tacita.core.types import AnyArray, Bools, Doubles, Longs, Ragged
from tacita.methods.distillation.round_draws import RoundDraws, floor_share, rank_in_rows
from tacita.research.audit.tally_attacks import build_attack_figure


@dataclass(frozen=True)
class GuessQuality:
    """How well each client's liked items were guessed; nan where there was nothing to find."""

    precision: Doubles
    recall: Doubles
    f1: Doubles

    def compute_means(self) -> dict[str, float | None]:
        return {
            "precision": average_known(self.precision),
            "recall": average_known(self.recall),
            "f1": average_known(self.f1),
        }


@dataclass(frozen=True)
class AttackOptions:
    alpha: float = 0.5  # what devices mixed in; the threshold
    share: float | None = 0.2  # of an upload that the top guess names; None: as many as the person liked


def average_known(values: Doubles) -> float | None:
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return None
    return float(known.mean())


def count_known(values: AnyArray) -> int:
    return int((~np.isnan(values)).sum())


def deduplicate_items(upload: Ragged) -> Ragged:
    """Every uploaded item once, with its highest score, by id."""
    rows = upload.rows()
    score = upload.values["score"]
    n_ids = 1 + int(upload.ids.max(initial=0))
    row_codes = rows.astype(np.int64) * n_ids
    code = row_codes + upload.ids
    is_sorted = (np.diff(code) > 0).all()  # as devices send it
    if is_sorted:
        return upload
    order = np.lexsort((-score, code))
    steps = np.diff(code[order], prepend=-1)
    best = order[steps > 0]
    columns = {"score": score[best]}
    ids = upload.ids[best]
    return Ragged.from_pairs(rows[best], ids, len(upload), columns)


def shuffle_scores(upload: Ragged, dice: RoundDraws, purpose: str = "control") -> Ragged:
    """The control: each client's scores shuffled among the items it uploaded."""
    rows = upload.rows()
    hashes = dice.hash_entries(purpose, rows, rank_in_rows(rows))
    order = np.lexsort((hashes, rows))
    shuffled = upload.values["score"][order]
    return Ragged(upload.ptr, upload.ids, {"score": shuffled})


def compute_auc_per_client(upload: Ragged, positives: Ragged) -> Doubles:
    """Share of (liked, other) pairs of an upload in the right order, a tie half; nan where one kind is missing."""
    n_clients = len(upload)
    rows = upload.rows()
    score = upload.values["score"]
    is_liked = positives.holds(rows, upload.ids)
    order = np.lexsort((score, rows))
    client = rows[order]
    liked = is_liked[order]
    running_others = np.cumsum(~liked)
    n_others = np.concatenate([[0], running_others])  # before each place, over all rows
    lower, upper = _find_tie_bounds(client, score[order])
    others_at_start = n_others[upload.ptr[:-1]]
    before_client = others_at_start[client]
    in_the_middle = (n_others[lower] + n_others[upper]) / 2
    n_below = in_the_middle - before_client
    wins = np.bincount(client, weights=n_below * liked, minlength=n_clients)
    n_liked = np.bincount(rows[is_liked], minlength=n_clients)
    n_pairs = n_liked * (upload.counts() - n_liked)
    share = wins / np.maximum(n_pairs, 1)
    return np.where(n_pairs > 0, share, np.nan)


def _find_tie_bounds(client: AnyArray, score: AnyArray) -> tuple[Longs, Longs]:
    """For every entry of sorted scores, where its client's entries with the same score begin and end."""
    n_entries = len(client)
    if n_entries == 0:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    is_new_client = np.diff(client) != 0
    is_new_score = np.diff(score) != 0
    is_new = is_new_client | is_new_score
    is_start = np.concatenate([[True], is_new])
    start = np.flatnonzero(is_start)
    end = np.append(start[1:], n_entries)
    size = end - start
    return np.repeat(start, size), np.repeat(end, size)


def judge_guess(
    upload: Ragged, guessed: Bools, positives: Ragged, of: Literal["all", "upload"] = "all"
) -> GuessQuality:
    """Compare marked entries with what each client liked: `of` everything, or only what it uploaded."""
    n_clients = len(upload)
    rows = upload.rows()
    is_liked = positives.holds(rows, upload.ids)
    is_hit = guessed & is_liked
    n_hits = np.bincount(rows[is_hit], minlength=n_clients)
    n_guessed = np.bincount(rows[guessed], minlength=n_clients)
    if of == "all":
        n_liked = positives.counts()
    else:
        n_liked = np.bincount(rows[is_liked], minlength=n_clients)
    precision = n_hits / np.maximum(n_guessed, 1)
    recall = n_hits / np.maximum(n_liked, 1)
    both = precision + recall
    nonzero_both = np.where(both > 0, both, 1)
    f1 = 2 * precision * recall / nonzero_both
    has_answer = (upload.counts() > 0) & (n_liked > 0)
    return GuessQuality(
        precision=np.where(has_answer, precision, np.nan),
        recall=np.where(has_answer, recall, np.nan),
        f1=np.where(has_answer, f1, np.nan),
    )


def guess_by_threshold(
    upload: Ragged, positives: Ragged, alpha: float, of: Literal["all", "upload"] = "upload"
) -> GuessQuality:
    distinct = deduplicate_items(upload)
    threshold = np.float32(alpha)
    is_guessed = distinct.values["score"] >= threshold
    return judge_guess(distinct, is_guessed, positives, of)


def guess_by_top(upload: Ragged, positives: Ragged, dice: RoundDraws, share: float | None = 0.2) -> GuessQuality:
    """Call the best `share` of each upload liked, at least one item; None: as many as the client liked."""
    distinct = deduplicate_items(upload)
    if share is None:
        n_guessed = positives.counts()
    else:
        share_sizes = floor_share(share, distinct.counts())
        n_guessed = np.maximum(1, share_sizes)
    rank = rank_by_score(distinct, dice)
    is_guessed = rank < n_guessed[distinct.rows()]
    return judge_guess(distinct, is_guessed, positives)


def rank_by_score(upload: Ragged, dice: RoundDraws) -> Longs:
    """Place of every entry by score; ties by a hash, so that equal scores are guessed as by chance."""
    rows = upload.rows()
    ties = dice.hash_entries("ties", rows, upload.ids)
    return rank_in_rows(rows, -upload.values["score"], ties)


def guess_by_order(
    before: Ragged, upload: Ragged, positives: Ragged, dice: RoundDraws, among: Literal["both", "each"] = "both"
) -> GuessQuality:
    """Call items liked that rise from one upload to the next, the largest rises first, as many as the client liked.

    Ranks are `among` the items that both uploads have, or among all that each has.
    """
    earlier = deduplicate_items(before)
    later = deduplicate_items(upload)
    stays = later.holds(earlier.rows(), earlier.ids)
    was_before = earlier.holds(later.rows(), later.ids)
    common_earlier = select_entries(earlier, stays)
    common_later = select_entries(later, was_before)
    if among == "both":
        rank_before = rank_by_score(common_earlier, dice)
        rank_after = rank_by_score(common_later, dice)
    else:
        rank_before = rank_by_score(earlier, dice)[stays]
        rank_after = rank_by_score(later, dice)[was_before]
    rise = rank_before - rank_after
    rows = common_later.rows()
    n_guessed = positives.counts()[rows]
    rise_rank = rank_in_rows(rows, -rise, rank_after)
    is_guessed = (rise > 0) & (rise_rank < n_guessed)
    return judge_guess(common_later, is_guessed, positives)


def select_entries(upload: Ragged, mask: Bools) -> Ragged:
    """The marked entries."""
    columns = {"score": upload.values["score"][mask]}
    rows = upload.rows()[mask]
    ids = upload.ids[mask]
    return Ragged.from_pairs(rows, ids, len(upload), columns)


def attack_scores(
    upload: Ragged, positives: Ragged, dice: RoundDraws, how: AttackOptions, before: Ragged | None = None
) -> dict[str, dict[str, Any]]:
    """Every attack on a round's uploads with its control; `before`: each client's previous upload."""
    by_attack = score_attacks_per_client(upload, positives, dice, how, before)
    shuffled = shuffle_scores(upload, dice)
    shuffled_before = None
    if before is not None:
        shuffled_before = shuffle_scores(before, dice, "control-before")
    controls = score_attacks_per_client(shuffled, positives, dice, how, shuffled_before)
    figures = {}
    for name, values in by_attack.items():
        control = controls[name]
        figures[name] = build_attack_figure(
            value=average_known(values),
            control=average_known(control),
            of=count_known(values),
            of_control=count_known(control),
        )
    return figures


def score_attacks_per_client(
    upload: Ragged, positives: Ragged, dice: RoundDraws, how: AttackOptions, before: Ragged | None
) -> dict[str, Doubles]:
    """What every attack gets of each client."""
    guesses = {
        "threshold": guess_by_threshold(upload, positives, how.alpha),
        "top": guess_by_top(upload, positives, dice, how.share),
    }
    if before is not None:
        guesses["order"] = guess_by_order(before, upload, positives, dice)
    distinct = deduplicate_items(upload)
    figures = {"auc": compute_auc_per_client(distinct, positives)}
    for name, guess in guesses.items():
        figures[f"{name}_precision"] = guess.precision
        figures[f"{name}_recall"] = guess.recall
        figures[f"{name}_f1"] = guess.f1
    return figures
