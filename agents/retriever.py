"""Retriever: orders the index's candidates; untrained and greedy it is exactly the index."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np

from jointrag.agents.base import Agent, State, read_prompt
from jointrag.data.errors import RetrievalError
from jointrag.data.types import Passage
from jointrag.graph.context import RagContext
from jointrag.graph.episode import Decision
from jointrag.graph.state import Passages
from jointrag.llm.actions import Ranking
from jointrag.llm.types import Candidates, Observation
from jointrag.retrieval.base import Hits
from jointrag.retrieval.fusion import rrf


def zscore(scores: Any) -> Any:
    """Return (scores - mean) / std as float32; zeros where all are equal."""
    x = np.asarray(scores, dtype=np.float64)
    spread = x.std()
    return ((x - x.mean()) / spread if spread > 1e-9 else np.zeros_like(x)).astype(np.float32)


class Retriever(Agent):
    """Dense re-ranker of the top-N candidates of the unmoved query. Action: ids of k passages in order.

    Parallel queries of one call are merged by reciprocal rank before ranking. Masked are passages
    already held, and those it showed before that were let go: who asks the same again sees the next ones.
    """

    name = "retriever"
    reads: ClassVar[tuple[str, ...]] = ("question",)
    writes: ClassVar[tuple[str, ...]] = ("passages", "hop")
    fills: ClassVar[tuple[str, ...]] = ("queries", "evidence")

    def __init__(self, k: int = 5, tau: float = 0.15, trainable: bool = True, prompt: str | None = None) -> None:
        self.action = Ranking(k, tau)
        self.trainable = trainable
        self.instruction = read_prompt(prompt, self.name)

    def observe(self, state: State) -> Observation:
        """See evidence, question and the trail with the queries to answer last."""
        pending = self.pending(state)
        trail = [q for q in state.get("queries") or () if q not in pending]
        return Observation.of(state, self.instruction, trail=[*trail, *pending])

    @staticmethod
    def pending(state: State) -> list[str]:
        """Return the queries of this hop; without a rewriter the question."""
        return list(state.get("pending") or [state["question"]])

    async def act(self, state: State, context: RagContext, decision: Decision) -> dict[str, Any]:
        """Search, then order the candidates in the mode of this pass."""
        queries = self.pending(state)
        decision.searches = len(queries)
        try:
            hits = await context.llm.search(tuple(queries), context.index.candidates)
        except (RetrievalError, OSError) as e:
            decision.failed, decision.value = f"{type(e).__name__}: {e}", ()
            return self._write(state, context, [])
        candidates = self.candidates(hits, context, {p.id for p in decision.held} | self.shown(context, decision))
        decision.received = tuple(context.index.passages(candidates.ids))
        legal = [i for i, ok in zip(candidates.ids, candidates.legal, strict=True) if ok]
        mode = decision.mode
        if mode == "oracle" and context.gold is not None:
            gold = set(context.gold.supporting_ids)
            legal.sort(key=lambda i: i not in gold)
            first = tuple(candidates.ids.index(i) for i in legal[: self.action.k] if i in gold)
            if context.labels and first and len(legal) > 1 and self.trainable:
                self.label(state, context, decision, first, candidates)
        if mode in ("default", "oracle", "trunk") or not self.trainable:
            if mode == "learn":
                decision.mode = "default"  # a plain tool takes no step
            picked = legal[: self.action.k]
            if mode == "oracle" and context.labels:  # whoever learns from this must not learn that gold comes first
                random.Random(f"{context.seed}/{decision.hop}").shuffle(picked)
            decision.value = tuple(picked)
        elif len(legal) <= 1:
            decision.value, decision.forced = tuple(legal), True
        else:
            await self.ask(state, context, decision, candidates)
        by_id = {p.id: p for p in decision.received}
        return self._write(state, context, [by_id[i] for i in decision.value])

    @staticmethod
    def shown(context: RagContext, decision: Decision) -> set[str]:
        """Return the ids this agent showed in earlier steps of the episode."""
        earlier = [d for d in context.recorder.episode.of(decision.agent) if d.step < decision.step]
        return {p.id for d in earlier for p in d.update.get("passages", ())}

    def candidates(self, hits: list[Hits], context: RagContext, held: set[str]) -> Candidates:
        """Return the candidates of all queries with z-scored scores and vectors, best first."""
        if len(hits) == 1:
            ids, scores = hits[0].ids, zscore(hits[0].scores)
        else:
            merged = rrf([h.ids for h in hits])
            ids, scores = tuple(i for i, _ in merged), zscore([s for _, s in merged])
        return Candidates(ids, scores, context.index.vectors(ids), tuple(i not in held for i in ids))

    def parse(self, state: State, value: Any) -> Any:
        """The picked ids are the action."""
        return value

    def update(self, state: State, value: Any) -> dict[str, Any]:
        """Nothing yet: `act` writes the passages."""
        return {}

    def _write(self, state: State, context: RagContext, passages: list[Passage]) -> dict[str, Any]:
        hop = int(state.get("hop") or 0) + 1
        out: dict[str, Any] = {"passages": Passages(passages, hop), "hop": hop}
        if not state.get("pending") and not state.get("queries"):
            out["queries"] = self.pending(state)
        if not context.evidence_written:
            out["evidence"] = passages
        return out


__all__ = ["Retriever", "zscore"]
