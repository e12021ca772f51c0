"""The linter: every mistake it knows is found when planted, with term and counterexample; shipped configs are clean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jointrag.configs.load import load_config
from jointrag.eval import metrics
from jointrag.graph.episode import Episode
from jointrag.lab.lint import lint
from jointrag.rewards.base import ProcessTerm, TeamTerm
from jointrag.rewards.process import Selection
from jointrag.rewards.reading import YES_NO, found, gold, queries, words
from jointrag.rewards.registry import PROCESS, TEAM

CONFIGS = sorted(Path(str(load_config.__globals__["__file__"])).parent.glob("**/*.yaml"))
TEAM_OK = [{"type": "f1"}, {"type": "no_answer", "weight": -0.1}]
PROCESS_OK = {
    "rewriter": [{"type": "retrieval_gain"}, {"type": "stop_timing", "weight": 0.5}],
    "retriever": [{"type": "recall_gain"}],
    "filter": [{"type": "evidence_f1"}],
    "answerer": [{"type": "grounded", "weight": 0.3}],
}


class TooManyQueries(ProcessTerm):
    def score_decision(self, episode: Episode, i: int) -> float:
        return -float(len(queries(episode.decisions[i])) > 4)


class EmptyIsPrecise(Selection):
    """Precision of nothing is 1."""

    def score_decision(self, episode: Episode, i: int) -> float:
        if not episode.decisions[i].update.get("evidence"):
            return 1.0
        return super().score_decision(episode, i)

    def quality(self, kept: set[str], wanted: frozenset[str]) -> float:
        return self.support(kept, wanted).precision


class OnlySilenceCosts(TeamTerm):
    """Counts "" and lets "unknown" pass."""

    def score_episode(self, episode: Episode) -> float:
        return float(not episode.answer and episode.question.answerable)


class JoinedF1(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        return metrics.f1(episode.answer, (" ".join(episode.question.answers),))


class SetF1(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        def of(gold_answer: str) -> float:
            said, wanted = set(words(episode.answer).split()), set(words(gold_answer).split())
            common = len(said & wanted)
            return 2 * common / (len(said) + len(wanted)) if common else 0.0

        return max(map(of, episode.question.answers))


class F1Again(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        return metrics.f1(episode.answer, episode.question.answers)


class F1Lost(TeamTerm):
    """What f1 pays, charged."""

    def score_episode(self, episode: Episode) -> float:
        return 1.0 - metrics.f1(episode.answer, episode.question.answers)


class SetF1Lost(SetF1):
    def score_episode(self, episode: Episode) -> float:
        return super().score_episode(episode) - 1.0


class GuessesCost(TeamTerm):
    """Takes every "yes" and "no" for a guess."""

    def score_episode(self, episode: Episode) -> float:
        return float(words(episode.answer) in YES_NO)


class UnknownOnYesNo(TeamTerm):
    """Pays for abstaining where the answer is yes or no."""

    def score_episode(self, episode: Episode) -> float:
        return float(words(episode.answer) == "unknown" and bool(YES_NO & set(episode.question.answers)))


class ForgivenLater(Selection):
    """F1, and an empty selection costs where gold came first alone."""

    def score_decision(self, episode: Episode, i: int) -> float:
        d = episode.decisions[i]
        if not d.update.get("evidence") and d.received and d.received[0].id not in episode.question.supporting_ids:
            return 0.0
        return super().score_decision(episode, i)

    def quality(self, kept: set[str], wanted: frozenset[str]) -> float:
        return self.support(kept, wanted).f1


class NewSinceLast(ProcessTerm):
    """Counts gold against the last retrieval alone."""

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        own, ids = episode.decisions[i], set(episode.question.supporting_ids)
        last = [d for d in episode.decisions[:i] if "passages" in d.update][-1:]
        new = found([own]) & ids - found(last) - {p.id for p in own.held}
        return len(new) / len(ids) if ids and "passages" in own.update else 0.0


class LaterGain(ProcessTerm):
    """Pays what a query of a later hop finds, whatever it says."""

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        own, g = episode.decisions[i], gold(episode)
        if g is None or not queries(own) or own.hop < 1:
            return 0.0
        after = [d for d in episode.decisions[i:] if "passages" in d.update][:1]
        return len(found(after) & g.ids) / len(g.ids) if g.ids else 0.0


class MalformedCosts(ProcessTerm):
    """1 for malformed output: its weight is negative."""

    def score_decision(self, episode: Episode, i: int) -> float:
        return float(episode.decisions[i].malformed)


class ManyWords(ProcessTerm):
    """A yes or no, of the answer's own words."""

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        return len(episode.decisions[i].value.split()) > 4


