"""Hybrid search = reciprocal rank fusion of BM25 and dense search; scores are RRF scores, vectors the dense part's.

Each part is asked for the same `pool` of passages whatever n is, so that the best 5 are the first 5 of the best 20. A
part that knows nothing about a query (no word in common, a zero vector) has no ranking to give and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jointrag.data.types import Passage
from jointrag.retrieval.base import Floats, IndexSpec, Rows, best_rows, fill_rows
from jointrag.retrieval.bm25 import bm25_engine, bm25_rows, read_engine
from jointrag.retrieval.dense import DenseIndex, DenseSpec, dense_rows
from jointrag.retrieval.fusion import K, rrf
from jointrag.retrieval.vectors import Vectors


class HybridSpec(DenseSpec):
    """Keys of `index: {type: hybrid}`."""

    type: Literal["hybrid"] = "hybrid"  # type: ignore[assignment]  # a sibling's tag on inherited keys
    k: int = Field(K, ge=1)  # the constant of RRF
    pool: int = Field(100, ge=1)  # passages of each part that are fused (at least n)
    k1: float = Field(1.5, ge=0)  # of BM25
    b: float = Field(0.75, ge=0, le=1)  # of BM25


class HybridIndex(DenseIndex):
    """Both engines over one corpus."""

    type = "hybrid"
    Spec = HybridSpec
    spec: HybridSpec

    def __init__(
        self, spec: IndexSpec, passages: Sequence[Passage], searched: Vectors, supplied: Vectors, lexical: Any = None
    ) -> None:
        super().__init__(spec, passages, searched, supplied)
        assert isinstance(spec, HybridSpec)
        self._lexical = bm25_engine(passages, spec.k1, spec.b) if lexical is None else lexical

    @classmethod
    def read(cls, folder: Path, spec: IndexSpec, passages: Sequence[Passage]) -> HybridIndex:
        """Read what `write` wrote."""
        dense = DenseIndex.read(folder, spec, passages)
        return cls(spec, passages, dense._searched, dense._supplied, read_engine(folder))

    def write(self, folder: Path) -> None:
        """The files of both parts."""
        super().write(folder)
        self._lexical.save(str(folder), show_progress=False)

    def search_rows(self, queries: Sequence[str], n: int) -> list[tuple[Rows, Floats]]:
        """Rows and RRF scores of the best n passages of every query."""
        depth = min(max(n, self.spec.pool), len(self))
        lexical = bm25_rows(self._lexical, len(self), queries, depth)
        dense = dense_rows(self._engine, self._searched.matrix, self._searched.encode(queries), depth)
        found = []
        for (rows_b, scores_b), (rows_d, scores_d) in zip(lexical, dense, strict=True):
            rankings = [rows_b[scores_b > 0].tolist(), rows_d.tolist() if scores_d.any() else []]
            fused = rrf(rankings, self.spec.k)
            rows = np.array([row for row, _ in fused], dtype=np.int64)
            scores = np.array([score for _, score in fused], dtype=np.float32)
            found.append(fill_rows(*best_rows(scores, rows, n), n))
        return found
