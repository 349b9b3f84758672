"""The two steppers against each other and against the slow per-client loop of `oracle`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from helpers.oracle import (
    TRAINED,
    Device,
    Groups,
    averaged,
    cohort,
    federate,
    make_backbone,
    make_block,
    make_stream,
    slow_round,
    started,
    train_once,
)
from helpers.trainer_streams import N_ITEMS, UNEVEN, random_stream, uneven_stream
from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, CohortView, ExtraSamples, Floats, LocalModels, ProximalTerm, Ragged
from tacita.federation.rounds import Progress, run_round
from tacita.learn.training.local_models import build_local_models
from tacita.learn.training.stepper import FusedStepper
from tacita.methods import Part
from tacita.round.plan import Federation
from tacita.round.task import LocalTask

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in TRAINED}
VARIANTS["ncf-shared"] = ("ncf", {"share_mlp": True})
FUSED = [v for v, (name, more) in VARIANTS.items() if FusedStepper.supports(make_backbone(name, **more), TrainConfig())]
EVERY_STEPPER = [(v, "autograd") for v in VARIANTS] + [(v, "fused") for v in FUSED]
Numbers = tuple[Floats, Floats]  # item table, private vectors


def federation(variant: str, *parts: type[Part], stream: BlockStream | None = None, **train: Any) -> Federation:
    name, options = VARIANTS[variant]
    small = {"batch_size": 8, "local_epochs": 2} | train
    return federate(stream or uneven_stream(), make_backbone(name, **options), *parts, **small)


def numbers_after(fed: Federation, rounds: int) -> Numbers:
    progress = started(fed)
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress.server.items, progress.clients.private


def assert_same_bits(one: Numbers, other: Numbers) -> None:
    assert np.array_equal(one[0], other[0])
    assert np.array_equal(one[1], other[1])


SLOPELESS = {"w"}  # half of it, in fedpergnn, shifts all of a user's attention alike, which changes nothing


def assert_matches_oracle(fed: Federation, progress: Progress, atol: float = 1e-5, **hooks: Any) -> None:
    """One round of everybody: table, heads and private vectors agree, and all of them moved."""
    view = cohort(fed, progress)
    slow = slow_round(view, fed.backbone, fed.config.train, fed.draws, **hooks)
    trained = train_once(fed, progress)
    after = averaged(fed, progress.server, trained)
    np.testing.assert_allclose(after.items, slow.items, rtol=1e-5, atol=atol)
    np.testing.assert_allclose(trained.local.private, slow.private, rtol=1e-5, atol=atol)
    assert after.heads.keys() == slow.heads.keys()
    for name, head in after.heads.items():
        np.testing.assert_allclose(
            head, slow.heads[name], rtol=1e-5, atol=25 * atol if atol > 1e-5 and name in SLOPELESS else atol
        )
    assert np.abs(after.items - progress.server.items).max() > 0.01
    assert np.abs(trained.local.private - view.private).max() > 1e-3


# the same answer, three ways


@pytest.mark.parametrize(("variant", "stepper"), EVERY_STEPPER)
def test_a_stepper_gives_what_training_clients_one_by_one_gives(variant: str, stepper: str) -> None:
    fed = federation(variant, stepper=stepper)
    progress = started(fed)
    counts = np.diff(train_once(fed, progress).local.ptr)
    assert counts.min() < 8 < counts.max()  # some clients have one short batch, others several
    assert_matches_oracle(fed, progress)


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_a_silo_users_share_one_table_and_batches_mix_them(variant: str) -> None:
    fed = federation(variant, silos=3)
    progress = started(fed)
    view = cohort(fed, progress)
    assert view.n_clients < len(view.user)
    local = build_local_models(view, {}, fed.config.train, fed.draws)
    assert any(len(set(local.owner[local.order[0, a : a + 8]])) > 1 for a in local.ptr[:-1])
    assert_matches_oracle(fed, progress)


@pytest.mark.parametrize("silos", [0, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_adam_is_torch_adam_started_afresh_on_every_client(variant: str, silos: int) -> None:
    name, options = VARIANTS[variant]
    backbone = make_backbone(name, **options, item_lr_scale=0.5)
    # a slope that is nothing but rounding becomes a step of full length, 0.05, and later steps see where it went
    atol = 2e-4 if name in ("fedpergnn", "interest") else 1e-5
    assert_matches_oracle(
        fed := federate(uneven_stream(), backbone, batch_size=8, optimiser="adam", silos=silos), started(fed), atol
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_adam_leaves_a_client_alone_once_its_steps_are_done(variant: str) -> None:
    """A client with one batch must not drift on while its cohort mates still have batches to go."""
    name, options = VARIANTS[variant]
    fed = federate(uneven_stream(), make_backbone(name, **options), batch_size=8, optimiser="adam")
    together = train_once(fed, progress := started(fed)).local.private
    short = 2  # one positive, four negatives: one step
    alone = train_once(fed, progress, np.array([short])).local.private
    np.testing.assert_allclose(together[short], alone[0], rtol=1e-6)


@st.composite
def small_cohorts(draw: st.DrawFn) -> tuple[BlockStream, dict[str, Any]]:
    n_items = draw(st.integers(2, 12))
    likes = st.lists(st.integers(0, n_items - 1), unique=True, max_size=n_items)
    lists = draw(st.lists(likes, min_size=1, max_size=6).filter(any))
    train = {
        "batch_size": draw(st.integers(1, 20)),
        "local_epochs": draw(st.integers(1, 3)),
        "negatives": draw(st.integers(0, 5)),
        "seed": draw(st.integers(0, 1000)),
    }
    return make_stream(make_block(0, n_items, lists)), train


@pytest.mark.parametrize("variant", FUSED)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(drawn=small_cohorts())
def test_the_steppers_agree_on_any_small_cohort(variant: str, drawn: tuple[BlockStream, dict[str, Any]]) -> None:
    stream, train = drawn
    fused = numbers_after(federation(variant, stream=stream, stepper="fused", **train), rounds=1)
    plain = numbers_after(federation(variant, stream=stream, stepper="autograd", **train), rounds=1)
    np.testing.assert_allclose(fused[0], plain[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fused[1], plain[1], rtol=1e-4, atol=1e-5)


def test_the_fused_stepper_is_refused_where_it_does_not_fit() -> None:
    fed = federation("mf", stepper="fused", optimiser="adam")
    with pytest.raises(TacitaError, match="no fused step"):
        fed.learner.check()


# what must not matter


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("variant", "stepper"), EVERY_STEPPER)
def test_chunking_the_cohort_changes_no_bit(variant: str, stepper: str, chunk: int) -> None:
    fed = federation(variant, stream=random_stream(20, 30, 10), stepper=stepper, local_epochs=1)
    assert_same_bits(numbers_after(fed, 2), numbers_after(replace(fed, chunk=chunk), 2))


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the thread counts back."""
    before = numba.get_num_threads(), torch.get_num_threads()
    yield
    numba.set_num_threads(before[0])
    torch.set_num_threads(before[1])


