"""Labels without a language model: what each agent should do, from gold passages, gold queries and answers.

Oracles act by them, and the warm start learns from them. There is no one right query, so the rewriter's label forms
are named: `question`, `title` (of the next gold passage), `question_title`, and `sub_question` (the gold sub-query;
only oracles may use it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jointrag.data.types import UNKNOWN, Passage, Question

WARM_FORMS = ("question", "title", "question_title")  # from gold passages alone
FORMS = (*WARM_FORMS, "sub_question")


@dataclass(frozen=True, slots=True)
class Hop:
    """One search round of the best plan: what it asks, and the gold passages it is after (may be none)."""

    queries: tuple[str, ...]
    gold: tuple[str, ...]


def plan(question: Question, form: str, passage_of: Callable[[str], Passage]) -> list[Hop]:
    """Return the search rounds that gather all gold passages, asked in label form `form`.

    A title is asked for only where it can be known: it stands in the question or in a gold passage of an earlier round.
    Otherwise the question is asked. Without gold queries the gold passages are taken in the order in which their titles
    become known.
    """
    out: list[Hop] = []
    left, seen = list(question.supporting_ids), question.question.casefold()

    def known(p: Passage) -> bool:
        return bool(p.title) and p.title.casefold() in seen

    for subs in question.gold_queries or [()] * len(left):
        ids = left[: len(subs)] if subs else [next((g for g in left if known(passage_of(g))), left[0])]
        left = [g for g in left if g not in ids]
        passages = [passage_of(i) for i in ids]
        titles = tuple(dict.fromkeys(p.title for p in passages if known(p)))
        if form == "sub_question" and subs:
            queries = subs
        elif form in ("question", "sub_question") or not titles:
            queries = (question.question,)
        elif form == "question_title":
            queries = tuple(f"{question.question} {t}" for t in titles)
        else:
            queries = titles
        out.append(Hop(queries, tuple(ids)))
        seen = "\n".join([seen, *(f"{p.title} {p.text}".casefold() for p in passages)])
    return out


def next_queries(rounds: Sequence[Hop], held: Collection[str], asked: Collection[str]) -> tuple[str, ...]:
    """Return the queries of the first round whose gold is not held, () = stop; a round without gold is asked once.

    Of parallel queries only those are asked whose own gold passage is missing.
    """
    for hop in rounds:
        if not hop.gold and not all(q in asked for q in hop.queries):
            return hop.queries
        missing = [g not in held for g in hop.gold]
        if any(missing):
            if len(hop.queries) == len(hop.gold):
                return tuple(q for q, m in zip(hop.queries, missing, strict=True) if m)
            return hop.queries
    return ()


def gold_answer(question: Question, evidence: Sequence[Passage]) -> str | None:
    """Return the answer that follows from `evidence`: gold with all gold passages (a twin misleads), else None."""
    if not question.answerable:
        return UNKNOWN
    have = {p.id for p in evidence}
    missing = [g for g in question.supporting_ids if g not in have]
    if not missing:
        return question.answers[0]
    twins = {t.gold_id: t for t in question.twins if t.twin_id in have}
    if all(g in twins for g in missing):
        return next((twins[g].answer for g in missing if twins[g].answer), None)
    return None
