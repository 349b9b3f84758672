"""What every backbone and every part must do, found through the registries, and what the server may see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from oracle import (
    TRAINED,
    cohort,
    federate,
    heads_of,
    make_backbone,
    make_block,
    make_stream,
    started,
    train_once,
)

from tacita.core.config import validate_model
from tacita.core.device_lists import AppendedLists
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.files import flatten_parts, read_arrays, write_arrays
from tacita.core.types import (
    AnyArray,
    Arrays,
    Block,
    BlockStream,
    CohortView,
    Floats,
    LocalModels,
    Ragged,
    ServerState,
    SharedRecord,
    StateUpdate,
)
from tacita.federation.rounds import Progress, begin_block, end_block, run_block, run_round, run_stream, start_run
from tacita.federation.scoring import DeviceScorer
from tacita.federation.state_arrays import pack_progress, read_progress
from tacita.messages import DenseArrays, PerClientField, SparseRows, Spec, Total, Upload
from tacita.methods import Part, RunContext, build_parts, part_class, part_names, preset_names, preset_parts
from tacita.models import Backbone, Context, backbone_class, backbone_names
from tacita.round import registry as methods_base
from tacita.round.broadcast import Audience
from tacita.round.capabilities import Privacy, Unlearning
from tacita.round.device_state import DeviceState, flatten_devices
from tacita.round.fields import PartFields
from tacita.round.part import ALL_HOOKS, CAPABILITIES
from tacita.round.plan import Federation
from tacita.round.state import StateSpec, initial_state
from tacita.round.task import LocalTask, TrainingOutcome

every_backbone = pytest.mark.parametrize("name", TRAINED)
every_model = pytest.mark.parametrize("name", backbone_names())
every_part = pytest.mark.parametrize("name", part_names())
every_preset = pytest.mark.parametrize("method", preset_names())
Specs = list[dict[str, Any]]


def two_blocks() -> BlockStream:
    """Ten users and 110 items, then two more users and ten more items; user 3 stays away from block 1."""
    rng = np.random.default_rng(7)

    def block(index: int, n_users: int, n_items: int, known: int) -> Block:
        mine = [rng.choice(n_items, 8, replace=False).tolist() for _ in range(n_users)]
        if index == 1:
            mine[3] = []
        return make_block(index, n_items, [m[:5] for m in mine], [m[5:6] for m in mine], [m[6:] for m in mine], known)

    return make_stream(block(0, 10, 110, 0), block(1, 12, 120, 10))


NEEDS: dict[str, dict[str, Any]] = {
    "retraction": {"aggregation": "fixed"},
    "dp-fedavg": {"aggregation": "fixed"},
    "virtual-ratings": {"objective": "squared", "batch_size": 1000},
}
"""Settings without which a part refuses to work."""

QUIET: dict[str, dict[str, Any]] = {"dpps": {"clip": 1e-4}, "dp-fedavg": {"clip": 0.01}}
"""Options for ten people: noise that hides somebody among so few would be all there is."""


def with_parts(specs: Specs, backbone: str = "mf", **train: Any) -> Federation:
    """The two blocks under a method."""
    needed = {k: v for spec in specs for k, v in NEEDS.get(spec["name"], {}).items()}
    fed = federate(two_blocks(), make_backbone(backbone), **{"rounds": 2, "batch_size": 8} | needed | train)
    quiet = [{**QUIET.get(spec["name"], {}), **spec} for spec in specs]
    parts = build_parts(quiet, RunContext(fed.backbone, fed.draws, fed.config.train))
    made = methods_base.wrap_run(replace(fed, parts=parts))
    made.learner.check()
    for part in parts:
        part.check(fed.stream.blocks[0].n_items)
    return made


def refusal(specs: Specs, backbone: str) -> str | None:
    """What a backbone says to parts that cannot work with it."""
    names = {spec["name"] for spec in specs}
    if backbone_class(backbone).learner == "statistic" and "prediction-transfer" in names:
        return "trains nothing on devices"
    if backbone_class(backbone).learner == "statistic" and names - {"dpps"}:
        return "sends a statistic, which it cannot change"
    alike = not any("server" in spec for spec in specs)
    if backbone in ("ego", "fedpergnn", "interest") and "prediction-transfer" in names and alike:
        return "has no central model"
    if backbone_class(backbone).reads_context and names & {"replay", "error-memory", "proxies"}:
        return "scores with private vectors alone"
    if "fine-tuning" in names and len(backbone_class(backbone).phases) > 1:
        return "moves a whole model at once"
    if "virtual-ratings" in names and backbone != "mf":
        return "predicts p . q, which"
    if "neighbours" in names and backbone != "fedpergnn":
        return "brings vectors that backbone '.*' does not read; use backbone 'fedpergnn'"
    if "replay" in names and make_backbone(backbone).shared():
        return "ranks with private parameters only"
    if "delta-replay" in names and make_backbone(backbone).shared():
        return "goes over item rows again"
    if any(spec.get("contrast_users") for spec in specs):
        made = make_backbone(backbone)
        return None if [*made.layout.values()] == [made.item_width] else "compares people's vectors with item rows"
    return None


def backbone_for(specs: Specs) -> str:
    """A model that these parts work with."""
    return "fedpergnn" if {"name": "neighbours"} in specs else "mf"


def run(fed: Federation) -> Progress:
    progress = start_run(fed)
    run_stream(fed, progress, lambda report, now: None)
    return progress


def all_numbers(progress: Progress) -> Arrays:
    """Everything that both sides hold."""
    server, clients = progress.server, progress.clients
    heads = {f"heads/{k}": v for k, v in server.heads.items()}
    sides = flatten_parts(server.parts, "server/") | flatten_devices(clients, "device/")
    return {"items": server.items, **heads, **sides}


def assert_same_numbers(one: Progress, other: Progress) -> None:
    mine, yours = all_numbers(one), all_numbers(other)
    assert mine.keys() == yours.keys()
    for name in mine:
        assert mine[name].dtype == yours[name].dtype, name
        assert np.array_equal(mine[name], yours[name]), name
    assert one.results == other.results


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from numbers_in(one)
    elif value is not None and not isinstance(value, str):
        yield float(value)


# backbones


LEARNS: dict[str, dict[str, Any]] = {
    "mf": {"lr": 0.3, "init_std": 0.05},
    "pfedrec": {"dim": 8, "lr": 0.05, "lr_eta": 15.0},
    "ncf": {"dim": 8, "lr": 0.05, "lr_eta": 15.0},
    "ego": {"dim": 8, "lr": 1.0, "item_lr_scale": 10.0},
    "fedpergnn": {"dim": 8, "lr": 0.3, "item_lr_scale": 10.0, "init_std": 0.1},
    "tally": {"ridge": 5.0, "min_item": 0, "keep": 0},
    "tally-order": {"ridge": 5.0, "min_item": 0, "keep": 0},
    "neumf": {"dim": 8, "lr": 1.0, "item_lr_scale": 3.0, "init_std": 0.3, "tower": [16, 8]},
    "neuncf": {"dim": 8, "lr": 0.3, "item_lr_scale": 10.0, "init_std": 0.3, "tower": [16, 8]},
    "interest": {"dim": 8, "lr": 0.3, "item_lr_scale": 10.0, "init_std": 0.3, "tower": [16, 8], "last": 6, "mu": 0.1},
}


LISTS = Ragged.from_lists([[0, 7], [1], [], [0, 1, 2, 3], [4, 8, 5], [6]])  # what the six users' models read


class BackboneContract:
    """What holds of every model, however it learns. Subclass with a `name`, or let the registry supply it."""

    def make(self, name: str) -> Backbone:
        return make_backbone(name)

    def make_learner(self, name: str) -> Backbone:
        """With rates at which a small catalogue is learnt in a few dozen rounds."""
        return make_backbone(name, **LEARNS.get(name, {}))

    def start(self, name: str) -> tuple[Backbone, Floats, Arrays, Floats]:
        """A model, six users' vectors, shared parameters and the rows of nine items."""
        backbone, keys, draws = self.make(name), derive_keys(f"one{k}" for k in range(9)), Draws(2)
        return (
            backbone,
            backbone.init_private(draws, keys[:6]),
            backbone.init_heads(draws),
            backbone.init_items(draws, keys),
        )

    def test_its_named_slices_cover_a_private_vector_in_order(self, name: str) -> None:
        backbone, private, _, _ = self.start(name)
        cut = backbone.named(private)
        assert {k: v.shape[1] for k, v in cut.items()} == backbone.layout
        assert np.array_equal(np.concatenate([*cut.values(), private[:, :0]], axis=1), private)

    def test_it_refuses_an_unknown_option_by_name(self, name: str) -> None:
        with pytest.raises(TacitaError, match="dimm"):
            validate_model(backbone_class(name).Config, {"dimm": 4}, f"backbone '{name}'")

    def test_its_own_start_fits_it_as_if_it_came_from_elsewhere(self, name: str) -> None:
        backbone, _, heads, items = self.start(name)
        assert backbone.heads_fit(heads, len(items))
        assert not backbone.heads_fit({**heads, "more": np.zeros(1, np.float32)}, len(items))

    def test_it_learns_the_checkerboard(self, name: str) -> None:
        """Even users like even items. Two likes of each user are held out: only other users can teach them."""
        before, after = checkerboard(self.make_learner(name))
        assert before < 0.8
        assert after > 0.97