@pytest.mark.usefixtures("threads")
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
@pytest.mark.parametrize(("variant", "stepper"), EVERY_STEPPER)
def test_the_number_of_threads_changes_no_bit(variant: str, stepper: str) -> None:
    fed = federation(variant, stream=random_stream(120, 60, 40), stepper=stepper, local_epochs=1, batch_size=200)
    observations = []
    for n in (1, 2):
        numba.set_num_threads(n)
        torch.set_num_threads(n)
        observations.append(numbers_after(fed, 2))
    assert_same_bits(*observations)


@pytest.mark.parametrize(("variant", "stepper"), EVERY_STEPPER)
def test_the_order_of_clients_does_not_matter(variant: str, stepper: str) -> None:
    fed = federation(variant, stepper=stepper)
    progress = started(fed)
    order = np.array([3, 0, 5, 1, 4, 2])
    straight, shuffled = train_once(fed, progress), train_once(fed, progress, order)
    np.testing.assert_allclose(shuffled.local.private, straight.local.private[order], rtol=1e-6, atol=1e-6)
    first, other = averaged(fed, progress.server, straight), averaged(fed, progress.server, shuffled)
    np.testing.assert_allclose(other.items, first.items, rtol=1e-6, atol=1e-6)


def test_a_round_leaves_the_received_table_and_absent_users_alone() -> None:
    fed = federation("mf")
    progress = started(fed)
    received, private = progress.server, progress.clients.private.copy()
    table = received.items.copy()
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    assert np.array_equal(received.items, table)
    moved = (progress.clients.private != private).any(1)
    assert moved.tolist() == [len(entry) > 0 for entry in UNEVEN]


