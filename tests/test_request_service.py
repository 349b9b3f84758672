"""The door of a run folder: every method behind it, one sentence for what cannot be, certificates, and no traces."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.run_requests import (
    METHODS,
    RowReset,
    SharedItemsUnlearning,
    assert_valid_certificate,
    certificate_of,
    exit_code_of,
    find_sharer,
    forget_items,
    history_of,
    shared_items_of,
    train_preset,
    unlearning_config,
)
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.files import read_arrays, write_arrays
from tacita.core.types import Arrays, Ragged, ServerState
from tacita.federation.evaluation import TrainedState
from tacita.round import registry
from tacita.round.capabilities import DeviceQuery, RoundPlayer
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport
from tacita.runs import training
from tacita.runs.artefacts import ScanTargets, find_traces
from tacita.runs.forgetting.reopened_run import reopen_run, restrict_stream
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest, read_request_file
from tacita.runs.forgetting.verification import find_emptied, find_largest_difference, retrain_run
from tacita.runs.run_folder import open_saved, read_lists


class Keeps(RowReset):
    """The same, but the server keeps the table as it was."""

    name = "probe-keeps"

    def server_block_start(self, server: ServerState) -> Arrays:
        return {"old": server.items}

    def server_step(self, before: ServerState, server: ServerState, total: Any) -> ServerState:
        return server.with_part(self.name, {"old": server.items.astype(np.float32)})

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        table = server.items
        handled = super().on_server(server, requests, ask, play)
        assert handled is not None
        return handled[0].with_part(self.name, {"old": table}), handled[1]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Any:
    for part in (RowReset, Keeps, SharedItemsUnlearning):
        registry._PARTS[part.name] = part
    yield
    for part in (RowReset, Keeps, SharedItemsUnlearning):
        del registry._PARTS[part.name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("door")
    training.train(unlearning_config("probe-blunt"), out / "blunt")
    training.train(unlearning_config("probe-keeps"), out / "keeps")
    training.train(unlearning_config("sharing", "probe-shared"), out / "shared")
    training.train(unlearning_config(), out / "plain")
    return out


@pytest.fixture
def blunt(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "blunt", tmp_path / "blunt"))


@pytest.fixture
def shared(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "shared", tmp_path / "shared"))


def bytes_of(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


# What is carried out


def test_items_leave_the_device_the_model_and_the_folder(blunt: Path) -> None:
    history = history_of(blunt, "u1")
    before = open_saved(blunt)
    certificate = forget_items(blunt, {"u1": history[:2]})
    after = open_saved(blunt)
    assert history_of(blunt, "u1") == history[2:]
    assert (after.server_arrays["items"] != before.server_arrays["items"]).any()
    assert certificate["purged"]["clean"] is True
    assert certificate["purged"]["pairs"] == []
    assert (certificate["request"]["n_items"], certificate["request"]["scope"]) == (2, "items")
    assert certificate["model"]["sha256_before"] != certificate["model"]["sha256_after"]
    assert json.loads((blunt / "forget-1.json").read_text()) == certificate
    assert (
        len(after.client_arrays["lists/parts/probe-blunt/gone:item"]) == 0
    )  # a list of what is gone would hold it still
    repeat = forget_items(blunt, {"u1": history[2:3]})
    assert repeat["model"]["sha256_before"] == certificate["model"]["sha256_after"]


def test_derived_files_are_rebuilt(blunt: Path) -> None:
    before = json.loads((blunt / "result.json").read_text())
    report = (blunt / "report.html").read_bytes()
    forget_items(blunt, {user: None for user in ("u1", "u2", "u3", "u4")})
    after = json.loads((blunt / "result.json").read_text())
    assert after["blocks"][-1]["users"] < before["blocks"][-1]["users"]
    assert after["blocks"][-1]["rounds"] == before["blocks"][-1]["rounds"]
    assert after["mean"] != before["mean"]
    assert (blunt / "report.html").read_bytes() != report


def test_user_who_leaves_keeps_no_device_state(blunt: Path) -> None:
    certificate = forget_items(blunt, {"u1": None})
    saved = open_saved(blunt)
    row = saved.find_user_numbers(["u1"])[0]
    assert history_of(blunt, "u1") == []
    assert not saved.client_arrays["private"][row].any()
    assert certificate["request"]["scope"] == "user"
    assert certificate["purged"]["clean"] is True


def test_later_rounds_ignore_withdrawn_items(blunt: Path) -> None:
    history = history_of(blunt, "u1")
    forget_items(blunt, {"u1": history[:3]})
    run = reopen_run(blunt)
    gone = [open_saved(blunt).ids["items"].index(entry) for entry in history[:3]]
    for block in run.federation.stream.blocks:
        for lists in (block.train, block.valid, block.test):
            assert not set(lists.row(run.saved.find_user_numbers(["u1"])[0]).tolist()) & set(gone)


def test_request_file_covers_many_users(blunt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {user: history_of(blunt, user)[:2] for user in ("u1", "u2", "u3")}
    lines = [f"{item},{user}" for user, items in wanted.items() for item in items]
    (tmp_path / "wanted.csv").write_text("\n".join(["item,user", *lines]) + "\n")
    assert exit_code_of("forget", "--run", str(blunt), "--from", str(tmp_path / "wanted.csv"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["request"]["subjects"]) == 3
    assert document["request"]["n_items"] == 6
    assert all(not set(items) & set(history_of(blunt, user)) for user, items in wanted.items())


def test_batched_and_single_requests_leave_the_same_users(made: Path, tmp_path: Path) -> None:
    first, other = (Path(shutil.copytree(made / "blunt", tmp_path / name)) for name in ("one", "other"))
    wanted: dict[str, list[str] | None] = {user: history_of(first, user)[:2] for user in ("u1", "u2")}
    forget_items(first, wanted)
    for user, items in wanted.items():
        forget_items(other, {user: items})
    for name in ("history", "current"):
        assert (
            read_lists(open_saved(first).client_arrays, name).ids.tolist()
            == read_lists(open_saved(other).client_arrays, name).ids.tolist()
        )


# What changes nothing


def test_an_empty_request_changes_no_byte(blunt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.csv").write_text("user,item\n")
    before = bytes_of(blunt)
    assert exit_code_of("forget", "--run", str(blunt), "--from", str(tmp_path / "none.csv")) == 0
    assert "nobody asks for anything" in " ".join(capsys.readouterr().out.split()).lower()
    assert bytes_of(blunt) == before


def test_repeated_request_changes_nothing(blunt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a person nothing is left: that is what was asked for. Of an item it cannot be told from never having been."""
    item = history_of(blunt, "u2")[0]
    assert exit_code_of("forget", "--run", str(blunt), "--user", "u1", "--all") == 0
    assert exit_code_of("forget", "--run", str(blunt), "--user", "u2", "--items", item) == 0
    before = bytes_of(blunt)
    capsys.readouterr()
    assert exit_code_of("forget", "--run", str(blunt), "--user", "u1", "--all") == 0
    assert "already forgotten" in " ".join(capsys.readouterr().out.split())
    assert exit_code_of("forget", "--run", str(blunt), "--user", "u2", "--items", item) == 2
    assert f"has no item '{item}'" in capsys.readouterr().err
    assert bytes_of(blunt) == before


