"""Named randomness: what a number depends on, what it must not depend on, and that it looks random."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from scipy import stats

from tacita.core.draws import Draws, derive_keys
from tacita.core.types import Floats, Longs
from tacita.kernels.hashing import choose_distinct, draw_normals, draw_uniforms, hash_owners, sample_owners

CHANGES = {"seed": 8, "purpose": "noise", "block": 1, "round": 4, "owner": 1, "counter": 3}
RARE = 1e-6  # probability with which a sound generator would fail a bound
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def numbers(
    seed: int = 7,
    purpose: str = "negatives",
    block: int = 0,
    round: int = 3,
    owner: int = 0,
    counter: int = 2,
) -> Floats:
    """20,000 uniform numbers of owners `owner`, `owner` + 1, ... that differ in the named fields only."""
    key = Draws(seed).public(purpose, block, round)
    owners = np.arange(owner, owner + 20_000, dtype=np.uint64)
    return draw_uniforms(key, owners, counter + 1)[:, counter]


def looks_uniform(counts: Longs) -> bool:
    """Chi-square inside two-sided bounds: too even is as suspicious as too uneven."""
    expected = counts.sum() / len(counts)
    total = ((counts - expected) ** 2 / expected).sum()
    low, high = stats.chi2.ppf([RARE, 1 - RARE], len(counts) - 1)
    return bool(low < total < high)


def some_keys(n: int, purpose: str = "many") -> list[np.uint64]:
    return [Draws(1).public(purpose, i) for i in range(n)]


def mixed(x: int) -> int:
    """The SplitMix64 finaliser on Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def stream(key: int, owner: int) -> int:
    return mixed(key ^ mixed((owner + GOLDEN) & MASK))


def unit(at: int, counter: int) -> float:
    return (mixed((at + (counter + 1) * GOLDEN) & MASK) >> 11) / 2**53


# What a number depends on


def test_same_name_same_numbers() -> None:
    np.testing.assert_array_equal(numbers(), numbers())


@pytest.mark.parametrize("field", CHANGES)
def test_any_changed_field_gives_unrelated_numbers(field: str) -> None:
    before, after = numbers(), numbers(**{field: CHANGES[field]})  # type: ignore[arg-type]
    assert (before == after).mean() < 1e-3
    assert abs(np.corrcoef(before, after)[0, 1]) < 5 / np.sqrt(len(before))


def test_ids_are_fields_not_digits() -> None:
    draws = Draws(1)
    keys = {draws.public("a", *ids) for ids in ((), (0,), (0, 0), (1, 2), (2, 1), (12,), (1, 2, 0))}
    assert len(keys) == 7
    assert draws.public("a1", 2) != draws.public("a", 12)
    assert draws.public("a", np.int64(3)) == draws.public("a", 3)


def test_public_keys_ignore_the_secret_and_private_keys_follow_it() -> None:
    lab, phone, tablet = Draws(5), Draws(5, secret="one"), Draws(5, secret="two")
    assert lab.public("init", 1, 2) == phone.public("init", 1, 2) == tablet.public("init", 1, 2)
    assert len({candidate.private("noise", 1, 2) for candidate in (lab, phone, tablet)}) == 3
    assert phone.private("noise", 1, 2) == Draws(5, secret="one").private("noise", 1, 2)


def test_private_keys_are_apart_from_public_ones_and_follow_every_field() -> None:
    draws = Draws(5)
    assert draws.private("noise", 1) != draws.public("noise", 1)
    others = [Draws(6).private("noise", 1), draws.private("swap", 1), draws.private("noise", 2)]
    assert draws.private("noise", 1) not in others


def test_owner_keys_depend_on_the_raw_id_only() -> None:
    ids = ["196", "ä", "", "user/7"]
    keys = derive_keys(ids)
    np.testing.assert_array_equal(derive_keys(ids[::-1]), keys[::-1])
    np.testing.assert_array_equal(derive_keys([ids[2]]), keys[2:3])
    digest = hashlib.blake2b(b"196", digest_size=8).digest()
    assert int(keys[0]) == int.from_bytes(digest, "little")
    assert keys.dtype == np.uint64


