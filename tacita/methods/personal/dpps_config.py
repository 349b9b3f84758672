"""Settings of DPPS, and the combinations of them that would break its promise."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.round.part import PartConfig


class DPPSConfig(PartConfig):
    clip: float = Field(
        1.0, gt=0, description="length of all that a client sends in one release; central and silo: the tiers' average"
    )
    tiers: list[float] = Field([0.5, 1.0, 5.0], min_length=1, description="epsilons that people choose from, ascending")
    shares: list[float] = Field([1.0, 1.0, 1.0], min_length=1, description="how many choose each tier, in the lab")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta of every budget")
    releases: int = Field(50, ge=1, description="releases that a budget is to last for")
    noise: float | None = Field(
        None, gt=0, description="instead: the same noise for all, as a multiple of the sensitivity, until it is spent"
    )
    calibration: Literal["analytic", "paper"] = Field(
        "analytic", description="paper: noise sensitivity / epsilon as printed, which no budget holds; it is counted"
    )
    threat: Literal["local", "silo", "central"] = Field(
        "local",
        description="who is not trusted: the server, which sees everybody's releases; the server, which sees sums that "
        "silos have noised; or who sees its models alone. local trusts nobody and needs the most noise; "
        "central and silo need less, where whoever adds up is trusted",
    )
    unit: Literal["person", "silo"] = Field("person", description="whose whole data an epsilon is about")
    noise_on: Literal["reals", "wholes"] = Field(
        "reals",
        description="wholes: sums of whole numbers (train.aggregator = 'ideal') and whole-number noise on them, so "
        "that nothing of a sum shows in how it was rounded",
    )
    policy: Literal["declared", "activity"] = Field(
        "declared", description="activity: tiers by a noisy count of interactions, which is charged by itself"
    )
    activity_epsilon: float = Field(0.1, gt=0, description="epsilon of the noisy count, per interaction")
    activity_cuts: list[float] = Field([50.0, 150.0], description="counts at which the next tier begins")
    weights: Literal["variance", "equal"] = Field("variance", description="how clients count in a mean of noised rows")
    between: float | None = Field(
        None, ge=0, description="variance between clients that weights count on; default: estimated from noised rounds"
    )
    cap: float = Field(10.0, ge=1, description="how much more than the mean a client may count")
    shrink: float = Field(0.0, ge=0, le=1, description="strength of the shrinkage of a round's noised mean (gamma)")
    shrink_by: Literal["row", "table"] = Field("row", description="what is shrunk by itself")

    @model_validator(mode="after")
    def _check_tiers(self) -> DPPSConfig:
        is_ascending = list(self.tiers) == sorted(self.tiers)
        has_share_each = len(self.tiers) == len(self.shares)
        if not has_share_each or min(self.tiers) <= 0 or not is_ascending:
            raise ValueError("tiers above 0, ascending, with a share each")
        if min(self.shares) < 0 or sum(self.shares) <= 0:
            raise ValueError("shares that are not negative, one of them above 0")
        n_cuts = len(self.tiers) - 1
        if self.policy == "activity" and len(self.activity_cuts) != n_cuts:
            raise ValueError("one activity cut less than tiers")
        return self

    @property
    def has_shared_noise(self) -> bool:
        """One noise covers many people, so clips differ where budgets do: of everybody, or of those of a silo."""
        return self.threat != "local"

    @property
    def silos_choose(self) -> bool:
        """A silo that is the unit chooses as one: the most careful of many people would set the tier of nearly all."""
        return self.unit == "silo" and self.policy == "declared"


def check_unit(config: DPPSConfig, train: TrainConfig) -> None:
    """Refuse settings under which a unit's data could not be clipped and noised as one."""
    if train.weighs_data or train.aggregation == "per-row":
        raise TacitaError(
            f"dpps sends noise on every row, and aggregation = '{train.aggregation}' with weigh_by = "
            f"'{train.weigh_by}' would tell what a person has without any; use 'mean' or 'fixed' of clients."
        )
    if config.unit == "person" and train.n_joint_silos:
        raise TacitaError(
            "a silo that trains one model of all its people has nothing to clip for each of them; use "
            "train.in_silos = 'apart', or dpps.unit = 'silo', which protects silos and not people."
        )
    if config.unit == "silo" and not train.n_joint_silos:
        raise TacitaError("dpps.unit = 'silo' needs silos that train together: set train.silos, or unit = 'person'.")
    has_separate_silos = train.silos and not train.n_joint_silos
    if config.threat == "silo" and not has_separate_silos:
        raise TacitaError(
            "dpps.threat = 'silo' trusts silos to add up and to noise what each person changed; set "
            "train.silos and train.in_silos = 'apart'."
        )


def check_noise(config: DPPSConfig, train: TrainConfig, trains_rows: bool) -> None:
    """Refuse settings under which the noise would not be what the ledger counts."""
    if config.has_shared_noise:
        if trains_rows and train.aggregation != "fixed":
            raise TacitaError(
                f"dpps with threat = '{config.threat}' must not divide by how many took part; use train.aggregation = "
                "'fixed'."
            )
        if config.calibration == "paper" or config.noise is not None:
            raise TacitaError(
                f"dpps with threat = '{config.threat}' fits clips to budgets; leave out noise and calibration."
            )
    if config.noise_on == "wholes" and train.aggregator == "plain":
        raise TacitaError("dpps.noise_on = 'wholes' needs sums of whole numbers: train.aggregator = 'ideal'.")
