"""What parts bring to the samples of a round, checked: compiled loops trust item numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, CohortView, Ints, Longs, Ragged
from tacita.round.task import LocalTask

Tasks = Mapping[str, LocalTask]


def collect_part_samples(view: CohortView, tasks: Tasks, own: Ragged) -> Ragged | None:
    """All parts' soft-labelled samples, user by user in the order of the parts; None: nobody gave any."""
    collected = Ragged.empty(len(view.user))
    for name, task in tasks.items():
        samples = None if task.samples is None else task.samples(view, own)
        if samples is None:
            continue
        label = samples.values.get("label", np.zeros(0))
        if len(samples) != len(view.user) or len(label) != len(samples.ids):
            raise TacitaError(f"part '{name}' must give every user a list of samples, and every sample a 'label'.")
        _check_items(name, samples.ids, view.n_items)
        is_probability = (label >= 0) & (label <= 1)  # not a number fails, too
        if not is_probability.all():
            raise TacitaError(f"part '{name}' gave samples with a label outside 0 to 1.")
        labelled = Ragged(samples.ptr, samples.ids, {"label": label})
        collected = collected.join_rows(labelled)
    return collected if len(collected.ids) else None


def collect_part_likes(view: CohortView, tasks: Tasks) -> Ragged | None:
    """All parts' items to learn as liked, with their weights; None: nobody gave any."""
    collected = Ragged.empty(len(view.user))
    for name, task in tasks.items():
        likes = None if task.likes is None else task.likes(view)
        if likes is None:
            continue
        column = likes.values.get("weight", np.zeros(0))
        weight = np.asarray(column, np.float32)
        if len(likes) != len(view.user) or len(weight) != len(likes.ids):
            raise TacitaError(f"part '{name}' must give every user a list of likes, and every one a 'weight'.")
        _check_items(name, likes.ids, view.n_items)
        is_weight = (weight >= 0) & (weight < np.inf)
        if not is_weight.all():
            raise TacitaError(f"part '{name}' gave likes with a weight that is negative or not finite.")
        weighted = Ragged(likes.ptr, likes.ids, {"weight": weight})
        collected = collected.join_rows(weighted)
    return collected if len(collected.ids) else None


def collect_part_negatives(view: CohortView, tasks: Tasks, counts: Longs) -> Ints | None:
    """The negatives of the part that chooses them, flat in user order; None: they are drawn uniformly."""
    n_negatives = counts.sum()
    for name, task in tasks.items():
        chosen = None if task.negatives is None else task.negatives(view, counts)
        if chosen is None:
            continue
        if chosen.shape != (n_negatives,):
            raise TacitaError(f"part '{name}' chose {chosen.size} negatives where {n_negatives} were asked for.")
        _check_items(name, chosen, view.n_items)
        return chosen
    return None


def _check_items(name: str, ids: AnyArray, n_items: int) -> None:
    if not len(ids):
        return
    is_in_range = ids.min() >= 0 and ids.max() < n_items
    if not is_in_range:
        raise TacitaError(f"part '{name}' gave samples of items outside 0 to {n_items - 1}.")
