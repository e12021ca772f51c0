from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jointrag.data.types import Question
from jointrag.graph.episode import Decision, Episode
from jointrag.marl.algorithms.ippo import Ippo
from jointrag.marl.algorithms.mappo import Mappo
from jointrag.marl.credit.base import Batch, Credit, Floats, Scored
from jointrag.marl.credit.difference import difference
from jointrag.marl.credit.group_relative import group_relative
from jointrag.marl.credit.shapley import exact, sampled, shapley
from jointrag.marl.credit.shared_return import shared_return
from jointrag.marl.credit.team_gae import gae, of_episode, step_values

# Three steps, the second of two parallel decisions; gamma = lambda = 1/2, so gamma lambda = 1/4.
#   V per step                 1, (2 + 4) / 2 = 3, 2
#   delta_3 = 8 - 2            =  6       A_3 = 6
#   delta_2 = 1/2 * 2 - 3      = -2       A_2 = -2 + 1/4 * 6     = -0.5
#   delta_1 = 1/2 * 3 - 1      =  0.5     A_1 = 0.5 + 1/4 * -0.5 =  0.375
#   returns A + V              1.375, 2.5, 8
#   p - b                      0.25, 0.5, -1, 1
CHAIN = Scored(
    steps=[0, 2, 2, 5],
    team=8.0,
    process=[0.5, 1.0, -1.0, 2.0],
    values=[1.0, 2.0, 4.0, 2.0],
    baselines=[0.25, 0.5, 0.0, 1.0],
    malformed=[False] * 4,
)


def test_gae_of_a_chain_with_parallel_decisions_is_the_one_by_hand() -> None:
    credit = of_episode(CHAIN, 0.5, 0.5)
    np.testing.assert_allclose(credit.team, [0.375, -0.5, -0.5, 6.0])
    np.testing.assert_allclose(credit.returns, [1.375, 2.5, 2.5, 8.0])
    np.testing.assert_allclose(credit.advantages, [0.625, 0.0, -1.5, 7.0])


def test_parallel_decisions_share_the_mean_of_their_values() -> None:
    index, values = step_values(CHAIN.steps, CHAIN.values)
    assert index == [0, 1, 1, 2]
    np.testing.assert_allclose(values, [1.0, 3.0, 2.0])


def test_nothing_follows_the_last_step() -> None:
    only = of_episode(Scored([3], 0.7, [0.0], [0.2], [0.0], [False]), 0.9, 0.9)
    np.testing.assert_allclose(only.advantages, [0.5])  # R - V, whatever gamma and lambda
    np.testing.assert_allclose(only.returns, [0.7])


def test_rewards_before_the_end_flow_back_discounted() -> None:
    # gamma 0.9, lambda 0: deltas alone. 1 + 0.9 * 2 - 3 = -0.2; 4 - 2 = 2
    np.testing.assert_allclose(gae(np.array([1.0, 4.0]), np.array([3.0, 2.0]), 0.9, 0.0), [-0.2, 2.0])
    # lambda 1: -0.2 + 0.9 * 2 = 1.6, which is 1 + 0.9 * 4 - 3
    np.testing.assert_allclose(gae(np.array([1.0, 4.0]), np.array([3.0, 2.0]), 0.9, 1.0), [1.6, 2.0])


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_exact_values_leave_no_team_advantage(lam: float) -> None:
    # with gamma 1/2 the value of the step k before the end is 8 / 2^k
    exact = replace(CHAIN, values=[2.0, 4.0, 4.0, 8.0])
    np.testing.assert_allclose(of_episode(exact, 0.5, lam).team, 0.0, atol=1e-12)


def test_a_process_reward_stays_with_its_decision() -> None:
    paid = of_episode(replace(CHAIN, process=[0.5, 1.0, -1.0, 102.0]), 0.5, 0.5)
    plain = of_episode(CHAIN, 0.5, 0.5)
    np.testing.assert_allclose(paid.advantages - plain.advantages, [0.0, 0.0, 0.0, 100.0])
    np.testing.assert_allclose(paid.returns, plain.returns)
    np.testing.assert_allclose(paid.team, plain.team)


def test_a_malformed_decision_takes_no_gain_from_the_team_but_its_loss() -> None:
    credit = of_episode(replace(CHAIN, malformed=[False, True, False, True]), 0.5, 0.5)
    np.testing.assert_allclose(credit.team, [0.375, -0.5, -0.5, 0.0])
    np.testing.assert_allclose(credit.advantages, [0.625, 0.0, -1.5, 1.0])  # p - b is added after the cap
    np.testing.assert_allclose(credit.returns, [1.375, 2.5, 2.5, 8.0])  # the critic still learns what came


