"""Team terms: what the final answer is worth, and what the whole episode cost.

The order that must hold is correct > partly correct > wrong > no answer > malformed. Plain F1 gives no answer and a
wrong answer the same 0, and training collapses by not answering (arXiv 2602.19526): `no_answer` puts it below. A
malformed final answer is replaced by the default action, which may be right by luck: it is scored as no answer, and the
format penalty comes on top (`RewardFunction` adds it to the team reward as well as to the decision), so it is the worst
under any weights. On an unanswerable question abstaining is the correct answer; a malformed one scores as a wrong one
plus the penalty.
"""

from __future__ import annotations

from pydantic import Field

from jointrag.eval import metrics
from jointrag.graph.episode import Episode
from jointrag.rewards.base import TeamTerm
from jointrag.rewards.reading import abstains, malformed_answer, may_abstain


class F1(TeamTerm):
    """f1 = token F1 of the final answer, the best alias counts (HotpotQA's script); 0 where it was malformed."""

    def score_episode(self, episode: Episode) -> float:
        return 0.0 if malformed_answer(episode) else metrics.f1(episode.answer, episode.question.answers)


class EM(TeamTerm):
    """em = 1 if the normalised final answer equals an alias (SQuAD's script), else 0; 0 where it was malformed."""

    def score_episode(self, episode: Episode) -> float:
        return 0.0 if malformed_answer(episode) else metrics.exact_match(episode.answer, episode.question.answers)


class CoverEM(TeamTerm):
    """cover_em = 1 if the final answer contains an alias (FlashRAG), else 0; 0 where it was malformed.

    It pays for long answers that name everything: combine it with F1.
    """

    def score_episode(self, episode: Episode) -> float:
        return 0.0 if malformed_answer(episode) else metrics.cover_em(episode.answer, episode.question.answers)


class NoAnswer(TeamTerm):
    """no_answer = 1 where an answerable question got no answer, "unknown" or a malformed one; its weight is negative.

    arXiv 2602.19526: F1 .391 alone, .429 with -0.1 for no answer and -0.1 for no search.
    """

    def score_episode(self, episode: Episode) -> float:
        if may_abstain(episode.question):
            return 0.0
        return float(malformed_answer(episode) or abstains(episode.answer))


class MalformedAnswer(TeamTerm):
    """malformed_answer = 1 where the final answer was malformed; a negative weight adds to the format penalty."""

    def score_episode(self, episode: Episode) -> float:
        return float(malformed_answer(episode))


class SearchCost(TeamTerm):
    """search_cost = -min(1, queries sent to the index / limit).

    Weights of 0.1 for searches and 0.1 for turns collapsed JADE to one search by step 100: keep it small and ramp it.
    """

    limit: int = Field(6, ge=1)  # searches that cost 1: two queries in each of three hops

    def score_episode(self, episode: Episode) -> float:
        return -min(1.0, episode.searches / self.limit)


class TokenCost(TeamTerm):
    """token_cost = -min(1, tokens read and written / limit)."""

    limit: int = Field(4096, ge=1)  # tokens that cost 1: eight full contexts of 512

    def score_episode(self, episode: Episode) -> float:
        return -min(1.0, episode.tokens / self.limit)
