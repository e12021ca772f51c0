"""Shared return: A_d = R - mean of R over the update's episodes, the same for every decision of an episode.

REINFORCE with the batch's mean as baseline (Williams 1992, eq. 11) and no critic for the team but in the below-value
guard: every agent is praised for the whole team's luck. What a centralised critic is worth shows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jointrag.marl.credit.base import Credit, Replay, Scored, credit


def shared_return(episodes: Sequence[Scored], replay: Replay, gamma: float, lam: float) -> list[Credit]:
    """Return the credit of every decision of every episode; gamma and lambda play no part."""
    mean = float(np.mean([e.team for e in episodes])) if episodes else 0.0
    return [credit(e, np.full(len(e.steps), e.team - mean)) for e in episodes]
