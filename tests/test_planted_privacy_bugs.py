"""Privacy bugs, planted one by one: each must be found by a check that passes without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest

from helpers import noise_laws
from helpers.noise_laws import SURE
from helpers.oracle import answer_round, cohort, started
from helpers.private_federation import ROUND, crowd_stream, dpps_part, federate_parts, serving_broadcast
from tacita.core.config import ParticipationConfig
from tacita.core.draws import Draws, _hash_to_uint64
from tacita.core.types import RoundReplay
from tacita.federation import clients as federation_clients
from tacita.federation import devices as federation_devices
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks, run_round
from tacita.kernels.hashing import choose_distinct
from tacita.learn import rows as rows_learner
from tacita.messages import Total, Upload
from tacita.methods.personal import releases
from tacita.methods.personal.dp_fedavg import DPFedAvg
from tacita.methods.personal.dpps import DPPS
from tacita.privacy import ledger as ledger_module
from tacita.privacy.calibration import compute_gaussian_sigma
from tacita.privacy.ledger import Ledger
from tacita.privacy.noise import NoiseStream
from tacita.round import nonces
from tacita.round.plan import Plan

Patch = pytest.MonkeyPatch
ONE_TIER = {"name": "dpps", "tiers": [1.0], "shares": [1.0], "between": 0.0}
POISSON = {"kind": "poisson", "rate": 0.3}


# checks


def uploads_are_short() -> None:
    """One clip over everything that is sent."""
    fed = federate_parts({**ONE_TIER, "clip": 1e-3})
    progress = started(fed)
    view = cohort(fed, progress)
    upload, _ = dpps_part(fed).encode(view, answer_round(fed, view))
    sent = Upload({"rows": upload.values["rows"]}, upload.weight, upload.sender)
    assert (sent.norms() <= 1e-3 * (1 + 1e-6)).all()
    assert (sent.norms() > 0.9e-3).any()


def noise_is_whole() -> None:
    """All coordinates of the sum carry the noise that the budget asks for, 2 C being what a replacement moves."""
    fed = federate_parts({**ONE_TIER, "releases": 4, "clip": 0.01, "shrink": 0.9}, stream=crowd_stream(4, 3000))
    progress = started(fed)
    total = progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND).total
    wanted = math.sqrt(4) * 2 * 0.01 * math.sqrt(4) * compute_gaussian_sigma(1, 1e-5)
    assert noise_laws.normal(total["rows"], wanted) > SURE


def noise_is_new_every_time() -> None:
    fed = federate_parts(ONE_TIER)
    progress = started(fed)
    down = serving_broadcast(fed, progress)
    first = progress.devices.exchange(fed, progress.server, down, ROUND).total
    repeat = progress.devices.exchange(fed, progress.server, down, replace(ROUND, replay=RoundReplay(0, 1.0))).total
    assert noise_laws.normal(repeat["rows"] - first["rows"], math.sqrt(2 * float(first["dpps.noise"][0]))) > SURE


def noise_of_a_device_follows_its_secret() -> None:
    known = NoiseStream(Draws(1), "noise").draw_normals(5000)
    own = NoiseStream(Draws(1, "secret"), "noise").draw_normals(5000)
    assert abs(np.corrcoef(known, own)[0, 1]) < 0.1


def people_are_drawn_independently() -> None:
    fed = federate_parts(
        {"name": "dp-fedavg", "noise": 2.0, "epsilon": None}, aggregation="fixed", participation=POISSON
    )
    living = started(fed).local_devices.group_active_clients(fed, started(fed).server)
    config = ParticipationConfig(kind="poisson", rate=0.3)
    sizes = [len(federation_clients.draw_participants(living, config, fed.draws, 0, n)) for n in range(600)]
    assert np.var(sizes) == pytest.approx(30 * 0.21, rel=0.35)


def the_denominator_tells_nothing() -> None:
    """The mean is the noised sum over a number that does not depend on who was drawn."""
    fed = federate_parts(
        {"name": "dp-fedavg", "noise": 2.0, "epsilon": None}, aggregation="fixed", participation=POISSON
    )
    progress = started(fed)
    sums = {"rows": np.ones(progress.server.items.shape)}
    moved = [
        fed.learner.learn_from_total(progress.server, Total(dict(sums), n, int(n)), "round", 9.0).items
        - progress.server.items
        for n in (5.0, 12.0)
    ]
    assert np.allclose(moved[0], moved[1])


def budgets_are_never_exceeded() -> None:
    fed = federate_parts({**ONE_TIER, "releases": 2, "clip": 0.01})
    progress = started(fed)
    server, message = progress.server, []
    for _ in range(4):
        down = serving_broadcast(fed, progress)
        message.append(progress.devices.exchange(fed, server, down, ROUND).total.n_clients)
    assert message == [30, 30, 0, 0]


def going_back_gives_nothing_back() -> None:
    """The best round of a block is restored; what later rounds cost stays spent."""
    fed = federate_parts({**ONE_TIER, "releases": 50, "clip": 0.01}, rounds=4)
    progress = make_initial_progress(fed)
    played = 0

    def count(report: Any, now: Any) -> None:
        nonlocal played
        played += 1
        now.best_score = 2.0  # the first round stays the best

    run_remaining_blocks(fed, progress, count)
    assert (progress.clients.parts["dpps"]["times"][:, 0] == played).all()


def the_ledger_is_that_of_dp_accounting() -> None:
    ledger = Ledger((ledger_module.Event("rows", "gaussian"),), 1e-5)
    account = ledger.open_accounts(1)
    for sigma in (5.0, 7.0, 9.0):
        account, _ = ledger.charge(account, "rows", 1 / sigma)
    right = dp_accounting.get_epsilon_gaussian(1 / math.sqrt(sum(s**-2.0 for s in (5.0, 7.0, 9.0))), 1e-5)
    assert ledger.compute_spent_epsilon(account)[0] == pytest.approx(right, rel=1e-3)
    assert ledger.compute_spent_epsilon(account)[0] >= right * (1 - 1e-9)


def chance_costs_everybody() -> None:
    fed = federate_parts(
        {"name": "dp-fedavg", "noise": 2.0, "epsilon": None}, aggregation="fixed", participation=POISSON
    )
    progress = started(fed)
    run_round(fed, progress.server, progress.devices)
    assert (progress.clients.parts["dp-fedavg"]["times"][:, 0] == 1).all()


def l1_is_what_laplace_noise_bounds() -> None:
    fed = federate_parts({"name": "laplace-noise", "mode": "ldp", "clip": 1e-3})
    progress = started(fed)
    view = cohort(fed, progress)
    upload, _ = fed.parts[0].encode(view, answer_round(fed, view))
    assert (releases.compute_l1_norms(upload) <= 1e-3 * (1 + 1e-5)).all()


def what_is_no_number_is_sent_as_nothing() -> None:
    fed = federate_parts({**ONE_TIER, "clip": 0.01})
    progress = started(fed)
    view = cohort(fed, progress)
    upload = answer_round(fed, view)
    rows = upload.values["rows"]
    value = rows.value.copy()
    value[rows.client == 3] = np.nan
    upload, _ = dpps_part(fed).encode(view, upload.with_value("rows", replace(rows, value=value)))
    assert np.isfinite(upload.norms()).all()
    assert upload.weight[3] > 0


# bugs


def _no_clip(patch: Patch) -> None:
    patch.setattr(releases, "clip_upload", lambda upload, bound, lengths=None: upload)


def _half_the_noise(patch: Patch) -> None:
    whole = NoiseStream.draw_normals
    patch.setattr(NoiseStream, "draw_normals", lambda self, *shape: 0.5 * whole(self, *shape))


def _noise_taken_off_again(patch: Patch) -> None:
    """The paper's guided gradient, read as subtracting gamma times the drawn noise before it is sent."""
    whole = releases.add_noise
    patch.setattr(releases, "add_noise", lambda total, dev, stream, public: whole(total, 0.1 * dev, stream, public))


