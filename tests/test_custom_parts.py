"""Small, real parts and learners of the kinds that are still to come, through devices here and through nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from helpers.accepted_answers import list_accepted
from helpers.loopback_site import (
    are_close,
    close_nodes,
    home_node,
    make_site,
    play_blocks,
    rows_of_blocks,
    run_lab,
    site_config,
)
from helpers.oracle import cohort, federate, make_backbone, make_block, make_stream, started, train_once
from helpers.shared_records import share_items
from helpers.upload_log import UploadLog, config_with_parts
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import (
    Arrays,
    CohortView,
    Doubles,
    Floats,
    Keys,
    LocalModels,
    Ragged,
    ServerState,
    SharedRecord,
)
from tacita.data.sources import load_interactions
from tacita.federation.devices import LocalDevices
from tacita.federation.requests import compute_shared_record_after, handle_requests
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
from tacita.federation.state_arrays import flatten_server, make_server_note, read_server
from tacita.live.server.coordinator import continue_run
from tacita.live.settings import check_live_settings
from tacita.live.wire import decode_reply, decode_request
from tacita.messages import CohortReply, DenseArrays, SparseRows, Spec, Total, Upload
from tacita.models.factor import MF
from tacita.round import learner as learners_base
from tacita.round import registry as methods_base
from tacita.round.broadcast import Audience, PartBroadcast, PerClientLists
from tacita.round.capabilities import DeviceQuery, Privacy, RoundPlayer
from tacita.round.fields import PartFields
from tacita.round.learner import Learner
from tacita.round.part import Part
from tacita.round.question import Question
from tacita.round.request import Request, RequestBatch
from tacita.round.serving import Purpose, Serving
from tacita.round.state import StateSpec
from tacita.round.task import CohortTask, TrainingOutcome
from tacita.round.unlearning_report import UnlearningReport
from tacita.runs.assembly import Machine, assemble_federation

LISTS = [[0, 1, 2], [2, 3], [4], [0, 4, 5, 6], [1, 6]]


class Budget(Part, Privacy):
    """Every release costs one; who has nothing left sends nothing, and goes on being served."""

    name = "probe-budget"
    works_with = ("rows", "statistic")
    covers = frozenset({"answers"})

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [StateSpec("left", np.full(n_users, 2.0), persistent=True)]

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        remainder = view.parts[self.name]["left"]
        spent = remainder < 1
        return upload.drop_clients(spent), {"left": np.where(spent, remainder, remainder - 1)}


class Clip(Part, Privacy):
    """One bound on the length of everything a client sends, and noise on every number of the sum."""

    name = "probe-clip"
    works_with = ("rows", "statistic")
    covers = frozenset({"answers"})
    most, noise = 0.05, 0.0
    seen: list[Doubles] = []

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        clipped = upload.scale(np.minimum(1.0, self.most / np.maximum(upload.norms(), 1e-12)))
        self.seen.append(clipped.norms())
        return clipped, {}

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(after_encoding=self._widen_bounds)

    def _widen_bounds(self, spec: Spec) -> Spec:
        return replace(spec, most=spec.most + 1.0, least=-np.inf) if self.noise else spec

    def noise_sum(self, server: ServerState, total: Total) -> Total:
        if not self.noise:
            return total
        draws = np.random.default_rng(server.round)
        return total.with_sums({k: v + self.noise * draws.normal(size=v.shape) for k, v in total.sums.items()})


class ByLength(Part):
    """Weights that travel: [s, s * value] with s = 1 / (1 + items)."""

    name = "probe-weight"

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        return 1.0 / (1.0 + np.diff(view.train.ptr[view.user_ptr]))


class Scores(Learner):
    """Clients send scores of their items and of those they were sent; the server keeps the mean of each item."""

    name = "probe-scores"

    @classmethod
    def find_requiring_part(cls, parts: Sequence[Part]) -> Part | None:
        return next((part for part in parts if isinstance(part, WritesLetters)), None)

    def check(self) -> None:
        pass

    @property
    def rounds(self) -> int:
        return 3

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return ("scores",)

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        return (Spec("scores", (len(server.items),), seen="each", most=1.0, least=-1.0),)

    def count_model_bytes(self, server: ServerState) -> float:
        return 0.0

    def answer(self, task: CohortTask, question: str) -> CohortReply:
        view = task.view
        sent = view.per_client["probe-letters"]
        own = 0.25 + 0.5 * (view.client_keys % np.uint64(2)).astype(np.float64)
        value = np.concatenate([own[view.train.rows()], 0.5 * sent.values["score"]])
        pairs = np.concatenate([view.train.rows(), sent.rows()]) * view.n_items
        pairs, first = np.unique(pairs + np.concatenate([view.train.ids, sent.ids]), return_index=True)
        client, item = (entry.astype(np.int32) for entry in np.divmod(pairs, view.n_items))
        sparse_rows = SparseRows(client, item, value[first].astype(np.float32))
        return CohortReply(Upload({"scores": sparse_rows}, np.ones(view.n_clients), view.client_keys))

    def learn_from_total(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        scores = total.each["scores"]
        assert isinstance(scores.value, SparseRows)
        n = len(server.items)
        mean = np.bincount(scores.value.item, scores.value.value, n) / np.maximum(
            np.bincount(scores.value.item, minlength=n), 1
        )
        items = server.items.copy()
        items[:, 0] = mean
        return server.with_items(items).with_part("seen", {"sender": np.sort(scores.sender)})


class WritesLetters(Part):
    """The server writes every chosen client the score of one item, counts that, and answers with its own means."""

    name = "probe-letters"
    works_with = ("probe-scores",)
    addresses_clients = True
    serves = frozenset({"scores"})

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(per_client={"score": ()})

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        if audience.clients is None:
            return PartBroadcast()
        if audience.occasion == "serving":
            return PartBroadcast(per_client=self._write_catalogue(server, audience.clients))
        return self._write_round(server, audience.clients)

    def _write_round(self, server: ServerState, clients: Keys) -> PartBroadcast:
        item = (clients % np.uint64(len(server.items))).astype(np.int32)
        ptr = np.arange(len(clients) + 1, dtype=np.int64)
        so_far = server.parts[self.name].get("written", np.zeros(1))
        changed = server.with_part(self.name, {"written": so_far + len(clients)})
        lists = Ragged(ptr, item, {"score": server.items[item, 0].astype(np.float32)})
        return PartBroadcast(per_client=lists, server=changed)

    def _write_catalogue(self, server: ServerState, clients: Keys) -> Ragged:
        n = len(server.items)
        ptr = np.arange(len(clients) + 1, dtype=np.int64) * n
        score = np.tile(server.items[:, 0], len(clients)).astype(np.float32)
        return Ragged(ptr, np.tile(np.arange(n, dtype=np.int32), len(clients)), {"score": score})

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        def score(only: Ragged | None) -> Floats | None:
            return self._read_scores(view) if only is None else None

        return Serving(scores=score)

    def _read_scores(self, view: CohortView) -> Floats:
        sent = view.per_client[self.name]
        scores = np.zeros((len(view.user), view.n_items), np.float32)
        scores[sent.rows(), sent.ids] = sent.values["score"]
        return scores


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (Budget, Clip, ByLength, WritesLetters, UploadLog, Unlearns, Feedback, Whole):
        monkeypatch.setitem(methods_base._PARTS, part.name, part)
    monkeypatch.setitem(learners_base._LEARNERS, Scores.name, Scores)
    Clip.seen.clear()


def live_and_lab(folder: Path, config: RunConfig, **node: Any) -> tuple[Arrays, Any, Any]:
    site = make_site(folder, config, **node)
    play_blocks(site)
    return site.arrays(), run_lab(config), site


def small(*parts: type[Part], **more: Any) -> Any:
    return federate(make_stream(make_block(0, 7, LISTS)), make_backbone("mf"), *parts, **more)


# A budget on the device


def test_exhausted_budget_stops_uploads() -> None:
    fed = small(Budget)
    progress = started(fed)
    progress.clients.arrays["parts/probe-budget/left"][:] = [2.0, 1.0, 0.0, 2.0, 1.0]
    moved = []
    for _ in range(3):
        before = progress.server.items.copy()
        progress.server, report = run_round(fed, progress.server, progress.devices)
        moved.append((before != progress.server.items).any(1))
        assert report.clients == 5  # they take part, and are served, all the same
    remainder = progress.clients.parts["probe-budget"]["left"]
    assert remainder.tolist() == [0, 0, 0, 0, 0]
    assert moved[0].any()
    assert moved[1].any()
    assert not moved[2].any()


@pytest.mark.parametrize("name", ["fedavg", "tally"])
def test_budgets_on_nodes_equal_the_lab(tmp_path: Path, name: str) -> None:
    config = config_with_parts(name, Budget)  # in the end few can pay, whom a node hides from all but the lab
    arrays, whole, site = live_and_lab(tmp_path, config, insecure_single_user_uploads=True)
    assert are_close(arrays["now/items"], whole.server.items)
    for head, value in whole.server.heads.items():
        assert are_close(arrays[f"now/heads/{head}"], value)
    remainder = dict(
        zip(assemble_federation(site.config, Machine()).stream.user_ids, whole.clients.parts["probe-budget"]["left"])
    )
    assert min(remainder.values()) == 0
    for node in site.transport.members.values():
        state = node.store.load_devices("r", "now")[1]
        raw_of = dict(zip(*node.store.list_users(), strict=True))
        assert [remainder[raw_of[user]] for user in state["users"]] == state["parts/probe-budget/left"].tolist()
    close_nodes(site)


def test_rollback_to_the_best_round_refunds_no_budget() -> None:
    fed = small(Budget, rounds=6)
    progress = started(fed)
    progress.clients.arrays["parts/probe-budget/left"][:] = 9.0
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    progress.devices.keep_best_round(1)
    for _ in range(3):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    vectors = progress.best_clients.private.copy()
    end_block(fed, progress)
    assert progress.clients.parts["probe-budget"]["left"].tolist() == [5.0] * 5
    assert np.array_equal(progress.clients.private, vectors)


class Feedback(Part):
    """What training kept is there when the upload is encoded, and what encoding notes is the last word."""

    name = "probe-feedback"

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [StateSpec("error", np.zeros(n_users))]

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        return TrainingOutcome(state={"error": np.ones(len(view.user))})

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        return upload, {"error": view.parts[self.name]["error"] + 100}


def test_encode_runs_after_training_state_is_stored() -> None:
    fed = small(Feedback)
    progress = started(fed)
    run_round(fed, progress.server, progress.devices)
    assert progress.clients.parts["probe-feedback"]["error"].tolist() == [101.0] * 5


class Whole(Part):
    """Sends every row, as noise on all coordinates would."""

    name = "probe-whole"

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        rows = upload.values["rows"]
        assert isinstance(rows, SparseRows)
        whole = np.zeros((upload.n_clients, *view.items.shape), np.float32)
        whole[rows.client, rows.item] = rows.value
        return upload.with_value("rows", DenseArrays(whole)), {}


@pytest.mark.parametrize("aggregator", ["plain", "ideal"])
def test_whole_tables_touch_every_row(aggregator: str) -> None:
    fed = small(Whole, aggregation="per-row", aggregator=aggregator)
    progress = started(fed)
    server, _ = run_round(fed, progress.server, progress.devices)
    mean = small(Whole)
    other = started(mean)
    wanted, _ = run_round(mean, other.server, other.devices)
    np.testing.assert_allclose(server.items, wanted.items, atol=1e-6)


# Clip and noise on every learner


@pytest.mark.parametrize("name", ["fedavg", "tally"])
def test_a_clip_bounds_all_that_a_client_sends(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clip, "most", 0.05 if name == "fedavg" else 4.0)
    arrays, whole, site = live_and_lab(tmp_path, config_with_parts(name, Clip))
    lengths = np.concatenate(Clip.seen)
    assert lengths.max() <= Clip.most * (1 + 1e-6)
    assert np.isclose(lengths, Clip.most, rtol=1e-5).any()
    if name == "fedavg":  # a node leaves rare items out of statistics, and clipped people count less than one
        assert are_close(arrays["now/items"], whole.server.items)
    plain = run_lab(config_with_parts(name))
    for head, value in plain.server.heads.items():
        if head in ("weights",):
            assert value.shape != whole.server.heads[head].shape or not np.array_equal(value, whole.server.heads[head])
    close_nodes(site)


def test_noise_reaches_every_number_of_a_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clip, "noise", 0.01)
    monkeypatch.setattr(Clip, "most", 1e9)
    loud, quiet = (run_lab(config_with_parts("tally", *parts)) for parts in ((Clip,), ()))
    with_noise, without = (candidate.server.parts["tally"]["total"] for candidate in (loud, quiet))
    assert len(with_noise) > len(without)  # pairs that nobody has are no longer zero


# Weights


def test_a_weighted_mean_is_the_sum_of_weighted_values_over_the_sum_of_weights() -> None:
    fed = small(ByLength)
    progress = started(fed)
    view, sent = cohort(fed, progress), train_once(fed, progress).upload.values["rows"]
    weight = 1.0 / (1.0 + view.train.counts())
    want = progress.server.items.astype(np.float64)
    np.add.at(want, sent.item, (weight[sent.client] / weight.sum())[:, None] * sent.value)
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    np.testing.assert_allclose(progress.server.items, want, rtol=1e-5, atol=1e-7)


def test_weights_travel_from_nodes(tmp_path: Path) -> None:
    arrays, whole, site = live_and_lab(tmp_path, config_with_parts("fedavg", ByLength))
    assert are_close(arrays["now/items"], whole.server.items)
    close_nodes(site)


# Uploads that are seen each by itself, and lists that are written to single clients


def test_learner_can_read_and_answer_single_clients() -> None:
    fed = small(WritesLetters)
    assert fed.learner.name == "probe-scores"
    assert fed.identifies_clients
    fed = replace(fed, chunk=2)
    progress = started(fed)
    progress.server, report = run_round(fed, progress.server, progress.devices)
    assert progress.server.parts["seen"]["sender"].tolist() == sorted(fed.stream.user_keys.tolist())
    assert progress.server.parts["probe-letters"]["written"].tolist() == [5]
    assert report.bytes_down == 8.0  # one id and one score, and no model
    own = 0.25 + 0.5 * float(fed.stream.user_keys[3] % np.uint64(2))
    sent = [int(key % np.uint64(7)) for key in fed.stream.user_keys]
    if 5 not in sent:  # only user 3 has it
        assert progress.server.items[5, 0] == pytest.approx(own)
    scorer = DeviceScorer(
        fed, progress.server, progress.clients, fed.stream.blocks[0], fed.stream.user_keys,
        fed.broadcast_serving(progress.server), "serve",
    )  # fmt: skip
    assert np.array_equal(scorer(np.array([4], np.int32))[0], progress.server.items[:, 0])


def test_only_selected_clients_are_queried_and_updated() -> None:
    fed = small(WritesLetters)
    progress = started(fed)
    some = fed.stream.user_keys[[3, 1]]
    server, report = run_round(fed, progress.server, progress.devices, some)
    assert report.clients == 2
    assert server.parts["seen"]["sender"].tolist() == sorted(some.tolist())


def test_per_client_broadcasts_reach_their_clients() -> None:
    written = PerClientLists(np.array([9, 4, 7], np.uint64), {"p": Ragged.from_lists([[1], [2, 3], []])})
    result = written.select_lists(np.array([4, 5, 9], np.uint64))["p"]
    assert [result.row(r).tolist() for r in range(3)] == [[2, 3], [], [1]]
    assert len(PerClientLists(np.zeros(0, np.uint64), {"p": Ragged.empty(0)}).select_lists(written.clients)["p"]) == 3


def test_nodes_with_per_client_uploads_equal_the_lab(tmp_path: Path) -> None:
    config = config_with_parts("fedavg", WritesLetters)
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    play_blocks(site)
    whole, arrays = run_lab(config), site.arrays()
    assert are_close(arrays["now/items"], whole.server.items)
    assert arrays["now/parts/seen/sender"].tolist() == whole.server.parts["seen"]["sender"].tolist()
    assert arrays["now/parts/probe-letters/written"].tolist() == [whole.server.parts["probe-letters"]["written"][0]]
    with site.store as store:
        note = store.load_run("r").note
        assert note is not None
        for live, result in zip(note["plain"]["results"], whole.results, strict=True):
            assert live["ndcg@20"] == pytest.approx(result["ndcg@20"], rel=1e-4)
    member = site.transport.members[1]
    member.refresh_snapshot()
    person = member.store.list_users()[1][0]
    best = whole.server.items[:, 0]
    assert member.recommend(person, 3)[0]["score"] <= best.max()
    assert any("one by one" in release["sees"] for release in member.store.list_releases())
    close_nodes(site)


def test_killed_server_keeps_the_home_of_clients(tmp_path: Path) -> None:
    config = config_with_parts("fedavg", WritesLetters)
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble_federation(config, Machine())
    site.publish(list(fed.stream.item_ids[: fed.stream.blocks[0].n_items]))
    site.collect(rows_of_blocks(config)[0])

    def killed(number: int, body: bytes, answer: Any) -> bytes:
        if decode_request(body).head.kind == "close":
            raise KeyboardInterrupt
        return bytes(answer())

    site.transport.spoil = killed
    with pytest.raises(KeyboardInterrupt):
        site.next_block()
    site.transport.spoil = lambda number, body, answer: answer()
    continue_run(site.folder, site.run, site.transport)
    with site.store as store:
        note = store.load_run("r").note
    assert note is not None
    assert len(note["plain"]["results"]) == 1
    close_nodes(site)


def test_per_client_uploads_need_the_owners_consent(tmp_path: Path) -> None:
    """H.G.5: single uploads without the flag that says insecure."""
    site = make_site(tmp_path, config_with_parts("fedavg", WritesLetters), insecure_single_user_uploads=False)
    with pytest.raises(TacitaError, match="insecure_single_user_uploads"):
        play_blocks(site)
    assert all("names" not in decode_reply(reply).arrays for _, _, reply in site.transport.log)
    close_nodes(site)


# Requests between rounds


FIXED = {"aggregation": "fixed", "denominator": 40.0}


def test_forgetting_equals_a_round_without_the_user() -> None:
    fed = small(UploadLog, aggregation="fixed", denominator=5.0)
    progress, other = started(fed), started(fed)
    start = progress.server.items
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    leaver = int(fed.stream.user_keys[3])
    reports = handle_requests(fed, progress, Request("forget", leaver, fed.stream.blocks[0].train.row(3)[:1]))
    assert reports["probe-log"].details["taken back"] > 0
    without, _ = run_round(fed, other.server, other.devices, np.delete(fed.stream.user_keys, 3))
    np.testing.assert_allclose(progress.server.items, without.items, atol=1e-7)
    assert not np.array_equal(without.items, start)
    assert progress.best_server is progress.server  # no copy from before is left
    before = progress.clients.private[3].copy()
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    assert np.array_equal(progress.clients.private[3], before)  # trains no more


def first_item(fed: Any, person: str) -> Any:
    return fed.stream.blocks[0].train.row(fed.stream.user_ids.index(person))[:1]


def test_node_requests_are_applied_between_rounds(tmp_path: Path) -> None:
    config = config_with_parts("fedavg", UploadLog, **FIXED)
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble_federation(config, Machine())
    person = next(raw for raw in fed.stream.user_ids if home_node(raw) == 1)
    key = int(fed.stream.user_keys[fed.stream.user_ids.index(person)])
    progress, request = make_initial_progress(fed), [0]

    def after_the_first_round(report: Any, now: Progress) -> None:
        if request[0] == 0:
            handle_requests(fed, now, Request("forget", key, first_item(fed, person)))
            request[0] = 1

    block = fed.stream.blocks[0]
    site.publish(list(fed.stream.item_ids[: block.n_items]))
    site.collect(rows_of_blocks(config)[0])
    node = site.transport.members[1]
    first = fed.stream.item_ids[first_item(fed, person)[0]]
    node.store.enqueue_request("forget", "r", ["never told", first], node.store.find_user(person))
    site.next_block()
    begin_block(fed, progress, 0)
    run_block(fed, progress, after_the_first_round)
    end_block(fed, progress)
    with site.store as store:
        reports = [event for _, _, event in store.list_events("r") if event["event"] == "request"]
        assert store.list_open_requests("r") == []
    assert [entry["kind"] for entry in reports] == ["forget"]
    assert reports[0]["done"]["probe-log"]["taken back"] > 0
    assert b"never told" not in b"".join(reply for _, _, reply in site.transport.log)
    assert are_close(site.arrays()["now/items"], progress.server.items)
    assert not are_close(run_lab(config).server.items[: block.n_items], progress.server.items, 1e-6)
    close_nodes(site)


class Unlearns(UploadLog):
    """Forgets in two more rounds without the leaver, and asks twice."""

    name = "probe-unlearns"
    watched: ClassVar[list[Callable[[], None]]] = []

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        for look in self.watched:
            look()
        first = ask(server, "stored", None)
        second = ask(server, "stored", None)
        for _ in range(2):
            server = play(server, None)
        if requests.kind == "leave":
            raise TacitaError("this one fails when it has played.")
        details = {"asked": [first.n_clients, second.n_clients], "round": server.round}
        return server, UnlearningReport(details=details)


@pytest.mark.parametrize("kind", ["forget", "leave"])
def test_a_request_may_play_rounds_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Whether it succeeds or fails then, the run goes on with all of its own rounds, live as in the lab."""
    config = config_with_parts("fedavg", Unlearns, Budget, **FIXED)
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble_federation(config, Machine())
    person = next(raw for raw in fed.stream.user_ids if home_node(raw) == 1)
    key = int(fed.stream.user_keys[fed.stream.user_ids.index(person)])
    progress, rounds, before = make_initial_progress(fed), [], list[Any]()

    def on_round(report: Any, now: Progress) -> None:
        rounds.append(report.round)
        local = now.devices
        assert isinstance(local, LocalDevices)
        if len(rounds) == 1:
            monkeypatch.setattr(Unlearns, "watched", [lambda: before.append(deepcopy(local.clients))])
            with contextlib.suppress(TacitaError):
                handle_requests(fed, now, Request(kind, key, first_item(fed, person)))  # type: ignore[arg-type]
                return
            local.clients = before[0]  # as nodes do, who go back to before the rounds that came to nothing

    block = fed.stream.blocks[0]
    site.publish(list(fed.stream.item_ids[: block.n_items]))
    site.collect(rows_of_blocks(config)[0])
    node = site.transport.members[1]
    node.store.enqueue_request(kind, "r", user=node.store.find_user(person))
    site.next_block()
    begin_block(fed, progress, 0)
    run_block(fed, progress, on_round)
    end_block(fed, progress)
    assert rounds == [1, 4, 5]
    with site.store as store:
        reports = [event for _, _, event in store.list_events("r") if event["event"] == "round"]
    assert [entry["round"] for entry in reports] == rounds
    assert are_close(site.arrays()["now/items"], progress.server.items)
    close_nodes(site)


