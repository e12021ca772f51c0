"""Process terms: what one decision was worth to the node that made it, from gold labels, without a language model.

Which decisions a term can judge follows from what they wrote: queries, passages, evidence or an answer. Any other
decision scores 0, so every term fits agents of users too. What counts as gold is told in `reading.gold`: the gold
passages; where a set has none, the passages that contain a gold answer; where that is yes or no, nothing, and the
terms that need gold score 0.

Nothing here can be farmed by going round once more:
- gains count against everything *retrieved* so far (against what was *kept*, dropping evidence and asking again would
  be paid each hop), so they telescope: their sum is at most 1;
- what can be earned once an episode is paid once;
- other positive values are divided by the hop cap (`per_hop`, by `RewardFunction`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field

from jointrag.data.types import Passage
from jointrag.eval import metrics
from jointrag.graph.episode import Decision, Episode
from jointrag.rewards.base import ProcessTerm
from jointrag.rewards.reading import (
    YES_NO,
    Gold,
    abstains,
    before,
    found,
    gold,
    may_abstain,
    plans,
    queries,
    search_round,
    words,
)

# the queries


class RetrievalGain(ProcessTerm):
    """retrieval_gain = new gold passages that this hop's queries brought / gold passages; telescopes over the hops.

    New: not retrieved before, kept or not. Stopping gains 0. Without gold passages: 1 for the first hop that brings a
    passage with the answer.
    """

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        if target is None:
            return 0.0
        had = found(d for d in episode.decisions if d.step <= own.step)
        return target.coverage(had | found(search_round(episode, own))) - target.coverage(had)


class StepRelevance(ProcessTerm):
    """step_relevance = share of the passages this hop's queries brought that are gold and new.

    The per-step document relevance of R3-RAG (arXiv 2505.23794, "relevance-based document verification" as process
    reward), where a language model judges it; here the gold labels do. Gold that was retrieved before counts as
    irrelevant, or asking the same again would be paid.
    """

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        brought = found(search_round(episode, own))
        if target is None or not brought:
            return 0.0
        had = found(d for d in episode.decisions if d.step <= own.step)
        return len((brought & target.ids) - had) / len(brought)


class StopTiming(ProcessTerm):
    """stop_timing = +1 for stopping once all gold is held, -1 for asking on, -(share missing) for stopping early.

    Complete: all gold passages are held. An unanswerable question cannot be known as such before it was looked for, so
    there: the gold of its known part is held and one search was made after that; stopping sooner is neutral. A stop
    after asking on is 0, for the right moment has passed. Without gold passages an early stop is 0: an answer that was
    not seen may not be there. The forced stop at the hop limit is nobody's decision and not scored. After FrugalRAG,
    which rewards stopping at the earliest hop with the best recall.
    """

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        if target is None or not plans(own):
            return 0.0
        past = [d for d in before(episode, own) if d.agent == own.agent]
        complete = self._complete(episode, target, own, past)
        if queries(own):
            return -1.0 if complete else 0.0
        if not complete:
            return target.coverage(_ids(own.held)) - 1.0 if target.sure else 0.0
        late = any(self._complete(episode, target, d, [e for e in past if e.step < d.step]) for d in past)
        return 0.0 if late else 1.0

    @staticmethod
    def _complete(episode: Episode, target: Gold, decision: Decision, past: list[Decision]) -> bool:
        if target.coverage(_ids(decision.held)) < 1.0:
            return False
        if episode.question.answerable:
            return True
        return any(queries(d) and target.coverage(_ids(d.held)) >= 1.0 for d in past)


class Novelty(ProcessTerm):
    """novelty = -(share of the queries that were asked before), compared after normalisation.

    A penalty and not a premium: paid as a premium, any new query would earn something, whatever it finds.
    """

    def score_decision(self, episode: Episode, i: int) -> float:
        own = episode.decisions[i]
        asked = {words(q) for d in episode.decisions if (d.step, d.branch) < (own.step, own.branch) for q in queries(d)}
        repeated, mine = 0, queries(own)
        for query in map(words, mine):
            repeated += query in asked
            asked.add(query)
        return -repeated / len(mine) if mine and plans(own) else 0.0


# the candidates


class RecallGain(ProcessTerm):
    """recall_gain = new gold passages among the k it picked / gold passages; telescopes over the hops.

    New: not retrieved before, kept or not. Measured against all gold instead of the gold among its candidates: the best
    pick is the same, and the sum over hops is at most 1 (against the candidates, leaving one gold passage for the next
    hop would earn 1/2 + 1 instead of 1).
    """

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        if target is None:
            return 0.0
        had = found(before(episode, own)) | _ids(own.held)
        return target.coverage(had | found([own])) - target.coverage(had)


class RankingQuality(ProcessTerm):
    """ranking = nDCG of its k picks, gold being the gold candidates not retrieved before.

    DCG = sum over ranks r = 1.. of [pick r is gold] / log2(1 + r), divided by that of the best ordering of the
    candidates (Jarvelin & Kekalainen 2002); 0 where no new gold is among the candidates.
    """

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        picks = [p.id for p in own.update.get("passages") or ()]
        if target is None or not picks:
            return 0.0
        fresh = (target.ids & _ids(own.received)) - found(before(episode, own)) - _ids(own.held)
        best = sum(1 / math.log2(2 + r) for r in range(min(len(fresh), len(picks))))
        return sum(1 / math.log2(2 + r) for r, p in enumerate(picks) if p in fresh) / best if best else 0.0


# the evidence


class Selection(ProcessTerm):
    """quality(kept, gold received) where some gold is kept, else -miss [gold received] - junk [something kept].

    So keeping gold > 0 >= keeping nothing: an empty selection is at best neutral, even where nothing was worth keeping.
    Paid like a right one there, "none" is the best policy under a weak retriever, and with nothing kept nobody ever
    stops. The penalties are small beside 1 / hop cap, or keeping nothing would again be the safe choice.
    Gold that this agent received before and let go is neutral: dropping it to earn it later does not pay.
    """

    miss: float = Field(0.1, ge=0, le=0.5)  # gold was there and none of it kept
    junk: float = Field(0.05, ge=0, le=0.5)  # something was kept and none of it gold

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        shown = _ids(own.received[: max(0, len(own.received) - own.dropped)])
        if target is None or not shown:
            return 0.0
        passed = {p.id for d in before(episode, own) if d.agent == own.agent for p in d.received}
        fresh = (target.ids & shown) - passed
        kept = (_ids(own.update.get("evidence") or ()) & shown) - (target.ids - fresh)
        if kept & fresh:
            return self.quality(kept, fresh)
        return -self.miss * bool(fresh) - self.junk * bool(kept)

    def quality(self, kept: set[str], wanted: frozenset[str]) -> float:
        """Return how good a selection is that hits."""
        raise NotImplementedError

    @staticmethod
    def support(kept: set[str], wanted: frozenset[str]) -> metrics.Support:
        """Return recall, precision and F1 of a selection."""
        score = metrics.support(kept, wanted)
        assert score is not None  # `wanted` is hit, so it is not empty
        return score


class EvidenceF1(Selection):
    """evidence_f1 = F1 of the kept passages against the gold received in this hop."""

    def quality(self, kept: set[str], wanted: frozenset[str]) -> float:
        return self.support(kept, wanted).f1


class EvidencePrecision(Selection):
    """evidence_precision = share of the kept passages that are gold received in this hop."""

    def quality(self, kept: set[str], wanted: frozenset[str]) -> float:
        return self.support(kept, wanted).precision


class EvidenceRecall(Selection):
    """evidence_recall = share of the gold received in this hop that is kept; alone it pays for keeping everything."""

    def quality(self, kept: set[str], wanted: frozenset[str]) -> float:
        return self.support(kept, wanted).recall


# the answer


class Grounded(ProcessTerm):
    """grounded = share of the answer's words that stand in one passage of the evidence, the best passage counting.

    Abstaining: 1 where it is correct, else 0 (paid for thin evidence, no answer would come level with a wrong one).
    Any other answer to an unanswerable question: 0. Yes and no stand nowhere: 1 if the question asks for one and all
    its gold is held, else 0. Only an agent's last answer counts.
    """

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        answer, own = _last_answer(episode, i), episode.decisions[i]
        if answer is None:
            return 0.0
        if abstains(answer):
            return float(may_abstain(episode.question) and bool(answer.strip()))
        if not episode.question.answerable:
            return 0.0
        told = words(answer).split()
        if words(answer) in YES_NO:
            target = gold(episode)
            asked = any(words(a) in YES_NO for a in episode.question.answers)
            return float(asked and target is not None and target.coverage(_ids(own.held)) >= 1.0)
        read = [set(words(f"{p.title} {p.text}").split()) for p in own.held]
        return max((sum(t in r for t in told) / len(told) for r in read), default=0.0) if told else 0.0


class AnswerF1(ProcessTerm):
    """answer_f1 = token F1 of the agent's own last answer, as its own process reward."""

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        answer = _last_answer(episode, i)
        return 0.0 if answer is None else metrics.f1(answer, episode.question.answers)


# any agent


class SearchCost(ProcessTerm):
    """search_cost = -min(1, queries asked or sent by this decision / limit)."""

    limit: int = Field(2, ge=1)  # queries that cost 1

    def score_decision(self, episode: Episode, i: int) -> float:
        own = episode.decisions[i]
        return -min(1.0, (own.searches or len(queries(own))) / self.limit)


class TokenCost(ProcessTerm):
    """token_cost = -min(1, tokens this decision read and wrote / limit)."""

    limit: int = Field(512, ge=1)  # tokens that cost 1: one full context of the default

    def score_decision(self, episode: Episode, i: int) -> float:
        return -min(1.0, episode.decisions[i].tokens / self.limit)


def _ids(passages: Iterable[Passage]) -> set[str]:
    return {p.id for p in passages}


def _last_answer(episode: Episode, i: int) -> str | None:
    """What decision i answered; None where it wrote no answer or its agent answered again later."""
    own = episode.decisions[i]
    if "answer" not in own.update:
        return None
    if any(d.agent == own.agent and "answer" in d.update for d in episode.decisions[i + 1 :]):
        return None
    return str(own.update["answer"] or "")
