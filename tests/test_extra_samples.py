"""Samples that parts bring to local training: negatives of their own choice, and soft-labelled ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.oracle import (
    TRAINED,
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
from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Floats, Ints, LocalModels, Longs, Ragged
from tacita.federation.devices import Federation
from tacita.federation.rounds import run_round
from tacita.learn.training import check_training
from tacita.learn.training.local_models import build_local_models
from tacita.learn.training.stepper import FusedStepper
from tacita.methods import Part
from tacita.round.task import LocalTask, prepare_cohort

N_ITEMS = 12
UNEVEN = [[0, 3], [1, 2, 4, 7, 9], [5], [], [0, 1, 2, 3, 4, 5, 6], [11, 2, 6], [8]]
STEPPERS = [(name, "autograd") for name in TRAINED]
STEPPERS += [(name, "fused") for name in TRAINED if FusedStepper.supports(make_backbone(name), TrainConfig())]

Sample = tuple[int, float]


class Hints(Part):
    """One or two items per user, with labels in between."""

    name = "hints"
    fills = frozenset({"samples"})

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(samples=self.give_samples)

    def hints_of(self, user: int) -> list[Sample]:
        return [((7 * user + k) % N_ITEMS, 0.25 + 0.5 * k) for k in range(1 + user % 2)]

    def give_samples(self, view: CohortView, own: Ragged) -> Ragged:
        results = [self.hints_of(int(u)) for u in view.user]
        lists = Ragged.from_lists([[item for item, _ in entry] for entry in results])
        return Ragged(
            lists.ptr, lists.ids, {"label": np.array([y for element in results for _, y in element], np.float32)}
        )


class Whispers(Hints):
    """A second part, which has something to say to few."""

    name = "whispers"

    def hints_of(self, user: int) -> list[Sample]:
        return [(user % N_ITEMS, 0.125)] * 3 if user == 4 else []


class Nearest(Part):
    """The negatives of a user are the items from its number on, round and round."""

    name = "nearest"
    fills = frozenset({"negatives"})

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(negatives=self.choose_negatives)

    def choose_negatives(self, view: CohortView, counts: Longs) -> Ints:
        own = [np.arange(n) + user for user, n in zip(view.user, counts, strict=True)]
        return (np.concatenate(own) % N_ITEMS).astype(np.int32)


class Usual(Part):
    """Leaves the negatives to chance after all, and gives nothing."""

    name = "usual"
    fills = frozenset({"negatives", "samples"})

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(negatives=self.choose_negatives, samples=self.give_samples)

    def choose_negatives(self, view: CohortView, counts: Longs) -> Ints | None:
        return None

    def give_samples(self, view: CohortView, own: Ragged) -> Ragged | None:
        return None


def federation(name: str, *parts: type[Part], **train: Any) -> Federation:
    stream = make_stream(make_block(0, N_ITEMS, UNEVEN))
    return federate(stream, make_backbone(name), *parts, **({"batch_size": 8, "local_epochs": 2} | train))


def laid_out(*parts: type[Part], **train: Any) -> LocalModels:
    fed = federation("mf", *parts, **train)
    task = prepare_cohort(fed.parts, cohort(fed, started(fed)))
    return build_local_models(task.view, {}, fed.config.train, fed.draws, tasks=task.tasks)


def of_epoch(local: LocalModels, epoch: int, user: int) -> list[Sample]:
    """What one user learns from in an epoch."""
    own_values = [s for s in local.order[epoch] if local.user_ptr[user] <= s < local.user_ptr[user + 1]]
    return sorted((int(local.item[s]), float(local.label[s])) for s in own_values)


def hints_to(user: int, *parts: type[Hints]) -> list[Sample]:
    return [entry for part in parts for entry in part.hints_of(part, user)]  # type: ignore[arg-type]


def assert_matches_oracle(fed: Federation) -> None:
    progress = started(fed)
    view = cohort(fed, progress)
    slow = slow_round(view, fed.backbone, fed.config.train, fed.draws, parts=fed.parts)
    trained = train_once(fed, progress)
    after = averaged(fed, progress.server, trained)
    np.testing.assert_allclose(after.items, slow.items, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(trained.local.private, slow.private, rtol=1e-5, atol=1e-5)
    assert np.abs(trained.local.private - view.private).max() > 1e-3


# what is learnt from


@pytest.mark.parametrize("redraw", ["round", "epoch"])
@pytest.mark.parametrize("silos", [0, 3])
def test_extra_samples_join_the_users_own_in_every_epoch(redraw: str, silos: int) -> None:
    plain = laid_out(redraw=redraw, silos=silos, local_epochs=3)
    inputs = laid_out(Hints, Whispers, redraw=redraw, silos=silos, local_epochs=3)
    for place, user in enumerate(inputs.view.user.tolist()):
        hints = hints_to(user, Hints, Whispers)
        for epoch in range(3):
            assert of_epoch(inputs, epoch, place) == sorted(of_epoch(plain, epoch, place) + hints)


def test_extra_samples_are_shuffled_into_the_batches() -> None:
    """A client's samples fill several batches; those given come last before shuffling."""
    local = laid_out(Whispers)
    client = local.view.user.tolist().index(4)
    own = local.order[0, local.turn_ptr[client] : local.turn_ptr[client + 1]]
    at = np.flatnonzero(local.label[own] == np.float32(0.125))
    assert len(at) == 3
    assert at.tolist() != [len(own) - 3, len(own) - 2, len(own) - 1]


