"""FedKDRec, its ablations and what it is compared with, by name.

What was tuned was chosen on validation of ML-100K, on a seed that no table uses (docs/reproduction/fedkdrec.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tacita.round.preset import TunedSettings
from tacita.round.registry import register_preset

TRANSFER = "prediction-transfer"

Options = dict[str, Any]

OURS = ("train.patience", "train.patience_in", "train.batch_size", "train.weight_decay")

Rates = dict[str, tuple[float, float]]
"""The learning rates of the clients' model and of the server's, by model."""

FEDKDREC_RATES: Rates = {"neumf": (0.025, 0.0023), "neuncf": (0.025, 0.0023), "lightgcn": (0.0015, 0.0023)}
PTF_RATES: Rates = {"neumf": (0.025, 0.004), "neuncf": (0.025, 0.004), "lightgcn": (0.0015, 0.0023)}

MODELS: dict[str, Options] = {"neuncf": {"tower": [128, 64]}}
"""What the paper's models have on ML-100K and not elsewhere."""

FEDKDREC: Options = {
    "server_epochs": 1,  # four passes over the uploads of a tenth of the people learn these by heart
    "weighting": False,  # the agent's weights validate below equal ones, under a cap of 2 equal shares, too
    "graph_above": 0.5,  # a sampled negative that was told makes no edge of LightGCN's graph
}
PTF_INFRAME: Options = {"server_epochs": 1}

PTF: Options = {
    "backbone": {"name": "neuncf", "dim": 16, "tower": [32, 16], "lr": 0.01},
    "train": {
        "rounds": 20,
        "local_epochs": 5,
        "batch_size": 256,
        "optimiser": "lazy-adam",
        "moments": "kept",
    },
}
"""F.1: PTF-FedRec's own procedure: everybody takes part in every round."""

_PTF_SERVER = {"name": "neuncf", "dim": 32, "tower": [32, 16]}


PASSES: Options = {"patience": 10, "patience_in": "passes"}
"""Patience where predictions travel: one user in 25 takes part in none of 30 rounds, and is unknown to the server."""


def make_settings(patience: Options | None = None, **backbone: Any) -> Options:
    """E.1: what the paper's methods share, with a model."""
    return {
        "backbone": backbone,
        "train": {
            "rounds": 200,
            **(patience or {}),
            "local_epochs": 2,
            "batch_size": 256,
            "optimiser": "lazy-adam",
            "weight_decay": 1e-6,
            "participation": {"kind": "fraction", "rate": 0.1},
        },
    }


def _tune_transfer(variant: str, options: Options, rates: Rates) -> TunedSettings:
    """Rates and options of a method that sends predictions, by model."""
    by_backbone: dict[str, Options] = {}
    for name, (rate, server_rate) in rates.items():
        part = {**options, "server": {"lr": server_rate}}
        model = {**MODELS.get(name, {}), "lr": rate}
        by_backbone[name] = {"backbone": model, "parts": {TRANSFER: part}}
    return TunedSettings(f"fedkdrec/{variant}", "ml-100k", by_backbone)


def _register_transfer_preset(name: str, tuned: TunedSettings, **options: Any) -> None:
    register_preset(
        name,
        {"name": TRANSFER, **options},
        settings=make_settings(PASSES, name="neumf"),
        ours=OURS,
        tuned=tuned,
    )


def _register_fedkdrec_preset(name: str, variant: str, **options: Any) -> None:
    tuned = _tune_transfer(variant, FEDKDREC, FEDKDREC_RATES)
    _register_transfer_preset(name, tuned, **options)


_register_fedkdrec_preset("fedkdrec", "table1:fedkdrec", alpha=0.5)
_register_fedkdrec_preset("fedkdrec-no-mix", "table2:no_mix", alpha=0.0)  # -m
_register_fedkdrec_preset("fedkdrec-no-weights", "table2:no_weights", alpha=0.5, weighting=False)  # -c
_register_fedkdrec_preset("fedkdrec-no-picks", "table2:no_picks", alpha=0.5, select="none")  # -s
_register_fedkdrec_preset("fedkdrec-confident", "table2:confident", alpha=0.5, select="confident")  # ~s
_register_transfer_preset(  # -m-c~s
    "ptf-fedrec-inframe",
    _tune_transfer("table1:ptf_inframe", PTF_INFRAME, PTF_RATES),
    alpha=0.0,
    weighting=False,
    select="confident",
)


def _tune_rate(variant: str, backbone: str, rate: float, parts: Mapping[str, Options] | None = None) -> TunedSettings:
    settings = {"backbone": {"lr": rate}, "parts": dict(parts or {})}
    return TunedSettings(f"fedkdrec/table1:{variant}", "ml-100k", {backbone: settings})


register_preset(
    "ptf-fedrec",
    {
        "name": TRANSFER, "scheme": "ptf", "swap_select": "top", "weighting": False, "select": "confident",
        "server": _PTF_SERVER, "server_epochs": 2, "server_loss": "sum", "server_decay": 0.0,
    },
    settings=PTF,
    tuned=_tune_rate("ptf", "neuncf", 0.0061, {TRANSFER: {"server": {"lr": 0.028}}}),
)  # fmt: skip
register_preset(
    "fedmf-kd",
    settings=make_settings(name="mf", lr=1e-3, item_lr_scale=1.0),
    ours=OURS,
    tuned=_tune_rate("fedmf", "mf", 0.085),
)
register_preset(
    "fedncf-kd",
    settings=make_settings(name="neuncf", tower=[128, 64]),
    ours=OURS,
    tuned=_tune_rate("fedncf", "neuncf", 0.016),
)
register_preset(
    "fedpergnn",
    {"name": "neighbours"},
    {"name": "cover"},
    settings=make_settings(name="fedpergnn"),
    ours=OURS,
    tuned=_tune_rate("fedpergnn", "fedpergnn", 0.022),
)
