"""Per-agent group-relative: A_d = (R + p_d - mean) / std over the decisions of d's agent in the question's group.

GRPO (arXiv 2402.03300, section 4.1.2) with a group for each agent (Dr. MAS, arXiv 2602.08847; AT-GRPO, arXiv
2510.11062): the episodes of one question, `marl.group` of them, are its group; with `group: 1` all episodes of
an update are one. No critic: neither V nor b takes part, but for the below-value guard (rewards.guards). A group
without variance gives nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jointrag.marl.credit.base import Credit, Replay, Scored

FLOOR = 1e-6  # a spread below it is none


def group_relative(episodes: Sequence[Scored], replay: Replay, gamma: float, lam: float) -> list[Credit]:
    """Return the credit of every decision of every episode; gamma and lambda play no part.

    `team` holds the part of the advantage that R moves: the rest is the process reward's.
    """
    groups = defaultdict(list)  # (question, agent) -> (R + p_d, R)
    for e in episodes:
        for agent, p in zip(e.agents, e.process, strict=True):
            groups[e.question, agent].append((e.team + p, e.team))
    stats = {k: (*np.mean(v, 0), float(np.std([x for x, _ in v]))) for k, v in groups.items()}
    out = []
    for e in episodes:
        share, team = np.zeros(len(e.steps)), np.zeros(len(e.steps))
        for i, (agent, p) in enumerate(zip(e.agents, e.process, strict=True)):
            mean, mean_team, std = stats[e.question, agent]
            if std > FLOOR:
                share[i], team[i] = (e.team + p - mean) / std, (e.team - mean_team) / std
        bad = np.asarray(e.malformed, bool)
        team_capped = np.where(bad, np.minimum(team, 0.0), team)
        out.append(Credit(share - team + team_capped, np.full(len(team), e.team), team_capped))
    return out
