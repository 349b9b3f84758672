"""FedShare, its variants and what it is compared with, by name.

Each brings the settings of the paper along, and ours where the paper has none. What tables report was chosen on
validation of ML-100K and MovieLens Latest Small; NAME-paper has what the paper prints.
"""

from __future__ import annotations

from typing import Any

from tacita.round.preset import TunedSettings
from tacita.round.registry import register_preset

FEDSHARE: dict[str, Any] = {
    "split": {"kind": "random"},
    "backbone": {"name": "ego", "dim": 32, "lr": 0.01, "item_lr_scale": 1.0},
    "train": {
        "rounds": 200,
        "patience": 20,
        "local_epochs": 5,
        "batch_size": 1_000_000,  # a client's pairs all at once
        "negatives": 1,
        "redraw": "epoch",
        "objective": "bpr",
        "l2": 1e-4,
        "optimiser": "lazy-adam",
        "participation": {"kind": "fraction", "rate": 0.1},
        "aggregation": "weighted",
    },
    "evaluate": {"metrics": ["hr", "ndcg"], "every": 5, "unmasked": True},
}
"""What all methods of the paper share (A.3 to A.5, A.9)."""

_OURS = (
    "backbone.lr",
    "train.rounds",
    "train.patience",
    "train.local_epochs",
    "train.negatives",
    "train.optimiser",
    "train.participation",
    "evaluate.every",
    "evaluate.unmasked",
)

_Options = dict[str, dict[str, Any]]

SHARED_GRAPH: _Options = {"shared-graph": {"bpr_scale": 5.0, "lr": 0.01, "lam1": 0.3, "tau": 0.5}}
MENDED_GRAPH: _Options = {"graph-mending": {"bpr_scale": 5.0, "lr": 0.01, "lam1": 0.3, "tau": 0.5}}
PERTURBED_GRAPH: _Options = {"contribution": {"bpr_scale": 1.0, "lr": 0.019, "lam1": 0.3, "tau": 0.5}}
SHARDS: _Options = {"decoupled": {"bpr_scale": 1.0, "lr": 0.019, "lam1": 0.3, "tau": 0.5}}
SERVER_CLIENT: _Options = {"server-client": {"bpr_scale": 5.0, "lr": 0.011}}


def _tuned(
    variant: str, options: _Options, lr: float = 0.015, scale: float = 5.0, table: str = "table3"
) -> TunedSettings:
    """What a row was trained with. Items do not take in the user, as no candidate of a test does."""
    backbone = {"lr": lr, "item_propagation": False}
    train = {"aggregation": "per-row", "weigh_by": "data", "bpr_scale": scale}
    ego = {"backbone": backbone, "train": train, "parts": options}
    return TunedSettings(f"fedshare/{table}:{variant}", "ml-100k", {"ego": ego})


def _register(name: str, *parts: dict[str, Any], tuned: TunedSettings) -> None:
    register_preset(name, {"name": "sharing"}, *parts, settings=FEDSHARE, ours=_OURS, tuned=tuned)


_CONTRAST = {"name": "contrastive-unlearning"}
_ROLLBACK = {**_CONTRAST, "rollback": True, "learns_on": True, "reset": 4.0, "lr": 3e-4}
_GRAPH = {"name": "shared-graph", "snapshots": 0}  # only contrast needs earlier tables

_LOCAL: dict[str, Any] = {
    "backbone": {"lr": 0.015, "item_propagation": False},
    "train": {"aggregation": "per-row", "bpr_scale": 5.0, "patience": 30},
    "parts": {"sharing": {}},
}
# what is shared is learned from by nobody; its only row is that of the page that compares all methods
_register("fedshare-local", tuned=TunedSettings("choose/choose:fedshare_local", "ml-100k", {"ego": _LOCAL}))
_register("fedshare", {"name": "shared-graph"}, _CONTRAST, tuned=_tuned("fedshare", SHARED_GRAPH))
_register("fedshare-rollback", {"name": "shared-graph"}, _ROLLBACK, tuned=_tuned("contrast_rollback", SHARED_GRAPH))

# Table IV: without the agreement, and without the ranking
_register(
    "fedshare-no-cl",
    {"name": "shared-graph", "lam1": 0.0},
    _CONTRAST,
    tuned=_tuned("no_cl", SHARED_GRAPH, table="table4"),
)
_register(
    "fedshare-no-bpr",
    {"name": "shared-graph", "bpr": False},
    _CONTRAST,
    tuned=_tuned("no_bpr", SHARED_GRAPH, table="table4"),
)

register_preset(
    "fedshare-decoupled",
    {"name": "sharing", "exclude": "local"},
    {"name": "decoupled"},
    settings=FEDSHARE,
    ours=_OURS,
    tuned=_tuned("decoupled", SHARDS, lr=0.024, scale=1.0),
)  # D.1
_register("fedshare-replay", {"name": "delta-replay"}, _GRAPH, tuned=_tuned("replay_out", SHARED_GRAPH))

# FedShare's learning, and other ways to take back what was shared (C.4 to C.7)

_register("fedshare-retrain", _GRAPH, {"name": "retrain"}, tuned=_tuned("retrain", SHARED_GRAPH))
_register("fedshare-rounds", _GRAPH, {"name": "ordinary-rounds"}, tuned=_tuned("rounds", SHARED_GRAPH))  # a control
_register("fedshare-fru", {"name": "fru"}, _GRAPH, tuned=_tuned("fru", SHARED_GRAPH))
# the station holds what devices did, not the server's steps
_register("fedshare-cufru", {"name": "cufru"}, _GRAPH, tuned=_tuned("cufru", SHARED_GRAPH))
# the server's own steps are what it takes back
_register("fedshare-cfru", _GRAPH, {"name": "cfru"}, tuned=_tuned("cfru", {**SHARED_GRAPH, "cfru": {"keep": 0.05}}))

# what FedShare is compared with (C.1 to C.3)

_register("fedshare-fedavg", {"name": "server-client"}, tuned=_tuned("fedshare_fedavg", SERVER_CLIENT))
_register("cdcgnnfed", {"name": "graph-mending", "contrast_users": True}, tuned=_tuned("cdcgnnfed", MENDED_GRAPH))
register_preset(
    "pdc-frs",
    {"name": "sharing", "after": 10, "still_learn": True},  # what leaves is another item, from a table that has learned
    {"name": "contribution"},
    settings=FEDSHARE,
    ours=_OURS,
    tuned=_tuned("pdc_frs", PERTURBED_GRAPH, lr=0.024, scale=1.0),
)
