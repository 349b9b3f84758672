"""The settings file of a node's or a server's folder, and which settings of a run can be followed live."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from tacita.core.config import RunConfig, StrictModel, read_toml, validate_model
from tacita.core.errors import TacitaError
from tacita.methods import resolve_parts
from tacita.models.base import find_backbone_class
from tacita.round.registry import is_lab_only

Settings = TypeVar("Settings", bound=StrictModel)
MOST_EPOCHS = 20  # that a server may ask of a node in one round
MOST_NEGATIVES = 100  # the same
LIVE_VALUES: dict[str, tuple[float | str, ...]] = {
    "length_power": (0.0,),
    "most_items": (0,),
    "decay": (0.5, 0.7, 1.0),
    "order_fold": ("auto", 2.0, 3.0, 8.0),
    "order_window": (20, 40),
}
"""Settings of a backbone by which people weigh in exact sums, and their values in our own runs. Others could be chosen
so that a sum tells people apart: of n items to the power -1.37 every sum belongs to one set of lengths."""
LIVE_PART_VALUES: dict[tuple[str, str], tuple[float, ...]] = {("interest", "kappa"): (0.0, 1.0)}
"""The same for parts that weigh people, by part and setting."""


def read_settings(folder: Path, kind: str, model: type[Settings], version: int) -> Settings:
    """node.toml or server.toml, with a sentence of its own for a file of another version."""
    path = folder / f"{kind}.toml"
    if not path.is_file():
        raise TacitaError(
            f"there is no {kind} in {folder}; `tacita {kind} init {folder}` makes one, --folder says where one is."
        )
    values = read_toml(path)
    file_version = values.get("version")
    if isinstance(file_version, int) and file_version != version:
        origin = "a newer" if file_version > version else "an older"
        raise TacitaError(
            f"{path} is of version {file_version}, made for {origin} tacita; this one reads version {version}."
        )
    return validate_model(model, values, str(path))


def check_live_settings(config: RunConfig) -> None:
    """Refuse settings that only a lab can follow, or that would show what single people did."""
    _refuse_lab_data(config)
    _refuse_lab_privacy(config)
    _refuse_order_of_earlier_blocks(config)
    refuse_free_weights(config)
    _refuse_other_parties(config)
    _refuse_lab_training(config)


def adapt_participation(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """A method's own 'fraction' as 'poisson' with the same rate; one that `values` asks for is refused later."""
    participation = config.train.participation
    if participation.kind != "fraction" or "participation" in values.get("train", {}):
        return config
    poisson = participation.model_copy(update={"kind": "poisson"})
    return config.model_copy(update={"train": config.train.model_copy(update={"participation": poisson})})


def _refuse_lab_data(config: RunConfig) -> None:
    """Live, people and items are as they are."""
    if config.train.silos:
        raise TacitaError("train.silos is for the lab: live, the nodes are what they are; leave it at 0.")
    if config.evaluate.item_table != "global":
        raise TacitaError("evaluate.item_table = 'personal' is for the lab; use 'global'.")
    if config.train.skew != "none":
        raise TacitaError(
            f"train.skew = '{config.train.skew}' is for the lab: live, people live where they live; use 'none'."
        )
    if config.item_rows != "random":
        raise TacitaError(
            f"item_rows = '{config.item_rows}' is for the lab: a live catalogue tells nothing of items; use 'random'."
        )


def _refuse_lab_privacy(config: RunConfig) -> None:
    if config.privacy.features:
        raise TacitaError("privacy.features is for the lab: a live catalogue tells nothing of items; leave it out.")
    if config.privacy.epsilon is not None and not config.privacy.blocks:
        raise TacitaError(
            "a live run does not know how many blocks will come; say how many share the budget: privacy.blocks."
        )


def refuse_free_weights(config: RunConfig) -> None:
    """Refuse exponents and weights that a server chose freely: they turn one sum into many equations."""
    for name, values in LIVE_VALUES.items():
        if name in config.backbone and config.backbone[name] not in values:
            raise _free_weight_error(f"backbone.{name}", config.backbone[name], values)
    for part in resolve_parts(config.method, config.parts):
        for (part_name, name), values in LIVE_PART_VALUES.items():
            if part.get("name") == part_name and name in part and part[name] not in values:
                raise _free_weight_error(f"{part_name}.{name}", part[name], values)


def _free_weight_error(key: str, value: object, values: tuple[float | str, ...]) -> TacitaError:
    allowed = " or ".join(str(allowed_value) for allowed_value in values)
    return TacitaError(
        f"{key} = {value} is for the lab: live it could be chosen so that one sum tells people apart; use {allowed}."
    )


def _refuse_order_of_earlier_blocks(config: RunConfig) -> None:
    backbone = find_backbone_class(str(config.backbone.get("name", "mf")))
    if backbone.reads_order and config.backbone.get("order_back", True):
        raise TacitaError(
            "a node leaves items out that few of its people have, and could not leave out what is looked back at in "
            "earlier blocks; live, set backbone.order_back = false."
        )


def _refuse_other_parties(config: RunConfig) -> None:
    """A live run has a server and nobody else."""
    for part in resolve_parts(config.method, config.parts):
        if is_lab_only(str(part.get("name"))):
            raise TacitaError(
                f"part '{part['name']}' is for the lab: it tells a matcher what no server may see, and a live run has "
                "nobody but its server; use another method."
            )


def _refuse_lab_training(config: RunConfig) -> None:
    train = config.train
    if train.participation.kind == "fraction":
        raise TacitaError(
            "train.participation.kind = 'fraction' needs somebody who knows everybody; live, people decide by "
            "themselves: use 'poisson' or 'all'."
        )
    if train.aggregator != "plain":
        raise TacitaError(
            f"train.aggregator = '{train.aggregator}' is for the lab: nodes send plain sums; use 'plain'."
        )
    if train.negatives < 1:
        raise TacitaError("train.negatives = 0 would send nothing but what people have; use at least 1.")
    if train.local_epochs > MOST_EPOCHS or train.negatives > MOST_NEGATIVES:
        raise TacitaError(
            f"a node trains at most {MOST_EPOCHS} local epochs with {MOST_NEGATIVES} negatives in a round; lower "
            "train.local_epochs and train.negatives."
        )
