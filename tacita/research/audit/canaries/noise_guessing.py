"""A reader of lab models that tries to take the noise off: by redrawing it for every seed that a run may have.

The noise of a run whose draws follow its seed alone is public up to the seed. Popularity is never negative without
noise; with the noise of another seed taken off, that of some item of a catalogue of dozens is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import Arrays, ServerState
from tacita.messages import Total
from tacita.models.tally.model import STATE, SURVEY
from tacita.models.tally.private_tally import PrivateTally
from tacita.research.audit.canaries.lab_plays import LabPlay

GUESSED_POPULARITY = "popularity without the noise of a seed that was tried"
NO_SEED = "no seed fits"
ROUNDING = 1e-6


def add_guess(play: LabPlay, seeds: range) -> None:
    """Put into a transcript what remains of popularity once the noise of a fitting seed is taken off."""
    model = play.federation.backbone
    assert isinstance(model, PrivateTally)
    server = play.progress.server
    state = server.parts[STATE]
    before = _server_before_release(model, server)
    for seed in seeds:
        popularity = state["liked"] - redraw_noise(model, before, SURVEY, seed)["liked"]
        if popularity.min() >= -ROUNDING:
            play.transcript.add(GUESSED_POPULARITY, np.round(popularity, 6))
            return
    play.transcript.add(GUESSED_POPULARITY, NO_SEED)


def _server_before_release(model: PrivateTally, server: ServerState) -> ServerState:
    """As the server was when it asked for the first time."""
    released = model.init_heads(Draws(0))["released"]
    return replace(server, heads={**server.heads, "released": released}, block=0, round=0)


def redraw_noise(model: PrivateTally, server: ServerState, question: str, seed: int) -> Arrays:
    """The noise of a run whose draws follow this seed and nothing else: a sum of nothing, with noise."""
    sums = {spec.name: np.zeros(spec.shape) for spec in model.list_statistic_fields(server, question)}
    total = model.add_noise(server, Total(sums, 0.0, 0), question, Draws(seed))
    return {name: np.asarray(total[name]) for name in sums}
