"""Difference rewards: A_d = R(e) - R(e with d's agent at its default), the rest run again with the same randomness.

Wolpert & Tumer 2002 (difference utility); the default action is the pipeline's own, what happens where the agent is
absent, as COMA's counterfactual baseline (arXiv 1705.08926, eq. 4) has one action and not an average. One more rollout
a learning agent. An agent whose action changes nothing gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from jointrag.marl.credit.base import Credit, Replay, Scored, by_agent, credit, players


def difference(episodes: Sequence[Scored], replay: Replay, gamma: float, lam: float) -> list[Credit]:
    """Return the credit of every decision of every episode; gamma and lambda play no part."""
    without = {agent: replay(frozenset({agent})) for agent in players(episodes)}
    return [
        credit(e, by_agent(e, {agent: e.team - float(r[n]) for agent, r in without.items()}))
        for n, e in enumerate(episodes)
    ]
