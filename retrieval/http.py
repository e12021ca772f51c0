"""Search by a server that speaks Search-R1's /retrieve; the corpus and its vectors are local.

    POST {"queries": [..], "topk": n, "return_scores": true}
    ->   {"result": [[{"document": {"id", ..}, "score"}, ..], ..]}

The server must serve the same corpus: an id that the corpus lacks is an error, not a passage less.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jointrag.data.errors import RetrievalError
from jointrag.data.types import Passage
from jointrag.retrieval.base import Floats, Index, IndexSpec, Rows, best_rows, fill_rows
from jointrag.retrieval.text import printable
from jointrag.retrieval.vectors import Vectors, build_vectors, read_vectors


class HttpSpec(IndexSpec):
    """Keys of `index: {type: http}`."""

    type: Literal["http"] = "http"
    url: str = Field("http://127.0.0.1:8000/retrieve", pattern=r"^https?://")
    timeout: float = Field(30.0, gt=0)  # seconds for one call
    batch: int = Field(256, ge=1)  # queries a call


class HttpIndex(Index):
    """Search somewhere else."""

    type = "http"
    Spec = HttpSpec
    spec: HttpSpec

    def __init__(self, spec: IndexSpec, passages: Sequence[Passage], vectors: Vectors) -> None:
        super().__init__(spec, passages)
        self._vectors = vectors

    @classmethod
    def build(cls, spec: IndexSpec, passages: Sequence[Passage]) -> HttpIndex:
        """Compute the vectors; the server is asked at the first search."""
        return cls(spec, passages, build_vectors(spec, passages, spec.vectors))

    @classmethod
    def read(cls, folder: Path, spec: IndexSpec, passages: Sequence[Passage]) -> HttpIndex:
        """Read what `write` wrote."""
        return cls(spec, passages, read_vectors(folder, spec, spec.vectors))

    def write(self, folder: Path) -> None:
        """The vectors."""
        self._vectors.write(folder)

    def search_rows(self, queries: Sequence[str], n: int) -> list[tuple[Rows, Floats]]:
        """Rows and scores of the best n passages of every query."""
        found = []
        for start in range(0, len(queries), self.spec.batch):
            batch = queries[start : start + self.spec.batch]
            for result in self._ask(batch, n):
                scores: dict[int, float] = {}
                for rank, hit in enumerate(result):
                    row, score = self._hit(hit, rank)
                    scores.setdefault(row, score)
                rows = np.array(list(scores), dtype=np.int64)
                found.append(fill_rows(*best_rows(np.array(list(scores.values()), dtype=np.float32), rows, n), n))
        return found

    def _ask(self, queries: Sequence[str], n: int) -> list[Any]:
        url = self.spec.url
        body = json.dumps({"queries": [printable(q) for q in queries], "topk": n, "return_scores": True}).encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.spec.timeout) as response:
                answer = json.load(response)
        except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors; an HTML page is a ValueError
            raise RetrievalError(
                f"{url}: got {error}, expected a JSON answer within {self.spec.timeout:g} s; "
                f"start the server, or correct index.url or index.timeout."
            ) from error
        results = answer.get("result") if isinstance(answer, dict) else None
        if (
            not isinstance(results, list)
            or len(results) != len(queries)
            or not all(isinstance(r, list) for r in results)
        ):
            raise RetrievalError(
                f"{url}: got an answer without one result list for each of {len(queries)} queries, expected "
                f'{{"result": [[..], ..]}}; check that the server speaks Search-R1\'s /retrieve.'
            )
        return results

    def _hit(self, hit: Any, rank: int) -> tuple[int, float]:
        """Row and score of one hit; a server that gives no scores gives ranks, hence 1 / (1 + rank)."""
        document = hit.get("document", hit) if isinstance(hit, dict) else None
        passage_id = str(document.get("id")) if isinstance(document, dict) else None
        if passage_id not in self._row_of:
            raise RetrievalError(
                f"{self.spec.url}: got document id {passage_id!r}, expected one of the {len(self)} ids of this corpus; "
                f"serve the corpus that `data.corpus` names."
            )
        score = hit.get("score", 1.0 / (1 + rank))
        if not isinstance(score, (int, float)) or not math.isfinite(score):
            raise RetrievalError(f"{self.spec.url}: got score {score!r}, expected a finite number; repair the server.")
        return self._row_of[passage_id], float(score)

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
