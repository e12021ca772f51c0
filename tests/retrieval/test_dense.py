from __future__ import annotations

import numpy as np
import pytest

from jointrag.data.types import Passage
from jointrag.retrieval import build_index
from jointrag.retrieval.dense import NOISE, dense_rows, flat_index
from jointrag.retrieval.vectors import unit


def full(matrix: np.ndarray, query: np.ndarray, n: int) -> list[int]:
    """The readable twin: score everything, sort."""
    scores = (matrix * query).sum(axis=1, dtype=np.float64).astype(np.float32)
    return sorted(range(len(matrix)), key=lambda row: (-scores[row], row))[:n]


@pytest.mark.parametrize("queries", [1, 3, 300])
def test_faiss_nominees_rescored_are_the_exact_ranking(queries: int) -> None:
    draw = np.random.default_rng(1)
    matrix = unit(draw.normal(size=(2000, 24)))
    asked = unit(draw.normal(size=(queries, 24)))
    for query, (rows, _) in zip(asked, dense_rows(flat_index(matrix), matrix, asked, 10), strict=True):
        assert rows.tolist() == full(matrix, query, 10)


def test_a_tie_wider_than_the_nominated_goes_to_the_smaller_rows() -> None:
    matrix = unit(np.tile([[1.0, 0.0]], (500, 1)))
    matrix[123] = (0.0, 1.0)
    (rows, scores), (zero_rows, zeros) = dense_rows(
        flat_index(matrix), matrix, np.array([[0.0, 1.0], [0.0, 0.0]], dtype=np.float32), 4
    )
    assert rows.tolist() == [123, 0, 1, 2] and scores.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert zero_rows.tolist() == [0, 1, 2, 3] and not zeros.any()


def test_near_ties_within_faiss_noise_are_ordered_by_the_exact_score() -> None:
    matrix = unit(np.column_stack([np.ones(200), np.linspace(0, NOISE, 200)]))
    query = np.array([[0.6, 0.8]], dtype=np.float32)
    ((rows, _),) = dense_rows(flat_index(matrix), matrix, query, 5)
    assert rows.tolist() == full(matrix, query[0], 5)


def test_svd_vectors_of_a_text_without_a_known_word_are_zero() -> None:
    index = build_index({"type": "dense", "dim": 4}, [Passage("a", "Otter", "wet"), Passage("b", "Heron", "tall")])
    assert not index.query_vectors(["zzz"]).any()
    assert index.query_vectors(["otter"]) @ index.vectors(["a"]).T == pytest.approx(1.0, abs=1e-5)


def test_a_corpus_of_less_rank_than_dim_is_padded_with_zeros() -> None:
    index = build_index({"type": "dense", "dim": 64}, [Passage("a", "Otter", "wet"), Passage("b", "Heron", "tall")])
    assert index.dim == 64 and not index.vectors([0, 1])[:, 2:].any()
