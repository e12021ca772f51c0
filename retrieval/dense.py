"""Dense search = inner product of unit vectors over every passage, by FAISS `IndexFlatIP`; no approximation.

Two facts of faiss 1.15 shape this file. It leaves BLAS aside below 128,000 query numbers, which is ten times slower:
the threshold is lowered to 4 * dim and queries go in batches of 256. And its last bits depend on the batch's size, so
FAISS only nominates n + 32 passages; their scores are summed again row by row in numpy, the same in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from jointrag.data.types import Passage
from jointrag.retrieval.base import Floats, Index, IndexSpec, Rows, best_rows
from jointrag.retrieval.vectors import Vectors, build_vectors, read_vectors

BATCH = 256  # queries a FAISS call takes
SLACK = 32  # passages nominated beyond n
NOISE = 1e-5  # FAISS and numpy agree to within this on scores of unit vectors
CHUNK = 16_384  # passages scored at once where a query is scored in full


class DenseSpec(IndexSpec):
    """Keys of `index: {type: dense}`."""

    type: Literal["dense"] = "dense"
    encoder: str = "svd"  # what is searched: svd | minilm | any sentence-transformers name
    vectors: Literal["svd", "encoder"] = "encoder"  # what `Index.vectors` supplies: what is searched, or SVD vectors

    @property
    def searched(self) -> str:
        """The kind of vectors that are searched."""
        return "svd" if self.encoder == "svd" else "encoder"

    @property
    def supplied(self) -> str:
        """The kind of vectors that the retriever agent gets."""
        return "svd" if self.vectors == "svd" else self.searched


class DenseIndex(Index):
    """Search by meaning (an encoder) or by latent topics (SVD)."""

    Spec: ClassVar[type[Any]] = DenseSpec
    type = "dense"
    spec: DenseSpec

    def __init__(self, spec: IndexSpec, passages: Sequence[Passage], searched: Vectors, supplied: Vectors) -> None:
        super().__init__(spec, passages)
        self._searched, self._supplied = searched, supplied
        self._engine = flat_index(searched.matrix)

    @classmethod
    def build(cls, spec: IndexSpec, passages: Sequence[Passage]) -> DenseIndex:
        """Encode titles and texts."""
        assert isinstance(spec, DenseSpec)
        searched = build_vectors(spec, passages, spec.searched)
        same = spec.supplied == spec.searched
        return cls(spec, passages, searched, searched if same else build_vectors(spec, passages, spec.supplied))

    @classmethod
    def read(cls, folder: Path, spec: IndexSpec, passages: Sequence[Passage]) -> DenseIndex:
        """Read what `write` wrote."""
        assert isinstance(spec, DenseSpec)
        searched = read_vectors(folder, spec, spec.searched)
        same = spec.supplied == spec.searched
        return cls(spec, passages, searched, searched if same else read_vectors(folder, spec, spec.supplied))

    def write(self, folder: Path) -> None:
        """The vectors; FAISS' flat index is the same numbers again and is filled when read."""
        self._searched.write(folder)
        if self._supplied is not self._searched:
            self._supplied.write(folder)

    def search_rows(self, queries: Sequence[str], n: int) -> list[tuple[Rows, Floats]]:
        """Rows and scores of the best n passages of every query."""
        return dense_rows(self._engine, self._searched.matrix, self._searched.encode(queries), n)

    def vectors(self, which: Sequence[int] | Sequence[str] | Rows) -> Floats:
        """[*, dim] vectors of passages."""
        return self._supplied.matrix[self.rows_of(which)]

    def query_vectors(self, queries: Sequence[str]) -> Floats:
        """[q, dim] vectors of queries."""
        return self._supplied.encode(queries)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self._supplied.dim


def flat_index(matrix: Floats) -> Any:
    """A FAISS flat inner-product index over the rows."""
    import faiss

    engine = faiss.IndexFlatIP(matrix.shape[1])
    engine.add(np.ascontiguousarray(matrix))
    return engine


def exact_scores(matrix: Floats, query: Floats) -> Floats:
    """Inner products summed row by row, so that a row's score has the same bits whatever rows stand beside it."""
    products: Floats = (matrix * query).sum(axis=1, dtype=np.float64).astype(np.float32)
    return products


def dense_rows(engine: Any, matrix: Floats, queries_QD: Floats, n: int) -> list[tuple[Rows, Floats]]:
    """FAISS nominates, numpy scores; a query whose ties reach beyond the nominated is scored in full."""
    import faiss

    total, dim = matrix.shape
    depth = min(n + SLACK, total)
    faiss.cvar.distance_compute_blas_threshold = 4 * dim
    found = []
    for start in range(0, len(queries_QD), BATCH):
        batch = np.ascontiguousarray(queries_QD[start : start + BATCH])
        rough_QK, rows_QK = engine.search(batch, depth)
        for query, rough, rows in zip(batch, rough_QK, rows_QK.astype(np.int64), strict=True):
            if depth < total and rough[n - 1] - rough[-1] <= NOISE:
                rows = np.arange(total, dtype=np.int64)
                parts = [exact_scores(matrix[at : at + CHUNK], query) for at in range(0, total, CHUNK)]
                scores = np.concatenate(parts)
            else:
                scores = exact_scores(matrix[rows], query)
            found.append(best_rows(scores, rows, n))
    return found