WRONG = [
    ("blunt", "forget", ["--user", "nobody", "--all"], "user 'nobody' is not in"),
    ("blunt", "forget", ["--user", "u1", "--items", "never"], "item 'never' is not in"),
    ("blunt", "forget", ["--user", "u1", "--from", "x.csv"], "either --user ID or --from FILE"),
    ("blunt", "forget", ["--from", "/no/such.csv"], "cannot read requests from /no/such.csv: there is no such file"),
    ("blunt", "forget", ["--from", "x.csv", "--all"], "leave out --items and --all"),
    ("blunt", "share", ["--user", "u1", "--all"], "train with --method fedshare"),
    ("blunt", "unshare", ["--user", "u1", "--items", "i1"], "nobody shares anything in a run"),
    ("shared", "unshare", ["--user", "u1"], "say what to unshare"),
]


@pytest.mark.parametrize(("folder", "verb", "question", "sentence"), WRONG)
def test_impossible_requests_are_refused_in_one_sentence(
    made: Path, folder: str, verb: str, question: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(made / folder)
    assert exit_code_of(verb, "--run", str(made / folder), *question) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.count("\n") == 1
    assert bytes_of(made / folder) == before


@pytest.mark.parametrize("text", ["", "user\n", "person,item\nu1,i1\n", "user,item\nu1,\n", "user,item\nu1\n"])
def test_request_file_without_users_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(TacitaError, match=r"x\.csv"):
        read_request_file(tmp_path / "x.csv", "forget")


# What is shared


def test_unshare_reverts_share(shared: Path) -> None:
    user = next(u for u in open_saved(shared).ids["users"] if not shared_items_of(shared, u))
    run = reopen_run(shared)
    number = run.saved.find_user_numbers([user])[0]
    train = [run.saved.ids["items"][i] for i in run.federation.stream.blocks[0].train.row(number)]
    result = submit_request(shared, RawRequest("share", {user: train[:2]}))
    assert result.certificate is None
    assert sorted(shared_items_of(shared, user)) == sorted(train[:2])
    assert "is shared already" in submit_request(shared, RawRequest("share", {user: train[:2]})).message
    model = open_saved(shared).server_arrays["items"].copy()
    outcome = certificate_of(submit_request(shared, RawRequest("unshare", {user: train[:1]})))
    assert (outcome["request"]["scope"], outcome["method"]["name"]) == ("shared_edges", "probe-shared")
    assert "takes shared ones back" in outcome["method"]["why"]
    assert shared_items_of(shared, user) == train[1:2]
    assert train[0] not in history_of(shared, user)  # "delete": dropped everywhere
    assert outcome["purged"]["clean"] is True
    assert (open_saved(shared).server_arrays["items"] != model).any()
    with pytest.raises(TacitaError, match="never shared, or taken back"):
        submit_request(shared, RawRequest("unshare", {user: train[:1]}))
    with pytest.raises(TacitaError, match="taken back and gone"):
        submit_request(shared, RawRequest("share", {user: train[:1]}))


def test_unlearning_route_depends_on_what_was_shared(shared: Path) -> None:
    users = open_saved(shared).ids["users"]
    stranger = next(u for u in users if not shared_items_of(shared, u))
    certificate = forget_items(shared, {stranger: None})
    assert "none of that was shared, and 'probe-shared' takes back what was shared only" in certificate["method"]["why"]
    assert (certificate["method"]["name"], certificate["method"]["exact"]) == ("retrain", True)
    user = find_sharer(shared, 2)
    certificate = forget_items(shared, {user: shared_items_of(shared, user)[:1]})
    assert "all 1 interactions were shared" in certificate["method"]["why"]
    certificate = forget_items(shared, {user: None})
    remainder = "never shared stays in the model" in certificate["residual_risk"]
    assert remainder == (
        "interactions were shared, and" in certificate["method"]["why"] and "all" not in certificate["method"]["why"]
    )


# Certificates


@pytest.mark.parametrize("verify", [False, True])
def test_a_certificate_has_every_section_and_no_item(blunt: Path, verify: bool) -> None:
    history = history_of(blunt, "u1")
    certificate = forget_items(blunt, {"u1": history[:3], "u2": history_of(blunt, "u2")[:1]}, verify)
    assert_valid_certificate(certificate)
    text = (blunt / "forget-1.json").read_text()
    assert not any(f'"{raw}"' in text for raw in [*open_saved(blunt).ids["items"], "u1", "u2"])


def test_certificate_reports_the_verified_guarantee_not_the_claimed_one(made: Path, tmp_path: Path) -> None:
    first, other = (Path(shutil.copytree(made / "blunt", tmp_path / name)) for name in ("one", "other"))
    wanted: dict[str, list[str] | None] = {"u1": history_of(first, "u1")[:2]}
    assert forget_items(first, wanted)["method"]["exact"] is True  # by its own word, where nobody looks
    certificate = forget_items(other, wanted, verify=True)
    assert certificate["method"]["exact"] is False
    assert certificate["guarantee"]["type"] == "empirical"
    assert certificate["guarantee"]["max_score_difference"] > 0
    audit = certificate["audit"]
    assert audit["reference"] == "retrain"
    assert all(0 <= audit["auc_pairs"][name] <= 1 for name in ("before", "after", "retrain"))
    assert audit["param_distance_ratio"] > 0
    assert 0 <= audit["jaccard20"] <= 1
    assert certificate["utility"].keys() == {"before", "after", "retrain"}
    assert certificate["utility"]["after"].keys() == {"all", "remaining", "requesters"}


def test_users_who_left_are_excluded_from_verification(made: Path, tmp_path: Path) -> None:
    """The leaver's device has no vector left, one that trains again draws one: that is no failure of forgetting."""
    folder = Path(shutil.copytree(made / "plain", tmp_path / "plain"))
    count = len(open_saved(folder).ids["users"])
    for user in ("u1", "u2"):  # the second run from the beginning draws a vector for who left before, as any does
        certificate = forget_items(folder, {user: None}, verify=True)
        assert certificate["method"]["exact"] is True
        assert certificate["guarantee"]["max_score_difference"] == 0.0
        assert certificate["verdict"].startswith("pass")
        assert certificate["guarantee"]["people_compared"] == count - 1


def test_all_users_can_leave(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "plain", tmp_path / "plain"))
    certificate = forget_items(folder, dict.fromkeys(open_saved(folder).ids["users"]), verify=True)
    assert certificate["guarantee"]["people_compared"] == 0
    assert certificate["guarantee"]["max_score_difference"] is None
    assert (
        certificate["verdict"]
        == "pass: the model has the bits of one trained again; nobody is left to compare scores of"
    )


