"""Passage and Question: the two records every other module speaks of (a leaf: standard library only)."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "unknown"  # the answer that abstains; for an unanswerable question it is the correct one


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrievable unit of a corpus."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Twin:
    """A passage that looks like gold passage `gold_id` and leads to the wrong answer `answer`."""

    gold_id: str
    twin_id: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its gold labels.

    `supporting_ids` is empty where a set has no gold passages. `gold_queries[h]` are the sub-queries an oracle
    rewriter asks at hop h (several = in parallel); empty where the source gives none. `hops` is 0 where unknown.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    supporting_ids: tuple[str, ...] = ()
    gold_queries: tuple[tuple[str, ...], ...] = ()
    twins: tuple[Twin, ...] = ()
    hops: int = 0
    kind: str = ""

    @property
    def answerable(self) -> bool:
        """False where abstaining is the correct answer."""
        return any(a != UNKNOWN for a in self.answers)