class TrainedContract(BackboneContract):
    """What holds of models that train item rows on devices."""

    def users(self, name: str) -> tuple[Backbone, dict[str, Any], Arrays, Floats, Floats | None]:
        """The six users as the model represents them, heads for each, a row for each, and which are in contexts."""
        backbone, private, heads, items = self.start(name)
        repeated = {k: np.stack([v] * 6) for k, v in heads.items()}
        context = Context.from_lists(LISTS, items) if backbone.reads_context else None
        inside = LISTS.holds(np.arange(6), np.arange(6)).astype(np.float32) if backbone.reads_context else None
        rep = backbone.represent(backbone.named(private), repeated, context)
        return backbone, rep, repeated, items[:6], inside

    def test_it_starts_with_finite_arrays_of_the_shapes_it_declares(self, name: str) -> None:
        backbone, private, heads, items = self.start(name)
        assert private.shape == (6, backbone.private_width)
        assert items.shape == (9, backbone.item_width)
        assert {k: v.shape for k, v in heads.items()} == backbone.shared()
        for made in (private, items, *heads.values()):
            assert made.dtype == np.float32
            assert np.isfinite(made).all()

    def test_it_names_a_positive_rate_for_everything_that_moves(self, name: str) -> None:
        backbone = self.make(name)
        rates = backbone.rates(50)
        assert rates.keys() == {*backbone.layout, *backbone.shared(), "rows"}
        assert min(rates.values()) > 0
        assert sorted(kind for phase in backbone.phases for kind in phase) == ["private", "rows"]

    def test_it_scores_the_same_with_numpy_and_torch(self, name: str) -> None:
        backbone, rep, heads, rows, inside = self.users(name)
        by_numpy = backbone.score(rep, heads, rows, inside)
        _, private, _, items = self.start(name)
        tensors = {k: torch.from_numpy(v) for k, v in heads.items()}
        context = None
        if backbone.reads_context:
            user, count = torch.from_numpy(LISTS.rows()), torch.from_numpy(LISTS.counts()).float()
            context = Context(LISTS.ptr, user, count, torch.from_numpy(items[LISTS.ids]), {})
        seen = backbone.represent(backbone.named(torch.from_numpy(private)), tensors, context)
        among = None if inside is None else torch.from_numpy(inside)
        by_torch = backbone.score(seen, tensors, torch.from_numpy(rows), among)
        assert by_numpy.shape == (6,)
        np.testing.assert_allclose(by_numpy, by_torch.numpy(), rtol=1e-5, atol=1e-6)

    def test_its_reading_is_its_score_where_it_has_one(self, name: str) -> None:
        backbone, private, shared, _ = self.start(name)
        _, rep, heads, rows, inside = self.users(name)
        reading = backbone.reading(private, shared)
        assert reading is not None or backbone.affine_kind is None
        if reading is not None:
            a, c = reading
            np.testing.assert_allclose((a * rows).sum(1) + c, backbone.score(rep, heads, rows), rtol=1e-5, atol=1e-5)
        outside = backbone.reading_outside(rep, shared, rows)
        if outside is not None:
            a, c, read = outside
            scored = backbone.score(rep, heads, rows, None if inside is None else 0 * inside)
            np.testing.assert_allclose((a * read).sum(1) + c, scored, rtol=1e-5, atol=1e-5)

    def test_it_reads_a_context_if_and_only_if_it_says_so(self, name: str) -> None:
        fed = federate(make_stream(make_block(0, 6, [[0, 1], [2, 3]])), backbone := self.make(name))
        context = backbone.context(cohort(fed, started(fed)))
        assert (context is not None) == backbone.reads_context
        if context is not None:
            assert len(context) == 2

    def test_a_round_moves_every_parameter_it_declares(self, name: str) -> None:
        backbone = self.make(name)
        parts = [part_class("neighbours")] if name == "fedpergnn" else []  # without, some of it has nothing to do
        fed = federate(make_stream(make_block(0, 6, [[0, 1], [1, 3], [1, 2]])), backbone, *parts)
        progress = started(fed)
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        trained = train_once(fed, progress)
        moved = backbone.named(trained.local.private - progress.clients.private)
        assert all(np.abs(one).max() > 0 for one in moved.values())
        assert all(np.abs(one).max() > 0 for one in heads_of(trained.upload).values())
        assert (np.abs(trained.upload.values["rows"].value).max(1) > 0).all()

    def test_it_learns_the_checkerboard_in_pairs(self, name: str) -> None:
        before, after = checkerboard(self.make_learner(name), objective="bpr")
        assert before < 0.8
        assert after > 0.97


