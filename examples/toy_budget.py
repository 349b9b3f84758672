"""whisper: uploads are clipped to length 1, the sum gets Gaussian noise, and users send until their budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, ServerState, StateUpdate
from tacita.messages import Spec, Total, Upload
from tacita.methods.personal.accounts import select_account, specify_accounts
from tacita.methods.personal.releases import add_noise, clip_upload, open_noise_stream
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import Ledger
from tacita.round.capabilities import Privacy
from tacita.round.fields import PartFields
from tacita.round.part import Part
from tacita.round.registry import register, register_preset
from tacita.round.state import StateSpec

CLIP = 1.0
NOISE = 4.0  # deviation of the noise on every number of a sum
EPSILON = 3.0


@register
class Whisper(Part, Privacy):
    name = "whisper"
    covers = frozenset({"answers"})

    def check(self, n_items: int) -> None:
        if self.context.train.aggregator != "plain":
            raise TacitaError("part 'whisper' counts no rounding after its clip; use train.aggregator = 'plain'.")

    def ledger(self) -> Ledger:
        upload = Event("upload", "gaussian", sensitivity=CLIP, noise=NOISE, unit="person", threat="central")
        return Ledger((upload,))

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return specify_accounts(self.ledger(), n_users, EPSILON)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(after_encoding=self._widen_bounds, whole_table=True)

    def _widen_bounds(self, spec: Spec) -> Spec:
        return replace(spec, most=np.inf, least=-np.inf)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        account = select_account(view.parts[self.name])
        account, can_pay = self.ledger().charge(account, "upload")  # charged before anything leaves
        return clip_upload(upload, CLIP).drop_clients(~can_pay), account

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        stream = open_noise_stream(self, "whisper-noise", server, total)
        return add_noise(total, NOISE, stream)

    def promises(self, server: ServerState) -> dict[str, float | str]:
        return {"unit": "person", "threat": "central", "delta": self.ledger().delta, "epsilon_most": EPSILON}


register_preset("whisper", {"name": "whisper"}, settings={"train": {"aggregation": "fixed"}})
