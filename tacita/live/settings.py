"""The settings file of a node's or a server's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from tacita.config import Strict, read_toml, validated
from tacita.errors import TacitaError

Settings = TypeVar("Settings", bound=Strict)


def read_settings(folder: Path, kind: str, model: type[Settings], version: int) -> Settings:
    """node.toml or server.toml, with a sentence of its own for a file of another version."""
    path = folder / f"{kind}.toml"
    if not path.is_file():
        raise TacitaError(
            f"there is no {kind} in {folder}; `tacita {kind} init {folder}` makes one, --folder says where one is."
        )
    values = read_toml(path)
    found = values.get("version")
    if isinstance(found, int) and found != version:
        made = "a newer" if found > version else "an older"
        raise TacitaError(f"{path} is of version {found}, made for {made} tacita; this one reads version {version}.")
    return validated(model, values, str(path))
