from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from jointrag import Pipeline
from jointrag.agents import Agent, Answerer, EvidenceFilter, Retriever, Rewriter
from jointrag.data.errors import ConfigError, HeadError, IndexMismatchError, RetrievalError
from jointrag.data.types import UNKNOWN, Passage, Question
from jointrag.graph import RagContext, RagState, wants_search
from jointrag.graph.context import MODES
from jointrag.graph.episode import Episode
from jointrag.graph.pipeline import head_map
from jointrag.graph.state import initial
from jointrag.llm import FreeText, Observation
from jointrag.llm.actions import MalformedError
from jointrag.llm.toy import save_toy, toy_model
from jointrag.retrieval import build_index
from jointrag.retrieval.base import Hits

Pipe = Callable[..., Pipeline]
FOUR = ("rewriter", "retriever", "filter", "answerer")


def chain(*agents: Any, state: Any = RagState) -> Any:
    """A graph of nodes one after the other; an agent under its name, a function under its own."""
    g = StateGraph(state, context_schema=RagContext)
    names = [getattr(a, "name", None) or a.__name__ for a in agents]
    for name, a in zip(names, agents, strict=True):
        g.add_node(name, a)
    for one, two in zip([START, *names], [*names, END], strict=True):
        g.add_edge(one, two)
    return g.compile()


def told(episode: Episode) -> list[tuple[Any, ...]]:
    """All that two equal episodes have in common."""
    return [
        (d.agent, d.step, d.hop, d.branch, d.value, d.malformed, d.completion and d.completion.tokens)
        for d in episode.decisions
    ]


# --- the program of interface.md ------------------------------------------------------------------------------------


class Summariser(Agent):  # a user's own agent, letter by letter
    name, action = "summariser", FreeText(max_tokens=24)
    reads, writes = ("question", "evidence"), ("summary",)

    def observe(self, state):  # type: ignore[no-untyped-def]
        return Observation.of(state, instruction="sum up the evidence")

    def update(self, state, text):  # type: ignore[no-untyped-def]
        return {"summary": text}

    def default(self, state):  # type: ignore[no-untyped-def]
        return {"summary": ""}


class WithSummary(RagState, total=False):
    summary: str


def test_the_program_of_the_interface_runs_as_it_stands(small: Any) -> None:
    agents = [Rewriter(max_queries=2), Retriever(k=5), EvidenceFilter(budget=4), Answerer()]
    g = StateGraph(RagState, context_schema=RagContext)  # an ordinary LangGraph graph
    for a in agents:
        g.add_node(a.name, a)
    g.add_edge(START, "rewriter")
    g.add_conditional_edges("rewriter", wants_search, {True: "retriever", False: "answerer"})
    g.add_edge("retriever", "filter")
    g.add_edge("filter", "rewriter")
    g.add_edge("answerer", END)
    pipeline = Pipeline(g.compile(), agents=agents, llm=toy_model(), index=small.index)
    result = pipeline.invoke(small.questions[0].question)
    assert isinstance(result["answer"], str)
    assert result["question"] == small.questions[0].question
    assert result["episode"].decisions[-1].agent == "answerer"


def test_an_index_folder_and_a_model_folder_may_be_named(small: Any, four: Any, tmp_path: Path) -> None:
    from jointrag.data.files import read_corpus  # noqa: F401  (the folder is opened with the corpus it names)

    save_toy(tmp_path / "hub", "qwen2")
    graph, agents = four()
    pipeline = Pipeline(graph, agents, llm=str(tmp_path / "hub"), index=small.index, lora={"r": 4}, dtype="float32")
    assert pipeline.llm.heads.config.r == 4
    assert isinstance(pipeline.invoke("Name the home of Ann Lee .")["answer"], str)
    with pytest.raises((ConfigError, IndexMismatchError), match="index"):
        Pipeline(*four(), llm=toy_model(), index=str(tmp_path / "nowhere"))


def test_a_users_own_agent_acts_learns_and_writes_its_key(pipe: Pipe, small: Any) -> None:
    agents = [Retriever(k=3), Summariser(), Answerer()]
    pipeline = pipe(chain(*agents, state=WithSummary), agents)
    episodes = pipeline.run(small.questions[:20], sample=True)
    for e in episodes:
        (d,) = e.of("summariser")
        assert d.trains and d.request is not None and d.request.head == "summariser"
        assert d.malformed == (e.state["summary"] == "")
        assert d.malformed or e.state["summary"] == d.value != ""
    assert pipeline.run(small.questions[:1], modes={"summariser": "default"})[0].state["summary"] == ""


def test_a_head_fits_every_graph_whose_agent_has_its_name_and_prompt(pipe: Pipe) -> None:
    two = [Retriever(k=3), Answerer()]
    small, large = pipe(chain(*two), two), pipe()
    assert small.fingerprint_of("answerer") == large.fingerprint_of("answerer")
    assert small.fingerprint_of("answerer") != small.fingerprint_of("retriever")
    assert pipe(heads="shared").fingerprint_of("shared") != large.fingerprint_of("answerer")