def test_unhandled_requests_change_nothing() -> None:
    fed = small(Budget)
    progress = started(fed)
    with pytest.raises(TacitaError, match="nothing in this run can carry out 'share'"):
        handle_requests(fed, progress, Request("share", int(fed.stream.user_keys[0]), np.array([1], np.int32)))
    assert len(progress.server.shared) == 0


def test_selected_clients_must_be_known() -> None:
    fed = small(UploadLog)
    progress = started(fed)
    with pytest.raises(TacitaError, match="not known here"):
        run_round(fed, progress.server, progress.devices, np.array([12345], np.uint64))


def test_shared_record_follows_the_requests() -> None:
    inputs = share_items(SharedRecord(), 7, np.array([3, 1]), 1.0)
    inputs = share_items(inputs, 9, np.array([3]), 2.0)
    inputs = share_items(inputs, 7, np.array([3, 5]), 3.0)  # 3 is there already
    assert inputs.take_sender_lists(np.array([9, 8, 7], np.uint64)).row(2).tolist() == [1, 3, 5]
    remainder = compute_shared_record_after(inputs, Request("unshare", 7, np.array([1, 5], np.int32)))
    assert remainder.take_sender_lists(np.array([7], np.uint64)).ids.tolist() == [3]
    assert compute_shared_record_after(remainder, Request("leave", 7, np.zeros(0, np.int32))).sender.tolist() == [9]
    server = ServerState(np.zeros((6, 2), np.float32), {}, shared=remainder)
    back = read_server(flatten_server(server), make_server_note(server))
    assert (back.shared.item.tolist(), back.shared.time.tolist()) == (remainder.item.tolist(), remainder.time.tolist())


