"""MAPPO: every agent learns from the team reward through one centralised critic, and from its own process reward.

arXiv 2103.01955, over the steps of a graph; `marl.credit` names the rule that shares the reward.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jointrag.marl.credit.base import Batch, Credit, Rule, Scored
from jointrag.marl.credit.team_gae import team_gae


class Mappo:
    """The default algorithm."""

    local_critic = False

    def __init__(self, rule: Rule = team_gae) -> None:
        self.rule = rule

    def credit(self, batch: Batch, marl: Any) -> list[Credit]:
        """Return the rule's credit: the team's, plus each decision's own process reward over its baseline.

        A tool takes no step, nor does whoever asked no language model (forced, default, oracle): there is no state
        the critic has valued, and a step more would only discount the credit of those before it. Their credit is 0.
        """
        asked = [[i for i, d in enumerate(e.decisions) if d.request is not None] for e in batch.episodes]
        scored = [
            Scored(
                steps=[e.decisions[i].step for i in rows],
                team=sum(e.team.values()),
                process=[sum(e.process[i].values()) for i in rows],
                values=[v[i] for i in rows],
                baselines=[b[i] for i in rows],
                malformed=[e.decisions[i].malformed for i in rows],
                agents=[e.decisions[i].agent for i in rows],
                learns=batch.learns,
                question=e.question.id if marl.group > 1 else "",
            )
            for e, v, b, rows in zip(batch.episodes, batch.values, batch.baselines, asked, strict=True)
        ]
        some = [n for n, rows in enumerate(asked) if rows]
        given = self.rule(
            [scored[n] for n in some], lambda absent: batch.replay(absent)[some], marl.gamma, marl.gae_lambda
        )
        out = []
        for e in batch.episodes:
            size = len(e.decisions)
            out.append(Credit(np.zeros(size), np.zeros(size), np.zeros(size)))
        for n, c in zip(some, given, strict=True):
            rows = asked[n]
            out[n].advantages[rows], out[n].returns[rows], out[n].team[rows] = c.advantages, c.returns, c.team
        return out
