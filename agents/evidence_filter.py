"""EvidenceFilter: keeps the passages worth reading, as IDs under a mask, or an explicit none."""

from __future__ import annotations

from typing import Any, ClassVar

from jointrag.agents.base import FREE, Agent, State, read_prompt, unheld
from jointrag.data.types import Passage
from jointrag.graph.context import RagContext
from jointrag.graph.episode import Decision
from jointrag.llm.actions import Select
from jointrag.llm.types import Observation


class EvidenceFilter(Agent):
    """Action: tuple of kept ids. Default: keep everything. `budget`: passages a reader takes in all."""

    name = "filter"
    reads: ClassVar[tuple[str, ...]] = ("question", "passages")
    writes: ClassVar[tuple[str, ...]] = ("evidence",)

    def __init__(self, budget: int = 4, prompt: str | None = None) -> None:
        self.budget = budget
        self.action = Select(budget)
        self.instruction = read_prompt(prompt, self.name)

    def received(self, state: State) -> tuple[Passage, ...]:
        """Return the new passages of this hop."""
        return unheld(tuple(state.get("passages") or ()), tuple(state.get("evidence") or ()))

    def observe(self, state: State) -> Observation:
        """See the new passages, question and trail."""
        return Observation.of(state, self.instruction, passages=self.received(state))

    def forced(self, state: State, context: RagContext) -> Any:
        """With nothing new, or a full budget, only none is legal."""
        full = len(state.get("evidence") or ()) >= self.budget
        return () if full or not self.received(state) else FREE

    async def act(self, state: State, context: RagContext, decision: Decision) -> dict[str, Any]:
        """Remember what could be chosen from, then decide."""
        decision.received = self.received(state)
        return await super().act(state, context, decision)

    def parse(self, state: State, value: Any) -> tuple[str, ...]:
        """Return the ids behind the selected numbers."""
        shown = self.received(state)
        return tuple(shown[i].id for i in value)

    def written(self, state: State, value: Any) -> tuple[int, ...]:
        """Return the numbers of the kept ids."""
        return tuple(i for i, p in enumerate(self.received(state)) if p.id in value)

    def update(self, state: State, value: Any) -> dict[str, Any]:
        """Add the kept passages, first come first served, up to the reader's budget."""
        room = self.budget - len(state.get("evidence") or ())
        keep = set(value)
        return {"evidence": [p for p in self.received(state) if p.id in keep][: max(0, room)]}

    def default_value(self, state: State) -> tuple[str, ...]:
        """Keep everything."""
        return tuple(p.id for p in self.received(state))

    def oracle(self, state: State, context: RagContext, decision: Decision) -> Any:
        """Keep the gold passages received."""
        if context.gold is None:
            return None
        return tuple(p.id for p in decision.received if p.id in context.gold.supporting_ids)
