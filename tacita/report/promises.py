"""What a run promises of people's privacy, in words: an epsilon with all that belongs to it, or that there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tacita.core.config import RunConfig

NO_EPSILON = "Privacy: no epsilon. Nothing that this run releases has noise with a budget."


def privacy_lines(config: RunConfig, blocks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of a run and the results of its blocks."""
    promised = blocks[-1].get("promises", {}) if blocks else {}
    said = promised.get(str(config.backbone.get("name")), {})
    if config.privacy.epsilon is not None and "epsilon" in said:
        return _under_a_budget(config, said)
    if any(name.startswith("epsilon") for one in promised.values() for name in one):
        return []  # a part says it in its own words
    return [NO_EPSILON]


def _under_a_budget(config: RunConfig, said: Mapping[str, float]) -> list[str]:
    blocks, draws = int(said["blocks_planned"]), int(said["noise_draws_in_a_sum"])
    over = "one release" if blocks == 1 else f"{blocks} planned blocks, a release each"
    lines = [
        f"Privacy: epsilon {said['epsilon_planned']:.4g} at delta {said['delta']:.1g} for all that one person told "
        f"(with them or without them), over {over}; who told in every block so far has spent {said['epsilon']:.4g}.",
        "It holds against whoever gets the model, where the sum and its noise are made by somebody trusted. The lab "
        "draws noise from the run's seed: whoever knows it can take the noise off, so a lab run is a rehearsal.",
    ]
    if draws > 1:
        lines[1:] = [
            f"It holds against the server, too: each of {draws} nodes put the whole noise into its own sum, so the sum "
            f"carries {draws**0.5:.2f} times as much as a secure sum would need."
        ]
    backbone = config.backbone
    fixed = [name for name in ("recency", "repeat") if backbone.get(name) == "learn"]
    held = f"{' and '.join(fixed)} {'are' if len(fixed) > 1 else 'is'} fixed at 0, " if fixed else ""
    if "order_share" in said:
        held = (
            f"order has {said['order_share']:.0%} of a person's length, squared (that default, the mixture's and the "
            "recency's were chosen on validation of MovieLens-1M), "
        )
    lines.append(
        f"Outside of the budget: scores on validation and test items, and how many people took part, are told as they "
        f"are; {held}and validation chooses nothing."
    )
    return lines


def privacy_in_brief(config: RunConfig) -> str:
    """One line beside what a run serves."""
    if config.privacy.epsilon is None:
        return NO_EPSILON
    budget = config.privacy
    return f"Privacy: the model was made under epsilon {budget.epsilon:g}, delta {budget.delta:g} for each person."
