from __future__ import annotations

import math

import numpy as np
import pytest

from jointrag.data.errors import DataError
from jointrag.data.types import Passage
from jointrag.retrieval import build_index
from jointrag.retrieval.bm25 import bm25_engine, bm25_rows
from jointrag.retrieval.text import tokenize


def test_scores_are_lucenes_formula() -> None:
    # Two passages of 2 and 4 words (titles among them), mean length 3; "otter" is in both, "river" in the second alone.
    #   idf(w) = ln(1 + (N - df + 0.5) / (df + 0.5))    otter: ln(1 + 0.5/2.5) = ln 1.2    river: ln(1 + 1.5/1.5) = ln 2
    #   tf part = tf / (tf + k1 (1 - b + b len/mean)), k1 = 1.5, b = 0.75
    #   first:  otter 1 / (1 + 1.5 (0.25 + 0.75 * 2/3)) = 1 / 2.125
    #   second: otter 2 / (2 + 1.5 (0.25 + 0.75 * 4/3)) = 2 / 3.875, river 1 / 2.875
    index = build_index({"type": "bm25"}, [Passage("a", "otter", "heron"), Passage("b", "otter", "otter river lynx")])
    (hits,) = index.search(["otter river"], 2)
    assert hits.ids == ("b", "a")
    expected = [math.log(1.2) * 2 / 3.875 + math.log(2) / 2.875, math.log(1.2) / 2.125]
    assert hits.scores == pytest.approx(expected, rel=1e-5)


def test_words_are_stemmed_lower_case_and_without_stop_words() -> None:
    assert tokenize(["The Otters were LIVING by a river", "", "of the"]) == [["otter", "were", "live", "river"], [], []]


def test_unmatched_passages_follow_with_score_zero_in_row_order() -> None:
    corpus = [Passage(str(i), "pebble", "grey") for i in range(4)] + [Passage("4", "otter", "wet")]
    (hits,) = build_index({"type": "bm25"}, corpus).search(["otter"], 4)
    assert hits.ids == ("4", "0", "1", "2")
    assert hits.scores[1:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("n", [1, 3, 30, 90, 99, 100])
def test_ties_at_rank_n_go_to_the_smaller_row(n: int) -> None:
    corpus = [Passage(str(i), "pebble", "grey") for i in range(100)]  # a hundred-fold tie
    (hits,) = build_index({"type": "bm25"}, corpus).search(["pebble"], n)
    assert hits.rows.tolist() == list(range(n))


def test_the_best_rows_agree_with_sorting_every_passage() -> None:
    draw = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(30)])
    corpus = [Passage(str(i), "", " ".join(draw.choice(words, 5))) for i in range(300)]
    engine = bm25_engine(corpus)
    queries = [" ".join(draw.choice(words, size)) for size in (1, 1, 2, 3, 8) for _ in range(20)]
    for tokens, (rows, scores) in zip(tokenize(queries), bm25_rows(engine, 300, queries, 7), strict=True):
        full = engine.get_scores(tokens)
        order = sorted(range(300), key=lambda row: (-full[row], row))[:7]
        assert rows.tolist() == order
        assert scores.tobytes() == full[order].astype(np.float32).tobytes()


def test_a_corpus_without_words_is_refused() -> None:
    with pytest.raises(DataError, match="without one word"):
        build_index({"type": "bm25"}, [Passage("a", "the", "of"), Passage("b", "", "!")])
