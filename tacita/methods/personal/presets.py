"""LIPM and what it is compared with, by name; each brings its paper's settings, and ours where it has none."""

from __future__ import annotations

from typing import Any

from tacita.round.preset import TunedSettings
from tacita.round.registry import register_preset

SILOS: dict[str, Any] = {
    "rounds": 50,
    "local_epochs": 5,
    "batch_size": 128,
    "silos": 50,
    "aggregation": "weighted",
    "optimiser": "lazy-adam",
}
"""E.6, and Table 1 of the paper: clients are silos of many people, and all of them take part."""

LIPM: dict[str, Any] = {
    "backbone": {"name": "interest", "mu": 1e-3, "state_scale": 0.1},
    "train": {**SILOS, "held_steps": 1000},  # all of a silo's: each batch has a part of everybody
}
"""With batches of one person each, with mu = 0.1 or with the state's layer like the others no private vector is learned
that tells people apart (docs/reproduction/lipm-dpps.md)."""

OURS = (
    "backbone.mu",
    "backbone.state_scale",
    "train.held_steps",
    "train.silos",
    "train.aggregation",
)
"""What the paper does not say of LIPM."""


def _tune_lipm(row: str, patience: int) -> TunedSettings:
    interest = {
        "backbone": {"lr": 0.0053, "folds": 2},  # no state is made of the item that it is asked about
        "train": {"local_epochs": 1, "patience": patience, "held_steps": 8},  # and states learn several times an epoch
        "parts": {"interest": {}, "fine-tuning": {}},  # with their defaults
    }
    return TunedSettings(row, "ml-100k", {"interest": interest})


def _tune(row: str, model: str, **settings: Any) -> TunedSettings:
    return TunedSettings(row, "ml-100k", {model: settings})


def _register_lipm_preset(name: str, tuned: TunedSettings, **options: Any) -> None:
    register_preset(
        name, {"name": "interest", **options}, {"name": "fine-tuning"}, settings=LIPM, ours=OURS, tuned=tuned
    )


_register_lipm_preset("lipm", _tune_lipm("lipm-dpps/table2:lipm", patience=50))
_register_lipm_preset("lipm-gated", _tune_lipm("choose/choose:lipm_gated", patience=30), fusion="gate")
_register_lipm_preset("lipm-learned", _tune_lipm("choose/choose:lipm_learned", patience=30), weights="learned")
register_preset(  # everybody a client with a budget of their own; weights by data would tell how much there is
    "lipm-dpps",
    {"name": "interest"},
    {"name": "fine-tuning"},
    {"name": "dpps"},
    settings={**LIPM, "train": {**LIPM["train"], "silos": 0, "aggregation": "mean"}},
    tuned=_tune(
        "choose/choose:lipm_dpps", "interest", train={"local_epochs": 1, "patience": 30}, parts={"dpps": {"clip": 0.1}}
    ),
)
register_preset(
    "fedrec",
    {"name": "virtual-ratings"},
    settings={
        "backbone": {"name": "mf", "dim": 20, "lr": 0.4, "init_std": 0.3},
        "train": {
            "rounds": 100,
            "batch_size": 1_000_000,  # a person's gradient all at once
            "negatives": 3,
            "objective": "squared",
            "l2": 1e-3,
            "decay": 0.9,
            "aggregation": "per-row",
        },
    },
    tuned=_tune("choose/choose:fedrec", "mf", backbone={"lr": 0.2}, train={"rounds": 200}),
)
register_preset(
    "fedmf-he",  # encrypted sums are exact sums of whole numbers
    settings={
        "backbone": {"name": "mf", "dim": 20},
        "train": {"rounds": 100, "batch_size": 1_000_000, "aggregator": "ideal"},
    },
    tuned=_tune("choose/choose:fedmf_he", "mf", train={"rounds": 200}),
)
register_preset(
    "fedneumf",
    settings={"backbone": {"name": "neumf", "dim": 64, "tower": [128, 64, 32]}, "train": SILOS},
    tuned=_tune("lipm-dpps/table2:fedncf", "neumf", backbone={"lr": 0.036}, train={"local_epochs": 1, "patience": 50}),
)
register_preset(  # with its own paper's lam = 15 no step is long enough for NeuMF to learn anything in 50 rounds
    "pfedme",
    {"name": "fine-tuning", "pull": 1.0, "rate": 0.01, "steps": 5},
    settings={
        "backbone": {"name": "neumf", "dim": 64, "tower": [128, 64, 32], "init_std": 0.1},
        "train": {
            **SILOS,
            "local_epochs": 1,
            "optimiser": "pfedme",
            "pfedme": {"lam": 1.0, "inner_lr": 0.5, "eta": 0.7},
        },
    },
    tuned=_tune("lipm-dpps/table2:pfedme", "neumf", train={"patience": 50}),
)
