"""Team GAE: A_k = sum_l (gamma lambda)^l delta_{k+l} over the steps of one episode, shared by all agents of a step.

delta_k = [k = K] R + gamma V(s_{k+1}) - V(s_k) with V(s_{K+1}) = 0; parallel decisions of a step share V(s_k), the mean
of their values. Only the team reward flows across agents: a process reward stays with the decision that earned it,
A_d = A_k(d) + p_d - b_d. Schulman et al. 2016 (arXiv 1506.02438) eq. 16, over a chain of agents as in MAPPO
(arXiv 2103.01955). Summing process rewards down the chain instead would pay early agents for later agents' crumbs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jointrag.marl.credit.base import Credit, Floats, Replay, Scored, credit


def step_values(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], Floats]:
    """Return (step of each decision from 0, V of each step): parallel decisions share the mean of their values."""
    order = {s: i for i, s in enumerate(dict.fromkeys(steps))}
    index = [order[s] for s in steps]
    total, count = np.zeros(len(order)), np.zeros(len(order))
    for i, v in zip(index, values, strict=True):
        total[i] += v
        count[i] += 1
    return index, total / count


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> Floats:
    """Return advantages [K] for per-step rewards and values [K] of a finished episode."""
    out = np.zeros(len(values))
    running, following = 0.0, 0.0
    for k in reversed(range(len(values))):
        delta = rewards[k] + gamma * following - values[k]
        running = delta + gamma * lam * running
        out[k], following = running, values[k]
    return out


def of_episode(episode: Scored, gamma: float, lam: float) -> Credit:
    """Return the credit of every decision of one episode."""
    index, values_K = step_values(episode.steps, episode.values)
    rewards_K = np.zeros(len(values_K))
    rewards_K[-1] = episode.team
    advantages_K = gae(rewards_K, values_K, gamma, lam)
    return credit(episode, advantages_K[index], (advantages_K + values_K)[index])


def team_gae(episodes: Sequence[Scored], replay: Replay, gamma: float, lam: float) -> list[Credit]:
    """Return the credit of every decision of every episode; nothing is run again."""
    return [of_episode(e, gamma, lam) for e in episodes]
