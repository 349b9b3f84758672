"""What a reader of tally's released matrices can learn: rebuild G from B and look for somebody's block history.

The reader knows the settings, sees B of every block, and knows how many have the most popular item (B fixes G only up
to that scale). P is symmetric and B = I - P / diag(P), so B_ij / B_ji gives diag(P) up to the scale; then P, its
inverse and G follow, and the difference of two releases is what a block added. It is read in these ways:

lone item: an item whose consumers all have the same other items, as when there is one: its row is their history;
lone pair: a pair with the smallest count: what goes with both of it is a history if it all goes together;
peeling: a history that fits the whole sum is taken out of it, and the rest, now easier, is read again;
column: the largest entries of a column of B, as they are, which needs no whole B.

Retractions are read in the same way from the releases before and after them. These are the attacks we know; that
nobody is found does not prove that nobody can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse.csgraph

from tacita.backbones.linear import STATE, Tally, dense_weights
from tacita.backbones.tally_sums import Shape, Sums
from tacita.config import RunConfig
from tacita.controls import mean_of
from tacita.devices import Federation, wire_bytes
from tacita.errors import TacitaError
from tacita.rounds import Progress, begin_block, end_block, run_block, start
from tacita.runs import Machine, assemble, build
from tacita.scoring import rows_of
from tacita.types import Bools, Doubles, Floats, Longs, Ragged, ServerState

LIKE = 0.25  # counts that differ by less than this are the same to the reader
PART = 5  # items of a history on which a reader has exact sums, that count as a part worth reading
NEARLY = 0.9  # overlap of a guess with a history (Jaccard) that counts as nearly read
PER_ITEM = 20  # lone pairs of an item that are looked at, those with the fewest common items first
PASSES = 30  # of peeling, at most
FAINT = 0.05  # added to what is peeled, so that it can be inverted
OFF: dict[str, Any] = {"min_item": 0, "min_pair": 0, "keep": 0}
BATCHES = (1, 5, 10)  # users who leave at once
LEAVERS = 10  # who leave in such batches
PROTECTIONS: dict[str, list[int]] = {"min_item": [2, 5, 10], "min_pair": [2, 5, 10], "keep": [200, 100, 50]}
TOGETHER: list[dict[str, int]] = [
    {"min_item": 2, "keep": 200},
    {"min_item": 5, "keep": 200},
    {"min_item": 5, "keep": 100},
    {"min_item": 5, "min_pair": 2},
]


def rebuilt(weights: Floats, ridge: float, most_popular: float) -> Doubles:
    """G as a reader of B rebuilds it, knowing the ridge and the largest count."""
    given = weights.astype(np.float64)
    n = len(given)
    both = np.abs(given * given.T)
    tree = scipy.sparse.csgraph.minimum_spanning_tree(np.where(both > 0, 1 / np.maximum(both, 1e-300), 0.0))
    root = int(both.sum(axis=0).argmax())
    order, parent = scipy.sparse.csgraph.breadth_first_order(tree, root, directed=False)
    diagonal = np.ones(n)  # of P, up to a factor
    for child in order[1:]:
        up = parent[child]
        diagonal[child] = diagonal[up] * given[child, up] / given[up, child]
    inverse = -given * diagonal[None, :]
    told = (given != 0) + (given.T != 0).astype(float)  # an entry that was cut on one side is known from the other
    inverse = (inverse + inverse.T) / np.maximum(told, 1)
    inverse[np.diag_indices(n)] = diagonal
    regular = np.linalg.inv(inverse)
    regular *= (most_popular + ridge) / regular.diagonal()[order].max()
    gram = regular - ridge * np.eye(n)
    nothing = np.ones(n, bool)
    nothing[order] = False  # no item goes with it: only the ridge is there
    gram[nothing] = gram[:, nothing] = 0.0
    return gram


def readings(added: Doubles) -> Bools:
    """Sets of items (guesses, items) that a reader takes for somebody's history in what a block added."""
    there, own = added > 0.5, np.diag(added)
    alike = (np.abs(added - own[:, None]) < LIKE) | ~there
    found = [there[(own > 0.5) & alike.all(axis=1)]]
    one, other = _lone_pairs(added, there)
    for lo in range(0, len(one), 4096):
        some = slice(lo, lo + 4096)
        found.append(_going_together(there[one[some]] & there[other[some]], there))
    return np.unique(np.concatenate(found), axis=0)


def _lone_pairs(added: Doubles, there: Bools) -> tuple[Longs, Longs]:
    """Of every item the pairs that one person has, and those with the smallest count of all."""
    pairs = np.where(there, added, np.inf)
    np.fill_diagonal(pairs, np.inf)
    lone = (np.abs(pairs - 1) < LIKE) | (pairs < pairs.min(initial=np.inf) + LIKE)
    common = there.astype(np.float32) @ there.astype(np.float32)
    order = np.argsort(np.where(lone, common, np.inf), axis=1, kind="stable")[:, :PER_ITEM]
    one = np.repeat(np.arange(len(added)), order.shape[1])
    other = order.ravel()
    one, other = one[lone[one, other]], other[lone[one, other]]
    found = np.unique(np.minimum(one, other) * len(added) + np.maximum(one, other))
    return found // len(added), found % len(added)