# what is drawn


def drawn(train: list[list[int]], n_items: int, round: int = 0, seed: int = 3, **options: Any) -> LocalModels:
    fed = federate(make_stream(make_block(0, n_items, train)), make_backbone("mf"), seed=seed, **options)
    view = replace(cohort(fed, started(fed)), round=round)
    return build_local_models(view, {}, fed.config.train, fed.draws)


def negatives_of(local: LocalModels, client: int) -> list[int]:
    own = slice(local.ptr[client], local.ptr[client + 1])
    return local.item[own][local.label[own] == 0].tolist()


def positives_of(local: LocalModels, client: int) -> list[int]:
    own = slice(local.ptr[client], local.ptr[client + 1])
    return local.item[own][local.label[own] == 1].tolist()


def test_every_user_gets_its_positives_and_four_negatives_for_each() -> None:
    local = drawn(UNEVEN, N_ITEMS)
    for client, likes in enumerate(entry for entry in UNEVEN if entry):
        assert positives_of(local, client) == likes
        assert len(negatives_of(local, client)) == 4 * len(likes)


def test_a_negative_is_never_a_training_positive_of_the_block() -> None:
    for round in range(20):
        local = drawn(UNEVEN, N_ITEMS, round)
        for client, likes in enumerate(entry for entry in UNEVEN if entry):
            assert not set(negatives_of(local, client)) & set(likes)


def test_a_validation_item_and_an_earlier_positive_can_be_drawn_as_negatives() -> None:
    first = make_block(0, 4, [[0]])
    second = make_block(1, 4, [[1]], valid=[[2]], test=[[3]], known=1)
    fed = federate(make_stream(first, second), make_backbone("mf"))
    view = replace(cohort(fed, started(fed)), block=1, train=second.train, exclude=second.train)
    observations = {
        i
        for r in range(30)
        for i in negatives_of(build_local_models(replace(view, round=r), {}, fed.config.train, fed.draws), 0)
    }
    assert observations == {0, 2, 3}


@pytest.mark.parametrize("likes", [[1, 4], list(range(2, 19))], ids=["by rejection", "from the remainder"])
def test_negatives_are_uniform_over_what_is_left(likes: list[int]) -> None:
    n_items = 19
    local = drawn([likes] * 1500, n_items)
    counts = np.bincount(local.item[local.label == 0], minlength=n_items)
    remainder = np.setdiff1d(np.arange(n_items), likes)
    assert counts[remainder].sum() == 4 * len(likes) * 1500
    assert stats.chisquare(counts[remainder]).pvalue > 1e-3


def test_a_user_who_likes_all_items_but_one_gets_that_one() -> None:
    likes = [i for i in range(20) if i != 13]
    assert negatives_of(drawn([likes], 20), 0) == [13] * 76


def test_a_user_who_likes_everything_trains_on_positives_alone() -> None:
    local = drawn([list(range(5)), [0]], 5)
    assert negatives_of(local, 0) == []
    assert positives_of(local, 0) == [0, 1, 2, 3, 4]
    assert len(negatives_of(local, 1)) == 4
    assert np.diff(local.row_start)[0] == 5


def test_negatives_depend_on_user_round_and_seed_not_on_the_cohort() -> None:
    wide = 200
    together = drawn([[7], [1, 2], [9]], wide)
    fed = federate(make_stream(make_block(0, wide, [[7], [1, 2], [9]])), make_backbone("mf"))
    alone = build_local_models(cohort(fed, started(fed), np.array([1])), {}, fed.config.train, fed.draws)
    assert negatives_of(together, 1) == negatives_of(alone, 0)
    assert negatives_of(together, 1) != negatives_of(drawn([[7], [1, 2], [9]], wide, round=1), 1)
    assert negatives_of(together, 1) != negatives_of(drawn([[7], [1, 2], [9]], wide, seed=4), 1)
    assert negatives_of(together, 0) != negatives_of(together, 2)


