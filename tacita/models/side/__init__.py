"""Item rows from what a source says of its items, as FedKDRec starts its models; a random start stands beside it."""

from tacita.models.side.rows import build_side_rows, list_feature_sources

__all__ = ["build_side_rows", "list_feature_sources"]
