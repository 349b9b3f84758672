"""What is shared after a device learned from it: who takes it back, what that leaves, and that --again reaches it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.run_requests import certificate_of, exit_code_of, forget_items, history_of, shared_items_of, train_preset
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Ragged
from tacita.federation.evaluation import TrainedState
from tacita.federation.requests import handle_requests
from tacita.methods import resolve_config
from tacita.round.request import Request
from tacita.runs import training
from tacita.runs.forgetting import certification
from tacita.runs.forgetting.pseudonyms import KEY, make_pseudonym, read_key
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.forgetting.verification import retrain_run
from tacita.runs.run_folder import open_saved


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_preset("fedshare-decoupled", tmp_path_factory.mktemp("late"))


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(trained, tmp_path / "run"))


def trained_items(folder: Path, user: str) -> list[str]:
    run = reopen_run(folder)
    return [
        run.saved.ids["items"][i]
        for i in run.federation.stream.blocks[0].train.row(run.saved.find_user_numbers([user])[0])
    ]


def nobody_sharing(folder: Path) -> str:
    return next(u for u in open_saved(folder).ids["users"] if not shared_items_of(folder, u))


def test_items_learned_before_sharing_need_retraining_to_be_forgotten(folder: Path) -> None:
    user = nobody_sharing(folder)
    result = submit_request(folder, RawRequest("share", {user: None}))
    assert (result.n_items, result.n_people) == (len(trained_items(folder, user)), 1)
    assert sorted(shared_items_of(folder, user)) == sorted(trained_items(folder, user))
    outcome = forget_items(folder, {user: None})
    assert outcome["method"]["exact"] is False
    assert "before it was shared stays in the model" in outcome["method"]["leaves"]
    assert outcome["method"]["leaves"] in outcome["residual_risk"]
    assert outcome["purged"]["clean"] is True, outcome["purged"]  # not even that they shared late
    assert derive_keys([user])[0] not in open_saved(folder).server_arrays["parts/decoupled/late"]
    assert "already forgotten" in submit_request(folder, RawRequest("forget", {user: None})).message
    repeat = certificate_of(submit_request(folder, RawRequest("forget", {user: None}, retrain=True)))
    assert (repeat["method"]["name"], repeat["method"]["exact"], repeat["method"]["leaves"]) == ("retrain", True, "")
    assert repeat["model"]["sha256_after"] != outcome["model"]["sha256_after"]
    run = reopen_run(folder)
    retrained = retrain_run(run.federation, TrainedState(run.progress.server, run.progress.clients))
    np.testing.assert_array_equal(retrained.server.items, run.progress.server.items)
    assert (
        submit_request(folder, RawRequest("forget", {user: None}, retrain=True)).certificate is None
    )  # nothing is left to go


def test_unshare_reports_whether_items_were_learned_before(folder: Path) -> None:
    early = next(u for u in open_saved(folder).ids["users"] if shared_items_of(folder, u))
    late = nobody_sharing(folder)
    submit_request(folder, RawRequest("share", {late: trained_items(folder, late)[:2]}))
    for user, stays in ((early, False), (late, True)):
        result = certificate_of(submit_request(folder, RawRequest("unshare", {user: shared_items_of(folder, user)})))
        assert result["method"]["exact"] is not stays
        assert ("before it was shared" in result["residual_risk"]) == bool(result["method"]["leaves"]) == stays


def test_retraining_removes_residue_of_forgotten_items(folder: Path) -> None:
    user = nobody_sharing(folder)
    item = trained_items(folder, user)[:1]
    with pytest.raises(TacitaError, match="never liked or forgotten"):
        submit_request(folder, RawRequest("forget", {user: _others(folder, user)[:1]}, retrain=True))
    submit_request(folder, RawRequest("share", {user: item}))
    assert forget_items(folder, {user: item})["method"]["leaves"]
    repeat = certificate_of(submit_request(folder, RawRequest("forget", {user: item}, retrain=True)))
    assert repeat["method"]["name"] == "retrain"


def _others(folder: Path, user: str) -> list[str]:
    history = set(history_of(folder, user))
    return [item for item in open_saved(folder).ids["items"] if item not in history]


def test_failed_verdict_sets_exit_code_and_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user = next(u for u in open_saved(folder).ids["users"] if len(shared_items_of(folder, u)) > 1)
    items = shared_items_of(folder, user)
    ask = ("unshare", "--run", str(folder), "--user", user, "--items")
    assert exit_code_of(*ask, items[0]) == 0
    capsys.readouterr()
    monkeypatch.setattr(certification, "is_clean", lambda traces: False)
    assert exit_code_of(*ask, items[1], "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"].startswith("fail")
    assert "fail: the search of the folder found" in err


def test_certificate_for_unshared_items_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = next(u for u in open_saved(folder).ids["users"] if shared_items_of(folder, u))
    items = shared_items_of(folder, user)
    run = reopen_run(folder)
    request = Request("unshare", int(derive_keys([user])[0]), np.zeros(0, np.int32))
    assert handle_requests(run.federation, run.progress, request)["decoupled"].exact is False  # nothing was taken
    real = certification._withdrew_nothing
    monkeypatch.setattr(certification, "_withdrew_nothing", lambda case: real(_forged(case)))
    result = certificate_of(submit_request(folder, RawRequest("unshare", {user: items})))
    assert (result["verdict"], result["method"]["exact"]) == (
        "fail: the server's record held nothing of what is taken back",
        False,
    )


def _forged(case: Any) -> Any:
    """The same case on a server that had nobody's items."""
    from dataclasses import replace

    from tacita.core.types import SharedRecord

    was = case.applied.before
    return replace(
        case, applied=replace(case.applied, before=replace(was, server=replace(was.server, shared=SharedRecord())))
    )


