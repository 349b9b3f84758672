"""Run folders, parts that unlearn, and requests to them through the request service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.cli import main
from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import derive_keys
from tacita.core.types import CohortView, Ragged, ServerState, StateUpdate
from tacita.federation.state_arrays import read_server
from tacita.methods import resolve_config
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part
from tacita.round.request import RequestBatch
from tacita.round.state import Role, StateSpec
from tacita.round.task import LocalTask
from tacita.round.unlearning_report import UnlearningReport
from tacita.runs import training
from tacita.runs.forgetting.request_service import RunRequestResult, submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import open_saved, read_lists

SMALL_DATA = "synthetic:users=40,items=30,per_user=9,groups=3"


class RowReset(Part, Unlearning):
    """Starts the rows of what is withdrawn anew, plays a round, and claims to be exact."""

    name = "probe-blunt"
    fills = frozenset({"data"})

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [
            StateSpec("gone", Ragged.empty(n_users), role=Role.WITHDRAWN),
            StateSpec("left", np.zeros(n_users, bool)),
        ]

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        gone = view.lists[self.name]["gone"].join_rows(Ragged(requests.items.ptr, requests.items.ids))
        return {"gone": gone, "left": np.full(len(view.user), requests.kind == "leave")}

    def prepare(self, view: CohortView) -> LocalTask:
        gone, remainder = view.lists[self.name]["gone"], view.parts[self.name]["left"]
        stays = ~gone.holds(view.train.rows(), view.train.ids) & ~remainder[view.train.rows()]
        return LocalTask(view=replace(view, train=view.train.filter_entries(stays)))

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share":
            return None
        rows = server.items.copy()
        rows[requests.items.ids] = 0.01
        report = UnlearningReport(method=self.name, exact=True, rounds=1, purged=())
        return play(server.with_items(rows), None), report


class SharedItemsUnlearning(Part, Unlearning):
    """Forgets what was shared, and nothing else."""

    name = "probe-shared"
    scope = ("given",)

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share":
            return None
        return server.with_items(server.items * np.float32(0.5)), UnlearningReport(method=self.name, exact=False)


def unlearning_config(*parts: str, **more: Any) -> RunConfig:
    values = {
        "data": SMALL_DATA,
        "backbone": {"name": "mf", "dim": 4, "lr": 0.5},
        "parts": [{"name": name} for name in parts],
        "train": {"rounds": 2},
        "split": {"kind": "random"},
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5"},
    }
    return validate_model(RunConfig, values | more, "the test")


def history_of(folder: Path, user: str) -> list[str]:
    saved = open_saved(folder)
    return [
        saved.ids["items"][i]
        for i in read_lists(saved.client_arrays, "history").row(saved.find_user_numbers([user])[0])
    ]


def shared_items_of(folder: Path, user: str) -> list[str]:
    saved = open_saved(folder)
    inputs = read_server(saved.server_arrays, saved.server_note).shared.take_sender_lists(derive_keys([user])).row(0)
    return [saved.ids["items"][i] for i in inputs]


def find_sharer(folder: Path, least: int = 1) -> str:
    return next(user for user in open_saved(folder).ids["users"] if len(shared_items_of(folder, user)) >= least)


def forget_items(folder: Path, wanted: dict[str, list[str] | None], verify: bool = False) -> dict[str, Any]:
    return certificate_of(submit_request(folder, RawRequest("forget", wanted), verify))


def certificate_of(result: RunRequestResult) -> dict[str, Any]:
    """A certificate as its file holds it."""
    assert result.certificate is not None, result.message
    return result.certificate.to_json()


def exit_code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as error:
        main(list(arguments))
    return int(error.value.code or 0)


SCHEMA: dict[str, dict[str, type | tuple[type, ...]]] = {
    "request": {
        "id": int, "received_at": str, "subject_pseudonym": str, "subjects": list, "sent_with": list, "scope": str,
        "n_edges": int, "n_items": int,
    },
    "method": {
        "name": str, "mode": str, "why": str, "exact": bool, "parameters": dict, "code_version": str, "seeds": dict,
    },
    "model": {"sha256_before": str, "sha256_after": str, "sha256_data_remaining": str},
    "participation": {"clients_asked": int, "rounds": int, "bytes_up": float, "bytes_down": float},
    "cost": {
        "seconds_server": float, "seconds_client_total": float, "ratio_to_retrain": (float, str),
        "storage_bytes_server": float, "storage_bytes_client_mean": float,
    },
    "guarantee": {"type": str, "epsilon": object, "delta": object, "psi_bound": object, "assumptions": list},
    "audit": {
        "reference": str, "auc_pairs": (dict, str), "auc_user": (dict, str),
        "param_distance_ratio": (float, str, type(None)), "gram_distance": (float, str, type(None)),
        "noise_floor": (float, str), "rank_percentile": (dict, str), "jaccard20": (float, str),
        "relearn_ratio": (float, str), "canary_exposure": (dict, str),
    },
    "purged": {"emptied": list, "clean": bool, "pairs": list, "people": list, "rows": list},
}  # fmt: skip


def assert_valid_certificate(found: dict[str, Any]) -> None:
    assert found.keys() == {*SCHEMA, "utility", "residual_risk", "verdict"}
    for section, fields in SCHEMA.items():
        for name, kind in fields.items():
            value = found[section][name]
            is_withheld = value == "withheld"  # under a budget: an exact figure that nobody was charged for
            assert is_withheld or isinstance(value, kind), (section, name, value)
    assert isinstance(found["utility"], dict | str)
    assert isinstance(found["residual_risk"], str)
    assert found["verdict"].split(":")[0] in ("pass", "fail", "waiting", "not verified")
    assert found["request"]["scope"] in ("shared_edges", "user", "items")
    assert found["guarantee"]["type"] in ("exact", "up to rounding", "bounded", "empirical", "not run")
    assert len(found["model"]["sha256_after"]) == 64
    json.dumps(found, allow_nan=False)


QUICK = {"rounds": 3, "patience": 50, "participation": {"kind": "all"}}
METHODS: dict[str, dict[str, Any]] = {
    "retrain": {"backbone": {"name": "mf", "dim": 4, "lr": 0.5}},
    "fru": {"backbone": {"name": "mf", "dim": 4, "lr": 0.5}},
    "cufru": {"backbone": {"name": "mf", "dim": 4, "lr": 0.5}},
    "cfru": {
        "backbone": {"name": "mf", "dim": 4, "lr": 0.5},
        "train": QUICK | {"aggregation": "fixed", "denominator": 40.0},
    },
    "fedshare": {"backbone": {"name": "ego", "dim": 4}},
    "fedshare-decoupled": {
        "backbone": {"name": "ego", "dim": 4},
        "parts": [{"name": "decoupled", "sync_every": 1, "steps": 4, "shards": 3}],
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5", "every": 50},  # the last round is the best
    },
    "fedshare-replay": {"backbone": {"name": "ego", "dim": 4}},
}


def train_preset(name: str, out: Path) -> Path:
    values = {
        "data": SMALL_DATA,
        "method": name,
        "train": QUICK,
        "split": {"kind": "random"},
        "evaluate": {"controls": False, "k": [5], "select_by": "ndcg@5"},
    }
    return training.train(resolve_config(values | METHODS[name], "the test"), out / name).folder
