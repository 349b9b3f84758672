"""What a run promises of people's privacy, in words: an epsilon with all that belongs to it, or that there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tacita.core.config import RunConfig
from tacita.report.threat_model import describe_rehearsal, list_uncovered_sentences

NO_EPSILON = "Privacy: no epsilon. Nothing that this run releases has noise with a budget."
PRIVACY_KEY = "said_of_privacy"  # where result.json keeps these sentences
AGAINST = {
    "local": "the server, which sees each noised release",
    "silo": "the server, which sees the noised sum of each silo, and not against their own silo",
    "central": "whoever sees the models, and not the sums before their noise",
}
"""Whom a promise holds against, by the threat that a part names."""
_TUNED_DEFAULTS = {"order_share": 0.5, "recency": "learn", "mix": "learn"}
"""Settings of order under a budget whose defaults were chosen on people's data, where nobody sets them."""
_EPSILON_KEYS = ("epsilon_planned", "epsilon_most")

Promise = Mapping[str, Any]
"""What a model or a part promises, as result.json has it."""
RunResult = Mapping[str, Any]
"""The content of result.json."""


def list_privacy_lines(config: RunConfig, result: RunResult) -> list[str]:
    """Of a run, from what its last block promises."""
    promises = _get_last_promises(result)
    model = _name_model(config)
    model_promise = promises.get(model, {})
    budget_lines = []
    if "epsilon_planned" in model_promise:
        budget_lines = _describe_budget(config, model_promise)
    part_lines = []
    for name, promise in promises.items():
        if name != model and _has_epsilon(promise):
            part_lines.append(_describe_part(name, promise))
    lines = [*budget_lines, *describe_overspending(result), *part_lines]
    counts_releases = bool(budget_lines) or any("threat" in promise for promise in promises.values())
    if counts_releases:
        lines += list_uncovered_sentences(config, bool(budget_lines), _covers_mean(config, promises))
    elif part_lines:
        lines.append(describe_rehearsal(config))
    deltas = []
    for promise in promises.values():
        if "delta" in promise:
            deltas.append(float(promise["delta"]))
    n_users = result.get("data", {}).get("users", 0)
    lines += warn_large_delta(max(deltas, default=0.0), n_users)
    return lines or [NO_EPSILON]


def describe_leaks(config: RunConfig, folder: Path) -> list[str]:
    """That a sum without noise shows people, and which attacks show that of a run."""
    evidence = {
        "tally": f"`tacita audit tally --run {folder}` shows it",
        "tally-order": f"`tacita audit tally --run {folder}` shows it of the matrix of what goes together, "
        f"`tacita audit order --run {folder}` of the matrix of what follows what",
    }
    if config.backbone.get("solve", "ridge") != "ridge":
        evidence["tally"] = (
            "a graph filter holds more than the matrix that `tacita audit tally` attacks (docs/tally.md)"
        )
    model = _name_model(config)
    has_budget = config.privacy.epsilon is not None
    if model not in evidence or has_budget:
        return []
    return [f"what {model} releases gives people away: {evidence[model]}."]


def warn_large_delta(delta: float, people: int) -> list[str]:
    """A warning where the chance in which nothing is promised is not below one in the number of people."""
    if not people or delta * people < 1:
        return []
    return [
        f"Delta {delta:g} is no small chance among {people:,} people: to show somebody's whole history may keep such a "
        f"promise; choose it well below {1 / people:.1g}."
    ]


def summarise_privacy(config: RunConfig, result: RunResult) -> str:
    """One line next to what a run serves."""
    promises = _get_last_promises(result)
    model_promise = promises.get(_name_model(config), {})
    if "epsilon_planned" in model_promise:
        epsilon = f"epsilon {model_promise['epsilon_planned']:g}"
        delta = f"delta {model_promise['delta']:g}"
        sentence = f"Privacy: the model was made under a planned {epsilon}, {delta} for each person."
        return " ".join([sentence, *describe_overspending(result)])
    lines = []
    for name, promise in promises.items():
        if _has_epsilon(promise):
            lines.append(_describe_part(name, promise))
    most = find_largest_spent(result)
    if lines and most is not None:
        lines.append(f"At most epsilon {most:.4g} is spent so far.")
    return " ".join(lines) or NO_EPSILON


def describe_overspending(result: RunResult) -> list[str]:
    """That somebody spent more than was planned: to take something back is never refused."""
    planned = _list_epsilons(result, ["epsilon_planned"])
    most = find_largest_spent(result)
    if not planned or most is None:
        return []
    is_within_plan = most <= planned[0] + 1e-6
    if is_within_plan:
        return []
    return [f"Who took something back spent more than was planned, up to epsilon {most:.4g}."]


def find_largest_spent(result: RunResult) -> float | None:
    """The most that anybody has spent; None: nothing is counted, or no epsilon can be stated."""
    epsilons = result.get("privacy", {}).get("epsilon", {})
    most = epsilons.get("most")
    if most is None:
        return None
    return float(most)


def find_largest_epsilon(result: RunResult) -> float | None:
    """The epsilon that one person has spent at most, or is promised where that is more; None: there is none."""
    epsilons = _list_epsilons(result, _EPSILON_KEYS)
    spent = find_largest_spent(result)
    if spent is not None:
        epsilons.append(spent)
    return max(epsilons, default=None)