@pytest.mark.parametrize(
    ("update", "told"),
    [
        (None, "its update is None, expected a dict"),
        ({"summary": "x", "answer": "mine"}, "its update has the key 'answer', expected keys it declares"),
        ({"sumary": "x"}, "its update has the key 'sumary'"),
    ],
)
def test_an_agent_writes_what_it_declares(update: Any, told: str, pipe: Pipe, small: Any) -> None:
    class Odd(Summariser):
        def update(self, state, text):  # type: ignore[no-untyped-def]
            return update

        def default(self, state):  # type: ignore[no-untyped-def]
            return update

    agents = [Retriever(k=3), Odd(), Answerer()]
    with pytest.raises(ConfigError, match=f"agent 'summariser': {told}"):
        pipe(chain(*agents, state=WithSummary), agents).run(small.questions[:2])


def test_a_users_key_can_be_seen_by_the_next_agent(pipe: Pipe, small: Any) -> None:
    class Reader(Answerer):
        def observe(self, state: Mapping[str, Any]) -> Observation:
            return Observation.of(state, self.instruction, notes=("summary",))

    async def summary(state: Any) -> dict[str, Any]:
        return {"summary": "what it says"}

    agents = [Retriever(k=2), Reader()]
    pipeline = pipe(chain(agents[0], summary, agents[1], state=WithSummary), agents)
    (episode,) = pipeline.run(small.questions[:1])
    (d,) = episode.of("answerer")
    assert d.observation is not None and d.observation.notes == (("summary", "what it says"),)


# --- decisions ------------------------------------------------------------------------------------------------------


def test_decisions_are_recorded_with_step_hop_and_branch(pipe: Pipe, small: Any) -> None:
    modes = dict.fromkeys(FOUR, "oracle")
    question = next(q for q in small.questions if q.kind == "bridge")
    (e,) = pipe().run([question], modes=modes)
    assert [(d.agent, d.step, d.hop, d.branch) for d in e.decisions] == [
        ("rewriter", 0, 0, 0), ("retriever", 1, 0, 0), ("filter", 2, 1, 0),
        ("rewriter", 3, 1, 0), ("retriever", 4, 1, 0), ("filter", 5, 2, 0),
        ("rewriter", 6, 2, 0), ("answerer", 7, 2, 0),
    ]  # fmt: skip
    assert e.answer == question.answers[0]
    assert e.kept == list(question.supporting_ids)
    assert e.searches == 2
    assert e.state["queries"] == [q for hop in question.gold_queries for q in hop]
    assert [d.node for d in e.decisions] == [d.agent for d in e.decisions]
    assert not any(d.trains for d in e.decisions)


def test_what_an_agent_saw_is_in_its_decision(pipe: Pipe, small: Any) -> None:
    for e in pipe().run(small.questions[:20], sample=True):
        held: list[str] = []
        trail: list[str] = []
        shown: set[str] = set()
        for d in e.decisions:
            assert [p.id for p in d.held] == held
            if d.observation is not None and d.agent != "retriever":
                assert list(d.observation.trail) == trail
            if d.agent == "retriever":
                assert set(d.value) <= {p.id for p in d.received}
                assert not set(d.value) & (set(held) | shown)  # who asks the same again sees the next ones
                assert len(d.value) <= 4
                shown |= set(d.value)
            if d.agent == "filter":
                assert set(d.value) <= {p.id for p in d.received}
            held += [p.id for p in d.update.get("evidence", ())]
            trail += d.update.get("queries", ())
        assert held == e.kept and len(held) <= 3
        assert trail == e.state["queries"]


def test_recorded_log_probs_are_those_of_the_update(pipe: Pipe, small: Any) -> None:
    for activation in ("late", "everywhere"):
        pipeline = pipe(toy={"activation": activation}, temperature={"answerer": 0.7, "retriever": 2.0})
        episodes = pipeline.run(small.questions[:24], sample=True)
        mine = [d for e in episodes for d in e.decisions if d.trains]
        assert {d.agent for d in mine} == set(FOUR)
        acts = [(d.request, d.completion) for d in mine]
        pipeline.llm.forget()
        for chunk in pipeline.llm.chunks(acts, size=16):  # type: ignore[arg-type]
            logp, _ = pipeline.llm.evaluate(chunk)
            for b, row in enumerate(chunk.rows):
                done = acts[row][1]
                assert done is not None
                assert np.allclose(done.logprobs, logp[b, : len(done.tokens)].tolist(), atol=1e-4)


def test_the_same_seed_gives_the_same_episodes_whatever_runs_beside_them(pipe: Pipe, small: Any) -> None:
    questions = small.questions[:16]
    seeds = list(range(16))
    one = pipe().run(questions, sample=True, seeds=seeds)
    few = pipe().run(questions, sample=True, seeds=seeds, concurrency=3)
    back = pipe().run(questions[::-1], sample=True, seeds=seeds[::-1])[::-1]
    other = pipe().run(questions, sample=True, seeds=[s + 100 for s in seeds])
    assert [told(e) for e in one] == [told(e) for e in few] == [told(e) for e in back]
    assert [told(e) for e in one] != [told(e) for e in other]


