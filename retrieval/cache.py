"""CachedIndex remembers what each (query, n) found; hit_rate = answered from memory / asked.

Search is a function of the query alone, so remembering changes no result; a restart loses only the time. Training asks
the same questions every few updates: candidates retrieved anew each time are most of an iteration on a large corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from jointrag.data.types import Passage
from jointrag.retrieval.base import Floats, Hits, Index, IndexSpec, Rows


class CachedIndex(Index):
    """Any index, with a memory of its last `size` searches (least recently used go first)."""

    type = "cached"
    Spec = IndexSpec

    def __init__(self, inner: Index, size: int = 100_000) -> None:
        # no super().__init__: the corpus is the inner index's, and fingerprinting it twice buys nothing
        self.inner, self.size = inner, size
        self.spec, self.ids, self.fingerprint = inner.spec, inner.ids, inner.fingerprint
        self._passages, self._row_of = inner._passages, inner._row_of
        self._memory: dict[tuple[str, int], Hits] = {}
        self.asked = 0  # queries
        self.remembered = 0  # of them, answered from memory

    @property
    def hit_rate(self) -> float:
        """Share of queries answered from memory; 0 before the first."""
        return self.remembered / self.asked if self.asked else 0.0

    def search(self, queries: Sequence[str], n: int) -> list[Hits]:
        """The inner index's hits; only new queries reach it, in one call."""
        if isinstance(queries, str) or n < 1:
            return self.inner.search(queries, n)  # which says what is wrong
        known = {query: hits for query in queries if (hits := self._memory.pop((query, n), None)) is not None}
        fresh = [query for query in dict.fromkeys(queries) if query not in known]
        found = known | dict(zip(fresh, self.inner.search(fresh, n) if fresh else [], strict=True))
        self._memory.update(((query, n), hits) for query, hits in found.items())
        while len(self._memory) > self.size:
            del self._memory[next(iter(self._memory))]
        self.asked += len(queries)
        self.remembered += len(queries) - len(fresh)
        return [found[query] for query in queries]

    def search_rows(self, queries: Sequence[str], n: int) -> list[tuple[Rows, Floats]]:
        """The inner index's, without memory."""
        return self.inner.search_rows(queries, n)

    def vectors(self, which: Sequence[int] | Sequence[str] | Rows) -> Floats:
        """The inner index's."""
        return self.inner.vectors(which)

    def query_vectors(self, queries: Sequence[str]) -> Floats:
        """The inner index's."""
        return self.inner.query_vectors(queries)

    @property
    def dim(self) -> int:
        """The inner index's."""
        return self.inner.dim

    def save(self, folder: str | Path) -> None:
        """Save the inner index; the memory is not kept."""
        self.inner.save(folder)

    def write(self, folder: Path) -> None:
        """The inner index's files."""
        self.inner.write(folder)

    @classmethod
    def build(cls, spec: IndexSpec, passages: Sequence[Passage]) -> Self:
        """Not a type of its own: wrap a built index."""
        raise TypeError("wrap an index: CachedIndex(build_index(settings, passages))")

    @classmethod
    def read(cls, folder: Path, spec: IndexSpec, passages: Sequence[Passage]) -> Self:
        """Not a type of its own: wrap a loaded index."""
        raise TypeError("wrap an index: CachedIndex(load_index(folder, passages))")
