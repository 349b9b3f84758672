"""Item rows from what a source says of its items, as FedKDRec starts its models; a random start stands beside it."""

from tacita.models.side.rows import side_rows, sources_of

__all__ = ["side_rows", "sources_of"]