def _list_epsilons(result: RunResult, keys: Sequence[str]) -> list[float]:
    """Every promised epsilon under one of these keys."""
    epsilons = []
    for promise in _get_last_promises(result).values():
        epsilons += [float(promise[key]) for key in keys if key in promise]
    return epsilons


def _get_last_promises(result: RunResult) -> dict[str, Promise]:
    blocks = result.get("blocks") or [{}]
    last_block = blocks[-1]
    return dict(last_block.get("promises", {}))


def _covers_mean(config: RunConfig, promises: Mapping[str, Promise]) -> bool:
    """Whether one noise covers a mean over people, as the run says."""
    for promise in promises.values():
        has_shared_noise = promise.get("threat") in ("central", "silo")
        in_earlier_versions = config.train.aggregation == "fixed" and has_shared_noise
        if promise.get("covers_mean", in_earlier_versions):
            return True
    return False


def _name_model(config: RunConfig) -> str:
    return str(config.backbone.get("name", "mf"))


def _has_epsilon(promise: Promise) -> bool:
    if "noise" in promise:
        return True
    return any(name.startswith("epsilon") for name in promise)


# Parts


def _describe_part(name: str, promise: Promise) -> str:
    """What a part promises, whom it protects and from whom."""
    if "epsilon_per_item" in promise:
        return _describe_items(name, promise)
    budget = _describe_part_budget(promise)
    reader = AGAINST[str(promise["threat"])]
    return (
        f"Privacy (part '{name}'): {budget} at delta {promise['delta']:g} for all that one {promise['unit']} has, "
        f"against {reader}."
    )


def _describe_items(name: str, promise: Promise) -> str:
    """Of a part that shares items in place of others."""
    per_item = f"{promise['epsilon_per_item']:.4g}"
    most = f"{promise['epsilon_per_person_most']:.4g}"
    mean = f"{promise['epsilon_per_person_mean']:.4g}"
    return (
        f"Privacy (part '{name}'): epsilon {per_item} for each item that somebody shares, and {most} at most "
        f"({mean} on average) for all that one person shared. What leaves devices beside that has no epsilon."
    )


def _describe_part_budget(promise: Promise) -> str:
    real_epsilons = _describe_real_epsilons(promise)
    if real_epsilons:
        return f"noise as printed, which no budget holds: of the advertised epsilons {real_epsilons}"
    if "epsilon_of_a_release" in promise:
        return f"epsilon {promise['epsilon_of_a_release']:.4g} for each release, and releases add up,"
    if "epsilon_most" not in promise:
        return f"noise of {promise['noise']:.4g} times what one person can change, without a limit,"
    most = float(promise["epsilon_most"])
    least = float(promise.get("epsilon_least", most))
    if least == most:
        return f"a budget of epsilon {most:.4g}"
    return f"budgets of epsilon {least:.4g} to {most:.4g}"


def _describe_real_epsilons(promise: Promise) -> str:
    """What each advertised epsilon really is, where a part says so."""
    words = []
    for key, value in promise.items():
        is_real_epsilon = key.endswith("_really") and "delta" not in key
        if is_real_epsilon:
            tier = key.split("_")[1]
            words.append(f"{tier} is really {value:,.4g}")
    return ", ".join(words)


# The model


def _describe_budget(config: RunConfig, promise: Promise) -> list[str]:
    blocks = int(promise["blocks_planned"])
    releases = "one release" if blocks == 1 else f"{blocks} planned blocks, a release each"
    fixed = _describe_fixed_settings(config, promise) + _describe_order_share(config, promise)
    if fixed:
        fixed += "and "
    return [
        f"Privacy: epsilon {promise['epsilon_planned']:.4g} at delta {promise['delta']:.1g} for all that one person "
        f"told (with them or without them), over {releases}; who told in every block so far has spent "
        f"{promise['epsilon']:.4g}.",
        _describe_reader(int(promise["noise_draws_in_a_sum"])),
        f"Under this budget {fixed}validation chooses nothing.",
    ]


def _describe_reader(draws: int) -> str:
    """Whom the budget holds against, by how many nodes put noise into a sum."""
    if draws <= 1:
        return "It holds against whoever gets the model, where the sum and its noise are made by somebody trusted."
    factor = draws**0.5
    return (
        f"It holds against the server, too: each of {draws} nodes put the whole noise into its own sum, so the sum "
        f"carries {factor:.2f} times as much as a secure sum would need."
    )


def _describe_fixed_settings(config: RunConfig, promise: Promise) -> str:
    """Settings that would be learned without a budget."""
    is_ordered = "order_share" in promise
    candidates = ["repeat"] if is_ordered else ["recency", "repeat"]
    fixed = [name for name in candidates if config.backbone.get(name) == "learn"]
    if not fixed:
        return ""
    verb = "are" if len(fixed) > 1 else "is"
    return f"{' and '.join(fixed)} {verb} fixed at 0, "


def _describe_order_share(config: RunConfig, promise: Promise) -> str:
    """The share of order, and which defaults were chosen on people's data."""
    if "order_share" not in promise:
        return ""
    tuned = []
    for name, default in _TUNED_DEFAULTS.items():
        value = config.backbone.get(name, default)
        if value == default:
            tuned.append(name)
    remark = ""
    if tuned:
        remark = f" (the defaults of {', '.join(tuned)} were chosen on validation of MovieLens-1M)"
    return f"order has {promise['order_share']:.0%} of a person's length, squared{remark}, "
