"""One number of a table to find, and the key under which it is stored: what its settings are, and what made it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from tacita.core.config import RunConfig, list_newer_settings_at_default
from tacita.research.experiments.code_changes import list_changes_of_cell

WITHDRAWAL = "withdrawal"  # the kind of a cell in which people take back what they shared
CELL_VERSION = 1  # of the form of a key; what changes of code make incomparable stands in code_changes.toml


@dataclass(frozen=True)
class ExperimentCell:
    """One number to find: a variant on a dataset with a backbone and a seed."""

    dataset: str
    backbone: str
    variant: str
    seed: int
    config: RunConfig
    kind: str = "stream"
    withdraws: float = 0.0
    follows: ExperimentCell | None = None  # finished first: the items that it sent complete this one's config

    @property
    def key(self) -> str:
        """Cells with the same effective config and the same code are the same cell, whichever table asks for them."""
        return self._digest_identity(self.code_changes)

    @property
    def settings_key(self) -> str:
        """The key that it had before any change of code."""
        return self._digest_identity([])

    @property
    def earlier_keys(self) -> dict[str, list[str]]:
        """The keys that it had before changes of code -> the changes since; the latest first."""
        changes = self.code_changes
        keys = {}
        for n_known in reversed(range(len(changes))):
            known = changes[:n_known]
            keys[self._digest_identity(known)] = changes[n_known:]
        return keys

    @property
    def code_changes(self) -> list[str]:
        """The changes of code that touch its numbers."""
        return list_changes_of_cell(self.config, self.kind)

    def _digest_identity(self, code_changes: list[str]) -> str:
        later_defaults = list_newer_settings_at_default(self.config)
        config = self.config.model_dump(mode="json", exclude={"method": True, **later_defaults})
        identity = [CELL_VERSION, self.kind, config]
        if self.withdraws:
            identity.append(self.withdraws)
        if code_changes:
            identity.append({"code": sorted(code_changes)})
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


Cells = list[ExperimentCell]
Place = tuple[str, str, str]
"""Dataset, backbone and variant."""
