"""IPPO: each agent learns from its own process reward alone, whoever answers from the team reward too; local critics.

The comparison that says what the shared reward and the centralised critic are worth (arXiv 2011.09533).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jointrag.graph.episode import Episode
from jointrag.marl.credit.base import Batch, Credit


class Ippo:
    """Independent learners."""

    local_critic = True

    def __init__(self, rule: Any = None) -> None:
        """There is no shared reward to divide: `rule` is not asked."""

    def credit(self, batch: Batch, marl: Any) -> list[Credit]:
        """Return p_d - b_d, and R - V(s) for the decision that wrote the answer."""
        return [self._of(e, v, b) for e, v, b in zip(batch.episodes, batch.values, batch.baselines, strict=True)]

    def _of(self, episode: Episode, values: Sequence[float], baselines: Sequence[float]) -> Credit:
        team = sum(episode.team.values())
        answers = np.array(["answer" in d.update for d in episode.decisions])
        malformed = np.array([d.malformed for d in episode.decisions])
        gain = np.where(answers, team - np.asarray(values, float), 0.0)
        gain = np.where(malformed, np.minimum(gain, 0.0), gain)
        own = np.array([sum(p.values()) for p in episode.process]) - np.asarray(baselines, float)
        return Credit(gain + own, np.full(len(answers), team), gain)
