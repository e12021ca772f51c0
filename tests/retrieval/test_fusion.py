from __future__ import annotations

import itertools

import pytest

from jointrag.retrieval import rrf


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    # a: 1/61 + 1/62; b: 1/62 + 1/63; c: 1/63 (second ranking: a second place, b third, d first 1/61)
    fused = rrf([["a", "b", "c"], ["d", "a", "b"]])
    assert [item for item, _ in fused] == ["a", "b", "d", "c"]
    assert dict(fused) == pytest.approx({"a": 1 / 61 + 1 / 62, "b": 1 / 62 + 1 / 63, "d": 1 / 61, "c": 1 / 63})


def test_ties_stand_in_order_of_first_appearance() -> None:
    assert [item for item, _ in rrf([["x", "y"], ["y", "x"]])] == ["x", "y"]
    assert [item for item, _ in rrf([["y", "x"], ["x", "y"]])] == ["y", "x"]


def test_scores_do_not_depend_on_the_order_of_rankings() -> None:
    rankings = [["a", "b", "c"], ["b", "c", "a"], ["c", "b", "d", "a"]]
    scores = [dict(rrf(order)) for order in itertools.permutations(rankings)]
    assert all(s == scores[0] for s in scores)


def test_a_repeated_item_counts_its_first_place_only() -> None:
    assert rrf([["a", "a", "b"]]) == [("a", 1 / 61), ("b", 1 / 62)]


def test_small_k_trusts_first_places() -> None:
    # k=0: a 1/1 against b 1/2 + 1/3; k=60: b 1/62 + 1/63 against a 1/61
    rankings = [["a", "b"], ["c", "d", "b"]]
    assert rrf(rankings, k=0)[0][0] == "a"
    assert rrf(rankings)[0][0] == "b"


@pytest.mark.parametrize("rankings", [[], [[]], [[], []]])
def test_nothing_fuses_to_nothing(rankings: list[list[str]]) -> None:
    assert rrf(rankings) == []
