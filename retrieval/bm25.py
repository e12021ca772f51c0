"""BM25 = sum over query words of idf * tf saturation (Lucene's form), by bm25s; vectors by TF-IDF + SVD or an encoder.

Robertson and Zaragoza (2009); bm25s (arXiv 2407.03618) computes the scores when it indexes. Its `retrieve` is a loop
over `get_scores` and a partition of the whole corpus, which is most of the time (at 13,720 passages 0.7 ms a query,
0.2 without: nearly all scores are 0) and cuts ties at rank n as it happens. So the best are picked here, among the
matched: BM25 is never negative, and what it gives 0 shares no word with the query and follows in row order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jointrag.data.errors import DataError
from jointrag.data.types import Passage
from jointrag.retrieval.base import Floats, Index, IndexSpec, Rows, best_rows, fill_rows
from jointrag.retrieval.text import PROGRESS_FROM, passage_text, tokenize
from jointrag.retrieval.vectors import Vectors, build_vectors, read_vectors


class Bm25Spec(IndexSpec):
    """Keys of `index: {type: bm25}`."""

    type: Literal["bm25"] = "bm25"
    k1: float = Field(1.5, ge=0)  # how soon repeating a word stops counting
    b: float = Field(0.75, ge=0, le=1)  # how much long passages are held back


class Bm25Index(Index):
    """Lexical search."""

    type = "bm25"
    Spec = Bm25Spec
    spec: Bm25Spec

    def __init__(self, spec: IndexSpec, passages: Sequence[Passage], engine: Any, vectors: Vectors) -> None:
        super().__init__(spec, passages)
        self._engine, self._vectors = engine, vectors

    @classmethod
    def build(cls, spec: IndexSpec, passages: Sequence[Passage]) -> Bm25Index:
        """Index titles and texts."""
        assert isinstance(spec, Bm25Spec)
        return cls(spec, passages, bm25_engine(passages, spec.k1, spec.b), build_vectors(spec, passages, spec.vectors))

    @classmethod
    def read(cls, folder: Path, spec: IndexSpec, passages: Sequence[Passage]) -> Bm25Index:
        """Read what `write` wrote."""
        return cls(spec, passages, read_engine(folder), read_vectors(folder, spec, spec.vectors))

    def write(self, folder: Path) -> None:
        """bm25s' own files and the vectors."""
        self._engine.save(str(folder), show_progress=False)
        self._vectors.write(folder)

    def search_rows(self, queries: Sequence[str], n: int) -> list[tuple[Rows, Floats]]:
        """Rows and scores of the best n passages of every query."""
        return bm25_rows(self._engine, len(self), queries, n)

    def vectors(self, which: Sequence[int] | Sequence[str] | Rows) -> Floats:
        """[*, dim] vectors of passages."""
        return self._vectors.matrix[self.rows_of(which)]

    def query_vectors(self, queries: Sequence[str]) -> Floats:
        """[q, dim] vectors of queries."""
        return self._vectors.encode(queries)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self._vectors.dim


def bm25_engine(passages: Sequence[Passage], k1: float = 1.5, b: float = 0.75) -> Any:
    """A bm25s index over the passages."""
    import bm25s

    tokens = tokenize([passage_text(p) for p in passages])
    if not any(tokens):
        raise DataError(
            f"got {len(passages)} passages without one word of two letters or more (stop words aside), "
            f"expected words to index; check the corpus file."
        )
    engine = bm25s.BM25(method="lucene", k1=k1, b=b, backend="numpy")
    engine.index(tokens, show_progress=len(passages) >= PROGRESS_FROM)
    return engine


def read_engine(folder: Path) -> Any:
    """The bm25s index saved in the folder."""
    import bm25s

    return bm25s.BM25.load(str(folder), load_corpus=False, show_progress=False)


def bm25_rows(engine: Any, total: int, queries: Sequence[str], n: int) -> list[tuple[Rows, Floats]]:
    """Every query scored in full; ties to the smaller row, the unmatched last in row order."""
    found = []
    for words in tokenize(queries):
        scores = np.asarray(engine.get_scores(words) if words else np.zeros(total), dtype=np.float32)
        rows = np.flatnonzero(scores > 0)
        matched = scores[rows]
        if len(rows) > n:
            enough = matched >= np.partition(matched, len(rows) - n)[len(rows) - n]  # the n-th best and all its ties
            rows, matched = rows[enough], matched[enough]
        found.append(fill_rows(*best_rows(matched, rows, n), n))
    return found
