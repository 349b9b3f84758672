"""Laplace noise on uploads: as F3CRec's Table 8 uses it, or clipped and counted (spec D.7, F.8).

mode = "paper": noise on every entry of the uploaded rows, without a clip. That is noise and not differential privacy:
no epsilon belongs to it. mode = "ldp": everything a client sends is shortened to an L1 length, gets noise on every
entry, and costs `epsilon` a release against a server that sees each upload. Where what is bounded is an L2 length, and
tables are large, Gaussian noise (part 'dpps') hides as much with far less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, ServerState
from tacita.messages import Spec, Total, Upload
from tacita.methods.personal import releases
from tacita.methods.personal.accounts import find_payers, select_account, specify_accounts
from tacita.methods.personal.releases import repeat_by_user
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import EARLIER_RUNS, Ledger
from tacita.privacy.noise import NoiseStream
from tacita.round.capabilities import CoveredRelease, Privacy
from tacita.round.fields import PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.state import StateSpec


class LaplaceNoiseConfig(PartConfig):
    scale: float = Field(0.1, ge=0, description="scale of the Laplace noise on every entry of every row (mode paper)")
    from_block: int = Field(1, ge=0, description="first block with noise (mode paper; with ldp every block has it)")
    mode: Literal["paper", "ldp"] = Field("paper", description="ldp: with a clip, so that an epsilon can be stated")
    clip: float = Field(1.0, gt=0, description="L1 length of everything a client sends (mode ldp)")
    epsilon: float = Field(1.0, gt=0, description="epsilon of one release (mode ldp)")
    budget: float | None = Field(None, gt=0, description="epsilon after which a person sends nothing; default: none")


@register
class LaplaceNoise(Part, Privacy):
    """Every client adds Laplace noise to its whole table before it leaves the device."""

    name = "laplace-noise"
    Config: ClassVar[type[PartConfig]] = LaplaceNoiseConfig
    config: LaplaceNoiseConfig

    @property
    def _is_ldp(self) -> bool:
        return self.config.mode == "ldp"

    @property
    def covers(self) -> frozenset[CoveredRelease]:
        """Noise as the paper has it minds its own rounds, and keeps nothing."""
        return frozenset({"answers"}) if self._is_ldp else frozenset()

    @property
    def noise_scale(self) -> float:
        """Of the noise: a person's data may be replaced, which moves what is sent by two clips at most."""
        if self._is_ldp:
            return 2 * self.config.clip / self.config.epsilon
        return self.config.scale

    def _adds_noise(self, block: int) -> bool:
        return self.noise_scale > 0 and (self._is_ldp or block >= self.config.from_block)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        after_encoding = None
        if self._is_ldp:
            after_encoding = self._widen_bounds
        return PartFields(after_encoding=after_encoding, whole_table=self._adds_noise(block))

    def _widen_bounds(self, spec: Spec) -> Spec:
        """A field as it leaves with noise."""
        return replace(spec, most=np.inf, least=-np.inf)

    def check(self, n_items: int) -> None:
        train = self.context.train
        if train.weighs_data or train.aggregation == "per-row":
            raise TacitaError(
                f"laplace-noise covers every row of every client, which aggregation = '{train.aggregation}' with "
                f"weigh_by = '{train.weigh_by}' cannot weigh; use 'mean' or 'fixed' of clients."
            )
        if self._is_ldp and train.aggregator != "plain":
            raise TacitaError(
                f"train.aggregator = '{train.aggregator}' rounds every number of what laplace-noise has shortened, "
                "and all of them together may be longer then than what is counted; use 'plain', or part 'dpps'."
            )

    def ledger(self) -> Ledger | None:
        if not self._is_ldp:
            return None
        sensitivity = 2 * self.config.clip
        upload = Event("upload", "laplace", sensitivity, self.noise_scale, self._privacy_unit)
        earlier = Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, self._privacy_unit, once=True)  # in the unit of all ledgers
        return Ledger((upload, earlier))

    @property
    def _privacy_unit(self) -> Literal["person", "silo"]:
        """Whose data a release is about."""
        if self.context.train.n_joint_silos:
            return "silo"
        return "person"

    def state(self, n_users: int) -> Sequence[StateSpec]:
        ledger = self.ledger()
        if ledger is None:
            return ()
        return specify_accounts(ledger, n_users, self.config.budget)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        ledger = self.ledger()
        if ledger is None:
            return upload, {}
        account = select_account(view.parts[self.name])
        takes_part = repeat_by_user(view, upload.weight > 0)
        _, can_pay = ledger.charge(account, "upload", participants=takes_part)
        pays = find_payers(view, can_pay)
        participants = repeat_by_user(view, pays)
        account, _ = ledger.charge(account, "upload", participants=participants)
        norms = releases.compute_l1_norms(upload)
        clip = self.config.clip
        upload = releases.clip_upload(upload, clip, norms)
        return upload.drop_clients(~pays), account

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        """The sum of n Laplace variables is the difference of two Gamma(n) variables."""
        if not self._adds_noise(server.block) or total.n_clients == 0:
            return total
        nonces: tuple[int, ...] = ()
        if self._is_ldp or total.nonce:
            nonces = (total.nonce,)
        draw = _build_gamma_sampler(self.context.draws, server, nonces)
        names = ["rows"]
        if self._is_ldp:
            names = sorted(total.sums)
        sums: Arrays = {}
        for name in names:
            value = total[name]
            above = draw(total.n_clients, *value.shape)
            below = draw(total.n_clients, *value.shape)
            noise = self.noise_scale * (above - below)
            sums[name] = value + noise
        return total.with_sums(sums)

    @property
    def needs_secret_noise(self) -> bool:
        """Also where no epsilon is stated: noise that follows the seed is taken off by whoever has the settings."""
        return self.noise_scale > 0

    def promises(self, server: ServerState) -> dict[str, float | str]:
        if not self._is_ldp:
            return {}
        return {
            "unit": self._privacy_unit,
            "threat": "local",
            "delta": 0.0,
            "epsilon_of_a_release": self.config.epsilon,
        }


def _build_gamma_sampler(draws: Draws, server: ServerState, nonces: tuple[int, ...]) -> Callable[..., Doubles]:
    """Gamma(n) numbers: from a secret's sealed stream, else from a fast generator."""
    moment = (server.block, server.round, *nonces)
    if draws.is_secret:
        stream = NoiseStream(draws, "laplace-noise", *moment)
        return stream.draw_gammas
    key = int(draws.private("laplace-noise", *moment))
    bits = np.random.Philox(key=key)
    generator = np.random.Generator(bits)

    def draw_gammas(n: int, *shape: int) -> Doubles:
        return generator.standard_gamma(n, shape)

    return draw_gammas
