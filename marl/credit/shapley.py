"""Shapley values: A_d = phi_i = sum over S without i of |S|! (n - |S| - 1)! / n! * (R(S + i) - R(S)).

R(S): the team reward with the learning agents outside S at their default, the rest run again with the same randomness
(Shapley 1953; over agents of a team: Shapley Q-value, arXiv 1907.05707). The values of an episode sum to
R(all) - R(none). Exact up to 5 agents (2^n - 1 replays); above, the mean over random orders of the agents, the same for
every update (Castro et al. 2009), which keeps that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

import numpy as np

from jointrag.marl.credit.base import Credit, Floats, Replay, Scored, by_agent, credit, players

EXACT = 5  # agents
ORDERS = 8  # sampled orders above that: at most 8 n replays


def shapley(episodes: Sequence[Scored], replay: Replay, gamma: float, lam: float) -> list[Credit]:
    """Return the credit of every decision of every episode; gamma and lambda play no part."""
    agents = players(episodes)
    everyone = frozenset(agents)
    known: dict[frozenset[str], Floats] = {everyone: np.array([e.team for e in episodes], dtype=float)}

    def reward(coalition: frozenset[str]) -> Floats:
        if coalition not in known:
            known[coalition] = replay(everyone - coalition)
        return known[coalition]

    values = exact(agents, reward) if len(agents) <= EXACT else sampled(agents, reward, ORDERS)
    return [
        credit(e, by_agent(e, {agent: float(phi[n]) for agent, phi in values.items()})) for n, e in enumerate(episodes)
    ]


def exact(agents: Sequence[str], reward: Callable[[frozenset[str]], Floats]) -> dict[str, Floats]:
    """Return phi of each agent, from the rewards of all coalitions."""
    out = {}
    for agent in agents:
        others = [a for a in agents if a != agent]
        gains = [
            (reward(frozenset({*s, agent})) - reward(frozenset(s))) / (len(agents) * comb(len(others), len(s)))
            for size in range(len(agents))
            for s in combinations(others, size)
        ]
        out[agent] = np.sum(gains, axis=0)
    return out


def sampled(agents: Sequence[str], reward: Callable[[frozenset[str]], Floats], orders: int) -> dict[str, Floats]:
    """Return phi of each agent, estimated as its mean gain over random orders in which the agents join."""
    rng = np.random.default_rng(0)
    total: dict[str, Floats] = {a: np.zeros(1) for a in agents}
    for _ in range(orders):
        before: frozenset[str] = frozenset()
        for i in rng.permutation(len(agents)):
            after = before | {agents[i]}
            total[agents[i]] = total[agents[i]] + (reward(after) - reward(before)) / orders
            before = after
    return total
