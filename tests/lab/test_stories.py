"""Told episodes are what a running graph would record."""

from __future__ import annotations

from jointrag.configs.load import load_config
from jointrag.data.types import Question
from jointrag.graph.declare import declare_config
from jointrag.lab.stories import Cast, answer, ask, casts, find, gather, keep, tell, told


def test_the_cast_is_read_off_the_graph() -> None:
    c = load_config("demo")
    (cast,) = casts(declare_config(c), c.graph.max_hops)
    assert (cast.planner, cast.retriever, cast.keeper, cast.answerer) == ("rewriter", "retriever", "filter", "answerer")
    assert cast.max_hops == c.graph.max_hops


def test_an_episode_is_told_as_a_graph_would_run_it() -> None:
    cast = Cast("rewriter", "retriever", "filter", "answerer", max_hops=2)
    question = Question("q", "?", ("Norway",), ("a", "b"))
    episode = tell(question, [ask("one"), find("a", "x"), keep("a"), ask(), answer("Norway")], cast)
    assert [d.agent for d in episode.decisions] == ["rewriter", "retriever", "filter", "rewriter", "answerer"]
    assert [d.hop for d in episode.decisions] == [0, 0, 1, 1, 1]
    assert [p.id for p in episode.decisions[2].received] == ["a", "x"]
    assert [p.id for p in episode.decisions[4].held] == ["a"] == episode.kept
    assert (episode.searches, episode.answer) == (1, "Norway")
    alone = tell(question, [*gather(Cast(answerer="answerer")), answer("Norway")], Cast(answerer="answerer"))
    assert [d.agent for d in alone.decisions] == ["answerer"]


def test_an_episode_in_words_leaves_out_what_nobody_plays() -> None:
    moves = [ask("one"), find("a"), keep(), ask(), answer("Norway", malformed=True)]
    assert told(moves, Cast("r", "s", "f", "a")) == "ask 'one'; find a; keep nothing; stop; answer 'Norway' (malformed)"
    assert told(moves, Cast(retriever="s", answerer="a")) == "find a; answer 'Norway' (malformed)"