def episode() -> Episode:
    """The chain above as an episode: two agents, the second in parallel, and an answerer."""
    names = ["rewriter", "reader", "reader", "answerer"]
    decisions = [
        Decision(n, n, s, 0, b, "learn", "x", request=SimpleNamespace(), malformed=False)  # type: ignore[arg-type]
        for n, s, b in zip(names, CHAIN.steps, [0, 0, 1, 0], strict=True)
    ]
    decisions[-1].update = {"answer": "x"}
    out = Episode(Question("q", "?", ("x",)), 0, decisions)
    out.team = {"f1": 8.5, "no_answer": -0.5}
    out.process = [{"a": 0.25, "b": 0.25}, {"a": 1.0}, {"a": -1.0}, {"a": 2.0}]
    return out


def no_replay(absent: frozenset[str]) -> Floats:
    raise AssertionError(f"nothing was to be run again, got {sorted(absent)}")


MARL: Any = SimpleNamespace(gamma=0.5, gae_lambda=0.5, group=1)


def mappo(e: Episode, values: Sequence[float], baselines: Sequence[float]) -> Credit:
    (credit,) = Mappo().credit(Batch([e], [values], [baselines], frozenset(), no_replay), MARL)
    return credit


def ippo(e: Episode) -> Credit:
    (credit,) = Ippo().credit(Batch([e], [CHAIN.values], [CHAIN.baselines], frozenset(), no_replay), MARL)
    return credit


def test_mappo_sums_reward_terms_and_gives_team_gae() -> None:
    credit = mappo(episode(), CHAIN.values, CHAIN.baselines)
    np.testing.assert_allclose(credit.advantages, [0.625, 0.0, -1.5, 7.0])


def test_who_asked_no_language_model_takes_no_step_of_the_chain() -> None:
    e, values, baselines = episode(), list(CHAIN.values), list(CHAIN.baselines)
    for at in (4, 3, 1, 0):  # tools before, between and after, each with a value that must not count
        e.decisions.insert(at, Decision("tool", "tool", 0, 0, 0, "default", "x"))
        e.process.insert(at, {"a": 9.0})
        values.insert(at, 99.0)
        baselines.insert(at, 0.0)
    credit = mappo(e, values, baselines)
    asked = [i for i, d in enumerate(e.decisions) if d.request is not None]
    np.testing.assert_allclose(credit.advantages[asked], [0.625, 0.0, -1.5, 7.0])
    np.testing.assert_allclose(credit.returns[asked], [1.375, 2.5, 2.5, 8.0])
    assert np.delete(credit.advantages, asked).tolist() == [0.0] * 4


def test_an_episode_without_a_decision_of_a_model_has_no_credit() -> None:
    e = episode()
    for d in e.decisions:
        d.request = None
    assert not mappo(e, CHAIN.values, CHAIN.baselines).advantages.any()


def test_ippo_pays_the_team_reward_to_the_answerer_alone() -> None:
    credit = ippo(episode())
    np.testing.assert_allclose(credit.team, [0.0, 0.0, 0.0, 6.0])  # 8 - V
    np.testing.assert_allclose(credit.advantages, [0.25, 0.5, -1.0, 7.0])
    np.testing.assert_allclose(credit.returns, 8.0)


def test_ippo_caps_a_malformed_answer_too() -> None:
    e = episode()
    e.decisions[-1].malformed = True
    np.testing.assert_allclose(ippo(e).advantages[-1], 1.0)


# rules that compare episodes, or run them again


def team(*rewards: float, agents: Sequence[str] = ("a", "b"), questions: Sequence[str] = ()) -> list[Scored]:
    """Episodes of the given team rewards in which each agent decides once, all learning, nothing paid on the way."""
    n = len(agents)
    names = questions or [f"q{i}" for i in range(len(rewards))]
    return [
        Scored(range(n), r, [0.0] * n, [0.0] * n, [0.0] * n, [False] * n, agents, frozenset(agents), q)
        for r, q in zip(rewards, names, strict=True)
    ]


def shares(credits: Sequence[Credit]) -> list[list[float]]:
    return [c.team.tolist() for c in credits]


def test_shared_return_is_the_reward_over_the_updates_mean() -> None:
    assert shares(shared_return(team(1.0, 0.0, 0.5), no_replay, 1.0, 0.95)) == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]


def test_group_relative_compares_the_episodes_of_one_question_in_units_of_their_spread() -> None:
    # "x": 1 and 0, mean 1/2, std 1/2. "y": equal, so nothing.
    found = group_relative(team(1.0, 0.0, 0.7, 0.7, questions="xxyy"), no_replay, 1.0, 0.95)
    assert shares(found) == [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]


def test_without_groups_all_episodes_of_an_update_are_one() -> None:
    e, marl = episode(), SimpleNamespace(gamma=1.0, gae_lambda=0.95, group=1)
    batch = Batch([e, e], [CHAIN.values] * 2, [CHAIN.baselines] * 2, frozenset(), no_replay)
    seen: list[str] = []

    def rule(episodes: Sequence[Scored], *_: Any) -> list[Credit]:
        seen.extend(e.question for e in episodes)
        return group_relative(episodes, no_replay, 1.0, 0.95)

    for group in (1, 2):
        Mappo(rule).credit(batch, SimpleNamespace(**{**vars(marl), "group": group}))
    assert seen == ["", "", "q", "q"]


