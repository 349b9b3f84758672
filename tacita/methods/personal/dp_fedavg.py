"""DP-FedAvg: everybody decides by a draw of their own whether to take part, and one noise covers the sum (spec F.9).

Updates are clipped to `clip`, weighed by at most 1, summed with one draw of Gaussian noise and divided by a number
that does not depend on who was drawn. What it promises: whoever sees the models, and not the sums before their noise,
cannot tell well whether a person was there at all. How many people are enrolled is public, who has data is not:
sums are divided by `train.denominator`. Chance is part of the mechanism, so a round costs everybody who could have
been drawn, drawn or not.

With `penalty` a device also learns not to move further than the clip: what is longer costs it, in its own loss, the
square of the rest, so that less is cut off. The release, its clip and its noise are the same, and so is what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Bools, CohortView, NormPenalty, ServerState
from tacita.messages import DenseArrays, Form, SparseRows, Spec, Total, Upload
from tacita.methods.personal import releases
from tacita.methods.personal.accounts import find_payers, select_account, specify_accounts
from tacita.privacy.accounting import Event, calibrate_sampled_noise
from tacita.privacy.ledger import EARLIER_ROUNDS, EARLIER_RUNS, Ledger
from tacita.round.capabilities import Privacy
from tacita.round.fields import PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.preset import TunedSettings
from tacita.round.registry import register, register_preset
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask


class DPFedAvgConfig(PartConfig):
    clip: float = Field(1.0, gt=0, description="length of everything that a client sends in one round (S)")
    epsilon: float | None = Field(5.0, gt=0, description="budget of everybody; none: rounds are counted, none refused")
    delta: float = Field(1e-5, gt=0, lt=1, description="the chance in which nothing is promised")
    releases: int = Field(50, ge=1, description="rounds that the budget is to last for, over all blocks")
    noise: float | None = Field(None, gt=0, description="noise as a multiple of the clip (z); default: by the budget")
    adaptive: bool = Field(
        False,
        description="count drawn rounds by Renyi losses: right also where budgets are changed in the light of what was "
        "released; needs more noise",
    )
    full_weight: float | None = Field(
        None, gt=0, description="interactions from which a client counts fully; default: everybody does"
    )
    penalty: float = Field(0.0, ge=0, description="strength of max(0, length of the update - clip)^2 in the local loss")
    keep: float = Field(1.0, gt=0, le=1, description="share of a client's largest numbers that are sent at all")


@register
class DPFedAvg(Part, Privacy):
    """Poisson-drawn clients, a clip, noise once, a denominator that tells nothing."""

    name = "dp-fedavg"
    Config: ClassVar[type[PartConfig]] = DPFedAvgConfig
    config: DPFedAvgConfig
    fills = frozenset({"penalty"})
    covers = frozenset({"answers"})

    def check(self, n_items: int) -> None:
        self._check_participation()
        self._check_training()
        if self.config.epsilon is None and self.config.noise is None:
            raise TacitaError("part 'dp-fedavg' needs an epsilon or a noise: set dp-fedavg.epsilon.")
        error = releases.bound_rounding_error(self.context, n_items)
        rounding_share = error / self.config.clip
        releases.refuse_coarse_rounding(self.name, n_items, rounding_share)
        self._check_other_parts()
        self.compute_noise_multiplier()

    def _check_participation(self) -> None:
        """Refuse draws and means that depend on who else takes part."""
        train = self.context.train
        if train.participation.kind == "fraction":
            raise TacitaError(
                "dp-fedavg counts on each client being drawn by itself; use train.participation.kind = 'poisson'."
            )
        if train.aggregation != "fixed" or train.weigh_by == "data":
            raise TacitaError(
                "dp-fedavg must not divide by who took part; use train.aggregation = 'fixed' of clients "
                "(`--method dp-fedavg` sets it)."
            )
        if self.config.full_weight is not None and train.denominator is None:
            raise TacitaError("dp-fedavg.full_weight needs train.denominator: the rate times all weights.")

    def _check_training(self) -> None:
        """Refuse training that holds several people in a model, or ignores the penalty."""
        train = self.context.train
        if train.silos:
            raise TacitaError("dp-fedavg protects people, and silos train models of many; use train.silos = 0.")
        if self.config.penalty and train.optimiser == "pfedme":
            raise TacitaError(
                "dp-fedavg.penalty holds back the model that 'pfedme' only follows; use another train.optimiser."
            )

    def _check_other_parts(self) -> None:
        """Refuse parts whose releases are no rounds with freshly drawn people: only such rounds are counted."""
        for other in self.context.list_other_parts(self.name):
            if "answer_question" in other.hooks:
                raise TacitaError(
                    f"part '{other.name}' asks people besides rounds, and dp-fedavg counts rounds alone; "
                    "use part 'dpps'."
                )
            if self._is_sampled and other.replays_rounds:
                raise TacitaError(
                    f"part '{other.name}' plays rounds once more with the same people, who are not drawn by chance "
                    "then; use train.participation.kind = 'all', or leave it out and train again."
                )

    @property
    def _is_sampled(self) -> bool:
        participation = self.context.train.participation
        return participation.kind == "poisson" and participation.rate < 1

    def compute_noise_multiplier(self) -> float:
        """The noise, as a multiple of the clip."""
        config = self.config
        if config.noise is not None:
            return config.noise
        assert config.epsilon is not None
        if not self._is_sampled:
            ledger = Ledger((), config.delta)
            return ledger.compute_sigma_to_fit(config.epsilon, config.releases)
        rate = self.context.train.participation.rate
        if config.adaptive:
            return calibrate_sampled_noise(config.epsilon, config.delta, rate, config.releases, "rdp")
        return calibrate_sampled_noise(config.epsilon, config.delta, rate, config.releases, "pld")

    def ledger(self) -> Ledger:
        rate = 1.0
        if self._is_sampled:
            rate = self.context.train.participation.rate
        multiplier = self.compute_noise_multiplier()
        event = Event("round", "gaussian", 1.0, multiplier, "person", "central", rate, "poisson")
        earlier_rounds = replace(event, what=EARLIER_ROUNDS, once=True)
        earlier_runs = Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, "person", "central", once=True)
        events = (event, earlier_rounds, earlier_runs)
        return Ledger(events, self.config.delta, self.config.adaptive)

    # on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        ledger = self.ledger()
        accounts = specify_accounts(ledger, n_users, self.config.epsilon)
        pays_nothing = np.zeros(n_users, bool)
        return [*accounts, StateSpec("pays", pays_nothing, persistent=True)]

    def charge_eligible(self, view: CohortView) -> Arrays:
        account = select_account(view.parts[self.name])
        ledger = self.ledger()
        account, pays = ledger.charge(account, "round")
        return {**account, "pays": pays}

    def prepare(self, view: CohortView) -> LocalTask:
        if not self.config.penalty:
            return LocalTask()
        penalty = NormPenalty(self.config.penalty, self.config.clip)
        return LocalTask(penalty=penalty)

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        if self.config.keep < 1:
            upload = keep_largest_numbers(upload, self.config.keep)
        error = releases.bound_rounding_error(self.context, view.n_items)
        clip = self.config.clip - error
        upload = releases.clip_upload(upload, clip)
        if self.config.full_weight is not None:
            ends = view.train.ptr[view.user_ptr]
            n_interactions = np.diff(ends)
            weight = n_interactions / self.config.full_weight
            share = np.minimum(1.0, weight)
            upload = upload.scale(share)
        state = view.parts[self.name]
        pays = find_payers(view, state["pays"])
        return upload.drop_clients(~pays), {}

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(after_encoding=self._widen_bounds, whole_table=True)

    def _widen_bounds(self, spec: Spec) -> Spec:
        """A field as it leaves with noise."""
        return replace(spec, most=np.inf, least=-np.inf)

    def compute_expected_weight(self, expected_clients: float) -> float | None:
        """With full_weight a client weighs what its data are, and how much that is on average is not public."""
        return expected_clients if self.config.full_weight is None else None

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        """One noise, also where nobody was drawn: that nobody was is nobody's business."""
        stream = releases.open_noise_stream(self, "dp-fedavg-noise", server, total)
        deviation = self.config.clip * self.compute_noise_multiplier()
        total = releases.add_noise(total, deviation, stream)
        return replace(total, n_clients=max(1, total.n_clients))

    def promises(self, server: ServerState) -> dict[str, float | str]:
        config = self.config
        promise: dict[str, float | str] = {"unit": "person", "threat": "central", "delta": config.delta}
        promise["noise"] = self.compute_noise_multiplier()
        if config.epsilon is not None:
            promise["epsilon_most"] = config.epsilon
        return promise


