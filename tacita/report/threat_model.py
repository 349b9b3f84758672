"""What no epsilon of a lab run is about: numbers that are taken as public, and numbers that leave beside the noise."""

from __future__ import annotations

from tacita.core.config import RunConfig

EXACT_FIGURES = (
    "Outside of the epsilon, computed on exact data: scores on validation and test items, every control, counts of "
    "people (result.json, events.jsonl) and a digest of the data (`fingerprint`)."
)
CHOSEN_ROUND = "The best round is chosen on private validation items, and so is what you tune: neither is charged."
TUNED_SETTINGS = "Settings that were tuned on this data know something of it, which is not charged."
READING_OF_FILES = (
    "Also outside: the header of a file and the types of its columns (rows are read one by one), and whether a run is "
    "refused, and in which words."
)
SKEWED_SILOS = (
    "Silos are made of what everybody likes (train.skew): one person may move others to another silo, outside of the "
    "epsilon."
)
ITEMS_OF_DATA = (
    "The list of items is that of the data (catalogue = 'from-data'): its length and order tell who has rare items, "
    "outside of the epsilon."
)
COUPLED_SPLIT = (
    "This run was split by everybody's rows (borders of blocks, k-core), as earlier versions did: one person moves "
    "rows of others, and the epsilon does not hold for that. Train again."
)
COUNTED_PEOPLE = (
    "This run divides noised sums by who has data, as earlier versions did: the noise tells how many they are, and the "
    "epsilon does not hold for that. Train again."
)
SECRET_NOISE = "its noise followed a secret that was deleted when training ended"
REPRODUCIBLE_NOISE = "its noise follows the seed (reproducible_noise), so whoever has config.toml can take it off"


def list_uncovered_sentences(config: RunConfig, is_sum: bool, has_mean: bool) -> list[str]:
    """Sentences on a run that states an epsilon.

    `is_sum`: it releases sums, of which validation chooses nothing. `has_mean`: one noise covers a mean over people.
    """
    lines = [_describe_public(config, has_mean), EXACT_FIGURES, READING_OF_FILES]
    if config.catalogue == "from-data":
        lines.append(ITEMS_OF_DATA)
    if config.train.skew != "none":
        lines.append(SKEWED_SILOS)
    lines.append(TUNED_SETTINGS if is_sum else CHOSEN_ROUND)
    if _is_coupled(config):
        lines.append(COUPLED_SPLIT)
    if has_mean and config.train.denominator is None:
        lines.append(COUNTED_PEOPLE)
    lines.append(describe_rehearsal(config))
    return lines


def describe_rehearsal(config: RunConfig) -> str:
    """That a lab run is nothing to hand out, and what its noise follows."""
    noise = REPRODUCIBLE_NOISE if config.privacy.reproducible_noise else SECRET_NOISE
    return (
        f"A lab run is a rehearsal: never hand out its folder, which holds people's histories, nor its model; {noise}."
    )


def _describe_public(config: RunConfig, has_mean: bool) -> str:
    """What an epsilon assumes to be known to everybody."""
    public = []
    if config.catalogue != "from-data":
        public.append("the catalogue of items")
    public.append("how many people are enrolled")
    has_dates = config.split.kind == "blocks" and isinstance(config.split.borders, list)
    if has_dates:
        public.append("the dates between blocks")
    public.append("all settings")
    *first, last = public
    sentence = f"Taken as public: {', '.join(first)} and {last}."
    if has_mean and config.train.denominator is not None:
        sentence += f" Noised sums are divided by train.denominator = {config.train.denominator:g}, of people enrolled."
    return sentence


def _is_coupled(config: RunConfig) -> bool:
    """Whether one person's rows decided on rows of others."""
    split = config.split
    has_quantiles = split.kind == "blocks" and split.n_blocks > 1 and split.borders in ("auto", "quantile")
    has_core = split.k_core is not None and split.k_core > 1
    return has_quantiles or has_core or split.kind == "global-random"
