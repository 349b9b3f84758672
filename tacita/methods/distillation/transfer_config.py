"""Settings of prediction transfer, and the options of its steps that follow from them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tacita.methods.distillation.measures import Loss
from tacita.methods.distillation.rewards import Divergence, Diversity
from tacita.methods.distillation.selection import SelectionOptions
from tacita.methods.distillation.uploads import Swap
from tacita.methods.distillation.weighting import WeightingOptions
from tacita.round.part import PartConfig


class TransferConfig(PartConfig):
    alpha: float = Field(0.3, ge=0, le=1, description="weight of the hard label; from 0.5 on a threshold reads it")
    beta_low: float = Field(0.3, ge=0, le=1, description="least share of its predictions that a client tells")
    beta_high: float = Field(0.7, ge=0, le=1, description="largest share of them")
    swap: float = Field(0.1, ge=0, le=1, description="share of told positives whose value is swapped; 0: no swap")
    swap_select: Literal["random", "top"] = Field("random", description="which values are swapped")
    scheme: Literal["mix", "ptf"] = Field("mix", description="how predictions are told: FedKDRec's way or PTF-FedRec's")
    accumulate: bool = Field(False, description="received items stay with a client for good, as PTF-FedRec's code does")
    repeat_negatives: bool = Field(
        False, description="scheme ptf: told negatives are drawn with replacement, as PTF-FedRec's code does"
    )
    truncate: bool = Field(
        False, description="a client learns from as many received items as it has positives, as PTF-FedRec's code does"
    )
    server: dict[str, Any] = Field(
        {}, description="the server's model; without a name the clients' own, with options changed"
    )
    server_epochs: int = Field(4, ge=1, description="passes over the uploads of a round")
    server_batch: int = Field(1024, ge=1, description="samples of one step of the server's model")
    server_loss: Literal["mean", "sum"] = Field("mean", description="over a batch; sum as PTF-FedRec's code")
    graph_above: float = Field(0.0, ge=0, lt=1, description="scores that join a user and an item in the server's graph")
    server_decay: float = Field(1e-6, ge=0, description="weight decay of the server's model")
    weighting: bool = Field(True, description="an agent weighs the uploads (false: -c)")
    weighting_without: Literal["", "size", "statistics", "loss"] = Field("", description="state it does without")
    weighting_cap: float | None = Field(
        None, ge=1, description="largest weight of an upload, as a multiple of an equal share; default: no bound"
    )
    weighting_lr: float = Field(1e-3, gt=0, description="learning rate of the agent that weighs teachers")
    agent_loss: Loss = Field("ce", description="what the agents are told of a client's upload: cross entropy, or KL")
    select: Literal["agent", "confident", "random", "top", "none"] = Field(
        "agent", description="what the server sends: an agent's picks, PTF-FedRec's rule, a schedule, nothing"
    )
    most: int = Field(30, ge=1, description="items that may be sent to a client in a round (mu)")
    scheduled: float = Field(1.0, ge=0, description="items a client gets under select = random or top, on average")
    select_lr: float = Field(1e-3, gt=0, description="learning rate of the agent that picks samples")
    select_without: Literal["", "loss", "diversity", "divergence"] = Field("", description="reward it does without")
    select_diversity: Diversity = Field(
        "softmax", description="KL of what was told from what was picked: of pooled rows, or of fitted Gaussians"
    )
    select_divergence: Divergence = Field(
        "bernoulli", description="cosine of what is told and predicted: item by item, or of both vectors"
    )
    select_adjust: bool = Field(True, description="picking pays less the later in the list (control ii: false)")
    select_shuffle: bool = Field(False, description="rewards are dealt anew among the clients (control i)")
    select_rho: float = Field(4.0, gt=0, description="how fast picking pays less down the list")
    history: Literal["last", "all"] = Field("last", description="uploads that candidates come from")
    answers: Literal["server", "client"] = Field("server", description="whose model recommends and is measured")

    @property
    def weighting_options(self) -> WeightingOptions:
        return WeightingOptions(
            lr=self.weighting_lr,
            cap=self.weighting_cap,
            without=self.weighting_without,
            loss=self.agent_loss,
        )

    @property
    def selection_options(self) -> SelectionOptions:
        return SelectionOptions(
            most=self.most,
            lr=self.select_lr,
            rho=self.select_rho,
            adjust=self.select_adjust,
            shuffle=self.select_shuffle,
            without=self.select_without,
            diversity=self.select_diversity,
            divergence=self.select_divergence,
            loss=self.agent_loss,
        )

    @property
    def swap_options(self) -> Swap | None:
        """None: nothing is swapped."""
        if self.swap <= 0:
            return None
        return Swap(self.swap, select=self.swap_select)