def test_verification_compares_the_device_of_a_leaver(made: Path) -> None:
    """Nobody is left out of the comparison for a request alone, and no difference of anybody else is."""
    run = reopen_run(made / "plain")
    now = TrainedState(run.progress.server, run.progress.clients)
    history = run.federation.stream.collect_history(len(run.federation.stream.blocks))
    remainder = replace(
        run.federation, stream=restrict_stream(run.federation.stream, history.filter_entries(history.rows() != 1))
    )
    was = now.clients.private[[0, 1]].copy()
    assert not find_emptied(remainder, now).any()  # no item, but the vector that was made of them
    other = copy.deepcopy(now.clients)
    other.private[1] += 0.5
    assert find_largest_difference(remainder, now, TrainedState(now.server, other))[0] > 1e-3
    now.clients.private[1] = 0
    assert find_emptied(remainder, now).tolist() == [user == 1 for user in range(len(history))]
    assert find_largest_difference(remainder, now, TrainedState(now.server, other))[0] == 0.0
    assert not find_emptied(run.federation, now).any()  # no vector, but items
    other.private[0] = was[0] + 0.5
    assert find_largest_difference(remainder, now, TrainedState(now.server, other))[0] > 1e-3


def test_retraining_on_all_data_reproduces_the_run(made: Path) -> None:
    for name in ("plain", "shared"):
        run = reopen_run(made / name)
        repeat = retrain_run(run.federation, TrainedState(run.progress.server, run.progress.clients))
        assert np.array_equal(repeat.server.items, run.progress.server.items), name


