"""A graph written by hand in LangGraph, trained jointly: the program of the README on a small built-in world.

python examples/by_hand.py [TRUNK] [OUT]        a minute or two on one core; TRUNK is `tiny`, a folder or a hub name
"""

from __future__ import annotations

import sys
from typing import Any

from langgraph.graph import END, START, StateGraph

from jointrag import Pipeline, Trainer, evaluate
from jointrag.agents import Answerer, EvidenceFilter, Retriever, Rewriter
from jointrag.configs.schema import Config, EvalConfig, WarmStartConfig
from jointrag.data.world import WorldSpec, build
from jointrag.graph import RagContext, RagState, wants_search
from jointrag.retrieval import build_index


def main(
    trunk: str = "tiny",
    out: str = "runs/by_hand",
    updates: int = 3,
    episodes: int = 64,  # an update
    steps: int = 20,  # of the warm start
    questions: int = 60,  # of dev, and of test
) -> None:
    """Build the graph, train it, and say what it answers and what its filter is worth."""
    spec = WorldSpec(passages=500, train_questions=4 * questions, dev_questions=questions, test_questions=questions)
    world = build(spec)

    agents = [Rewriter(max_queries=2), Retriever(k=5), EvidenceFilter(budget=4), Answerer()]
    g: StateGraph[Any, RagContext, Any, Any] = StateGraph(RagState, context_schema=RagContext)
    for agent in agents:
        g.add_node(agent.name, agent)
    g.add_edge(START, "rewriter")
    g.add_conditional_edges("rewriter", wants_search, {True: "retriever", False: "answerer"})
    g.add_edge("retriever", "filter")
    g.add_edge("filter", "rewriter")
    g.add_edge("answerer", END)

    pipeline = Pipeline(g.compile(), agents=agents, llm=trunk, index=build_index({"type": "bm25"}, world.passages))
    config = Config(warm_start=WarmStartConfig(steps=steps, forms="title"), eval=EvalConfig(every=updates))
    trainer = Trainer(
        pipeline,
        world.train,
        world.dev,
        config=config,
        out=out,
        updates=updates,
        episodes_per_update=episodes,
        say=print,
    )
    print(f"dev F1 by update: {dict(trainer.train().dev_f1)}")

    question = world.test[0]
    print(f"\n{question.question}\n  {pipeline.invoke(question.question)['answer']}   (gold: {question.answers[0]})\n")
    for name, modes in {"all agents": {}, "without the filter": {"filter": "default"}}.items():
        found = evaluate(pipeline, world.test, modes=modes, resamples=1000).summary["f1"]
        print(f"{name}: F1 {found['mean']:.3f} {found['interval']}")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    main(*sys.argv[1:3])