# Sampling


def test_poisson_participation_is_the_same_on_nodes_and_in_the_lab(tmp_path: Path) -> None:
    config = site_config("fedavg", participation={"kind": "poisson", "rate": 0.7}, aggregation="fixed")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    play_blocks(site)
    whole = run_lab(config)
    assert are_close(site.arrays()["now/items"], whole.server.items)
    with site.store as store:
        counted = [n for _, _, kind, _, n in list_accepted(store, "r") if kind == "round"]
    assert len(set(counted)) > 2  # not everybody, and not always the same
    close_nodes(site)


def test_nodes_that_send_sums_only_take_part_in_no_sample(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config("fedavg", participation={"kind": "poisson", "rate": 0.9}))
    with pytest.raises(TacitaError, match="insecure_single_user_uploads"):
        play_blocks(site)
    close_nodes(site)


# Objectives of the papers to come, here and on nodes


@pytest.mark.parametrize("objective", ["bpr", "squared"])
def test_objectives_are_the_same_on_nodes(tmp_path: Path, objective: str) -> None:
    """Pairs under cosines on a user's own star; squared error, on ratings where people gave some."""
    config = site_config("ego" if objective == "bpr" else "fedavg", objective=objective)
    table = load_interactions(config.data)
    assert table.timestamp is not None
    rated = [
        (table.user_ids[u], table.item_ids[i], float(t), float(1 + (u + i) % 5))
        for u, i, t in zip(table.user.tolist(), table.item.tolist(), table.timestamp.tolist(), strict=True)
    ]
    if objective == "squared":
        lines = "".join(f"{u},{i},{t},{r}\n" for u, i, t, r in rated)
        (tmp_path / "rated.csv").write_text("user,item,timestamp,rating\n" + lines)
        slow = {"data": str(tmp_path / "rated.csv"), "backbone": {"name": "mf", "dim": 8, "lr": 0.01}}
        config = validate_model(RunConfig, config.model_dump(mode="json") | slow, "the test")
    rating = {(u, i): r for u, i, _, r in rated}
    site = make_site(tmp_path, config)
    fed = assemble_federation(config, Machine())
    for block, rows in zip(fed.stream.blocks, rows_of_blocks(config), strict=True):
        site.publish(list(fed.stream.item_ids[: block.n_items]))
        for number, node in site.transport.members.items():
            node.store.add_interactions([(u, i, t, rating[u, i]) for u, i, t in rows if home_node(u) == number])
        site.next_block()
    assert ("rating" in fed.stream.blocks[0].train.values) == (objective == "squared")
    whole = run_lab(config)
    assert are_close(site.arrays()["now/items"], whole.server.items)
    plain = site_config("ego" if objective == "bpr" else "fedavg")
    assert not are_close(whole.server.items, run_lab(plain).server.items, 1e-3)
    close_nodes(site)