@pytest.mark.parametrize("redraw", ["round", "epoch"])
def test_chosen_negatives_take_the_place_of_drawn_ones(redraw: str) -> None:
    local = laid_out(Nearest, redraw=redraw, local_epochs=2)
    for place, user in enumerate(local.view.user.tolist()):
        likes, n = UNEVEN[user], 4 * len(UNEVEN[user])
        for epoch in range(2):
            skip = epoch * n if redraw == "epoch" else 0
            negatives = [((user + skip + k) % N_ITEMS, 0.0) for k in range(n)]
            assert of_epoch(local, epoch, place) == sorted([(i, 1.0) for i in likes] + negatives)


def test_part_receives_the_number_of_negatives_per_user() -> None:
    """Nobody is asked for negatives of a user who likes everything."""
    request = []

    class Asked(Part):
        name = "asked"
        fills = frozenset({"negatives"})

        def prepare(self, view: CohortView) -> LocalTask:
            return LocalTask(negatives=self.choose_negatives)

        def choose_negatives(self, view: CohortView, counts: Longs) -> Ints | None:
            request.append(counts.tolist())
            return None

    fed = federate(make_stream(make_block(0, 3, [[0, 1, 2], [1]])), make_backbone("mf"), Asked, negatives=2)
    train_once(fed, started(fed))
    assert request == [[0, 2]]


# the same answer, three ways


@pytest.mark.parametrize("parts", [(Hints,), (Hints, Whispers, Nearest)], ids=["samples", "samples and negatives"])
@pytest.mark.parametrize("redraw", ["round", "epoch"])
@pytest.mark.parametrize(("name", "stepper"), STEPPERS)
def test_a_stepper_gives_what_training_clients_one_by_one_gives(
    name: str, stepper: str, redraw: str, parts: tuple[type[Part], ...]
) -> None:
    assert_matches_oracle(federation(name, *parts, stepper=stepper, redraw=redraw))


@pytest.mark.parametrize("name", TRAINED)
def test_a_stepper_equals_training_clients_one_by_one_in_silos(name: str) -> None:
    assert_matches_oracle(federation(name, Hints, Nearest, silos=3))


def test_pairs_take_chosen_negatives_too() -> None:
    assert_matches_oracle(federation("mf", Nearest, objective="bpr", negatives=2))


