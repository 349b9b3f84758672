"""One door for every method: of each preset an item and a whole person are forgotten, with a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.run_requests import assert_valid_certificate, certificate_of, find_sharer, history_of, shared_items_of
from tacita.core.draws import derive_keys
from tacita.core.types import ServerState
from tacita.methods import list_preset_names, list_preset_parts, resolve_config
from tacita.methods.continual.f3crec import TemporalMean
from tacita.runs import training
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import open_saved, read_lists

DATA = "synthetic:users=30,items=36,per_user=9,groups=3"
TRANSFER = [name for name in list_preset_names() if "prediction-transfer" in str(list_preset_parts(name))]
REPLAYING = [name for name in list_preset_names() if "'replay'" in str(list_preset_parts(name))]
ROWS = {"backbone": {"name": "mf", "dim": 4, "lr": 0.5}}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"backbone": {"name": "mf", "dim": 4, "lr": 0.02, "item_lr_scale": 1.0}} for name in TRANSFER},
    "fedpergnn": {"backbone": {"name": "fedpergnn", "dim": 4, "lr": 0.02}},
    "fedncf-kd": {},
    "pdc-frs": {**ROWS, "parts": [{"name": "sharing", "after": 1}]},
    "cdcgnnfed": {**ROWS, "parts": [{"name": "graph-mending", "mend_every": 1}]},
    **{name: {**ROWS, "parts": [{"name": "replay", "top_n": 20}]} for name in REPLAYING},
    "retraction": {**ROWS, "train": {"rounds": 2, "aggregation": "fixed"}},
}


def trained(method: str, out: Path, **more: Any) -> Path:
    """A tiny run of a preset."""
    optimiser = {"optimiser": "lazy-adam"} if method in (*TRANSFER, "fedpergnn") else {}
    values: dict[str, Any] = {
        "data": DATA,
        "method": method,
        "train": {"rounds": 2, "participation": {"kind": "all"}, **optimiser},
        "split": {"kind": "random"},
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5", "every": 1},
        **OWN.get(method, ROWS),
        **more,
    }
    return training.train(resolve_config(values, "the test"), out / method).folder


def forgotten(folder: Path, user: str, items: list[str] | None) -> dict[str, Any]:
    result = submit_request(folder, RawRequest("forget", {user: items}))
    certificate = certificate_of(result)
    assert_valid_certificate(certificate)
    assert certificate["purged"]["clean"] is True, certificate["purged"]
    return certificate


@pytest.mark.parametrize("method", list_preset_names())
def test_every_preset_forgets_an_item_and_a_user(method: str, tmp_path: Path) -> None:
    folder = trained(method, tmp_path)
    history = history_of(folder, "u1")
    result = forgotten(folder, "u1", history[:1])
    assert history_of(folder, "u1") == history[1:]
    assert result["method"]["why"].endswith(".")
    able = {"fru", "cufru", "cfru", "retrain"} & {part["name"] for part in list_preset_parts(method)}
    if not able and not shared_items_of(folder, "u1"):
        assert result["method"]["name"] == "retrain"
        assert result["method"]["why"].endswith("so the run is trained again from its beginning without it.")
    result = forgotten(folder, "u2", None)
    assert history_of(folder, "u2") == []
    saved = open_saved(folder)
    assert not saved.client_arrays["private"][saved.find_user_numbers(["u2"])[0]].any()
    assert submit_request(folder, RawRequest("forget", {"u2": None})).certificate is None  # already forgotten
    lists = read_lists(saved.client_arrays, "history")
    assert len(lists.row(saved.find_user_numbers(["u3"])[0]))  # others keep theirs


def test_forgetting_equals_retraining(tmp_path: Path) -> None:
    """Of methods without a part that unlearns: the new model has the bits of a run without the data."""
    for method in ("cdcgnnfed", "fedshare-fedavg"):
        folder = trained(method, tmp_path)
        user = find_sharer(folder, 2)
        items = shared_items_of(folder, user)[:1]
        result = certificate_of(submit_request(folder, RawRequest("unshare", {user: items}), verify=True))
        assert result["method"]["exact"] is True, method
        assert result["verdict"].startswith("pass"), result["verdict"]
        assert not set(shared_items_of(folder, user)) & set(items)


def test_graph_repair_skips_withdrawn_users_and_pairs(tmp_path: Path) -> None:
    folder = trained("cdcgnnfed", tmp_path)
    user = find_sharer(folder, 2)
    item = shared_items_of(folder, user)[0]
    submit_request(folder, RawRequest("unshare", {user: [item]}))
    saved = open_saved(folder)
    number = np.array([saved.ids["items"].index(item)])
    state = saved.server_arrays
    assert derive_keys([user])[0] in state["parts/graph-mending/denied"]
    mended = zip(state.get("parts/graph-mending/mended_sender", []), state.get("parts/graph-mending/mended_item", []))
    assert (derive_keys([user])[0], number[0]) not in set(mended)
    submit_request(folder, RawRequest("forget", {user: None}))  # everything: then nothing is kept of the person either
    assert derive_keys([user])[0] not in open_saved(folder).server_arrays.get("parts/graph-mending/denied", [])


def test_perturbed_uploads_are_stable_and_counted_once(tmp_path: Path) -> None:
    """PDC-FRS: to draw others' items anew would cost them privacy once more."""
    folder = trained("pdc-frs", tmp_path)
    before = open_saved(folder)
    user = next(u for u in before.ids["users"] if told_by(before, u) and shared_here(folder, u))
    item = shared_here(folder, user)[0]
    result = certificate_of(submit_request(folder, RawRequest("unshare", {user: [item]})))
    assert (result["method"]["name"], result["method"]["exact"]) == ("retrain", False)
    assert "stays as it was told" in result["residual_risk"]
    after = open_saved(folder)
    others = [u for u in before.ids["users"] if u != user]
    assert all(sorted(told_by(before, u)) == sorted(told_by(after, u)) for u in others)
    assert np.array_equal(
        after.server_arrays["parts/contribution/told"], before.server_arrays["parts/contribution/told"]
    )
    assert item not in shared_here(folder, user)


