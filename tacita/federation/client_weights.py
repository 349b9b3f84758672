"""How much clients count in a round: the factors of the parts that weigh them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Doubles
from tacita.messages import Upload
from tacita.round.part import Part

_ROUNDING = 1e-6  # by which a factor may exceed 1
_LEAST_HIDDEN = 1e-12  # factor of a client whose weight nobody may learn: with 0 it would be seen to send nothing


def weigh_upload(parts: Sequence[Part], view: CohortView, upload: Upload, hides_weights: bool = False) -> Upload:
    """Uploads with the factors of the parts that weigh clients.

    `hides_weights`: factors that follow from data are noised with the rest, so nobody drops out and none is refused
    for what a model, maybe a hostile one, made of a single person's data.
    """
    for part in parts:
        factor = part.weigh(view, upload)
        if factor is not None:
            if hides_weights and not part.weighs_presence:
                factor = _keep_sending(factor)
            _check_factors(part, view, factor)
            weight = upload.weight * np.clip(factor, 0.0, 1.0)
            upload = replace(upload, weight=weight)
    return upload


def _keep_sending(factor: Doubles) -> Doubles:
    """Factors above 0, also where a model gave no number."""
    is_number = np.isfinite(factor)
    return np.where(is_number, np.maximum(factor, _LEAST_HIDDEN), _LEAST_HIDDEN)


def _check_factors(part: Part, view: CohortView, factor: Doubles) -> None:
    """Refuse factors that are not one number from 0 to 1 for each client; rounding may exceed it."""
    if factor.shape != (view.n_clients,):
        raise TacitaError(
            f"part '{part.name}' weighs in shape {factor.shape}, where the cohort has {view.n_clients} clients of "
            f"{len(view.user)} users; return a factor for each client from weigh."
        )
    is_factor = (factor >= 0) & (factor <= 1 + _ROUNDING)
    if not is_factor.all():
        worst = factor[~is_factor][0]
        raise TacitaError(f"part '{part.name}' weighs a client by {worst:g}; return factors from 0 to 1 from weigh.")
