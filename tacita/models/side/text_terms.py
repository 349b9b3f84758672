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
from tacita.core.types import Doubles
from tacita.kernels.hashing import normals

MOST_TERMS = 20_000
_WORD = re.compile(r"\w+")


def extract_terms(text: str) -> list[str]:
    """The words of every line, and each two that follow each other in one."""
    found = []
    for line in text.lower().splitlines():
        words = _WORD.findall(line)
        found += words + [f"{a} {b}" for a, b in pairwise(words)]
    return found


def compute_tfidf(texts: Sequence[str], most: int = MOST_TERMS) -> scipy.sparse.csr_array:
    """Counts times ln((1 + n) / (1 + texts with the term)) + 1, rows of length 1; columns are terms by the alphabet.

    Where there are more than `most` terms those in most texts stay, equal ones by the alphabet.
    """
    counts = [Counter(extract_terms(text)) for text in texts]
    spread = Counter(term for one in counts for term in one)
    kept = sorted(sorted(spread, key=lambda term: (-spread[term], term))[:most])
    place = {term: n for n, term in enumerate(kept)}
    cells = [(row, place[term], n) for row, one in enumerate(counts) for term, n in one.items() if term in place]
    row, column, n = np.array(cells, np.int64).reshape(-1, 3).T
    idf = np.log((1 + len(texts)) / (1 + np.array([spread[term] for term in kept], np.float64))) + 1
    value = n * idf[column]
    length = np.sqrt(np.bincount(row, weights=value**2, minlength=len(texts)))
    return matrix_of_cells(row, column, value / length[row], (len(texts), len(kept)))


def reduce_rank(matrix: scipy.sparse.csr_array | Doubles, width: int) -> Doubles:
    """Each row in the `width` directions in which the rows differ most from zero (fewer where there are no more).

    The start of the iteration is fixed and the largest entry of a direction is positive, so that the same matrix
    always gives the same numbers.
    """
    least = min(matrix.shape)
    if least <= width:
        dense = np.asarray(matrix) if isinstance(matrix, np.ndarray) else matrix.toarray()
        left, size, right = np.linalg.svd(dense, full_matrices=False)
    else:
        start = normals(Draws(0).public("svd-start"), np.arange(least, dtype=np.uint64), 1)[:, 0].astype(np.float64)
        left, size, right = scipy.sparse.linalg.svds(matrix, k=width, v0=start)
    order = np.argsort(-size, kind="stable")
    order = order[size[order] > 1e-9 * size.max(initial=0)]
    largest = np.argmax(np.abs(right[order]), axis=1)
    sign = np.where(right[order, largest] < 0, -1.0, 1.0)
    return np.asarray(left[:, order] * (size[order] * sign))
