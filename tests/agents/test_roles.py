from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jointrag.agents import Answerer, EvidenceFilter, Retriever, Rewriter
from jointrag.agents.base import FREE, prompt, read_prompt, unheld
from jointrag.agents.labels import plan
from jointrag.agents.retriever import zscore
from jointrag.data.errors import ConfigError
from jointrag.data.types import UNKNOWN, Passage, Question
from jointrag.graph.context import RagContext, Recorder
from jointrag.graph.episode import Decision, Episode
from jointrag.graph.state import initial
from jointrag.llm.actions import MalformedError

A, B, C, D = (Passage(x, f"Title {x}", f"text {x}") for x in "abcd")


def state(**keys: Any) -> dict[str, Any]:
    return {**initial("Who ?"), **keys}


def context(max_hops: int = 3, gold: Question | None = None, index: Any = None) -> RagContext:
    return RagContext(None, index, Recorder(Episode(Question("q", "Who ?", ("x",)), 0)), max_hops=max_hops, gold=gold)  # type: ignore[arg-type]


def decision(**keys: Any) -> Decision:
    return Decision("a", "a", 0, 0, 0, "oracle", None, **keys)


def test_each_role_has_a_prompt_file_and_may_take_the_users(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("  Do as I say.\n")
    for role in (Rewriter, Retriever, EvidenceFilter, Answerer):
        assert role().instruction == prompt(role.name) != ""
        assert role(prompt=str(mine)).instruction == "Do as I say."
    assert prompt("nobody") == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompt(str(tmp_path / "none.txt"), "filter")
    mine.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompt(str(mine), "filter")


def test_every_role_sees_the_question_and_the_trail() -> None:
    seen = state(queries=["q1", "q2"], pending=["q2"], evidence=[A], passages=[B])
    for agent in (Rewriter(), Retriever(), EvidenceFilter(), Answerer()):
        obs = agent.observe(seen)
        assert (obs.question, obs.trail, obs.instruction) == ("Who ?", ("q1", "q2"), agent.instruction)
        assert obs.passages == ((B,) if agent.name == "filter" else (A,))


def test_observing_changes_no_state() -> None:
    seen = state(queries=["q1"], pending=["q1"], evidence=[A], passages=[A, B])
    before = {k: list(v) if isinstance(v, list) else v for k, v in seen.items()}
    for agent in (Rewriter(), Retriever(), EvidenceFilter(), Answerer()):
        agent.observe(seen)
        agent.default(seen)
    assert seen == before


# rewriter


def test_the_rewriter_asks_the_question_once_by_default() -> None:
    assert Rewriter().default(state()) == {"queries": ["Who ?"], "pending": ["Who ?"]}
    assert Rewriter().default(state(hop=1)) == {"queries": [], "pending": []}


def test_the_rewriter_may_only_stop_at_the_cap() -> None:
    assert Rewriter().forced(state(hop=2), context()) is FREE
    assert Rewriter().forced(state(hop=3), context()) == ()


class Titles:
    """All an oracle rewriter asks of an index."""

    def passages(self, ids: list[str]) -> list[Passage]:
        return [{"a": A, "b": B, "c": C}[i] for i in ids]


WHO_IS_A = "Who is Title A ?"
GOLD = Question("q", "Who ?", ("x",), ("a", "b"), (("first",), ("second",)))


def test_the_oracle_rewriter_asks_for_what_is_missing_and_stops() -> None:
    ctx = context(gold=GOLD, index=Titles())
    assert Rewriter().oracle(state(), ctx, decision()) == ("first",)
    assert Rewriter().oracle(state(evidence=[A], queries=["first"], hop=1), ctx, decision()) == ("second",)
    assert Rewriter().oracle(state(evidence=[A, B], hop=2), ctx, decision()) == ()
    assert Rewriter().oracle(state(hop=3), ctx, decision()) == ()
    assert Rewriter().oracle(state(), context(), decision()) is None


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ("question", WHO_IS_A),
        ("title", "Title a"),
        ("question_title", f"{WHO_IS_A} Title a"),
        ("sub_question", "first"),
    ],
)
def test_label_forms_are_what_they_are_called(form: str, asked: str) -> None:
    ctx = context(gold=replace(GOLD, question=WHO_IS_A), index=Titles())
    ctx.oracle_form = form
    assert Rewriter().oracle(state(), ctx, decision()) == (asked,)


def test_a_title_that_nobody_can_know_yet_is_not_asked_for() -> None:
    ctx = context(gold=GOLD, index=Titles())  # "Who ?" names no title
    ctx.oracle_form = "title"
    assert Rewriter().oracle(state(), ctx, decision()) == ("Who ?",)


def test_without_gold_queries_gold_passages_are_sought_as_their_titles_become_known() -> None:
    told = {"a": Passage("a", "Ann", "Ann is a baker ."), "b": Passage("b", "Bay", "Bay is ruled by Ann .")}
    hops = plan(Question("q", "Who rules Bay ?", ("x",), ("a", "b")), "title", told.__getitem__)
    assert [(h.queries, h.gold) for h in hops] == [(("Bay",), ("b",)), (("Ann",), ("a",))]