# The methods that there are


CALLED = {
    "fedshare": "contrastive-unlearning",
    "fedshare-decoupled": "decoupled",
    "fedshare-replay": "delta-replay",
}


@pytest.mark.parametrize("name", METHODS)
def test_request_service_handles_every_preset(tmp_path: Path, name: str) -> None:
    folder = train_preset(name, tmp_path)
    if name.startswith("fedshare"):
        user = find_sharer(folder, 2)
        items = shared_items_of(folder, user)[:2]
        result = certificate_of(submit_request(folder, RawRequest("unshare", {user: items}), verify=True))
        assert not set(shared_items_of(folder, user)) & set(items)
    else:
        user, items = "u1", history_of(folder, "u1")[:2]
        result = forget_items(folder, {user: items}, verify=True)
    assert_valid_certificate(result)
    assert result["method"]["name"] == CALLED.get(name, name)
    assert result["purged"]["clean"] is True, result["purged"]
    assert not set(items) & set(history_of(folder, user))
    assert result["method"]["exact"] is (name in ("retrain", "fedshare-decoupled"))
    assert result["model"]["sha256_before"] != result["model"]["sha256_after"]
    if name not in ("retrain", "fedshare-decoupled"):
        assert result["guarantee"]["type"] == "empirical"


# Traces