def _going_together(sets: Bools, there: Bools) -> Bools:
    """The sets in which every item goes with every other."""
    rarest = np.where(sets, there.sum(axis=0)[None, :], len(there) + 1).argmin(axis=1)
    sets = sets[~(sets & ~there[rarest]).any(axis=1)]  # most are refuted by their rarest item
    counts = sets.astype(np.float32) @ there.astype(np.float32)
    size = sets.sum(axis=1)
    whole: Bools = ((counts == size[:, None]) | ~sets).all(axis=1) & (size > 1)
    return np.asarray(sets[whole])


def peeled(added: Doubles) -> Bools:
    """All guesses, with those that fit the sum taken out of it again and again: then others stand alone.

    If G is a sum of x x^T, each x of it has x^T G^-1 x <= 1; a wrong guess hardly ever has.
    """
    left, found = added.copy(), readings(added)
    guesses = found
    for _ in range(PASSES):
        if len(guesses) == 0:
            break
        try:
            factor = np.linalg.cholesky((left + left.T) / 2 + FAINT * np.eye(len(left)))
        except np.linalg.LinAlgError:  # what was rebuilt is no such sum
            break
        sizes = scipy.linalg.solve_triangular(factor, guesses.T.astype(np.float64), lower=True)
        sure = [np.ix_(one, one) for one in guesses[(sizes**2).sum(axis=0) < 1.01]]
        sure = [place for place in sure if _subtract(left, place)]
        if not sure:
            break
        guesses = readings(left)
        found = np.unique(np.concatenate([found, guesses]), axis=0)
    return found


def _subtract(left: Doubles, place: Any) -> bool:
    """Take one history out, if all of it is still there."""
    if left[place].min() < 0.5:
        return False
    left[place] -= 1
    return True


def column_readings(weights: Floats) -> Bools:
    """An item and what is positive in its column of B: all of it, and down to the largest fall."""
    found = []
    for item, column in enumerate(weights.T):
        order = np.argsort(-column, kind="stable")[: np.count_nonzero(column > 0)]
        if len(order) == 0:
            continue
        size = column[order].astype(np.float64)
        falls = (size[:-1] / size[1:]), (size[:-1] - size[1:])
        for last in (len(order), *(int(fall.argmax()) + 1 for fall in falls if len(fall))):
            guess = np.zeros(len(weights), bool)
            guess[order[:last]] = guess[item] = True
            found.append(guess)
    return np.unique(found, axis=0) if found else np.zeros((0, len(weights)), bool)


def overlaps(guesses: Bools, histories: Bools) -> Doubles:
    """How well each history that is not empty is guessed: its best overlap (Jaccard) with a guess."""
    histories = histories[histories.any(axis=1)]
    if len(guesses) == 0:
        return np.zeros(len(histories))
    common = histories.astype(np.float32) @ guesses.astype(np.float32).T
    either = histories.sum(axis=1)[:, None] + guesses.sum(axis=1)[None, :] - common
    return np.asarray((common / either).max(axis=1), np.float64)


def as_sets(lists: Ragged, n_items: int) -> Bools:
    """Lists as rows of a (users, items) table."""
    sets = np.zeros((len(lists), n_items), bool)
    sets[lists.rows(), lists.ids] = True
    return sets


