"""Team GAE: A_k = sum_l (gamma lambda)^l delta_{k+l} over the steps of one episode, shared by all agents of a step.

delta_k = [k = K] R + gamma V(s_{k+1}) - V(s_k) with V(s_{K+1}) = 0; parallel decisions of a step share V(s_k), the mean
of their values. Only the team reward flows across agents: a process reward stays with the decision that earned it,
A_d = A_k(d) + p_d - b_d. Schulman et al. 2016 (arXiv 1506.02438) eq. 16, over a chain of agents as in MAPPO
(arXiv 2103.01955). Summing process rewards down the chain instead would pay early agents for later agents' crumbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """One finished episode in numbers; all sequences are parallel to its decisions."""

    steps: Sequence[int]  # ordinal of the superstep, non-decreasing
    team: float  # R
    process: Sequence[float]  # p_d
    values: Sequence[float]  # V(s_k) as seen at each decision
    baselines: Sequence[float]  # b_i(s_k)
    malformed: Sequence[bool]


@dataclass(frozen=True)
class Credit:
    """Advantage and value target of each decision, before normalisation."""

    advantages: Floats
    returns: Floats  # targets of V
    team: Floats  # the share of the advantage that comes from the team reward


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


def team_gae(episode: Scored, gamma: float = 1.0, lam: float = 0.95) -> Credit:
    """Return the credit of every decision; a malformed one never profits from the team (its default may be good)."""
    index, values_K = step_values(episode.steps, episode.values)
    rewards_K = np.zeros(len(values_K))
    rewards_K[-1] = episode.team
    advantages_K = gae(rewards_K, values_K, gamma, lam)
    team = advantages_K[index]
    returns = (advantages_K + values_K)[index]
    team = np.where(np.asarray(episode.malformed, bool), np.minimum(team, 0.0), team)
    own = np.asarray(episode.process, float) - np.asarray(episode.baselines, float)
    return Credit(team + own, returns, team)