def told_by(saved: Any, user: str) -> list[int]:
    """What the server was told by a person."""
    own_values = saved.server_arrays["given/sender"] == derive_keys([user])[0]
    return [int(entry) for entry in saved.server_arrays["given/item"][own_values]]


def shared_here(folder: Path, user: str) -> list[str]:
    """What a person shares, by their own device's word."""
    run = reopen_run(folder)
    return [run.saved.ids["items"][i] for i in run.shared.row(run.saved.find_user_numbers([user])[0])]


def test_retraining_can_be_requested(tmp_path: Path) -> None:
    folder = trained("fedshare", tmp_path)
    user = find_sharer(folder, 1)
    result = certificate_of(
        submit_request(folder, RawRequest("forget", {user: history_of(folder, user)}, retrain=True), verify=True)
    )
    assert (result["method"]["name"], result["method"]["exact"]) == ("retrain", True)
    assert "--again asks for it" in result["method"]["why"]
    assert "stays in the model" not in result["residual_risk"]


# FedShare on a stream of blocks, beside F3CRec


STREAM: dict[str, Any] = {
    "data": "synthetic:users=50,items=40,per_user=16,groups=3,drift=0.3,new=0.1",
    "backbone": {"name": "mf", "dim": 4, "lr": 0.5},
    "split": {"kind": "blocks", "n_blocks": 2},
    "parts": [
        {"name": "sharing", "groups": [1, 1, 1]},
        {"name": "contrastive-unlearning", "rounds": 2, "steps": 2},
        {"name": "replay", "top_n": 5},
        {"name": "temporal-mean"},
    ],
}


def test_sharing_with_f3crec_resumes_and_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("fedshare", tmp_path / "whole", **STREAM)
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(training, "CHECKPOINT_SHARE", float("inf"))

    def stop(report: Any) -> None:
        if report.block == 1:
            raise KeyboardInterrupt

    real = training.train
    monkeypatch.setattr(
        training, "train", lambda *request: real(*request, watcher=training.TrainingCallbacks(on_round=stop))
    )
    with pytest.raises(KeyboardInterrupt):
        trained("fedshare", tmp_path / "stopped", **STREAM)
    folder = training.resume(tmp_path / "stopped" / "fedshare").folder
    first, other = (open_saved(where).server_arrays for where in (whole, folder))
    assert first.keys() == other.keys()
    assert all(np.array_equal(first[name], other[name]) for name in first)
    assert np.array_equal(first["parts/temporal-mean/anchor"], first["items"])

    user = find_sharer(folder, 2)
    items = shared_items_of(folder, user)[:2]
    result = certificate_of(submit_request(folder, RawRequest("unshare", {user: items}), verify=True))
    assert result["method"]["name"] == "contrastive-unlearning"
    assert {"anchor_table", "last_table"} <= set(result["purged"]["emptied"])
    assert result["purged"]["clean"] is True
    assert result["purged"]["rows"] == []
    after = open_saved(folder).server_arrays
    assert np.array_equal(after["parts/temporal-mean/anchor"], after["items"])  # made of the new model
    assert (after["items"] != other["items"]).any()
    assert not set(shared_items_of(folder, user)) & set(items)
    forgotten(folder, "u1", None)


def test_unlearning_rounds_are_not_pulled_to_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained("fedshare", tmp_path, **STREAM)
    observations: list[bool] = []
    real = TemporalMean.server_step

    def watched(self: TemporalMean, before: ServerState, server: ServerState, total: Any) -> ServerState:
        observations.append("anchor" in server.parts.get(self.name, {}))
        return real(self, before, server, total)

    monkeypatch.setattr(TemporalMean, "server_step", watched)
    user = find_sharer(folder, 2)
    submit_request(folder, RawRequest("unshare", {user: shared_items_of(folder, user)}))
    assert observations
    assert not any(observations)