def test_negatives_change_with_the_device_secret() -> None:
    fed = federate(make_stream(make_block(0, 200, [[7, 8]])), make_backbone("mf"))
    view = cohort(fed, started(fed))
    lab, device = (
        build_local_models(view, {}, fed.config.train, Draws(3, secret)) for secret in ("", "of this device")
    )
    assert negatives_of(lab, 0) != negatives_of(device, 0)


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    local = drawn(UNEVEN, N_ITEMS, batch_size=8, local_epochs=2)
    for client in range(len(local.ptr) - 1):
        own = np.arange(local.ptr[client], local.ptr[client + 1])
        orders = local.order[:, own]
        assert (np.sort(orders, axis=1) == own).all()
        assert np.array_equal(orders[0], orders[1]) == (len(own) <= 8)


def test_two_clients_of_the_same_size_are_shuffled_differently() -> None:
    local = drawn([[0, 1, 2], [3, 4, 5]], N_ITEMS, batch_size=4)
    assert not np.array_equal(local.order[0, :15], local.order[0, 15:] - 15)


def test_local_rows_are_the_distinct_items_a_client_touches() -> None:
    local = drawn(UNEVEN, N_ITEMS)
    for client in range(len(local.ptr) - 1):
        rows = slice(local.row_start[client], local.row_start[client + 1])
        own = slice(local.ptr[client], local.ptr[client + 1])
        assert sorted(local.row_item[rows]) == sorted(set(local.item[own].tolist()))
        assert np.array_equal(local.row_item[rows][local.row_of[own]], local.item[own])
        assert np.array_equal(local.rows[rows], local.view.items[local.row_item[rows]])


# extra samples of parts

Sample = tuple[int, float, float]  # item, label, weight


class Reminders(Part):
    """Three items per user; every step and phase asks for another two of them."""

    name = "reminders"
    fills = frozenset({"rows_needed", "step_samples"})

    def items_of(self, user: int, n_items: int) -> list[int]:
        return [(5 * user + 2 * k) % n_items for k in range(3)]

    def asks(self, step: int, phase: int) -> list[tuple[int, float, float]]:
        """(place in the list, label, weight)"""
        k = (step + phase) % 3
        return [(k, 0.3, 0.5), ((k + 1) % 3, 0.9, 0.25)]

    def prepare(self, view: CohortView) -> LocalTask:
        items = Ragged.from_lists([self.items_of(int(u), view.n_items) for u in view.user])
        return LocalTask(rows_needed=items, step_samples=self.sample_step)

    def sample_step(self, view: CohortView, local: LocalModels, step: int, phase: int) -> ExtraSamples | None:
        request = self.asks(step, phase)
        if not request:
            return None
        lists, _ = local.rows_needed[self.name]
        results = [(lists.ptr[u] + k, label, weight) for u in range(len(view.user)) for k, label, weight in request]
        pick, label, weight = (np.array(column) for column in zip(*results, strict=True))
        return ExtraSamples(len(request) * view.user_ptr, pick.astype(np.int64), label, weight)


class Nudges(Reminders):
    """A second part with lists of its own, silent in every other step."""

    name = "nudges"

    def items_of(self, user: int, n_items: int) -> list[int]:
        return [(3 * user + k) % n_items for k in range(2)]

    def asks(self, step: int, phase: int) -> list[tuple[int, float, float]]:
        return [(1, 0.0, 1.5)] if step % 2 == 0 else []


def extras_of(fed: Federation, view: CohortView, user: int, step: int, phase: int) -> list[Sample]:
    """What the parts ask of one user, in the oracle's terms."""
    return [
        (part.items_of(int(view.user[user]), N_ITEMS)[k], label, weight)
        for part in fed.parts
        if isinstance(part, Reminders)
        for k, label, weight in part.asks(step, phase)
    ]


@pytest.mark.parametrize("parts", [(Reminders,), (Reminders, Nudges)], ids=["one part", "two parts"])
@pytest.mark.parametrize(("variant", "stepper"), EVERY_STEPPER)
def test_extra_samples_join_the_loss_with_their_weights(
    variant: str, stepper: str, parts: tuple[type[Part], ...]
) -> None:
    fed = federation(variant, *parts, stepper=stepper)
    progress = started(fed)
    view = cohort(fed, progress)
    assert_matches_oracle(fed, progress, more=lambda *at: extras_of(fed, view, *at))
    without = train_once(federation(variant, stepper=stepper), progress).local.private
    assert np.abs(train_once(fed, progress).local.private - without).max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_a_silo_extra_samples_belong_to_the_user_whose_list_they_come_from(variant: str) -> None:
    fed = federation(variant, Reminders, Nudges, silos=3)
    progress = started(fed)
    view = cohort(fed, progress)
    assert_matches_oracle(fed, progress, more=lambda *at: extras_of(fed, view, *at))


