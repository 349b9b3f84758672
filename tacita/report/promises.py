"""What a run promises of people's privacy, in words: an epsilon with all that belongs to it, or that there is none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacita.core.config import RunConfig

NO_EPSILON = "Privacy: no epsilon. Nothing that this run releases has noise with a budget."
PRIVACY_KEY = "said_of_privacy"  # where result.json keeps these sentences
AGAINST = {
    "local": "the server, which sees each noised release",
    "silo": "the server, which sees the noised sum of each silo, and not against their own silo",
    "central": "whoever sees the models, and not the sums before their noise",
}
"""Whom a promise holds against, by the threat that a part names."""
REHEARSAL = (
    "The lab draws noise from the run's seed: whoever knows it can take the noise off, so a lab run is a rehearsal."
)


_TUNED_DEFAULTS = {"order_share": 0.5, "recency": "learn", "mix": "learn"}
"""Settings of order under a budget whose defaults were chosen on people's data, where nobody sets them."""


def privacy_lines(config: RunConfig, result: Mapping[str, Any]) -> list[str]:
    """Of a run, from what its last block promises."""
    promised, model = _read_promises(result), _model_name(config)
    lines = _describe_budget(config, promised[model]) if "epsilon_planned" in promised.get(model, {}) else []
    of_parts = [_describe_part(name, said) for name, said in promised.items() if name != model and _has_epsilon(said)]
    lines += [*describe_overspending(result), *of_parts, *([REHEARSAL] if of_parts and not lines else [])]
    deltas = [float(said["delta"]) for said in promised.values() if "delta" in said]
    return [*lines, *warn_large_delta(max(deltas, default=0.0), result.get("data", {}).get("users", 0))] or [NO_EPSILON]


def describe_leaks(config: RunConfig, folder: Path) -> list[str]:
    """That a sum without noise shows people, and which attacks show that of a run."""
    audits = {
        "tally": f"`tacita audit tally --run {folder}` shows it",
        "tally-order": f"`tacita audit tally --run {folder}` shows it of the matrix of what goes together, "
        f"`tacita audit order --run {folder}` of the matrix of what follows what",
    }
    model = _model_name(config)
    if model not in audits or config.privacy.epsilon is not None:
        return []
    return [f"what {model} releases gives people away: {audits[model]}."]


def warn_large_delta(delta: float, people: int) -> list[str]:
    """A warning where the chance in which nothing is promised is not below one in the number of people."""
    if not people or delta * people < 1:
        return []
    return [
        f"Delta {delta:g} is no small chance among {people:,} people: to show somebody's whole history may keep such a "
        f"promise; choose it well below {1 / people:.1g}."
    ]


def summarise_privacy(config: RunConfig, result: Mapping[str, Any]) -> str:
    """One line beside what a run serves."""
    promised, model = _read_promises(result), _model_name(config)
    said, most = promised.get(model, {}), largest_spent(result)
    if "epsilon_planned" in said:
        under = f"a planned epsilon {said['epsilon_planned']:g}, delta {said['delta']:g} for each person"
        return " ".join([f"Privacy: the model was made under {under}.", *describe_overspending(result)])
    lines = [_describe_part(name, one) for name, one in promised.items() if _has_epsilon(one)]
    if lines and most is not None:
        lines.append(f"At most epsilon {most:.4g} is spent so far.")
    return " ".join(lines) or NO_EPSILON


def describe_overspending(result: Mapping[str, Any]) -> list[str]:
    """That somebody spent more than was planned: to take something back is never refused."""
    planned = [float(one["epsilon_planned"]) for one in _read_promises(result).values() if "epsilon_planned" in one]
    most = largest_spent(result)
    if not planned or most is None or most <= planned[0] + 1e-6:
        return []
    return [f"Who took something back spent more than was planned, up to epsilon {most:.4g}."]


def largest_spent(result: Mapping[str, Any]) -> float | None:
    """The most that anybody has spent; None: nothing is counted, or no epsilon can be stated."""
    found = result.get("privacy", {}).get("epsilon", {}).get("most")
    return None if found is None else float(found)