def test_the_same_question_twice_is_sampled_twice(pipe: Pipe, small: Any) -> None:
    a, b = pipe().run([small.questions[0]] * 2, sample=True, seeds=[1, 2])
    assert told(a) != told(b)


def test_episodes_are_answered_in_batches(pipe: Pipe, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipe()
    sizes: list[int] = []
    plain = pipeline.llm.generate
    monkeypatch.setattr(pipeline.llm, "generate", lambda rs: sizes.append(len(rs)) or plain(rs))
    episodes = pipeline.run(small.questions[:32], sample=True)
    assert sizes[0] == 32  # every episode's first rewriter together
    assert len(sizes) <= max(len(e.decisions) for e in episodes) + 4
    assert sum(sizes) == sum(e.llm_calls for e in episodes)


# --- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [m for m in MODES if m != "swap"])
@pytest.mark.parametrize("agent", FOUR)
def test_every_agent_runs_in_every_mode(agent: str, mode: str, pipe: Pipe, small: Any) -> None:
    pipeline = pipe()
    for head in FOUR:
        pipeline.llm.heads.copy(head, f"{head}@warm")
    episodes = pipeline.run(small.questions[:6], modes={agent: mode}, sample=True)
    for e in episodes:
        assert not e.error
        for d in e.decisions:
            if d.agent == agent:
                assert d.mode == mode
                assert d.trains == (mode == "learn" and not d.forced)
                if mode in ("default", "oracle"):
                    assert d.completion is None
                elif d.request is not None:
                    assert d.request.sample == (mode == "learn")
                    assert d.request.head == {"trunk": None, "warm": f"{agent}@warm"}.get(mode, agent)


def test_swapped_agents_act_with_the_other_head(pipe: Pipe, small: Any) -> None:
    pipeline = pipe()
    pipeline.llm.heads.copy("answerer", "answerer@swap")
    torch.manual_seed(0)
    state = pipeline.llm.heads.state("answerer@swap")
    pipeline.llm.heads.set_state("answerer@swap", {k: torch.randn(v.shape) for k, v in state.items()})
    own, swapped = (pipeline.run(small.questions[:8], modes={"answerer": m}) for m in ("frozen", "swap"))
    assert [told(e)[:-1] for e in own] == [told(e)[:-1] for e in swapped]
    assert [told(e)[-1] for e in own] != [told(e)[-1] for e in swapped]


def test_default_actions_are_those_of_the_design(pipe: Pipe, small: Any) -> None:
    """The question itself, once; the index's own order; keep everything; the first passage's title."""
    pipeline = pipe()
    modes = dict.fromkeys(FOUR, "default")
    for q, e in zip(small.questions[:8], pipeline.run(small.questions[:8], modes=modes), strict=True):
        first = small.index.search([q.question], 4)[0].ids
        assert e.state["queries"] == [q.question]
        assert e.retrieved == list(first)
        assert e.kept == list(first[:3])  # the reader's budget
        assert e.answer == small.index.passages(first[:1])[0].title


def test_unknown_agents_and_modes_are_refused(pipe: Pipe) -> None:
    pipeline = pipe()
    with pytest.raises(ConfigError, match="Did you mean 'filter'"):
        pipeline.invoke("q", modes={"fliter": "default"})
    with pytest.raises(ConfigError, match="Did you mean 'default'"):
        pipeline.invoke("q", modes={"filter": "defualt"})
    for mode in ("warm", "swap"):  # else the bare trunk would act, and nobody would know
        with pytest.raises(ConfigError, match=f"filter@{mode}"):
            pipeline.invoke("q", modes={"filter": mode})


def test_oracles_answer_everything(pipe: Pipe, small: Any) -> None:
    episodes = pipe().run(small.questions, modes=dict.fromkeys(FOUR, "oracle"))
    assert [e.answer for e in episodes] == [q.answers[0] for q in small.questions]
    assert all(set(e.kept) == set(e.question.supporting_ids) for e in episodes if e.question.answerable)


def test_the_gold_never_reaches_an_agent_that_acts(pipe: Pipe, small: Any) -> None:
    bare = [Question(q.id, q.question, ("other",)) for q in small.questions[:12]]
    seeds = list(range(12))
    pipeline = pipe()
    with_gold, without = (pipeline.run(q, sample=True, seeds=seeds) for q in (small.questions[:12], bare))
    assert [told(e) for e in with_gold] == [told(e) for e in without]


def test_labels_say_what_the_oracle_did(pipe: Pipe, small: Any) -> None:
    pipeline = pipe()
    modes = dict.fromkeys(FOUR, "oracle")
    scheduler = pipeline.scheduler()
    for e in pipeline.run(small.questions[:20], modes=modes, labels=True, oracle_form="title"):
        for d in e.decisions:
            if d.completion is None:
                continue
            agent = pipeline.agent(d.agent)
            said = scheduler.read(agent.action, d.request, d.completion)  # type: ignore[arg-type]
            if d.agent == "filter":
                assert tuple(d.received[i].id for i in said) == d.value
            elif d.agent == "retriever":
                gold = e.question.supporting_ids  # the label is gold first; what others see of it is shuffled
                assert set(said) <= set(gold) and set(said) == {i for i in d.value if i in gold}
            else:
                assert said == d.value
            assert d.agent == "retriever" or len(d.completion.masks) == len(d.completion.tokens)
    first = [
        d.value[0] in e.question.supporting_ids
        for e in pipeline.run(small.questions, modes=modes, labels=True)
        for d in e.of("retriever")
        if set(d.value) & set(e.question.supporting_ids)
    ]
    assert not all(first), "whoever learns from these labels would learn that gold comes first"
    acts = [(d.request, d.completion) for e in pipeline.run(small.questions[:9], modes=modes, labels=True)
            for d in e.decisions if d.completion is not None]  # fmt: skip
    for chunk in pipeline.llm.chunks(acts):  # type: ignore[arg-type]
        logp, _ = pipeline.llm.evaluate(chunk)
        assert bool(torch.isfinite(logp).all())


def test_a_label_too_long_to_be_said_is_none(pipe: Pipe, small: Any) -> None:
    agents = [Retriever(k=2), Answerer(max_tokens=3)]
    pipeline = pipe(chain(*agents), agents)
    question = Question("q", small.questions[0].question, ("a very long answer in many words",), ())
    (e,) = pipeline.run([question], modes={"answerer": "oracle"}, labels=True)
    assert e.answer == question.answers[0]
    assert e.of("answerer")[0].completion is None


def test_labels_leave_out_passages_that_were_dropped(pipe: Pipe, small: Any) -> None:
    pipeline = pipe(toy={"max_context": 60})
    modes = dict.fromkeys(FOUR, "oracle")
    for e in pipeline.run(small.questions[:20], modes=modes, labels=True):
        for d in e.of("filter"):
            if d.completion is not None:
                assert d.dropped > 0 and d.observation is not None
                shown = pipeline.scheduler().read(pipeline.agent("filter").action, d.request, d.completion)  # type: ignore[arg-type]
                assert all(i < len(d.observation.passages) for i in shown)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_malformed_output_takes_the_default_and_is_marked(pipe: Pipe, small: Any) -> None:
    class Strict(Answerer):
        def parse(self, state: Mapping[str, Any], value: Any) -> Any:
            raise MalformedError("never good enough")

    agents = [Retriever(k=2), Strict()]
    for e in pipe(chain(*agents), agents).run(small.questions[:6], sample=True):
        (d,) = e.of("answerer")
        assert d.malformed and d.trains and not e.error
        assert d.value == e.answer == e.state["evidence"][0].title


def test_an_output_without_an_end_is_malformed(pipe: Pipe, small: Any) -> None:
    agents = [Retriever(k=2), Answerer(max_tokens=1)]  # one token of text leaves no room for the end
    for e in pipe(chain(*agents), agents).run(small.questions[:4]):
        (d,) = e.of("answerer")
        assert d.completion is not None and d.completion.cut and d.malformed


def test_a_toy_models_nonsense_never_fails_an_episode(pipe: Pipe, small: Any) -> None:
    episodes = pipe(temperature=dict.fromkeys(FOUR, 3.0)).run(small.questions, sample=True)
    assert not any(e.error for e in episodes)
    assert all(e.answer for e in episodes)
    assert any(d.malformed for e in episodes for d in e.decisions)


class Flaky:
    """The small index, failing on every search but that of one query."""

    def __init__(self, index: Any, error: Exception, good: str = "") -> None:
        self.index, self.error, self.good = index, error, good

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)

    def search(self, queries: Sequence[str], n: int) -> list[Hits]:
        if list(queries) == [self.good]:
            hits: list[Hits] = self.index.search(queries, n)
            return hits
        raise self.error


