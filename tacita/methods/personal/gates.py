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

from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, LocalModels, ServerState


def compute_gate_factors(interest: Doubles, gates: Floats) -> Doubles:
    """(clients, arrays) factors between 0 and 2."""
    weights = gates.T.astype(np.float64)
    logits = interest @ weights
    probability = scipy.special.expit(logits)
    return np.asarray(2 * probability)


def collect_model_arrays(server: ServerState, names: Sequence[str]) -> Arrays:
    """The arrays of a model by their names in an upload."""
    arrays: Arrays = {}
    for name in names:
        if name == "rows":
            arrays[name] = server.items
        else:
            head = _strip_prefix(name)
            arrays[name] = server.heads[head]
    return arrays


def _strip_prefix(field: str) -> str:
    """The name of a shared parameter without its prefix in an upload."""
    return field.removeprefix("heads/")


def measure_agreement(view: CohortView, local: LocalModels, received: Arrays, names: Sequence[str]) -> Floats:
    """(clients, arrays) the cosine of each change with where everybody went; 0 where either stands still."""
    shape = (view.n_clients, len(names))
    agreement = np.zeros(shape)
    for column, name in enumerate(names):
        change = received[f"moved.{name}"]
        mean_change = change.astype(np.float64)
        if np.linalg.norm(mean_change) == 0:
            continue
        if name == "rows":
            agreement[:, column] = _compare_rows(view, local, mean_change)
        else:
            head = _strip_prefix(name)
            agreement[:, column] = _compare_head(view, local, head, mean_change)
    bounded = np.clip(agreement, -1, 1)
    return np.asarray(bounded, np.float32)


def _compare_rows(view: CohortView, local: LocalModels, mean_change: Doubles) -> Doubles:
    """The cosine of each client's change of item rows with the mean change."""
    n_rows = np.diff(local.row_start)
    clients = np.arange(view.n_clients)
    client = np.repeat(clients, n_rows)
    received_rows = view.items[local.row_item]
    change = local.rows.astype(np.float64) - received_rows
    products = change * mean_change[local.row_item]
    squares = change**2
    row_products = products.sum(1)
    product = np.bincount(client, row_products, view.n_clients)
    row_squares = squares.sum(1)
    length = np.sqrt(np.bincount(client, row_squares, view.n_clients))
    return _divide_by_lengths(product, length, mean_change)


def _compare_head(view: CohortView, local: LocalModels, head: str, mean_change: Doubles) -> Doubles:
    """The cosine of each client's change of a shared parameter with the mean change."""
    trained = local.heads[head].astype(np.float64)
    change = trained - view.heads[head]
    change = change.reshape(view.n_clients, -1)
    product = change @ mean_change.reshape(-1)
    length = np.linalg.norm(change, axis=1)
    return _divide_by_lengths(product, length, mean_change)


def _divide_by_lengths(product: AnyArray, length: Doubles, mean_change: Doubles) -> Doubles:
    lengths = length * np.linalg.norm(mean_change)
    divisor = np.maximum(lengths, 1e-12)
    return np.asarray(product / divisor)
