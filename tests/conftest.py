from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Small:
    """A world of 500 passages, its BM25 index and 60 questions of every kind."""

    world: Any
    index: Any
    questions: list[Any]


@pytest.fixture(scope="session")
def small() -> Small:
    from jointrag.data.world import Mix, QuestionMaker, WorldSpec, generate
    from jointrag.retrieval import build_index

    world = generate(WorldSpec(passages=500), "train")
    index = build_index({"type": "bm25", "dim": 16}, world.passages)
    return Small(world, index, QuestionMaker(world, (0, 1, 2), 0).make(60, Mix(), "q"))


@pytest.fixture(scope="session")
def four() -> Callable[..., tuple[Any, list[Any]]]:
    """The compiled graph of interface.md and its four agents."""

    def build(k: int = 4, budget: int = 3, max_queries: int = 2) -> tuple[Any, list[Any]]:
        from langgraph.graph import END, START, StateGraph

        from jointrag.agents import Answerer, EvidenceFilter, Retriever, Rewriter
        from jointrag.graph import RagContext, RagState, wants_search

        agents = [Rewriter(max_queries=max_queries), Retriever(k=k), EvidenceFilter(budget=budget), Answerer()]
        g = StateGraph(RagState, context_schema=RagContext)
        for a in agents:
            g.add_node(a.name, a)
        g.add_edge(START, "rewriter")
        g.add_conditional_edges("rewriter", wants_search, {True: "retriever", False: "answerer"})
        g.add_edge("retriever", "filter")
        g.add_edge("filter", "rewriter")
        g.add_edge("answerer", END)
        return g.compile(), agents

    return build


@pytest.fixture(scope="session")
def pipe(small: Small, four: Callable[..., tuple[Any, list[Any]]]) -> Callable[..., Any]:
    """A pipeline over the small world and a toy model; a graph with its agents may replace the four."""

    def build(
        graph: Any = None,
        agents: list[Any] | None = None,
        index: Any = None,
        toy: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        from jointrag.graph.pipeline import Pipeline
        from jointrag.llm.toy import toy_model

        if graph is None:
            graph, agents = four()
        assert agents is not None
        return Pipeline(graph, agents, toy_model(**(toy or {})), index or small.index, **options)

    return build
