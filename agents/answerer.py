"""Answerer: reads the evidence and answers in a few words, or abstains."""

from __future__ import annotations

from typing import Any, ClassVar

from jointrag.agents.base import Agent, State, read_prompt
from jointrag.agents.labels import gold_answer
from jointrag.data.types import UNKNOWN
from jointrag.graph.context import RagContext
from jointrag.graph.episode import Decision
from jointrag.llm.actions import FreeText
from jointrag.llm.types import Observation


class Answerer(Agent):
    """Answerer. Action: the answer's text, "unknown" = abstain. Default: the first passage's title, else "unknown"."""

    name = "answerer"
    reads: ClassVar[tuple[str, ...]] = ("question",)
    writes: ClassVar[tuple[str, ...]] = ("answer",)

    def __init__(self, max_tokens: int = 16, prompt: str | None = None) -> None:
        self.action = FreeText(max_tokens)
        self.instruction = read_prompt(prompt, self.name)

    def observe(self, state: State) -> Observation:
        """See evidence, question and trail."""
        return Observation.of(state, self.instruction)

    def update(self, state: State, value: Any) -> dict[str, Any]:
        """Write the answer."""
        return {"answer": str(value)}

    def default_value(self, state: State) -> str:
        """Answer with the first passage's title."""
        evidence = state.get("evidence") or ()
        return str(evidence[0].title) if evidence else UNKNOWN

    def oracle(self, state: State, context: RagContext, decision: Decision) -> Any:
        """Answer what follows from the evidence held."""
        return None if context.gold is None else gold_answer(context.gold, decision.held)
