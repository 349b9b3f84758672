"""What to do next after a result: a command for each thing that could be better."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from tacita.core.config import RunConfig
from tacita.report.run_data import exchanges_once

LATE_SHARE = 0.1  # of the rounds of a block: a best round so near to the cap had more to gain


def list_advice(config: RunConfig, result: Mapping[str, Any]) -> list[str]:
    """Sentences that each end with the next command; none where nothing is wrong."""
    advice = []
    capped = find_capped_blocks(config, result)
    if capped:
        listed = ", ".join(map(str, capped))
        plural = "s" if len(capped) > 1 else ""
        command = f"{_format_command(config)} --rounds {2 * config.train.rounds}"
        advice.append(
            f"Not converged: validation still rose at the last rounds of block{plural} {listed} "
            f"(train.rounds = {config.train.rounds}). Go further with `{command}`."
        )
    backbone = str(config.backbone.get("name", "mf"))
    if _is_beaten(config, result) and not exchanges_once(backbone):
        advice.append(
            f"A control is better. Try what fits these data best: `tacita train --data {_format_data(config)}`."
        )
    return advice


def find_capped_blocks(config: RunConfig, result: Mapping[str, Any]) -> list[int]:
    """Blocks that ended at the cap of rounds while validation was still rising."""
    if exchanges_once(str(config.backbone.get("name", "mf"))):
        return []
    cap = config.train.rounds
    late = cap - max(1, int(LATE_SHARE * cap))
    capped = []
    for block in result["blocks"]:
        if block["rounds"] >= cap and block["best_round"] > late and block["valid"] is not None:
            capped.append(int(block["block"]))
    return capped


def _is_beaten(config: RunConfig, result: Mapping[str, Any]) -> bool:
    metric = config.evaluate.select_by
    own = result["mean"].get(metric)
    if own is None:
        return False
    scores = [control["mean"].get(metric, 0.0) for control in result["controls"].values() if "mean" in control]
    return any(score > own for score in scores)


def _format_command(config: RunConfig) -> str:
    backbone = str(config.backbone.get("name", "mf"))
    return f"tacita train --data {_format_data(config)} --backbone {backbone} --method {config.method}"


def _format_data(config: RunConfig) -> str:
    return shlex.quote(config.data)