def test_noise_reaches_a_statistic_that_nodes_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node adds its own, so the sum carries three times the variance; the server solves what it gets."""
    monkeypatch.setattr(Clip, "noise", 0.01)
    monkeypatch.setattr(Clip, "most", 1e9)
    config = config_with_parts("tally", Clip)
    site = make_site(tmp_path, config)
    play_blocks(site)
    quiet = run_lab(config_with_parts("tally")).server.parts["tally"]
    result = site.arrays()
    assert len(result["now/parts/tally/total"]) > len(quiet["total"])  # pairs that nobody has are no longer zero
    assert all(np.isfinite(v).all() for v in result.values() if v.dtype.kind == "f")
    close_nodes(site)


# A model that trains rows and reads what people did before


class Remembers(MF):
    """Matrix factorisation that leans to items of earlier blocks: it trains as ever, and scores with both."""

    name = "probe-remembers"
    reads_history = True

    def represent_users(self, private: dict[str, Any], heads: dict[str, Any], context: Any) -> dict[str, Any]:
        return private

    def list_context_items(self, view: CohortView) -> None:
        assert view.history is not None
        seen.append(int(view.history.counts().sum()))


seen: list[int] = []


def test_a_model_may_train_and_read_history() -> None:
    seen.clear()
    blocks = make_block(0, 7, LISTS, [[3], [], [], [], []]), make_block(1, 7, LISTS, [[3], [], [], [], []], known=5)
    fed = federate(make_stream(*blocks), Remembers(MF.Config(dim=4)), rounds=2)
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    assert len(progress.results) == 2
    assert seen[0] == 0
    assert max(seen) >= sum(len(entry) for entry in LISTS)  # in the second block


# What makes no sense


def test_incompatible_parts_are_refused_in_one_sentence() -> None:
    with pytest.raises(TacitaError, match=r"part 'replay' changes how item rows are trained.*sends a statistic"):
        run_lab(
            validate_model(RunConfig, site_config("tally").model_dump(mode="json") | {"method": "f3crec"}, "the test")
        )
    with pytest.raises(TacitaError, match=r"part 'probe-budget'.*sends a probe-scores, which it cannot change"):
        run_lab(config_with_parts("tally", Budget, WritesLetters))
    with pytest.raises(TacitaError, match=r"'fraction' needs somebody who knows everybody.*use 'poisson'"):
        check_live_settings(site_config("fedavg", participation={"kind": "fraction", "rate": 0.5}))
    fed = small()
    with pytest.raises(TacitaError, match="nothing in this run can carry out 'leave'"):
        handle_requests(fed, started(fed), Request("leave", 1, np.zeros(0, np.int32)))
    with pytest.raises(TacitaError, match="no part of this run asks 'elsewhere/x'"):
        small().fields(ServerState(np.zeros((7, 4), np.float32), {}), Question("x", owner="elsewhere"))


@pytest.mark.parametrize(
    ("attribute", "decision", "words"),
    [
        ("fills", "data", "what is learned from"),
        ("fills", "negatives", "the negatives"),
        ("fills", "labels", "what samples are"),
        ("serves", "scores", "which model answers"),
        ("serves", "personal_scores", "what a person's own model is"),
    ],
)
def test_two_parts_cannot_fill_the_same_slot(attribute: str, decision: str, words: str) -> None:
    kinds = [type(name, (Part,), {"name": name, attribute: frozenset({decision})}) for name in ("one", "two")]
    with pytest.raises(TacitaError, match=f"parts 'one' and 'two' both decide {words}; leave one of them out"):
        small(*kinds)


@pytest.mark.parametrize("name", ["fedavg", "tally"])
def test_exact_sums_equal_plain_sums(name: str) -> None:
    config = site_config(name)
    ideal = config.model_copy(update={"train": config.train.model_copy(update={"aggregator": "ideal"})})
    plain, exact = run_lab(config), run_lab(ideal)
    assert are_close(exact.server.items, plain.server.items, 1e-4)
    for head, value in plain.server.heads.items():
        if value.dtype.kind == "f":
            assert are_close(exact.server.heads[head], value, 1e-4)