def test_owner_keys_of_different_ids_differ() -> None:
    assert len(np.unique(derive_keys(str(i) for i in range(20_000)))) == 20_000
    assert len(derive_keys([])) == 0


# Vectorised kernels against plain arithmetic


def test_first_outputs_are_those_of_splitmix64() -> None:
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # published, seed 0
    assert [mixed((c + 1) * GOLDEN & MASK) for c in range(3)] == known


def test_vectorised_numbers_equal_those_made_one_by_one() -> None:
    key, owners = Draws(3).public("x"), derive_keys(f"u{i}" for i in range(300))
    hashed, drawn = hash_owners(key, owners), draw_uniforms(key, owners, 4)
    for i, owner in enumerate(owners):
        at = stream(int(key), int(owner))
        assert int(hashed[i]) == at
        assert drawn[i].tolist() == [np.float32(unit(at, j)) for j in range(4)]


def test_normals_are_box_muller_of_the_same_stream() -> None:
    key, owners = Draws(3).public("x"), derive_keys(["a", "b"])
    drawn = draw_normals(key, owners, 3)
    for i, owner in enumerate(owners):
        at = stream(int(key), int(owner))
        radius = [np.sqrt(-2 * np.log(1 - unit(at, j))) for j in (0, 2)]
        angle = [2 * np.pi * unit(at, j) for j in (1, 3)]
        expected = [radius[0] * np.cos(angle[0]), radius[0] * np.sin(angle[0]), radius[1] * np.cos(angle[1])]
        np.testing.assert_allclose(drawn[i], expected, rtol=1e-6)


@pytest.mark.parametrize("kernel", [draw_normals, draw_uniforms])
def test_rows_are_independent_of_cohort_and_width(kernel) -> None:  # type: ignore[no-untyped-def]
    key, owners = Draws(3).public("x"), derive_keys(f"u{i}" for i in range(50))
    together = kernel(key, owners, 6)
    for i in (0, 17, 49):
        np.testing.assert_array_equal(kernel(key, owners[i : i + 1], 6)[0], together[i])
    np.testing.assert_array_equal(kernel(key, owners[::-1].copy(), 6), together[::-1])
    np.testing.assert_array_equal(kernel(key, owners, 3), together[:, :3])


# Looks random


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    drawn = draw_uniforms(Draws(11).public("x"), np.arange(20_000, dtype=np.uint64), 5)
    assert looks_uniform(np.histogram(drawn, 100, (0, 1))[0])
    for column in drawn.T:
        assert looks_uniform(np.histogram(column, 50, (0, 1))[0])


def test_uniforms_stay_below_one() -> None:
    # This owner's first number rounds to 1 in single precision unless it is kept below.
    drawn = draw_uniforms(Draws(1).public("p"), np.array([38_339_474], np.uint64), 1)
    assert 0.9999999 < drawn[0, 0] < 1


