"""What a reader of tally's released matrices can learn: rebuild G from B and look for somebody's block history.

The reader knows the settings, sees B of every block, and knows how many have the most popular item (B fixes G only up
to that scale). P is symmetric and B = I - P / diag(P), so B_ij / B_ji gives diag(P) up to the scale; then P, its
inverse and G follow, and the difference of two releases is what a block added. It is read in two ways:

lone item: an item whose consumers all have the same other items, as when there is one: its row is their history;
lone pair: a pair with the smallest count: what goes with both of it is a history if it all goes together.

Retractions are read in the same way from the releases before and after them. These are the attacks we know; that
nobody is found does not prove that nobody can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
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
from tacita.types import Bools, Doubles, Floats, Ragged, ServerState

LIKE = 0.25  # counts that differ by less than this are the same to the reader
NEARLY = 0.9  # overlap of a guess with a history (Jaccard) that counts as nearly read
MOST_PAIRS = 200_000  # lone pairs looked at in one release
OFF: dict[str, Any] = {"min_item": 0, "min_pair": 0, "keep": 0}
BATCHES = (1, 5, 10)  # users who leave at once
LEAVERS = 10  # who leave in such batches
PROTECTIONS: dict[str, list[int]] = {"min_item": [2, 3, 5, 10], "min_pair": [2, 5, 10], "keep": [50, 100, 200]}


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
    inverse[np.diag_indices(n)] = diagonal
    regular = np.linalg.inv((inverse + inverse.T) / 2)
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
    lone_items = there[(own > 0.5) & alike.all(axis=1)]
    pairs = np.triu(np.where(there, added, np.inf), 1)
    pairs[np.tril_indices(len(pairs))] = np.inf
    least = pairs.min(initial=np.inf)
    one, other = np.nonzero(pairs < least + LIKE) if np.isfinite(least) else (np.zeros(0, int),) * 2
    some = np.linspace(0, len(one) - 1, min(len(one), MOST_PAIRS)).astype(int)
    found = [lone_items]
    for lo in range(0, len(some), 4096):
        chosen = some[lo : lo + 4096]
        found.append(_going_together(there[one[chosen]] & there[other[chosen]], there))
    return np.unique(np.concatenate(found), axis=0)


def _going_together(sets: Bools, there: Bools) -> Bools:
    """The sets in which every item goes with every other."""
    rarest = np.where(sets, there.sum(axis=0)[None, :], len(there) + 1).argmin(axis=1)
    sets = sets[~(sets & ~there[rarest]).any(axis=1)]  # most are refuted by their rarest item
    counts = sets.astype(np.float32) @ there.astype(np.float32)
    size = sets.sum(axis=1)
    whole: Bools = ((counts == size[:, None]) | ~sets).all(axis=1) & (size > 1)
    return np.asarray(sets[whole])


def matched(guesses: Bools, histories: Bools) -> tuple[int, int]:
    """How many histories are guessed exactly, and how many nearly."""
    histories = histories[histories.any(axis=1)]
    if len(guesses) == 0 or len(histories) == 0:
        return 0, 0
    common = histories.astype(np.float32) @ guesses.astype(np.float32).T
    either = histories.sum(axis=1)[:, None] + guesses.sum(axis=1)[None, :] - common
    best = (common / either).max(axis=1)
    return int((best == 1).sum()), int((best >= NEARLY).sum())


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
    """No protection, each alone, and the run's own."""
    alone = {f"{k} {v}": {**OFF, k: v} for k, values in PROTECTIONS.items() for v in values}
    return {"none": OFF, **({} if brief else alone), "as set": {k: options[k] for k in OFF}}


def audit_tally(
    config: RunConfig, machine: Machine, brief: bool = False, on_done: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Each protection alone, none and the run's own: who can be read, what it costs in quality and bytes."""
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
        "bytes_up_maskable": fed.backbone.statistic_bytes(fed.stream.n_items),
        "rows": rows,
    }


def _audited(fed: Federation, backbone: Tally, leaving: bool) -> dict[str, Any]:
    """One stream: what its releases show, how good it is, what it sends."""
    progress, before = start(fed), np.zeros((0, 0))
    read, nearly, guessed = [], [], []
    for block in fed.stream.blocks:
        begin_block(fed, progress, block.index)
        run_block(fed, progress, lambda report, now: None)
        end_block(fed, progress)
        now = released_gram(backbone, progress.server)
        added = now.copy()
        added[: len(before), : len(before)] -= backbone.config.decay * before
        guesses, before = readings(added), now
        chosen, _ = backbone.user_terms(block.train, block.n_items)
        exact, close = matched(guesses, chosen.toarray() > 0)
        read.append(exact)
        nearly.append(close)
        guessed.append(len(guesses))
    mean = mean_of(progress.results)
    return {
        **{name: mean[name] for name in list(mean)[:1]},
        "read": read,
        "nearly": nearly,
        "guesses": guessed,
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
        guesses = np.concatenate([readings(gone), np.diag(gone)[None] > 0.5])  # all that moved is a guess, too
        found += matched(guesses, as_sets(everything, len(before)))[1]
    return found / len(chosen)
