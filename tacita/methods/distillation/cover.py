"""cover: what FedPerGNN does to an upload before it leaves: pseudo items, a clip, Laplace noise (spec A.7.6).

Items that a client has nothing to do with get moves that look like those of its own items; then the whole move is cut
to a length and every number of it gets noise. All are off unless asked for. No epsilon is claimed: the noise covers
only the rows that are sent, so which rows those are is not hidden, and nothing is counted over rounds. In the lab
pseudo items and noise follow the secret of the run (`needs_secret_noise`): whoever has its seed would take them off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import AnyArray, Arrays, CohortView, Doubles, Floats, Ints, Keys
from tacita.kernels.hashing import draw_normals, draw_uniforms, hash_owners
from tacita.messages import DenseArrays, SparseRows, Spec, Upload
from tacita.round.capabilities import Privacy
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
class Cover(Part, Privacy):
    """Sends more items than a client used, no longer a move than so long, and every number with noise."""

    name = "cover"
    Config: ClassVar[type[PartConfig]] = CoverConfig
    config: CoverConfig

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        if self.config.pseudo_items:
            rows = upload.values["rows"]
            assert isinstance(rows, SparseRows)
            covered = self._add_pseudo_items(view, rows)
            upload = upload.with_value("rows", covered)
        if self.config.clip:
            upload = _clip_model_fields(upload, self.config.clip)
        if self.config.noise:
            upload = self._add_noise(view, upload)
        return upload, {}

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(after_encoding=self._widen_bounds)

    @property
    def needs_secret_noise(self) -> bool:
        return self.config.noise > 0 or self.config.pseudo_items > 0

    def _widen_bounds(self, spec: Spec) -> Spec:
        """A field as it leaves with noise."""
        if not _is_model_field(spec.name):
            return spec
        farthest_noise = _FARTHEST * self.config.noise
        return replace(spec, most=spec.most + farthest_noise)

    def _derive_key(self, view: CohortView, what: str) -> np.uint64:
        """The key of one kind of draws in a round."""
        draws = self.context.draws
        return draws.private(f"cover-{what}", view.block, view.round)

    def _add_pseudo_items(self, view: CohortView, rows: SparseRows) -> SparseRows:
        """Rows of items drawn at random, with numbers as the client's own rows have them on average."""
        client, item = self._draw_pseudo_items(view, rows)
        mean, spread = _compute_moments(rows, view.n_clients)
        key = self._derive_key(view, "owners")
        keys = view.client_keys[client]
        streams = _derive_streams(key, keys, item)
        width = rows.value.shape[1]
        values_key = self._derive_key(view, "values")
        noise = draw_normals(values_key, streams, width)
        scaled_noise = spread[client] * noise
        value = mean[client] + scaled_noise
        clients = np.concatenate([rows.client, client])
        items = np.concatenate([rows.item, item])
        pseudo_values = value.astype(np.float32)
        values = np.concatenate([rows.value, pseudo_values])
        order = np.lexsort((items, clients))
        return SparseRows(clients[order], items[order], values[order])

    def _draw_pseudo_items(self, view: CohortView, rows: SparseRows) -> tuple[Ints, Ints]:
        """Clients and items of random rows that the clients do not send anyhow."""
        key = self._derive_key(view, "items")
        n_draws = self.config.pseudo_items
        draws = draw_uniforms(key, view.client_keys, n_draws)
        scaled = draws * view.n_items
        item = scaled.astype(np.int64)
        last_item = view.n_items - 1
        item = np.minimum(item, last_item)
        clients = np.arange(view.n_clients)
        client = clients[:, None]
        codes = item + view.n_items * client
        pairs = np.unique(codes)
        own_client = rows.client.astype(np.int64)
        first_code = own_client * view.n_items
        own_pairs = first_code + rows.item
        pseudo_pairs = np.setdiff1d(pairs, own_pairs)
        pseudo_client, pseudo_item = np.divmod(pseudo_pairs, view.n_items)
        return pseudo_client.astype(np.int32), pseudo_item.astype(np.int32)

    def _add_noise(self, view: CohortView, upload: Upload) -> Upload:
        for name in filter(_is_model_field, upload.values):
            field = upload.values[name]
            assert isinstance(field, SparseRows | DenseArrays)
            streams = view.client_keys
            if isinstance(field, SparseRows):
                owners_key = self._derive_key(view, "owners")
                clients = view.client_keys[field.client]
                streams = _derive_streams(owners_key, clients, field.item)
            n_rows = len(streams)
            flat = field.value.reshape(n_rows, -1)
            key = self._derive_key(view, name)
            width = flat.shape[1]
            noise = _draw_laplace(key, streams, width)
            scaled_noise = self.config.noise * noise
            noisy = flat + scaled_noise
            shaped = noisy.reshape(field.value.shape)
            noisy = shaped.astype(np.float32)
            noisy_field = replace(field, value=noisy)
            upload = upload.with_value(name, noisy_field)
        return upload


def _is_model_field(name: str) -> bool:
    """Whether a field is a move of the model, and not something that a part sends beside it."""
    return name == "rows" or name.startswith("heads/")


def _derive_streams(key: np.uint64, clients: Keys, item: AnyArray) -> Keys:
    """A stream of its own for an item of a client."""
    numbers = item.astype(np.uint64)
    of_items = hash_owners(key, numbers)
    return np.asarray(clients ^ of_items)


def _clip_model_fields(upload: Upload, most: float) -> Upload:
    """The moves of the model, as one vector for each client, shortened to a length."""
    squares: Doubles = np.zeros(upload.n_clients)
    for name in filter(_is_model_field, upload.values):
        field = upload.values[name]
        squares = squares + field.squared_norms(upload.n_clients)
    norms = np.sqrt(squares)
    shortening = most / np.maximum(norms, 1e-12)
    factor = np.minimum(1.0, shortening)
    values = dict(upload.values)
    for name in filter(_is_model_field, upload.values):
        values[name] = values[name].scale(factor)
    return replace(upload, values=values)


def _compute_moments(rows: SparseRows, n_clients: int) -> tuple[Doubles, Doubles]:
    """Mean and standard deviation of each column of every client's rows."""
    value = rows.value.astype(np.float64)
    n_rows = np.bincount(rows.client, minlength=n_clients)
    at_least_one = np.maximum(n_rows, 1)
    count = at_least_one[:, None]
    shape = (n_clients, value.shape[1])
    mean = np.zeros(shape)
    np.add.at(mean, rows.client, value)
    mean /= count
    deviation = value - mean[rows.client]
    squares = np.zeros(shape)
    squared_deviation = deviation**2
    np.add.at(squares, rows.client, squared_deviation)
    deviations = np.sqrt(squares / count)
    return mean, deviations


def _draw_laplace(key: np.uint64, owners: Keys, width: int) -> Floats:
    """Laplace numbers of scale 1."""
    draws = draw_uniforms(key, owners, width) - 0.5
    distance = 2 * np.abs(draws)
    tail = np.maximum(1 - distance, _SMALLEST)
    magnitude = np.log(tail)
    sign = -np.sign(draws)
    return np.asarray(sign * magnitude, np.float32)
