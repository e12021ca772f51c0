"""From the config to a RewardFunction: what is refused, schedules, sums, and the contract of every term."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jointrag.configs.load import load_config
from jointrag.data.errors import ConfigError, TrainingError
from jointrag.graph.episode import Episode
from jointrag.llm.types import Candidates, Completion
from jointrag.rewards import DEFAULT, ProcessTerm, TeamTerm, build_rewards, register_process, register_team
from jointrag.rewards.registry import PROCESS, TEAM

AGENTS = ("rewriter", "retriever", "filter", "answerer")
NAN = float("nan")

REFUSED: list[tuple[Any, str]] = [
    ([], "rewards: got [], expected keys and values"),
    (
        {"tem": []},
        "rewards.tem: got an unknown key, expected one of team, process, format, guards*Did you mean 'team'?",
    ),
    ({"team": "f1"}, "rewards.team: got 'f1', expected a list of terms"),
    ({"team": {"type": "f1"}}, "rewards.team: got {'type': 'f1'}, expected a list"),
    ({"team": ["f1"]}, "rewards.team[0]: got 'f1', expected keys and values"),
    ({"team": [{"weight": 1}]}, "rewards.team[0].type: got None, expected one of f1, em"),
    ({"team": [{"type": ["f1"]}]}, "rewards.team[0].type: got ['f1']"),
    ({"team": [{"type": "no_anwser"}]}, "rewards.team[0].type: got 'no_anwser'*Did you mean 'no_answer'?"),
    ({"team": [{"type": "grounded"}]}, "rewards.team[0].type: got 'grounded'"),  # a process term
    ({"team": [{"type": "f1", "wieght": 1}]}, "rewards.team[0].wieght: got an unknown key*Did you mean 'weight'?"),
    ({"team": [{"type": "search_cost", "limit": 0}]}, "rewards.team[0].limit: got 0, expected"),
    ({"team": [{"type": "search_cost", "limit": "6"}]}, "rewards.team[0].limit: got '6', expected"),
    ({"team": [{"type": "f1", "weight": "1"}]}, "rewards.team[0].weight: got '1', expected a finite number"),
    ({"team": [{"type": "f1", "weight": True}]}, "rewards.team[0].weight: got True, expected a finite number"),
    ({"team": [{"type": "f1", "weight": NAN}]}, "rewards.team[0].weight: got nan, expected a finite number"),
    ({"team": [{"type": "f1", "weight": {"from": 0, "to": 1}}]}, "weight.episodes: got no such key, expected one"),
    ({"team": [{"type": "f1", "weight": {"from": 0, "to": NAN, "episodes": 1}}]}, "weight.to: got nan"),
    ({"team": [{"type": "f1", "weight": {"from": 0, "to": 1, "episodes": 0}}]}, "weight.episodes: got 0, expected"),
    (
        {"team": [{"type": "f1", "weight": {"from": 0, "to": 1, "episode": 5, "episodes": 5}}]},
        "weight.episode: got an unknown key, expected one of from, to, episodes*Did you mean 'episodes'?",
    ),
    ({"team": [{"type": "f1"}, {"type": "f1"}]}, "rewards.team[1].type: got 'f1' a second time"),
    ({"process": []}, "rewards.process: got [], expected keys and values"),
    ({"process": {"filter": None}}, "rewards.process.filter: got None, expected a list"),
    ({"process": {"filtre": []}}, "rewards.process.filtre: got an unknown agent, expected*Did you mean 'filter'?"),
    ({"process": {"filter": [{"type": "f1"}]}}, "rewards.process.filter[0].type: got 'f1', expected one of"),
    ({"process": {"filter": [{"type": "evidence_f1", "junk": 2.0}]}}, "rewards.process.filter[0].junk: got 2.0"),
    ({"format": 0.2}, "rewards.format: got 0.2, expected 0 or less"),
    ({"format": None}, "rewards.format: got None, expected a finite number"),
    ({"format": {"from": -0.2, "to": 0.1, "episodes": 9}}, "rewards.format: got {*expected 0 or less"),
    ({"guards": {"below": True}}, "rewards.guards.below: got an unknown key*Did you mean 'below_value'?"),
    ({"guards": {"below_value": "no"}}, "rewards.guards.below_value: got 'no', expected"),
    ({"guards": True}, "rewards.guards: got True, expected"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[r[1] for r in REFUSED])
def test_wrong_settings_are_refused_by_their_key(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=".*".join(re.escape(part) for part in message.split("*"))):
        build_rewards(settings, agents=AGENTS)


@pytest.mark.parametrize("hops", [0, -1, 2.5, True, None])
def test_a_hop_cap_that_is_no_count_is_refused(hops: Any) -> None:
    with pytest.raises(ConfigError, match=r"graph\.max_hops: got"):
        build_rewards(max_hops=hops)


def test_no_settings_are_the_default() -> None:
    assert build_rewards() == build_rewards({}) == build_rewards(DEFAULT)


def test_the_default_falls_away_for_agents_that_are_not_there() -> None:
    assert list(build_rewards(agents=["rewriter", "answerer"]).process) == ["rewriter", "answerer"]


def test_a_process_that_is_given_stands_alone() -> None:
    assert list(build_rewards({"process": {"filter": [{"type": "evidence_f1"}]}}).process) == ["filter"]


def test_an_agent_of_the_users_may_have_any_term(story: Any) -> None:
    told = story().decide("summariser", "a summary", {"summary": "a summary"}, malformed=True)
    build_rewards({"process": {"summariser": [{"type": n} for n in PROCESS]}}, agents=["summariser"]).score(
        told.episode
    )
    terms = told.episode.process[0]
    assert terms.pop("format") == -0.2 and terms.pop("token_cost") == -50 / 512
    assert set(terms.values()) == {0.0}


# schedules


def test_a_schedule_is_linear_and_then_stays() -> None:
    reward = build_rewards()  # 0.0 to 0.02 over 2,000 episodes
    got = [reward.weights_at(n)["rewriter.search_cost"] for n in (-5, 0, 500, 1000, 2000, 9000)]
    assert got == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.02, 0.02])
    assert reward.weights_at(1000)["team.f1"] == 1.0 and reward.weights_at(1000)["format"] == -0.2


def test_a_scheduled_weight_is_applied(story: Any) -> None:
    told = story().ask("one", "two").retrieve("x")
    build_rewards().score(told.episode, episodes_done=1000)
    assert told.episode.process[0]["search_cost"] == -0.01  # two queries cost 1, half way up to 0.02


# sums


def test_an_episode_of_the_default_config_by_hand(story: Any) -> None:
    told = story().ask("one").retrieve("a", "x").keep("a").ask("two").retrieve("b", "y").keep("b").stop()
    build_rewards(max_hops=3).score(told.answer("Norway").episode)
    rewriter = {"retrieval_gain": 0.15, "stop_timing": 0.0, "search_cost": 0.0}
    assert told.episode.team == {"f1": 1.0, "no_answer": 0.0}
    assert told.episode.process == [
        rewriter,
        {"recall_gain": 0.15},
        {"evidence_f1": pytest.approx(0.1)},  # 0.3 x 1 / 3 hops
        rewriter,
        {"recall_gain": 0.15},
        {"evidence_f1": pytest.approx(0.1)},
        {"retrieval_gain": 0.0, "stop_timing": 0.2, "search_cost": 0.0},
        {"grounded": 0.1},
    ]


def test_positive_values_of_parallel_branches_are_averaged_and_penalties_are_not(story: Any) -> None:
    told = story().ask("one", "two")
    told.parallel, told.pending = True, ["one"]
    told.retrieve("a", "x").retrieve("b", "x")
    build_rewards({"process": {"retriever": [{"type": "recall_gain"}, {"type": "search_cost"}]}}).score(told.episode)
    assert told.episode.process[1:] == [{"recall_gain": 0.25, "search_cost": -0.5}] * 2


def test_positive_values_that_are_not_bounded_are_divided_by_the_hop_cap_and_penalties_are_not(story: Any) -> None:
    told = story().ask("one").retrieve("a").keep("a").ask("two").retrieve("b", "x").keep("x")
    build_rewards({"process": {"filter": [{"type": "evidence_f1"}]}}, max_hops=4).score(told.episode)
    assert [told.episode.process[i]["evidence_f1"] for i in told.of("filter")] == pytest.approx([0.25, -0.15])


def test_a_malformed_decision_pays_and_earns_nothing(story: Any) -> None:
    told = story().ask("one", malformed=True).retrieve("a", "b")
    build_rewards().score(told.episode)
    assert told.episode.process[0] == {"retrieval_gain": 0.0, "stop_timing": 0.0, "search_cost": 0.0, "format": -0.2}


def test_a_malformed_decision_of_an_agent_that_does_not_learn_pays_no_format(story: Any) -> None:
    told = story().ask("one", malformed=True, mode="frozen").retrieve("a", "b")
    build_rewards().score(told.episode)
    assert "format" not in told.episode.process[0]


@pytest.mark.parametrize("mark", [{"forced": True}, {"failed": "TimeoutError: slow"}])
def test_forced_decisions_and_failed_tools_are_not_judged(story: Any, mark: dict[str, Any]) -> None:
    told = story().ask("one").retrieve("a", **mark).stop(**mark)
    build_rewards().score(told.episode)
    assert told.episode.process[1:] == [{}, {}]


def test_without_process_keeps_team_and_format(story: Any) -> None:
    told = story().ask("one", malformed=True).retrieve("a").answer("Norway")
    build_rewards().without_process().score(told.episode)
    assert (told.episode.team["f1"], told.episode.process) == (1.0, [{"format": -0.2}, {}, {}])


def test_scoring_twice_gives_the_same_and_depends_on_no_other_episode(story: Any) -> None:
    def tell() -> Episode:
        episode: Episode = story().ask("one").retrieve("a", "x").keep("x").stop().answer("in Norway").episode
        return episode

    reward, first, again, other = build_rewards(), tell(), tell(), story(["yes"]).ask("q").retrieve("a").answer("no")
    reward.score(first)
    reward.score(other.episode)
    reward.score(again, value=9.0)
    reward.score(again)
    assert (again.team, again.process) == (first.team, first.process)


# a ranking's baseline


def ranked(story: Any, others: Sequence[tuple[int, ...]]) -> Any:
    """The gold passage a picked first, out of a and x; `others` are rows of (a, x)."""
    told = story(gold=("a",)).ask("one").retrieve("a", others=["x"])
    own = told.episode.decisions[1]
    candidates = Candidates(("a", "x"), None, None, (True, True))
    told.episode.decisions[1] = replace(
        own,
        request=replace(own.request, candidates=candidates),
        completion=Completion((0,), (-0.1,), (), others=tuple(others)),
    )
    return told.episode


def test_a_rankings_baseline_is_the_mean_reward_of_the_other_orderings(story: Any) -> None:
    reward = build_rewards({"process": {"retriever": [{"type": "recall_gain", "weight": 2.0}]}}, max_hops=1)
    episode = ranked(story, [(0,), (1,), (1,), (1,)])  # a found in one of four: 2 * 1/4
    reward.score(episode)
    before = episode.decisions[1]
    assert sum(episode.process[1].values()) == 2.0
    assert reward.baseline(episode, 1, 0, below=False) == 0.5
    assert reward.baseline(episode, 1, 0, below=True) == 0.25  # halved as the reward itself would be
    assert episode.decisions[1] is before


def test_what_was_no_sampled_ranking_has_no_such_baseline(story: Any) -> None:
    reward = build_rewards({"process": {"retriever": [{"type": "recall_gain"}]}})
    episode = ranked(story, [])
    assert [reward.baseline(episode, i, 0, below=False) for i in (0, 1)] == [None, None]


# numbers that are none


class NoNumber(TeamTerm):
    value: Any

    def score_episode(self, episode: Episode) -> float:
        return self.value  # type: ignore[no-any-return]


class NoProcessNumber(ProcessTerm):
    value: Any

    def score_decision(self, episode: Episode, i: int) -> float:
        return self.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf"), 1e300, None, "1"])
def test_a_value_that_is_no_finite_number_names_term_agent_and_question(
    story: Any, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setitem(TEAM, "odd", NoNumber)
    monkeypatch.setitem(PROCESS, "odd", NoProcessNumber)
    told = story().ask("one").retrieve("a")
    with pytest.raises(TrainingError, match=r"team reward 'odd' of question 'q1' is .*expected a finite number"):
        build_rewards({"team": [{"type": "odd", "value": value}]}).score(told.episode)
    with pytest.raises(TrainingError, match=r"process reward 'odd' of agent 'retriever', question 'q1' is"):
        build_rewards({"process": {"retriever": [{"type": "odd", "value": value, "weight": 0.0}]}}).score(told.episode)


class Boom(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        raise KeyError("no such thing")


def test_a_term_that_fails_names_itself_and_the_question(story: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEAM, "odd", Boom)
    with pytest.raises(TrainingError, match=r"reward 'odd' of question 'q1' failed with KeyError: 'no such thing'"):
        build_rewards({"team": [{"type": "odd"}]}).score(story().ask("one").episode)


# plugins


def test_a_plugins_term_is_built_by_its_name(story: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEAM, "mine", "taken out again after the test")
    monkeypatch.setitem(PROCESS, "mine", "taken out again after the test")
    register_team("mine", NoNumber)
    register_process("mine", NoProcessNumber)
    settings = {
        "team": [{"type": "mine", "value": 0.5, "weight": 2}],
        "process": {"rewriter": [{"type": "mine", "value": 0.25}]},
    }
    told = story().ask("one").retrieve("a")
    build_rewards(settings, max_hops=1).score(told.episode)
    assert (told.episode.team, told.episode.process[0]) == ({"mine": 1.0}, {"mine": 0.25})


def test_the_name_format_is_taken() -> None:
    with pytest.raises(ValueError, match="'format'"):
        register_process("format", NoProcessNumber)


@pytest.mark.parametrize(
    "target", ["no.such.module:X", "jointrag.rewards.process:Nothing", "nocolon", dict, NoProcessNumber]
)
def test_a_wrong_registration_is_refused_where_it_is_used(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    monkeypatch.setitem(TEAM, "mine", target)
    with pytest.raises(ConfigError, match=r"rewards.team\[0\].type: 'mine' is registered as"):
        build_rewards({"team": [{"type": "mine"}]})


# the contract of every term


def tales(story: Any) -> list[Episode]:
    """Episodes of every kind, plain and odd."""
    fan = story().ask("one", "two")
    fan.parallel = True
    fan.retrieve("a", "x").retrieve("b", "a")
    return [
        t.episode
        for t in (
            story().ask("one").retrieve("a", "x").keep("a").ask("two").retrieve("b").keep("b").stop().answer("Norway"),
            story().ask("one").retrieve("a", "b").keep().ask("one").retrieve("a", "b").keep("a", "b").stop(),
            story(["yes"], []).ask("yes").retrieve("x").keep("x").stop().answer("yes", malformed=True),
            story(["unknown"], []).ask("one").retrieve("x").keep().stop().answer("unknown"),
            story(gold=[]).ask("Norway").retrieve("b", "x", others=["y"]).keep("b").stop().answer(""),
            story().stop().answer("the the"),
            story().ask(*(f"query {i}" for i in range(9))).retrieve("x", failed="TimeoutError: slow").stop(forced=True),
            fan,
            story(),
        )
    ]


@pytest.mark.parametrize("name", sorted(TEAM))
def test_every_team_term_is_pure_bounded_and_picklable(story: Any, name: str) -> None:
    reward = build_rewards({"team": [{"type": name}], "process": {}})
    term = reward.team[0][1]
    assert type(term).__doc__ is not None and name in str(type(term).__doc__)  # its formula
    again = pickle.loads(pickle.dumps(term))
    for episode in tales(story):
        before = copy.deepcopy(episode)
        value = term.score_episode(episode)
        assert episode == before
        assert value == term.score_episode(episode) == again.score_episode(before)
        assert -1.0 <= value <= 1.0


@pytest.mark.parametrize("name", sorted(PROCESS))
def test_every_process_term_is_pure_bounded_and_picklable(story: Any, name: str) -> None:
    reward = build_rewards({"process": {"any": [{"type": name}]}})
    term = reward.process["any"][0][1]
    assert type(term).__doc__ is not None and name in str(type(term).__doc__)
    again = pickle.loads(pickle.dumps(term))
    for episode in tales(story):
        before = copy.deepcopy(episode)
        for i in range(len(episode.decisions)):
            value = term.score_decision(episode, i)
            assert episode == before
            assert value == term.score_decision(episode, i) == again.score_decision(before, i)
            assert -1.0 <= value <= 1.0


@pytest.mark.parametrize("name", sorted(PROCESS))
def test_what_a_term_earns_in_an_episode_is_at_most_one(story: Any, name: str) -> None:
    reward = build_rewards({"process": {a: [{"type": name}] for a in AGENTS}}, max_hops=3)
    for episode in tales(story):
        reward.score(episode)
        for agent in AGENTS:
            earned = [
                t[name] for t, d in zip(episode.process, episode.decisions, strict=True) if t and d.agent == agent
            ]
            assert sum(v for v in earned if v > 0) <= 1.0 + 1e-12


def test_a_reward_function_is_picklable(story: Any) -> None:
    reward, told = build_rewards(), story().ask("one").retrieve("a", "x").answer("Norway")
    again = pickle.loads(pickle.dumps(reward))
    assert again == reward
    again.score(told.episode)
    assert told.episode.team["f1"] == 1.0


def test_scores_never_hold_a_negative_zero(story: Any) -> None:
    told = story().ask("one").retrieve("x").answer("Sweden")
    build_rewards().score(told.episode)
    assert "-0.0" not in repr((told.episode.team, told.episode.process))


def test_rewards_import_nothing_heavy() -> None:
    code = (
        "import sys; from jointrag.rewards import build_rewards; build_rewards(); "
        "print(sorted({'torch', 'transformers', 'langgraph', 'faiss', 'jointrag.marl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_config_sets_guards_and_schedules() -> None:
    ramp = {"from": -0.1, "to": -0.3, "episodes": 100}
    config = load_config({"extends": "demo", "rewards": {"format": ramp, "guards": {"answer_in_query": False}}})
    reward = build_rewards(config.rewards.model_dump())
    assert (reward.format.at(0), reward.format.at(50), reward.format.at(1000)) == pytest.approx((-0.1, -0.2, -0.3))
    assert (reward.guards.answer_in_query, reward.guards.below_value) == (False, True)
