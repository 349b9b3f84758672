"""Canaries over whole transcripts: exact values are compared, noised ones bounded, and every planted leak is caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta

from tacita.privacy.calibration import compute_max_mu
from tacita.report import canary_audit
from tacita.research.audit.canaries import neighbours, planted_leaks, transcript_scenarios
from tacita.research.audit.canaries.transcript_audit import TranscriptAudit
from tacita.research.audit.canaries.transcript_bounds import bound_epsilon, bound_ratio, measure_reader
from tacita.research.audit.canaries.transcripts import (
    READER,
    Transcript,
    find_exact_differences,
    tabulate_features,
)

DELTA = 1e-5
Plays = list[Transcript]


def make_plays(n: int, mean: float = 0.0, deviation: float = 1.0, seed: int = 0, **entries: object) -> Plays:
    """Transcripts of one noised array of 20 numbers, with other entries beside it."""
    rng = np.random.default_rng(seed)
    plays = []
    for _ in range(n):
        transcript = Transcript()
        numbers = deviation * rng.normal(size=20)
        numbers[0] += mean
        transcript.add("sum", numbers)
        transcript.add_all("", entries)
        plays.append(transcript)
    return plays


# Exact values


def test_an_exact_number_that_differs_is_found() -> None:
    without = make_plays(4, clients=39, verdict="ok")
    with_person = make_plays(4, seed=1, clients=40, verdict="ok")
    differences = find_exact_differences(without, with_person)
    assert [str(difference) for difference in differences] == ["clients: 39 without the person, 40 with them"]
    assert find_exact_differences(without, with_person, ("cli*",)) == []
    assert find_exact_differences(without, make_plays(4, seed=2, clients=39, verdict="ok")) == []


def test_texts_shapes_and_missing_entries_are_exact_too() -> None:
    without = make_plays(3, said="too few", liked=np.zeros(8))
    with_person = make_plays(3, seed=1, said="", liked=np.zeros(9), terms=np.zeros(2))
    assert [difference.name for difference in find_exact_differences(without, with_person)] == [
        "said",
        "liked",
        "terms",
    ]


def test_one_number_without_noise_is_found_among_others() -> None:
    without, with_person = make_plays(5), make_plays(5, seed=1)
    for plays, value in ((without, 2.0), (with_person, 3.0)):
        for transcript in plays:
            transcript.entries["sum"][7] = value  # type: ignore[call-overload]
    assert [difference.name for difference in find_exact_differences(without, with_person)] == ["sum[7]"]


def test_what_varies_in_one_world_is_not_exact() -> None:
    without = [*make_plays(3, verdict="ok"), *make_plays(3, verdict="refused")]
    with_person = make_plays(6, seed=1, verdict="refused")
    assert find_exact_differences(without, with_person) == []
    table = tabulate_features(without, with_person)
    assert [name for name, _ in table.groups] == ["sum", "verdict"]
    assert table.without[:, -1].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


# Bounds


def test_a_ratio_is_bounded_as_by_clopper_and_pearson() -> None:
    likely, unlikely = np.arange(100) < 80, np.arange(100) < 5
    least, most = beta.ppf(0.025, 80, 21), beta.ppf(0.975, 6, 95)
    assert bound_ratio(likely, unlikely, DELTA) == pytest.approx(np.log((least - DELTA) / most))
    assert bound_ratio(unlikely, likely, DELTA) == 0
    assert bound_ratio(np.zeros(50, bool), np.zeros(50, bool), DELTA) == 0


def test_bounds_lie_below_the_epsilon_of_the_noise_and_see_less_noise() -> None:
    """The statistic is learned; with a third of the noise the bound is above the claim."""
    mu = compute_max_mu(1.0, DELTA)
    epsilons = [
        bound_epsilon(make_plays(600, seed=seed), make_plays(600, mu, seed=50 + seed), DELTA).epsilon
        for seed in range(10)
    ]
    assert sum(bound > 1.0 for bound in epsilons) <= 1
    assert bound_epsilon(make_plays(600), make_plays(600, 12 * mu, seed=1), DELTA).epsilon > 1.0


def test_the_size_of_noise_is_a_statistic() -> None:
    """Both worlds have the mean 0, and one of them a tenth more noise."""
    quiet = [replace_sum(play, np.tile(play.entries["sum"], 10)) for play in make_plays(400)]
    loud = [replace_sum(play, np.tile(play.entries["sum"], 10)) for play in make_plays(400, deviation=2.0, seed=1)]
    bound = bound_epsilon(quiet, loud, DELTA)
    assert bound.statistic == "the size of sum"
    assert bound.epsilon > 2.0


def replace_sum(play: Transcript, value: object) -> Transcript:
    transcript = Transcript()
    transcript.add("sum", value)
    return transcript


def test_a_readers_score_is_a_candidate_and_measured() -> None:
    without, with_person = make_plays(200), make_plays(200, 3.0, seed=1)
    for transcript in (*without, *with_person):
        transcript.add(f"{READER}first number", float(transcript.entries["sum"][0]))
    assert measure_reader(without, with_person, f"{READER}first number") == pytest.approx(3.0, abs=0.4)
    assert bound_epsilon(without, with_person, DELTA).epsilon > 2.0
    assert bound_epsilon([Transcript()] * 8, [Transcript()] * 8, DELTA).epsilon == 0


def test_a_shape_that_noise_decides_is_not_exact() -> None:
    """Two plays of each world may differ by chance; more plays of both are needed before that is a leak."""
    scripted = {(False, 0): 16, (True, 0): 3, (False, 1): 16, (True, 1): 3}

    def play(with_person: bool, number: int) -> Transcript:
        turn = (number - 1) // 2
        return make_plays(1, width=np.zeros(scripted.get((with_person, turn), turn)))[0]

    audit = replace(list_audits()[0], prepare=lambda: play, exact_plays=2, public={})
    assert audit.run_plays(0, 0).exact == []


# The scenarios


def list_audits() -> list[TranscriptAudit]:
    return transcript_scenarios.list_transcript_audits()


def find_audit(title: str) -> TranscriptAudit:
    (audit,) = [audit for audit in list_audits() if audit.title == title]
    return audit


def test_titles_are_unique_and_neighbours_are_chosen_against_each_mechanism() -> None:
    titles = [audit.title for audit in list_audits()]
    assert len(set(titles)) == len(titles)
    assert len(neighbours.list_worst_cases()) == 7
    for words in ("a border mover", "the k-th person", "everybody waits", "all rare items", "one common item"):
        assert any(words in title for title in titles), words


@pytest.mark.parametrize(
    "audit", [audit for audit in list_audits() if not audit.uncovered], ids=lambda audit: audit.title
)
def test_nothing_exact_differs_between_neighbours(audit: TranscriptAudit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript_scenarios, "SEEDS", 50)
    result = replace(audit, exact_plays=2).run_plays(3, 0)
    assert [str(difference) for difference in result.exact] == []


def test_the_best_reader_of_a_first_block_has_the_whole_budget() -> None:
    audit = find_audit("tally, first block: all common items, backwards")
    row = audit.measure_row(3, 0.4)
    assert row["holds"], row
    assert row["mu"] == pytest.approx(row["mu_claimed"], abs=0.35)


def test_the_round_that_validation_chooses_is_seen_and_named_as_uncovered() -> None:
    audit = find_audit("DP-FedAvg, the round that is served: alone with items for validation")
    assert audit.run_plays(3, 120).breaks(audit.epsilon)
    assert "validation" in audit.uncovered


# Planted leaks


LEAKING = {audit.leak: audit for audit in list_audits() if audit.leak}


def test_every_planted_leak_has_a_row() -> None:
    assert len(planted_leaks.LEAKS) == 8
    assert LEAKING.keys() == planted_leaks.LEAKS.keys()


@pytest.mark.parametrize("leak", planted_leaks.LEAKS)
def test_a_planted_leak_is_caught(leak: str) -> None:
    audit = LEAKING[leak]
    result = replace(audit, exact_plays=2).run_leak(3)
    assert result.breaks(audit.epsilon), result


def test_a_planted_leak_ends_with_its_context() -> None:
    before = planted_leaks.sum_release.decide_retraction_replay
    with planted_leaks.plant_exact_replay():
        assert planted_leaks.sum_release.decide_retraction_replay is not before
    assert planted_leaks.sum_release.decide_retraction_replay is before


# The report


def test_the_report_shows_transcripts_beside_their_claims() -> None:
    row = {
        "mechanism": "tally",
        "neighbour": "one item",
        "against": "the server",
        "epsilon": 1.0,
        "plays": 600,
        "exact": [],
        "bound": 0.5,
        "mu": 0.2,
        "mu_claimed": 0.27,
        "outside": {"fingerprint": "a digest"},
        "uncovered": "",
        "leak": "a leak",
        "leak_exact": ["clients: 39 without the person, 40 with them"],
        "leak_bound": 0.0,
        "holds": True,
        "caught": True,
    }
    result = {"seed": 1, "rows": [], "transcripts": [row]}
    page = canary_audit.to_markdown(result)
    assert "| 0.50 | 0.20 (0.27) | a leak | no finite epsilon |" in page
    assert "Outside of every epsilon: `fingerprint`: a digest." in page
    broken = {**row, "holds": False, "exact": ["clients: 39 without the person, 40 with them"]}
    message = canary_audit.to_markdown({**result, "transcripts": [broken]})
    assert "BROKEN: tally (one item)" in message
    assert "tally, one item: clients: 39" in message
