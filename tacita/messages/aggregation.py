"""How the uploads of one exchange become a total: in double precision, in whole numbers, or under masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Longs
from tacita.messages.forms import QUANTUM, Spec
from tacita.messages.totals import Total, Upload, add_upload, empty_total
from tacita.privacy.secure_sum import quantise_values, run_secure_sum

Aggregator = Literal["plain", "ideal", "secure"]


class UploadAccumulator:
    """Adds uploads as they arrive."""

    def __init__(self, fields: Sequence[Spec], exact: bool = False) -> None:
        self.fields = fields
        self.specs = {spec.name: spec for spec in fields}
        self.exact = exact
        self.sum = empty_total(fields)
        self.n_bytes = 0.0

    def add(self, upload: Upload, entire: bool) -> None:
        """`entire`: uploads travel as whole arrays, not only as the touched rows."""
        self.sum = add_upload(self.sum, upload, self.fields, self.exact)
        if entire:
            bytes_per_client = sum(spec.n_bytes for spec in self.fields)
            self.n_bytes += bytes_per_client * len(upload.weight)
            return
        for name, value in upload.values.items():
            spec = self.specs[name]
            self.n_bytes += value.count_total_bytes(spec)

    def compute_total(self) -> Total:
        return self.sum


class MaskedAccumulator(UploadAccumulator):
    """Every client's numbers as one vector of whole numbers, weights among them; only their sum is opened.

    Fields that another party sees each by itself go to that party as they are.
    """

    def __init__(self, fields: Sequence[Spec], open_to: Sequence[str]) -> None:
        super().__init__(fields, exact=True)
        self.open_fields = []
        for field in fields:
            if field.seen == "each":
                self.open_fields.append(field.name)
        _refuse_open_fields(self.open_fields, open_to)
        if any(field.sparse for field in fields):
            raise TacitaError(
                "train.aggregator = 'secure' masks every number there could be, too many for a catalogue of this size; "
                "use 'ideal', which gives the same sums without masks."
            )
        self.numbers: list[Longs | None] = []  # one vector per client; None: it sent nothing

    def add(self, upload: Upload, entire: bool) -> None:
        open_values = {}
        masked_values = {}
        for name, value in upload.values.items():
            if name in self.open_fields:
                open_values[name] = value
            else:
                masked_values[name] = value
        open_upload = replace(upload, values=open_values)
        self.sum = add_upload(self.sum, open_upload, self.fields)
        client_numbers = np.arange(upload.n_clients)
        for client in client_numbers:
            if upload.weight[client] > 0:
                weight = np.where(client_numbers == client, upload.weight, 0.0)
                single_upload = replace(upload, values=masked_values, weight=weight)
                self.numbers.append(self._quantise_upload(single_upload))
            else:
                self.numbers.append(None)

    def _quantise_upload(self, upload: Upload) -> Longs:
        """The numbers that one client's device masks."""
        empty = empty_total(self.fields)
        total = add_upload(empty, upload, self.fields, exact=True)
        vectors = []
        for name in sorted(total.sums):
            values = total.sums[name]
            vectors.append(values.reshape(-1))
        values = np.concatenate([*vectors, [total.weight]])
        return quantise_values(values, QUANTUM)

    def compute_total(self) -> Total:
        has_uploads = any(numbers is not None for numbers in self.numbers)
        if not has_uploads:
            return self.sum
        opened = run_secure_sum(self.numbers)
        self.n_bytes = opened.n_bytes
        values = opened.sum.astype(np.float64) * QUANTUM
        sums = {}
        start = 0
        for name in sorted(self.sum.sums):
            shape = self.sum.sums[name].shape
            size = int(np.prod(shape))
            end = start + size
            vector = values[start:end]
            sums[name] = vector.reshape(shape)
            start = end
        weight = float(values[-1])
        return replace(self.sum, sums=sums, weight=weight)


def _refuse_open_fields(names: Sequence[str], open_to: Sequence[str]) -> None:
    """The server of a secure sum sees no client by itself; `open_to`: how fields of another party begin."""
    for name in names:
        if not name.startswith(tuple(open_to)):
            raise TacitaError(
                f"train.aggregator = 'secure' shows the server sums alone, and '{name}' is of each client by "
                "itself; use 'plain', or another method."
            )


def make_accumulator(how: Aggregator, fields: Sequence[Spec], open_to: Sequence[str] = ()) -> UploadAccumulator:
    """The accumulator of an exchange; `open_to`: how fields begin that go to another party than the server."""
    if how == "secure":
        return MaskedAccumulator(fields, open_to)
    return UploadAccumulator(fields, exact=how == "ideal")
