"""FedKDRec, its ablations and what it is compared with, by name; each brings the settings of its paper along."""

from __future__ import annotations

from typing import Any

from tacita.round.registry import register_preset

TRANSFER = "prediction-transfer"
SETTINGS: dict[str, Any] = {
    "backbone": {"name": "neumf"},
    "train": {
        "rounds": 200,
        "local_epochs": 2,
        "batch_size": 256,
        "optimiser": "lazy-adam",
        "weight_decay": 1e-6,
        "participation": {"kind": "fraction", "rate": 0.1},
    },
}
"""E.1: what the paper's methods share."""

PTF: dict[str, Any] = {
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

_SERVER = {"name": "neuncf", "dim": 32, "tower": [32, 16], "lr": 1e-3}


def _register_fedkdrec_preset(name: str, **options: Any) -> None:
    register_preset(name, {"name": TRANSFER, **options}, settings=SETTINGS)


_register_fedkdrec_preset("fedkdrec")
_register_fedkdrec_preset("fedkdrec-paper", alpha=0.5)
_register_fedkdrec_preset("fedkdrec-no-mix", alpha=0.0)  # -m
_register_fedkdrec_preset("fedkdrec-no-weights", alpha=0.5, weighting=False)  # -c
_register_fedkdrec_preset("fedkdrec-no-picks", alpha=0.5, select="none")  # -s
_register_fedkdrec_preset("fedkdrec-confident", alpha=0.5, select="confident")  # ~s
_register_fedkdrec_preset("ptf-fedrec-inframe", alpha=0.0, weighting=False, select="confident")  # -m-c~s
register_preset(
    "ptf-fedrec",
    {
        "name": TRANSFER, "scheme": "ptf", "swap_select": "top", "weighting": False, "select": "confident",
        "server": _SERVER, "server_epochs": 2, "server_loss": "sum", "server_decay": 0.0,
    },
    settings=PTF,
)  # fmt: skip

_ROWS = {**SETTINGS, "backbone": {"name": "mf", "lr": 1e-3, "item_lr_scale": 1.0}}
register_preset("fedmf-kd", settings=_ROWS)
register_preset("fedncf-kd", settings={**SETTINGS, "backbone": {"name": "neuncf", "tower": [128, 64]}})
register_preset(
    "fedpergnn",
    {"name": "neighbours"},
    {"name": "cover"},
    settings={**SETTINGS, "backbone": {"name": "fedpergnn"}},
)
