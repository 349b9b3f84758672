"""LIPM's gates: how much of a client's change of each array counts, by its interest (spec E.4, fusion `gate`).

The paper says that a change and an interest are fused, not how. A gate is 2 sigmoid(w . u_i), w = 0 lets everything
through as it is. Nobody can differentiate a loss through an aggregate; what can be told is whether a client's change
points where everybody went in the round before, so a gate's w moves towards interests whose changes agree more than
most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.special

from tacita.core.types import Arrays, CohortView, Doubles, Floats, LocalModels, ServerState


def gate_factors(u: Doubles, gates: Floats) -> Doubles:
    """(clients, arrays) factors between 0 and 2."""
    return np.asarray(2 * scipy.special.expit(u @ gates.T.astype(np.float64)))


def model_arrays(server: ServerState, names: Sequence[str]) -> Arrays:
    """The arrays of a model by their names in an upload."""
    return {name: server.items if name == "rows" else server.heads[name.removeprefix("heads/")] for name in names}


def measure_agreement(view: CohortView, local: LocalModels, received: Arrays, names: Sequence[str]) -> Floats:
    """(clients, arrays) the cosine of each change with where everybody went; 0 where either stands still."""
    out = np.zeros((view.n_clients, len(names)))
    client = np.repeat(np.arange(view.n_clients), np.diff(local.row_start))
    for k, name in enumerate(names):
        went = received[f"moved.{name}"].astype(np.float64)
        length = np.linalg.norm(went)
        if length == 0:
            continue
        if name == "rows":
            moved = local.rows.astype(np.float64) - view.items[local.row_item]
            along = np.bincount(client, (moved * went[local.row_item]).sum(1), view.n_clients)
            own = np.sqrt(np.bincount(client, (moved**2).sum(1), view.n_clients))
            out[:, k] = along / np.maximum(own * length, 1e-12)
        else:
            head = name.removeprefix("heads/")
            moved = (local.heads[head].astype(np.float64) - view.heads[head]).reshape(view.n_clients, -1)
            out[:, k] = moved @ went.reshape(-1) / np.maximum(np.linalg.norm(moved, axis=1) * length, 1e-12)
    return np.asarray(np.clip(out, -1, 1), np.float32)
