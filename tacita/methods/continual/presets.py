"""F3CRec, its ablations and what it is compared with, by name.

The presets' values were chosen on validation of ML-100K, by model; other data may want others (`tacita tune`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tacita.round.preset import TunedSettings
from tacita.round.registry import register_preset

RATES = {"mf": 1.0, "ncf": 0.04, "pfedrec": 0.04}
"""The learning rate of a model, for all methods."""

PRINTED = ("replay.top_n", "replay.eps", "replay.weight", "temporal-mean.beta")
"""Defaults that are the README's best for FedMF on ML-100K."""

_Options = dict[str, dict[str, Any]]

F3CREC: dict[str, _Options] = {
    "mf": {"replay": {"weight": 0.001, "top_n": 50, "eps": 0.0003}, "temporal-mean": {"beta": 0.5}},
    "ncf": {"replay": {"weight": 0.1, "top_n": 50, "eps": 0.003}, "temporal-mean": {"beta": 0.9}},
    "pfedrec": {"replay": {"weight": 0.1, "top_n": 30, "eps": 0.0001}, "temporal-mean": {"beta": 0.7}},
}
REG: dict[str, _Options] = {
    "mf": {"proximal": {"strength": 1e-4}},
    "ncf": {"proximal": {"strength": 1e-5}},
    "pfedrec": {"proximal": {"strength": 1e-5}},
}
KD: dict[str, _Options] = {
    "mf": {"replay": {"weight": 0.1, "top_n": 50}},
    "ncf": {"replay": {"weight": 0.001, "top_n": 30}},
    "pfedrec": {"replay": {"weight": 0.01, "top_n": 30}},
}
RLP2: dict[str, _Options] = {
    "mf": {"error-memory": {"weight": 0.2, "neighbours": 20}},
    "ncf": {"error-memory": {"weight": 0.4, "neighbours": 20}},
    "pfedrec": {"error-memory": {"weight": 0.4, "neighbours": 20, "threshold": 0.1}},
}
SPP: dict[str, _Options] = {
    "mf": {"proxies": {"weight": 1e-4, "n_stability": 3, "n_plasticity": 5, "rank_limit": 50}},
    "ncf": {"proxies": {"weight": 0.1, "n_stability": 1, "n_plasticity": 1, "rank_limit": 50}},
    "pfedrec": {"proxies": {"weight": 0.1, "n_stability": 1, "n_plasticity": 1, "rank_limit": 50}},
}


def _tuned(row: str, options: Mapping[str, _Options]) -> TunedSettings:
    """The rate of each model, with a method's own options."""
    by_backbone = {}
    for backbone, rate in RATES.items():
        by_backbone[backbone] = {"backbone": {"lr": rate}, "parts": options.get(backbone, {})}
    return TunedSettings(row, "ml-100k", by_backbone)


register_preset("ft", tuned=_tuned("f3crec/table2:ft", {}))
register_preset("reg", {"name": "proximal"}, tuned=_tuned("f3crec/table2:reg", REG))
register_preset("kd", {"name": "replay", "eps": 0.0}, tuned=_tuned("f3crec/table2:kd", KD))
register_preset("rlp2", {"name": "error-memory"}, tuned=_tuned("f3crec/table2:rlp2", RLP2))
register_preset("spp", {"name": "proxies"}, tuned=_tuned("f3crec/table2:spp", SPP))
register_preset(
    "f3crec",
    {"name": "replay"},
    {"name": "temporal-mean"},
    printed=PRINTED,
    tuned=_tuned("f3crec/table2:f3crec", F3CREC),
)

# without a side of F3CRec, or without what makes it adaptive
register_preset("f3crec-no-client", {"name": "temporal-mean"}, tuned=_tuned("f3crec/table3:no_client", F3CREC))
register_preset(
    "f3crec-fixed-replay",
    {"name": "replay", "eps": 0.0},
    {"name": "temporal-mean"},
    tuned=_tuned("f3crec/table3:fixed_replay", F3CREC),
)
register_preset("f3crec-no-server", {"name": "replay"}, tuned=_tuned("f3crec/table6:no_server", F3CREC))
register_preset(
    "f3crec-uniform-mean",
    {"name": "replay"},
    {"name": "temporal-mean", "itemwise": False},
    tuned=_tuned("f3crec/table6:uniform_mean", F3CREC),
)
