"""Guards against the two known ways to earn process rewards without answering better.

answer_in_query: a policy that has learnt an answer by heart puts it into the query, and retrieval gains follow (SAPR).
below_value: process rewards are means, not ends; where the outcome is worse than the critic expected, they pay half.
Both touch positive values only: penalties always pay in full.
"""

from __future__ import annotations

from collections.abc import Mapping

from jointrag.graph.episode import Decision, Episode
from jointrag.rewards.reading import aliases, plans, queries, stands_in


def leaks(episode: Episode) -> frozenset[int]:
    """Return the indices of decisions that put a gold answer into a query which they had not read anywhere.

    Read: in the question, in what was held or shown, in notes, or in an earlier query that was no leak itself (else the
    first leak, which earns nothing, would launder all later ones). Yes, no and unknown are no answers to leak.
    """
    told = [a for a in aliases(episode.question) if not stands_in(a, episode.question.question)]
    out: set[int] = set()
    clean: list[tuple[int, str]] = []  # (step, query)
    leaked: set[str] = set()  # queries
    for i, decision in sorted(enumerate(episode.decisions), key=lambda pair: (pair[1].step, pair[1].branch)):
        if not plans(decision):
            continue
        trail = decision.observation.trail if decision.observation else ()  # plain functions may have asked some of it
        read = [*_read(decision), *(q for step, q in clean if step < decision.step)]
        read += [q for q in trail if q not in leaked]
        asked = queries(decision)
        if any(stands_in(a, q) for a in told for q in asked if not any(stands_in(a, text) for text in read)):
            out.add(i)
            leaked.update(asked)
        else:
            clean += [(decision.step, q) for q in asked]
    return frozenset(out)


def _read(decision: Decision) -> list[str]:
    """The texts besides question and trail that a decision saw."""
    shown = decision.observation
    passages = (*decision.held, *(shown.passages if shown else ()))
    return [*(f"{p.title} {p.text}" for p in passages), *(text for _, text in (shown.notes if shown else ()))]


def halve_positive(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the process values of one decision with the positive ones halved."""
    return {name: value / 2 if value > 0 else value for name, value in terms.items()}


def drop_positive(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the process values of one decision with the positive ones set to 0."""
    return {name: min(0.0, value) for name, value in terms.items()}
