"""MAPPO: every agent learns from the team reward through one centralised critic, and from its own process reward.

arXiv 2103.01955, over the steps of a graph; `marl.credit` names the rule that shares the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jointrag.graph.episode import Episode
from jointrag.marl.credit.team_gae import Credit, Scored, team_gae


class Mappo:
    """The default algorithm."""

    local_critic = False

    def __init__(self, rule: Callable[[Scored, float, float], Credit] = team_gae) -> None:
        self.rule = rule

    def credit(self, episode: Episode, values: Sequence[float], baselines: Sequence[float], marl: Any) -> Credit:
        """Return the rule's credit: the team's, plus each decision's own process reward over its baseline.

        A tool takes no step, nor does whoever asked no language model (forced, default, oracle): there is no state
        the critic has valued, and a step more would only discount the credit of those before it. Their credit is 0.
        """
        asked = [i for i, d in enumerate(episode.decisions) if d.request is not None]
        size = len(episode.decisions)
        out = Credit(np.zeros(size), np.zeros(size), np.zeros(size))
        if not asked:
            return out
        credit = self.rule(
            Scored(
                steps=[episode.decisions[i].step for i in asked],
                team=sum(episode.team.values()),
                process=[sum(episode.process[i].values()) for i in asked],
                values=[values[i] for i in asked],
                baselines=[baselines[i] for i in asked],
                malformed=[episode.decisions[i].malformed for i in asked],
            ),
            marl.gamma,
            marl.gae_lambda,
        )
        out.advantages[asked], out.returns[asked], out.team[asked] = credit.advantages, credit.returns, credit.team
        return out
