"""Item rows that start from side information, for every method alike: worked out once, before anybody trains."""

from __future__ import annotations

from dataclasses import replace

from tacita.core.errors import TacitaError
from tacita.data.features import load_stream_features
from tacita.models.side import build_side_rows, list_feature_sources
from tacita.models.tally.features import encode_item_features
from tacita.models.tally.private_tally import PrivateTally
from tacita.round.plan import Federation


def with_side_rows(federation: Federation) -> Federation:
    """The same run from the rows that its settings ask for; a note of the stream says what they are made of.

    All items of the stream are coded together, those of later blocks too: side information of items is public.
    """
    source = federation.config.item_rows
    backbone = federation.backbone
    stream = federation.stream
    if source == "random":
        return federation
    if backbone.learner != "rows":
        raise TacitaError(
            f"item_rows = '{source}': backbone '{backbone.name}' trains no item rows that could start from side "
            "information; use 'random'."
        )
    features = load_stream_features(stream)
    use_sentences = source == "sentences"
    item_ids = stream.item_ids
    codes = build_side_rows(features, item_ids, federation.scorer.code_width, federation.draws, use_sentences)
    n_known = sum(item in features.by_item for item in item_ids)
    sources = ", ".join(list_feature_sources(features, use_sentences))
    note = f"item rows start from {sources}: known of {n_known:,} of {stream.n_items:,} items."
    noted_stream = replace(stream, notes=(*stream.notes, note))
    return replace(federation, rows=federation.scorer.build_rows_from_codes(codes), stream=noted_stream)


def with_features(federation: Federation) -> Federation:
    """The same run with public features of items for noised sums, where the settings ask for that."""
    backbone = federation.backbone
    stream = federation.stream
    if not isinstance(backbone, PrivateTally) or not backbone.wants_features:
        return federation
    features = load_stream_features(stream)
    codes = encode_item_features(features, stream.item_ids)
    note = f"noised sums are read along {codes.shape[1]} public features of items (genres, spans of years)."
    noted_stream = replace(stream, notes=(*stream.notes, note))
    return replace(federation, backbone=backbone.with_features(codes), stream=noted_stream)
