"""Guards: what they catch, what they leave alone, and that penalties always pay in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jointrag.data.errors import TrainingError
from jointrag.rewards import build_rewards
from jointrag.rewards.guards import leaks


def test_an_answer_that_stood_nowhere_makes_its_query_earn_nothing(story: Any) -> None:
    told = story().ask("is it Norway").retrieve("a", "b")
    build_rewards().score(told.episode)
    assert told.episode.process[0]["retrieval_gain"] == 0.0
    build_rewards({"guards": {"answer_in_query": False}}).score(told.episode)
    assert told.episode.process[0]["retrieval_gain"] == 0.3


def test_a_leaking_query_still_pays_its_penalties(story: Any) -> None:
    told = story().hold("a").ask("Norway?").retrieve("b")
    build_rewards({"process": {"rewriter": [{"type": "retrieval_gain"}, {"type": "search_cost"}]}}).score(told.episode)
    assert told.episode.process[0] == {"retrieval_gain": 0.0, "search_cost": -0.5}


LEAKS: list[tuple[str, Any, set[int]]] = [
    ("out of nowhere", lambda s: s().ask("Ann Lee NORWAY!"), {0}),
    ("in one of two queries", lambda s: s().ask("Ann Lee", "Norway"), {0}),
    ("it stood in the question", lambda s: s(text="Was Ann Lee born in Norway or Sweden?").ask("Norway"), set()),
    ("it stands in the evidence", lambda s: s().hold("b").ask("Norway"), set()),
    ("retrieved, but dropped", lambda s: s().ask("Oslo").retrieve("b").keep().ask("Norway"), {3}),
    (
        "another agent's leak is no source",
        lambda s: s().decide("plan", 0, {"queries": ["Norway"]}).ask("Norway"),
        {0, 1},
    ),
    ("a leak does not launder the next", lambda s: s().ask("Norway").retrieve("x").ask("Norway"), {0, 2}),
    ("only a part of a word", lambda s: s().ask("Norwayish"), set()),
    ("yes is no answer to leak", lambda s: s(["yes"]).ask("yes or no"), set()),
    ("unknown is no answer to leak", lambda s: s(["unknown"], []).ask("unknown"), set()),
    ("an alias counts", lambda s: s(["Norway", "the Kingdom"]).ask("kingdom"), {0}),
    ("no queries", lambda s: s().stop().answer("Norway"), set()),
]


@pytest.mark.parametrize(("why", "tell", "expected"), LEAKS, ids=[c[0] for c in LEAKS])
def test_leaks(story: Any, why: str, tell: Any, expected: set[int]) -> None:
    assert leaks(tell(story).episode) == expected


def test_a_query_of_a_plain_function_is_a_source(story: Any) -> None:
    told = story()
    told.trail.append("Norway")  # no decision stands behind it
    assert leaks(told.ask("Norway").episode) == frozenset()


def test_a_note_that_was_read_is_no_leak(story: Any) -> None:
    told = story().ask("Norway")
    own = told.episode.decisions[0]
    own.observation = replace(own.observation, notes=(("summary", "it is Norway"),))
    assert leaks(told.episode) == frozenset()


def test_a_query_that_grew_out_of_evidence_excuses_later_ones(story: Any) -> None:
    told = story().hold("b").ask("Norway").retrieve("x")
    told.held.clear()  # a graph that forgets its evidence
    assert leaks(told.ask("Norway capital").episode) == frozenset()


def scored(story: Any, answer: str, value: float | None, **guards: bool) -> list[dict[str, float]]:
    told = story().ask("one").retrieve("a", "x").keep("x").stop().answer(answer)
    build_rewards({"guards": guards}).score(told.episode, value=value)
    return list(told.episode.process)


def test_below_its_expected_value_positive_terms_pay_half_and_penalties_in_full(story: Any) -> None:
    full, half = scored(story, "Sweden", None), scored(story, "Sweden", 0.5)
    assert full[0]["retrieval_gain"] == 0.15 and half[0]["retrieval_gain"] == 0.075
    assert full[2]["evidence_f1"] == half[2]["evidence_f1"] == pytest.approx(-0.15 * 0.3)
    assert full[3]["stop_timing"] == half[3]["stop_timing"] == -0.2  # nothing of the gold is held


def test_at_or_above_its_expected_value_everything_pays_in_full(story: Any) -> None:
    assert scored(story, "Norway", 1.0) == scored(story, "Norway", None)  # team reward 1.0 is not below 1.0
    assert scored(story, "Norway", 0.2) == scored(story, "Norway", None)


def test_the_below_value_guard_can_be_left_out(story: Any) -> None:
    assert scored(story, "Sweden", 0.5, below_value=False) == scored(story, "Sweden", None)


def test_the_guard_can_be_applied_after_scoring(story: Any) -> None:
    told = story().ask("one").retrieve("a", "x").keep("x").stop().answer("Sweden")
    reward = build_rewards()
    reward.score(told.episode)
    reward.apply_value_guard(told.episode, 0.5)
    assert told.episode.process == scored(story, "Sweden", 0.5)


def test_a_value_that_is_no_number_is_refused(story: Any) -> None:
    with pytest.raises(TrainingError, match="first value of question 'q1' is nan"):
        scored(story, "Sweden", float("nan"))
