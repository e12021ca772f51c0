"""recall@k = found gold passages among the first k / gold passages, mean over the questions that have gold."""

from __future__ import annotations

from collections.abc import Sequence

from jointrag.data.errors import DataError
from jointrag.data.types import Question
from jointrag.retrieval.base import Index

KS = (2, 5, 10)


def recall_at(index: Index, questions: Sequence[Question], ks: Sequence[int] = KS) -> dict[int, float]:
    """Recall of the raw question as the query, 0 to 1, for each k."""
    asked = [q for q in questions if q.supporting_ids]
    if not asked:
        raise DataError(
            f"got {len(questions)} questions, none with supporting_ids, expected some with gold passages; "
            f"recall needs them, so name a set that has them."
        )
    found = index.search([q.question for q in asked], max(ks))
    totals = dict.fromkeys(ks, 0.0)
    for question, hits in zip(asked, found, strict=True):
        gold = set(question.supporting_ids)
        for k in ks:
            totals[k] += len(gold.intersection(hits.ids[:k])) / len(gold)
    return {k: total / len(asked) for k, total in totals.items()}
