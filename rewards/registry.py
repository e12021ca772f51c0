"""Reward terms by name: "module:Class", imported only when built. A plugin adds its own with `register_team/process`.

Tests iterate over both tables, so a new term is tested for purity, bounds and pickling the day it is added.
"""

from __future__ import annotations

from jointrag.rewards.base import ProcessTerm, TeamTerm

TEAM: dict[str, str | type[TeamTerm]] = {
    "f1": "jointrag.rewards.outcome:F1",
    "em": "jointrag.rewards.outcome:EM",
    "cover_em": "jointrag.rewards.outcome:CoverEM",
    "no_answer": "jointrag.rewards.outcome:NoAnswer",
    "malformed_answer": "jointrag.rewards.outcome:MalformedAnswer",
    "search_cost": "jointrag.rewards.outcome:SearchCost",
    "token_cost": "jointrag.rewards.outcome:TokenCost",
}

PROCESS: dict[str, str | type[ProcessTerm]] = {
    # whoever writes queries
    "retrieval_gain": "jointrag.rewards.process:RetrievalGain",
    "step_relevance": "jointrag.rewards.process:StepRelevance",
    "stop_timing": "jointrag.rewards.process:StopTiming",
    "novelty": "jointrag.rewards.process:Novelty",
    # whoever picks passages out of candidates
    "recall_gain": "jointrag.rewards.process:RecallGain",
    "ranking": "jointrag.rewards.process:RankingQuality",
    # whoever keeps passages as evidence
    "evidence_f1": "jointrag.rewards.process:EvidenceF1",
    "evidence_precision": "jointrag.rewards.process:EvidencePrecision",
    "evidence_recall": "jointrag.rewards.process:EvidenceRecall",
    # whoever writes the answer
    "grounded": "jointrag.rewards.process:Grounded",
    "answer_f1": "jointrag.rewards.process:AnswerF1",
    # any agent
    "search_cost": "jointrag.rewards.process:SearchCost",
    "token_cost": "jointrag.rewards.process:TokenCost",
}


def register_team(name: str, target: str | type[TeamTerm]) -> None:
    """Make a team term known by name."""
    TEAM[_free(name)] = target


def register_process(name: str, target: str | type[ProcessTerm]) -> None:
    """Make a process term known by name."""
    PROCESS[_free(name)] = target


def _free(name: str) -> str:
    if name == "format":
        raise ValueError("got the term name 'format', expected another: it is the key of the format penalty")
    return name
