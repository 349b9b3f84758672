"""Changes of code after which a cell's earlier numbers no longer hold: code_changes.toml names them, in their order.

The names of the changes that touch a cell are part of its key, so a cell that ran before one of them counts as not run.
A cell that no change touches keeps its key. `python tests/code_digests.py` says what changed, and adds a change.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from tacita.core.config import RunConfig, StrictModel, read_toml, validate_model
from tacita.methods import find_part_class
from tacita.models import find_backbone_class

FILE = Path(str(resources.files("tacita.research.experiments"))) / "code_changes.toml"


class CodeChange(StrictModel):
    """A change, and the cells that it touches: those of its parts or backbones, or all if it names neither."""

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", description="stands in keys of cells; never renamed")
    modules: list[str] = Field(description="what was changed, without the package's name")
    why: str
    parts: list[str] = []
    backbones: list[str] = []
    kinds: list[str] = Field([], description="the only kinds of cells that it touches; none named: all")
    where: dict[str, Any] = Field(
        {}, description="setting -> value that a touched cell has: train.stepper, or PART.option"
    )

    def touches(self, config: RunConfig, kind: str) -> bool:
        """Whether a cell with these settings has other numbers since."""
        has_kind = not self.kinds or kind in self.kinds
        return has_kind and self._concerns_method(config) and self._concerns_settings(config)

    def _concerns_method(self, config: RunConfig) -> bool:
        if not self.parts and not self.backbones:
            return True
        part_names = {part["name"] for part in config.parts or []}
        uses_part = not part_names.isdisjoint(self.parts)
        return uses_part or config.backbone["name"] in self.backbones

    def _concerns_settings(self, config: RunConfig) -> bool:
        return all(_read_setting(config, key) == value for key, value in self.where.items())


class _ChangeFile(StrictModel):
    change: list[CodeChange] = []


@cache
def load_code_changes() -> tuple[CodeChange, ...]:
    """All changes, oldest first."""
    file = validate_model(_ChangeFile, read_toml(FILE), FILE.name)
    return tuple(file.change)


def list_changes_of_cell(config: RunConfig, kind: str) -> list[str]:
    """The names of the changes that touch a cell, oldest first."""
    return [change.name for change in load_code_changes() if change.touches(config, kind)]


def _read_setting(config: RunConfig, key: str) -> Any:
    """A setting's value in a run, its default where nothing is said; None: the run has no such part."""
    owner, _, option = key.partition(".")
    values: Any = config.model_dump(mode="json")
    path = key
    if owner == "backbone":
        options = {name: value for name, value in config.backbone.items() if name != "name"}
        defaults = find_backbone_class(config.backbone["name"]).Config(**options).model_dump(mode="json")
        values["backbone"] = defaults | config.backbone
    if owner not in values:
        specs = [part for part in config.parts or [] if part["name"] == owner]
        if not specs:
            return None
        options = {name: value for name, value in specs[0].items() if name != "name"}
        values = find_part_class(owner).Config(**options).model_dump(mode="json")
        path = option
    for word in path.split("."):
        if not isinstance(values, dict) or word not in values:
            return None
        values = values[word]
    return values