# pulls of parts


class Anchor(Part):
    """Pulls the first nine rows to the received table, and every second user's vector to 0.1."""

    name = "anchor"
    fills = frozenset({"pull"})
    strength = 0.4

    def prepare(self, view: CohortView) -> LocalTask:
        target = np.full_like(view.private, 0.1)
        return LocalTask(pull=ProximalTerm(self.strength, view.items[:9], target, view.user % 2 == 0))


class FirmAnchor(Anchor):
    strength = 1e9


def pull_on_device(view: CohortView, device: Device, users: list[int], groups: Groups) -> None:
    """Minimise |x - now|^2 / (2 rate) + s |x - target|^2: the weighted mean of where it is and the target."""
    rate = {id(p): lr for params, lr in groups for p in params}
    with torch.no_grad():
        for k, user in enumerate(users):
            for own in device.own.values() if view.user[user] % 2 == 0 else []:
                share = 1 / (1 + 2 * rate[id(own)] * Anchor.strength)
                own[k] = share * own[k] + (1 - share) * 0.1
        share = 1 / (1 + 2 * rate[id(device.items)] * Anchor.strength)
        old = torch.from_numpy(view.items[:9])
        device.items[:9] = share * device.items[:9] + (1 - share) * old


@pytest.mark.parametrize(("variant", "stepper"), EVERY_STEPPER)
def test_a_pull_is_the_implicit_step_after_every_step(variant: str, stepper: str) -> None:
    fed = federation(variant, Anchor, stepper=stepper)
    progress = started(fed)
    view = cohort(fed, progress)
    assert_matches_oracle(fed, progress, after_step=lambda *at: pull_on_device(view, *at))


@pytest.mark.parametrize(("variant", "stepper"), EVERY_STEPPER)
def test_a_pull_without_end_holds_what_it_pulls_and_nothing_else(variant: str, stepper: str) -> None:
    fed = federation(variant, FirmAnchor, stepper=stepper)
    progress = started(fed)
    trained = train_once(fed, progress)
    pulled = trained.local.view.user % 2 == 0
    np.testing.assert_allclose(trained.local.private[pulled], 0.1, atol=1e-4)
    assert (np.abs(trained.local.private[~pulled] - 0.1).max(1) > 0.01).all()
    moved = np.abs(trained.upload.values["rows"].value).max(1)
    assert moved[trained.upload.values["rows"].item < 9].max() < 1e-4
    assert moved[trained.upload.values["rows"].item >= 9].max() > 0.01


@pytest.mark.parametrize("stepper", ["fused", "autograd"])
def test_a_pull_by_hand(stepper: str) -> None:
    """p = 1, q = 0.5, y = 1, lr 0.1, one item, so both rates are 0.1. The step alone gives
    p = 1 + 0.1 * 0.377541 * 0.5 = 1.018877 and q = 0.5 + 0.1 * 0.377541 = 0.537754. Strength 2 towards 0:
    both are divided by 1 + 2 * 0.1 * 2 = 1.4, hence p = 0.727769 and q = 0.384110."""

    class ToZero(Part):
        name = "to-zero"
        fills = frozenset({"pull"})

        def prepare(self, view: CohortView) -> LocalTask:
            zeros = np.zeros_like(view.items), np.zeros_like(view.private)
            return LocalTask(pull=ProximalTerm(2.0, *zeros, np.ones(1, bool)))

    stream = make_stream(make_block(0, 1, [[0]]))
    fed = federate(stream, make_backbone("mf", dim=1, lr=0.1), ToZero, stepper=stepper)
    progress = started(fed)
    progress.server.items[:], progress.clients.private[:] = 0.5, 1.0
    trained = train_once(fed, progress)
    assert trained.local.private[0, 0] == pytest.approx(0.727769, abs=1e-6)
    assert 0.5 + trained.upload.values["rows"].value[0, 0] == pytest.approx(0.384110, abs=1e-6)
