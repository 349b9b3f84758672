"""Fold uploads into a total, and a total into the next table. Totals add up, so silos and chunks can merge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.config import TrainConfig
from tacita.kernels.steps import fold_rows
from tacita.types import AnyArray, Arrays, Doubles, Floats, ServerState, Total, Upload


def empty_total(server: ServerState) -> Total:
    n, width = server.items.shape
    heads = {name: np.zeros(v.shape, np.float64) for name, v in server.heads.items()}
    return Total(np.zeros((n, width)), np.zeros(n), heads, {}, 0.0, 0)


def add(total: Total, upload: Upload) -> Total:
    """Add a cohort's uploads; reuses the total's buffers. A client of weight 0 has dropped out."""
    keep = upload.weight > 0
    fold_rows(upload.client, upload.item, upload.value, upload.weight, total.rows, total.row_weight)
    return Total(
        rows=total.rows,
        row_weight=total.row_weight,
        heads=_add_weighted(total.heads, upload.heads, upload.weight),
        extras=_add_weighted(total.extras, upload.extras, upload.weight),
        weight=total.weight + float(upload.weight.sum()),
        n_clients=total.n_clients + int(keep.sum()),
    )


def _add_weighted(sums: Arrays, values: Arrays, weight: Doubles) -> Arrays:
    out = dict(sums)
    for name, v in values.items():
        running = out.get(name, np.zeros(v.shape[1:], np.float64))
        for c in np.flatnonzero(weight):  # one by one: the sum must not depend on how clients are chunked
            running = running + weight[c] * v[c].astype(np.float64)
        out[name] = running
    return out


def merge(a: Total, b: Total) -> Total:
    """The total of two groups of clients."""

    def both(x: Arrays, y: Arrays) -> Arrays:
        zero = np.float64(0)
        return {name: np.asarray(x.get(name, zero) + y.get(name, zero)) for name in x.keys() | y.keys()}

    return Total(
        rows=a.rows + b.rows,
        row_weight=a.row_weight + b.row_weight,
        heads=both(a.heads, b.heads),
        extras=both(a.extras, b.extras),
        weight=a.weight + b.weight,
        n_clients=a.n_clients + b.n_clients,
    )


def apply_total(server: ServerState, total: Total, plan: TrainConfig, expected_weight: float) -> ServerState:
    """The table after the round, before any part's server step."""
    if total.n_clients == 0:
        return server
    denominator: float | Doubles
    if plan.aggregation == "per-row":
        denominator = np.maximum(total.row_weight, 1e-300)[:, None]
    elif plan.aggregation == "fixed":
        denominator = plan.denominator or expected_weight
    else:
        denominator = total.weight
    whole = denominator if isinstance(denominator, float) else total.weight
    step = plan.server_lr
    items: Floats = (server.items + step * total.rows / denominator).astype(np.float32)
    heads: dict[str, AnyArray] = {
        name: (server.heads[name] + step * v / whole).astype(np.float32) for name, v in total.heads.items()
    }
    return replace(server, items=items, heads=heads)
