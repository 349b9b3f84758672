"""Silos that differ by taste: who lives where is worked out once, before anybody trains."""

from __future__ import annotations

from dataclasses import replace

from tacita.data.silos import assign_silos
from tacita.round.plan import Federation


def with_silos(federation: Federation) -> Federation:
    """The same run with the silos that its settings ask for; a note of the stream says how much they differ."""
    settings = federation.config.train
    stream = federation.stream
    if settings.skew == "none":
        return federation
    homes = assign_silos(stream, settings.silos, settings.skew, federation.draws)
    note = (
        f"{settings.silos} silos of people by {homes.by} (train.skew = {settings.skew}): their labels are "
        f"{homes.divergence:.3f} bits from everybody's (Jensen-Shannon divergence, the mean over silos)."
    )
    noted_stream = replace(stream, notes=(*stream.notes, note))
    return replace(federation, homes=homes, stream=noted_stream)
