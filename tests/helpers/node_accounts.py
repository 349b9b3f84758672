"""Budgets of the users of a node."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.loopback_site import DATA, SPLIT
from tacita.core.config import RunConfig, validate_model
from tacita.live.node.node import Node

MF = {"name": "mf", "dim": 8}


def dpps_config(**dpps: Any) -> RunConfig:
    part = {"name": "dpps", "clip": 0.01, "releases": 50, **dpps}
    values = {"data": DATA, "split": SPLIT, "seed": 5, "train": {"rounds": 3}, "backbone": MF}
    return validate_model(RunConfig, {**values, "method": "dpps", "parts": [part]}, "the test")


def release_counts(node: Node, run: str = "r") -> np.ndarray:
    state = node.store.load_devices(run)
    assert state is not None
    return np.asarray(state[1]["parts/dpps/times"])
