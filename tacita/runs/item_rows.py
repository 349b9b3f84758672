"""Item rows that start from side information, for every method alike: worked out once, before anybody trains."""

from __future__ import annotations

from dataclasses import replace

from tacita.core.errors import TacitaError
from tacita.data.features import load_stream_features
from tacita.models.scorer import Scorer
from tacita.models.side import build_side_rows, list_sources
from tacita.models.tally.features import encode_item_features
from tacita.models.tally.private_tally import PrivateTally
from tacita.round.plan import Federation


def with_side_rows(fed: Federation) -> Federation:
    """The same run from the rows that its settings ask for; a note of the stream says what they are made of.

    All items of the stream are coded together, those of later blocks too: what is said of items is public.
    """
    asked, backbone, stream = fed.config.item_rows, fed.backbone, fed.stream
    if asked == "random":
        return fed
    if not isinstance(backbone, Scorer):
        raise TacitaError(
            f"item_rows = '{asked}': backbone '{backbone.name}' trains no item rows that could start from side "
            "information; use 'random'."
        )
    told, sentences = load_stream_features(stream), asked == "sentences"
    codes = build_side_rows(told, stream.item_ids, backbone.code_width, fed.draws, sentences)
    known = sum(item in told.by_item for item in stream.item_ids)
    sources = ", ".join(list_sources(told, sentences))
    note = f"item rows start from {sources}: known of {known:,} of {stream.n_items:,} items."
    return replace(fed, rows=backbone.rows_of_codes(codes), stream=replace(stream, notes=(*stream.notes, note)))


def with_features(fed: Federation) -> Federation:
    """The same run with what is public of items at hand for noised sums, where the settings ask for that."""
    backbone, stream = fed.backbone, fed.stream
    if not isinstance(backbone, PrivateTally) or not backbone.wants_features:
        return fed
    codes = encode_item_features(load_stream_features(stream), stream.item_ids)
    note = f"noised sums are read along {codes.shape[1]} public features of items (genres, spans of years)."
    return replace(fed, backbone=backbone.with_features(codes), stream=replace(stream, notes=(*stream.notes, note)))
