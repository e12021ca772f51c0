"""rrf = reciprocal rank fusion: score(item) = sum over rankings of 1 / (k + rank), ranks from 1.

Cormack, Clarke, Buettcher (SIGIR 2009), equation 1 and its k = 60. Scores of different engines have no common scale, so
adding them would let one engine rule; ranks have. A ranking that names an item twice counts its first place only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TypeVar

K = 60

T = TypeVar("T", bound=Hashable)


def rrf(rankings: Sequence[Sequence[T]], k: int = K) -> list[tuple[T, float]]:
    """Merge rankings, best first; ties in order of first appearance, reading ranking by ranking."""
    parts: dict[T, list[float]] = {}
    for ranking in rankings:
        for rank, item in enumerate(dict.fromkeys(ranking), start=1):
            parts.setdefault(item, []).append(1.0 / (k + rank))
    fused = [(item, math.fsum(terms)) for item, terms in parts.items()]  # fsum: the order of rankings moves no bit
    return sorted(fused, key=lambda pair: -pair[1])