def find_largest_epsilon(result: Mapping[str, Any]) -> float | None:
    """The epsilon that one person has spent at most, or is promised where that is more; None: there is none."""
    promised = _read_promises(result)
    planned = [float(one[name]) for one in promised.values() for name in _EPSILON_KEYS if name in one]
    spent = largest_spent(result)
    return max([*planned, *([] if spent is None else [spent])], default=None)


_EPSILON_KEYS = ("epsilon_planned", "epsilon_most")


def _read_promises(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    blocks = result.get("blocks") or [{}]
    return dict(blocks[-1].get("promises", {}))


def _model_name(config: RunConfig) -> str:
    return str(config.backbone.get("name", "mf"))


def _has_epsilon(said: Mapping[str, Any]) -> bool:
    return "noise" in said or any(name.startswith("epsilon") for name in said)


def _describe_part(name: str, said: Mapping[str, Any]) -> str:
    """What a part promises, whom it protects and from whom."""
    if "epsilon_per_item" in said:
        return (
            f"Privacy (part '{name}'): epsilon {said['epsilon_per_item']:.4g} for each item that somebody shares, and "
            f"{said['epsilon_per_person_most']:.4g} at most ({said['epsilon_per_person_mean']:.4g} on average) for all "
            "that one person shared. What leaves devices beside that has no epsilon."
        )
    really = {key.split("_")[1]: value for key, value in said.items() if key.endswith("_really") and "delta" not in key}
    if really:
        told = ", ".join(f"{tier} is really {value:,.4g}" for tier, value in really.items())
        budget = f"noise as printed, which no budget holds: of the advertised epsilons {told}"
    elif "epsilon_of_a_release" in said:
        budget = f"epsilon {said['epsilon_of_a_release']:.4g} for each release, and releases add up,"
    elif "epsilon_most" in said:
        most = float(said["epsilon_most"])
        least = float(said.get("epsilon_least", most))
        budget = f"a budget of epsilon {most:.4g}" if least == most else f"budgets of epsilon {least:.4g} to {most:.4g}"
    else:
        budget = f"noise of {said['noise']:.4g} times what one person can change, without a limit,"
    return (
        f"Privacy (part '{name}'): {budget} at delta {said['delta']:g} for all that one {said['unit']} has, against "
        f"{AGAINST[str(said['threat'])]}."
    )


def _describe_budget(config: RunConfig, said: Mapping[str, float]) -> list[str]:
    blocks, draws = int(said["blocks_planned"]), int(said["noise_draws_in_a_sum"])
    over = "one release" if blocks == 1 else f"{blocks} planned blocks, a release each"
    lines = [
        f"Privacy: epsilon {said['epsilon_planned']:.4g} at delta {said['delta']:.1g} for all that one person told "
        f"(with them or without them), over {over}; who told in every block so far has spent {said['epsilon']:.4g}.",
        "It holds against whoever gets the model, where the sum and its noise are made by somebody trusted. "
        f"{REHEARSAL}",
    ]
    if draws > 1:
        lines[1:] = [
            f"It holds against the server, too: each of {draws} nodes put the whole noise into its own sum, so the sum "
            f"carries {draws**0.5:.2f} times as much as a secure sum would need."
        ]
    backbone = config.backbone
    ordered = "order_share" in said
    fixed = [name for name in ("recency", "repeat")[ordered:] if backbone.get(name) == "learn"]
    held = f"{' and '.join(fixed)} {'are' if len(fixed) > 1 else 'is'} fixed at 0, " if fixed else ""
    if ordered:
        ours = [name for name, own in _TUNED_DEFAULTS.items() if backbone.get(name, own) == own]
        chosen = f" (the defaults of {', '.join(ours)} were chosen on validation of MovieLens-1M)" if ours else ""
        held = f"{held}order has {said['order_share']:.0%} of a person's length, squared{chosen}, "
    lines.append(
        f"Outside of the budget: scores on validation and test items, how many people took part, and a digest of the "
        f"data (`fingerprint`) are told as they are; {held}and validation chooses nothing."
    )
    return lines
