from __future__ import annotations

import pytest

from jointrag.data.errors import DataError
from jointrag.data.types import Passage, Question
from jointrag.retrieval import build_index, recall_at


def test_recall_is_the_mean_share_of_gold_found() -> None:
    corpus = [Passage("a", "otter", "otter"), Passage("b", "otter", "heron lynx"), Passage("c", "pebble", "grey")]
    index = build_index({"type": "bm25"}, corpus)  # "otter" ranks a, b, c; "pebble" c, a, b
    questions = [
        Question("1", "otter", ("x",), ("b", "c")),  # of 2 gold: 0 in the first, 1 in the first two, 2 in three
        Question("2", "pebble", ("x",), ("c",)),  # always 1 of 1
        Question("3", "no gold", ("x",)),  # left out of the mean
    ]
    assert recall_at(index, questions, ks=(1, 2, 3)) == {1: 0.5, 2: 0.75, 3: 1.0}


def test_k_beyond_the_corpus_is_everything() -> None:
    index = build_index({"type": "bm25"}, [Passage("a", "otter", "wet")])
    assert recall_at(index, [Question("1", "otter", ("x",), ("a",))]) == {2: 1.0, 5: 1.0, 10: 1.0}


def test_questions_without_gold_are_refused() -> None:
    index = build_index({"type": "bm25"}, [Passage("a", "otter", "wet")])
    with pytest.raises(DataError, match="got 1 questions, none with supporting_ids"):
        recall_at(index, [Question("1", "otter", ("x",))])
