"""What credit rules share: an episode in numbers, the credit of its decisions, and counterfactual replays.

A rule is a function (episodes of one update, replay, gamma, lambda) -> one Credit an episode. Whatever a rule does with
the team reward, a process reward stays with the decision that earned it: A_d = (the team's share) + p_d - b_d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jointrag.graph.episode import Episode

Floats = npt.NDArray[np.float64]
Replay = Callable[[frozenset[str]], Floats]  # agents at their default -> R of every episode, same randomness otherwise


@dataclass(frozen=True)
class Scored:
    """One finished episode in numbers; all sequences are parallel to its decisions."""

    steps: Sequence[int]  # ordinal of the superstep, non-decreasing
    team: float  # R
    process: Sequence[float]  # p_d
    values: Sequence[float]  # V(s_k) as seen at each decision
    baselines: Sequence[float]  # b_i(s_k)
    malformed: Sequence[bool]
    agents: Sequence[str] = ()  # who decided
    learns: frozenset[str] = field(default_factory=frozenset)  # agents that learn in this training: the players
    question: str = ""  # what it shares with the episodes it is compared with by rules that form groups


@dataclass(frozen=True)
class Credit:
    """Advantage and value target of each decision, before normalisation."""

    advantages: Floats
    returns: Floats  # targets of V
    team: Floats  # the share of the advantage that comes from the team reward


@dataclass(frozen=True)
class Batch:
    """Finished episodes of one update as an algorithm gets them; values and baselines are parallel to the decisions."""

    episodes: Sequence[Episode]
    values: Sequence[Sequence[float]]  # V
    baselines: Sequence[Sequence[float]]  # b
    learns: frozenset[str]  # agents that learn in this training
    replay: Replay


Rule = Callable[[Sequence[Scored], Replay, float, float], list[Credit]]


def credit(episode: Scored, team: npt.ArrayLike, returns: npt.ArrayLike | None = None) -> Credit:
    """Return the credit of an episode whose decisions have the shares `team` of the team reward.

    A malformed decision took its agent's default, which may be good: it never profits from the team. `returns`: targets
    of the critic, by default R.
    """
    share = np.asarray(team, float)
    share = np.where(np.asarray(episode.malformed, bool), np.minimum(share, 0.0), share)
    own = np.asarray(episode.process, float) - np.asarray(episode.baselines, float)
    target = np.full(len(share), episode.team) if returns is None else np.asarray(returns, float)
    return Credit(share + own, target, share)


def players(episodes: Sequence[Scored]) -> list[str]:
    """Return the learning agents that decided anything, by name."""
    return sorted({a for e in episodes for a in e.agents if a in e.learns})


def by_agent(episode: Scored, shares: dict[str, float]) -> Floats:
    """Return the share of each decision: its agent's, 0 for those that do not learn."""
    return np.array([shares.get(a, 0.0) for a in episode.agents], dtype=float)