def test_a_passage_without_a_title_gives_no_title_label() -> None:
    bare = {"a": Passage("a", "", "Ann is a baker .")}
    (hop,) = plan(Question("q", "Who bakes ?", ("Ann",), ("a",)), "title", bare.__getitem__)
    assert hop.queries == ("Who bakes ?",)


def test_of_parallel_gold_queries_only_those_still_missing_are_asked() -> None:
    both = Question("q", "Who ?", ("x",), ("a", "b"), (("first", "second"),))
    ctx = context(gold=both, index=Titles())
    assert Rewriter(max_queries=2).oracle(state(), ctx, decision()) == ("first", "second")
    assert Rewriter(max_queries=1).oracle(state(), ctx, decision()) == ("first",)
    assert Rewriter(max_queries=1).oracle(state(evidence=[A]), ctx, decision()) == ("second",)


def test_an_unanswerable_question_is_asked_once() -> None:
    missing = Question("q", "Who ?", (UNKNOWN,), (), (("first",),))
    ctx = context(gold=missing, index=Titles())
    assert Rewriter().oracle(state(), ctx, decision()) == ("first",)
    assert Rewriter().oracle(state(queries=["first"], hop=1), ctx, decision()) == ()


# retriever


def test_zscores_by_hand() -> None:
    """Mean 2, standard deviation sqrt(2/3)."""
    assert np.allclose(zscore([1.0, 2.0, 3.0]), np.array([-1, 0, 1]) / np.sqrt(2 / 3), atol=1e-6)
    assert zscore([4.0, 4.0]).tolist() == [0.0, 0.0]
    assert zscore([4.0]).tolist() == [0.0]
    assert zscore([1.0, 2.0]).dtype == np.float32


def test_the_query_to_answer_stands_last_in_what_the_retriever_sees() -> None:
    seen = state(queries=["q1", "q2", "q3"], pending=["q1"])
    assert Retriever().observe(seen).trail == ("q2", "q3", "q1")
    assert Retriever().observe(state()).trail == ("Who ?",)


# filter


def test_the_filter_is_shown_what_is_not_held_yet() -> None:
    agent = EvidenceFilter()
    assert agent.received(state(passages=[A, B], evidence=[A])) == (B,)
    assert unheld((A, B), (B,)) == (A,)


def test_the_filter_keeps_first_come_first_served_up_to_the_budget() -> None:
    agent = EvidenceFilter(budget=3)
    seen = state(passages=[A, B, C, D])
    assert agent.default(seen) == {"evidence": [A, B, C]}
    assert agent.update(seen, ("d", "b")) == {"evidence": [B, D]}
    assert agent.update(seen, ()) == {"evidence": []}
    assert agent.update(state(passages=[B, C, D], evidence=[A, B]), ("c", "d")) == {"evidence": [C]}


def test_the_filter_has_no_choice_with_nothing_new_or_a_full_budget() -> None:
    agent = EvidenceFilter(budget=1)
    assert agent.forced(state(passages=[A]), context()) is FREE
    assert agent.forced(state(passages=[A], evidence=[A]), context()) == ()
    assert agent.forced(state(passages=[B], evidence=[A]), context()) == ()
    assert agent.forced(state(), context()) == ()


def test_numbers_are_ids_and_back() -> None:
    agent, seen = EvidenceFilter(), state(passages=[A, B, C], evidence=[A])
    assert agent.parse(seen, (0, 1)) == ("b", "c")
    assert agent.written(seen, ("c",)) == (1,)


def test_the_oracle_filter_keeps_the_gold_it_received() -> None:
    agent = EvidenceFilter()
    assert agent.oracle(state(), context(gold=GOLD), decision(received=(C, B))) == ("b",)
    assert agent.oracle(state(), context(), decision(received=(C,))) is None


# answerer


def test_the_answerer_says_the_first_title_by_default() -> None:
    assert Answerer().default(state(evidence=[B, A])) == {"answer": "Title b"}
    assert Answerer().default(state()) == {"answer": UNKNOWN}


def test_blank_text_is_no_answer() -> None:
    for text in ("", "  \n"):
        with pytest.raises(MalformedError, match="empty"):
            Answerer().parse(state(), text)
    assert Answerer().parse(state(), UNKNOWN) == UNKNOWN


def test_the_oracle_answerer_answers_what_follows_from_the_evidence() -> None:
    from jointrag.data.types import Twin

    q = Question("q", "Who ?", ("x",), ("a", "b"), (), (Twin("b", "c", "wrong"), Twin("a", "d", "")))
    cases: list[tuple[tuple[Passage, ...], str | None]] = [
        ((A, B), "x"),
        ((A, B, C), "x"),  # a twin beside the gold does not mislead
        ((A, C), "wrong"),
        ((D, B), None),  # a twin on the way tells no answer
        ((A,), None),
        ((), None),
    ]
    for held, answer in cases:
        assert Answerer().oracle(state(), context(gold=q), decision(held=held)) == answer
    missing = Question("q", "Who ?", (UNKNOWN,))
    assert Answerer().oracle(state(), context(gold=missing), decision()) == UNKNOWN