def test_group_relative_gives_a_lone_episode_nothing() -> None:
    assert shares(group_relative(team(1.0, 0.0), no_replay, 1.0, 0.95)) == [[0.0, 0.0], [0.0, 0.0]]


def test_group_relative_gives_each_agent_a_group_of_its_own() -> None:
    # agent a: R + p = 1.5 and 0.5; agent b: 1 and 0. Each has mean 1 or 1/2 and std 1/2.
    paid = [replace(e, process=[0.5, 0.0]) for e in team(1.0, 0.0, questions="xx")]
    assert [c.advantages.tolist() for c in group_relative(paid, no_replay, 1.0, 0.95)] == [[1.0, 1.0], [-1.0, -1.0]]
    own = [replace(e, process=[p, 0.0]) for e, p in zip(team(1.0, 1.0, questions="xx"), (0.2, 0.0), strict=True)]
    (first, _) = group_relative(own, no_replay, 1.0, 0.95)
    np.testing.assert_allclose(first.advantages, [1.0, 0.0])  # only a's process reward differs
    np.testing.assert_allclose(first.team, 0.0)


def game(reward: Callable[[frozenset[str]], float], agents: Sequence[str]) -> Callable[[frozenset[str]], Floats]:
    """A replay of one episode in which `reward` is of the agents that are there."""
    return lambda absent: np.array([reward(frozenset(agents) - absent)])


def additive(there: frozenset[str]) -> float:
    return 0.25 * ("a" in there) + 0.75 * ("b" in there)


def both_needed(there: frozenset[str]) -> float:
    return float({"a", "b"} <= there)


def either_will_do(there: frozenset[str]) -> float:
    return float(bool({"a", "b"} & there))


def only_a(there: frozenset[str]) -> float:
    return float("a" in there)


@pytest.mark.parametrize(
    ("reward", "by_difference", "by_shapley"),
    [
        (additive, [0.25, 0.75], [0.25, 0.75]),
        (both_needed, [1.0, 1.0], [0.5, 0.5]),  # without either nothing is left: each is worth all, and half
        (either_will_do, [0.0, 0.0], [0.5, 0.5]),  # without one the other does it
        (only_a, [1.0, 0.0], [1.0, 0.0]),
    ],
)
def test_an_agent_that_contributes_nothing_half_or_all_has_that_credit(
    reward: Any, by_difference: list[float], by_shapley: list[float]
) -> None:
    e = team(reward(frozenset("ab")))
    replay = game(reward, "ab")
    np.testing.assert_allclose(difference(e, replay, 1.0, 0.95)[0].team, by_difference)
    (credit,) = shapley(e, replay, 1.0, 0.95)
    np.testing.assert_allclose(credit.team, by_shapley)
    assert credit.team.sum() == pytest.approx(reward(frozenset("ab")) - reward(frozenset()))


def test_counterfactual_credit_is_each_episodes_own_and_tools_have_none() -> None:
    two = [replace(e, agents=["a", "tool"], learns=frozenset("a")) for e in team(1.0, 0.5)]
    without = difference(two, lambda absent: np.array([0.2, 0.7]), 1.0, 0.95)
    np.testing.assert_allclose(shares(without), [[0.8, 0.0], [-0.2, 0.0]])


def test_a_malformed_decision_does_not_profit_from_counterfactuals() -> None:
    (e,) = team(1.0)
    bad = replace(e, malformed=[True, True])
    np.testing.assert_allclose(difference([bad], lambda absent: np.zeros(1), 1.0, 0.95)[0].team, 0.0)
    np.testing.assert_allclose(difference([bad], lambda absent: np.array([3.0]), 1.0, 0.95)[0].team, -2.0)


@pytest.mark.parametrize("count", [3, 5, 7])
def test_shapley_values_sum_to_the_total_exact_or_sampled(count: int) -> None:
    agents = [f"agent{i}" for i in range(count)]
    table = np.random.default_rng(7)
    known: dict[frozenset[str], float] = {}

    def reward(there: frozenset[str]) -> float:
        return known.setdefault(there, float(table.random()))

    total = reward(frozenset(agents))
    (credit,) = shapley(team(total, agents=agents), game(reward, agents), 1.0, 0.95)
    assert credit.team.sum() == pytest.approx(total - reward(frozenset()))
    assert len(known) == 2**count if count <= 5 else len(known) < 2**count


def test_sampled_shapley_values_approach_the_exact_ones() -> None:
    agents = ["a", "b", "c", "d"]
    weights = {"a": 1.0, "b": 2.0, "c": 0.0, "d": 4.0}

    def reward(there: frozenset[str]) -> Floats:
        return np.array([sum(weights[a] for a in there) + 3.0 * ({"a", "d"} <= there)])

    right, near = exact(agents, reward), sampled(agents, reward, 400)
    np.testing.assert_allclose([right[a][0] for a in agents], [2.5, 2.0, 0.0, 5.5])  # the pair's 3 is shared
    np.testing.assert_allclose([near[a][0] for a in agents], [2.5, 2.0, 0.0, 5.5], atol=0.25)
