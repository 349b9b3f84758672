"""How the uploads of one exchange become a total: in double precision, in whole numbers, or under masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Longs
from tacita.messages.forms import QUANTUM, Spec
from tacita.messages.totals import Total, Upload, add_upload, empty_total
from tacita.privacy.secure_sum import quantise_values, secure_sum

Aggregator = Literal["plain", "ideal", "secure"]


class UploadAccumulator:
    """Uploads added as they come."""

    def __init__(self, fields: Sequence[Spec], exact: bool = False) -> None:
        self.fields, self.exact = fields, exact
        self.sum = empty_total(fields)
        self.n_bytes = 0.0

    def add(self, upload: Upload, entire: bool) -> None:
        """`entire`: uploads travel as whole arrays, not as what was touched."""
        self.sum = add_upload(self.sum, upload, self.fields, self.exact)
        self.n_bytes += upload.n_bytes(self.fields, entire)

    def total(self) -> Total:
        return self.sum


class MaskedAccumulator(UploadAccumulator):
    """Every client's numbers as one vector of whole numbers, weights among them; only their sum is opened.

    Fields that another party sees each by itself go to that party as they are.
    """

    def __init__(self, fields: Sequence[Spec], open_to: Sequence[str]) -> None:
        super().__init__(fields, exact=True)
        self.open_fields = [one.name for one in fields if one.seen == "each"]
        for name in self.open_fields:
            if not name.startswith(tuple(open_to)):
                raise TacitaError(
                    f"train.aggregator = 'secure' shows the server sums alone, and '{name}' is of each client by "
                    "itself; use 'plain', or another method."
                )
        if any(one.sparse for one in fields):
            raise TacitaError(
                "train.aggregator = 'secure' masks every number there could be, too many for a catalogue of this size; "
                "use 'ideal', which gives the same sums without masks."
            )
        self.numbers: list[Longs | None] = []  # one vector per client; None: it sent nothing

    def add(self, upload: Upload, entire: bool) -> None:
        shown = {name: value for name, value in upload.values.items() if name in self.open_fields}
        self.sum = add_upload(self.sum, replace(upload, values=shown), self.fields)
        masked = {name: value for name, value in upload.values.items() if name not in self.open_fields}
        for c in range(upload.n_clients):
            alone = np.where(np.arange(upload.n_clients) == c, upload.weight, 0.0)
            one = replace(upload, values=masked, weight=alone)
            self.numbers.append(self._quantise_upload(one) if upload.weight[c] > 0 else None)

    def _quantise_upload(self, upload: Upload) -> Longs:
        """What one client's device masks."""
        mine = add_upload(empty_total(self.fields), upload, self.fields, exact=True)
        flat = [mine.sums[name].reshape(-1) for name in sorted(mine.sums)]
        return quantise_values(np.concatenate([*flat, [mine.weight]]), QUANTUM)

    def total(self) -> Total:
        if all(one is None for one in self.numbers):  # nobody sent anything, so there is nothing to open
            return self.sum
        opened = secure_sum(self.numbers)
        self.n_bytes = opened.n_bytes
        found: Doubles = opened.sum.astype(np.float64) * QUANTUM
        sums, at = {}, 0
        for name in sorted(self.sum.sums):
            shape = self.sum.sums[name].shape
            size = int(np.prod(shape))
            sums[name], at = found[at : at + size].reshape(shape), at + size
        return replace(self.sum, sums=sums, weight=float(found[-1]))


def make_accumulator(how: Aggregator, fields: Sequence[Spec], open_to: Sequence[str] = ()) -> UploadAccumulator:
    """What adds up an exchange; `open_to`: how fields begin that go to another party than the server."""
    return MaskedAccumulator(fields, open_to) if how == "secure" else UploadAccumulator(fields, exact=how == "ideal")
