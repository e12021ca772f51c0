"""What terms and guards read off a finished episode: its queries, its search rounds, and what counts as gold.

"Before" decision d always means an earlier superstep: parallel decisions of one step do not see each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from jointrag.data.types import UNKNOWN, Passage, Question
from jointrag.eval.metrics import normalise
from jointrag.graph.episode import Decision, Episode

YES_NO = frozenset({"yes", "no"})  # answers that are judged, not copied: no passage "contains" them

words = lru_cache(maxsize=20_000)(normalise)  # the same passages come back in every episode


def stands_in(phrase: str, text: str) -> bool:
    """True if the words of `phrase` (normalised already) stand in `text`, in one piece: "art" is not in "party"."""
    return f" {phrase} " in f" {words(text)} "


def aliases(question: Question) -> tuple[str, ...]:
    """Return the gold answers that a text can contain, normalised: none of yes, no, unknown or nothing."""
    told = (words(a) for a in question.answers)
    return tuple(dict.fromkeys(a for a in told if a and a != UNKNOWN and a not in YES_NO))


def abstains(answer: str) -> bool:
    """True for no text at all and for "unknown"."""
    return not answer.strip() or normalise(answer) == UNKNOWN


def may_abstain(question: Question) -> bool:
    """True where "unknown" is a correct answer."""
    return not question.answerable or any(normalise(a) == UNKNOWN for a in question.answers)


def malformed_answer(episode: Episode) -> bool:
    """True where the decision that wrote the final answer was malformed: the answer is a default, nobody's merit."""
    return next((d.malformed for d in reversed(episode.decisions) if "answer" in d.update), False)


def plans(decision: Decision) -> bool:
    """True for a decision that says what is searched next (or that nothing is): it writes queries, but no passages."""
    return ("pending" in decision.update or "queries" in decision.update) and "passages" not in decision.update


def queries(decision: Decision) -> tuple[str, ...]:
    """Return the queries a decision asked; () = it stopped, or it is no such decision."""
    return tuple(str(q) for q in decision.update.get("pending") or decision.update.get("queries") or ())


def before(episode: Episode, decision: Decision) -> list[Decision]:
    """Return the decisions of earlier supersteps."""
    return [d for d in episode.decisions if d.step < decision.step]


def found(decisions: Iterable[Decision]) -> set[str]:
    """Return the ids of the passages these decisions retrieved."""
    return {p.id for d in decisions for p in d.update.get("passages") or ()}


def search_round(episode: Episode, decision: Decision) -> list[Decision]:
    """Return the retrievals due to the queries of `decision`: all until somebody plans again; none where it stopped."""
    if not queries(decision):
        return []
    end = min((d.step for d in episode.decisions if plans(d) and d.step > decision.step), default=None)
    return [
        d
        for d in episode.decisions
        if "passages" in d.update and d.step > decision.step and (end is None or d.step < end)
    ]


@dataclass(frozen=True, slots=True)
class Gold:
    """What counts as gold: `needed` of the passages `ids` make the evidence complete.

    `sure` is False where no gold passages are given and a passage counts that contains a gold answer; one is enough.
    """

    ids: frozenset[str]
    needed: int
    sure: bool

    def coverage(self, ids: Collection[str]) -> float:
        """Return the share of what is needed that is among `ids`; 1.0 where nothing is needed."""
        return min(1.0, len(self.ids & set(ids)) / self.needed) if self.needed else 1.0


def gold(episode: Episode) -> Gold | None:
    """Return the gold of an episode's question; None where nothing tells: no gold passages, and a yes or no answer.

    An unanswerable question needs the gold passages of its known part, often none.
    """
    question = episode.question
    if question.supporting_ids:
        ids = frozenset(question.supporting_ids)
        return Gold(ids, len(ids), sure=True)
    if not question.answerable:
        return Gold(frozenset(), 0, sure=True)
    told = aliases(question)
    if not told:
        return None
    seen: dict[str, Passage] = {}
    for d in episode.decisions:
        seen.update((p.id, p) for p in (*d.received, *d.held, *(d.update.get("passages") or ())))
    holding = (i for i, p in seen.items() if any(stands_in(a, p.title) or stands_in(a, p.text) for a in told))
    return Gold(frozenset(holding), 1, sure=False)
