"""Scores of one question: its answer against the gold aliases, its passages against the gold passages.

Answer scores are those of the official scripts, so that numbers can be held against published ones:

    normalise, exact_match   SQuAD evaluate-v1.1.py (huggingface/evaluate metrics/squad/compute_score.py @ b6e7c3b)
    f1                       HotpotQA hotpot_evaluate_v1.py (hotpotqa/hotpot @ fa3a363): SQuAD's, with its yes/no rule
    cover_em                 FlashRAG Sub_ExactMatch (RUC-NLPIR/FlashRAG flashrag/evaluator/metrics.py @ ddaeb3c),
                             the same as subem_check of Search-R1's verl/utils/reward_score/qa_em.py

each the maximum over the aliases (SQuAD's metric_max_over_ground_truths). Joining the aliases into one string, or
taking the overlap of token *sets*, gives other numbers: "the cat cat sat" against "cat sat" is 0.8, not 1.0.

Passage scores are None where a question has no gold passages: nothing can be found or missed there, so the question
is left out of the mean. Counting it as 1.0 would reward a set for being unlabelled, 0.0 would punish it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only, as in the scripts: dashes and curly quotes stay
_ALL_OR_NOTHING = ("yes", "no", "noanswer")  # HotpotQA: these match whole or not at all


def normalise(text: str) -> str:
    """Lower case, ASCII punctuation deleted (not spaced), articles a/an/the dropped, space squeezed, in this order.

    "U.S." becomes "us", and "A." nothing.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """EM = 1.0 if the normalised prediction equals some normalised alias, else 0.0."""
    return _best(prediction, answers, lambda predicted, gold: float(predicted == gold))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 = 2PR/(P+R), P and R = |multiset overlap of tokens| / tokens predicted, gold; the best alias counts.

    0.0 where either side is "yes", "no" or "noanswer" and the other is not the same, though tokens overlap. Two texts
    that normalise to nothing score 0.0 (and EM 1.0), as in the script.
    """
    return _best(prediction, answers, _token_f1)


def cover_em(prediction: str, answers: Sequence[str]) -> float:
    """cover-EM = 1.0 if some normalised alias is a substring of the normalised prediction, else 0.0.

    A substring of characters, not of tokens, as both scripts have it: "no" is covered by "norway", and an alias that
    normalises to nothing by everything. It forgives long answers, so it is read beside EM and F1, never alone.
    """
    return _best(prediction, answers, lambda predicted, gold: float(gold in predicted))


def _best(prediction: str, answers: Sequence[str], score: Callable[[str, str], float]) -> float:
    """The highest score over the aliases, both sides normalised."""
    if isinstance(answers, str):
        raise ValueError(f"answers: got the string {answers!r}, expected a sequence of aliases; write [{answers!r}]")
    if not answers:
        raise ValueError("answers: got no alias, expected at least one; leave out questions without a gold answer")
    predicted = normalise(prediction)
    return max(score(predicted, normalise(answer)) for answer in answers)


def _token_f1(predicted: str, gold: str) -> float:
    if predicted != gold and (predicted in _ALL_OR_NOTHING or gold in _ALL_OR_NOTHING):
        return 0.0
    predicted_tokens, gold_tokens = predicted.split(), gold.split()
    same = (Counter(predicted_tokens) & Counter(gold_tokens)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted_tokens), same / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


@dataclass(frozen=True, slots=True)
class Support:
    """How well a set of passages hits the gold passages; each in [0, 1]."""

    recall: float
    precision: float
    f1: float


def support(passages: Collection[str], gold: Collection[str]) -> Support | None:
    """Recall |P & G| / |G|, precision |P & G| / |P|, F1 2PR/(P+R) over sets of ids; None where G is empty.

    As update_sp of hotpot_evaluate_v1.py, at the level of passages instead of sentences: nothing selected has
    precision 0.0 (an empty selection is never a good one), and a passage held twice counts once.
    """
    _refuse_string("passages", passages)
    _refuse_string("gold", gold)
    chosen, wanted = set(passages), set(gold)
    if not wanted:
        return None
    hits = len(chosen & wanted)
    recall = hits / len(wanted)
    precision = hits / len(chosen) if chosen else 0.0
    return Support(recall, precision, 2 * precision * recall / (precision + recall) if hits else 0.0)


def recall_at_k(ranked: Sequence[str], gold: Collection[str], k: int) -> float | None:
    """recall@k = |first k of the ranking & G| / |G|; None where G is empty. A ranking shorter than k is taken whole."""
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    _refuse_string("ranked", ranked)
    scores = support(ranked[:k], gold)
    return None if scores is None else scores.recall


def _refuse_string(name: str, ids: Collection[str]) -> None:
    if isinstance(ids, str):
        raise ValueError(f"{name}: got the string {ids!r}, expected a collection of passage ids; write [{ids!r}]")
