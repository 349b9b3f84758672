"""Laplace noise on uploaded item rows, as F3CRec's Table 8 uses it (spec D.7).

There is no clipping, so this is noise and not differential privacy: no epsilon belongs to it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import ServerState
from tacita.fields import Total
from tacita.round.parts import Part, PartConfig
from tacita.round.registry import register


class LaplaceNoiseConfig(PartConfig):
    scale: float = Field(0.1, ge=0, description="scale of the Laplace noise on every entry of every row")
    from_block: int = Field(1, ge=0, description="first block with noise")


@register
class LaplaceNoise(Part):
    """Every client adds Laplace noise to its whole table before it leaves the device."""

    name = "laplace-noise"
    Config: ClassVar[type[PartConfig]] = LaplaceNoiseConfig
    config: LaplaceNoiseConfig

    def sends_whole_table(self, block: int) -> bool:
        return self.config.scale > 0 and block >= self.config.from_block

    def check(self, n_items: int) -> None:
        train = self.world.train
        if train.weighs_data or train.aggregation == "per-row":
            raise TacitaError(
                f"laplace-noise covers every row of every client, which aggregation = '{train.aggregation}' with "
                f"weigh_by = '{train.weigh_by}' cannot weigh; use 'mean' or 'fixed' of clients."
            )

    def encode_sum(self, server: ServerState, total: Total) -> Total:
        """The sum of n Laplace variables is the difference of two Gamma(n) variables."""
        if not self.sends_whole_table(server.block) or total.n_clients == 0:
            return total
        key = self.world.draws.private("laplace-noise", server.block, server.round)
        rng = np.random.Generator(np.random.Philox(key=int(key)))
        shape = total["rows"].shape
        drawn = rng.standard_gamma(total.n_clients, shape) - rng.standard_gamma(total.n_clients, shape)
        return total.with_sums({"rows": total["rows"] + self.config.scale * drawn})
