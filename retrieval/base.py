"""Index: the one seam through which every agent searches; search(queries, n), vectors(ids), a checked manifest.

The contract, held by a test over the registry:

- `search` returns min(n, corpus) distinct passages for every query, the empty one included, by falling score; ties go
  to the smaller row number, and passages the query says nothing about follow with score 0 in row order.
- A query's hits do not depend on the queries beside it, nor on their order, nor on a save and load in between.
- `vectors` and `query_vectors` are float32 rows of unit norm (all zeros where a text has no known word).

An index folder holds `manifest.json` (type, settings, corpus fingerprint, versions, sha256 of each file) and the files
it names; the passages themselves stay in the corpus, and an index of another corpus is refused when it is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from jointrag.data.errors import ConfigError, DataError
from jointrag.data.files import corpus_fingerprint
from jointrag.data.types import Passage

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """What one query found, best first; the three are parallel."""

    ids: tuple[str, ...]
    scores: Floats  # [n]
    rows: Rows  # [n] row numbers of the corpus


class IndexSpec(BaseModel):
    """The keys every index has; each type adds its own beside its class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    SEARCH_ONLY: ClassVar[frozenset[str]] = frozenset({"candidates"})  # keys that a saved index need not agree with

    type: str
    candidates: int = Field(20, ge=1)  # passages a retriever agent chooses from
    vectors: Literal["svd", "encoder"] = "svd"  # what `Index.vectors` supplies
    dim: int = Field(128, ge=1)  # of the SVD vectors; an encoder brings its own
    encoder: str = "minilm"  # minilm | any sentence-transformers name (dense: svd too)
    seed: int = 0  # of the SVD

    def build_settings(self) -> dict[str, Any]:
        """The settings that decide what is in an index's files."""
        return self.model_dump(exclude=set(self.SEARCH_ONLY))


class Index(ABC):
    """A searchable corpus. A new type is one subclass with its Spec and one line in `registry.INDEXES`."""

    Spec: ClassVar[type[Any]]  # of IndexSpec; a subclass narrows it
    type: ClassVar[str]

    def __init__(self, spec: IndexSpec, passages: Sequence[Passage]) -> None:
        if not passages:
            raise DataError("got an empty corpus, expected at least one passage; check the corpus file.")
        self.spec = spec
        self.ids = [p.id for p in passages]
        self.fingerprint = corpus_fingerprint(passages)
        self._passages = list(passages)
        self._row_of = {passage_id: row for row, passage_id in enumerate(self.ids)}
        if len(self._row_of) != len(self.ids):
            twice = next(i for row, i in enumerate(self.ids) if self._row_of[i] != row)
            raise DataError(f"got passage id {twice!r} twice, expected an id of its own for each passage; rename one.")

    # what a type supplies

    @classmethod
    @abstractmethod
    def build(cls, spec: IndexSpec, passages: Sequence[Passage]) -> Self:
        """Index the passages."""

    @classmethod
    @abstractmethod
    def read(cls, folder: Path, spec: IndexSpec, passages: Sequence[Passage]) -> Self:
        """Read what `write` wrote; the manifest has been checked."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write everything but the passages into an existing, empty folder."""

    @abstractmethod
    def search_rows(self, queries: Sequence[str], n: int) -> list[tuple[Rows, Floats]]:
        """Rows and scores of the best n <= len(self) passages of every query, in the contract's order."""

    @abstractmethod
    def vectors(self, which: Sequence[int] | Sequence[str] | Rows) -> Floats:
        """[*, dim] vectors of passages, by id or by row number."""

    @abstractmethod
    def query_vectors(self, queries: Sequence[str]) -> Floats:
        """[q, dim] vectors of queries in the space of `vectors`."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Length of a vector."""

    # what every type has

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def candidates(self) -> int:
        """Passages a retriever agent chooses from."""
        return self.spec.candidates

    def search(self, queries: Sequence[str], n: int) -> list[Hits]:
        """The best min(n, corpus) passages of every query; many queries are one call of the search library."""
        if isinstance(queries, str):
            raise ConfigError(f"got the query {queries!r} alone, expected a list of queries; write [{queries!r}].")
        if n < 1:
            raise ConfigError(f"got n={n}, expected at least 1; ask for one passage or more.")
        if not queries:
            return []
        distinct = list(dict.fromkeys(queries))
        found = self.search_rows(distinct, min(n, len(self)))
        hits = {
            query: Hits(tuple(self.ids[row] for row in rows), scores, rows)
            for query, (rows, scores) in zip(distinct, found, strict=True)
        }
        return [hits[query] for query in queries]

    def passages(self, ids: Sequence[str]) -> list[Passage]:
        """The passages of these ids, in this order."""
        return [self._passages[self.row_of(passage_id)] for passage_id in ids]

    def row_of(self, passage_id: str) -> int:
        """The row number of a passage."""
        try:
            return self._row_of[passage_id]
        except KeyError:
            raise DataError(
                f"got passage id {passage_id!r}, expected one of the {len(self)} ids of this corpus; "
                f"use ids that `search` returned."
            ) from None

    def rows_of(self, which: Sequence[int] | Sequence[str] | Rows) -> Rows:
        """Row numbers of passages given by id or by row number."""
        return np.asarray([self.row_of(w) if isinstance(w, str) else int(w) for w in which], dtype=np.int64)

    def save(self, folder: str | Path) -> None:
        """Write the index to a folder, whole or not at all."""
        from jointrag.retrieval.store import save_index

        save_index(self, Path(folder))


def best_rows(scores: Floats, rows: Rows, n: int) -> tuple[Rows, Floats]:
    """The n best of parallel scores and rows, ties to the smaller row."""
    order = np.lexsort((rows, -scores))[:n]
    return rows[order], scores[order]


def fill_rows(rows: Rows, scores: Floats, n: int) -> tuple[Rows, Floats]:
    """Bring a ranking up to n distinct rows: the rest follow in row order with score 0, or its lowest if below."""
    lacking = n - len(rows)
    if lacking <= 0:
        return rows[:n], scores[:n]
    lowest = min(0.0, float(scores.min())) if len(scores) else 0.0
    rest = np.setdiff1d(np.arange(n, dtype=np.int64), rows, assume_unique=True)[:lacking]
    return np.concatenate([rows, rest]), np.concatenate([scores, np.full(lacking, lowest, dtype=np.float32)])
