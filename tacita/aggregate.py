"""Fold uploads into a total, and a total into the next table. Totals add up, so silos and chunks can merge.

Where two of them meet their shapes are compared: compiled loops trust them, and numpy would stretch what is too narrow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.config import TrainConfig
from tacita.errors import TacitaError
from tacita.kernels.steps import fold_rows
from tacita.types import AnyArray, Arrays, Doubles, Floats, ServerState, Total, Upload


def empty_total(server: ServerState) -> Total:
    n, width = server.items.shape
    heads = {name: np.zeros(v.shape, np.float64) for name, v in server.heads.items()}
    return Total(np.zeros((n, width)), np.zeros(n), heads, {}, 0.0, 0)


def add(total: Total, upload: Upload) -> Total:
    """Add a cohort's uploads; reuses the total's buffers. A client of weight 0 has dropped out."""
    _check_upload(upload, total)
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


def _check_upload(upload: Upload, total: Total) -> None:
    """Refuse an upload that does not fit the total it is to be added to."""
    clients, rows, (n_items, width) = len(upload.weight), len(upload.item), total.rows.shape
    _same("weight", upload.weight.shape, (clients,))
    _same("item", upload.item.shape, (rows,))
    _same("client", upload.client.shape, (rows,))
    _same("value", upload.value.shape, (rows, width))
    if not (np.isfinite(upload.weight).all() and (upload.weight >= 0).all()):
        raise TacitaError("an upload's weights must be finite and not negative.")
    for name, ids, below in (("item", upload.item, n_items), ("client", upload.client, clients)):
        if rows and not 0 <= int(ids.min()) <= int(ids.max()) < below:
            raise TacitaError(f"an upload's '{name}' numbers must lie from 0 to {below - 1}.")
    for kind, sums, values in (("heads", total.heads, upload.heads), ("extras", total.extras, upload.extras)):
        for name, v in values.items():
            if kind == "heads" and name not in sums:
                raise TacitaError(f"an upload holds '{name}', which is no shared parameter of this model.")
            one = sums[name].shape if name in sums else v.shape[1:]
            _same(f"{kind}/{name}", v.shape, (clients, *one))


def _same(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise TacitaError(f"'{name}' of an upload has shape {shape}, where the model has {wanted}; nothing was added.")


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
    _same("rows", b.rows.shape, a.rows.shape)
    _same("row_weight", b.row_weight.shape, a.row_weight.shape)
    for kind, one, other in (("heads", a.heads, b.heads), ("extras", a.extras, b.extras)):
        for name in one.keys() & other.keys():
            _same(f"{kind}/{name}", other[name].shape, one[name].shape)

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
    _same("rows", total.rows.shape, server.items.shape)
    _same("row_weight", total.row_weight.shape, server.items.shape[:1])
    for name, v in total.heads.items():
        _same(f"heads/{name}", v.shape, server.heads[name].shape)
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