def keep_largest_numbers(upload: Upload, share: float) -> Upload:
    """All but a client's largest numbers at 0, in item rows and shared parameters together; at least one stays."""
    forms = {}
    for name, value in upload.values.items():
        if name == "rows" or name.startswith("heads/"):
            forms[name] = _apply_factor(value)
    owners = [_list_number_owners(form) for form in forms.values()]
    numbers = [form.value.reshape(-1) for form in forms.values()]
    owner = np.concatenate(owners)
    number = np.concatenate(numbers)
    is_large = _mark_largest(owner, number, upload.n_clients, share)
    start = 0
    for name, form in forms.items():
        end = start + form.value.size
        flags = is_large[start:end]
        is_sent = flags.reshape(form.value.shape)
        large = np.where(is_sent, form.value, 0)
        thinned = large.astype(form.value.dtype)
        thinned_form = replace(form, value=thinned)
        upload = upload.with_value(name, thinned_form)
        start = end
    return upload


def _mark_largest(owner: AnyArray, number: AnyArray, n_owners: int, share: float) -> Bools:
    """Whether each number is among that share of its owner's numbers with the largest magnitude."""
    descending = -np.abs(number)
    order = np.lexsort((descending, owner))
    counts = np.bincount(owner, minlength=n_owners)
    starts = np.cumsum(counts) - counts
    first_places = np.repeat(starts, counts)
    rank = np.arange(len(order)) - first_places
    n_exact = np.ceil(share * counts)
    n_sent = np.maximum(1, n_exact)
    is_large = np.zeros(len(order), bool)
    limit = np.repeat(n_sent, counts)
    is_large[order] = rank < limit
    return is_large


def _apply_factor(form: Form) -> SparseRows | DenseArrays:
    """A field of rows or parameters with its factor multiplied in."""
    if isinstance(form, SparseRows):
        return form.apply_factor()
    assert isinstance(form, DenseArrays)
    return form


def _list_number_owners(form: SparseRows | DenseArrays) -> AnyArray:
    """The client of each number of a field."""
    n_rows = len(form.value)
    client: AnyArray = np.arange(n_rows)
    if isinstance(form, SparseRows):
        client = form.client
    row_shape = form.value.shape[1:]
    row_size = int(np.prod(row_shape))
    return np.repeat(client, row_size)


TUNED = TunedSettings(
    "lipm-dpps/table2:dp_fedavg",
    "ml-100k",
    {"mf": {"backbone": {"dim": 20}, "train": {"rounds": 50, "patience": 50}, "parts": {"dp-fedavg": {"clip": 10.0}}}},
)

register_preset(
    "dp-fedavg",
    {"name": "dp-fedavg"},
    settings={"train": {"aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.1}}},
    tuned=TUNED,
)
