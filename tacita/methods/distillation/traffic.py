"""Bytes of what travels, in our units and in those that the paper's Table 3 fits (spec E.10)."""

from __future__ import annotations

PAIR_BYTES = 4 + 4  # an item id and a score; the channel says whose
PAPER_SAMPLE = 160  # bytes that 4.578 for 30 samples implies; what they are made of is unknown
MEGABYTE = 2**20
KILOBYTE = 2**10


def convert_to_paper_units(samples: float) -> float:
    """What the paper calls KB: thousandths of 2^20 bytes."""
    return samples * PAPER_SAMPLE / MEGABYTE * 1000
