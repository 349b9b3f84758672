"""cover: what FedPerGNN does to an upload before it leaves: pseudo items, a clip, Laplace noise (spec A.7.6).

Items that a client has nothing to do with get moves that look like those of its own items; then the whole move is cut
to a length and every number of it gets noise. All are off unless asked for. No epsilon is claimed: the noise covers
only the rows that are sent, so which rows those are is not hidden, and nothing is counted over rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Keys
from tacita.kernels.hashing import hash_owners, normals, uniforms
from tacita.messages import DenseArrays, SparseRows, Spec, Upload
from tacita.round.fields import PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register

_FARTHEST = 60.0  # scales of the noise: it gets beyond once in 1e26 draws
_SMALLEST = 2.0**-25


class CoverConfig(PartConfig):
    pseudo_items: int = Field(0, ge=0, description="draws of items that are sent though the client did not use them")
    clip: float = Field(0.0, ge=0, description="largest length of a client's move; 0: as long as it is")
    noise: float = Field(0.0, ge=0, description="scale of the Laplace noise on every number that is sent")


@register
class Cover(Part):
    """Sends more items than a client used, no longer a move than so long, and every number with noise."""

    name = "cover"
    Config: ClassVar[type[PartConfig]] = CoverConfig
    config: CoverConfig

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        if self.config.pseudo_items:
            rows = upload.values["rows"]
            assert isinstance(rows, SparseRows)
            upload = upload.with_value("rows", self._add_pseudo_items(view, rows))
        if self.config.clip:
            upload = _clip_upload(upload, self.config.clip)
        return (self._add_noise(view, upload) if self.config.noise else upload), {}

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(after_encoding=self._widen_bounds)

    def _widen_bounds(self, spec: Spec) -> Spec:
        """A field as it leaves with noise."""
        if not _is_model_field(spec.name):
            return spec
        return replace(spec, most=spec.most + _FARTHEST * self.config.noise)

    def _key(self, view: CohortView, what: str) -> np.uint64:
        return self.context.draws.private(f"cover-{what}", view.block, view.round)

    def _add_pseudo_items(self, view: CohortView, rows: SparseRows) -> SparseRows:
        """Rows of items drawn at random, with numbers as the client's own rows have them on average."""
        drawn = uniforms(self._key(view, "items"), view.client_keys, self.config.pseudo_items)
        item = np.minimum((drawn * view.n_items).astype(np.int64), view.n_items - 1)
        pairs = np.unique(item + view.n_items * np.arange(view.n_clients)[:, None])
        pairs = np.setdiff1d(pairs, rows.client.astype(np.int64) * view.n_items + rows.item)
        client, item = (one.astype(np.int32) for one in np.divmod(pairs, view.n_items))
        mean, spread = _compute_moments(rows, view.n_clients)
        owners = _derive_streams(self._key(view, "owners"), view.client_keys[client], item)
        value = mean[client] + spread[client] * normals(self._key(view, "values"), owners, rows.value.shape[1])
        columns = ((rows.client, client), (rows.item, item), (rows.value, value.astype(np.float32)))
        both = SparseRows(*(np.concatenate(pair) for pair in columns))
        order = np.lexsort((both.item, both.client))
        return SparseRows(both.client[order], both.item[order], both.value[order])

    def _add_noise(self, view: CohortView, upload: Upload) -> Upload:
        for name in filter(_is_model_field, upload.values):
            value, key = upload.values[name], self._key(view, name)
            assert isinstance(value, SparseRows | DenseArrays)
            owners = view.client_keys
            if isinstance(value, SparseRows):
                owners = _derive_streams(self._key(view, "owners"), view.client_keys[value.client], value.item)
            flat = value.value.reshape(len(owners), -1)
            noised = flat + self.config.noise * _draw_laplace(key, owners, flat.shape[1])
            upload = upload.with_value(name, replace(value, value=noised.reshape(value.value.shape).astype(np.float32)))
        return upload


def _is_model_field(name: str) -> bool:
    """Whether a field is a move of the model, and not something that a part sends beside it."""
    return name == "rows" or name.startswith("heads/")


def _derive_streams(key: np.uint64, clients: Keys, item: AnyArray) -> Keys:
    """A stream of its own for an item of a client."""
    return np.asarray(clients ^ hash_owners(key, item.astype(np.uint64)))


def _clip_upload(upload: Upload, most: float) -> Upload:
    squares: Doubles = np.zeros(upload.n_clients)
    for name in filter(_is_model_field, upload.values):
        squares = squares + upload.values[name].squared_norms(upload.n_clients)
    factor = np.minimum(1.0, most / np.maximum(np.sqrt(squares), 1e-12))
    return replace(upload, values={k: v.scale(factor) if _is_model_field(k) else v for k, v in upload.values.items()})


def _compute_moments(rows: SparseRows, n_clients: int) -> tuple[Doubles, Doubles]:
    """Mean and standard deviation of each column of every client's rows."""
    value = rows.value.astype(np.float64)
    count = np.maximum(np.bincount(rows.client, minlength=n_clients), 1)[:, None]
    mean, square = np.zeros((n_clients, value.shape[1])), np.zeros((n_clients, value.shape[1]))
    np.add.at(mean, rows.client, value)
    mean /= count
    np.add.at(square, rows.client, (value - mean[rows.client]) ** 2)
    return mean, np.sqrt(square / count)


def _draw_laplace(key: np.uint64, owners: Keys, width: int) -> Floats:
    """Laplace numbers of scale 1."""
    drawn = uniforms(key, owners, width) - 0.5
    return np.asarray(-np.sign(drawn) * np.log(np.maximum(1 - 2 * np.abs(drawn), _SMALLEST)), np.float32)
