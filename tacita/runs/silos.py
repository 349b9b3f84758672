"""Silos that differ by taste: who lives where is worked out once, before anybody trains."""

from __future__ import annotations

from dataclasses import replace

from tacita.data.silos import assign_silos
from tacita.round.plan import Federation


def with_silos(fed: Federation) -> Federation:
    """The same run with the silos that its settings ask for; a note of the stream says how much they differ."""
    train, stream = fed.config.train, fed.stream
    if train.skew == "none":
        return fed
    homes = assign_silos(stream, train.silos, train.skew, fed.draws)
    note = (
        f"{train.silos} silos of people by {homes.by} (train.skew = {train.skew}): their labels are "
        f"{homes.divergence:.3f} bits from everybody's (Jensen-Shannon divergence, the mean over silos)."
    )
    return replace(fed, homes=homes, stream=replace(stream, notes=(*stream.notes, note)))