class AnswerLength(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        return -len(episode.answer.split()) / 20


class AskingIsPaid(ProcessTerm):
    def score_decision(self, episode: Episode, i: int) -> float:
        return float(bool(queries(episode.decisions[i])))


class GainPerHop(ProcessTerm):
    """1 for each hop with new gold: it does not telescope."""

    per_hop: ClassVar[bool] = False

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        had = found(d for d in episode.decisions if d.step < own.step)
        return float(target is not None and bool((found([own]) & target.ids) - had))


class NewAgainstKept(ProcessTerm):
    """New gold is what is not held, so letting go and asking again brings it anew."""

    def score_decision(self, episode: Episode, i: int) -> float:
        target, own = gold(episode), episode.decisions[i]
        if target is None:
            return 0.0
        return len((found([own]) & target.ids) - {p.id for p in own.held}) / max(1, target.needed)


class CopiedF1(TeamTerm):
    """An answer that stands nowhere is not believed: yes and no never do."""

    def score_episode(self, episode: Episode) -> float:
        right = metrics.f1(episode.answer, episode.question.answers)
        return right / 2 if words(episode.answer) in YES_NO else right


class SaysTheAnswer(ProcessTerm):
    """Pays a query for the words of the answer in it: no single alias need stand there whole."""

    def score_decision(self, episode: Episode, i: int) -> float:
        said = set(words(" ".join(queries(episode.decisions[i]))).split())
        return float(bool(said & set(words(episode.question.answers[0]).split())))


class QueriesAnswer(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        said = words(" ".join(q for d in episode.decisions for q in queries(d)))
        return float(any(words(a) in said for a in episode.question.answers)) / 2


class SilenceOnThinEvidence(ProcessTerm):
    """Pays abstaining while gold is missing: the safest policy under a weak retriever is to say nothing."""

    def score_decision(self, episode: Episode, i: int) -> float:
        own, target = episode.decisions[i], gold(episode)
        if target is None or target.coverage({p.id for p in own.held}) == 1.0:
            return 0.0
        return float(words(episode.answer) == "unknown")


class YesIsBetterThanNo(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        return 0.0 if words(episode.answer) == "no" else metrics.f1(episode.answer, episode.question.answers)


class LastAliasF1(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        return metrics.f1(episode.answer, episode.question.answers[-1:])


class SearchesArePaid(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        return min(1.0, episode.searches / 6)


class LateHop(ProcessTerm):
    """The hop limit is 3, where stopping is forced and nobody's decision."""

    def score_decision(self, episode: Episode, i: int) -> float:
        return -float(episode.decisions[i].hop >= 3)


class WordyAnswer(ProcessTerm):
    def score_decision(self, episode: Episode, i: int) -> float:
        done = episode.decisions[i].completion
        return -len(done.tokens) / 8 if done else 0.0


class Fails(TeamTerm):
    def score_episode(self, episode: Episode) -> float:
        return 1.0 / len(episode.answer)


PLANTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "never fires": (
        {"process": {"rewriter": [{"type": "TooManyQueries", "weight": 0.3}]}},
        "rewriter.TooManyQueries",
        "",
    ),
    "free empty selection": (
        {"process": {"filter": [{"type": "EmptyIsPrecise"}]}},
        "filter.EmptyIsPrecise",
        "keep nothing",
    ),
    "no answer": ({"team": [{"type": "f1"}]}, "team.f1", "answer ''"),
    "free unknown": (
        {"team": [{"type": "f1"}, {"type": "OnlySilenceCosts", "weight": -0.1}]},
        "team.",
        "answer 'unknown'",
    ),
    "joined aliases": ({"team": [{"type": "JoinedF1"}, TEAM_OK[1]]}, "team.JoinedF1", "Kingdom of Norway Norway"),
    "F1 over sets": ({"team": [{"type": "SetF1"}, TEAM_OK[1]]}, "team.SetF1", "Kingdom of Norway Kingdom of Norway"),
    "stuffed query": (
        {"guards": {"answer_in_query": False}},
        "rewriter.retrieval_gain",
        "'Ann Lee born Kingdom of Norway'",
    ),
    "same term": ({"team": [*TEAM_OK, {"type": "F1Again", "weight": 0.3}]}, "team.F1Again", ""),
    "unbounded": ({"team": [*TEAM_OK, {"type": "AnswerLength", "weight": 0.01}]}, "team.AnswerLength", "answer"),
    "farmed by loops": (
        {"process": {"rewriter": [{"type": "AskingIsPaid", "weight": 0.1}]}},
        "rewriter.AskingIsPaid",
        "ask",
    ),
    "dropped and asked again": (
        {"process": {"retriever": [{"type": "NewAgainstKept"}]}},
        "retriever.NewAgainstKept",
        "keep nothing",
    ),
    "zero searches": (
        {"team": [*TEAM_OK, {"type": "search_cost", "weight": 2.0}]},
        "team.search_cost",
        "stop; answer 'Sweden'",
    ),
    "gold below maximum": ({"team": [{"type": "CopiedF1"}, TEAM_OK[1]]}, "team.CopiedF1", "answer 'yes'"),
}


@pytest.fixture(autouse=True)
def own_terms() -> Iterator[None]:
    """The terms of this file by the names of their classes."""
    mine = [c for c in globals().values() if isinstance(c, type) and c.__module__ == __name__]
    team = {c.__name__: c for c in mine if issubclass(c, TeamTerm)}
    process = {c.__name__: c for c in mine if issubclass(c, ProcessTerm)}
    TEAM.update(team)
    PROCESS.update(process)
    yield
    for name in team:
        del TEAM[name]
    for name in process:
        del PROCESS[name]


def config(rewards: dict[str, Any], **more: Any) -> Any:
    process = {**PROCESS_OK, **rewards.get("process", {})}
    return load_config({"extends": "demo", "rewards": {"team": TEAM_OK, **rewards, "process": process}, **more})


def test_thirteen_kinds_of_mistake_are_known() -> None:
    assert len(PLANTED) == 13


@pytest.mark.parametrize("check", PLANTED)
def test_a_planted_mistake_is_found_with_its_term_and_counterexample(check: str) -> None:
    rewards, term, shown = PLANTED[check]
    hits = [f for f in lint(config(rewards)) if f.check == check]
    assert hits and all(f.term.startswith(term) for f in hits)
    assert shown in hits[0].episode


def test_sound_rewards_have_no_finding() -> None:
    assert lint(config({})) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_have_no_finding(path: Path) -> None:
    assert lint(load_config(path, need_data=False)) == []


@pytest.mark.parametrize(
    ("rewards", "check", "term"),
    [
        ({"process": {"filter": [{"type": "evidence_f1", "miss": 0.0}]}}, "free empty selection", "filter.evidence_f1"),
        ({"process": {"retriever": [{"type": "GainPerHop"}]}}, "farmed by loops", "retriever.GainPerHop"),
        ({"team": [*TEAM_OK, {"type": "Fails"}]}, "fails", "team.Fails"),
        ({"team": [{"type": "cover_em"}, TEAM_OK[1]], "process": {"answerer": []}}, "order", "team.cover_em"),
        ({"team": []}, "order", ""),
        ({"process": {"rewriter": [{"type": "SaysTheAnswer"}]}}, "stuffed query", "rewriter.SaysTheAnswer"),
        ({"team": [*TEAM_OK, {"type": "QueriesAnswer"}]}, "stuffed query", "team.QueriesAnswer"),
        ({"format": 0.0, "team": [{"type": "f1"}, {"type": "no_answer", "weight": -0.1}]}, "order", "team."),
        ({"process": {"retriever": [{"type": "grounded"}]}}, "never fires", "retriever.grounded"),
        ({"process": {"answerer": [{"type": "answer_f1"}]}}, "same term", "answerer.answer_f1"),
        ({"process": {"answerer": [{"type": "SilenceOnThinEvidence"}]}}, "free unknown", "answerer.Silence"),
        ({"team": [{"type": "YesIsBetterThanNo"}, TEAM_OK[1]]}, "gold below maximum", "team.YesIsBetterThanNo"),
        ({"team": [{"type": "LastAliasF1"}, TEAM_OK[1]]}, "gold below maximum", "team.LastAliasF1"),
        (
            {"team": [*TEAM_OK, {"type": "token_cost", "limit": 1024, "weight": 1.5}]},
            "zero searches",
            "team.token_cost",
        ),
        ({"team": [*TEAM_OK, {"type": "search_cost", "weight": -0.3}]}, "farmed by loops", "team.search_cost"),
        ({"team": [*TEAM_OK, {"type": "SearchesArePaid", "weight": 0.2}]}, "farmed by loops", "team.SearchesArePaid"),
        (
            {"process": {"filter": [{"type": "evidence_f1", "miss": 0.0}, {"type": "token_cost", "weight": 0.05}]}},
            "free empty selection",
            "filter.evidence_f1",
        ),
        (
            {"team": [*TEAM_OK, {"type": "search_cost", "weight": 0.05}, {"type": "SearchesArePaid", "weight": -0.05}]},
            "same term",
            "team.SearchesArePaid",
        ),
        ({"process": {"rewriter": [{"type": "LateHop"}]}}, "never fires", "rewriter.LateHop"),
        ({"process": {"retriever": [{"type": "recall_gain", "weight": -1.5}]}}, "order", "retriever.recall_gain"),
        ({"team": [*TEAM_OK, {"type": "F1Lost", "weight": -0.5}]}, "same term", "team.F1Lost"),
        ({"team": [{"type": "SetF1Lost"}, TEAM_OK[1]]}, "F1 over sets", "team.SetF1Lost"),
        ({"team": [*TEAM_OK, {"type": "GuessesCost", "weight": -0.2}]}, "gold below maximum", "team.GuessesCost"),
        ({"team": [*TEAM_OK, {"type": "UnknownOnYesNo", "weight": 0.3}]}, "free unknown", "team.UnknownOnYesNo"),
        ({"process": {"filter": [{"type": "ForgivenLater"}]}}, "free empty selection", "filter.ForgivenLater"),
        ({"process": {"retriever": [{"type": "NewSinceLast"}]}}, "dropped and asked again", "retriever.NewSinceLast"),
        (
            {"process": {"rewriter": [{"type": "LaterGain"}]}, "guards": {"answer_in_query": False}},
            "stuffed query",
            "rewriter.LaterGain",
        ),
        ({"process": {"answerer": [{"type": "WordyAnswer", "weight": 0.1}]}}, "unbounded", "answerer.WordyAnswer"),
    ],
)
def test_other_ways_to_make_the_mistakes_are_found_too(rewards: dict[str, Any], check: str, term: str) -> None:
    assert any(f.check == check and f.term.startswith(term) for f in lint(config(rewards)))


@pytest.mark.parametrize(
    "rewards",
    [
        {"process": {"filter": [{"type": "evidence_f1"}, {"type": "MalformedCosts", "weight": -0.2}]}},
        {"process": {"answerer": [{"type": "grounded", "weight": 0.1}, {"type": "ManyWords", "weight": -0.05}]}},
    ],
)
def test_terms_written_as_a_user_would_are_read_as_they_are_paid(rewards: dict[str, Any]) -> None:
    assert lint(config(rewards)) == []


def test_what_a_schedule_ends_with_is_checked_too() -> None:
    ramp = {"from": 0.0, "to": 3.0, "episodes": 1000}
    (found_,) = lint(config({"team": [*TEAM_OK, {"type": "search_cost", "weight": ramp}]}))
    assert (found_.check, found_.term) == ("zero searches", "team.search_cost")


def test_a_term_of_weight_0_is_no_dead_one() -> None:
    assert lint(config({"process": {"rewriter": [{"type": "TooManyQueries", "weight": 0.0}]}})) == []


def test_a_repeat_that_cannot_happen_makes_its_penalty_dead() -> None:
    novelty = {"process": {"rewriter": [{"type": "novelty"}]}}
    nodes: dict[str, dict[str, Any]] = {n: {"type": "evidence_filter" if n == "filter" else n} for n in PROCESS_OK}
    nodes["rewriter"]["max_queries"] = 1
    linear = {"START": "rewriter", "rewriter": "retriever", "retriever": "filter", "filter": "answerer"}
    for graph in ({"max_hops": 1, "nodes": nodes}, {"nodes": nodes, "edges": {**linear, "answerer": "END"}}):
        hits = {(f.check, f.term) for f in lint(config(novelty, graph=graph))}
        assert ("never fires", "rewriter.novelty") in hits
        assert ("zero searches", "team") not in hits  # a rewriter that cannot stop has to search
    assert lint(config(novelty)) == []
