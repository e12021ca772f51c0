"""Rewriter: asks one or several queries, or stops; stopping is legal from the start."""

from __future__ import annotations

from typing import Any, ClassVar

from jointrag.agents.base import FREE, Agent, State, read_prompt
from jointrag.agents.labels import next_queries, plan
from jointrag.graph.context import RagContext
from jointrag.graph.episode import Decision
from jointrag.llm.actions import Queries
from jointrag.llm.types import Observation


class Rewriter(Agent):
    """Query rewriter. Its action is a tuple of queries, () = stop. Default: the question itself, once."""

    name = "rewriter"
    reads: ClassVar[tuple[str, ...]] = ("question",)
    writes: ClassVar[tuple[str, ...]] = ("queries", "pending")

    def __init__(self, max_queries: int = 1, max_tokens: int = 24, prompt: str | None = None) -> None:
        self.action = Queries(max_queries, max_tokens)
        self.instruction = read_prompt(prompt, self.name)

    def observe(self, state: State) -> Observation:
        """See evidence, question and trail."""
        return Observation.of(state, self.instruction)

    def forced(self, state: State, context: RagContext) -> Any:
        """At the hop limit only stopping is legal."""
        return () if int(state.get("hop") or 0) >= context.max_hops else FREE

    def update(self, state: State, value: Any) -> dict[str, Any]:
        """Add the queries to the trail."""
        return {"queries": list(value), "pending": list(value)}

    def default_value(self, state: State) -> tuple[str, ...]:
        """Ask the question itself at the first hop, then stop."""
        return () if int(state.get("hop") or 0) else (str(state["question"]),)

    def ask_nothing(self, state: State) -> tuple[str, ...]:
        """Stop."""
        return ()

    def oracle(self, state: State, context: RagContext, decision: Decision) -> Any:
        """Ask the gold query of the first gold passage not held yet; stop when all are held."""
        gold = context.gold
        if gold is None:
            return None
        if int(state.get("hop") or 0) >= context.max_hops:
            return ()
        rounds = plan(gold, context.oracle_form, lambda i: context.index.passages([i])[0])
        held = {p.id for p in state.get("evidence") or ()}
        return next_queries(rounds, held, state.get("queries") or ())[: self.action.max_queries]
