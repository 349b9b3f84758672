"""Short names that tell runs apart."""

from __future__ import annotations

from collections.abc import Sequence


def label_by_fields(fields: Sequence[Sequence[str]], folders: Sequence[str]) -> list[str]:
    """A label for each run: the first field, and every other that differs between runs; at last the folder.

    `fields`: one list for each field, with the value of every run.
    """
    used = [fields[0]]
    for values in fields[1:]:
        if len(set(values)) > 1:
            used.append(values)
    labels = []
    for words in zip(*used, strict=True):
        distinct = dict.fromkeys(words)
        labels.append(" · ".join(distinct))
    unique_labels = []
    for label, folder in zip(labels, folders, strict=True):
        unique_label = label
        if labels.count(label) > 1:
            unique_label = f"{label} · {folder}"
        unique_labels.append(unique_label)
    return unique_labels
