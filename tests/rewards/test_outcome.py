"""Team terms, and the order that must hold: correct > partly correct > wrong > no answer > malformed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from jointrag.rewards import build_rewards
from jointrag.rewards.outcome import EM, F1, CoverEM, MalformedAnswer, NoAnswer, SearchCost, TokenCost

# gold, answer, malformed, F1, EM, cover-EM, no answer, malformed answer, reason
OUTCOMES = [
    (["Norway"], "Norway", False, 1.0, 1.0, 1.0, 0.0, 0.0, "correct"),
    (["Oslo", "Norway"], "norway.", False, 1.0, 1.0, 1.0, 0.0, 0.0, "correct by its second alias"),
    (["Norway"], "in Norway", False, 2 / 3, 0.0, 1.0, 0.0, 0.0, "partly: P = 1/2, R = 1"),
    (["Norway"], "Sweden", False, 0.0, 0.0, 0.0, 0.0, 0.0, "wrong"),
    (["Norway"], "unknown", False, 0.0, 0.0, 0.0, 1.0, 0.0, "abstains from an answerable question"),
    (["Norway"], "Unknown.", False, 0.0, 0.0, 0.0, 1.0, 0.0, "abstains, in other letters"),
    (["Norway"], "", False, 0.0, 0.0, 0.0, 1.0, 0.0, "no text"),
    (["Norway"], "Norway", True, 0.0, 0.0, 0.0, 1.0, 1.0, "malformed, and the default happens to be right"),
    (["unknown"], "unknown", False, 1.0, 1.0, 1.0, 0.0, 0.0, "abstains from an unanswerable question"),
    (["unknown"], "Norway", False, 0.0, 0.0, 0.0, 0.0, 0.0, "answers an unanswerable question"),
    (["unknown"], "unknown", True, 0.0, 0.0, 0.0, 0.0, 1.0, "malformed, and the default abstains"),
]


@pytest.mark.parametrize("case", OUTCOMES, ids=[o[-1] for o in OUTCOMES])
def test_outcomes(story: Any, case: tuple[Any, ...]) -> None:
    gold, answer, malformed, *expected, _ = case
    episode = story(gold, []).answer(answer, malformed=malformed).episode
    terms = (F1(), EM(), CoverEM(), NoAnswer(), MalformedAnswer())
    assert [t.score_episode(episode) for t in terms] == pytest.approx(expected)


ANSWERS = {"correct": "Norway", "partly": "in Norway", "wrong": "Sweden", "none": "unknown", "malformed": "Norway"}
WEIGHTS = [
    None,
    {"team": [{"type": "em"}, {"type": "no_answer", "weight": -0.5}, {"type": "f1", "weight": 0.5}]},  # -0.5 < -0.2
]


@pytest.mark.parametrize("settings", WEIGHTS, ids=["default", "no answer dearer than format"])
def test_correct_partly_wrong_none_malformed_stand_in_this_order(story: Any, settings: Any) -> None:
    team, own = [], []
    for kind, answer in ANSWERS.items():
        episode = story().hold("a", "b").answer(answer, malformed=kind == "malformed").episode
        build_rewards(settings, agents=["answerer"]).score(episode)
        team.append(sum(episode.team.values()))
        own.append(team[-1] + sum(episode.process[0].values()))
    assert all(better > worse for better, worse in pairwise(team)), team
    assert all(better > worse for better, worse in pairwise(own)), own  # with the answerer's own process rewards too


def test_the_default_configs_outcomes_by_hand(story: Any) -> None:
    reward = build_rewards()
    totals = {}
    for kind, answer in ANSWERS.items():
        episode = story().answer(answer, malformed=kind == "malformed").episode
        reward.score(episode)
        totals[kind] = sum(episode.team.values())
    # malformed: no answer -0.1, format -0.2
    assert totals == pytest.approx({"correct": 1, "partly": 2 / 3, "wrong": 0, "none": -0.1, "malformed": -0.3})


def test_for_an_unanswerable_question_abstaining_is_correct_and_malformed_is_worst(story: Any) -> None:
    totals = []
    for answer, malformed in (("unknown", False), ("Norway", False), ("unknown", True)):
        episode = story(["unknown"], []).answer(answer, malformed=malformed).episode
        build_rewards().score(episode)
        totals.append(sum(episode.team.values()))
    assert totals == [1.0, 0.0, -0.2]


def test_a_malformed_query_does_not_make_the_answer_malformed(story: Any) -> None:
    episode = story().ask("In which country?", malformed=True).retrieve("b").answer("Norway").episode
    build_rewards().score(episode)
    assert episode.team == {"f1": 1.0, "no_answer": 0.0}


def test_a_later_agents_answer_is_the_final_one(story: Any) -> None:
    told = story().answer("Sweden", malformed=True).decide("verifier", "Norway", {"answer": "Norway"})
    told.episode.state["answer"] = "Norway"
    assert (F1().score_episode(told.episode), MalformedAnswer().score_episode(told.episode)) == (1.0, 0.0)


def test_an_episode_that_ended_without_an_answer_has_no_answer(story: Any) -> None:
    episode = story().ask("one").retrieve("a").episode
    assert (F1().score_episode(episode), NoAnswer().score_episode(episode)) == (0.0, 1.0)


def test_team_costs_are_linear_up_to_their_limit(story: Any) -> None:
    episode = story().ask("one", "two").retrieve("a").ask("three").retrieve("b").stop().episode
    assert SearchCost().score_episode(episode) == -0.5  # 3 of 6
    assert SearchCost(limit=2).score_episode(episode) == -1.0
    assert TokenCost(limit=1000).score_episode(episode) == -0.25  # 5 decisions of 50
