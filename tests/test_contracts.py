"""What every backbone and every part must do, found through the registries, and what the server may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from helpers.contracts import (
    LEARNS,
    BackboneContract,
    PartContract,
    TrainedContract,
    all_numbers,
    backbone_for,
    checkerboard,
    federate_parts,
    numbers_in,
    refusal,
    run_blocks,
)
from helpers.oracle import (
    TRAINED,
    federate,
    make_backbone,
    make_block,
    make_stream,
    started,
)
from helpers.wiretap import (
    SEEN_BY_THE_SERVER,
    server_hooks,
    tap_server,
)
from tacita.core.device_lists import AppendedLists
from tacita.core.errors import TacitaError
from tacita.core.types import (
    Arrays,
    CohortView,
    LocalModels,
    Ragged,
    ServerState,
    SharedRecord,
    StateUpdate,
)
from tacita.federation.rounds import end_block, run_block, run_round
from tacita.messages import PerClientField, Spec, Total, Upload
from tacita.methods import Part, list_part_names, list_preset_names, list_preset_parts
from tacita.models import list_backbones
from tacita.round.capabilities import Privacy
from tacita.round.fields import PartFields
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask, TrainingOutcome

every_backbone = pytest.mark.parametrize("name", TRAINED)
every_model = pytest.mark.parametrize("name", list_backbones())
every_part = pytest.mark.parametrize("name", list_part_names())
every_preset = pytest.mark.parametrize("method", list_preset_names())


# backbones


@every_model
class TestModels(BackboneContract):
    pass


@every_backbone
class TestTrainedModels(TrainedContract):
    pass


def test_the_checkerboard_cannot_be_learnt_where_everybody_gets_one_ranking() -> None:
    """A shared NCF layer ranks alike for all, and what is right for even users is wrong for odd ones."""
    _, after = checkerboard(make_backbone("ncf", share_mlp=True, **LEARNS["ncf"]), rounds=20)
    assert after < 0.7


# parts


@every_part
class TestParts(PartContract):
    pass


class CountsRounds(Part):
    """How often each device has trained."""

    name = "counts-rounds"

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [StateSpec("rounds", np.zeros(n_users, np.int64))]

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        return TrainingOutcome(state={"rounds": view.parts[self.name]["rounds"] + 1})


@pytest.mark.parametrize(("resume_from", "vectors_of"), [("best", 1), ("last", 4)])
def test_a_block_ends_with_the_device_arrays_of_its_best_round(resume_from: str, vectors_of: int) -> None:
    """With one candidate to rank every round scores 1, so round 1 stays the best of four."""
    stream = make_stream(make_block(0, 2, [[0]], valid=[[1]]))
    fed = federate(stream, make_backbone("mf"), CountsRounds, rounds=4, resume_from=resume_from)
    progress, vectors = started(fed), []
    run_block(fed, progress, lambda report, now: vectors.append(now.clients.private.copy()))
    assert progress.best_round == 1
    assert progress.clients.parts["counts-rounds"]["rounds"].tolist() == [4]
    end_block(fed, progress)
    assert progress.clients.parts["counts-rounds"]["rounds"].tolist() == [1]
    assert np.array_equal(progress.clients.private, vectors[vectors_of - 1])


class WritesOn(Part):
    """A diary that is written on by every hook of a round, and what each of them saw of it."""

    name = "writes-on"
    observes_only = True
    seen: ClassVar[list[list[list[int]]]] = []

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [StateSpec("diary", Ragged.empty(n_users))]

    def line(self, view: CohortView, what: int) -> StateUpdate:
        n = len(view.user)
        return {"diary": AppendedLists(np.arange(n + 1, dtype=np.int64), np.full(n, 10 * view.round + what, np.int32))}

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(state=self.line(view, 1))

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        return TrainingOutcome(state=self.line(view, 2))

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        diary = view.lists[self.name]["diary"]
        self.seen.append([diary.row(r).tolist() for r in range(len(diary))])
        return upload, self.line(view, 3)


def test_appended_lists_reach_every_later_hook_once() -> None:
    fed = federate(make_stream(make_block(0, 5, [[0, 1], [2], [3, 4]])), make_backbone("mf"), WritesOn, rounds=2)
    progress = started(fed)
    WritesOn.seen.clear()
    for _ in range(2):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    assert WritesOn.seen == [[[1, 2]] * 3, [[1, 2, 3, 11, 12]] * 3]
    diary = progress.clients.read_part_lists(np.arange(3))["writes-on"]["diary"]
    assert [diary.row(r).tolist() for r in range(3)] == [[1, 2, 3, 11, 12, 13]] * 3


@every_model
@every_preset
def test_every_method_runs_two_blocks_on_every_backbone_or_is_refused(method: str, name: str) -> None:
    specs = list_preset_parts(method)
    refused = refusal(specs, name)
    if refused is not None:
        with pytest.raises(TacitaError, match=refused):
            federate_parts(specs, name)
        return
    fed = federate_parts(specs, name)
    progress = run_blocks(fed)
    assert len(progress.results) == 2
    for result in progress.results:
        assert result["rounds"] == min(2, fed.learner.rounds) or name.startswith("tally")
        assert np.isfinite(list(numbers_in(result))).all()
    assert all(np.isfinite(v).all() for v in all_numbers(progress).values())
    assert progress.server.items.shape[0] == 120


# the boundary


UNHEARD = {"purge"}  # only a withdrawal asks for it


def test_server_hooks_take_only_server_values() -> None:
    of_the_server = {"server_block_start", "broadcast", "decode", "server_step", "server_block_end", "noise_sum"}
    assert of_the_server <= set(server_hooks())
    of_devices = {"encode", "weigh", "after_training", "serve", "on_block_start", "on_block_end", "state", "on_device"}
    assert not of_devices & set(server_hooks())


@every_backbone
def test_nothing_of_a_device_reaches_the_server_under_fedavg(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tap = tap_server(monkeypatch, [], name)
    assert set(server_hooks()) - tap.hooks <= UNHEARD
    assert len(tap.vectors) == 2 * 10 + 2 * 11
    assert any(path.startswith("decode[1].sums['rows']") for path, _ in tap.arrays)
    assert tap.leaks() == []


@every_preset
def test_nothing_of_a_device_reaches_the_server_under_any_method(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    specs = list_preset_parts(method)
    tap = tap_server(monkeypatch, specs, backbone_for(specs))
    assert set(server_hooks()) - tap.hooks <= UNHEARD
    assert tap.leaks() == []


kept_histories: list[Any] = []
kept_views: list[Any] = []


class SendsVectors(Part):
    name = "sends-vectors"

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(extra=(Spec("vector", (6,), seen="each"),))

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        return TrainingOutcome(extras={"vector": local.private.copy()})


class SendsHistories(Part):
    name = "sends-histories"

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        return server.with_part(self.name, {"items": kept_histories[0]})

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        kept_histories.append(view.train.ids)
        return upload, {}


class SendsItself(Part, Privacy):
    name = "sends-itself"

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        return replace(total, each={"view": kept_views[0]})

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        kept_views.append(view)
        return upload, {}


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (SendsVectors, "holds a private vector"),
        (SendsHistories, "shares memory with a device"),
        (SendsItself, "is a CohortView"),
    ],
)
def test_wiretap_detects_a_part_that_leaks(monkeypatch: pytest.MonkeyPatch, leak: type[Part], message: str) -> None:
    result = tap_server(monkeypatch, [], "mf", leak).leaks()
    assert any(message in entry for entry in result)


@pytest.mark.parametrize("kind", SEEN_BY_THE_SERVER)
def test_server_values_hold_only_arrays_and_numbers(kind: type) -> None:
    def plain(hint: Any) -> bool:
        if get_origin(hint) is dict:
            key, value = get_args(hint)
            return key is str and plain(value)
        return hint in (int, float, PerClientField, SharedRecord) or get_origin(hint) is np.ndarray

    hints = get_type_hints(kind)
    assert set(hints) == {field.name for field in fields(kind)}
    assert {name: hint for name, hint in hints.items() if not plain(hint)} == {}