def _noise_where_something_was_touched(patch: Patch) -> None:
    whole = releases.add_noise

    def sparse(total: Total, deviation: float, stream: NoiseStream, public: tuple[str, ...]) -> Total:
        result = whole(total, deviation, stream, public)
        return result.with_sums(
            {k: np.where(total[k] != 0, result[k], 0) for k in result.sums if not k.startswith(public)}
        )

    patch.setattr(releases, "add_noise", sparse)


def _sensitivity_of_one_clip(patch: Patch) -> None:
    patch.setattr(DPPS, "_sensitivity", property(lambda self: 1.0))


def _one_noise_for_a_round_and_its_repeats(patch: Patch) -> None:
    patch.setattr(nonces, "add_nonces", lambda upload, *rest: upload)


def _noise_from_the_public_seed(patch: Patch) -> None:
    patch.setattr(Draws, "secret_key", lambda self, *ids: _hash_to_uint64(self.seed, *ids).tobytes() * 4)
    original = NoiseStream.__init__
    patch.setattr(NoiseStream, "__init__", lambda self, draws, *ids: original(self, Draws(draws.seed), *ids))


def _a_fixed_cohort(patch: Patch) -> None:
    def fixed(members: Any, config: Any, draws: Any, block: int, round: int) -> Any:
        key = draws.public("participants", block, round)
        return members.active[
            np.sort(choose_distinct(key, len(members.active), int(config.rate * len(members.active))))
        ]

    patch.setattr(federation_clients, "draw_participants", fixed)
    patch.setattr(federation_devices, "draw_participants", fixed)


