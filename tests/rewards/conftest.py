from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import pytest

from jointrag.data.types import Passage, Question
from jointrag.graph.episode import Decision, Episode
from jointrag.graph.state import Passages
from jointrag.llm.types import Completion, Observation, Request

TEXTS = {"a": "Ann Lee was born in Oslo", "b": "Oslo lies in Norway", "x": "Bo Ray bakes bread", "y": "Cy Poe sails"}


def passage(pid: str) -> Passage:
    return Passage(pid, f"Title {pid}", TEXTS.get(pid, f"text of {pid}"))


class Story:
    """An episode told by hand, one call a decision: it keeps the state as a running graph would."""

    def __init__(self, answers: Sequence[str] = ("Norway",), gold: Sequence[str] = ("a", "b"), text: str = "") -> None:
        question = Question("q1", text or "In which country was Ann Lee born?", tuple(answers), tuple(gold))
        self.episode = Episode(question, seed=0)
        self.held: list[Passage] = []
        self.trail: list[str] = []
        self.passages: list[Passage] = []
        self.pending: list[str] = []
        self.hop = self.step = 0
        self.parallel = False

    def decide(self, agent: str, value: Any, update: dict[str, Any], **more: Any) -> Self:
        same = [d for d in self.episode.decisions if d.step == self.step]
        decision = Decision(
            agent=agent,
            node=agent,
            step=self.step,
            hop=self.hop,
            branch=len(same),
            mode=more.pop("mode", "learn"),
            value=value,
            observation=Observation(self.episode.question.question, tuple(self.held), tuple(self.trail)),
            held=tuple(self.held),
            request=Request((), agent, agent, tuple(range(40)), tuple(range(8))),
            completion=Completion((1, 2), (-0.5, -0.5), ()),
            update=update,
            **more,
        )
        self.episode.decisions.append(decision)
        if not self.parallel:
            self.step += 1
        return self

    def ask(self, *queries: str, **more: Any) -> Self:
        self.decide("rewriter", queries, {"queries": list(queries), "pending": list(queries)}, **more)
        self.trail += queries
        self.pending = list(queries)
        return self

    def stop(self, **more: Any) -> Self:
        return self.ask(**more)

    def retrieve(self, *ids: str, others: Sequence[str] = (), **more: Any) -> Self:
        """Pick `ids` in this order out of them and `others`."""
        candidates = tuple(passage(i) for i in [*ids, *others])
        self.passages = Passages([passage(i) for i in ids], self.hop + 1)
        update = {"passages": self.passages, "hop": self.hop + 1}
        self.decide("retriever", ids, update, received=candidates, searches=len(self.pending), **more)
        if not self.parallel:
            self.hop += 1
        return self

    def keep(self, *ids: str, **more: Any) -> Self:
        held = {p.id for p in self.held}
        shown = tuple(p for p in self.passages if p.id not in held)
        kept = [p for p in shown if p.id in ids]
        self.decide("filter", ids, {"evidence": kept}, received=shown, **more)
        self.held += kept
        return self

    def hold(self, *ids: str) -> Self:
        """Put passages into the evidence without a decision."""
        self.held += [passage(i) for i in ids]
        return self

    def answer(self, text: str, **more: Any) -> Self:
        self.decide("answerer", text, {"answer": text}, **more)
        self.episode.state = {"answer": text, "evidence": list(self.held), "queries": list(self.trail)}
        return self

    def of(self, agent: str) -> list[int]:
        return [i for i, d in enumerate(self.episode.decisions) if d.agent == agent]


@pytest.fixture
def story() -> type[Story]:
    """The class, not an episode: a test tells as many as it compares."""
    return Story
