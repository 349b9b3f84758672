"""whisper: uploads are clipped to length 1, the sum gets Gaussian noise, and users send until their budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, ServerState
from tacita.messages import Spec, Total, Upload
from tacita.methods.personal.releases import add_noise, clip_upload
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import ACCOUNT_ARRAYS, Ledger
from tacita.privacy.noise import NoiseStream
from tacita.round.capabilities import Privacy
from tacita.round.fields import PartFields
from tacita.round.part import Part
from tacita.round.registry import register, register_preset
from tacita.round.state import Role, StateSpec

NOISE = 4.0  # its deviation, where nobody's upload is longer than 1
EPSILON = 3.0


@register
class Whisper(Part, Privacy):
    name = "whisper"
    covers_all_releases = True

    def check(self, n_items: int) -> None:
        if self.context.train.aggregation != "fixed" or self.context.train.silos:
            raise TacitaError("part 'whisper' protects users; use train.aggregation = 'fixed' and train.silos = 0.")

    def ledger(self) -> Ledger:
        return Ledger((Event("upload", "gaussian", 1.0, NOISE, "person", "central"),))

    def state(self, n_users: int) -> Sequence[StateSpec]:
        accounts = self.ledger().open_accounts(n_users, EPSILON)
        return [StateSpec(name, array, Role.ACCOUNT, persistent=True) for name, array in accounts.items()]

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(after_encoding=self._widen_bounds, whole_table=True)

    def _widen_bounds(self, spec: Spec) -> Spec:
        return replace(spec, most=np.inf, least=-np.inf)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        account = {name: view.parts[self.name][name] for name in ACCOUNT_ARRAYS}
        account, goes = self.ledger().charge(account, "upload")  # charged before anything leaves
        return clip_upload(upload, 1.0).drop_clients(~goes), account

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        stream = NoiseStream(self.context.draws, "whisper-noise", server.block, server.round, total.nonce)
        return add_noise(total, NOISE, stream, ("nothing is public",))

    def promises(self, server: ServerState) -> dict[str, float | str]:
        return {"unit": "person", "threat": "central", "delta": self.ledger().delta, "epsilon_most": EPSILON}


register_preset("whisper", {"name": "whisper"}, settings={"train": {"aggregation": "fixed"}})