def test_pseudonyms_need_the_folders_key(folder: Path) -> None:
    user = next(u for u in open_saved(folder).ids["users"] if shared_items_of(folder, u))
    result = certificate_of(submit_request(folder, RawRequest("unshare", {user: shared_items_of(folder, user)[:1]})))
    key = read_key(folder)
    assert result is not None
    assert key is not None
    assert len(key) == 32
    assert result["request"]["subjects"] == [make_pseudonym(key, user)]
    assert make_pseudonym(bytes(32), user) != make_pseudonym(key, user)
    assert stat.S_IMODE((folder / KEY).stat().st_mode) == 0o600
    (folder / KEY).write_text("spoilt")
    with pytest.raises(TacitaError, match="put it back, or remove it"):
        read_key(folder)


def test_unshare_without_sharers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"data": "synthetic:users=30,items=20,per_user=6", "backbone": {"name": "tally"},
              "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5"}}  # fmt: skip
    out = training.train(resolve_config(values, "the test"), tmp_path / "tally").folder
    for what in (("--all",), ("--items", history_of(out, "u1")[0])):
        assert exit_code_of("unshare", "--run", str(out), "--user", "u1", *what) == 2
        assert "nobody shares anything in a run of method" in capsys.readouterr().err
    assert exit_code_of("forget", "--run", str(out), "--calibrate", "3", "--verify", "--all") == 2
    assert "leave out --all and --verify" in capsys.readouterr().err


def test_devices_record_items_learned_before_sharing(folder: Path) -> None:
    run = reopen_run(folder)
    clients = run.progress.clients
    name = "parts/sharing/learned"
    users = np.arange(clients.n_users)
    assert len(clients.read_list(name, users).ids) == 0  # who chose before the first round had learned nothing
    user = nobody_sharing(folder)
    number = run.saved.find_user_numbers([user])[0]
    items = np.sort(run.federation.stream.blocks[0].train.row(number)[:2])
    key = int(run.federation.stream.user_keys[number])
    handle_requests(run.federation, run.progress, Request("share", key, items))
    assert sorted(clients.read_list(name, [number]).ids.tolist()) == items.tolist()
    handle_requests(run.federation, run.progress, Request("unshare", key, items[:1]))
    assert clients.read_list(name, [number]).ids.tolist() == items[1:].tolist()
    assert isinstance(run.shares.learned, Ragged)
