from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jointrag.data.types import Question
from jointrag.graph.episode import Decision, Episode
from jointrag.marl.algorithms.ippo import Ippo
from jointrag.marl.algorithms.mappo import Mappo
from jointrag.marl.credit.team_gae import Scored, gae, step_values, team_gae

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
    credit = team_gae(CHAIN, 0.5, 0.5)
    np.testing.assert_allclose(credit.team, [0.375, -0.5, -0.5, 6.0])
    np.testing.assert_allclose(credit.returns, [1.375, 2.5, 2.5, 8.0])
    np.testing.assert_allclose(credit.advantages, [0.625, 0.0, -1.5, 7.0])


def test_parallel_decisions_share_the_mean_of_their_values() -> None:
    index, values = step_values(CHAIN.steps, CHAIN.values)
    assert index == [0, 1, 1, 2]
    np.testing.assert_allclose(values, [1.0, 3.0, 2.0])


def test_nothing_follows_the_last_step() -> None:
    only = team_gae(Scored([3], 0.7, [0.0], [0.2], [0.0], [False]), 0.9, 0.9)
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
    np.testing.assert_allclose(team_gae(exact, 0.5, lam).team, 0.0, atol=1e-12)


def test_a_process_reward_stays_with_its_decision() -> None:
    paid = team_gae(replace(CHAIN, process=[0.5, 1.0, -1.0, 102.0]), 0.5, 0.5)
    plain = team_gae(CHAIN, 0.5, 0.5)
    np.testing.assert_allclose(paid.advantages - plain.advantages, [0.0, 0.0, 0.0, 100.0])
    np.testing.assert_allclose(paid.returns, plain.returns)
    np.testing.assert_allclose(paid.team, plain.team)


def test_a_malformed_decision_takes_no_gain_from_the_team_but_its_loss() -> None:
    credit = team_gae(replace(CHAIN, malformed=[False, True, False, True]), 0.5, 0.5)
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


MARL: Any = SimpleNamespace(gamma=0.5, gae_lambda=0.5)


def test_mappo_sums_reward_terms_and_gives_team_gae() -> None:
    credit = Mappo().credit(episode(), CHAIN.values, CHAIN.baselines, MARL)
    np.testing.assert_allclose(credit.advantages, [0.625, 0.0, -1.5, 7.0])


def test_who_asked_no_language_model_takes_no_step_of_the_chain() -> None:
    e, values, baselines = episode(), list(CHAIN.values), list(CHAIN.baselines)
    for at in (4, 3, 1, 0):  # tools before, between and after, each with a value that must not count
        e.decisions.insert(at, Decision("tool", "tool", 0, 0, 0, "default", "x"))
        e.process.insert(at, {"a": 9.0})
        values.insert(at, 99.0)
        baselines.insert(at, 0.0)
    credit = Mappo().credit(e, values, baselines, MARL)
    asked = [i for i, d in enumerate(e.decisions) if d.request is not None]
    np.testing.assert_allclose(credit.advantages[asked], [0.625, 0.0, -1.5, 7.0])
    np.testing.assert_allclose(credit.returns[asked], [1.375, 2.5, 2.5, 8.0])
    assert np.delete(credit.advantages, asked).tolist() == [0.0] * 4


def test_an_episode_without_a_decision_of_a_model_has_no_credit() -> None:
    e = episode()
    for d in e.decisions:
        d.request = None
    assert not Mappo().credit(e, CHAIN.values, CHAIN.baselines, MARL).advantages.any()


def test_ippo_pays_the_team_reward_to_the_answerer_alone() -> None:
    credit = Ippo().credit(episode(), CHAIN.values, CHAIN.baselines, MARL)
    np.testing.assert_allclose(credit.team, [0.0, 0.0, 0.0, 6.0])  # 8 - V
    np.testing.assert_allclose(credit.advantages, [0.25, 0.5, -1.0, 7.0])
    np.testing.assert_allclose(credit.returns, 8.0)


def test_ippo_caps_a_malformed_answer_too() -> None:
    e = episode()
    e.decisions[-1].malformed = True
    np.testing.assert_allclose(Ippo().credit(e, CHAIN.values, CHAIN.baselines, MARL).advantages[-1], 1.0)