def largest(backbone: Tally, server: ServerState) -> float:
    """How many have the most popular item, faded like G: what the reader is given."""
    n = len(server.items)
    shape = Shape.of(n, server.heads["inputs"])
    own = np.arange(n, dtype=np.int64)
    return float(backbone.released(Sums.read(server.parts[STATE]), shape, own * (own + 3) // 2).max())


def released_gram(backbone: Tally, server: ServerState) -> Doubles:
    return rebuilt(dense_weights(server.heads), backbone.config.ridge, largest(backbone, server))


def settings_of(options: dict[str, Any], brief: bool) -> dict[str, dict[str, Any]]:
    """No protection, each alone, some together, and the run's own."""
    own = {k: options[k] for k in OFF}
    alone = [{k: v} for k, values in PROTECTIONS.items() for v in values]
    tried = [] if brief else [one for one in (*alone, *TOGETHER) if {**OFF, **one} != own]
    named = {", ".join(f"{k} {v}" for k, v in one.items()): {**OFF, **one} for one in tried}
    return {"none": OFF, **named, "as set": own}


def audit_tally(
    config: RunConfig, machine: Machine, brief: bool = False, on_done: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """No protection, each alone, some together, the run's own: who can be read, what it costs in quality and bytes."""
    fed = assemble(config, machine)
    if not isinstance(fed.backbone, Tally):
        raise TacitaError(f"backbone '{fed.backbone.name}' releases no B; this audit is for 'tally'.")
    own = fed.backbone.config
    if own.ridge_popularity or own.length_power or fed.stream.blocks[0].n_items > own.most_inputs:
        raise TacitaError(
            "the audit rebuilds G of plain sums: ridge_popularity and length_power must be 0, and the catalogue no "
            "larger than most_inputs."
        )
    rows = []
    settings = settings_of(own.model_dump(), brief)
    for done, (name, options) in enumerate(settings.items()):
        if on_done:
            on_done(done, len(settings))
        changed = config.model_copy(update={"backbone": {**config.backbone, "name": "tally", **options}})
        backbone, _, _ = build(changed)
        assert isinstance(backbone, Tally)
        found = _audited(replace(fed, config=changed, backbone=backbone), backbone, name in ("none", "as set"))
        rows.append({"protection": name, **found})
    counts = np.concatenate([b.train.counts() for b in fed.stream.blocks])
    return {
        "data": fed.stream.name,
        "settings": own.model_dump(mode="json"),
        "users": [int((b.train.counts() > 0).sum()) for b in fed.stream.blocks],
        "bytes_up_readable": 4.0 * float(counts[counts > 0].mean()),
        "bytes_up_maskable": fed.backbone.upload_bytes(fed.stream.n_items),
        "rows": rows,
    }


def _audited(fed: Federation, backbone: Tally, leaving: bool) -> dict[str, Any]:
    """One stream: what its releases show, how good it is, what it sends."""
    progress, before = start(fed), np.zeros((0, 0))
    found: list[Doubles] = []
    parts: list[int] = []
    out = np.ones(fed.stream.n_items, bool)  # never waited: of these the reader has exact sums
    for block in fed.stream.blocks:
        begin_block(fed, progress, block.index)
        run_block(fed, progress, lambda report, now: None)
        end_block(fed, progress)
        now = released_gram(backbone, progress.server)
        added = now.copy()
        added[: len(before), : len(before)] -= backbone.config.decay * before
        len_before, before = len(before), now
        out[: block.n_items] &= np.diag(added) > 0.5
        if block.index:
            out[len_before : block.n_items] = False  # came after the first block: may have waited unseen
        exact = np.flatnonzero(out[: block.n_items])
        inner = peeled(added[np.ix_(exact, exact)])
        among = np.zeros((len(inner), block.n_items), bool)
        among[:, exact] = inner
        guesses = np.concatenate([peeled(added), among, column_readings(dense_weights(progress.server.heads))])
        chosen, _ = backbone.user_terms(block.train, block.n_items)
        histories = chosen.toarray() > 0
        found.append(overlaps(guesses, histories))
        released = histories[:, exact]
        parts.append(int((overlaps(inner, released[released.sum(axis=1) >= PART]) == 1).sum()))
    mean = mean_of(progress.results)
    valid = [one["valid"] for one in progress.results[1:] or progress.results]
    return {
        **{name: mean[name] for name in list(mean)[:1]},
        "valid": None if None in valid else float(np.mean(valid)),
        "read": [int((one == 1).sum()) for one in found],
        "nearly": [int((one >= NEARLY).sum()) for one in found],
        "parts": parts,
        "closest": float(max(one.max(initial=0.0) for one in found)),
        "retractions": {str(n): _retractions_read(fed, backbone, progress, n) for n in BATCHES if leaving},
        "bytes_down": float(sum(wire_bytes(a) for a in progress.server.heads.values())),
    }


def _retractions_read(fed: Federation, backbone: Tally, progress: Progress, batch: int) -> float:
    """The share of leavers whose histories are nearly read when as many leave at once, everything they told."""
    active = np.flatnonzero(fed.stream.blocks[-1].train.counts() > 0)
    chosen = active[np.linspace(0, len(active) - 1, min(LEAVERS, len(active))).astype(int)].astype(np.int32)
    before, found = released_gram(backbone, progress.server), 0
    for lo in range(0, len(chosen), batch):
        users = chosen[lo : lo + batch]
        told = [rows_of(b.train, users) for b in fed.stream.blocks]
        after, _ = backbone.retracted(progress.server, told, [Ragged.empty(len(users)) for _ in told])
        everything = Ragged.empty(len(users))
        for one in told:
            everything = everything.joined(one)
        gone = before - released_gram(backbone, after)
        moved = [np.diag(gone)[None] > least for least in (0.1, 0.5)]  # all that moved is a guess, too
        guesses = np.concatenate([readings(gone), *moved])
        found += int((overlaps(guesses, as_sets(everything, len(before))) >= NEARLY).sum())
    return found / len(chosen)
