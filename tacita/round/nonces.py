"""Nonces: a number for each release of a device, so that the noise of a replayed round is drawn anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import AnyArray, CohortView, Keys, Longs, StateUpdate
from tacita.kernels.hashing import hash_owners
from tacita.messages import Upload
from tacita.privacy.ledger import Ledger
from tacita.round.part import Part


def number_releases(part: Part, ledger: Ledger, view: CohortView, upload: Upload, update: StateUpdate) -> Upload:
    """What a part with a ledger has encoded, with nonces by how often its devices have released something."""
    times = update.get("times", view.parts[part.name]["times"])
    assert isinstance(times, np.ndarray)
    n_releases = count_releases(ledger, times)
    return add_nonces(upload, part.context.draws, part.name, view, n_releases)


def count_releases(ledger: Ledger, times: AnyArray) -> Longs:
    """How often each user has paid for something that may come again."""
    repeats = [not event.once for event in ledger.events]
    counts = times[:, repeats].sum(axis=1)
    return np.asarray(counts, np.int64)


def add_nonces(upload: Upload, draws: Draws, purpose: str, view: CohortView, releases: Longs) -> Upload:
    """Uploads with a number each that follows the device and how often it has released something, nothing else."""
    counts = releases
    if len(releases):
        starts = view.user_ptr[:-1]
        first_users = np.asarray(starts)
        counts = np.add.reduceat(releases, first_users)
    key = draws.private(purpose)
    owners = hash_owners(key, view.client_keys)
    mixed = owners + counts.astype(np.uint64)
    key = draws.private(purpose, 1)
    nonce: Keys = hash_owners(key, mixed)
    if upload.nonce is not None:
        nonce = upload.nonce ^ nonce
    return replace(upload, nonce=nonce)
