"""What parts bring to the samples of a round, checked: compiled loops trust item numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, CohortView, Ints, Longs, Ragged
from tacita.round.parts import Part, overrides


def collect_part_samples(view: CohortView, parts: Sequence[Part], own: Ragged) -> Ragged | None:
    """All parts' soft-labelled samples, user by user in the order of the parts; None: nobody gave any."""
    found = [(p, one) for p in parts if overrides(p, "samples") and (one := p.samples(view, own)) is not None]
    joined = Ragged.empty(len(view.user))
    for part, one in found:
        label = one.values.get("label", np.zeros(0))
        if len(one) != len(view.user) or len(label) != len(one.ids):
            raise TacitaError(f"part '{part.name}' must give every user a list of samples, and every sample a 'label'.")
        _check_items(part, one.ids, view.n_items)
        if not ((label >= 0) & (label <= 1)).all():  # not a number fails, too
            raise TacitaError(f"part '{part.name}' gave samples with a label outside 0 to 1.")
        joined = joined.join_rows(Ragged(one.ptr, one.ids, {"label": label}))
    return joined if len(joined.ids) else None


def collect_part_likes(view: CohortView, parts: Sequence[Part]) -> Ragged | None:
    """All parts' items to learn as liked, with their weights; None: nobody gave any."""
    found = [(p, one) for p in parts if overrides(p, "likes") and (one := p.likes(view)) is not None]
    joined = Ragged.empty(len(view.user))
    for part, one in found:
        weight = np.asarray(one.values.get("weight", np.zeros(0)), np.float32)
        if len(one) != len(view.user) or len(weight) != len(one.ids):
            raise TacitaError(f"part '{part.name}' must give every user a list of likes, and every one a 'weight'.")
        _check_items(part, one.ids, view.n_items)
        if not ((weight >= 0) & (weight < np.inf)).all():
            raise TacitaError(f"part '{part.name}' gave likes with a weight that is negative or not finite.")
        joined = joined.join_rows(Ragged(one.ptr, one.ids, {"weight": weight}))
    return joined if len(joined.ids) else None


def collect_part_negatives(view: CohortView, parts: Sequence[Part], counts: Longs) -> Ints | None:
    """The negatives of the part that chooses them, flat in user order; None: they are drawn uniformly."""
    for part in parts:
        chosen = part.negatives(view, counts) if overrides(part, "negatives") else None
        if chosen is not None:
            if chosen.shape != (counts.sum(),):
                raise TacitaError(
                    f"part '{part.name}' chose {chosen.size} negatives where {counts.sum()} were asked for."
                )
            _check_items(part, chosen, view.n_items)
            return chosen
    return None


def _check_items(part: Part, ids: AnyArray, n_items: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n_items:
        raise TacitaError(f"part '{part.name}' gave samples of items outside 0 to {n_items - 1}.")
