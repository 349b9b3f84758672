"""FedShare's variants by name; each brings the settings of the paper along, and ours where it has none."""

from __future__ import annotations

from typing import Any

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

register_preset("fedshare-local", {"name": "sharing"}, settings=FEDSHARE)  # what is shared is learned from by nobody


def _register_fedshare_preset(name: str, **learning: Any) -> None:
    parts = {"name": "sharing"}, {"name": "shared-graph", **learning}, {"name": "contrastive-unlearning"}
    register_preset(name, *parts, settings=FEDSHARE)


_register_fedshare_preset("fedshare")
_register_fedshare_preset("fedshare-no-cl", lam1=0.0)  # Table IV: without the agreement
_register_fedshare_preset("fedshare-no-bpr", bpr=False)
register_preset(
    "fedshare-decoupled", {"name": "sharing", "exclude": "local"}, {"name": "decoupled"}, settings=FEDSHARE
)  # D.1
register_preset(
    "fedshare-replay",
    {"name": "sharing"},
    {"name": "delta-replay"},
    {"name": "shared-graph", "snapshots": 0},
    settings=FEDSHARE,
)

# FedShare's learning, and other ways to take back what was shared (C.4 to C.7)


def _register_unlearning_preset(name: str, *parts: dict[str, Any]) -> None:
    register_preset(name, {"name": "sharing"}, *parts, settings=FEDSHARE)


_GRAPH = {"name": "shared-graph", "snapshots": 0}  # only contrast needs earlier tables
_register_unlearning_preset("fedshare-retrain", _GRAPH, {"name": "retrain"})
_register_unlearning_preset("fedshare-fru", {"name": "fru"}, _GRAPH)
_register_unlearning_preset(
    "fedshare-cufru", {"name": "cufru"}, _GRAPH
)  # the station holds what devices did, not the server's steps
_register_unlearning_preset("fedshare-cfru", _GRAPH, {"name": "cfru"})  # the server's own steps are what it takes back

# what FedShare is compared with (C.1 to C.3)

register_preset("fedshare-fedavg", {"name": "sharing"}, {"name": "server-client"}, settings=FEDSHARE)
register_preset("cdcgnnfed", {"name": "sharing"}, {"name": "graph-mending", "contrast_users": True}, settings=FEDSHARE)
register_preset(
    "pdc-frs",
    {"name": "sharing", "after": 10, "still_learn": True},  # what leaves is another item, from a table that has learned
    {"name": "contribution"},
    settings=FEDSHARE,
)