@pytest.mark.parametrize("error", [RetrievalError("away"), TimeoutError("slow"), ConnectionResetError("gone")])
def test_a_failing_search_is_marked_and_the_episode_goes_on(
    error: Exception, pipe: Pipe, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipe()
    first, *others = small.questions[:5]
    pipeline.index = Flaky(small.index, error, first.question)  # type: ignore[assignment]
    alive, *rest = pipeline.run([first, *others], modes={"rewriter": "default"}, sample=True, concurrency=1)
    assert not any(d.failed for d in alive.decisions)
    for e in rest:
        (d,) = e.of("retriever")
        assert str(error) in d.failed and not d.trains and d.value == ()
        assert d.searches == 1
        assert e.state["hop"] == 1 and not e.error
        assert e.of("filter")[0].forced  # nothing to choose from
        assert e.of("answerer")


def test_an_index_that_never_answers_is_an_error(pipe: Pipe, small: Any) -> None:
    pipeline = pipe()
    pipeline.index = Flaky(small.index, RetrievalError("away"))  # type: ignore[assignment]
    with pytest.raises(RetrievalError, match="every search failed, the first with RetrievalError: away"):
        pipeline.run(small.questions[:3], modes={"rewriter": "default"})


def test_a_models_failure_is_not_blamed_on_a_node(pipe: Pipe, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipe()

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(pipeline.llm, "generate", full)
    with pytest.raises(torch.OutOfMemoryError):
        pipeline.run(small.questions[:3])


def test_a_raising_node_is_recorded_and_the_other_episodes_go_on(pipe: Pipe, small: Any) -> None:
    bad = small.questions[2].question

    def check(state: RagState) -> dict[str, Any]:
        if state["question"] == bad:
            raise KeyError("no such thing")
        return {}

    agents = [Retriever(k=2), Answerer()]
    pipeline = pipe(chain(agents[0], check, agents[1]), agents)
    questions = small.questions[:6]
    episodes = pipeline.run(questions)
    for q, e in zip(questions, episodes, strict=True):
        assert (e.error == "KeyError: 'no such thing'") == (q.question == bad)
        assert (e.answer == "") == bool(e.error)
    assert [d.agent for d in episodes[2].decisions] == ["retriever"]
    with pytest.raises(ConfigError, match="KeyError"):
        pipeline.run([q for q in questions if q.question == bad])
    with pytest.raises(KeyError):
        pipeline.invoke(bad)


def test_a_loop_without_an_end_is_an_error_of_its_episode(pipe: Pipe, small: Any) -> None:
    retriever, answerer = Retriever(k=2), Answerer()
    g = StateGraph(RagState, context_schema=RagContext)
    g.add_node("retriever", retriever)
    g.add_node("answerer", answerer)
    g.add_edge(START, "retriever")
    bad = small.questions[0].question
    g.add_conditional_edges("retriever", lambda s: "retriever" if s["question"] == bad else "answerer")
    g.add_edge("answerer", END)
    episodes = pipe(g.compile(), [retriever, answerer]).run(small.questions[:3])
    assert "supersteps" in episodes[0].error
    assert not episodes[1].error


def test_the_hop_cap_is_terminal(pipe: Pipe, small: Any) -> None:
    """A rewriter that would never stop: forced to at the cap, out of loss and statistics."""

    class Endless(Rewriter):
        def parse(self, state: Mapping[str, Any], value: Any) -> Any:
            return (f"again {state.get('hop')}",)

        def default_value(self, state: Mapping[str, Any]) -> tuple[str, ...]:
            return self.parse(state, "")

    for cap in (1, 3):
        agents = [Endless(max_tokens=60), Retriever(k=2), Answerer()]
        g = StateGraph(RagState, context_schema=RagContext)
        for a in agents:
            g.add_node(a.name, a)
        g.add_edge(START, "rewriter")
        g.add_conditional_edges("rewriter", wants_search, {True: "retriever", False: "answerer"})
        g.add_edge("retriever", "rewriter")
        g.add_edge("answerer", END)
        pipeline = pipe(g.compile(), agents, max_hops=cap)
        for e in pipeline.run(small.questions[:3], modes={"rewriter": "default"}):
            assert e.state["hop"] == cap
        for e in pipeline.run(small.questions[:3]):
            assert e.state["hop"] == cap
            *asked, last = e.of("rewriter")
            assert len(asked) == cap and not any(d.forced for d in asked)
            assert last.forced and last.value == () and not last.trains
            assert e.answer


def test_agents_outside_of_a_pipeline_say_what_to_do(four: Any) -> None:
    graph, _ = four()
    with pytest.raises(ConfigError, match="RagContext"):
        asyncio.run(graph.ainvoke(initial("q")))


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_without_a_filter_evidence_is_everything_retrieved(pipe: Pipe, small: Any) -> None:
    agents = [Rewriter(), Retriever(k=3), Answerer()]
    g = StateGraph(RagState, context_schema=RagContext)
    for a in agents:
        g.add_node(a.name, a)
    g.add_edge(START, "rewriter")
    g.add_conditional_edges("rewriter", wants_search, {True: "retriever", False: "answerer"})
    g.add_edge("retriever", "rewriter")
    g.add_edge("answerer", END)
    pipeline = pipe(g.compile(), agents)
    assert not pipeline.evidence_written
    bridge = [q for q in small.questions if q.kind == "bridge"][:5]
    for e in pipeline.run(bridge, modes={"rewriter": "oracle", "retriever": "oracle"}):
        assert len(e.of("retriever")) == 2
        assert e.kept == e.retrieved and len(e.kept) == 6


def test_a_retriever_without_a_rewriter_asks_the_question(pipe: Pipe, small: Any) -> None:
    agents = [Retriever(k=3), EvidenceFilter(budget=2), Answerer()]
    for q, e in zip(small.questions[:4], pipe(chain(*agents), agents).run(small.questions[:4]), strict=True):
        assert e.state["queries"] == [q.question]
        assert [d.agent for d in e.decisions] == ["retriever", "filter", "answerer"]


def fan_out(agents: Sequence[Any], after: Any) -> Any:
    """rewriter, one retriever branch a query, then the rest once."""
    g = StateGraph(RagState, context_schema=RagContext)
    for a in agents:
        g.add_node(a.name, a)
    g.add_node("after", after)
    g.add_edge(START, "rewriter")
    g.add_conditional_edges(
        "rewriter",
        lambda s: [Send("retriever", {**s, "pending": [q]}) for q in s["pending"]] or "answerer",
        ["retriever", "answerer"],
    )
    g.add_edge("retriever", "after")
    g.add_edge("after", "filter")
    g.add_edge("filter", "answerer")
    g.add_edge("answerer", END)
    return g.compile()


def test_parallel_retrievers_share_a_step_and_merge_by_reciprocal_rank(pipe: Pipe, small: Any) -> None:
    counts: list[int] = []

    def after(state: RagState) -> dict[str, Any]:
        counts.append(len(state["passages"]))
        return {}

    class Two(Rewriter):
        def default_value(self, state: Mapping[str, Any]) -> tuple[str, ...]:
            return first, second

    first, second = (p.title for p in small.world.passages[:2])
    agents = [Two(max_queries=2), Retriever(k=4), EvidenceFilter(budget=3), Answerer()]
    pipeline = pipe(fan_out(agents, after), agents)
    (e,) = pipeline.run(small.questions[:1], modes={"rewriter": "default", "retriever": "default"})
    assert counts == [4]  # what follows runs once, on the largest branch's size
    a, b = e.of("retriever")
    assert (a.step, b.step, a.branch, b.branch) == (1, 1, 0, 1)
    assert [d.step for d in e.decisions] == [0, 1, 1, 2, 3]
    assert e.state["hop"] == 1 and e.searches == 2
    score: dict[str, float] = {}
    for branch in (a, b):
        for rank, i in enumerate(branch.value, 1):
            score[i] = score.get(i, 0.0) + 1 / (60 + rank)
    merged = [p.id for p in e.state["passages"]]
    assert sorted(score, key=lambda i: -score[i])[:4] == merged or sorted(score[i] for i in merged) == sorted(
        sorted(score.values())[-4:]
    )
    assert len(set(merged)) == 4


def test_parallel_branches_sample_with_randomness_of_their_own(pipe: Pipe, small: Any) -> None:
    """The same query in both branches: equal candidates, two orderings over many episodes."""

    class Twice(Rewriter):
        def default_value(self, state: Mapping[str, Any]) -> tuple[str, ...]:
            return ("person", "person")

    agents = [Twice(max_queries=2), Retriever(k=4), EvidenceFilter(budget=3), Answerer()]
    pipeline = pipe(fan_out(agents, lambda s: {}), agents, temperature={"retriever": 9.0})
    episodes = pipeline.run(small.questions[:8], modes={"rewriter": "default"}, sample=True)
    assert any(e.of("retriever")[0].value != e.of("retriever")[1].value for e in episodes)
    again = pipeline.run(small.questions[:8], modes={"rewriter": "default"}, sample=True)
    assert [told(e) for e in episodes] == [told(e) for e in again]


def test_a_users_synchronous_node_fires_once_an_episode(pipe: Pipe, small: Any) -> None:
    seen: list[str] = []

    def count(state: RagState) -> dict[str, Any]:
        seen.append(state["question"])
        return {}

    agents = [Retriever(k=2), Answerer()]
    pipeline = pipe(chain(agents[0], count, agents[1]), agents)
    sizes: list[int] = []
    plain = pipeline.llm.generate
    pipeline.llm.generate = lambda rs: sizes.append(len(rs)) or plain(rs)  # type: ignore[method-assign, assignment, func-returns-value]
    pipeline.run(small.questions[:30], sample=True)
    assert sorted(seen) == sorted(q.question for q in small.questions[:30])
    assert sizes == [30, 30]  # and it does not break the batches up


def test_a_subgraph_is_a_node_like_any_other(pipe: Pipe, small: Any) -> None:
    retriever, answerer = Retriever(k=2), Answerer()
    g = StateGraph(RagState, context_schema=RagContext)
    inner = StateGraph(RagState, context_schema=RagContext)
    inner.add_node("retriever", retriever)
    inner.add_edge(START, "retriever")
    inner.add_edge("retriever", END)
    compiled = inner.compile()

    async def sub(state: RagState, runtime: Any) -> dict[str, Any]:
        out = await compiled.ainvoke(state, context=runtime.context)
        return {k: out[k] for k in ("passages", "evidence", "hop")}

    g.add_node("sub", sub)
    g.add_node("answerer", answerer)
    g.add_edge(START, "sub")
    g.add_edge("sub", "answerer")
    g.add_edge("answerer", END)
    (e,) = pipe(g.compile(), [retriever, answerer]).run(small.questions[:1])
    assert [d.agent for d in e.decisions] == ["retriever", "answerer"]
    assert len({d.step for d in e.decisions}) == 2
    assert len(e.kept) == 2


# --- ordinary use ---------------------------------------------------------------------------------------------------


def test_invoke_batch_and_stream_tell_the_same(pipe: Pipe, small: Any) -> None:
    pipeline = pipe()
    texts = [q.question for q in small.questions[:3]]
    answers = [pipeline.invoke(t)["answer"] for t in texts]
    assert [r["answer"] for r in pipeline.batch(texts)] == answers
    assert pipeline.invoke({"question": texts[0]})["answer"] == answers[0]
    for text, answer in zip(texts, answers, strict=True):
        updates = list(pipeline.stream(text))
        assert [next(iter(u)) for u in updates][-1] == "answerer"
        assert updates[-1]["answerer"]["answer"] == answer


def test_everything_works_inside_a_running_loop(pipe: Pipe, small: Any) -> None:
    pipeline = pipe()
    text = small.questions[0].question

    async def notebook() -> list[str]:
        streamed = [u async for u in pipeline.astream(text)]
        return [
            pipeline.invoke(text)["answer"],
            (await pipeline.ainvoke(text))["answer"],
            pipeline.run(small.questions[:1])[0].answer,
            streamed[-1]["answerer"]["answer"],
        ]

    assert len(set(asyncio.run(notebook()))) == 1


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_question_is_refused(question: str, pipe: Pipe) -> None:
    pipeline = pipe()
    for ask in (pipeline.invoke, lambda q: pipeline.batch([q]), lambda q: list(pipeline.stream(q))):
        with pytest.raises(ConfigError, match="empty question"):
            ask(question)


def test_no_questions_give_no_episodes(pipe: Pipe) -> None:
    assert pipe().run([]) == []
    assert pipe().batch([]) == []


# --- heads ----------------------------------------------------------------------------------------------------------


def test_head_maps() -> None:
    agents = [Rewriter(), Retriever(trainable=False), EvidenceFilter(), Answerer()]
    assert head_map(agents, "separate") == {"rewriter": "rewriter", "filter": "filter", "answerer": "answerer"}
    assert set(head_map(agents, "shared").values()) == {"shared"}
    one = head_map(agents, {"finding": ["rewriter", "filter"]})
    assert one == {"rewriter": "finding", "filter": "finding", "answerer": "answerer"}
    for wrong, says in (
        ("sharde", "separate, shared"),
        ({"x": ["fitler"]}, "Did you mean 'filter'"),
        ({"x": ["filter"], "y": ["filter"]}, "two heads"),
    ):
        with pytest.raises(ConfigError, match=says):
            head_map(agents, wrong)


@pytest.mark.parametrize("heads", ["shared", {"finding": ["rewriter", "retriever"], "reading": ["filter", "answerer"]}])
def test_agents_that_share_a_head_act_with_it_and_recompute(heads: Any, pipe: Pipe, small: Any) -> None:
    pipeline = pipe(heads=heads)
    names = {"shared"} if heads == "shared" else {"finding", "reading"}
    assert set(pipeline.llm.heads.names) == {*names, "critic"}
    acts = [(d.request, d.completion) for e in pipeline.run(small.questions[:16], sample=True)
            for d in e.decisions if d.trains]  # fmt: skip
    for chunk in pipeline.llm.chunks(acts):  # type: ignore[arg-type]
        assert chunk.head in names
        logp, _ = pipeline.llm.evaluate(chunk)
        for b, row in enumerate(chunk.rows):
            done = acts[row][1]
            assert done is not None
            assert np.allclose(done.logprobs, logp[b, : len(done.tokens)].tolist(), atol=1e-4)


def test_a_retriever_that_is_a_plain_tool_has_no_head_and_takes_no_step(pipe: Pipe, small: Any) -> None:
    agents = [Retriever(k=3, trainable=False), Answerer()]
    pipeline = pipe(chain(*agents), agents)
    assert pipeline.llm.heads.names == ["answerer", "critic"]
    for q, e in zip(small.questions[:4], pipeline.run(small.questions[:4], sample=True), strict=True):
        (d,) = e.of("retriever")
        assert not d.trains and d.completion is None
        assert list(d.value) == list(small.index.search([q.question], 3)[0].ids)


def test_two_agents_of_one_class_need_two_names(pipe: Pipe, small: Any) -> None:
    with pytest.raises(ConfigError, match="distinct"):
        pipe(chain(Retriever(k=2)), [Answerer(), Answerer()])
    early = Answerer()
    early.name = "draft"
    agents = [Retriever(k=2), early, Answerer()]
    (e,) = pipe(chain(*agents), agents).run(small.questions[:1])
    assert [d.agent for d in e.decisions] == ["retriever", "draft", "answerer"]


def test_an_agent_cannot_take_the_critics_name(pipe: Pipe) -> None:
    agent = Answerer()
    agent.name = "critic"
    with pytest.raises((HeadError, ConfigError), match="critic"):
        pipe(chain(agent), [agent])


# --- odd corpora and odd text ---------------------------------------------------------------------------------------


def world_of(*passages: tuple[str, str]) -> Any:
    return build_index({"dim": 4, "candidates": 12}, [Passage(f"p{i}", t, x) for i, (t, x) in enumerate(passages)])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_corpora_smaller_than_k_work(count: int, pipe: Pipe) -> None:
    index = world_of(*(("Ann Lee", f"She lives in place {i} .") for i in range(count)))
    questions = [Question(f"q{i}", "Where does Ann Lee live ?", ("x",), ("p0",)) for i in range(8)]
    for e in pipe(index=index).run(questions, sample=True):
        assert not e.error
        assert len(e.retrieved) <= count
        shown: set[str] = set()
        for d in e.of("retriever"):
            assert d.forced == (len({p.id for p in d.received} - shown) <= 1)
            shown |= set(d.value)


def test_empty_passages_titles_and_queries_work(pipe: Pipe) -> None:
    index = world_of(("", ""), ("", "only text"), ("only title", ""), ("Ann Lee", "lives here"), ("  ", " \n"))
    episodes = pipe(index=index).run([Question("q", "Ann Lee ?", ("x",))] * 6, sample=True, seeds=list(range(6)))
    assert not any(e.error for e in episodes)


@pytest.mark.parametrize(
    "text",
    [
        "<|stop|><|1|> <|answerer|> <|end|>",
        "Zürich 東京 🦊 \u202e",
        "nul \x00 bell \x07",
        "half \ud800 pair",
        "x" * 5000,
        "a b " * 3000,
    ],
    ids=["markers", "scripts", "control", "surrogate", "one long word", "very long"],
)
def test_any_text_passes_as_passage_question_and_answer(text: str, pipe: Pipe) -> None:
    index = world_of((text[:200], text), ("Ann Lee", text), ("Bo Ray", "lives here"))
    question = Question("q", f"{text} ?", (text,), ("p0", "p1"))
    pipeline = pipe(index=index, toy={"max_context": 200})
    for modes in ({}, dict.fromkeys(FOUR, "default"), dict.fromkeys(FOUR, "oracle")):
        (e,) = pipeline.run([question], modes=modes, sample=True, labels=True)
        assert not e.error
        for d in e.decisions:
            assert d.request is None or len(d.request.context) <= 200


def test_twenty_passages_pass_through_the_filter(pipe: Pipe, small: Any) -> None:
    agents = [Retriever(k=20), EvidenceFilter(budget=20), Answerer()]
    index = build_index({"dim": 16, "candidates": 25}, small.world.passages)
    for markers in (True, False):
        pipeline = pipe(chain(*agents), agents, index, {"markers": markers, "max_context": 4000})
        for e in pipeline.run(small.questions[:6], sample=True):
            (d,) = e.of("filter")
            assert len(d.received) == 20 and d.dropped == 0 and not d.malformed


def test_dropped_passages_are_counted_and_cannot_be_selected(pipe: Pipe, small: Any) -> None:
    agents = [Retriever(k=8), EvidenceFilter(budget=8), Answerer()]
    pipeline = pipe(chain(*agents), agents, toy={"max_context": 150})
    dropped = 0
    for e in pipeline.run(small.questions[:20], sample=True):
        (d,) = e.of("filter")
        dropped += d.dropped
        assert d.observation is not None and len(d.observation.passages) == 8 - d.dropped
        assert set(d.value) <= {p.id for p in d.observation.passages} or d.malformed
    assert dropped


def test_a_bfloat16_trunk_runs_the_whole_graph(pipe: Pipe, small: Any) -> None:
    episodes = pipe(toy={"dtype": torch.bfloat16}).run(small.questions[:12], sample=True)
    assert not any(e.error for e in episodes)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_hub_path_runs_the_whole_graph(arch: str, pipe: Pipe, small: Any, tmp_path: Path, four: Any) -> None:
    graph, agents = four()
    save_toy(tmp_path, arch)
    pipeline = Pipeline(graph, agents, llm=str(tmp_path), index=small.index, max_context=2000)
    episodes = pipeline.run(small.questions[:8], sample=True)
    assert not any(e.error for e in episodes)
    assert pipeline.fingerprint == Pipeline(*four(), llm=str(tmp_path), index=small.index).fingerprint


def test_unanswerable_is_told_by_the_word_unknown(pipe: Pipe, small: Any) -> None:
    missing = [q for q in small.questions if not q.answerable]
    assert missing and all(q.answers == (UNKNOWN,) for q in missing)


class Counted(TypedDict, total=False):
    question: str
    answer: str
    evidence: list[Passage]


def test_a_users_own_small_state_works(pipe: Pipe, small: Any) -> None:
    agents = [Answerer()]
    (e,) = pipe(chain(*agents, state=Counted), agents).run(small.questions[:1])
    assert e.answer and not e.error