def needles(folder: Path, user: str, items: list[str], rows: Any = None) -> ScanTargets:
    saved = open_saved(folder)
    number = saved.find_user_numbers([user])
    ids = np.array([saved.ids["items"].index(item) for item in items])
    gone = Ragged.from_pairs(np.repeat(number, len(ids)), ids, len(saved.ids["users"]))
    known = saved.server_arrays["items"][ids] if rows is None else rows
    return ScanTargets(
        gone, gone, derive_keys(saved.ids["users"]), tuple(saved.ids["users"]), tuple(saved.ids["items"]), rows=known
    )


def test_trace_scan_finds_existing_data(shared: Path) -> None:
    user = find_sharer(shared)
    shared_items = shared_items_of(shared, user)
    traces = find_traces(shared, needles(shared, user, shared_items[:1]))
    places = " ".join(traces["pairs"])
    for where in ("history", "current", "given/sender with given/item", "sharing/shared"):
        assert where in places
    stranger = next(item for item in open_saved(shared).ids["items"] if item not in history_of(shared, user))
    assert find_traces(shared, needles(shared, user, [stranger]))["pairs"] == []


@pytest.mark.parametrize("kind", ["event", "list", "record", "snapshot", "half"])
def test_planted_trace_is_detected(blunt: Path, kind: str) -> None:
    own_values = history_of(blunt, "u1")[:1]
    sought = needles(blunt, "u1", own_values)
    forget_items(blunt, {"u1": own_values})
    assert not any(find_traces(blunt, sought).values())
    user, item = int(sought.users[0]), int(sought.removed.row(sought.users[0])[0])
    if kind == "event":
        with open(blunt / "events.jsonl", "a", encoding="utf-8") as events:
            events.write(json.dumps({"user": "u1", "item": own_values[0]}) + "\n")
    arrays, note = read_arrays(blunt / "server.safetensors")
    if kind == "list":
        lists = Ragged.from_pairs(np.array([user]), np.array([item]), 40)
        arrays |= {"cache/ptr": lists.ptr, "cache/ids": lists.ids}
    if kind == "record":
        arrays |= {"log/who": sought.keys[[user]], "log/what": np.array([item], np.int32)}
    if kind in ("snapshot", "half"):
        old = np.concatenate([np.ones((3, 4), np.float32), sought.rows])
        arrays["parts/x/tables"] = old[None].astype(np.float16 if kind == "half" else np.float32)
    write_arrays(blunt / "server.safetensors", arrays, note)
    traces = find_traces(blunt, sought)
    assert bool(traces["rows"]) == (kind in ("snapshot", "half"))
    assert bool(traces["pairs"]) == (kind in ("event", "list", "record"))


def test_part_that_keeps_the_old_table_fails_verification(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "keeps", tmp_path / "keeps"))
    certificate = forget_items(folder, {"u1": history_of(folder, "u1")[:2]})
    assert certificate["purged"]["rows"] == ["server.safetensors: parts/probe-keeps/old"]
    assert "Item rows as they were before are still in" in certificate["residual_risk"]


def test_restricted_stream_holds_the_remaining_histories() -> None:
    from helpers.oracle import make_block, make_stream

    stream = make_stream(make_block(0, 6, [[0, 1, 2], [3, 4], [5]]))
    remainder = restrict_stream(stream, Ragged.from_lists([[0, 2], [3, 4], []])).blocks[0].train
    assert [remainder.row(u).tolist() for u in range(3)] == [[0, 2], [3, 4], []]