def test_every_bit_of_a_hash_is_a_fair_coin() -> None:
    hashed = hash_owners(Draws(11).public("x"), np.arange(40_000, dtype=np.uint64))
    ones = (hashed[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(0)
    assert np.abs(ones - 0.5).max() < 5.5 * 0.5 / np.sqrt(len(hashed))


@pytest.mark.parametrize("step", ["owner", "counter"])
def test_neighbours_are_independent(step: str) -> None:
    drawn = draw_uniforms(Draws(11).public("x"), np.arange(20_001, dtype=np.uint64), 2)
    x, y = (drawn[:-1, 0], drawn[1:, 0]) if step == "owner" else (drawn[:, 0], drawn[:, 1])
    assert abs(np.corrcoef(x, y)[0, 1]) < 5 / np.sqrt(len(x))
    assert looks_uniform(np.histogram2d(x, y, 8, ((0, 1), (0, 1)))[0].ravel())


def test_normals_have_the_moments_of_a_normal() -> None:
    drawn = draw_normals(Draws(11).public("x"), np.arange(50_000, dtype=np.uint64), 2).astype(np.float64)
    n = drawn.size
    assert abs(drawn.mean()) < 5 / np.sqrt(n)
    assert abs(drawn.var() - 1) < 5 * np.sqrt(2 / n)
    assert abs(stats.skew(drawn, axis=None)) < 5 * np.sqrt(6 / n)
    assert abs(stats.kurtosis(drawn, axis=None)) < 5 * np.sqrt(24 / n)
    assert stats.kstest(drawn[:, 0], "norm").pvalue > RARE
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 5 / np.sqrt(len(drawn))
    assert abs(np.corrcoef(drawn.T**2)[0, 1]) < 5 / np.sqrt(len(drawn))
    assert np.isfinite(drawn).all()


# k of n, and each with a probability


def test_choose_gives_distinct_numbers_in_range() -> None:
    for n, k in ((1, 1), (5, 2), (100, 99), (10**9, 50)):
        picked = choose_distinct(Draws(2).public("pick", n), n, k)
        assert len(set(picked.tolist())) == k
        assert picked.min() >= 0
        assert picked.max() < n
    assert len(choose_distinct(np.uint64(1), 4, 0)) == 0


def test_choosing_all_gives_all() -> None:
    for key in some_keys(50):
        assert sorted(choose_distinct(key, 12, 12).tolist()) == list(range(12))


def test_choose_includes_every_user_equally_often() -> None:
    picks = np.stack([choose_distinct(key, 10, 3) for key in some_keys(10_000)])
    counts = np.bincount(picks.ravel(), minlength=10)
    sd = np.sqrt(len(picks) * 0.3 * 0.7)
    assert np.abs(counts - 3000).max() < 5 * sd
    assert all(looks_uniform(np.bincount(place, minlength=10)) for place in picks.T)
    pairs = np.sort(picks[:, :2], axis=1)
    together = np.bincount(pairs[:, 0] * 10 + pairs[:, 1], minlength=100)
    assert looks_uniform(together[together > 0])
    assert (together > 0).sum() == 45


def test_choosing_all_gives_every_order_equally_often() -> None:
    orders = np.stack([choose_distinct(key, 4, 4) for key in some_keys(12_000)])
    counts = np.unique(orders @ np.array([1000, 100, 10, 1]), return_counts=True)[1]
    assert len(counts) == 24
    assert looks_uniform(counts)


@pytest.fixture(scope="module")
def thinned() -> Floats:
    """Who is in (columns) under 10,000 keys (rows), at rate 0.2 of 30."""
    inside = np.zeros((10_000, 30), np.float32)
    for row, key in enumerate(some_keys(len(inside), "decide")):
        picked = sample_owners(key, np.arange(30, dtype=np.uint64), 0.2)
        assert (np.diff(picked) > 0).all()
        inside[row, picked] = 1
    return inside


def test_decide_includes_every_user_with_the_rate(thinned: Floats) -> None:
    sd = np.sqrt(0.2 * 0.8 / len(thinned))
    assert np.abs(thinned.mean(0) - 0.2).max() < 5 * sd


def test_deciding_decides_about_pairs_independently(thinned: Floats) -> None:
    related = np.corrcoef(thinned.T)[np.triu_indices(30, 1)]
    assert np.abs(related).max() < 5 / np.sqrt(len(thinned))


def test_decided_counts_are_binomial(thinned: Floats) -> None:
    counts = np.bincount(thinned.sum(1).astype(int), minlength=31)
    expected = len(thinned) * stats.binom.pmf(np.arange(31), 30, 0.2)
    state = expected >= 5
    total = ((counts - expected)[state] ** 2 / expected[state]).sum()
    assert total < stats.chi2.ppf(1 - RARE, state.sum() - 1)


@pytest.mark.parametrize("rate", [1.0, 1 - 1e-12])
def test_deciding_at_rate_one_keeps_all(rate: float) -> None:
    for key in some_keys(20):
        assert sample_owners(key, np.arange(1000, dtype=np.uint64), rate).tolist() == list(range(1000))


@pytest.mark.parametrize("rate", [1e-12, 1e-30, 1e-300])
def test_deciding_at_a_vanishing_rate_keeps_nobody(rate: float) -> None:
    for key in some_keys(20):
        assert len(sample_owners(key, np.arange(1000, dtype=np.uint64), rate)) == 0


def test_deciding_nobody_gives_nobody() -> None:
    assert len(sample_owners(np.uint64(1), np.zeros(0, np.uint64), 0.5)) == 0
