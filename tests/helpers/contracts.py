"""What every backbone and every part must do: classes of tests that take a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.oracle import (
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
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.files import flatten_parts, read_arrays, write_arrays
from tacita.core.types import (
    Arrays,
    Block,
    BlockStream,
    Floats,
    Ragged,
    ServerState,
)
from tacita.federation.rounds import (
    Progress,
    begin_block,
    end_block,
    make_initial_progress,
    run_block,
    run_remaining_blocks,
    run_round,
)
from tacita.federation.scoring import DeviceScorer
from tacita.federation.state_arrays import flatten_progress_with_note, read_progress
from tacita.methods import RunContext, build_parts, find_part_class
from tacita.models import Backbone, Context, find_backbone_class
from tacita.round import registry as methods_base
from tacita.round.device_state import flatten_devices
from tacita.round.plan import Federation
from tacita.round.state import build_initial_state

Specs = list[dict[str, Any]]


def two_blocks() -> BlockStream:
    """Ten users and 110 items, then two more users and ten more items; user 3 stays away from block 1."""
    rng = np.random.default_rng(7)

    def block(index: int, n_users: int, n_items: int, known: int) -> Block:
        own_values = [rng.choice(n_items, 8, replace=False).tolist() for _ in range(n_users)]
        if index == 1:
            own_values[3] = []
        return make_block(
            index,
            n_items,
            [m[:5] for m in own_values],
            [m[5:6] for m in own_values],
            [m[6:] for m in own_values],
            known,
        )

    return make_stream(block(0, 10, 110, 0), block(1, 12, 120, 10))


NEEDS: dict[str, dict[str, Any]] = {
    "retraction": {"aggregation": "fixed"},
    "dp-fedavg": {"aggregation": "fixed", "denominator": 10.0},
    "virtual-ratings": {"objective": "squared", "batch_size": 1000},
}
"""Settings without which a part refuses to work."""
QUIET: dict[str, dict[str, Any]] = {"dpps": {"clip": 1e-4}, "dp-fedavg": {"clip": 0.01}}
"""Options for ten people: noise that hides somebody among so few would be all there is."""


def federate_parts(specs: Specs, backbone: str = "mf", **train: Any) -> Federation:
    """The two blocks under a method."""
    needed = {k: v for spec in specs for k, v in NEEDS.get(spec["name"], {}).items()}
    fed = federate(two_blocks(), make_backbone(backbone), **{"rounds": 2, "batch_size": 8} | needed | train)
    quiet = [{**QUIET.get(spec["name"], {}), **spec} for spec in specs]
    parts = build_parts(quiet, RunContext(fed.backbone, fed.draws, fed.config.train))
    result = methods_base.wrap_run(replace(fed, parts=parts))
    result.learner.check()
    for part in parts:
        part.check(fed.stream.blocks[0].n_items)
    return result


def refusal(specs: Specs, backbone: str) -> str | None:
    """What a backbone says to parts that cannot work with it."""
    names = {spec["name"] for spec in specs}
    if find_backbone_class(backbone).learner == "statistic" and "prediction-transfer" in names:
        return "trains nothing on devices"
    if find_backbone_class(backbone).learner == "statistic" and names - {"dpps"}:
        return "sends a statistic, which it cannot change"
    alike = not any("server" in spec for spec in specs)
    if backbone in ("ego", "fedpergnn", "interest") and "prediction-transfer" in names and alike:
        return "has no central model"
    if find_backbone_class(backbone).reads_context and names & {"replay", "error-memory", "proxies"}:
        return "scores with private vectors alone"
    if "fine-tuning" in names and len(find_backbone_class(backbone).phases) > 1:
        return "moves a whole model at once"
    if "virtual-ratings" in names and backbone != "mf":
        return "predicts p . q, which"
    if "neighbours" in names and backbone != "fedpergnn":
        return "brings vectors that backbone '.*' does not read; use backbone 'fedpergnn'"
    if "replay" in names and make_backbone(backbone).list_head_shapes():
        return "ranks with private parameters only"
    if "delta-replay" in names and make_backbone(backbone).list_head_shapes():
        return "goes over item rows again"
    if any(spec.get("contrast_users") for spec in specs):
        result = make_backbone(backbone)
        return (
            None
            if [*result.private_layout.values()] == [result.item_width]
            else "compares people's vectors with item rows"
        )
    return None


def backbone_for(specs: Specs) -> str:
    """A model that these parts work with."""
    return "fedpergnn" if {"name": "neighbours"} in specs else "mf"


def run_blocks(fed: Federation) -> Progress:
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    return progress


def all_numbers(progress: Progress) -> Arrays:
    """Everything that both sides hold."""
    server, clients = progress.server, progress.clients
    heads = {f"heads/{k}": v for k, v in server.heads.items()}
    sides = flatten_parts(server.parts, "server/") | flatten_devices(clients, "device/")
    return {"items": server.items, **heads, **sides}


def assert_same_numbers(one: Progress, other: Progress) -> None:
    own_values, yours = all_numbers(one), all_numbers(other)
    assert own_values.keys() == yours.keys()
    for name in own_values:
        assert own_values[name].dtype == yours[name].dtype, name
        assert np.array_equal(own_values[name], yours[name]), name
    assert one.results == other.results


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from numbers_in(entry)
    elif value is not None and not isinstance(value, str):
        yield float(value)


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
USER_LISTS = Ragged.from_lists([[0, 7], [1], [], [0, 1, 2, 3], [4, 8, 5], [6]])  # what the six users' models read


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
        cut = backbone.split_private(private)
        assert {k: v.shape[1] for k, v in cut.items()} == backbone.private_layout
        assert np.array_equal(np.concatenate([*cut.values(), private[:, :0]], axis=1), private)

    def test_it_refuses_an_unknown_option_by_name(self, name: str) -> None:
        with pytest.raises(TacitaError, match="dimm"):
            validate_model(find_backbone_class(name).Config, {"dimm": 4}, f"backbone '{name}'")

    def test_its_own_start_fits_it_as_if_it_came_from_elsewhere(self, name: str) -> None:
        backbone, _, heads, items = self.start(name)
        assert backbone.has_valid_heads(heads, len(items))
        assert not backbone.has_valid_heads({**heads, "more": np.zeros(1, np.float32)}, len(items))

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
        context = Context.from_lists(USER_LISTS, items) if backbone.reads_context else None
        inside = USER_LISTS.holds(np.arange(6), np.arange(6)).astype(np.float32) if backbone.reads_context else None
        rep = backbone.represent_users(backbone.split_private(private), repeated, context)
        return backbone, rep, repeated, items[:6], inside

    def test_it_starts_with_finite_arrays_of_the_shapes_it_declares(self, name: str) -> None:
        backbone, private, heads, items = self.start(name)
        assert private.shape == (6, backbone.private_width)
        assert items.shape == (9, backbone.item_width)
        assert {k: v.shape for k, v in heads.items()} == backbone.list_head_shapes()
        for result in (private, items, *heads.values()):
            assert result.dtype == np.float32
            assert np.isfinite(result).all()

    def test_it_names_a_positive_rate_for_everything_that_moves(self, name: str) -> None:
        backbone = self.make(name)
        rates = backbone.list_learning_rates(50)
        assert rates.keys() == {*backbone.private_layout, *backbone.list_head_shapes(), "rows"}
        assert min(rates.values()) > 0
        assert sorted(kind for phase in backbone.phases for kind in phase) == ["private", "rows"]

    def test_it_scores_the_same_with_numpy_and_torch(self, name: str) -> None:
        backbone, rep, heads, rows, inside = self.users(name)
        by_numpy = backbone.compute_logits(rep, heads, rows, inside)
        _, private, _, items = self.start(name)
        tensors = {k: torch.from_numpy(v) for k, v in heads.items()}
        context = None
        if backbone.reads_context:
            user, count = torch.from_numpy(USER_LISTS.rows()), torch.from_numpy(USER_LISTS.counts()).float()
            context = Context(USER_LISTS.ptr, user, count, torch.from_numpy(items[USER_LISTS.ids]), {})
        observations = backbone.represent_users(backbone.split_private(torch.from_numpy(private)), tensors, context)
        among = None if inside is None else torch.from_numpy(inside)
        by_torch = backbone.compute_logits(observations, tensors, torch.from_numpy(rows), among)
        assert by_numpy.shape == (6,)
        np.testing.assert_allclose(by_numpy, by_torch.numpy(), rtol=1e-5, atol=1e-6)

    def test_its_reading_is_its_score_where_it_has_one(self, name: str) -> None:
        backbone, private, shared, _ = self.start(name)
        _, rep, heads, rows, inside = self.users(name)
        reading = backbone.reduce_to_affine(private, shared)
        assert reading is not None or backbone.affine_kind is None
        if reading is not None:
            a, c = reading
            np.testing.assert_allclose(
                (a * rows).sum(1) + c, backbone.compute_logits(rep, heads, rows), rtol=1e-5, atol=1e-5
            )
        outside = backbone.build_affine_scores_outside_context(rep, shared, rows)
        if outside is not None:
            a, c, read = outside
            scored = backbone.compute_logits(rep, heads, rows, None if inside is None else 0 * inside)
            np.testing.assert_allclose((a * read).sum(1) + c, scored, rtol=1e-5, atol=1e-5)

    def test_it_reads_a_context_if_and_only_if_it_says_so(self, name: str) -> None:
        fed = federate(make_stream(make_block(0, 6, [[0, 1], [2, 3]])), backbone := self.make(name))
        context = backbone.list_context_items(cohort(fed, started(fed)))
        assert (context is not None) == backbone.reads_context
        if context is not None:
            assert len(context) == 2

    def test_a_round_moves_every_parameter_it_declares(self, name: str) -> None:
        backbone = self.make(name)
        parts = [find_part_class("neighbours")] if name == "fedpergnn" else []  # without, some of it has nothing to do
        fed = federate(make_stream(make_block(0, 6, [[0, 1], [1, 3], [1, 2]])), backbone, *parts)
        progress = started(fed)
        progress.server, _ = run_round(fed, progress.server, progress.devices)
        trained = train_once(fed, progress)
        moved = backbone.split_private(trained.local.private - progress.clients.private)
        assert all(np.abs(entry).max() > 0 for entry in moved.values())
        assert all(np.abs(entry).max() > 0 for entry in heads_of(trained.upload).values())
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
    train, state = [like[2:].tolist() for like in likes], [like[:2].tolist() for like in likes]
    fed = federate(make_stream(make_block(0, n_items, train)), backbone, rounds=rounds, objective=objective)
    progress = started(fed)

    def right(now: Progress) -> float:
        down = fed.broadcast_serving(now.server)
        scorer = DeviceScorer(fed, now.server, now.clients, fed.stream.blocks[0], fed.stream.user_keys, down, "test")
        scores = scorer(np.arange(n_users, dtype=np.int32))
        pairs = [scores[u, state[u]][:, None] > scores[u, (u + 1) % 2 :: 2][None, :] for u in range(n_users)]
        return float(np.mean(pairs))

    before = right(progress)
    run_block(fed, progress, lambda report, now: None)
    return before, right(progress)


class PartContract:
    """Subclass with a `name` parameter, or let the registry supply it. Options: the part's defaults."""

    def federation(self, name: str, **train: Any) -> Federation:
        return federate_parts([{"name": name}], backbone_for([{"name": name}]), **train)

    def test_it_is_found_by_its_name_and_refuses_an_unknown_option(self, name: str) -> None:
        fed = self.federation(name)
        assert [p.name for p in fed.parts] == [name]
        assert find_part_class(name).name == name
        with pytest.raises(TacitaError, match="no_such_option"):
            build_parts([{"name": name, "no_such_option": 1}], fed.parts[0].context)

    def test_a_users_device_arrays_do_not_depend_on_how_many_users_there_are(self, name: str) -> None:
        (part,) = self.federation(name).parts
        few, many = build_initial_state(part.state(4)), build_initial_state(part.state(7))
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
        progress = run_blocks(fed)
        assert all(np.isfinite(list(numbers_in(result))).all() for result in progress.results)
        declared = build_initial_state(fed.parts[0].state(12))
        lists = {k for k, v in declared.items() if isinstance(v, Ragged)}
        assert progress.clients.read_part_lists(np.arange(12)).get(name, {}).keys() == lists
        response = progress.clients.parts.get(name, {})
        kinds = {k: (v.shape, v.dtype) for k, v in declared.items() if k not in lists}
        assert {k: (v.shape, v.dtype) for k, v in response.items()} == kinds
        for k, v in all_numbers(progress).items():
            assert isinstance(v, np.ndarray), k
            assert v.dtype != object, k

    def test_it_keeps_nothing_on_itself(self, name: str) -> None:
        fed = self.federation(name)
        before = dict(vars(fed.parts[0]))
        run_blocks(fed)
        assert vars(fed.parts[0]) == before

    def test_it_does_not_see_how_clients_are_chunked(self, name: str) -> None:
        fed = self.federation(name)
        assert_same_numbers(run_blocks(fed), run_blocks(replace(fed, chunk=3)))

    def test_it_goes_on_from_a_copy_as_if_nothing_had_happened(self, name: str, tmp_path: Path) -> None:
        """After every block and in the middle of one: fresh part objects, arrays that were on disk."""
        whole = run_blocks(self.federation(name))
        for stop in (1, 2, 3):
            fed, progress, rounds = self.federation(name), None, 0

            def on_round(report: Any, now: Progress, stop: int = stop) -> None:
                nonlocal rounds
                rounds += 1
                if rounds == stop:
                    raise InterruptedError

            progress = make_initial_progress(fed)
            with pytest.raises(InterruptedError):
                run_remaining_blocks(fed, progress, on_round)
            restored = write_and_read(progress, tmp_path / f"{stop}.safetensors")
            fed = self.federation(name)
            run_remaining_blocks(fed, restored, lambda report, now: None)
            assert_same_numbers(restored, whole)

    def test_it_leaves_the_state_it_is_given_as_it_was(self, name: str) -> None:
        """Server states are values: the best round must still be there after later rounds."""
        fed = self.federation(name, rounds=3)
        progress = make_initial_progress(fed)
        observations: list[tuple[ServerState, Arrays]] = []

        def on_round(report: Any, now: Progress) -> None:
            observations.append((now.server, {k: v.copy() for k, v in server_arrays(now.server).items()}))

        run_remaining_blocks(fed, progress, on_round)
        assert len(observations) == 6
        for server, copy in observations:
            for k, v in server_arrays(server).items():
                assert np.array_equal(v, copy[k]), k

    def test_it_does_nothing_to_a_device_that_is_away(self, name: str) -> None:
        """User 3 has no data in block 1."""
        fed = self.federation(name)
        progress = started(fed)
        run_block(fed, progress, lambda report, now: None)
        end_block(fed, progress)
        private = progress.clients.private[3].copy()
        state = {k: v[3].copy() for k, v in progress.clients.parts.get(name, {}).items()}
        begin_block(fed, progress, 1)
        run_block(fed, progress, lambda report, now: None)
        end_block(fed, progress)
        assert np.array_equal(progress.clients.private[3], private)
        for k, v in state.items():
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
        progress = run_blocks(self.federation(name, **settings))
        assert all(np.isfinite(v).all() for v in all_numbers(progress).values())


def server_arrays(server: ServerState) -> Arrays:
    return {"items": server.items, **server.heads, **flatten_parts(server.parts, "parts/")}


def write_and_read(progress: Progress, path: Path) -> Progress:
    """Everything that both sides hold, written and read back."""
    arrays, note = flatten_progress_with_note(progress)
    write_arrays(path, arrays, note)
    return read_progress(*read_arrays(path))
