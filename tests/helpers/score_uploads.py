"""Draws and candidates of prediction transfer."""

from __future__ import annotations

import numpy as np

import tacita.kernels  # noqa: F401  (before torch, whose threads would otherwise wait by spinning)
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import Floats, Ragged
from tacita.methods.distillation import candidates as cand
from tacita.methods.distillation.round_draws import RoundDraws

N_ITEMS = 300


def round_draws(n: int, round_no: int = 3, seed: int = 1, public: bool = False) -> RoundDraws:
    return RoundDraws(Draws(seed), derive_keys(f"u{k}" for k in range(n)), 0, round_no, public)


def tied_logits(n_users: int, seed: int = 0, n_items: int = N_ITEMS) -> Floats:
    """Logits with many ties."""
    return np.random.default_rng(seed).integers(-6, 7, (n_users, n_items)).astype(np.float32) / 2


def candidate_lists(n: int = 3) -> Ragged:
    upload = Ragged.from_lists([[(j + 7 * k) % N_ITEMS for j in range(60)] for k in range(n)])
    logits = tied_logits(n)
    history = cand.UploadHistory.from_upload(upload, N_ITEMS)
    return cand.find_unsent_candidates(history, upload, np.arange(n, dtype=np.int32), lambda users: logits[users])
