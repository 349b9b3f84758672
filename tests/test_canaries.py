"""Canaries: bounds against closed forms, claims that hold through the real releases, planted bugs that are caught."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import beta, binom, norm

from tacita.cli import main
from tacita.core.errors import TacitaError
from tacita.privacy.accounting import calibrate_sampled_noise
from tacita.privacy.calibration import compute_epsilon_of_mu, compute_max_mu
from tacita.report import canary_audit
from tacita.research.audit.canaries import bounds, items, mechanism_audit, rounds, streams, sums
from tacita.research.audit.canaries.bounds import Claim, Trials, bound_guess_chance, bound_one_run, bound_within_law

DELTA = 1e-5


def gaussian(mu: float, n: int, rate: float = 1.0, seed: int = 0) -> Trials:
    rng = np.random.default_rng(seed)
    inside = rng.random(n) < 0.5
    return Trials(rng.normal(size=n) + mu * (inside & (rng.random(n) < rate)), inside)


# bounds


def test_chances_are_those_of_clopper_and_pearson() -> None:
    for observations, of in ((0, 50), (3, 50), (49, 50)):
        assert bounds.compute_upper_bound(observations, of) == pytest.approx(
            beta.ppf(0.975, observations + 1, of - observations)
        )
        assert binom.cdf(observations, of, bounds.compute_upper_bound(observations, of)) == pytest.approx(0.025)
    assert bounds.compute_upper_bound(50, 50) == 1


def test_the_loss_of_a_threshold_is_that_of_the_trade_off_curve() -> None:
    for mu, t, rate in ((0.5, 0.3, 1.0), (2.0, 1.0, 1.0), (1.0, 1.5, 0.2)):
        false = norm.sf(t)
        true = (1 - rate) * false + rate * norm.sf(t - mu)
        assert bounds.infer_mu(false, true, rate) == pytest.approx(mu)
    assert bounds.infer_mu(0.5, 0.4, 1.0) == 0


def test_right_guesses_are_counted_as_by_chance() -> None:
    """Without a delta: the tail of a binomial; with one, more is likely, and never less."""
    assert bound_guess_chance(100, 40, 30, 0.0, 0.0) == pytest.approx(binom.sf(29, 40, 0.5))
    assert bound_guess_chance(100, 40, 30, 1.0, 0.0) == pytest.approx(binom.sf(29, 40, expit(1.0)))
    assert bound_guess_chance(100, 40, 30, 0.0, 1e-3) > bound_guess_chance(100, 40, 30, 0.0, 0.0)
    law = binom(40, 0.5)
    steps = max(sum(law.pmf(30 - j) for j in range(1, i + 1)) / i for i in range(1, 31))
    assert bound_guess_chance(100, 40, 30, 0.0, 1e-4) == pytest.approx(law.sf(29) + 2 * 100 * 1e-4 * steps)
    assert bound_guess_chance(100, 0, 0, 1.0, 0.0) == 1


def test_randomised_response_is_bounded_near_its_epsilon() -> None:
    rng = np.random.default_rng(1)
    inside = rng.random(40_000) < 0.5
    score = (inside == (rng.random(40_000) < expit(1.5))).astype(float)
    claim = Claim(1.5, 0.0, "pure", threshold=1.0)
    for result in (bound_one_run(Trials(score, inside), claim), bound_within_law(Trials(score, inside), claim)):
        assert 1.4 < result <= 1.5


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_bounds_of_a_gaussian_lie_below_it_and_see_less_noise(epsilon: float) -> None:
    """Of 60 audits of the claim at most 3 are above it (5 of 100 may be); with half of the noise every one is."""
    mu = compute_max_mu(epsilon, DELTA)
    claim, result = Claim(epsilon, DELTA, mu=mu), []
    for seed in range(60):
        trials = gaussian(mu, 6000, seed=seed)
        result.append(bound_within_law(trials, claim))
        if seed < 5:
            assert bound_one_run(trials, claim) <= epsilon
            assert bound_within_law(gaussian(2 * mu, 6000, seed=seed), claim) > epsilon
    assert sum(entry > epsilon for entry in result) <= 3
    assert np.mean(result) > 0.25 * epsilon


def test_bound_holds_for_sampled_participants() -> None:
    mu = 1 / calibrate_sampled_noise(2.0, DELTA, 0.25, 4)
    claim = Claim(2.0, DELTA, mu=mu, rate=0.25, releases=4)
    for seed in range(2):
        assert bound_within_law(gaussian(mu, 20_000, 0.25, seed), claim) <= 2.0
        assert bound_within_law(gaussian(2 * mu, 20_000, 0.25, seed), claim) > 2.0
        assert bound_within_law(gaussian(mu, 20_000, 1.0, seed), claim) > 2.0  # drawn always and counted as by chance


def test_uninformative_scores_give_no_bound() -> None:
    trials = gaussian(0.0, 2000)
    for claim in (Claim(1.0, DELTA, mu=0.3), Claim(1.0, 0.0, "pure", threshold=0.0)):
        assert bound_one_run(trials, claim) < 0.2
        assert bound_within_law(trials, claim) < 0.2
    assert bounds.convert_mu_to_epsilon(0.5, Claim(1.0, DELTA, mu=1.0)) == pytest.approx(
        compute_epsilon_of_mu(np.array([0.5]), DELTA)[0]
    )


# the releases themselves


def small() -> list[Any]:
    """Every mechanism with fewer canaries: enough to see half of the noise."""
    few = {"DPPS, one release": 0.25, "Laplace noise, one release": 0.25, "tally, all of a first block": 0.3}
    few |= {"tally, a node's own sum": 0.3, "tally, terms of one release": 0.4, "tally, terms of a node's own sum": 0.4}
    few |= {
        mechanism.name: 1.0
        for mechanism in mechanism_audit.list_mechanism_audits()
        if mechanism.against == "who sees the sums"
    }
    few |= {"tally-order, all of a first block": 0.5, "tally-order, terms and order of one release": 1.0}
    return [(mechanism, few.get(mechanism.name, 0.3)) for mechanism in mechanism_audit.list_mechanism_audits()]


@pytest.mark.parametrize(("audited", "share"), small(), ids=lambda entry: getattr(entry, "name", ""))
def test_no_claim_is_broken_and_every_planted_bug_is_caught(
    audited: mechanism_audit.MechanismAudit, share: float
) -> None:
    row = audited.measure_row(3, share)
    assert row["holds"], row
    assert row["caught"], row


def test_blocks_and_retractions_cost_what_the_ledger_says() -> None:
    """Scores are spread as the claim has it, and devices wrote down what it says."""
    for setting, loss in ((streams.StreamScenario(4.0, 3), 1.0), (streams.StreamScenario(3.0, 1, 4), 0.8)):
        trials, claim = streams.run_trials(setting, 1000, 7), setting.build_claim()
        assert trials.ledger_epsilon == pytest.approx(claim.epsilon, rel=1e-6)
        gap = trials.score[trials.inside].mean() - trials.score[~trials.inside].mean()
        assert loss * claim.mu - 0.25 < gap < claim.mu + 0.25
        assert 0.9 < trials.score[~trials.inside].std() < 1.25
    free = streams.run_trials(streams.StreamScenario(3.0, 1, 4), 100, 7, streams.FREE_RETRACTIONS_BUG)
    assert free.ledger_epsilon == pytest.approx(3.0, abs=1e-6)  # what nobody wrote down


def test_a_canary_is_as_long_as_the_clip_lets_it_be() -> None:
    """Scores are spread as the claim says: deviation 1, and mu between those inside and those outside."""
    setting = rounds.RoundScenario("one", {"name": "dp-fedavg", "epsilon": 2.0, "releases": 2}, 2.0, releases=2)
    trials, mu = rounds.run_trials(setting, 4000, 5), compute_max_mu(2.0, DELTA)
    assert trials.score[~trials.inside].std() == pytest.approx(1, abs=0.06)
    gap = trials.score[trials.inside].mean() - trials.score[~trials.inside].mean()
    assert gap == pytest.approx(mu, abs=5 / math.sqrt(1000))
    long = rounds.run_trials(setting, 4000, 5, "no clip")
    assert long.score[long.inside].mean() == pytest.approx(rounds.CANARY_LENGTH * mu, abs=0.15)


def test_the_reader_of_a_first_block_loses_nothing() -> None:
    """All that is released of one person, weighed by its noise, is worth the whole budget."""
    trials, mu = sums.run_trials(sums.SumScenario(4.0), 300, 5), compute_max_mu(4.0, DELTA)
    gap = trials.score[trials.inside].mean() - trials.score[~trials.inside].mean()
    assert gap == pytest.approx(mu, abs=0.45)
    quiet = sums.run_trials(sums.SumScenario(400.0), 12, 5)  # next to no noise: the reading is exact
    gap = quiet.score[quiet.inside].mean() - quiet.score[~quiet.inside].mean()
    assert gap == pytest.approx(compute_max_mu(400.0, DELTA), rel=0.1)


def test_the_reader_of_order_loses_nothing() -> None:
    """Terms and order together are worth the whole budget; where each has the noise of one alone, more."""
    mu = compute_max_mu(4.0, DELTA)
    for entry, bug, worth in (
        (False, None, 1.0),
        (True, None, 0.94**0.5),
        (True, sums.SEPARATE_CLIPS_BUG, (2 * 0.94) ** 0.5),
    ):
        trials = sums.run_trials(sums.SumScenario(4.0, one_release=entry, order=True), 600, 5, bug)
        gap = trials.score[trials.inside].mean() - trials.score[~trials.inside].mean()
        assert gap == pytest.approx(worth * mu, abs=0.25)
        assert trials.score[~trials.inside].std() == pytest.approx(1, abs=0.12)


def test_the_worst_table_spends_nearly_all_of_an_items_epsilon() -> None:
    setting = items.ItemScenario("exponential", 1.0)
    from tacita.methods.sharing.item_perturbation import compute_probabilities

    both = compute_probabilities("exponential", 1.0, setting.table(), np.array([0, 1]))
    assert 0.9 < math.log(both[0, 0] / both[1, 0]) <= 1.0


# the command


def test_the_command_shows_bounds_beside_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "canary", "--only", "randomised", "--out", str(tmp_path), "--json", "--quiet"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["holds"]
    assert document["caught"]
    assert [row["epsilon"] for row in document["rows"]] == [1.0, 2.0]
    assert "Every planted bug is caught" in (tmp_path / "canaries.md").read_text()
    assert json.loads((tmp_path / "canaries.json").read_text()) == document
    with pytest.raises(SystemExit) as ended:
        main(["audit", "canary", "--only", "nothing of that name"])
    assert ended.value.code == 2


def test_broken_claim_is_reported_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    wrong = Claim(0.5, 0.0, "pure", threshold=1.0)
    broken = [
        mechanism_audit.MechanismAudit("a bug", "one item", "the server", lambda: wrong, mechanism.run_trials, 5000, ())
        for mechanism in mechanism_audit.list_mechanism_audits()
        if mechanism.name == "PDC-FRS, randomised response" and mechanism.unit == "one item"
    ]
    monkeypatch.setattr(mechanism_audit, "list_mechanism_audits", lambda: broken)
    monkeypatch.setattr(mechanism_audit, "list_transcript_audits", list)
    with pytest.raises(SystemExit) as ended:
        main(["audit", "canary", "--quiet"])
    assert ended.value.code == 1
    assert "BROKEN: a bug" in capsys.readouterr().err
    assert canary_audit.state_verdict({"rows": [{"mechanism": "x", "holds": True, "caught": False}]}).endswith(
        "a bug in x."
    )


def test_a_name_that_no_mechanism_has_is_refused_before_anything_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(setting: Any) -> Any:
        raise AssertionError("calibrated")

    for kind in (
        mechanism_audit.rounds.RoundScenario,
        mechanism_audit.items.ItemScenario,
        mechanism_audit.sums.SumScenario,
        mechanism_audit.streams.StreamScenario,
    ):
        monkeypatch.setattr(kind, "build_claim", never)
    with pytest.raises(TacitaError, match="--only zzz: no mechanism"):
        mechanism_audit.audit_canaries(only="zzz")
