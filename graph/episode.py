"""Episode: one question's way through the graph, as decisions in order; rewards, credit, evaluation read only this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jointrag.data.types import Passage, Question
from jointrag.llm.types import Completion, Observation, Request


@dataclass
class Decision:
    """One action of one agent with everything needed to score it and to differentiate it again.

    `value` is the parsed action: rewriter, tuple of queries (() = stop); retriever, tuple of passage ids in order;
    filter, tuple of kept ids; answerer, the answer; a user's agent, whatever `parse` returned.
    """

    agent: str
    node: str
    step: int  # ordinal of the LangGraph superstep: parallel decisions share it
    hop: int  # search rounds before this decision
    branch: int  # ordinal within the step
    mode: str
    value: Any
    observation: Observation | None = None
    received: tuple[Passage, ...] = ()  # passages it could choose among
    held: tuple[Passage, ...] = ()  # evidence before it
    request: Request | None = None  # None: no language model was asked
    completion: Completion | None = None
    update: Mapping[str, Any] = field(default_factory=dict)
    malformed: bool = False  # the default action was taken instead
    forced: bool = False  # one legal action: out of loss and statistics
    spared: bool | None = None  # True: made to ask nothing, to see what comes of it; False: might have been
    failed: str = ""  # why a tool failed: the decision is masked from the gradient
    dropped: int = 0  # passages that did not fit the context
    searches: int = 0  # queries it sent to the index

    @property
    def trains(self) -> bool:
        """True where the decision has a gradient: a learning agent's, its own or spared, not forced, no tool failed."""
        return self.mode == "learn" and self.completion is not None and not self.forced and not self.failed

    @property
    def tokens(self) -> int:
        """Tokens read and written by the language model, 0 where it was not asked."""
        if self.request is None or self.completion is None:
            return 0
        return len(self.request.context) + len(self.request.suffix) + len(self.completion.tokens)


@dataclass
class Episode:
    """One finished question. `team` and `process` are filled by the reward functions.

    team: reward term -> value (already weighted). process[i]: the same for decisions[i].
    """

    question: Question
    seed: int
    decisions: list[Decision] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)  # the final state
    error: str = ""  # a node failed: the answer is the default
    team: dict[str, float] = field(default_factory=dict)
    process: list[dict[str, float]] = field(default_factory=list)

    @property
    def answer(self) -> str:
        """The final answer ("" where the graph ended without one)."""
        return str(self.state.get("answer") or "")

    def of(self, agent: str) -> list[Decision]:
        """Return the decisions of `agent`, in order."""
        return [d for d in self.decisions if d.agent == agent]

    @property
    def spared(self) -> bool:
        """True where a plan was made to ask nothing: what follows is not the policy's doing alone."""
        return any(d.spared for d in self.decisions)

    @property
    def searches(self) -> int:
        """Queries sent to the index."""
        return sum(d.searches for d in self.decisions)

    @property
    def retrieved(self) -> list[str]:
        """Ids of all passages retrieved, in order, without duplicates."""
        return list(dict.fromkeys(p.id for d in self.decisions for p in d.update.get("passages", ())))

    @property
    def kept(self) -> list[str]:
        """Ids of the passages the answerer saw."""
        return [p.id for p in self.state.get("evidence") or ()]

    @property
    def llm_calls(self) -> int:
        """Decisions that asked the language model."""
        return sum(d.completion is not None for d in self.decisions)

    @property
    def tokens(self) -> int:
        """Tokens read and written by the language model."""
        return sum(d.tokens for d in self.decisions)