def checkerboard(
    backbone: Backbone, n_users: int = 12, n_items: int = 16, rounds: int = 60, objective: str = "bce"
) -> tuple[float, float]:
    """Share of (held-out item of the user's colour, item of the other colour) pairs in the right order."""
    likes = [np.roll(np.arange(u % 2, n_items, 2), u // 2) for u in range(n_users)]
    train, held = [one[2:].tolist() for one in likes], [one[:2].tolist() for one in likes]
    fed = federate(make_stream(make_block(0, n_items, train)), backbone, rounds=rounds, objective=objective)
    progress = started(fed)

    def right(now: Progress) -> float:
        down = fed.broadcast_serving(now.server)
        scorer = DeviceScorer(fed, now.server, now.clients, fed.stream.blocks[0], fed.stream.user_keys, down, "test")
        scores = scorer(np.arange(n_users, dtype=np.int32))
        pairs = [scores[u, held[u]][:, None] > scores[u, (u + 1) % 2 :: 2][None, :] for u in range(n_users)]
        return float(np.mean(pairs))

    before = right(progress)
    run_block(fed, progress, lambda report, now: None)
    return before, right(progress)


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


class PartContract:
    """Subclass with a `name` parameter, or let the registry supply it. Options: the part's defaults."""

    def federation(self, name: str, **train: Any) -> Federation:
        return with_parts([{"name": name}], backbone_for([{"name": name}]), **train)

    def test_it_is_found_by_its_name_and_refuses_an_unknown_option(self, name: str) -> None:
        fed = self.federation(name)
        assert [p.name for p in fed.parts] == [name]
        assert part_class(name).name == name
        with pytest.raises(TacitaError, match="no_such_option"):
            build_parts([{"name": name, "no_such_option": 1}], fed.parts[0].context)

    def test_a_users_device_arrays_do_not_depend_on_how_many_users_there_are(self, name: str) -> None:
        (part,) = self.federation(name).parts
        few, many = initial_state(part.state(4)), initial_state(part.state(7))
        assert few.keys() == many.keys()
        for k, v in few.items():
            assert len(v) == 4
            if isinstance(v, Ragged):
                assert len(many[k]) == 7
                assert len(v.ids) == 0
                continue
            assert many[k].dtype == v.dtype
            assert np.array_equal(many[k][:4], v)

    def test_it_runs_both_blocks_and_keeps_the_kinds_it_declared(self, name: str) -> None:
        fed = self.federation(name)
        progress = run(fed)
        assert all(np.isfinite(list(numbers_in(one))).all() for one in progress.results)
        declared = initial_state(fed.parts[0].state(12))
        lists = {k for k, v in declared.items() if isinstance(v, Ragged)}
        assert progress.clients.part_lists(np.arange(12)).get(name, {}).keys() == lists
        held = progress.clients.parts.get(name, {})
        kinds = {k: (v.shape, v.dtype) for k, v in declared.items() if k not in lists}
        assert {k: (v.shape, v.dtype) for k, v in held.items()} == kinds
        for k, v in all_numbers(progress).items():
            assert isinstance(v, np.ndarray), k
            assert v.dtype != object, k

    def test_it_keeps_nothing_on_itself(self, name: str) -> None:
        fed = self.federation(name)
        before = dict(vars(fed.parts[0]))
        run(fed)
        assert vars(fed.parts[0]) == before

    def test_it_does_not_see_how_clients_are_chunked(self, name: str) -> None:
        fed = self.federation(name)
        assert_same_numbers(run(fed), run(replace(fed, chunk=3)))

    def test_it_goes_on_from_a_copy_as_if_nothing_had_happened(self, name: str, tmp_path: Path) -> None:
        """After every block and in the middle of one: fresh part objects, arrays that were on disk."""
        whole = run(self.federation(name))
        for stop in (1, 2, 3):
            fed, progress, rounds = self.federation(name), None, 0

            def on_round(report: Any, now: Progress, stop: int = stop) -> None:
                nonlocal rounds
                rounds += 1
                if rounds == stop:
                    raise InterruptedError

            progress = start_run(fed)
            with pytest.raises(InterruptedError):
                run_stream(fed, progress, on_round)
            restored = through_a_file(progress, tmp_path / f"{stop}.safetensors")
            fed = self.federation(name)
            run_stream(fed, restored, lambda report, now: None)
            assert_same_numbers(restored, whole)

    def test_it_leaves_the_state_it_is_given_as_it_was(self, name: str) -> None:
        """Server states are values: the best round must still be there after later rounds."""
        fed = self.federation(name, rounds=3)
        progress = start_run(fed)
        seen: list[tuple[ServerState, Arrays]] = []

        def on_round(report: Any, now: Progress) -> None:
            seen.append((now.server, {k: v.copy() for k, v in server_arrays(now.server).items()}))

        run_stream(fed, progress, on_round)
        assert len(seen) == 6
        for server, copy in seen:
            for k, v in server_arrays(server).items():
                assert np.array_equal(v, copy[k]), k

    def test_it_does_nothing_to_a_device_that_is_away(self, name: str) -> None:
        """User 3 has no data in block 1."""
        fed = self.federation(name)
        progress = started(fed)
        run_block(fed, progress, lambda report, now: None)
        end_block(fed, progress)
        private = progress.clients.private[3].copy()
        held = {k: v[3].copy() for k, v in progress.clients.parts.get(name, {}).items()}
        begin_block(fed, progress, 1)
        run_block(fed, progress, lambda report, now: None)
        end_block(fed, progress)
        assert np.array_equal(progress.clients.private[3], private)
        for k, v in held.items():
            assert np.array_equal(progress.clients.parts[name][k][3], v), k

    @pytest.mark.parametrize("settings", [{"silos": 3}, {"participation": {"kind": "fraction", "rate": 0.5}}], ids=str)
    def test_it_runs_in_silos_and_with_few_participants(self, name: str, settings: dict[str, Any]) -> None:
        alone = ("prediction-transfer", "neighbours", "sharing", "contribution")
        if name in alone and "silos" in settings:
            with pytest.raises(TacitaError, match="clients that are one user each"):
                self.federation(name, **settings)
            return
        budgets = {"dpps": {"silos"}, "dp-fedavg": {"silos", "participation"}}
        if settings.keys() & budgets.get(name, set()):  # whom an epsilon is about, and how people are drawn
            with pytest.raises(
                TacitaError, match=r"train\.in_silos = 'apart'|train\.silos = 0|each client being drawn by itself"
            ):
                self.federation(name, **settings)
            return
        progress = run(self.federation(name, **settings))
        assert all(np.isfinite(v).all() for v in all_numbers(progress).values())


def server_arrays(server: ServerState) -> Arrays:
    return {"items": server.items, **server.heads, **flatten_parts(server.parts, "parts/")}


def through_a_file(progress: Progress, path: Path) -> Progress:
    """Everything that both sides hold, written and read back."""
    arrays, note = pack_progress(progress)
    write_arrays(path, arrays, note)
    return read_progress(*read_arrays(path))


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


def test_what_is_written_on_is_there_once_in_every_later_hook() -> None:
    fed = federate(make_stream(make_block(0, 5, [[0, 1], [2], [3, 4]])), make_backbone("mf"), WritesOn, rounds=2)
    progress = started(fed)
    WritesOn.seen.clear()
    for _ in range(2):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    assert WritesOn.seen == [[[1, 2]] * 3, [[1, 2, 3, 11, 12]] * 3]
    held = progress.clients.part_lists(np.arange(3))["writes-on"]["diary"]
    assert [held.row(r).tolist() for r in range(3)] == [[1, 2, 3, 11, 12, 13]] * 3


@every_model
@every_preset
def test_every_method_runs_two_blocks_on_every_backbone_or_is_refused(method: str, name: str) -> None:
    specs = preset_parts(method)
    refused = refusal(specs, name)
    if refused is not None:
        with pytest.raises(TacitaError, match=refused):
            with_parts(specs, name)
        return
    fed = with_parts(specs, name)
    progress = run(fed)
    assert len(progress.results) == 2
    for result in progress.results:
        assert result["rounds"] == min(2, fed.learner.rounds) or name.startswith("tally")
        assert np.isfinite(list(numbers_in(result))).all()
    assert all(np.isfinite(v).all() for v in all_numbers(progress).values())
    assert progress.server.items.shape[0] == 120


# the boundary

SEEN_BY_THE_SERVER = (ServerState, Total)
HANDED_TO_IT = (*SEEN_BY_THE_SERVER, Audience)  # and who the clients of a round are
NEVER_SEEN = (Ragged, Block, BlockStream, CohortView, LocalModels, DeviceState)


UNHEARD = {"purge"}  # only a withdrawal asks for it


def server_hooks() -> list[str]:
    """The hooks of a part that are handed nothing but what the server has."""
    hooks = []
    for name in ALL_HOOKS:
        kinds = [kind for k, kind in get_type_hints(default_hook(name)).items() if k != "return"]
        if kinds and all(kind in HANDED_TO_IT for kind in kinds):
            hooks.append(name)
    return hooks


def default_hook(name: str) -> Any:
    """A hook as it is where no part overrides it."""
    return next(getattr(cls, name) for cls in (Part, *CAPABILITIES) if hasattr(cls, name))


def reachable(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A value and everything that can be reached from it."""
    yield path, value
    if is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from reachable(getattr(value, one.name), f"{path}.{one.name}")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from reachable(one, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for k, one in enumerate(value):
            yield from reachable(one, f"{path}[{k}]")
    elif isinstance(value, np.ndarray) and value.base is not None:
        yield from reachable(value.base, f"{path}.base")


@dataclass
class Wiretap:
    """Listens at every server hook and remembers what must not be heard there."""

    hooks: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    arrays: list[tuple[str, AnyArray]] = field(default_factory=list)  # where, and a copy of it
    secrets: list[AnyArray] = field(default_factory=list)  # arrays whose memory must stay on the device
    vectors: list[AnyArray] = field(default_factory=list)  # private vectors of the users, after every round

    def hear(self, hook: str, arguments: tuple[Any, ...]) -> None:
        self.hooks.add(hook)
        for path, one in reachable(tuple(self.without_asked_items(value) for value in arguments), hook):
            if isinstance(one, NEVER_SEEN):
                self.complaints.append(f"{path} is a {type(one).__name__}")
            elif isinstance(one, np.ndarray):
                if any(np.shares_memory(one, secret) for secret in self.secrets):
                    self.complaints.append(f"{path} shares memory with a device")
                self.arrays.append((path, one.copy()))
            elif one is not None and not isinstance(
                one,
                (*HANDED_TO_IT, SharedRecord, PerClientField, SparseRows, DenseArrays, dict, tuple, str, Number),
            ):
                self.complaints.append(f"{path} is a {type(one).__name__}")

    def without_asked_items(self, value: Any) -> Any:
        """Items that a client asks scores of are no history; in a round there are none."""
        if isinstance(value, Audience) and value.occasion == "serving":
            return replace(value, items=None)
        return value

    def leaks(self) -> list[str]:
        """Complaints, and arrays that hold a whole private vector of somebody."""
        vectors = np.array(self.vectors)
        whole = [path for path, heard in self.arrays if np.isin(vectors, heard).all(1).any()]
        return self.complaints + [f"{path} holds a private vector" for path in whole]


def spy_on(tap: Wiretap) -> type[Part]:
    """A part that changes nothing and tells the wiretap what its server side is handed."""

    def listening(hook: str) -> Any:
        def method(self: Part, *arguments: Any) -> Any:
            tap.hear(hook, arguments)
            return default_hook(hook)(self, *arguments)

        return method

    class Spy(Part, Privacy, Unlearning):
        name = "spy"
        observes_only = True
        addresses_clients = True
        works_with = ("rows", "statistic", "scores")

        def state(self, n_users: int) -> Sequence[StateSpec]:
            return [StateSpec("diary", np.zeros((n_users, 3), np.float32))]

        def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
            tap.vectors.extend(local.private.copy())
            tap.secrets.extend([local.private, view.private, view.train.ids, view.exclude.ids, view.user_keys])
            diary = np.random.default_rng(view.round).normal(size=(len(view.user), 3)).astype(np.float32)
            return TrainingOutcome(state={"diary": diary})

    for hook in server_hooks():
        setattr(Spy, hook, listening(hook))
    return Spy


def listen(monkeypatch: pytest.MonkeyPatch, specs: Specs, backbone: str = "mf", *extra: type[Part]) -> Wiretap:
    """Run two blocks with a spy among the given parts: what it hears has passed through all of them."""
    tap = Wiretap()
    for cls in (spy_on(tap), *extra):
        monkeypatch.setitem(methods_base._PARTS, cls.name, cls)
    fed = with_parts([{"name": "spy"}, *specs, *({"name": cls.name} for cls in extra)], backbone)
    tap.secrets += [one.ids for block in fed.stream.blocks for one in (block.train, block.valid, block.test)]
    progress = start_run(fed)

    def on_round(report: Any, now: Progress) -> None:
        for clients in (now.clients, now.best_clients):
            tap.secrets += [clients.private, *flatten_parts(clients.parts, "").values()]

    run_stream(fed, progress, on_round)
    return tap


def test_the_server_hooks_are_those_that_are_handed_nothing_of_a_device() -> None:
    of_the_server = {"server_block_start", "broadcast", "decode", "server_step", "server_block_end", "noise_sum"}
    assert of_the_server <= set(server_hooks())
    of_devices = {"encode", "weigh", "after_training", "serve", "on_block_start", "on_block_end", "state", "on_device"}
    assert not of_devices & set(server_hooks())


@every_backbone
def test_nothing_of_a_device_reaches_the_server_under_fedavg(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tap = listen(monkeypatch, [], name)
    assert set(server_hooks()) - tap.hooks <= UNHEARD
    assert len(tap.vectors) == 2 * 10 + 2 * 11
    assert any(path.startswith("decode[1].sums['rows']") for path, _ in tap.arrays)
    assert tap.leaks() == []


@every_preset
def test_nothing_of_a_device_reaches_the_server_under_any_method(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    specs = preset_parts(method)
    tap = listen(monkeypatch, specs, backbone_for(specs))
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
    ("leak", "said"),
    [
        (SendsVectors, "holds a private vector"),
        (SendsHistories, "shares memory with a device"),
        (SendsItself, "is a CohortView"),
    ],
)
def test_the_spy_notices_a_part_that_leaks(monkeypatch: pytest.MonkeyPatch, leak: type[Part], said: str) -> None:
    found = listen(monkeypatch, [], "mf", leak).leaks()
    assert any(said in one for one in found)


@pytest.mark.parametrize("kind", SEEN_BY_THE_SERVER)
def test_what_the_server_sees_is_made_of_arrays_and_numbers(kind: type) -> None:
    def plain(hint: Any) -> bool:
        if get_origin(hint) is dict:
            key, value = get_args(hint)
            return key is str and plain(value)
        return hint in (int, float, PerClientField, SharedRecord) or get_origin(hint) is np.ndarray

    hints = get_type_hints(kind)
    assert set(hints) == {one.name for one in fields(kind)}
    assert {name: hint for name, hint in hints.items() if not plain(hint)} == {}
