"""MAPPO: every agent learns from the team reward through one centralised critic, and from its own process reward.

arXiv 2103.01955, over the steps of a graph; credit: `marl/credit/team_gae.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jointrag.graph.episode import Episode
from jointrag.marl.credit.team_gae import Credit, Scored, team_gae


class Mappo:
    """The default algorithm."""

    local_critic = False

    def credit(self, episode: Episode, values: Sequence[float], baselines: Sequence[float], marl: Any) -> Credit:
        """Return team GAE plus each decision's own process reward over its baseline."""
        return team_gae(
            Scored(
                steps=[d.step for d in episode.decisions],
                team=sum(episode.team.values()),
                process=[sum(p.values()) for p in episode.process],
                values=values,
                baselines=baselines,
                malformed=[d.malformed for d in episode.decisions],
            ),
            marl.gamma,
            marl.gae_lambda,
        )