def _divided_by_who_came(patch: Patch) -> None:
    patch.setattr(rows_learner, "choose_denominator", lambda total, name, plan, expected: total.weight)


def _nothing_is_written_down(patch: Patch) -> None:
    charged = Ledger.charge
    patch.setattr(Ledger, "charge", lambda self, account, *rest, **more: (account, charged(self, account, *rest)[1]))


def _spending_is_forgotten_with_later_rounds(patch: Patch) -> None:
    patch.setattr(Plan, "persistent_part_names", ())


def _every_release_costs_next_to_nothing(patch: Patch) -> None:
    def cheap(self: Ledger, column: int, loss: Any, people: int) -> Any:
        return np.full(people, 1)

    patch.setattr(Ledger, "_compute_cost", cheap)


def _who_was_not_drawn_pays_nothing(patch: Patch) -> None:
    charge = DPFedAvg.charge_eligible

    def drawn_only(self: DPFedAvg, view: Any) -> Any:
        update = charge(self, view)
        assert update is not None
        half = np.arange(len(view.user)) % 2 == 0
        return {
            name: np.where(half[(...,) + (None,) * (v.ndim - 1)], v, view.parts[self.name][name])
            for name, v in update.items()
        }

    patch.setattr(DPFedAvg, "charge_eligible", drawn_only)


def _l2_for_l1(patch: Patch) -> None:
    whole = releases.compute_l1_norms
    calls = []

    def wrong(upload: Upload) -> Any:
        calls.append(upload)
        return upload.norms() if len(calls) == 1 else whole(upload)

    patch.setattr(releases, "compute_l1_norms", wrong)


def _no_number_drops_out(patch: Patch) -> None:
    def dropping(upload: Upload, bound: Any, lengths: Any = None) -> Upload:
        return upload.drop_clients(~np.isfinite(upload.norms()))

    patch.setattr(releases, "clip_upload", dropping)


BUGS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (_no_clip, uploads_are_short),
    (_half_the_noise, noise_is_whole),
    (_noise_taken_off_again, noise_is_whole),
    (_noise_where_something_was_touched, noise_is_whole),
    (_sensitivity_of_one_clip, noise_is_whole),
    (_one_noise_for_a_round_and_its_repeats, noise_is_new_every_time),
    (_noise_from_the_public_seed, noise_of_a_device_follows_its_secret),
    (_a_fixed_cohort, people_are_drawn_independently),
    (_divided_by_who_came, the_denominator_tells_nothing),
    (_nothing_is_written_down, budgets_are_never_exceeded),
    (_spending_is_forgotten_with_later_rounds, going_back_gives_nothing_back),
    (_every_release_costs_next_to_nothing, the_ledger_is_that_of_dp_accounting),
    (_who_was_not_drawn_pays_nothing, chance_costs_everybody),
    (_l2_for_l1, l1_is_what_laplace_noise_bounds),
    (_no_number_drops_out, what_is_no_number_is_sent_as_nothing),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in BUGS), ids=lambda check: check.__name__)
def test_check_passes_without_a_planted_bug(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=lambda entry: entry.__name__.strip("_"))
def test_planted_bug_is_detected(monkeypatch: Patch, bug: Callable[[Patch], None], check: Callable[[], None]) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        check()