@pytest.mark.parametrize("stepper", ["fused", "autograd"])
def test_a_soft_label_by_hand(stepper: str) -> None:
    """p = 1, q = 0.5 of both items, no negatives, lr 0.1, two items, so rows move at 0.2. sigmoid(0.5) = 0.622459.
    The positive's residual is -0.377541, that of the hint (label 0.25) 0.372459; each counts one half, so
    p = 1 - 0.1 * 0.5 * (-0.377541 + 0.372459) / 2 = 1.000127 and q = 0.5 + 0.2 * 0.377541 / 2 = 0.537754,
    0.5 - 0.2 * 0.372459 / 2 = 0.462754."""

    class Hint(Part):
        name = "hint"
        fills = frozenset({"samples"})

        def prepare(self, view: CohortView) -> LocalTask:
            return LocalTask(samples=self.give_samples)

        def give_samples(self, view: CohortView, own: Ragged) -> Ragged:
            return Ragged(np.array([0, 1]), np.array([1], np.int32), {"label": np.array([0.25], np.float32)})

    stream = make_stream(make_block(0, 2, [[0]]))
    fed = federate(stream, make_backbone("mf", dim=1, lr=0.1), Hint, stepper=stepper, negatives=0)
    progress = started(fed)
    progress.server.items[:], progress.clients.private[:] = 0.5, 1.0
    trained = train_once(fed, progress)
    assert trained.local.private[0, 0] == pytest.approx(1.000127, abs=1e-6)
    moved = trained.upload.values["rows"].value[:, 0]  # type: ignore[union-attr]
    assert 0.5 + moved == pytest.approx([0.537754, 0.462754], abs=1e-6)


# what must not matter


def numbers(fed: Federation) -> tuple[Floats, Floats]:
    progress = started(fed)
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress.server.items, progress.clients.private


@pytest.mark.parametrize("redraw", ["round", "epoch"])
@pytest.mark.parametrize("stepper", ["fused", "autograd"])
def test_part_without_samples_changes_no_bit(stepper: str, redraw: str) -> None:
    with_it, without = (numbers(federation("mf", *p, stepper=stepper, redraw=redraw)) for p in ((Usual,), ()))
    assert all(np.array_equal(first, other) for first, other in zip(with_it, without, strict=True))


def test_chunking_the_cohort_changes_no_bit() -> None:
    stream = make_stream(make_block(0, N_ITEMS, UNEVEN))
    wide, narrow = (
        numbers(federate(stream, make_backbone("mf"), Hints, Nearest, chunk=chunk, batch_size=8)) for chunk in (64, 2)
    )
    assert all(np.array_equal(first, other) for first, other in zip(wide, narrow, strict=True))


# what is refused


class Also(Nearest):
    name = "also"


class NoSuchItem(Hints):
    name = "no-such-item"

    def hints_of(self, user: int) -> list[Sample]:
        return [(N_ITEMS, 0.5)]


class TooSure(Hints):
    name = "too-sure"

    def hints_of(self, user: int) -> list[Sample]:
        return [(0, 1.5)]


class Unlabelled(Part):
    name = "unlabelled"
    fills = frozenset({"samples"})

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(samples=self.give_samples)

    def give_samples(self, view: CohortView, own: Ragged) -> Ragged:
        return Ragged.from_lists([[0]] * len(view.user))


class TooFew(Part):
    name = "too-few"
    fills = frozenset({"negatives"})

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(negatives=self.choose_negatives)

    def choose_negatives(self, view: CohortView, counts: Longs) -> Ints:
        return np.zeros(3, np.int32)


def assemble_and_check(*parts: type[Part], **train: Any) -> None:
    fed = federation("mf", *parts, **train)
    check_training(fed.backbone, fed.parts, fed.config.train)


@pytest.mark.parametrize(
    ("parts", "train", "why"),
    [
        ((Nearest, Also), {}, "'nearest' and 'also' both decide the negatives"),
        ((Hints,), {"objective": "bpr"}, "'hints' brings samples with soft labels"),
        ((Hints,), {"objective": "squared"}, "'hints' deals in probabilities"),
    ],
)
def test_settings_that_cannot_work_are_refused(parts: tuple[type[Part], ...], train: dict[str, Any], why: str) -> None:
    with pytest.raises(TacitaError, match=why):
        assemble_and_check(*parts, **train)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (NoSuchItem, "'no-such-item' gave samples of items outside 0 to 11"),
        (TooSure, "'too-sure' gave samples with a label outside"),
        (Unlabelled, "'unlabelled' must give"),
        (TooFew, "'too-few' chose 3 negatives where 76 were"),
    ],
)
def test_malformed_samples_are_refused_before_compiled_loops(part: type[Part], why: str) -> None:
    fed = federation("mf", part)
    with pytest.raises(TacitaError, match=why):
        train_once(fed, started(fed))
