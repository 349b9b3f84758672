"""Texts as numbers: TF-IDF of words and pairs of neighbouring words, reduced by a truncated SVD."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from tacita.core.draws import Draws
from tacita.core.sparse import matrix_of_cells
from tacita.core.types import Doubles, Longs
from tacita.kernels.hashing import draw_normals

MOST_TERMS = 20_000
_WORD = re.compile(r"\w+")

TermCounts = Counter[str]


def extract_terms(text: str) -> list[str]:
    """The words of every line, and each two that follow each other in one."""
    terms = []
    for line in text.lower().splitlines():
        words = _WORD.findall(line)
        pairs = [f"{first} {second}" for first, second in pairwise(words)]
        terms += words + pairs
    return terms


def select_frequent(spread: TermCounts, most: int) -> list[str]:
    """At most so many terms, those in most texts, equal ones by the alphabet; in the order of the alphabet."""

    def rank(term: str) -> tuple[int, str]:
        return -spread[term], term

    by_spread = sorted(spread, key=rank)
    return sorted(by_spread[:most])


def compute_tfidf(texts: Sequence[str], most: int = MOST_TERMS) -> scipy.sparse.csr_array:
    """Counts times ln((1 + n) / (1 + texts with the term)) + 1, rows of length 1; columns are terms by the alphabet.

    Where there are more than `most` terms those in most texts stay, equal ones by the alphabet.
    """
    n_texts = len(texts)
    counts = [Counter(extract_terms(text)) for text in texts]
    spread: TermCounts = Counter()
    for terms in counts:
        spread.update(terms.keys())
    vocabulary = select_frequent(spread, most)
    row, column, count = _list_cells(counts, vocabulary)
    spreads = [spread[term] for term in vocabulary]
    texts_with_term = np.array(spreads, np.float64)
    rarity = (1 + n_texts) / (1 + texts_with_term)
    idf = np.log(rarity) + 1
    value = count * idf[column]
    squares = np.bincount(row, weights=value**2, minlength=n_texts)
    length = np.sqrt(squares)
    scaled = value / length[row]
    shape = (n_texts, len(vocabulary))
    return matrix_of_cells(row, column, scaled, shape)


def _list_cells(counts: Sequence[TermCounts], vocabulary: list[str]) -> Longs:
    """(3, cells) text, place of the term and how often it is there."""
    columns = {term: column for column, term in enumerate(vocabulary)}
    cells = []
    for row, terms in enumerate(counts):
        for term, count in terms.items():
            if term in columns:
                cells.append((row, columns[term], count))
    table = np.array(cells, np.int64)
    return table.reshape(-1, 3).T


def reduce_rank(matrix: scipy.sparse.csr_array | Doubles, width: int) -> Doubles:
    """Each row in the `width` directions in which the rows differ most from zero (fewer where there are no more).

    The start of the iteration is fixed and the largest entry of a direction is positive, so that the same matrix
    always gives the same numbers.
    """
    least = min(matrix.shape)
    if least <= width:
        dense = matrix
        if not isinstance(matrix, np.ndarray):
            dense = matrix.toarray()
        row_vectors, size, directions = np.linalg.svd(dense, full_matrices=False)
    else:
        start = _draw_start(least)
        row_vectors, size, directions = scipy.sparse.linalg.svds(matrix, k=width, v0=start)
    order = np.argsort(-size, kind="stable")
    least_size = 1e-9 * size.max(initial=0)
    is_large = size[order] > least_size
    order = order[is_large]
    entry_size = np.abs(directions[order])
    largest = np.argmax(entry_size, axis=1)
    is_negative = directions[order, largest] < 0
    sign = np.where(is_negative, -1.0, 1.0)
    scale = size[order] * sign
    return np.asarray(row_vectors[:, order] * scale)


def _draw_start(size: int) -> Doubles:
    """The fixed start of the iteration."""
    key = Draws(0).public("svd-start")
    owners = np.arange(size, dtype=np.uint64)
    column = draw_normals(key, owners, 1)[:, 0]
    return column.astype(np.float64)
