from __future__ import annotations

import numpy as np
import pytest

from jointrag.data.types import Passage
from jointrag.retrieval import build_index


def test_scores_are_the_reciprocal_ranks_of_both_parts(passages: list[Passage]) -> None:
    parts = [build_index({"type": name, "dim": 16}, passages) for name in ("bm25", "dense")]
    expected: dict[str, float] = {}
    for part in parts:
        (hits,) = part.search(["heron by the marsh"], 48)
        ranked = [i for i, s in zip(hits.ids, hits.scores, strict=True) if s > 0 or part.type == "dense"]
        for rank, passage_id in enumerate(ranked, start=1):
            expected[passage_id] = expected.get(passage_id, 0.0) + 1 / (60 + rank)
    (fused,) = build_index({"type": "hybrid", "dim": 16}, passages).search(["heron by the marsh"], 48)
    assert dict(zip(fused.ids, fused.scores.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6)
    assert fused.ids[0] == "p11"  # Heron marsh: first in both, 1/61 + 1/61
    assert fused.scores[0] == pytest.approx(2 / 61)


def test_a_query_of_unknown_words_has_no_ranking_and_comes_in_row_order(passages: list[Passage]) -> None:
    (hits,) = build_index({"type": "hybrid", "dim": 16}, passages).search(["zzz"], 6)
    assert hits.rows.tolist() == [0, 1, 2, 3, 4, 5] and not hits.scores.any()


def test_vectors_are_those_of_the_dense_part(passages: list[Passage]) -> None:
    hybrid, dense = (build_index({"type": name, "dim": 16}, passages) for name in ("hybrid", "dense"))
    assert np.array_equal(hybrid.vectors(range(48)), dense.vectors(range(48)))
