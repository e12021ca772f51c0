"""RagContext: what a running graph carries out of band: language model, index, modes, and the recorder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from jointrag.data.types import Question
from jointrag.graph.episode import Decision, Episode
from jointrag.llm.types import Candidates, Completion, Observation, Request
from jointrag.retrieval.base import Hits

MODES = ("learn", "frozen", "trunk", "warm", "default", "oracle", "swap")


class Asker(Protocol):
    """What agents need of language model and index; behind it the requests of all running episodes are batched."""

    def request(
        self,
        agent: str,
        mode: str,
        observation: Observation,
        action: Any,
        key: tuple[Any, ...],
        *,
        candidates: Candidates | None = None,
        sample: bool = False,
        seed: int = 0,
    ) -> tuple[Request, int]:
        """Return the request for `agent` in `mode` and how many passages were dropped to fit the context."""
        ...

    async def ask(self, request: Request) -> Completion:
        """Answer one request."""
        ...

    async def search(self, queries: tuple[str, ...], n: int) -> list[Hits]:
        """Search the index, one list of hits a query."""
        ...

    def label(self, action: Any, request: Request, value: Any) -> Completion:
        """Return the completion that says `value`, as if it had been the language model's: supervision."""
        ...

    def read(self, action: Any, request: Request, completion: Completion) -> Any:
        """Return what a text action says: text, queries, or selected item numbers; MalformedError if nothing."""
        ...


@dataclass
class Recorder:
    """Collects the decisions of one episode, in order of supersteps."""

    episode: Episode
    _steps: dict[Any, int] = field(default_factory=dict)
    _branches: dict[int, int] = field(default_factory=dict)

    def place(self, metadata: Mapping[str, Any]) -> tuple[int, int]:
        """Return (step, branch) for a node that starts now, from LangGraph's metadata of the running task."""
        parent = str(metadata.get("langgraph_checkpoint_ns", "")).rsplit("|", 1)[0] if "|" in str(
            metadata.get("langgraph_checkpoint_ns", "")
        ) else ""  # fmt: skip
        step = self._steps.setdefault((parent, metadata.get("langgraph_step", 0)), len(self._steps))
        branch = self._branches.get(step, 0)
        self._branches[step] = branch + 1
        return step, branch

    def add(self, decision: Decision) -> None:
        """Record a finished decision, keeping (step, branch) order."""
        self.episode.decisions.append(decision)
        self.episode.decisions.sort(key=lambda d: (d.step, d.branch))


@dataclass
class RagContext:
    """The runtime context of one invocation (LangGraph's `context_schema`)."""

    llm: Asker
    index: Any
    recorder: Recorder
    modes: Mapping[str, str] = field(default_factory=dict)  # agent -> mode; "learn" where absent
    sample: bool = False  # learning agents sample (training) or act greedily (evaluation, use)
    seed: int = 0
    gold: Question | None = None  # for oracles only; agents never see it
    oracle_form: str = "sub_question"  # label form the oracle rewriter asks in
    labels: bool = False  # oracles also record the request and completion that would say their action
    max_hops: int = 3
    spare: tuple[float, int] = (0.0, 0)  # share of plans, after so many queries, that are made to ask nothing
    retries: Counter[str] = field(default_factory=Counter)  # times each retrying edge was taken
    evidence_written: bool = True  # False: no node writes evidence, so the retriever keeps all it finds

    def spares(self, decision: Decision, asked: int) -> bool | None:
        """Return whether a plan after `asked` queries is made to ask nothing; None where it could not be."""
        share, free = self.spare
        if not (self.sample and share and decision.mode == "learn" and asked >= free):
            return None
        return Random(f"{self.seed} {decision.node} {decision.step} {decision.branch}").random() < share

    def mode(self, agent: str) -> str:
        """Return the mode of `agent` in this pass."""
        return self.modes.get(agent, "learn")
