from __future__ import annotations

import pytest

from jointrag.data.types import Passage, Question
from jointrag.graph.context import RagContext, Recorder
from jointrag.graph.episode import Decision, Episode
from jointrag.graph.state import MERGE, Passages, append, initial, larger, merge_round, replace, union, wants_search
from jointrag.llm.types import Completion, Request

A, B, C, D = (Passage(x, x.upper(), f"text {x}") for x in "abcd")


def test_a_new_round_replaces_the_last_one() -> None:
    assert merge_round(Passages([A, B], 1), Passages([C], 2)) == [C]
    assert merge_round(Passages([A], 1), Passages([], 2)) == []
    assert merge_round(None, Passages([A], 1)) == [A]


def test_branches_of_a_round_merge_by_reciprocal_rank_into_the_largest_ones_size() -> None:
    """a: 1/61, b: 1/62 + 1/61, c: 1/63, d: 1/62; three places: b, a, d."""
    merged = merge_round(Passages([A, B, C], 1), Passages([B, D], 1))
    assert merged == [B, A, D]


def test_merging_is_independent_of_order_and_of_pairs() -> None:
    branches = [Passages(x, 1) for x in ([A, B], [B, C], [D, A])]
    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 0)]
    merged = [merge_round(merge_round(branches[i], branches[j]), branches[k]) for i, j, k in orders]
    assert merged[0] == merged[1] == merged[2]
    assert merged[0].hop == 1
    assert len(merged[0]) == 2


def test_an_empty_branch_takes_no_place() -> None:
    assert merge_round(Passages([A, B], 1), Passages([], 1)) == [A, B]
    assert merge_round(Passages([], 1), Passages([A, B], 1)) == [A, B]


def test_a_plain_list_is_a_round_of_its_own() -> None:
    assert merge_round(Passages([A], 1), [B]) == [B]
    assert merge_round([A], [B]) == [B]


def test_merge_rules() -> None:
    assert append([1], [1, 2]) == [1, 1, 2]
    assert append(None, [1]) == [1]
    assert union([1, 2], [2, 3, 3]) == [1, 2, 3]
    assert union(None, [1, 1]) == [1]
    assert larger(2, 1) == 2
    assert larger(None, 1) == 1
    assert replace([1], [2]) == [2]
    assert set(MERGE) == {"replace", "append", "union", "max"}


def test_merging_leaves_its_arguments_alone() -> None:
    old, new = Passages([A, B], 1), Passages([B, C], 1)
    merge_round(old, new)
    assert (old, new) == ([A, B], [B, C])
    assert (old.rankings, new.rankings) == ([[A, B]], [[B, C]])
    listed = [1]
    append(listed, [2])
    union(listed, [2])
    assert listed == [1]


@pytest.mark.parametrize(("state", "wanted"), [({}, False), ({"pending": []}, False), ({"pending": ["q"]}, True)])
def test_wants_search(state: dict[str, list[str]], wanted: bool) -> None:
    assert wants_search(state) is wanted  # type: ignore[arg-type]


def test_an_episode_starts_with_nothing_but_the_question() -> None:
    assert initial("q") == {"question": "q", "queries": [], "pending": [], "passages": [], "evidence": [], "hop": 0}


def decision(agent: str, step: int, branch: int = 0, **more: object) -> Decision:
    return Decision(agent, agent, step, 0, branch, "learn", None, **more)  # type: ignore[arg-type]


def test_the_recorder_numbers_steps_as_they_come_and_branches_within_them() -> None:
    recorder = Recorder(Episode(Question("q", "?", ("x",)), 0))
    assert recorder.place({"langgraph_step": 3}) == (0, 0)
    assert recorder.place({"langgraph_step": 7}) == (1, 0)
    assert recorder.place({"langgraph_step": 7}) == (1, 1)
    inside = {"langgraph_step": 7, "langgraph_checkpoint_ns": "sub:1|retriever:2"}  # a subgraph's steps are its own
    assert recorder.place(inside) == (2, 0)
    assert recorder.place({"langgraph_step": 8, "langgraph_checkpoint_ns": "answerer:3"}) == (3, 0)


def test_decisions_are_kept_in_the_order_of_steps_and_branches() -> None:
    recorder = Recorder(Episode(Question("q", "?", ("x",)), 0))
    for step, branch in ((1, 1), (0, 0), (1, 0), (2, 0)):
        recorder.add(decision("x", step, branch))
    assert [(d.step, d.branch) for d in recorder.episode.decisions] == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_what_an_episode_counts() -> None:
    request = Request((), "a", "a", (1, 2, 3), (4,))
    done = Completion((5, 6), (-1.0, -1.0), ())
    e = Episode(Question("q", "?", ("x",)), 0)
    e.decisions = [
        decision("rewriter", 0, request=request, completion=done),
        decision("retriever", 1, searches=2, update={"passages": [A, B]}),
        decision("retriever", 2, searches=1, update={"passages": [B, C]}, failed="RetrievalError: down"),
        decision("answerer", 3, request=request),
    ]
    assert (e.searches, e.retrieved, e.llm_calls, e.tokens) == (3, ["a", "b", "c"], 1, 6)
    assert (e.answer, e.kept) == ("", [])
    e.state = {"answer": "y", "evidence": [A]}
    assert (e.answer, e.kept) == ("y", ["a"])
    assert [d.step for d in e.of("retriever")] == [1, 2]


def test_only_a_learning_agents_own_free_action_trains() -> None:
    done = Completion((5,), (-1.0,), ())
    assert decision("a", 0, completion=done).trains
    assert not decision("a", 0).trains
    assert not decision("a", 0, completion=done, forced=True).trains
    assert not decision("a", 0, completion=done, failed="RetrievalError: down").trains
    frozen = decision("a", 0, completion=done)
    frozen.mode = "frozen"
    assert not frozen.trains


def test_agents_learn_where_no_mode_is_given() -> None:
    context = RagContext(None, None, Recorder(Episode(Question("q", "?", ("x",)), 0)), {"a": "frozen"})  # type: ignore[arg-type]
    assert (context.mode("a"), context.mode("b")) == ("frozen", "learn")
