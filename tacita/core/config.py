"""What a run is made of: pydantic models that forbid unknown keys, read from and written to TOML."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tacita.core.config_errors import format_config_error
from tacita.core.errors import TacitaError

M = TypeVar("M", bound=BaseModel)


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SplitConfig(StrictModel):
    """How a dataset becomes blocks with train, validation and test parts."""

    kind: Literal["auto", "blocks", "leave-one-out", "leave-some-out", "random", "global-random", "given"] = Field(
        "auto",
        description="auto: blocks where there are timestamps, else the source's own split or random; random: 8:1:1 of "
        "every user, global-random: of all interactions together",
    )
    n_blocks: int = Field(4, ge=1, le=1000, description="time blocks (kind = blocks)")
    base_share: float = Field(0.6, gt=0, le=1, description="share of all interactions in block 0")
    borders: Literal["auto", "quantile", "person"] | list[str | float] = Field(
        "auto",
        description="where blocks are cut: quantile: by count over everybody's rows; person: each person's own rows, "
        "in the same shares; or a list of dates such as 2020-01-31, or of times as the data has them (split.n_blocks "
        "follows it); auto: quantile, and person under a budget, where quantile is refused",
    )
    k_core: int | None = Field(
        None,
        ge=0,
        description="drop users and items with fewer rows, repeatedly; default: as published for named data, else 0; "
        "refused under a budget (split.min_user counts a person's own rows)",
    )
    min_user: int = Field(
        0, ge=0, description="drop users with fewer rows, once, before split.k_core; items are not asked"
    )
    inner: Literal["chronological", "random"] = Field(
        "chronological",
        description="how users' interactions of blocks 1.. are split (block 0: always random)",
    )
    held_out: Literal["last", "random"] = Field(
        "last", description="which item leave-one-out, or which ones leave-some-out, keeps back"
    )
    held_items: int = Field(6, ge=1, description="test items of a user under leave-some-out")
    least_items: int = Field(12, ge=3, description="under leave-some-out who has fewer only trains")
    min_rating: float | None = Field(None, description="keep only interactions rated at least this")
    repeats: Literal["once", "keep"] = Field(
        "once",
        description="a user's repeated item in a block: only its first row, or every row, each in a part of its own",
    )
    lend: bool = Field(
        True,
        description="a split of the source's own without a validation part: a tenth of each user's training rows is "
        "lent to it; false: none is, and what validation would choose has to be said",
    )
    seed: int = Field(0, ge=0, description="seed of the random splits, apart from the run's seed")


class ParticipationConfig(StrictModel):
    kind: Literal["all", "fraction", "poisson"] = Field(
        "all", description="who takes part in a round: everybody, a share of them, or everybody with a probability"
    )
    rate: float = Field(1.0, gt=0, le=1, description="share of clients (fraction) or their probability (poisson)")


class PFedMeConfig(StrictModel):
    """pFedMe's inner loop; these rates take the place of the backbone's."""

    lam: float = Field(15.0, gt=0, description="how strongly the personal model is held to the local one")
    inner_steps: int = Field(5, ge=1, description="gradient steps of the personal model in every step")
    inner_lr: float = Field(0.01, gt=0, description="learning rate of the personal model")
    eta: float = Field(0.005, gt=0, description="the local model moves eta * lam of its way to the personal one")


class TrainConfig(StrictModel):
    """The local training of a round and when a block ends."""

    rounds: int = Field(100, ge=1, description="most rounds in a block")
    patience: int = Field(30, ge=1, description="rounds without a better validation score before a block ends")
    patience_in: Literal["rounds", "passes"] = Field(
        "rounds", description="passes: patience counts passes over all clients, of which a share takes part in a round"
    )
    batch_size: int = Field(512, ge=1, description="samples, or pairs, of one local step")
    negatives: int = Field(4, ge=0, description="negatives per positive")
    redraw: Literal["round", "epoch"] = Field("round", description="how often negatives are drawn anew")
    batches: Literal["samples", "people"] = Field(
        "samples",
        description="what batches are cut from: a client's shuffled samples, or its shuffled people, each with all "
        "of their samples, so many that a batch holds about batch_size samples",
    )
    held_steps: int = Field(
        1,
        ge=1,
        le=10_000,
        description="for batches of people: so many steps share as many times the people, each with its part of all "
        "their samples; the compiled step works out once for all of them what a model reads of a person",
    )
    local_epochs: int = Field(1, ge=1, description="how often a client goes over its samples in a round")
    decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate after every round of a block")
    objective: Literal["bce", "squared", "bpr"] = Field(
        "bce",
        description="bce on labels in [0, 1]; squared error of the raw score, on ratings where there are any; "
        "bpr: positives above their negatives",
    )
    bpr_scale: float = Field(1.0, gt=0, description="factor on the difference of scores in bpr")
    l2: float = Field(
        0.0, ge=0, description="weight of |x|^2 of a batch's item rows and private vectors, over its size"
    )
    optimiser: Literal["sgd", "adam", "lazy-adam", "pfedme"] = Field(
        "sgd",
        description="fresh in every round; lazy-adam leaves what a batch does not use alone; all but sgd need autograd",
    )
    weight_decay: float = Field(0.0, ge=0, description="of what a batch uses, for lazy-adam")
    moments: Literal["fresh", "kept"] = Field(
        "fresh",
        description="kept: clients that have models of their own go on with lazy-adam's moments in later rounds",
    )
    pfedme: PFedMeConfig = PFedMeConfig()
    participation: ParticipationConfig = ParticipationConfig()
    aggregation: Literal["mean", "per-row", "weighted", "fixed"] = Field(
        "mean",
        description="denominator of the sum: participants, those who touched the row, their data, or fixed",
    )
    weigh_by: Literal["clients", "data"] = Field(
        "clients",
        description="what a client counts in sums per row or over a fixed denominator: 1, or how much it learned from",
    )
    aggregator: Literal["plain", "ideal", "secure"] = Field(
        "plain",
        description="how sums are made: in double precision; in whole numbers, as a secure sum would make them; or "
        "by masks, of 3 to 50 clients (the lab plays the protocol; needs tacita[secure])",
    )
    denominator: float | None = Field(
        None,
        gt=0,
        description="for aggregation = fixed; default: expected clients; where noise covers the sum (dp-fedavg, dpps "
        "central or silo) a public number: how many of the enrolled people take part on average, which named and "
        "synthetic data know and other data has to be told",
    )
    server_lr: float = Field(1.0, gt=0, description="factor on the aggregated change")
    silos: int = Field(0, ge=0, description="0: every user is a client; n: users live in n silos")
    skew: Literal["none", "low", "medium", "high"] | float = Field(
        "none",
        description="how silos differ: none: users are spread by a hash; low, medium, high: by what they like most, in "
        "shares drawn from a Dirichlet distribution with 10, 1 or 0.1, or with a number of your own",
    )
    in_silos: Literal["together", "apart"] = Field(
        "together",
        description="together: a silo trains one model of all its people; apart: everybody in it trains from the "
        "received model by themselves, and the silo adds up, so that what one person changes can be clipped",
    )
    resume_from: Literal["best", "last"] = Field("best", description="which round the next block starts from")
    reset_private_each_block: bool = Field(False, description="as the F3CRec release does for NCF and PFedRec")
    stepper: Literal["auto", "fused", "autograd"] = Field(
        "auto", description="what takes local steps: compiled loops where there are some, else autograd"
    )

    @property
    def patience_rounds(self) -> int:
        """Rounds without a better validation score before a block ends."""
        if self.patience_in == "rounds":
            return self.patience
        share = self.participation.rate if self.participation.kind != "all" else 1.0
        return math.ceil(self.patience / share)

    @property
    def n_joint_silos(self) -> int:
        """Clients that are silos of several people; 0: every client is one person, also where silos add them up."""
        return self.silos if self.in_silos == "together" else 0

    @property
    def weighs_data(self) -> bool:
        """Whether clients count by how much they learned from."""
        return self.aggregation == "weighted" or self.weigh_by == "data"


class EvaluateConfig(StrictModel):
    k: list[int] = Field([20], min_length=1, description="cut-offs")
    metrics: list[Literal["ndcg", "ndcg-k", "recall", "hr", "precision", "mrr", "auc"]] = Field(
        ["ndcg", "recall"], min_length=1, description="ndcg-k: the ideal list has k hits, however few are wanted"
    )
    select_by: str = Field("ndcg@20", description="validation metric that picks the round")
    mask: Literal["block", "history", "none"] = Field(
        "block", description="what is not ranked: the block's own known items, those of all blocks, or nothing"
    )
    unmasked: bool = Field(False, description="test with nothing masked as well, as some papers seem to")
    old_block_mask: Literal["own", "current"] = Field(
        "own",
        description="mask on an earlier block's test: its own known items, or (released code) the current's",
    )
    hidden_items: Literal["drop", "count"] = Field(
        "drop",
        description="wanted items that the mask hides: not asked for, or asked for and never found",
    )
    sampled_negatives: int = Field(0, ge=0, description="0: full ranking; n: rank against n unseen items")
    ties: Literal["hash", "against"] = Field(
        "hash",
        description="items of the same score: in an order that a hash gives, or the wanted ones last (FedKDRec)",
    )
    item_table: Literal["global", "personal"] = Field(
        "global",
        description="personal: a user is scored with the rows it last trained (PFedRec's own protocol)",
    )
    read: Literal["train", "known"] = Field(
        "train",
        description="what a model that reads histories reads of a block when it is tested: its training part, or all "
        "that the device knows by then, its validation part, too",
    )
    every: int = Field(
        1, ge=1, description="validate every n rounds; where a round only tries a setting on sums (tally), all of them"
    )
    valid_users: int = Field(
        0, ge=0, description="users, drawn by their key, who validate a round or a trial; 0: all who can"
    )
    test_users: int = Field(0, ge=0, description="users, drawn by their key, who are tested in a block; 0: all who can")
    controls: bool = Field(True, description="run the controls beside the method")
    linear_control: bool = Field(
        False, description="run the centralised linear control also where it takes longer than the run"
    )


class PrivacyConfig(StrictModel):
    """A budget of a person for all that is released of the sums they are in; without an epsilon there is none."""

    epsilon: float | None = Field(
        None, gt=0, le=1000, description="what all planned blocks may cost a person together; default: no budget"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="the chance in which the budget promises nothing")
    blocks: int = Field(
        0, ge=0, le=1000, description="blocks that share the budget; 0: those of the split (live: say how many)"
    )
    features: bool = Field(False, description="help noised sums with what is public of items: genres and year")
    reproducible_noise: bool = Field(
        False,
        description="noise follows the seed, so that a run can be repeated and whoever has its config.toml can take "
        "the noise off; false: it follows a secret that the run folder does not hold",
    )


class RunConfig(StrictModel):
    """One run: a dataset, a split, a backbone, a method."""

    data: str = Field("ml-100k", description="dataset name, file, or synthetic:...")
    columns: dict[str, str] = Field({}, description="role -> column name, where guessing fails")
    date_format: str | None = Field(None, description="how the file writes its dates, such as %d.%m.%Y")
    decimal: Literal[".", ","] | None = Field(None, description="the file's decimal mark, where it is not clear")
    catalogue: str | None = Field(
        None,
        description="file with the public list of items, in which those that nobody has stay; from-data: the items "
        "that people have, which under a budget is outside of the epsilon; default: under a budget the item file "
        "beside the data, or what named and synthetic data publish, else from-data",
    )
    drop_missing: bool = Field(False, description="leave out rows without a value in a column that is read")
    split: SplitConfig = SplitConfig()
    backbone: dict[str, Any] = Field({"name": "mf"}, description="name and options of the model")
    method: str = Field("fedavg", description="preset: a named list of parts")
    parts: list[dict[str, Any]] | None = Field(None, description="parts added to the preset, or changes of its options")
    item_rows: Literal["random", "side", "sentences"] = Field(
        "random",
        description="what item rows start from: chance, or what the source says of its items (genres, year, words); "
        "sentences: with vectors of tacita[text] as well",
    )
    seed: int = Field(1, ge=0, description="of every draw but those of the split; same seed, same numbers")
    privacy: PrivacyConfig = PrivacyConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()


_LATER_SETTINGS = {
    "catalogue",
    "date_format",
    "decimal",
    "drop_missing",
    "item_rows",
    "privacy",
    "privacy.reproducible_noise",
    "evaluate.hidden_items",
    "evaluate.linear_control",
    "evaluate.read",
    "evaluate.test_users",
    "evaluate.ties",
    "evaluate.unmasked",
    "evaluate.valid_users",
    "split.borders",
    "split.held_items",
    "split.least_items",
    "split.lend",
    "split.min_user",
    "split.repeats",
    "train.aggregator",
    "train.batches",
    "train.bpr_scale",
    "train.decay",
    "train.held_steps",
    "train.in_silos",
    "train.l2",
    "train.moments",
    "train.objective",
    "train.patience_in",
    "train.pfedme",
    "train.redraw",
    "train.skew",
    "train.weigh_by",
    "train.weight_decay",
}
"""Settings that are newer than results stored under a hash of their config."""


def list_newer_settings_at_default(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Later settings at their default, for `exclude`: without them a hash stays as before they existed."""
    excluded: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        key = prefix + name
        value = getattr(config, name)
        if key in _LATER_SETTINGS and value == info.default:
            excluded[name] = True
        elif isinstance(value, BaseModel):
            excluded[name] = list_newer_settings_at_default(value, f"{key}.")
    return excluded


def validate_model(model: type[M], values: dict[str, Any], where: str) -> M:
    """Build a config or raise one sentence that names the key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise TacitaError(format_config_error(model, error, where)) from None


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TacitaError(f"no such config file: {path}.") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise TacitaError(f"{path} is not valid TOML: {error}.") from None


def to_toml(config: BaseModel) -> str:
    """Every setting with its value; those that have none are listed at the end, with what they would do."""
    values = config.model_dump(mode="json", exclude_none=True)
    text = tomli_w.dumps(values)
    unset = "".join(f"# {key}: {about}\n" for key, about in _iter_unset(config))
    if unset:
        text += "\n# Not set:\n" + unset
    return text


def _iter_unset(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _iter_unset(value, f"{prefix}{name}.")
        elif value is None:
            yield prefix + name, info.description or "no value"
