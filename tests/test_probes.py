"""Small, real parts and learners of the kinds that are still to come, through devices here and through nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import cohort, federate, make_backbone, make_block, make_stream, started, train_once
from test_live_parity import close, close_all, config_of, lab, make_site, play

from tacita.config import RunConfig, validated
from tacita.errors import TacitaError
from tacita.fields import Rows, Spec, Total, Upload
from tacita.learners import Answer, Learner
from tacita.learners import base as learners_base
from tacita.methods import base as methods_base
from tacita.methods.base import Part
from tacita.rounds import run_round
from tacita.types import Arrays, CohortView, Doubles, ServerState

LISTS = [[0, 1, 2], [2, 3], [4], [0, 4, 5, 6], [1, 6]]


class Budget(Part):
    """Every release costs one; who has nothing left sends nothing, and goes on being served."""

    name = "probe-budget"
    works_with = ("rows", "statistic")

    def device_arrays(self, n_users: int) -> Arrays:
        return {"left": np.full(n_users, 2.0)}

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        left = view.parts[self.name]["left"]
        spent = left < 1
        return upload.without(spent), {"left": np.where(spent, left, left - 1)}


class Clip(Part):
    """One bound on the length of everything a client sends, and noise on every number of the sum."""

    name = "probe-clip"
    works_with = ("rows", "statistic")
    most, noise = 0.05, 0.0
    seen: list[Doubles] = []

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        clipped = upload.scaled(np.minimum(1.0, self.most / np.maximum(upload.norms(), 1e-12)))
        self.seen.append(clipped.norms())
        return clipped, {}

    def encode_sum(self, server: ServerState, total: Total) -> Total:
        if not self.noise:
            return total
        draws = np.random.default_rng(server.round)
        return total.with_sums({k: v + self.noise * draws.normal(size=v.shape) for k, v in total.sums.items()})


class ByLength(Part):
    """Weights that travel: [s, s * value] with s = 1 / (1 + items)."""

    name = "probe-weight"

    def weight(self, view: CohortView, upload: Upload) -> Doubles:
        return 1.0 / (1.0 + np.diff(view.train.ptr[view.user_ptr]))


class Scores(Learner):
    """Clients send scores of their items, the server sees each upload and keeps the mean per item."""

    name = "probe-scores"

    def check(self) -> None:
        pass

    @property
    def rounds(self) -> int:
        return 1

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return ("scores",)

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        return (Spec("scores", (len(server.items),), seen="each", most=1.0, least=0.0),)

    def answer(self, view: CohortView, question: str) -> Answer:
        client = np.repeat(np.arange(view.n_clients, dtype=np.int32), np.diff(view.train.ptr[view.user_ptr]))
        told = Rows(client, view.train.ids, np.full(len(client), 0.25) + 0.5 * (client % 2))
        return Answer(Upload({"scores": told}, np.ones(view.n_clients), view.client_keys))

    def learn(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        told = total.each["scores"].value
        assert isinstance(told, Rows)
        n = len(server.items)
        mean = np.bincount(told.item, told.value, n) / np.maximum(np.bincount(told.item, minlength=n), 1)
        items = server.items.copy()
        items[:, 0] = mean
        return server.with_items(items).with_part("seen", {"sender": total.each["scores"].sender})


class SendsScores(Part):
    name = "probe-sends-scores"
    learner = "probe-scores"
    works_with = ("probe-scores",)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (Budget, Clip, ByLength, SendsScores):
        monkeypatch.setitem(methods_base._PARTS, part.name, part)
    monkeypatch.setitem(learners_base._LEARNERS, Scores.name, Scores)
    Clip.seen.clear()


def with_parts(name: str, *parts: type[Part], rounds: int = 3) -> RunConfig:
    values = config_of(name, rounds).model_dump(mode="json") | {"parts": [{"name": part.name} for part in parts]}
    return validated(RunConfig, values, "the test")


def live_and_lab(folder: Path, config: RunConfig) -> tuple[Arrays, Any, Any]:
    site = make_site(folder, config)
    play(site)
    return site.arrays(), lab(config), site


def small(*parts: type[Part], **more: Any) -> Any:
    return federate(make_stream(make_block(0, 7, LISTS)), make_backbone("mf"), *parts, **more)


# A budget on the device


def test_who_has_spent_everything_sends_nothing_more() -> None:
    fed = small(Budget)
    progress = started(fed)
    progress.clients.arrays["parts/probe-budget/left"][:] = [2.0, 1.0, 0.0, 2.0, 1.0]
    moved = []
    for _ in range(3):
        before = progress.server.items.copy()
        report = run_round(fed, progress)
        moved.append((before != progress.server.items).any(1))
        assert report.clients == 5  # they take part, and are served, all the same
    left = progress.clients.parts["probe-budget"]["left"]
    assert left.tolist() == [0, 0, 0, 0, 0]
    assert moved[0].any()
    assert moved[1].any()
    assert not moved[2].any()


@pytest.mark.parametrize("name", ["fedavg", "tally"])
def test_a_budget_is_kept_on_nodes_as_in_the_lab(tmp_path: Path, name: str) -> None:
    arrays, whole, site = live_and_lab(tmp_path, with_parts(name, Budget))
    assert close(arrays["now/items"], whole.server.items) or name == "tally"
    for head, value in whole.server.heads.items():
        assert close(arrays[f"now/heads/{head}"], value)
    left = whole.clients.parts["probe-budget"]["left"]
    assert left.min() == 0
    held = site.transport.members[1].store.devices("r", "now")[1]["parts/probe-budget/left"]
    assert set(held.tolist()) <= {0.0, 1.0, 2.0}
    assert 0.0 in held
    close_all(site)


# Clip and noise on every learner


@pytest.mark.parametrize("name", ["fedavg", "tally"])
def test_a_clip_bounds_all_that_a_client_sends(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clip, "most", 0.05 if name == "fedavg" else 4.0)
    arrays, whole, site = live_and_lab(tmp_path, with_parts(name, Clip))
    lengths = np.concatenate(Clip.seen)
    assert lengths.max() <= Clip.most * (1 + 1e-6)
    assert np.isclose(lengths, Clip.most, rtol=1e-5).any()
    if name == "fedavg":  # a node leaves rare items out of statistics, and clipped people count less than one
        assert close(arrays["now/items"], whole.server.items)
    plain = lab(with_parts(name))
    for head, value in plain.server.heads.items():
        if head in ("weights",):
            assert value.shape != whole.server.heads[head].shape or not np.array_equal(value, whole.server.heads[head])
    close_all(site)


def test_noise_reaches_every_number_of_a_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clip, "noise", 0.01)
    monkeypatch.setattr(Clip, "most", 1e9)
    loud, quiet = (lab(with_parts("tally", *parts)) for parts in ((Clip,), ()))
    with_noise, without = (one.server.parts["tally"]["total"] for one in (loud, quiet))
    assert len(with_noise) > len(without)  # pairs that nobody has are no longer zero


# Weights


def test_a_weighted_mean_is_the_sum_of_weighted_values_over_the_sum_of_weights() -> None:
    fed = small(ByLength)
    progress = started(fed)
    view, sent = cohort(fed, progress), train_once(fed, progress).upload.values["rows"]
    weight = 1.0 / (1.0 + view.train.counts())
    want = progress.server.items.astype(np.float64)
    np.add.at(want, sent.item, (weight[sent.client] / weight.sum())[:, None] * sent.value)
    run_round(fed, progress)
    np.testing.assert_allclose(progress.server.items, want, rtol=1e-5, atol=1e-7)


def test_weights_travel_from_nodes(tmp_path: Path) -> None:
    arrays, whole, site = live_and_lab(tmp_path, with_parts("fedavg", ByLength))
    assert close(arrays["now/items"], whole.server.items)
    close_all(site)


# Uploads that are seen each by itself


def test_a_learner_that_sees_single_uploads() -> None:
    fed = small(SendsScores)
    assert fed.learner.name == "probe-scores"
    progress = started(replace(fed, chunk=2))
    run_round(replace(fed, chunk=2), progress)
    assert sorted(progress.server.parts["seen"]["sender"].tolist()) == sorted(fed.stream.user_keys.tolist())
    assert progress.server.items[5, 0] == pytest.approx(0.75)


def test_nodes_do_not_send_people_one_by_one(tmp_path: Path) -> None:
    site = make_site(tmp_path, with_parts("fedavg", SendsScores))
    with pytest.raises(TacitaError, match="sums only"):
        play(site)
    close_all(site)


# What makes no sense


def test_senseless_combinations_are_refused_with_a_sentence() -> None:
    with pytest.raises(TacitaError, match=r"part 'replay' changes local training.*sends a statistic"):
        lab(validated(RunConfig, config_of("tally").model_dump(mode="json") | {"method": "f3crec"}, "the test"))
    with pytest.raises(TacitaError, match=r"part 'probe-budget'.*sends a probe-scores, which it cannot change"):
        lab(with_parts("tally", Budget, SendsScores))


@pytest.mark.parametrize("name", ["fedavg", "tally"])
def test_exact_sums_give_what_plain_ones_give(name: str) -> None:
    config = config_of(name)
    ideal = config.model_copy(update={"train": config.train.model_copy(update={"aggregator": "ideal"})})
    plain, exact = lab(config), lab(ideal)
    assert close(exact.server.items, plain.server.items, 1e-4) or name == "tally"
    for head, value in plain.server.heads.items():
        if value.dtype.kind == "f":
            assert close(exact.server.heads[head], value, 1e-4)
